"""Registers, shared and global memory: who reads and writes a stage, and where its content comes from."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tests.protocol.lanes import (
    NO_TERMS,
    UNKNOWN,
    BFloat16,
    Data,
    Float32,
    Int32,
    Now,
    Scalar,
    agent,
    first_lane,
    merge,
)
from tests.protocol.state import GARBAGE, Cell, Cta, Fault


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
    """A pointer into shared memory (base: Region, with a stage or None), registers (Frag) or global memory (Flat,
    View)."""

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
        if self.stage is None and self.region.staged:  # numbers, of each thread one
            a = agent()
            self.region.cell(index[-1]).write(a, ("warp", a.index), NO_TERMS, "store")
        else:
            touch(self)


def touch(view: Shared) -> None:
    """Elements of a tile are changed in place (what is not finite): others may read them meanwhile, or do the same."""
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
            root.values = dict.fromkeys(range(root.size), value)


class Flat:
    """Sums, partial sums or locks in global memory."""

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
