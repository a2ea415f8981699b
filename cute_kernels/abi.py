"""What the host and the kernels must agree on: fields of work items, sizes of workspaces. Plain integers, no CuTe.

The digest of every kernel covers this file (codegen/toolchain.py), so that a change here is a miss in the store.
"""

MAX_ROWS = 2**31 - 2**10  # packed rows: their numbers, and those that a tile reaches past the last one, are int32

# ---------------------------------------------------------------- the backward's workspaces
STAT_COLUMNS = 8  # bf16 numbers a query row: its lse and dpsum, as columns of an operand of the main kernel
LOCKS = 2  # a query block and head: one for each part of dQ that has one writer at a time, if in the order of the keys


def lock_words(blocks: int) -> int:
    """Int32 of the locks of so many query blocks (of all heads), and behind them the counter of work items."""
    return blocks * LOCKS + 1


def clears_ahead(head_dim: int) -> bool:
    """Whether the main kernel of a native head dim sees to it that sums of dQ start at 0; else the one before does."""
    return head_dim <= 128


def slab_floats(head_dim: int, tile_n: int, cluster: int) -> int:
    """Floats of a work item's partial dK and dV, of a native head dim: [cluster, 2, tile_n * head_dim]."""
    return cluster * 2 * tile_n * head_dim
