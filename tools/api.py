"""`python -m tools.api`: write docs/api.md anew from signatures and docstrings; a test holds the page to that.

Sources are read, not imported: integrations are described without what they integrate.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "api.md"
# Modules whose public names the page describes; of packages (the first and the last), what they import from within.
MODULES = (
    "dualkv",
    "dualkv.grpo",
    "dualkv.integrations.transformers",
    "dualkv.integrations.trl",
    "dualkv.sequence_parallel",
    "dualkv.ops",
)
SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises")
HEAD = """# API

Made from the docstrings by `python -m tools.api`. Shapes: T packed tokens, H query heads, Hk KV heads, D head dim, G
groups, S segments, N rollouts, M response tokens, C hidden size, V vocabulary. [veRL](verl.md) is used by its
configuration, kernels and their store by [`dualkv precompile`](deployment.md). Modules that are not here are internal
and may change with any version.
"""

Definition = ast.FunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Public:
    """A public function, class, method or property: the name it is used by, and its definition."""

    name: str
    node: Definition

    @property
    def docstring(self) -> str:
        return ast.get_docstring(self.node) or ""

    @property
    def decorators(self) -> set[str]:
        return {ast.unparse(d).partition("(")[0].rpartition(".")[2] for d in self.node.decorator_list}

    @property
    def is_value(self) -> bool:
        """Whether it is read like an attribute."""
        return bool(self.decorators & {"property", "cached_property"})

    @property
    def parameters(self) -> list[ast.arg]:
        """What a caller passes."""
        if isinstance(self.node, ast.ClassDef) or self.is_value:
            return []
        a = self.node.args
        every = [*a.posonlyargs, *a.args, *a.kwonlyargs]
        return every[1:] if self._is_method else every

    @property
    def _is_method(self) -> bool:
        return self.node.col_offset > 0 and "staticmethod" not in self.decorators

    @property
    def returns(self) -> str:
        """Its annotation, "" where there is none."""
        annotation = getattr(self.node, "returns", None)
        return ast.unparse(annotation) if annotation is not None else ""

    def signature(self) -> str:
        """As one writes the call, a parameter a line where there are many."""
        if isinstance(self.node, ast.ClassDef):
            return f"class {self.name}"
        returns = f" -> {self.returns}" if self.returns else ""
        given = _arguments(self.node.args)
        if self._is_method:
            del given[0]
        line = f"{self.name}({', '.join(given)}){returns}"
        if len(line) <= 100:
            return line
        return f"{self.name}(\n{''.join(f'    {one},{chr(10)}' for one in given)}){returns}"


def _arguments(a: ast.arguments) -> list[str]:
    """As the formatter writes them."""

    def written(arg: ast.arg, default: ast.expr | None) -> str:
        if default is None:
            return ast.unparse(arg)
        return f"{ast.unparse(arg)} {'= ' if arg.annotation else '='}{ast.unparse(default)}"

    positional = [*a.posonlyargs, *a.args]
    defaults = [None] * (len(positional) - len(a.defaults)) + a.defaults
    given = [written(*pair) for pair in zip(positional, defaults, strict=True)]
    given += [f"*{a.vararg.arg}"] if a.vararg else ["*"] if a.kwonlyargs else []
    given += [written(*pair) for pair in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    return given + ([f"**{a.kwarg.arg}"] if a.kwarg else [])


def _tree(module: str) -> ast.Module:
    path = ROOT.joinpath(*module.split("."))
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def _definitions(module: str) -> dict[str, Definition]:
    """Functions and classes of a module; of an overloaded function the one with a body."""
    return {node.name: node for node in _tree(module).body if isinstance(node, Definition)}


def _exported(module: str) -> list[str] | None:
    for node in _tree(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return None


def _members(public: Public) -> Iterator[Public]:
    yield public
    if isinstance(public.node, ast.ClassDef):
        own = {node.name: node for node in public.node.body if isinstance(node, ast.FunctionDef)}
        for name, node in own.items():
            if not name.startswith("_"):
                yield Public(f"{public.name.rpartition('.')[2]}.{name}", node)


def public(module: str) -> list[Public]:
    """The public names of a module, with the methods of its classes."""
    found = _definitions(module)
    if module in ("dualkv", "dualkv.ops"):
        for node in ast.walk(_tree(module)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dualkv."):
                there = _definitions(str(node.module))
                found |= {alias.name: there[alias.name] for alias in node.names}
        found = {name: found[name] for name in _exported(module) or [] if name in found}
    names = _exported(module) or [name for name in found if not name.startswith("_")]
    return [member for name in names if name in found for member in _members(Public(f"{module}.{name}", found[name]))]


def _plain(text: str) -> str:
    """Roles of reStructuredText as code, and a paragraph on one line."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return "\n\n".join(
        part if part.startswith("    ") or part.lstrip().startswith(("- ", "    ")) else " ".join(part.split())
        for part in text.strip("\n").split("\n\n")
    )


def sections(docstring: str) -> dict[str, str]:
    """A docstring's text by its headings; under "" what stands before them."""
    parts = re.split(rf"^({'|'.join(SECTIONS)}):\n", docstring + "\n", flags=re.MULTILINE)
    found = {"": parts[0].strip("\n")}
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        lines = text.split("\n")
        until = next((i for i, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
        found[name] = "\n".join(line.removeprefix("    ") for line in lines[:until]).strip("\n")
        rest = "\n".join(lines[until:]).strip("\n")
        found[""] += f"\n\n{rest}" if rest else ""
    return found


def entries(section: str) -> dict[str, str]:
    """`name: text` entries of a section, each with its further lines."""
    found: dict[str, str] = {}
    name = ""
    for line in section.split("\n"):
        match = re.match(r"(\*{0,2}\w[\w., ]*): (.*)", line)
        if match and not line.startswith(" "):
            name, text = match.groups()
            found[name] = text
        elif name:
            found[name] += " " + line.strip()
    return found


def _described(item: Public) -> str:
    found = sections(item.docstring)
    parts = [f"```python\n{item.signature()}\n```", _plain(found.pop(""))]
    for name, text in found.items():
        listed = entries(text) if name in ("Args", "Attributes", "Raises") else {}
        lines = "\n".join(f"- `{key}`: {_plain(value)}" for key, value in listed.items())
        parts.append(f"*{name}*\n\n{lines}" if listed else f"*{name}*: {_plain(text)}")
    return "\n\n".join(part for part in parts if part)


def page() -> str:
    """docs/api.md as it is to be."""
    parts = [HEAD.strip()]
    for module in MODULES:
        about = ast.get_docstring(_tree(module)) or ""
        parts += [f"## {module}", _plain(about)]
        for item in public(module):
            if item.is_value:  # a line each, under their class
                line = f"- `{item.name}` ({item.returns}): {' '.join(item.docstring.split())}"
                parts[-1] += f"\n{line}" if parts[-1].startswith("- `") else ""
                parts += [] if parts[-1].endswith(line) else ["*Properties*", line]
            else:
                level = "####" if item.node.col_offset else "###"
                parts += [f"{level} {item.name.removeprefix(module + '.')}", _described(item)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
