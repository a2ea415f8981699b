"""The fields of a forward work item over trees of any depth, as the host's plan writes them and the kernel reads them.

A *tile* is a run of consecutive packed rows of one group, as in `items`. The keys that it sees are those of the
segments on the path of its first row, and its own rows. Its blocks of `tile_n` keys cover them from the root on, each
key once; a block may begin at any row, and reach over rows that no row of the tile sees. Plain integers, no CuTe.

The table of *regions* has two numbers a row. First a row for each masked block (MASKED of them): its first key, and its
limit: no row of the tile sees keys from there on. Of those before, a row sees all keys k <= row; where the limit is
written with a minus, only the ones whose `visible_end` is above the row. Then a row for each run of whole blocks, which
every row of the tile sees: the first key, and how many blocks follow one another.
"""

ROW = 0  # first packed row of the tile
ROW_END = 1  # one past its last row; at most ROW + the tile's tokens, and within the group
REGION = 2  # the tile's first row in the table of regions
MASKED = 3  # masked blocks, at least 1
BLOCKS = 4  # blocks in all
NUM_FIELDS = 5
