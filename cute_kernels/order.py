"""In which order the forward's clusters take tiles and head groups. Integers of Python or of the DSL, no CuTe.

Of n clusters, c takes the items c, c + n, c + 2 n, ...: a round of items is one of each. Head groups come one after
another, tiles longest first, so that K and V of a head group stay in L2; what each cluster has to do then differs by
about a tile. That is little of many rounds. Of few it is much: some clusters begin with a long tile of the last head
group where others are through. So in few rounds head groups come side by side, the longest tiles of all of them first,
and every other round is dealt from the far end: who has the longest tile of one has the shortest of the next.
"""

from typing import Any, NamedTuple

FEW_ROUNDS = 24  # fewer are few; of 39 rounds head groups side by side were 2 % slower, though more even
L2_BYTES = 48 * 2**20  # K and V of head groups side by side, of an H200's 50 MB


def select(condition: Any, a: Any, b: Any) -> Any:
    """a if the condition holds, else b."""
    return b + condition * (a - b)


class Order(NamedTuple):
    """What an item's number stands for: a permutation of all pairs of a tile and a head group.

    Attributes:
        num_tiles, head_groups: of the launch.
        side: head groups side by side, of which head_groups is a multiple.
        run: so many items are dealt one way, as many from the far end, and so on.
    """

    num_tiles: Any
    head_groups: Any
    side: Any
    run: Any

    @classmethod
    def of(
        cls, num_tiles: Any, head_groups: Any, clusters: Any, kv_heads: Any, rows: Any, head_dim: int, sorted_rows: int
    ) -> "Order":
        """The order on so many clusters, where K and V have so many rows of head_dim 16-bit elements a KV head.

        sorted_rows: with more rows than that, not all tiles come longest first.
        """
        near = L2_BYTES // (4 * head_dim) // rows * (head_groups // kv_heads)  # whose K and V stay in L2 together
        # All of them side by side, or each half; in more parts there are too few rounds in each to even out.
        side = select((head_groups > near) & (head_groups % 2 == 0), head_groups // 2, head_groups)
        items = num_tiles * head_groups
        few = (items < FEW_ROUNDS * clusters) & (side <= near) & (rows <= sorted_rows)
        return cls(num_tiles, head_groups, select(few, side, 1), select(few, clusters, items))

    @property
    def items(self) -> Any:
        return self.num_tiles * self.head_groups

    def place(self, item: Any) -> tuple[Any, Any]:
        """(tile, head group) of an item."""
        turn = item // self.run
        first = turn * self.run
        left = self.items - first
        last = first + select(left < self.run, left, self.run) - 1
        at = select(turn % 2 == 1, first + last - item, item)
        head_group = at // (self.num_tiles * self.side) * self.side  # the first of those side by side
        at = at - head_group * self.num_tiles
        return at // self.side, head_group + at % self.side
