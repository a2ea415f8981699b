"""A part of a walk whose rows lie on several ranks, which run attention on all of its rows and a share of the heads."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from dualkv.arrays import outside_inference_mode
from dualkv.branches import Branch
from dualkv.layout import Layout
from dualkv.sequence_parallel import Shard


class BranchShard(Shard):
    """This rank's rows of a part of a walk, `branch`, which is of the same part on all ranks.

    A trunk keeps the keys and values of all its rows, of this rank's heads. Rows that pad the part read and keep
    nothing; their attention is zero. `layout` is that of the part's own rows as one segment, padded.
    """

    is_part = True

    def __init__(self, branch: Branch, group: dist.ProcessGroup | None, multiple: int = 1) -> None:
        super().__init__(branch.part.layout, group, multiple)
        self.branch = branch

    @property
    def whole(self) -> Layout:
        return self.branch.whole

    @cached_property
    @outside_inference_mode
    def order(self) -> torch.Tensor:
        return torch.arange(self.layout.num_tokens, device=self.layout.device)  # without waiting for the device

    @property
    def position_ids(self) -> torch.Tensor:
        return self.own_rows(self.branch.position_ids)

    def own_rows(self, of_part: torch.Tensor) -> torch.Tensor:
        """Values [t] of the part's own rows -> [num_tokens] of this rank's rows, 0 for those that pad the part."""
        return F.pad(of_part, (0, self.layout.num_tokens - len(of_part)))[self.rows]

    def attention_of(self, layer: Hashable) -> Callable[..., torch.Tensor]:
        return partial(self.attention, layer=layer)

    def attention(self, *args: Any, layer: Hashable, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        """Run :meth:`Branch.attention` of the part's rows behind its path, for those of this rank, like
        :meth:`Shard.attention`."""
        own, padding = self.branch.num_tokens, self.layout.num_tokens - self.branch.num_tokens

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _layout: Layout, *given: Any, **more: Any) -> Any:
            out = self.branch.attention(q[:own], k[:own], v[:own], *given, layer=layer, **more)
            return F.pad(out, (0, 0, 0, 0, 0, padding)) if padding else out

        return self.by_heads(run, *args, **kwargs)
