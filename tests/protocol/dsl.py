"""Stand-ins for the modules of the DSL that kernels import: what synchronizes is the machine's, products and copies
note what they read and write, and the rest of what is computed with data is left out.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.protocol.lanes import (
    NO_TERMS,
    UNKNOWN,
    BFloat16,
    Boolean,
    Data,
    Float16,
    Float32,
    Int16,
    Int32,
    Int64,
    Now,
    Numeric,
    Scalar,
    agent,
    cond,
    first_lane,
    lanes,
)
from tests.protocol.memory import Flat, Frag, Layout, Pointer, Region, Shared, Table, View, emit, product, size, touch
from tests.protocol.state import GARBAGE, LANES, Agent, Cta, Fault


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
    """A stand-in for @cute.kernel: `self.kernel(...).launch(...)` runs on the machine."""

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
    """Name the modes of another layout of a tensor."""
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
    steps = [
        None if c is None else 0 if isinstance(c, tuple) else c * n for n, c in zip(tile, coordinates, strict=True)
    ]
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
    """A product of a warp: it reads its operands and writes its registers until a warp waits for its group."""
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


def copy(
    atom: Any,
    source: Any,
    target: Any,
    tma_bar_ptr: Any = None,
    mbar_ptr: Any = None,
    mcast_mask: Any = None,
    cache_policy: Any = None,  # of L2, which holds no thread up
) -> None:
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
def whole_warp(what: str, function: Callable[..., Any] = lambda x=None, *_, **__: x) -> Callable[..., Any]:
    """`function` for all lanes together: where some of them are elsewhere, the others wait for them and may hang."""

    @functools.wraps(function)
    def call(*args: Any, **more: Any) -> Any:
        if agent().mask is not None:
            raise Fault(f"{agent().name} comes to {what}, which is for all lanes, with {agent().lanes()} of them")
        return function(*args, **more)

    return call


class elect_one(contextlib.AbstractContextManager):  # type: ignore[type-arg]
    def __enter__(self) -> None:
        whole_warp("elect_one")()
        agent().mask = LANES == 0

    def __exit__(self, *_: Any) -> None:
        agent().mask = None


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
    a.settle()


def fence_global(_: str) -> None:
    a = agent()
    for write in a.unfenced_global:
        write.fenced = True
    a.unfenced_global.clear()


def vote_any(x: Any) -> bool:
    found = cond(x)
    return found if isinstance(found, bool) else True


def vote_all(x: Any) -> bool:
    """Whether x holds for all lanes. Where x is not known, the answer is mostly True."""
    if isinstance(x, Scalar):
        return Now.machine.schedule.random.random() > 0.05
    found = cond(x)
    return found if isinstance(found, bool) else False


def ballot(x: Any) -> Any:
    """A bit for each lane, of which none is known."""
    return UNKNOWN


def shuffle(x: Any, lane: Any) -> Any:
    return int(x[lane]) if isinstance(x, np.ndarray) else x


def redux(x: Any, kind: str) -> Any:
    if kind != "max":
        raise NotImplementedError(kind)
    return int(x.max()) if isinstance(x, np.ndarray) else x


def atomic(kind: str, at: Pointer, value: int) -> int:
    """A relaxed atomic operation: it orders nothing."""
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
    if text.startswith(("cvt.rn", "fma.rn", "and.b32", "shl.b32")) or "cvt.f32.f16" in text:
        x = operands[0]
        for y in operands[1:]:
            x = x._with(y) if isinstance(x, Scalar) else y
        return x if isinstance(x, Scalar) else UNKNOWN
    if text.startswith("mul.f32"):
        return operands[0] * operands[1]
    if "%tid.x" in text:
        return who.warp * 32 + LANES
    if text.startswith("red.relaxed.gpu.global.add.v4.f32"):
        emit("dq +=", operands[0].offset, operands[1].prov)
        return None
    if text.startswith("ld.acquire.gpu"):
        word = machine.load_word((operands[0].base.name, first_lane(operands[0].offset)))
        np.maximum(who.clock, word[1], out=who.clock)
        return word[0] or 0
    if text.startswith("st.release.gpu"):
        machine.step("releases")
        who.settle()
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
    if "st.async" in text:
        target, bar, rank, *values = operands
        cta, prov = who.cta.cluster.ctas[rank], frozenset().union(*(x.prov for x in values if isinstance(x, Scalar)))
        cells = [(cta, target.base.of(cta).cell(target.stage or 0))]
        machine.load(cells, ("at", first_lane(target.offset)), prov, 16 * who.lanes(), key_of(bar))
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
    warp = _module("warp", StMatrix8x8x16bOp=nothing)
    warpgroup = _module(
        "warpgroup", fence=whole_warp("a product"),
        commit_group=whole_warp("a product", lambda: Now.machine.commit_products()),
        wait_group=whole_warp("a product", lambda n: Now.machine.await_products(n)), Field=kinds(ACCUMULATE=0),
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
        grid_dim=lambda: (Now.machine.grid, 1, 1),
        cluster_arrive=whole_warp("the cluster's barrier", lambda: Now.machine.arrive_cluster()),
        cluster_wait=whole_warp("the cluster's barrier", lambda: Now.machine.await_cluster()),
        sync_threads=lambda: Now.machine.meet(0, Now.machine.warps * 32),
        cp_async_bulk_commit_group=lambda: Now.machine.commit_bulk(),
        cp_async_bulk_wait_group=lambda n, read=False: Now.machine.await_bulk(n, read),
        elect_one=elect_one, fence_acq_rel_cta=lambda: agent().settle(),
        fence_acq_rel_cluster=lambda: agent().settle(), fence_acq_rel_gpu=lambda: agent().settle(),
        fence_proxy=fence_global, fence_view_async_shared=fence,
        fmax=lambda a, b: _pick(a, b, False),
        fmin=lambda a, b: _pick(a, b, True), lane_idx=lambda: LANES,
        make_warp_uniform=whole_warp("make_warp_uniform"),
        map_dsmem_ptr=lambda p, rank: Pointer(p.base, p.offset, p.stage, agent().cta.cluster.ctas[rank]),
        mbarrier_arrive=mbarrier_arrive,
        mbarrier_arrive_and_expect_tx=lambda p, n: Now.machine.expect(agent().cta, key_of(p), n, agent().lanes()),
        mbarrier_expect_tx=lambda p, n: Now.machine.expect(agent().cta, key_of(p), n, 0),
        mbarrier_init=lambda p, n: Now.machine.init_mbarrier(agent().cta, key_of(p), p.offset, n),
        mbarrier_init_fence=nothing, mbarrier_wait=lambda p, phase: Now.machine.wait(key_of(p), phase),
        rcp_approx=same, setmaxregister_decrease=whole_warp("setmaxregister"),
        setmaxregister_increase=whole_warp("setmaxregister"), shuffle_sync=whole_warp("a shuffle", shuffle),
        shuffle_sync_bfly=whole_warp("a shuffle"), sync_warp=whole_warp("sync_warp"), thread_idx=at_thread,
        vote_all_sync=whole_warp("a vote", vote_all), vote_any_sync=whole_warp("a vote", vote_any),
        vote_ballot_sync=whole_warp("a vote", ballot),
        warp_idx=lambda: agent().warp, warp_reduction_max=whole_warp("a reduction"),
        warp_reduction_sum=whole_warp("a reduction"), warp_redux_sync=whole_warp("a reduction", redux),
    )  # fmt: skip
    unknown = lambda x, **_: x if isinstance(x, Scalar) else UNKNOWN  # noqa: E731
    nvgpu = _module("cutlass.cute.nvgpu", cpasync=cpasync, warp=warp, warpgroup=warpgroup)
    runtime = _module("cutlass.cute.runtime", make_fake_stream=nothing, make_fake_tensor=nothing)
    cute = _module(
        "cutlass.cute", arch=arch, nvgpu=nvgpu, runtime=runtime, Pointer=Pointer, Tensor=object, jit=same,
        kernel=Kernel,
        math=kinds(exp2=unknown, log=unknown, log2=unknown), autovec_copy=autovec_copy, copy=copy, gemm=issue,
        composition=lambda x, _: x, domain_offset=domain_offset, group_modes=same, local_tile=local_tile,
        make_composed_layout=lambda _, __, layout: layout, make_copy_atom=nothing, make_layout=Layout,
        make_mma_atom=MmaAtom, make_rmem_tensor=make_rmem_tensor, make_swizzle=nothing, make_tensor=make_tensor,
        make_tiled_copy_C=TiledCopy, rank=lambda x: len(x.shape), recast_ptr=recast_ptr,
        recast_tensor=recast_tensor, select=select, size=size, tile_to_shape=lambda _, shape, __: Layout(shape),
    )  # fmt: skip

    def width(_: Any, __: Any, columns: int) -> int:
        return next(n for n in (64, 32, 16, 8) if columns % n == 0)

    hopper = _module(
        "cutlass.utils.hopper_helpers", get_smem_layout_atom=width, make_trivial_tiled_mma=lambda *args: Mma(*args)
    )
    utils = _module("cutlass.utils", hopper_helpers=hopper, LayoutEnum=kinds(ROW_MAJOR=0), SmemAllocator=SmemAllocator)
    llvm = _module("cutlass._mlir.dialects.llvm", inline_asm=inline_asm, AsmDialect=kinds(AD_ATT=0))
    dialects = _module("cutlass._mlir.dialects", llvm=llvm)
    mlir = _module("cutlass._mlir", dialects=dialects)
    dsl = _module("cutlass.cutlass_dsl", T=kinds(i32=nothing, f32=nothing), dsl_user_op=same)
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
