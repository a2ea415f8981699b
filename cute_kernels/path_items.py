"""The fields of a forward work item over trees of any depth, as the host's plan writes them and the kernel reads them.

A *tile* is a run of consecutive packed rows of one group, as in `items`. The keys that it sees are those of the
segments on the path of its first row, and its own rows. Its blocks of `tile_n` keys cover them from the root on, each
key once; a block may begin at any row, and reach over rows that no row of the tile sees. Plain integers, no CuTe.

A masked block has two numbers, its first key and its limit: no row of the tile sees keys from there on. Of those
before, a row sees all keys k <= row; where the limit is written with a minus, only the ones whose `visible_end` is
above the row. A work item has those of the first masked block, with which a tile begins; the table of *regions* has a
row for each other one. Then it has a row for each run of whole blocks, which every row of the tile sees: the first key,
and how many blocks follow one another.
"""

ROW = 0  # first packed row of the tile
ROW_END = 1  # one past its last row; at most ROW + the tile's tokens, and within the group
REGION = 2  # the tile's first row in the table of regions
MASKED = 3  # masked blocks, at least 1
BLOCKS = 4  # blocks in all
KEY = 5  # first key of the first masked block
LIMIT = 6  # its limit
NUM_FIELDS = 7
