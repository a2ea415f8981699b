"""Stand-ins for a kernel's arguments in `cute.compile`: tensors without data, lengths and strides known at run time."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

ALIGNMENT = 16  # bytes: of the address and of every stride of packed rows
DIVISOR = 8  # elements of 16 bits in ALIGNMENT bytes: divides head dims and strides


def head_dim() -> cute.SymInt:
    """A head dim that callers choose: a multiple of 8."""
    return cute.sym_int32(divisibility=DIVISOR)


def packed(dtype: type[cutlass.Numeric], rows: cute.SymInt, heads: cute.SymInt, dim: cute.SymInt) -> cute.Tensor:
    """(T, heads, D) in 16 bits: packed rows, the last dimension contiguous, strides multiples of 16 bytes."""
    strides = (cute.sym_int64(divisibility=DIVISOR), cute.sym_int64(divisibility=DIVISOR), 1)
    return make_fake_tensor(dtype, (rows, heads, dim), strides, assumed_align=ALIGNMENT)


def by_head(dtype: type[cutlass.Numeric], heads: cute.SymInt, rows: cute.SymInt) -> cute.Tensor:
    """(heads, T) in 32 bits, contiguous along the rows."""
    return make_fake_tensor(dtype, (heads, rows), (cute.sym_int64(), 1), assumed_align=4)


def flat(dtype: type[cutlass.Numeric], length: cute.SymInt, align: int = 4) -> cute.Tensor:
    """(length), contiguous, at an address that is a multiple of `align` bytes."""
    return make_fake_tensor(dtype, (length,), (1,), assumed_align=align)


def table(fields: int, align: int = 4) -> cute.Tensor:
    """(n, fields) int32 that the host writes, contiguous."""
    return make_fake_tensor(Int32, (cute.sym_int32(), fields), (fields, 1), assumed_align=align)


def stream() -> cuda.CUstream:
    """The stream that is current when the compiled kernel is called; callers do not pass it."""
    return make_fake_stream(use_tvm_ffi_env_stream=True)
