"""The fields of a work item, as the host's plan writes them and the kernels read them. Plain integers, no CuTe.

A *tile* is a run of consecutive packed rows of one group, of every query head of one KV head. It sees keys of two
regions: the context (prompt rows) and its own responses. A region is cut into blocks of `tile_n` keys from its first
row on; the last block may reach past the region's end. Every key of an unmasked block is visible to every row of the
tile. The blocks that need the mask are the last ones of their region.
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
