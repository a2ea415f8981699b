"""PTX instructions that the DSL has no name for."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def add_to_global(
    ptr: cute.Pointer, a: Float32, b: Float32, c: Float32, d: Float32, *, loc: Any = None, ip: Any = None
) -> None:
    """Four fp32 added to global memory at a 16-byte aligned address, nothing returned."""
    operands = [ptr.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)]
    operands += [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c, d)]
    llvm.inline_asm(
        None,
        operands,
        "red.relaxed.gpu.global.add.v4.f32 [$0], {$1, $2, $3, $4};",
        "l,f,f,f,f",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def transpose_8x8(pair: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """An 8 x 8 matrix of 16-bit elements over a warp, lane l with row l // 4 and columns 2 * (l % 4) + {0, 1}."""
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [Int32(pair).ir_value(loc=loc, ip=ip)],
            "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
            "=r,r",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def load_acquire(ptr: cute.Pointer, *, loc: Any = None, ip: Any = None) -> Int32:
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [ptr.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)],
            "ld.acquire.gpu.global.s32 $0, [$1];",
            "=r,l",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def store_release(ptr: cute.Pointer, value: Int32, *, loc: Any = None, ip: Any = None) -> None:
    llvm.inline_asm(
        None,
        [ptr.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip), Int32(value).ir_value(loc=loc, ip=ip)],
        "st.release.gpu.global.s32 [$0], $1;",
        "l,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def copy_to_peer(
    dst: cute.Pointer, src: cute.Pointer, bar: cute.Pointer, size: int, cta: Int32, *, loc: Any = None, ip: Any = None
) -> None:
    """`size` bytes of this CTA's shared memory into a CTA of the cluster, where `dst` lies and `bar` counts them."""
    operands = [x.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip) for x in (dst, src, bar)]
    operands += [Int32(x).ir_value(loc=loc, ip=ip) for x in (size, cta)]
    llvm.inline_asm(
        None,
        operands,
        "{\n.reg .b32 d, b;\nmapa.shared::cluster.u32 d, $0, $4;\nmapa.shared::cluster.u32 b, $2, $4;\n"
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [d], [$1], $3, [b];\n}",
        "r,r,r,r,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
