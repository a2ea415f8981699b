"""The contract of the host and the kernels: fields of plans, sizes of tiles and workspaces. Plain integers, no CuTe.

The digest of a kernel covers this file (codegen/toolchain.py), so a change here is a miss in the store.
"""

MAX_ROWS = 2**31 - 2**10  # packed rows: their numbers, and those that a tile reaches past the last one, are int32


# ---------------------------------------------------------------- the plans' tables: written by the host
class ForwardFields:
    """The fields of a forward work item.

    A *tile* is a run of consecutive packed rows of one group, of every query head of one KV head. It sees keys of two
    regions: the context (prompt rows) and its own responses. A region is cut into blocks of `tile_n` keys from its
    first row on; the last block may reach past the region's end. Every key of an unmasked block is visible to every row
    of the tile. The blocks that need the mask are the last ones of their region.
    """

    ROW = 0  # first packed row of the tile
    ROW_END = 1  # one past its last row; at most ROW + the tile's tokens, and within the group
    CONTEXT_BEGIN = 2  # context keys [CONTEXT_BEGIN, CONTEXT_END); empty if the group has no prompt
    CONTEXT_END = 3
    OWN_BEGIN = 4  # own keys [OWN_BEGIN, ROW_END); empty (OWN_BEGIN == ROW_END) if the tile has prompt rows only
    CONTEXT_MASKED = 5  # how many of the context's last blocks need the mask
    OWN_MASKED = 6  # how many of the own region's last blocks need the mask
    STRADDLES = 7  # 1: rows of several segments, whose own keys begin at segment_begin[row]; 0: all own keys k <= row
    NUM_FIELDS = 8


class PathFields:
    """The fields of a forward work item over trees of any depth, and with windows or chunks.

    A *tile* is a run of consecutive packed rows of one group, as in `ForwardFields`. It sees the keys of the segments
    on the path of its first row, and of its own rows. Its blocks of `tile_n` keys cover them from the root on, each key
    once; a block may begin at any row, and reach over rows that no row of the tile sees.

    A masked block has two numbers, its first key and its limit: no row of the tile sees keys from the limit on. Of the
    keys before it, a row sees all keys k <= row; where the limit is written with a minus, only keys whose `visible_end`
    is above the row. A work item has the numbers of the first masked block, with which a tile begins; the table of
    *regions* has a row for each other masked block. Then it has a row for each run of whole blocks, which every row of
    the tile sees: the first key, and how many blocks follow one another.

    With a window or chunks, a row keeps only the keys from its first one on, in every masked block (`first_key` [T],
    packed rows; along a path rows ascend as positions do, so one number says where a row's window begins). Of each
    segment of the path, blocks begin at the first key that any row of the tile sees.
    """

    ROW = 0  # first packed row of the tile
    ROW_END = 1  # one past its last row; at most ROW + the tile's tokens, and within the group
    REGION = 2  # the tile's first row in the table of regions
    MASKED = 3  # masked blocks, at least 1
    BLOCKS = 4  # blocks in all
    KEY = 5  # first key of the first masked block
    LIMIT = 6  # its limit
    NUM_FIELDS = 7

    # Behind them for each *part* of the tile, its equal runs of rows one after the other (a warp group of a CTA takes a
    # part): the blocks [BEGIN, END) and [REST, BLOCKS) that its rows see, perhaps with others between them. A part
    # without rows has none.
    BEGIN = 0
    END = 1
    REST = 2
    NUM_PART_FIELDS = 3


class BackwardFields:
    """The fields of the backward's work items, and of the reductions behind them.

    A *key block* is `tile_n` consecutive packed rows of one group, taken by one CTA; a work item is the neighbouring
    key blocks of a cluster (one or two CTAs), which walk the same query blocks: for each query head of one KV head,
    blocks of `tile_m` packed rows of one grid over all T rows, from the last to the first. A key block may span
    segments, and a query block groups: each key n keeps the query rows n <= q < visible_end[n].
    """

    KV_HEAD = 0
    KEY = 1  # first key row; CTA r of the cluster has the keys from KEY + r * tile_n on
    KEY_END = 2  # one past the item's last key: at most KEY + cluster * tile_n, and within the group
    BLOCK_BEGIN = 3  # query blocks [BLOCK_BEGIN, BLOCK_END), at least one
    BLOCK_END = 4
    UNMASKED_END = (
        5  # (and 6) per CTA: rows q < UNMASKED_END that all its tile_n keys precede need no mask; 0: all need it
    )
    PARTIAL = 7  # -1: the item owns its keys' dK and dV; else the number of its fp32 partial sums
    # Deterministic sums of dQ: items add to a query block in the order of their keys.
    ORDER = 8  # this item's number among those of its KV head; pieces of a split item share it
    PREVIOUS_END = 9  # to blocks below this one, item ORDER - 1 has added before ...
    PREVIOUS = 10  # ... and to the others this one, -1: none
    NUM_FIELDS = 11

    # With a window, query blocks [BLOCK_BEGIN, BLOCK_END) are rows of a table (`BlockFields`), walked from the last to
    # the first; ORDER, PREVIOUS_END, PREVIOUS and UNMASKED_END are not used.

    # A reduction: the partial sums of one run of keys, added up in order.
    SUM_KV_HEAD = 0
    SUM_KEY = 1
    SUM_KEY_END = 2
    SUM_FIRST = 3  # partial sums [SUM_FIRST, SUM_FIRST + SUM_COUNT)
    SUM_COUNT = 4
    NUM_SUM_FIELDS = 5


class BlockFields:
    """The fields of a row of the backward's table of query blocks, which layouts with a window have: a query block of a
    work item, of every query head. Of a cluster's CTAs, `rank` is the number; a CTA has 64 keys a warp group.

    Row q sees key n iff n <= q < visible_end[n] and position[q] < end_position[n].
    """

    M_BLOCK = 0  # packed rows from M_BLOCK * tile_m on
    FLAGS = 1
    SHIFT = 2  # position[q] - q of the block's rows, unless SEVERAL
    BEFORE = 3  # deterministic: how many add to the block's dQ before: CTAs up to head dim 128, beyond items
    NUM_FIELDS = 4

    # Bits of FLAGS. First, two for each warp group (2 * rank + wg) up to head dim 128, the rows that see its keys:
    SKIP, FIRST_ROWS, WHOLE, LAST_ROWS = range(4)
    MASKED = 8  # (and 9) per CTA: not every row of the block sees all its keys
    OWN = 10  # (and 11) per CTA, up to head dim 128: rows of the block see its keys; else it only releases the block
    SEVERAL = 12  # rows of several segments, whose positions must be looked up


# ---------------------------------------------------------------- the forward's tiles
WG_ROWS = 64  # query rows of a warp group, which are rows of a product


def warp_group_tokens(packed_heads: int) -> int:
    """Packed rows (tokens) that a warp group takes of all packed heads."""
    return WG_ROWS // packed_heads


# ---------------------------------------------------------------- the backward's workspaces
STAT_COLUMNS = 8  # bf16 numbers a query row: its lse and dpsum, as columns of an operand of the main kernel
LOCKS = 2  # a query block and head: one for each part of dQ that has one writer at a time, if in the order of the keys


def part_rows(tile_m: int) -> int:
    """Rows in a part of a block: the first (or last) rows of a block whose other rows see no keys."""
    return 16 * -(-tile_m // 32)


def lock_words(blocks: int) -> int:
    """Int32 of the locks of so many query blocks (of all heads), and behind them the counter of work items."""
    return blocks * LOCKS + 1


def clears_ahead(head_dim: int) -> bool:
    """Whether the main kernel of a native head dim sets sums of dQ to 0; else the preprocess does."""
    return head_dim <= 128


def partial_floats(head_dim: int, head_dim_v: int, tile_n: int, cluster: int) -> int:
    """Floats of a work item's partial sums, of native head dims: for each CTA of dK [tile_n * head_dim], then of dV
    [tile_n * head_dim_v]."""
    return cluster * tile_n * (head_dim + head_dim_v)
