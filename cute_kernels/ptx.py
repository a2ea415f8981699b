"""PTX instructions that the DSL has no name for."""

from typing import TYPE_CHECKING, TypeAlias

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

if TYPE_CHECKING:
    from cutlass._mlir import ir

# Where an instruction comes from and goes to; `dsl_user_op` passes them.
Location: TypeAlias = "ir.Location | None"
Point: TypeAlias = "ir.InsertionPoint | None"
Operand: TypeAlias = "cute.Pointer | cutlass.Numeric"

_CONVERT = {cutlass.BFloat16: "cvt.rn.bf16x2.f32", cutlass.Float16: "cvt.rn.f16x2.f32"}


def _asm(
    text: str, constraints: str, operands: list[Operand], loc: Location, ip: Point, volatile: bool = True
) -> Int32 | Float32 | None:
    """`text` with `operands`; what it returns, if the constraints begin with a result, in 32 bits."""
    kind, number = {"=r": (T.i32, Int32), "=f": (T.f32, Float32)}.get(constraints[:2], (None, None))
    values = [x.toint(loc=loc, ip=ip) if isinstance(x, cute.Pointer) else x for x in operands]
    result = llvm.inline_asm(
        kind() if kind else None,
        [x.ir_value(loc=loc, ip=ip) for x in values],
        text,
        constraints,
        has_side_effects=volatile,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return number(result) if number else None


# ---------------------------------------------------------------- registers
@dsl_user_op
def round_pair(
    dtype: type[cutlass.Numeric], low: Float32, high: Float32, *, loc: Location = None, ip: Point = None
) -> Int32:
    """Two fp32 rounded to nearest, as 16-bit floats in one register."""
    return _asm(f"{_CONVERT[dtype]} $0, $1, $2;", "=r,f,f", [Float32(high), Float32(low)], loc, ip, volatile=False)


@dsl_user_op
def unpacked(
    dtype: type[cutlass.Numeric], pair: Int32, high: bool, *, loc: Location = None, ip: Point = None
) -> Float32:
    """One of two 16-bit floats in a register. It is unpacked where it is used: otherwise the compiler splits pairs when
    they are made, and each half takes a register from there on."""
    if dtype is cutlass.BFloat16:
        text = "and.b32 $0, $1, 0xFFFF0000;" if high else "shl.b32 $0, $1, 16;"
    else:
        text = f"{{ .reg .b16 low, high; mov.b32 {{low, high}}, $1; cvt.f32.f16 $0, {'high' if high else 'low'}; }}"
    return _asm(text, "=f,r", [Int32(pair)], loc, ip)


@dsl_user_op
def times_here(a: Float32, b: Float32, *, loc: Location = None, ip: Point = None) -> Float32:
    """a * b, computed where it is used: the compiler would keep it in a register during a loop."""
    return _asm("mul.f32 $0, $1, $2;", "=f,f,f", [Float32(a), Float32(b)], loc, ip)


@dsl_user_op
def thread_here(*, loc: Location = None, ip: Point = None) -> Int32:
    """The thread's number in the CTA, read where it is used."""
    return _asm("mov.u32 $0, %tid.x;", "=r", [], loc, ip)


@dsl_user_op
def zero_times(pair: Int32, sums: Int32, bf16: bool, *, loc: Location = None, ip: Point = None) -> Int32:
    """sums + 0 * pair, of two 16-bit floats each: NaN, and for good, where a pair is not finite."""
    text = f"fma.rn.{'bf16x2' if bf16 else 'f16x2'} $0, $1, $2, $3;"
    return _asm(text, "=r,r,r,r", [Int32(pair), Int32(0), Int32(sums)], loc, ip, volatile=False)


@dsl_user_op
def transpose_8x8(pair: Int32, *, loc: Location = None, ip: Point = None) -> Int32:
    """An 8 x 8 matrix of 16-bit elements over a warp, lane l with row l // 4 and columns 2 * (l % 4) + {0, 1}."""
    return _asm("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [Int32(pair)], loc, ip)


@dsl_user_op
def sleep(nanoseconds: int, *, loc: Location = None, ip: Point = None) -> None:
    _asm("nanosleep.u32 $0;", "r", [Int32(nanoseconds)], loc, ip)


@dsl_user_op
def any_nonzero(barrier_id: Int32, x: Int32, threads: int, *, loc: Location = None, ip: Point = None) -> Boolean:
    """Whether x is not 0 in any of so many threads. They wait for each other at a barrier."""
    text = (
        "{ .reg .pred p, q; setp.ne.s32 p, $2, 0; barrier.cta.red.or.pred.aligned q, $1, $3, p; selp.s32 $0, 1, 0, q; }"
    )
    return _asm(text, "=r,r,r,r", [Int32(barrier_id), Int32(x), Int32(threads)], loc, ip) != 0


# ---------------------------------------------------------------- global memory
@dsl_user_op
def add_to_global(
    ptr: cute.Pointer, a: Float32, b: Float32, c: Float32, d: Float32, *, loc: Location = None, ip: Point = None
) -> None:
    """Four fp32 added to global memory at a 16-byte aligned address, nothing returned."""
    text = "red.relaxed.gpu.global.add.v4.f32 [$0], {$1, $2, $3, $4};"
    _asm(text, "l,f,f,f,f", [ptr, *map(Float32, (a, b, c, d))], loc, ip)


@dsl_user_op
def load_acquire(ptr: cute.Pointer, *, loc: Location = None, ip: Point = None) -> Int32:
    return _asm("ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [ptr], loc, ip)


@dsl_user_op
def store_release(ptr: cute.Pointer, value: Int32, *, loc: Location = None, ip: Point = None) -> None:
    _asm("st.release.gpu.global.s32 [$0], $1;", "l,r", [ptr, Int32(value)], loc, ip)


# ---------------------------------------------------------------- shared memory
@dsl_user_op
def load_volatile(ptr: cute.Pointer, *, loc: Location = None, ip: Point = None) -> Int32:
    """Load from shared memory that another warp writes to."""
    return _asm("ld.volatile.shared.s32 $0, [$1];", "=r,r", [ptr], loc, ip)


@dsl_user_op
def store_volatile(ptr: cute.Pointer, value: Int32, *, loc: Location = None, ip: Point = None) -> None:
    """Store to shared memory that another warp reads."""
    _asm("st.volatile.shared.s32 [$0], $1;", "r,r", [ptr, Int32(value)], loc, ip)


@dsl_user_op
def load_of_cta(ptr: cute.Pointer, cta: int, *, loc: Location = None, ip: Point = None) -> Int32:
    """Load from the shared memory of a CTA of the cluster, where `ptr` lies."""
    text = "{\n.reg .b32 a;\nmapa.shared::cluster.u32 a, $1, $2;\nld.volatile.shared::cluster.s32 $0, [a];\n}"
    return _asm(text, "=r,r,r", [ptr, Int32(cta)], loc, ip)


# ---------------------------------------------------------------- the copy engine
@dsl_user_op
def copy_to_peer(
    dst: cute.Pointer,
    src: cute.Pointer,
    bar: cute.Pointer,
    size: int,
    cta: Int32,
    *,
    loc: Location = None,
    ip: Point = None,
) -> None:
    """`size` bytes of this CTA's shared memory into a CTA of the cluster, where `dst` lies and `bar` counts them."""
    text = (
        "{\n.reg .b32 d, b;\nmapa.shared::cluster.u32 d, $0, $4;\nmapa.shared::cluster.u32 b, $2, $4;\n"
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [d], [$1], $3, [b];\n}"
    )
    _asm(text, "r,r,r,r,r", [dst, src, bar, Int32(size), Int32(cta)], loc, ip)


@dsl_user_op
def send_to_cta(
    dst: cute.Pointer,
    bar: cute.Pointer,
    cta: Int32,
    a: Float32,
    b: Float32,
    c: Float32,
    d: Float32,
    *,
    loc: Location = None,
    ip: Point = None,
) -> None:
    """Four fp32 into the shared memory of a CTA of the cluster, where `dst` lies and `bar` counts their 16 bytes."""
    text = (
        "{\n.reg .b32 to, at;\nmapa.shared::cluster.u32 to, $0, $2;\nmapa.shared::cluster.u32 at, $1, $2;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {$3, $4, $5, $6}, [at];\n}"
    )
    _asm(text, "r,r,r,f,f,f,f", [dst, bar, Int32(cta), *map(Float32, (a, b, c, d))], loc, ip)


@dsl_user_op
def bulk_add(dst: cute.Pointer, src: cute.Pointer, size: int, *, loc: Location = None, ip: Point = None) -> None:
    """`size` bytes of fp32 in shared memory added to global memory by the copy engine, in this thread's bulk group."""
    text = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], $2;"
    _asm(text, "l,r,r", [dst, src, Int32(size)], loc, ip)


@dsl_user_op
def bulk_store(dst: cute.Pointer, src: cute.Pointer, size: int, *, loc: Location = None, ip: Point = None) -> None:
    """`size` bytes of shared memory written to global memory by the copy engine, in this thread's bulk group."""
    text = "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;"
    _asm(text, "l,r,r", [dst, src, Int32(size)], loc, ip)
