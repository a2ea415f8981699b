"""Stand-ins for the DSL's modules, and a loader that runs the sources of `cute_kernels` on them.

What a kernel computes with data is left out: registers and shared memory hold where their values come from (terms, see
`Frag`). Integers, tables and what lanes do differently are real: a number of each lane is an array of 32.
"""

from __future__ import annotations

import __future__

import ast
import contextlib
import functools
import importlib
import math
import re
import sys
import types
import zlib
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np

from tests.protocol.machine import GARBAGE, LANES, Agent, Cell, Cta, Fault, Machine

ROOT = Path(__file__).parents[2]
NO_TERMS: frozenset[Any] = frozenset()


class Now:
    """The machine that runs."""

    machine: Machine = None  # type: ignore[assignment]


def agent() -> Agent:
    return Now.machine.agent


# ---------------------------------------------------------------- numbers
class Scalar:
    """A number that is not known, made of these terms."""

    __slots__ = ("prov",)
    __array_ufunc__ = None  # arrays leave operations to it

    def __init__(self, prov: frozenset[Any]) -> None:
        self.prov = prov

    def __bool__(self) -> bool:
        raise TypeError("a number that is not known decides")

    def to(self, _: Any) -> Scalar:
        return self

    def _with(self, other: Any) -> Scalar:
        if not isinstance(other, Scalar) or other.prov is self.prov:
            return self
        kind = Data if isinstance(self, Data) or isinstance(other, Data) else Scalar
        return kind(self.prov | other.prov if self.prov and other.prov else self.prov or other.prov)

    def __neg__(self) -> Scalar:
        return self

    __hash__ = None  # type: ignore[assignment]


for _name in "add sub mul truediv floordiv mod and or xor lshift rshift".split():
    setattr(Scalar, f"__{_name}__", Scalar._with)
    setattr(Scalar, f"__r{_name}__", Scalar._with)
for _name in "lt le gt ge eq ne".split():
    setattr(Scalar, f"__{_name}__", Scalar._with)


class Data(Scalar):
    """From memory that several warps read: what it decides, it decides for all of them."""

    __slots__ = ()


UNKNOWN = Scalar(NO_TERMS)


def decide(x: Any) -> bool:
    """What a number that is not known says, for a warp."""
    random = Now.machine.schedule.random
    if isinstance(x, Data):
        return answer(x.prov, Now.machine.schedule.seed)
    return random.random() < 0.3


@functools.lru_cache(maxsize=100_000)
def answer(prov: frozenset[Any], seed: int) -> bool:
    return zlib.crc32(repr((sorted(map(repr, prov)), seed)).encode()) % 8 == 0


def known(x: Any) -> Any:
    return x if isinstance(x, Scalar | np.ndarray) else int(x)


class Number(type):
    def __call__(cls, x: Any = 0) -> Any:  # type: ignore[override]
        return cls.convert(x)


class Numeric(metaclass=Number):
    convert = staticmethod(known)


class Int16(Numeric): ...


class Int32(Numeric): ...


class Int64(Numeric): ...


class Boolean(Numeric):
    convert = staticmethod(lambda x: x if isinstance(x, Scalar | np.ndarray) else bool(x))


def _float(x: Any) -> Any:
    return x if isinstance(x, Scalar | np.ndarray) else float(x)


class Float32(Numeric):
    convert, inf = staticmethod(_float), math.inf


class BFloat16(Numeric):
    convert, width = staticmethod(_float), 16


class Float16(Numeric):
    convert, width = staticmethod(_float), 16


def first_lane(x: Any) -> int:
    """What the first lane that takes part has of a number."""
    if not isinstance(x, np.ndarray):
        return int(x)
    mask = agent().mask
    return int(x[0] if mask is None else x[mask.argmax()])


# ---------------------------------------------------------------- lanes: what the loader writes for if, a if b else c, ~a
def cond(x: Any) -> Any:
    """True or False if all lanes that take part agree, else which of the 32 do."""
    if x is True or x is False:
        return x
    if isinstance(x, np.ndarray) and x.shape == (32,):
        mask = agent().mask
        taking = x if mask is None else x[mask]
        if taking.all():
            return True
        return x.astype(bool) if taking.any() else False
    if isinstance(x, Scalar):
        return decide(x)
    return bool(x)


@contextlib.contextmanager
def lanes(which: Any) -> Iterator[None]:
    a = agent()
    old = a.mask
    a.mask = which if old is None else old & which
    try:
        yield
    finally:
        a.mask = old


def take(scope: dict[str, Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(scope.get(name) for name in names)


def merge(which: Any, a: Any, b: Any) -> Any:
    if a is b:
        return a
    if isinstance(a, Scalar) or isinstance(b, Scalar) or a is None or b is None:
        return UNKNOWN
    return np.where(which, a, b)


def if_expression(which: Any, a: Callable[[], Any], b: Callable[[], Any]) -> Any:
    if isinstance(which, Scalar):
        x, y = a(), b()
        return x if isinstance(x, Scalar) else y if isinstance(y, Scalar) else UNKNOWN
    which = cond(which)
    if which is True:
        return a()
    if which is False:
        return b()
    with lanes(which):
        x = a()
    with lanes(~which):
        y = b()
    return x if isinstance(x, Scalar) else y if isinstance(y, Scalar) else np.where(which, x, y)


def invert(x: Any) -> Any:
    return not x if isinstance(x, bool | np.bool_) else x if isinstance(x, Scalar) else ~x


def invert_truth(x: Any) -> Any:
    return ~x if isinstance(x, np.ndarray) else x if isinstance(x, Scalar) else not x


def ir_value(x: Any) -> Any:
    return x


# Functions whose loops go over elements that are all alike here: of these loops the first round is enough. They may
# synchronize nothing.
ALIKE = {
    "accumulator.py": ("round_to", "not_finite"),
    "bwd_contain.py": ("add_not_finite", "clean", "mark_keys", "not_finite", "settle"),
    "bwd_results.py": ("add_all", "mask", "store", "store_slab"),
    "fwd_contain.py": ("add_key", "contain"),
    "fwd_paths.py": ("mask_path",),
    "mask.py": ("mask",),
    "softmax.py": ("online_softmax", "fixed_softmax", "half_softmax", "rescale", "normalize"),
}
SYNCHRONIZES = re.compile("barrier|fence|elect_one|wait|commit|gemm|load_|store_release|store_volatile|atomic|bulk|arrive")


def first(rounds: Any) -> Iterator[Any]:
    for x in rounds:
        yield x
        return


class Rewrite(ast.NodeTransformer):
    """What the DSL's own preprocessor sees to: conditions of lanes. And shorter loops of functions that are named."""

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


# ---------------------------------------------------------------- shapes
def product(shape: Any) -> int:
    return math.prod(map(product, shape)) if isinstance(shape, tuple | list) else int(shape)


class Layout:
    def __init__(self, shape: Any, stride: Any = None, roles: tuple[str, ...] | None = None) -> None:
        self.shape, self.stride, self.roles = shape, stride, roles

    outer = property(lambda self: self)
    inner = property(lambda self: self)


def size(x: Any, mode: list[int] | None = None) -> int:
    if mode == [2]:
        return 1  # of an operand: a product is one
    if mode is not None:
        return product(x.shape[mode[0]])
    return x.size if isinstance(x, Frag) else product(x.shape)


# ---------------------------------------------------------------- memory
class Pointer:
    """Into shared memory (base: Region, with a stage or None), registers (Frag) or global memory (Flat, View)."""

    __slots__ = ("base", "cta", "offset", "stage")

    def __init__(self, base: Any, offset: Any = 0, stage: Any = None, cta: Cta | None = None) -> None:
        self.base, self.offset, self.stage, self.cta = base, offset, stage, cta

    def __add__(self, n: Any) -> Pointer:
        return Pointer(self.base, self.offset + n, self.stage, self.cta)

    def align(self, _: int) -> Pointer:
        return self

    def toint(self, **_: Any) -> Pointer:
        return self


class Region:
    """A tensor or an array in shared memory of a CTA."""

    def __init__(self, cta: Cta, number: int, dtype: Any, shape: Any) -> None:
        self.cta, self.number, self.dtype, self.shape = cta, number, dtype, shape
        self.staged = isinstance(shape, tuple) and len(shape) == 3
        self.cells: dict[Any, Cell] = {}
        self.values: dict[Any, Any] = {}

    def cell(self, stage: Any) -> Cell:
        found = self.cells.get(stage)
        if found is None:
            name = f"tensor {self.number} of {self.cta.name}" + (f", stage {stage}" if self.staged else "")
            found = self.cells[stage] = Cell(name)
        return found

    def of(self, cta: Cta) -> Region:
        return cta.regions[self.number]


class Shared:
    """A view of a Region: what products and copies take."""

    def __init__(self, region: Region, stage: Any, shape: Any, stride: Any = None, offset: Any = None) -> None:
        self.region, self.stage, self.shape, self.stride, self.offset = region, stage, shape, stride, offset
        self.part: Any = None  # of a copy that brings a part

    @property
    def element_type(self) -> Any:
        return self.region.dtype

    @property
    def iterator(self) -> Pointer:
        return Pointer(self.region, 0 if self.offset is None else self.offset, self.stage)

    @property
    def layout(self) -> Layout:
        return Layout(self.shape, self.stride)

    def cell(self) -> Cell:
        if self.stage is None and self.region.staged:
            raise Fault(f"tensor {self.region.number}: no stage is chosen")
        return self.region.cell(self.stage or 0)

    def where(self) -> Any:
        """The part that a warp's own access is to: by the place, if that is known, else the warp's."""
        return None if self.offset is None else ("at", first_lane(self.offset))

    def __getitem__(self, index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        stage, offset = self.stage, self.offset
        if self.region.staged and stage is None and index[-1] is not None:
            stage = index[-1]
            index = (*index[:-1], None) if len(index) > 1 else index
            if all(i is not None for i in index[:-1]):
                view = Shared(self.region, stage, self.shape)
                return Data(view.cell().note_read(agent(), None, "load"))
        elif all(i is not None for i in index):
            return Data(self.cell().note_read(agent(), self.where(), "load"))
        if isinstance(self.stride, tuple) and len(index) == len(self.stride) and offset is not None:
            for i, n in zip(index, self.stride, strict=True):
                if i is not None and not isinstance(n, tuple):
                    offset = offset + i * n
        view = Shared(self.region, stage, self.shape, None, offset)
        view.part = self.part
        return view

    def __setitem__(self, index: Any, _: Any) -> None:
        touch(self)


def touch(view: Shared) -> None:
    """Elements of a tile are changed in its place (what is not finite): others may read them meanwhile, or do the same."""
    view.cell().note_read(agent(), None, "change in place")


class Table:
    """Integers in shared memory: (words) or (words, places)."""

    def __init__(self, cta: Cta, number: int, shape: Any) -> None:
        self.cta, self.number, self.shape = cta, number, shape
        self.cells: dict[Any, Cell] = {}
        self.values: dict[Any, Any] = {}

    iterator = property(lambda self: Pointer(self))

    def cell(self, place: Any) -> Cell:
        found = self.cells.get(place)
        if found is None:
            found = self.cells[place] = Cell(f"table {self.number} of {self.cta.name}, {place}")
        return found

    def of(self, cta: Cta) -> Table:
        return cta.regions[self.number]

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, tuple):
            self.cell(index).note_read(agent(), None, "load")
            return self.values[index]
        word, place = index
        if self.cell(place).note_read(agent(), None, "load") is GARBAGE:
            raise Fault(f"{agent().name} reads {self.cell(place).name}, where nobody has written")
        return Column(self, place) if word is None else self.values[word, place]

    def __setitem__(self, index: Any, value: Any) -> None:
        a = agent()
        word, place = index if isinstance(index, tuple) else (index, None)
        words = word if isinstance(word, np.ndarray) else np.array([word])
        values = np.broadcast_to(np.asarray(value), words.shape)
        if a.mask is not None and len(words) == 32:
            words, values = words[a.mask], values[a.mask]
        cell = self.cell(place) if place is not None else None
        for w, v in zip(words.tolist(), values.tolist(), strict=True):
            (cell or self.cell(w)).write(a, ("word", w), NO_TERMS, "store")
            self.values[w if place is None else (w, place)] = v

    def atomic(self, word: int, value: int) -> None:
        a = agent()
        if self.values[word] != value:
            self.cell(word).write(a, ("atomic", a.index), NO_TERMS, "atomic")
            self.values[word] = value


class Column:
    def __init__(self, table: Table, place: Any) -> None:
        self.table, self.place = table, place

    def __getitem__(self, word: int) -> Any:
        return self.table.values[word, self.place]


class Frag:
    """Registers: which terms their values are made of. Small ones hold no terms (what a thread knows of rows).

    A term is a load ("Q", head, row, column), or a product of two sets of terms.
    """

    __slots__ = ("busy", "element_type", "prov", "read_by", "root", "shape", "size", "tracked", "values")

    def __init__(self, dtype: Any, shape: Any) -> None:
        self.element_type, self.shape = dtype, shape
        self.size = min(product(shape), 16)  # more are alike
        self.root, self.prov = self, NO_TERMS
        self.tracked = self.size > 2
        self.values: dict[Any, Any] | None = {} if dtype is Int32 else None
        self.busy: Any = None  # the products that write these registers
        self.read_by: Any = None  # and that read them

    iterator = property(lambda self: Pointer(self))

    def view(self, count: int, dtype: Any) -> Frag:
        view = Frag.__new__(Frag)
        view.element_type, view.shape, view.size, view.root, view.values = dtype, (count,), count, self.root, None
        return view

    def terms(self) -> frozenset[Any]:
        root = self.root
        if root.values:
            found = [x.prov for x in root.values.values() if isinstance(x, Scalar)]
            return NO_TERMS.union(*found) if found else NO_TERMS
        self.settled(root)
        return root.prov

    @staticmethod
    def settled(root: Frag) -> None:
        if root.busy is not None:
            raise Fault(f"{agent().name} reads registers that a product still writes to")

    def __getitem__(self, index: Any) -> Any:
        root = self.root
        if root.values is not None:
            return root.values.get(index, UNKNOWN)
        self.settled(root)
        if isinstance(index, tuple) and None in index:
            return self
        return Scalar(root.prov) if root.tracked else UNKNOWN

    def __setitem__(self, index: Any, value: Any) -> None:
        root = self.root
        if root.values is not None:
            if agent().mask is not None and index in root.values:
                value = merge(agent().mask, value, root.values[index])
            root.values[index] = value
            return
        if root.busy is not None or root.read_by is not None:
            raise Fault(f"{agent().name} writes registers that a product still uses")
        if root.tracked and isinstance(value, Scalar):
            root.prov = value.prov

    def fill(self, value: Any) -> None:
        root = self.root
        if root.busy is not None or root.read_by is not None:
            raise Fault(f"{agent().name} writes registers that a product still uses")
        root.prov = NO_TERMS
        if root.values is not None:
            root.values = {i: value for i in range(root.size)}


class Flat:
    """Sums, slabs or locks in global memory."""

    def __init__(self, name: str, length: int, values: dict[Any, int] | None = None) -> None:
        self.name, self.shape, self.values = name, (length,), values
        self.element_type = Float32

    iterator = property(lambda self: Pointer(self))


class Host:
    """A table of integers in global memory."""

    element_type = Int32

    def __init__(self, name: str, array: Any) -> None:
        self.name, self.array, self.shape = name, array, array.shape
        self.rows = array.tolist()

    def __getitem__(self, index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        try:
            found: Any = self.rows
            for i in index:
                if i is None:
                    break
                if isinstance(i, np.ndarray):
                    return self.by_lane(index)
                if i < 0:
                    raise IndexError
                found = found[i]
            return found
        except IndexError:
            raise Fault(f"{agent().name} reads {self.name}{index} of {self.shape}") from None

    def by_lane(self, index: tuple[Any, ...]) -> Any:
        mask, lanes = agent().mask, []
        for i, n in zip(index, self.shape, strict=True):
            i = np.broadcast_to(i, (32,))
            if not ((i >= 0) & (i < n))[slice(None) if mask is None else mask].all():
                raise Fault(f"{agent().name} reads {self.name}{index} of {self.shape}")
            lanes.append(np.clip(i, 0, n - 1))
        return self.array[tuple(lanes)].astype(np.int64)


class View:
    """A part of a tensor in global memory: of what is loaded or stored, where it begins."""

    def __init__(
        self, name: str, shape: Any, roles: tuple[str, ...] = ("row", "head", "col"), at: Any = None, tile: Any = ()
    ) -> None:
        self.name, self.shape, self.roles, self.tile = name, shape, roles, tile
        self.at = at or {"row": 0, "head": 0, "col": 0}
        self.stride = (8, 8, 1)
        self.element_type = BFloat16

    @property
    def iterator(self) -> Pointer:
        return Pointer(self)

    @property
    def layout(self) -> Layout:
        return Layout(self.shape, roles=self.roles)

    def tag(self) -> tuple[Any, ...]:
        return self.name, self.at["head"], self.at["row"], self.at["col"]

    def moved(self, offsets: Any, roles: Any, tile: Any) -> View:
        at = dict(self.at)
        for role, n in zip(roles, offsets, strict=True):
            if n is not None:
                at[role] = at[role] + (n[-1] if isinstance(n, tuple) else n)
        return View(self.name, self.shape, self.roles, at, tile)

    def __getitem__(self, index: Any) -> View:
        index = index if isinstance(index, tuple) else (index,)
        view = self.moved(index, self.roles, self.tile)
        left = tuple(role for role, i in zip(self.roles, index, strict=True) if i is None)
        view.roles = left
        shape = tuple(n for n, i in zip(self.shape, index, strict=True) if i is None)
        view.shape = shape
        return UNKNOWN if not left else view  # type: ignore[return-value]

    def __setitem__(self, index: Any, value: Any) -> None:
        index = index if isinstance(index, tuple) else (index,)
        if isinstance(value, Scalar):
            emit(self.name, self.moved(index, self.roles, ()).at, value.prov)


def emit(what: str, where: Any, prov: frozenset[Any]) -> None:
    if Now.machine.stores is not None:
        Now.machine.stores(Now.machine, what, where, prov)


# ---------------------------------------------------------------- cutlass
def _range(*args: Any, **_: Any) -> Any:
    begin, end, step = args if len(args) == 3 else (0, *args, 1) if len(args) == 1 else (*args, 1)
    return _lane_range(begin, end, step) if isinstance(begin, np.ndarray) else range(begin, end, step)


def _lane_range(begin: Any, end: int, step: int) -> Iterator[Any]:
    i, a = begin, agent()
    while True:
        taking = i < end if a.mask is None else (i < end) & a.mask
        if not taking.any():
            return
        with lanes(taking):
            yield i
        i = i + step


def _pick(a: Any, b: Any, smaller: bool) -> Any:
    if isinstance(a, Scalar) or isinstance(b, Scalar):
        return a if isinstance(a, Scalar) else b
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.minimum(a, b) if smaller else np.maximum(a, b)
    return min(a, b) if smaller else max(a, b)


def select_(which: Any, a: Any, b: Any) -> Any:
    if isinstance(which, Scalar):
        return which._with(a)._with(b)
    if isinstance(a, Scalar) or isinstance(b, Scalar):
        return a._with(b) if isinstance(a, Scalar) else b
    return np.where(which, a, b) if isinstance(which, np.ndarray) else a if which else b


class SmemAllocator:
    """Every warp of a CTA allocates the same in the same order."""

    def __init__(self) -> None:
        self.count = 0

    def _next(self, make: Callable[[Cta, int], Any]) -> Any:
        cta = agent().cta
        if self.count == len(cta.regions):
            cta.regions.append(make(cta, self.count))
        self.count += 1
        return cta.regions[self.count - 1]

    def allocate_tensor(self, dtype: Any, layout: Layout, _: int = 0, __: Any = None) -> Any:
        if dtype is Int32:
            return self._next(lambda cta, j: Table(cta, j, layout.shape))
        region = self._next(lambda cta, j: Region(cta, j, dtype, layout.shape))
        return Shared(region, None, region.shape)

    def allocate_array(self, dtype: Any, length: int) -> Pointer:
        return Pointer(self._next(lambda cta, j: Region(cta, j, dtype, length)))


class Kernel:
    """Of @cute.kernel: `self.kernel(...).launch(...)` runs on the machine."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __get__(self, kernel: Any, _: Any = None) -> Any:
        def bind(*args: Any) -> Any:
            body = functools.partial(self.function, kernel, *args)

            def launch(*, grid: Any, block: Any, cluster: Any = (1, 1, 1), **_: Any) -> None:
                Now.machine.launch(body, grid[0], block[0], cluster[0])

            return types.SimpleNamespace(launch=launch)

        return bind


# ---------------------------------------------------------------- cute
def make_tensor(at: Any, layout: Any) -> Any:
    shape = layout.shape
    if isinstance(at.base, Region):
        offset = at.offset if at.stage is not None or not at.base.staged else None
        plain = not isinstance(at.offset, np.ndarray) and at.offset == 0 and layout.stride is None
        return Shared(at.base, at.stage, shape, layout.stride, None if plain else offset)
    if isinstance(at.base, Frag):
        return at.base.view(product(shape), at.base.element_type)
    if isinstance(at.base, Flat):
        return Place(at)
    view = at.base
    roles = layout.roles or _roles(view, shape)
    found = View(view.name, shape, roles, dict(view.at))
    found.at["col"] = found.at["col"] + at.offset
    return found


def _roles(view: View, shape: Any) -> tuple[str, ...]:
    """What the modes of another layout of a tensor are."""
    if not isinstance(shape, tuple):
        return ("col",)
    if isinstance(shape[0], tuple):  # of packed heads
        return "row", "col", "head"
    return ("head", "row", "col") if view.roles == ("head", "col") else ("row", "head", "col")


class Place:
    """A tensor in flat global memory, from a pointer on."""

    def __init__(self, at: Pointer) -> None:
        self.at = at

    def __getitem__(self, index: Any) -> Place:
        return self


def select(layout: Layout, mode: list[int]) -> Layout:
    roles = None if layout.roles is None else tuple(layout.roles[i] for i in mode)
    return Layout(tuple(layout.shape[i] for i in mode), None, roles)


def local_tile(x: Any, tile: Any, coordinates: Any) -> Any:
    if not isinstance(x, View):
        return x if isinstance(x, Frag) else _shared(x, tile)
    steps = [None if c is None else 0 if isinstance(c, tuple) else c * n for n, c in zip(tile, coordinates, strict=True)]
    return x.moved(steps, x.roles, tile)


def _shared(x: Shared, shape: Any) -> Shared:
    view = Shared(x.region, x.stage, shape, None, x.offset)
    view.part = x.part
    return view


def domain_offset(offsets: Any, x: Any) -> Any:
    return x.moved(offsets, x.roles, x.tile) if isinstance(x, View) else x


def recast_tensor(x: Any, dtype: Any) -> Any:
    if isinstance(x, Frag):
        return x.view(max(x.size // 2, 1), dtype) if x.root.values is None else x
    return x


def make_rmem_tensor(shape: Any, dtype: Any) -> Frag:
    return Frag(dtype, shape)


class Mma:
    def __init__(self, *args: Any) -> None:
        shape = next(x for x in reversed(args) if isinstance(x, tuple))
        self.shape, self.op = shape, self

    def get_slice(self, _: Any) -> Mma:
        return self

    def partition_A(self, x: Any) -> Any:
        return x

    partition_B = make_fragment_A = make_fragment_B = partition_A

    def partition_shape_A(self, shape: tuple[int, int]) -> int:
        return shape[0] * shape[1] // 128

    def partition_shape_C(self, shape: tuple[int, int]) -> int:
        return shape[0] * shape[1] // 128


class MmaAtom:
    def __init__(self, _: Any) -> None:
        self.accumulate = False

    def set(self, _: Any, value: bool) -> None:
        self.accumulate = value


def issue(atom: MmaAtom, acc: Frag, a: Any, b: Any, _: Any) -> None:
    """A product of a warp: it reads its operands and writes its registers until somebody waits for its group."""
    cells, terms, who = [], [], agent()
    for x in (a, b):
        if isinstance(x, Frag):
            terms.append(x.terms())
        else:
            cell = x.cell()
            terms.append(cell.begin_read(who, None, "product"))
            cells.append((cell, None))
    group = Now.machine.product(cells)
    root, term = acc.root, tuple(terms)
    if root.busy is not None and root.busy is not group and root.busy not in who.groups:
        raise Fault(f"{who.name} issues a product into registers in use")
    if not atom.accumulate:
        root.prov = frozenset([term])
    elif term in root.prov and GARBAGE not in term:
        raise Fault(f"{who.name} adds the same product twice: {term}")
    else:
        root.prov = root.prov | {term}
    for frag, field in ((root, "busy"), *((x.root, "read_by") for x in (a, b) if isinstance(x, Frag))):
        setattr(frag, field, group)

        def settle(frag: Frag = frag, field: str = field) -> None:
            if getattr(frag, field) is group:
                setattr(frag, field, None)

        group.then.append(settle)


class Tma:
    def __init__(self, op: Any, tensor: Any, box: Any, multicast: int) -> None:
        self.op, self.tensor, self.bytes = op, tensor, product(box) * 2 // multicast


def make_tiled_tma_atom(op: Any, tensor: Any, _: Any, box: Any, multicast: int = 1) -> tuple[Tma, Any]:
    return Tma(op, tensor, box, multicast), tensor


def tma_partition(atom: Tma, rank: int, ctas: Layout, shared: Shared, tile: View) -> tuple[Shared, View]:
    view = _shared(shared, shared.shape)
    view.part = ("copy by rank", rank) if product(ctas.shape) > 1 else ("copy", 0)
    return view, tile


class TiledCopy:
    def __init__(self, *_: Any) -> None: ...

    def get_slice(self, _: Any) -> TiledCopy:
        return self

    def partition_S(self, x: Any) -> Any:
        return x

    partition_D = retile = partition_S


def copy(atom: Any, source: Any, target: Any, tma_bar_ptr: Any = None, mbar_ptr: Any = None, mcast_mask: Any = None) -> None:
    machine, who = Now.machine, agent()
    bar = tma_bar_ptr or mbar_ptr
    if isinstance(source, View):
        ctas = who.cta.cluster.ctas if mcast_mask is not None else [who.cta]
        if mcast_mask is not None:
            ctas = [c for c in ctas if mcast_mask >> c.rank & 1]
        size = atom.bytes if isinstance(atom, Tma) else product(source.tile or source.shape) * 2
        stage, region = target.stage or 0, target.region
        if target.stage is None and region.staged:
            raise Fault(f"tensor {region.number}: no stage is chosen")
        cells = [(c, region.of(c).cell(stage)) for c in ctas if not _ended(c, who)]
        machine.load(cells, target.part or ("copy", 0), frozenset([source.tag()]), size, (bar.base.number, bar.offset))
    elif isinstance(target, View):
        where = target.at
        machine.bulk_store([(source.cell(), None)], lambda prov: emit(f"{target.name} box", where, prov))
    else:
        autovec_copy(source, target)


def _ended(cta: Cta, who: Agent) -> bool:
    cta.check(who.name, "loads into")
    return False


def autovec_copy(source: Any, target: Any) -> None:
    who = agent()
    if isinstance(target, Shared):
        prov = source.terms()
        if source.root.values is not None:  # zeros, or what was read there before
            touch(target)
            return
        where = target.where()
        write = target.cell().write(who, where or ("warp", who.warp), prov, "store")
        who.unfenced.append(write)
    elif isinstance(source, Shared):
        prov = source.cell().note_read(who, source.where(), "load")
        if target.root.values is not None:
            target.root.values = {i: Data(prov) for i in range(4)}
        else:
            target.root.prov = prov
    elif isinstance(target, Place):
        emit(target.at.base.name, target.at.offset, source.terms())
    elif isinstance(target, View):
        emit(target.name, target.at, source.terms())
    elif isinstance(source, View):
        target.root.prov = NO_TERMS


def recast_ptr(at: Pointer, *_: Any, **__: Any) -> Pointer:
    return at


# ---------------------------------------------------------------- cute.arch
class elect_one(contextlib.AbstractContextManager):  # type: ignore[type-arg]
    def __enter__(self) -> None:
        a = agent()
        self.old = a.mask
        if self.old is None:
            a.mask = LANES == 0
        else:
            a.mask = LANES == int(self.old.argmax())

    def __exit__(self, *_: Any) -> None:
        agent().mask = self.old


def key_of(at: Pointer) -> Any:
    return at.base.number, at.offset


def mbarrier_arrive(at: Pointer, cta: Any = None) -> None:
    a = agent()
    if cta is None:
        Now.machine.arrive(a.cta, key_of(at), a.lanes())
        return
    ranks = cta if isinstance(cta, np.ndarray) else np.full(32, cta)
    for rank in (ranks if a.mask is None else ranks[a.mask]).tolist():
        Now.machine.arrive(a.cta.cluster.ctas[rank], key_of(at), 1)


def fence() -> None:
    a = agent()
    for write in a.unfenced:
        write.fenced = True
    a.unfenced.clear()


def fence_global(_: str) -> None:
    a = agent()
    for write in a.unfenced_global:
        write.fenced = True
    a.unfenced_global.clear()


def vote_any(x: Any) -> bool:
    found = cond(x)
    return found if isinstance(found, bool) else True


def vote_all(x: Any) -> bool:
    """Most of the time what is not known is as it should be."""
    if isinstance(x, Scalar):
        return Now.machine.schedule.random.random() > 0.05
    found = cond(x)
    return found if isinstance(found, bool) else False


def shuffle(x: Any, lane: Any) -> Any:
    return int(x[lane]) if isinstance(x, np.ndarray) else x


def redux(x: Any, kind: str) -> Any:
    if kind != "max":
        raise NotImplementedError(kind)
    return int(x.max()) if isinstance(x, np.ndarray) else x


def atomic(kind: str, at: Pointer, value: int) -> int:
    """Relaxed: it orders nothing."""
    Now.machine.step(f"atomic {kind}")
    if isinstance(at.base, Table):
        cta = at.cta or agent().cta
        if cta is not agent().cta:
            cta.check(agent().name, "writes into")
        table, word = at.base.of(cta), at.offset
        old = table.values[word]
        table.atomic(word, {"max": max(old, value), "or": old | value}[kind])
        return old
    word = Now.machine.word((at.base.name, first_lane(at.offset)))
    old = word[0] or 0
    Now.machine.store_word((at.base.name, first_lane(at.offset)), old + value)
    return old


def atomic_cas(at: Pointer, *, cmp: int, val: int, **_: Any) -> int:
    Now.machine.step("compares and swaps")
    key = (at.base.name, first_lane(at.offset))
    old = Now.machine.word(key)[0] or 0
    if old == cmp:
        Now.machine.store_word(key, val)
    return old


# ---------------------------------------------------------------- ptx
def inline_asm(_: Any, operands: list[Any], text: str, constraints: str, **__: Any) -> Any:
    machine, who = Now.machine, agent()
    if text.startswith(("cvt.rn", "fma.rn")):
        x = operands[0]
        for y in operands[1:]:
            x = x._with(y) if isinstance(x, Scalar) else y
        return x if isinstance(x, Scalar) else UNKNOWN
    if text.startswith("red.relaxed.gpu.global.add.v4.f32"):
        emit("dq +=", operands[0].offset, operands[1].prov)
        return None
    if text.startswith("ld.acquire.gpu"):
        word = machine.load_word((operands[0].base.name, first_lane(operands[0].offset)))
        np.maximum(who.clock, word[1], out=who.clock)
        return word[0] or 0
    if text.startswith("st.release.gpu"):
        machine.step("releases")
        word = machine.store_word((operands[0].base.name, first_lane(operands[0].offset)), operands[1])
        np.maximum(word[1], who.clock, out=word[1])
        who.released()
        return None
    if text.startswith("st.volatile.shared"):
        at, value = operands
        if at.base.dtype is Int32:
            machine.step("stores")
            machine.store_word(("shared", at.base.cta.block, at.base.number, at.offset), first_lane(value))
        else:
            view = Shared(at.base, at.stage, at.base.shape, None, at.offset)
            write = view.cell().write(who, ("at", first_lane(at.offset)), frozenset([("ones",)]), "store")
            who.unfenced.append(write)
        return None
    if "ld.volatile.shared" in text:
        at, cta = operands[0], who.cta
        if "mapa" in text:
            cta = who.cta.cluster.ctas[operands[1]]
            cta.check(who.name, "reads of")
        word = machine.load_word(("shared", cta.block, at.base.number, at.offset))
        if word[0] is None:
            raise Fault(f"{who.name} reads a word of shared memory that nobody has written")
        return word[0]
    if text.startswith("nanosleep"):
        return None
    if "barrier.cta.red.or.pred" in text:
        barrier, x, threads = operands
        vote = isinstance(x, Scalar) and machine.schedule.random.random() < 0.05
        return int(machine.meet(barrier, threads, vote))
    if "cp.async.bulk.shared::cluster.shared::cta" in text:
        target, source, bar, size, rank = operands
        cta = who.cta.cluster.ctas[rank]
        cell = target.base.of(cta).cell(target.stage)
        machine.send(source.base.cell(source.stage), None, cta, cell, size, key_of(bar))
        return None
    if text.startswith(("cp.reduce.async.bulk.global", "cp.async.bulk.global.shared::cta.bulk_group")):
        target, source, size = operands
        cell, first, end = source.base.cell(0), source.offset, source.offset + size // 4
        parts = sorted(key for key in cell.writes if key[0] == "at" and first <= key[1] < end)
        what = "dq +=" if text.startswith("cp.reduce") else "dq ="

        def then(_: frozenset[Any]) -> None:
            for part in parts:  # a warp's part
                emit(what, target.offset + part[1] - first, cell.writes[part].prov)

        machine.bulk_store([(cell, part) for part in parts], then)
        return None
    raise NotImplementedError(f"the machine has no {text!r}")


# ---------------------------------------------------------------- modules
def _module(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__path__ = []  # type: ignore[attr-defined]
    vars(module).update(members)
    return module


def stand_ins() -> dict[str, types.ModuleType]:
    same = lambda x=None, *_, **__: x  # noqa: E731
    nothing = lambda *_, **__: None  # noqa: E731
    kinds = types.SimpleNamespace
    warp = _module("warp", LdMatrix8x8x16bOp=nothing, StMatrix8x8x16bOp=nothing)
    warpgroup = _module(
        "warpgroup", fence=nothing, commit_group=lambda: Now.machine.commit_products(),
        wait_group=lambda n: Now.machine.await_products(n), Field=kinds(ACCUMULATE=0),
        OperandMajorMode=kinds(K="K", MN="MN"), OperandSource=kinds(RMEM="RMEM", SMEM="SMEM"),
        make_smem_layout_atom=lambda width, _: Layout((8, width)),
    )  # fmt: skip
    cpasync = _module(
        "cpasync", CopyBulkG2SOp=nothing, CopyBulkTensorTileG2SMulticastOp=nothing, CopyBulkTensorTileG2SOp=nothing,
        CopyBulkTensorTileS2GOp=nothing, make_tiled_tma_atom=make_tiled_tma_atom, prefetch_descriptor=nothing,
        tma_partition=tma_partition,
    )  # fmt: skip
    at_thread = lambda: (agent().warp * 32 + LANES, 0, 0)  # noqa: E731
    arch = kinds(
        atomic_cas=atomic_cas, atomic_max=lambda p, v, **_: atomic("max", p, v),
        atomic_or=lambda p, v, **_: atomic("or", p, v), atomic_add=lambda p, v, **_: atomic("add", p, v),
        barrier=lambda barrier_id, number_of_threads: Now.machine.meet(barrier_id, number_of_threads),
        block_idx=lambda: (agent().cta.block, 0, 0), block_idx_in_cluster=lambda: agent().cta.rank,
        grid_dim=lambda: (Now.machine.grid, 1, 1), cluster_arrive=lambda: Now.machine.arrive_cluster(),
        cluster_wait=lambda: Now.machine.await_cluster(), sync_threads=lambda: Now.machine.meet(0, Now.machine.warps * 32),
        cp_async_bulk_commit_group=lambda: Now.machine.commit_bulk(),
        cp_async_bulk_wait_group=lambda n, read=False: Now.machine.await_bulk(n, read),
        elect_one=elect_one, fence_proxy=fence_global, fence_view_async_shared=fence, fmax=lambda a, b: _pick(a, b, False),
        fmin=lambda a, b: _pick(a, b, True), lane_idx=lambda: LANES, make_warp_uniform=same,
        map_dsmem_ptr=lambda p, rank: Pointer(p.base, p.offset, p.stage, agent().cta.cluster.ctas[rank]),
        mbarrier_arrive=mbarrier_arrive,
        mbarrier_arrive_and_expect_tx=lambda p, n: Now.machine.expect(agent().cta, key_of(p), n, agent().lanes()),
        mbarrier_expect_tx=lambda p, n: Now.machine.expect(agent().cta, key_of(p), n, 0),
        mbarrier_init=lambda p, n: Now.machine.init_mbarrier(agent().cta, key_of(p), f"mbarrier {p.offset}", n),
        mbarrier_init_fence=nothing, mbarrier_wait=lambda p, phase: Now.machine.wait(key_of(p), phase),
        rcp_approx=same, setmaxregister_decrease=nothing, setmaxregister_increase=nothing, shuffle_sync=shuffle,
        shuffle_sync_bfly=lambda x, _: x, sync_warp=nothing, thread_idx=at_thread, vote_all_sync=vote_all,
        vote_any_sync=vote_any, warp_idx=lambda: agent().warp, warp_reduction_max=same, warp_reduction_sum=same,
        warp_redux_sync=redux,
    )  # fmt: skip
    unknown = lambda x, **_: x if isinstance(x, Scalar) else UNKNOWN  # noqa: E731
    nvgpu = _module("cutlass.cute.nvgpu", cpasync=cpasync, warp=warp, warpgroup=warpgroup)
    runtime = _module("cutlass.cute.runtime", make_fake_stream=nothing, make_fake_tensor=nothing)
    cute = _module(
        "cutlass.cute", arch=arch, nvgpu=nvgpu, runtime=runtime, Pointer=Pointer, Tensor=object, jit=same, kernel=Kernel,
        math=kinds(exp2=unknown, log=unknown, log2=unknown), autovec_copy=autovec_copy, copy=copy, gemm=issue,
        composition=lambda x, _: x, domain_offset=domain_offset, group_modes=same, local_tile=local_tile,
        make_composed_layout=lambda _, __, layout: layout, make_copy_atom=nothing, make_layout=Layout,
        make_mma_atom=MmaAtom, make_rmem_tensor=make_rmem_tensor, make_swizzle=nothing, make_tensor=make_tensor,
        make_tiled_copy_A=TiledCopy, make_tiled_copy_C=TiledCopy, rank=lambda x: len(x.shape), recast_ptr=recast_ptr,
        recast_tensor=recast_tensor, select=select, size=size, tile_to_shape=lambda _, shape, __: Layout(shape),
    )  # fmt: skip

    def width(_: Any, __: Any, columns: int) -> int:
        return next(n for n in (64, 32, 16, 8) if columns % n == 0)

    hopper = _module(
        "cutlass.utils.hopper_helpers", get_smem_layout_atom=width, make_trivial_tiled_mma=lambda *args: Mma(*args)
    )
    utils = _module(
        "cutlass.utils", hopper_helpers=hopper, LayoutEnum=kinds(ROW_MAJOR=0), SmemAllocator=SmemAllocator
    )
    llvm = _module("cutlass._mlir.dialects.llvm", inline_asm=inline_asm, AsmDialect=kinds(AD_ATT=0))
    dialects = _module("cutlass._mlir.dialects", llvm=llvm)
    mlir = _module("cutlass._mlir", dialects=dialects)
    dsl = _module("cutlass.cutlass_dsl", T=kinds(i32=nothing), dsl_user_op=same)
    numbers = {x.__name__: x for x in (Numeric, Boolean, Int16, Int32, Int64, Float32, BFloat16, Float16)}
    cutlass = _module(
        "cutlass", cute=cute, utils=utils, _mlir=mlir, cutlass_dsl=dsl, **numbers, Constexpr=object, const_expr=same,
        range=_range, range_constexpr=range, min=lambda a, b: _pick(a, b, True), max=lambda a, b: _pick(a, b, False),
        select_=select_,
    )  # fmt: skip
    driver = _module("cuda.bindings.driver")
    bindings = _module("cuda.bindings", driver=driver)
    modules = (cutlass, cute, nvgpu, runtime, utils, hopper, mlir, dialects, llvm, dsl, driver, bindings)
    return {m.__name__: m for m in (*modules, _module("cuda", bindings=bindings))}


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
        rewrite = Rewrite(ALIKE.get(path.name, ()))
        tree = ast.fix_missing_locations(rewrite.visit(ast.parse(text)))
        if rewrite.left:
            raise ValueError(f"{path.name} has no {rewrite.left}")
        flags = __future__.annotations.compiler_flag
        module.__dict__["_lanes"] = sys.modules[__name__]
        exec(compile(tree, str(path), "exec", flags), module.__dict__)


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
        names = "bwd_narrow", "bwd_wide", "fwd", "fwd_paths"
        found = {name: importlib.import_module(f"cute_kernels.{name}") for name in names}
    finally:
        sys.meta_path.remove(sources)  # type: ignore[arg-type]
        for name in ours():
            del sys.modules[name]
        sys.modules.update(before)
    if sources.left:
        raise ValueError(f"no kernel imports {sources.left}")
    return types.SimpleNamespace(**found)

