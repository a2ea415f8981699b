"""`python -m tools.api`: print the site's page on the API, which `tools/site.py` makes from signatures and docstrings.

Sources are read, not imported: integrations are described without what they integrate.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Modules whose public names the page describes; of packages, what they import from within.
PACKAGES = ("dualkv", "dualkv.integrations.trl", "dualkv.ops")
MODULES = (
    "dualkv",
    "dualkv.context_parallel",
    "dualkv.grpo",
    "dualkv.integrations.megatron",
    "dualkv.integrations.transformers",
    "dualkv.integrations.transformers.experts",
    "dualkv.integrations.trl",
    "dualkv.integrations.trl.online_dpo",
    "dualkv.sequence_parallel",
    "dualkv.ops",
)
HEAD = """# API

Every public name with its signature. The docstrings have arguments, shapes, dtypes and errors: `help(dualkv.pack)`.
Their letters: T packed tokens, H query heads, Hk KV heads, D head dim, Dv head dim of values, G groups, S segments, N
rollouts, M response tokens, C hidden size, V vocabulary. [veRL](verl.md) is used by its configuration, kernels and
their store by [`dualkv precompile`](deployment.md). Modules that are not here are
internal and may change with any version.
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
    def _is_method(self) -> bool:
        return self.node.col_offset > 0 and "staticmethod" not in self.decorators

    @property
    def returns(self) -> str:
        """The annotation of the return value, "" where there is none."""
        annotation = getattr(self.node, "returns", None)
        return ast.unparse(annotation) if annotation is not None else ""

    def signature(self) -> str:
        """Write the signature as in a call, a parameter a line where there are many."""
        if isinstance(self.node, ast.ClassDef):
            return f"class {self.name}"
        returns = f" -> {self.returns}" if self.returns else ""
        given = _arguments(self.node.args)
        if self._is_method:
            del given[0]
        line = f"{self.name}({', '.join(given)}){returns}"
        if len(line) <= 100 or self.node.col_offset:
            return line
        return f"{self.name}(\n{''.join(f'    {one},{chr(10)}' for one in given)}){returns}"


def _arguments(a: ast.arguments) -> list[str]:
    """Write each argument as the formatter does."""

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
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dualkv."):
            # A package offers what it imports, and says which names in `__all__`; a module offers `x as x`.
            names = [one.name for one in node.names if module in PACKAGES or one.asname == one.name]
            if names:
                there = _definitions(str(node.module))
                found |= {name: there[name] for name in names if name in there}
    if module in PACKAGES:
        found = {name: found[name] for name in _exported(module) or [] if name in found}
    names = _exported(module) or [name for name in found if not name.startswith("_")]
    return [member for name in names if name in found for member in _members(Public(f"{module}.{name}", found[name]))]


def summary(docstring: str) -> str:
    """Write the first paragraph of a docstring on one line, roles of reStructuredText as code."""
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", " ".join(docstring.partition("\n\n")[0].split()))


def page() -> str:
    """Return the page in Markdown."""
    parts = [HEAD.strip()]
    for module in MODULES:
        parts += [f"## {module}", summary(ast.get_docstring(_tree(module)) or "")]
        for item in public(module):
            text = summary(item.docstring)
            if not item.node.col_offset:
                parts += [f"### {item.name.removeprefix(module + '.')}", f"```python\n{item.signature()}\n```", text]
                continue
            line = f"- `{item.name}: {item.returns}`" if item.is_value else f"- `{item.signature()}`"
            parts += [f"{line}  \n  {text}"]
    return re.sub(r"(\n  .*)\n\n(?=- )", r"\1\n", "\n\n".join(parts)) + "\n"


if __name__ == "__main__":
    print(page(), end="")
