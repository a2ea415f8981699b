"""Hooks of `mkdocs.yml`: the pages that lie in the repository's root join those of docs/, and links follow them."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
# Files of the root that are pages: the names of their pages.
PAGES = {"README.md": "overview.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")
IMAGE = re.compile(r"((?:!\[[^\]]*\]\(|src=\"|srcset=\"))docs/")


def on_files(files: Any, config: Any) -> Any:
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Paths from the root or from docs/ become names of pages. A link to what is no page becomes its text."""
    below = "" if page.file.src_uri in PAGES.values() else "docs"

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(below, target))
        name = PAGES.get(path, path.removeprefix("docs/"))
        return f"[{text}]({name}{anchor})" if files.get_file_from_path(name) else text

    return IMAGE.sub(r"\1", LINK.sub(link, markdown))
