"""Core attention of Transformer Engine's spec, which does not run on CPUs: a class with the interface of
megatron-core's `TEDotProductAttention` stands in for it. Run this module in a fresh process: it must come before
`dualkv.integrations.megatron`."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.extensions import transformer_engine
from megatron.core.models.gpt import gpt_layer_specs  # noqa: F401  (before the stand-in: it imports more of the package)


class StandIn(torch.nn.Module):
    """A module that is built and called with what `TEDotProductAttention` takes. It computes nothing of its own."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = "p2p",
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        self.config, self.layer_number = config, layer_number

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        num_splits: int | None = None,
    ) -> torch.Tensor:
        raise NotImplementedError("stock attention")


transformer_engine.HAVE_TE, transformer_engine.TEDotProductAttention = True, StandIn

import dualkv  # noqa: E402
from dualkv.integrations.megatron import PackedGroups, disable, enable  # noqa: E402
from tests.integrations.megatron import cpu  # noqa: E402
from tests.integrations.megatron.updates import build, layer_spec  # noqa: E402

LAYOUT = dualkv.Layout.from_segments([0, 3, 5, 6, 8], [-1, 0, 1, 0])


def outputs(model: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Compute the outputs of packed rows, and gradients of the weights."""
    ids = torch.arange(LAYOUT.num_tokens)[None] % 7
    out = model(ids, LAYOUT.position_ids[None], None, packed_seq_params=PackedGroups(LAYOUT))
    model.zero_grad()
    out.square().sum().backward()
    return out.detach(), [p.grad for p in model.parameters()]


def of_engine() -> Any:
    spec = layer_spec()
    spec.submodules.self_attention.submodules.core_attention = StandIn
    return spec


def main(file: str) -> None:
    with cpu.rank(dist.HashStore()):
        cpu.parallel()
        local = outputs(build(enable(layer_spec()), {}))
        spec = enable(of_engine())
        from_spec = build(spec, {})
        enabled = enable(build(of_engine(), {}))
        found = {"local": local, "spec": outputs(from_spec), "model": outputs(enabled)}
        cores = [layer.self_attention.core_attention for layer in disable(enabled).decoder.layers]
        try:
            enabled(torch.zeros(1, 4, dtype=torch.int64), torch.arange(4)[None], None)
        except NotImplementedError as error:
            found["disabled"] = str(error)
    found["classes"] = [type(core).__name__ for core in cores]
    found["undone"] = disable(spec).submodules.self_attention.submodules.core_attention is StandIn
    torch.save(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
