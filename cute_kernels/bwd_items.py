"""The fields of the backward's work items, as the host's plan writes them and the kernels read them. Plain integers.

A *key block* is `tile_n` consecutive packed rows of one group, taken by one CTA; a work item is the neighbouring key
blocks of a cluster (one or two CTAs), which walk the same query blocks: for each query head of one KV head, blocks of
`tile_m` packed rows of one grid over all T rows, from the last to the first. A key block may span segments, and a query
block groups: each key n keeps the query rows n <= q < visible_end[n].
"""

KV_HEAD = 0
KEY = 1  # first key row; CTA r of the cluster has the keys from KEY + r * tile_n on
KEY_END = 2  # one past the item's last key: at most KEY + cluster * tile_n, and within the group
BLOCK_BEGIN = 3  # query blocks [BLOCK_BEGIN, BLOCK_END), at least one
BLOCK_END = 4
CLEAN_END = 5  # (and 6) per CTA: rows q < CLEAN_END that all its tile_n keys precede need no mask; 0: all rows need it
SLAB = 7  # -1: the item owns its keys' dK and dV; else the place of its fp32 partial sums
# Deterministic sums of dQ: items add to a query block in the order of their keys.
ORDER = 8  # this item's place among those of its KV head; pieces of a split item share it
PREVIOUS_END = 9  # to blocks below this one, item ORDER - 1 has added before ...
PREVIOUS = 10  # ... and to the others this one, -1: none
NUM_FIELDS = 11

# A reduction: the slabs of one run of keys, added up in order.
SUM_KV_HEAD = 0
SUM_KEY = 1
SUM_KEY_END = 2
SUM_FIRST = 3  # slabs [SUM_FIRST, SUM_FIRST + SUM_COUNT)
SUM_COUNT = 4
NUM_SUM_FIELDS = 5
