"""Values of tokens, end to end, as one row per rollout."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import torch

from dualkv.arrays import IntArray, ranges

Form = Literal["list", "padded", "nested"]


def check_unpacked(values: torch.Tensor, count: int, of: str, form: Form) -> None:
    """Refuses another number of values than `count`, and an unknown form."""
    if values.dim() == 0 or values.shape[0] != count:
        raise ValueError(f"values has shape {tuple(values.shape)}, expected [{count}, ...]: one value for each {of}")
    if form not in get_args(Form):
        raise ValueError(f"form is {form!r}, expected 'list', 'padded' or 'nested'")


def as_rows(values: torch.Tensor, lens: IntArray, form: Form, width: int, padding_value: float) -> Any:
    """values [sum(lens), ...] end to end -> one row for each length: a list, [N, width, ...] padded, or nested."""
    if form == "list":
        return list(values.split(lens.tolist()))
    if form == "padded":
        rest = values.shape[1:]
        flat = values.new_full((len(lens) * width, *rest), padding_value)
        into = ranges(np.arange(len(lens)) * width, lens, values.device)
        return flat.index_copy(0, into, values).view(len(lens), width, *rest)
    offsets = torch.from_numpy(np.append(0, np.cumsum(lens))).to(values.device)
    return torch.nested.nested_tensor_from_jagged(
        values, offsets, min_seqlen=int(lens.min()), max_seqlen=int(lens.max())
    )
