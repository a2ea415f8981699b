"""Runs the sources of `cute_kernels` on the stand-ins, as they are or with some text replaced."""

from __future__ import annotations
import __future__

import ast
import functools
import importlib
import re
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from tests.protocol import lanes
from tests.protocol.dsl import stand_ins

ROOT = Path(__file__).parents[2]

# Functions whose loops go over elements that are all alike here: of these loops the first round is enough. They may
# synchronize nothing.
ALIKE = {
    "accumulator.py": ("round_to", "not_finite", "remove_not_finite"),
    "bwd_contain.py": (
        "add_not_finite",
        "mark_keys",
        "not_finite",
        "remove_not_finite",
        "row_not_finite",
        "zero_hidden",
    ),
    "bwd_results.py": ("mask", "store_partial", "store_rows"),
    "bwd_window.py": ("hide",),
    "fwd_contain.py": ("add_not_finite", "contain", "is_broken"),
    "mask.py": ("apply", "keep_before", "keep_from"),
    "softmax.py": ("online_softmax", "fixed_softmax", "half_softmax", "rescale", "normalize", "cap"),
}
SYNCHRONIZES = re.compile(
    "barrier|fence|elect_one|wait|commit|gemm|load_|store_release|store_volatile|atomic|bulk|arrive"
)


class Rewrite(ast.NodeTransformer):
    """A transformer of sources for what the DSL's own preprocessor handles, conditions of lanes, and for shorter loops
    of named functions."""

    count = 0

    def __init__(self, alike: tuple[str, ...]) -> None:
        self.alike, self.left, self.short = alike, set(alike), False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        before, self.short = self.short, node.name in self.alike
        if self.short:
            self.left.discard(node.name)
            if found := SYNCHRONIZES.search(ast.unparse(node).replace(ast.get_docstring(node) or "", "")):
                raise ValueError(f"{node.name} is not of elements alone: {found.group()}")
        self.generic_visit(node)
        self.short = before
        return node

    def visit_For(self, node: ast.For) -> Any:
        self.generic_visit(node)
        if self.short:
            node.iter = self.call("first", node.iter)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        self.generic_visit(node)
        thunks = [ast.Lambda(ast.arguments([], [], None, [], [], None, []), x) for x in (node.body, node.orelse)]
        return self.call("if_expression", node.test, *thunks)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        self.generic_visit(node)
        name = {ast.Invert: "invert", ast.Not: "invert_truth"}.get(type(node.op))
        return self.call(name, node.operand) if name else node

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "ir_value":
            return self.call("ir_value", node.func.value)
        return node

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        Rewrite.count += 1
        which, old, new = (f"_{name}{Rewrite.count}" for name in ("which", "old", "new"))
        load, store = (lambda x: ast.Name(x, ast.Load())), (lambda x: ast.Name(x, ast.Store()))
        stored = {x.id for part in (node.body, node.orelse) for n in part for x in ast.walk(n)
                  if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store) and x.id[:1] != "_"}  # fmt: skip
        names = tuple(sorted(stored))

        def keep(into: str) -> list[ast.stmt]:
            scope = ast.Call(load("locals"), [], [])
            return [ast.Assign([store(into)], self.call("take", scope, ast.Constant(names)))]

        def at(which: str, j: int) -> ast.expr:
            return ast.Subscript(load(which), ast.Constant(j), ast.Load())

        def under(mask: ast.expr, body: list[ast.stmt]) -> ast.stmt:
            return ast.With([ast.withitem(self.call("lanes", mask))], body or [ast.Pass()])

        apart: list[ast.stmt] = keep(old) if names else []
        apart.append(under(load(which), node.body))
        if names:
            apart += keep(new)
            apart += [ast.Assign([store(x)], at(old, j)) for j, x in enumerate(names)]
        apart.append(under(ast.UnaryOp(ast.Invert(), load(which)), node.orelse))
        merged = ((x, self.call("merge", load(which), at(new, j), load(x))) for j, x in enumerate(names))
        apart += [ast.Assign([store(x)], value) for x, value in merged]

        def is_(value: bool) -> ast.expr:
            return ast.Compare(load(which), [ast.Is()], [ast.Constant(value)])

        last = ast.If(is_(False), node.orelse or [ast.Pass()], apart)
        return [ast.Assign([store(which)], self.call("cond", node.test)), ast.If(is_(True), node.body, [last])]

    def call(self, name: str, *args: ast.expr) -> ast.expr:
        return ast.Call(ast.Attribute(ast.Name("_lanes", ast.Load()), name, ast.Load()), list(args), [])


@functools.lru_cache(maxsize=256)
def compiled(path: Path, text: str) -> types.CodeType:
    rewrite = Rewrite(ALIKE.get(path.name, ()))
    tree = ast.fix_missing_locations(rewrite.visit(ast.parse(text)))
    if rewrite.left:
        raise ValueError(f"{path.name} has no {rewrite.left}")
    code: types.CodeType = compile(tree, str(path), "exec", __future__.annotations.compiler_flag)
    return code


class Sources:
    """Finds `cute_kernels` in its sources, with some text replaced."""

    def __init__(self, edits: tuple[tuple[str, str, str], ...]) -> None:
        self.edits = edits
        self.left = list(edits)

    def find_spec(self, name: str, _: Any = None, __: Any = None) -> ModuleSpec | None:
        if name != "cute_kernels" and not name.startswith("cute_kernels."):
            return None
        return ModuleSpec(name, self, is_package=name == "cute_kernels")  # type: ignore[arg-type]

    def create_module(self, _: ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        name = module.__name__
        path = ROOT / "cute_kernels" / ("__init__.py" if name == "cute_kernels" else f"{name.split('.')[1]}.py")
        text = path.read_text()
        for edit in self.edits:
            file, old, new = edit
            if file == path.name:
                if text.count(old) != 1:
                    raise ValueError(f"{file} has {text.count(old)} times what is to be replaced once: {old!r}")
                text = text.replace(old, new)
                self.left.remove(edit)
        module.__dict__["_lanes"] = lanes
        exec(compiled(path, text), module.__dict__)


@functools.lru_cache(maxsize=64)
def kernels(*edits: tuple[str, str, str]) -> types.SimpleNamespace:
    """The modules of `cute_kernels` on the stand-ins; edits: (file, text that it has once, what takes its place)."""
    packages = ("cutlass", "cuda", "cute_kernels")

    def ours() -> dict[str, types.ModuleType]:
        return {name: m for name, m in sys.modules.items() if name.split(".")[0] in packages}

    before, sources = ours(), Sources(edits)
    for name in before:
        del sys.modules[name]
    sys.modules.update(stand_ins())
    sys.meta_path.insert(0, sources)  # type: ignore[arg-type]
    try:
        names = "pipeline", "bwd", "fwd", "fwd_paths", "fwd_split"
        found = {name: importlib.import_module(f"cute_kernels.{name}") for name in names}
    finally:
        sys.meta_path.remove(sources)  # type: ignore[arg-type]
        for name in ours():
            del sys.modules[name]
        sys.modules.update(before)
    if sources.left:
        raise ValueError(f"no kernel imports {sources.left}")
    return types.SimpleNamespace(**found)
