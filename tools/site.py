"""Hooks of `mkdocs.yml`: pages that are not files of docs/, and links between all of them.

README, CONTRIBUTING and CHANGELOG of the repository's root are pages. The API page is made from docstrings, and links
to the package lead to it.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # mkdocs loads this file by its path

from tools import api  # noqa: E402

# Files of the root that are pages: the names of their pages.
PAGES = {"README.md": "overview.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
TARGETS = PAGES | {"dualkv/__init__.py": "api.md"}
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")
IMAGE = re.compile(r"((?:!\[[^\]]*\]\(|src=\"|srcset=\"))docs/")


def on_files(files: Any, config: Any) -> Any:
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    files.append(File.generated(config, "api.md", content=api.page()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn paths from the root or from docs/ into names of pages, and a link to what is no page into its text."""
    below = "" if page.file.src_uri in PAGES.values() else "docs"

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(below, target))
        name = TARGETS.get(path, path.removeprefix("docs/"))
        return f"[{text}]({name}{anchor})" if files.get_file_from_path(name) else text

    return IMAGE.sub(r"\1", LINK.sub(link, markdown))
