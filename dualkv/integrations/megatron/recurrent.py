"""Recurrent layers of megatron-core on packed rows, by :mod:`dualkv.integrations.recurrent`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm import gated_delta_net as stock
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.nn import functional as F

from dualkv.integrations import patching
from dualkv.integrations.megatron.checked import Checked, refuse_beside
from dualkv.integrations.megatron.rows import PackedGroups
from dualkv.integrations.recurrent import kernels
from dualkv.integrations.recurrent.rules import chunk_scan, convolution, convolution_of_paths, delta_rule, mamba2
from dualkv.integrations.recurrent.walked import Trees
from dualkv.sequence_parallel import Shard, check_heads

try:
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.ssm import mamba_mixer
    from megatron.core.ssm.mamba_layer import MambaLayer
except ImportError:  # before 0.19, or without Triton
    HybridModel = None


def _entered(packed: PackedGroups, layer: int, projected: torch.Tensor) -> tuple[Trees, torch.Tensor]:
    """The trees of a call, and their rows of projected [1, t, C]: a part of a walk pads none of its segments."""
    packed.layout._segments.use.seen = True  # as by attention: a pipeline stage may have none
    trees = packed.trees(layer)
    return trees, projected[:, : trees.num_tokens]


def _padded(x: torch.Tensor, packed: PackedGroups) -> torch.Tensor:
    """x [1, rows of the trees, ...] -> [1, t, ...]."""
    missing = packed.shard.num_tokens - x.shape[1]
    return F.pad(x, [0, 0] * (x.dim() - 2) + [0, missing]) if missing else x


def _convolved(
    trees: Trees, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, slow: bool
) -> torch.Tensor:
    """rows [1, t, C] behind a causal convolution along each path, with weight [C, 1, k]."""
    kernel = None if slow else kernels.convolution(activation, rows.device)
    rows, weight = rows.transpose(1, 2), weight.squeeze(1)
    return convolution_of_paths(trees, convolution, rows, weight, bias, kernel, activation=activation).transpose(1, 2)


class PackedGatedDeltaNet(Checked, stock.GatedDeltaNet):
    """[rows, 1, C] -> [rows, 1, C] and a bias, like the packed self-attention.

    Projections, convolution, norms and gates run on this context-parallel rank's own rows and this tensor-parallel
    rank's heads. The scan exchanges rows for heads with the context-parallel ranks, in the place of megatron-core's own
    exchange, which knows sequences alone.
    """

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> Any:
        if (packed := self._enter(hidden_states, packed_seq_params, kwargs, args)) is None:
            return super().forward(hidden_states, attention_mask, *args, packed_seq_params=packed_seq_params, **kwargs)
        refuse_beside(attention_mask=attention_mask, attention_bias=kwargs.get("attention_bias"))
        projected, _ = self.in_proj(hidden_states)
        out, gate = self._scanned(projected.transpose(0, 1), packed)

        def normed(out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self._apply_gated_norm(out, gate)
            return found.view(out.shape[1], 1, -1)

        if not getattr(self, "recompute_norm_out", False):
            return self.out_proj(normed(out, gate))
        checkpoint = tensor_parallel.CheckpointWithoutOutput(fp8=self.config.fp8 or self.config.fp4)
        found = self.out_proj(checkpoint.checkpoint(normed, out, gate))
        checkpoint.discard_output_and_register_recompute(found[0])
        return found

    @torch.compiler.disable
    def _scanned(self: Any, projected: torch.Tensor, packed: PackedGroups) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, t, q, k, v, gate, beta and alpha] -> results and gate [1, t, H, V]."""
        trees, projected = _entered(packed, self.layer_number, projected)
        slow = self.config.deterministic_mode  # the library's sums have no fixed order
        heads, keys, values = self.num_value_heads, 2 * self.qk_dim, self.v_dim
        qkv, gate, beta, alpha = projected.split([n // self.tp_size for n in (keys + values, values, heads, heads)], -1)
        qkv = _convolved(trees, qkv, self.conv1d.weight, self.conv1d.bias, self.activation, slow)
        qk, v = qkv.split([n // self.tp_size for n in (keys, values)], -1)
        qk = qk.unflatten(-1, (-1, self.key_head_dim)).contiguous()
        if self.use_qk_l2norm:
            qk = stock.l2norm(qk)
        q, k = qk.chunk(2, 2)
        v, gate = (x.unflatten(-1, (-1, self.value_head_dim)).contiguous() for x in (v, gate))
        g = -self.A_log.exp() * F.softplus(alpha.float() + self.dt_bias)
        rows = [q, k, v, g, beta.sigmoid()]
        kernel = None if slow else "chunk_gated_delta_rule"
        out = delta_rule(trees, rows, stock.torch_chunk_gated_delta_rule, kernel)
        return _padded(out, packed), _padded(gate, packed)

    def _check_heads(self: Any, shard: Shard) -> None:
        where, keys = f"the gated delta net of layer {self.layer_number}", self.num_key_heads
        for kind, heads in (("key", keys), ("value", self.num_value_heads)):
            if heads % self.tp_size:  # configs of a HybridModel are not asked
                expected = f"a multiple of the {self.tp_size} tensor-parallel ranks"
                raise ValueError(f"{where} has {heads} {kind} heads, expected {expected}")
        if self.num_value_heads % keys:
            raise ValueError(f"{where} has {self.num_value_heads} value heads, expected a multiple of {keys} key heads")
        check_heads(where, self.num_value_heads // self.tp_size, shard.world_size)


LAYERS: tuple[type, ...] = (TransformerLayer,)
MIXERS: dict[type, type] = {stock.GatedDeltaNet: PackedGatedDeltaNet}
# What the classes here read of megatron-core's.
READS: dict[type, str] = {
    stock.GatedDeltaNet: "in_proj conv1d dt_bias A_log out_proj _apply_gated_norm activation use_qk_l2norm qk_dim v_dim"
    " num_key_heads num_value_heads key_head_dim value_head_dim tp_size"
}

if HybridModel is not None:

    class PackedMambaMixer(Checked, mamba_mixer.MambaMixer):
        """[rows, 1, C] -> [rows, 1, C] and a bias. What runs on which rows and heads is as in the gated delta net."""

        def forward(
            self: Any,
            hidden_states: torch.Tensor,
            inference_context: Any = None,
            *,
            packed_seq_params: PackedSeqParams | None = None,
            **kwargs: Any,
        ) -> Any:
            given = {"inference_context": inference_context, **kwargs}
            if (packed := self._enter(hidden_states, packed_seq_params, given)) is None:
                return super().forward(hidden_states, packed_seq_params=packed_seq_params, **given)
            projected, _ = self.in_proj(hidden_states)
            out = self._scanned(projected.transpose(0, 1), packed).to(projected.dtype).transpose(0, 1)
            return self.out_proj(self.norm(out) if self.rmsnorm else out)

        @torch.compiler.disable
        def _scanned(self: Any, projected: torch.Tensor, packed: PackedGroups) -> torch.Tensor:
            """[1, t, z, x, B, C and dt] -> gated results [1, t, H * P] in fp32."""
            trees, projected = _entered(packed, self.layer_number, projected)
            inner, states = self.d_inner_local_tp, self.ngroups_local_tp * self.d_state
            slow = projected.device.type == "cpu" or self.config.deterministic_mode
            z, rows, dt = projected.split([inner, inner + 2 * states, self.nheads_local_tp], -1)
            rows = _convolved(trees, rows, self.conv1d_weight, self.conv1d_bias, self.activation, slow)
            x, b, c = rows.split([inner, states, states], -1)
            x = x.unflatten(-1, (-1, self.headdim)).contiguous()
            b, c = (each.unflatten(-1, (-1, self.d_state)).contiguous() for each in (b, c))
            out = mamba2(
                trees,
                [x, dt, b, c],
                -torch.exp(self.A_log.float()),
                chunk_scan if slow else mamba_mixer.mamba_chunk_scan_combined,
                dt_bias=self.dt_bias.float(),
                dt_softplus=True,
                chunk_size=self.chunk_size,
            )
            skipped = x.float() * self.D.float().view(self.nheads_local_tp, -1)
            return _padded((out + skipped).flatten(2) * F.silu(z.float()), packed)

        def _check_heads(self: Any, shard: Shard) -> None:
            check_heads(f"the Mamba mixer of layer {self.layer_number}", self.nheads_local_tp, shard.world_size)

    LAYERS = TransformerLayer, MambaLayer
    MIXERS[mamba_mixer.MambaMixer] = PackedMambaMixer
    READS[mamba_mixer.MambaMixer] = (
        "in_proj conv1d_weight conv1d_bias dt_bias A_log D norm rmsnorm out_proj activation chunk_size headdim d_state"
        " d_inner_local_tp nheads_local_tp ngroups_local_tp"
    )


def _guarded(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a class of megatron-core, which raises an error for PackedGroups: a layer that is not enabled
    would run all rows as one sequence. Attention raises errors of its own."""

    @wraps(forward)
    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, PackedGroups) for x in (*args, *kwargs.values())):
            raise ValueError(
                f"layer {layer.layer_number} ({type(layer).__name__}) got PackedGroups and is not enabled: call"
                " dualkv.integrations.megatron.enable(model)"
            )
        return forward(layer, *args, **kwargs)

    return call


_kind: Any
for _kind in MIXERS:
    patching.of(_kind).replace("forward", patching.marked(_guarded(_kind.forward)))


def mixer_of(layer: Any) -> Any:
    """The attention of a layer, or what it has in its place."""
    return layer.self_attention if isinstance(layer, TransformerLayer) else layer.mixer
