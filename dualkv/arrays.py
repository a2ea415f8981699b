"""Checks of integers and token sequences from callers, and small helpers for rows of tokens."""

from __future__ import annotations

import math
import numbers
import operator
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Lengths = Sequence[int] | npt.NDArray[Any] | torch.Tensor
TokenIds = Sequence[int] | npt.NDArray[Any] | torch.Tensor
IntArray = npt.NDArray[np.int64]

# Decorates what makes tensors that are kept for later calls: a backward cannot save those made in inference mode.
outside_inference_mode = torch.inference_mode(False)
MAX_LENGTH = 2**40  # of one length: far more rows than a layout takes, and sums of lengths keep within 64 bits


def positive(name: str, value: int, least: int = 1) -> int:
    """`value`, which may be a tensor [] of integers, as an integer of `least` or more; TypeError or ValueError for
    others."""
    if isinstance(value, torch.Tensor) and (value.ndim or value.is_meta or not _is_integer(value)):
        # Its value is not printed: it may be on a GPU.
        kind = f"{value.dtype} meta tensor" if value.is_meta else f"{value.dtype} tensor"
        raise TypeError(f"{name} is a {kind} of shape {tuple(value.shape)}, expected an integer")
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, expected an integer") from None
    if number < least:
        raise ValueError(f"{name} is {number}, expected {least} or more")
    return number


def check_gib(name: str, value: float) -> None:
    """Raise TypeError or ValueError for a `value` that is not a finite number above 0."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name} is a {type(value).__name__}, expected a number of GiB")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} is {value}, expected a finite number of GiB above 0")


def check_model(model: object) -> None:
    """Raise TypeError for anything but a module, such as the name of a model."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is {reprlib.repr(model)}, expected a torch.nn.Module: a model that is loaded")


def check_bool(name: str, value: bool) -> None:
    """Raise TypeError for a `value` that is not a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is a {type(value).__name__}, expected True or False")


def _is_integer(x: torch.Tensor) -> bool:
    return not (x.dtype == torch.bool or x.is_floating_point() or x.is_complex())


def to_device(x: torch.Tensor, device: torch.device | str | int) -> torch.Tensor:
    """Return `x` on a device. A copy from the host to a GPU runs in the current stream; the host does not wait."""
    device = torch.device(device)
    if device.type != "cuda" or x.device.type != "cpu":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def int_array(name: str, values: Lengths) -> IntArray:
    """`values` as a 1-D int64 array; TypeError or ValueError for others."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    try:
        array = np.asarray(values)
    except ValueError:
        raise TypeError(f"{name} must be a flat sequence of integers, got {values!r}") from None
    if array.ndim == 0:
        raise TypeError(f"{name} is {reprlib.repr(values)}, expected a list of integers")
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu":
        found = "str" if array.dtype.kind == "U" else array.dtype
        first = array.reshape(-1).tolist()[:1]
        raise TypeError(f"{name} must hold integers, got {found} values such as {reprlib.repr(*first)}")
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {tuple(array.shape)}")
    if array.dtype.kind == "u" and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} holds {array.max()}, expected integers of 64 bits with a sign")
    return array.astype(np.int64)


def length_array(name: str, values: Lengths) -> IntArray:
    """`values` as lengths: integers of 0 or more."""
    array = int_array(name, values)
    if (array < 0).any():
        at = int(np.argmax(array < 0))
        raise ValueError(f"{name}[{at}] is {array[at]}, a length must be 0 or more")
    if (array > MAX_LENGTH).any():
        at = int(np.argmax(array > MAX_LENGTH))
        raise ValueError(f"{name}[{at}] is {array[at]}, a length must be {MAX_LENGTH} or less")
    return array


def length_arrays(name: str, values: Iterable[Lengths]) -> list[IntArray]:
    """One array of lengths for each prompt."""

    def check(name: str, value: Any, has: str) -> None:
        if isinstance(value, (str, bytes)) or not hasattr(value, has) or getattr(value, "ndim", 1) == 0:
            raise TypeError(
                f"{name} is {reprlib.repr(value)}, expected a list of response lengths for each prompt, such as "
                "[[3, 2]] for one prompt and two responses"
            )

    check(name, values, "__iter__")
    found = []
    for g, lengths in enumerate(values):
        check(f"{name}[{g}]", lengths, "__len__")
        found.append(length_array(f"{name}[{g}]", lengths))
    return found


def cumulative_array(name: str, values: Lengths) -> IntArray:
    """`values` as cumulative lengths: they start at 0 and do not decrease."""
    array = int_array(name, values)
    if array.size == 0 or array[0] != 0:
        raise ValueError(f"{name} must start with 0, got {array[:1].tolist()}")
    if (np.diff(array) < 0).any():
        at = int(np.argmax(np.diff(array) < 0))
        raise ValueError(f"{name} must not decrease, got {array[at]} then {array[at + 1]} at index {at}")
    return array


def check_zeros_and_ones(name: str, mask: npt.NDArray[Any]) -> None:
    """Raise ValueError for a mask [L] with another value: a weight, or an entry of an additive mask."""
    wrong = (mask != 0) & (mask != 1)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ValueError(
            f"{name}[{at}] is {mask[at]}, expected 0 or 1: weights of tokens belong into the loss, and an additive mask"
            " becomes one of zeros and ones by `mask == 0`"
        )


def positions(counts: IntArray) -> IntArray:
    """0, 1, ..., counts[i] - 1 for every i, end to end."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def ranges(starts: IntArray, lens: IntArray, device: torch.device) -> torch.Tensor:
    """starts [K], lens [K] -> int64 [sum(lens)]: `starts[k], starts[k] + 1, ...` of every k, end to end."""
    total = int(lens.sum())
    shift = starts - (np.cumsum(lens) - lens)
    if device.type == "cpu":
        return torch.from_numpy(np.repeat(shift, lens) + np.arange(total))
    # Only the K numbers are copied: a long copy from pageable memory would wait for the device.
    repeats = torch.from_numpy(lens).to(device)
    rows = torch.repeat_interleave(torch.from_numpy(shift).to(device), repeats, output_size=total)
    return rows.add_(torch.arange(total, device=device))


# ---------------------------------------------------------------- token sequences
def check_integers(name: str, ids: object) -> None:
    """Raise TypeError for anything but a tensor of integers."""
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got a {type(ids).__name__}")
    if not _is_integer(ids):
        raise TypeError(f"{name} must hold integers, got {ids.dtype}")


def sequence_list(name: str, value: Any, of: str = "token sequences") -> Sequence[Any]:
    """The entries of `prompts`, `responses` or masks."""
    if isinstance(value, torch.Tensor):
        if not value.is_nested:
            raise ValueError(
                f"{name} is one tensor of shape {tuple(value.shape)}, expected a list of sequences; pack_padded takes "
                "padded batches"
            )
        return value.unbind()
    if isinstance(value, np.ndarray) and value.dtype == object:  # veRL's non-tensor batches
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(f"{name} is a {type(value).__name__}, expected a list of {of}")
    if len(value) == 0:
        raise ValueError(f"{name} is empty, expected at least one entry")
    return value


def token_tensor(name: str, value: TokenIds) -> torch.Tensor:
    """One sequence as a 1-D int64 tensor; TypeError or ValueError for others."""
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{name} is the text {reprlib.repr(value)}, expected token ids: tokenize texts first")
    if not isinstance(value, torch.Tensor):
        return torch.from_numpy(int_array(name, value))
    if value.dtype != torch.int64:
        check_integers(name, value)
    if value.dim() != 1:
        raise ValueError(f"{name} must have one dimension, got shape {tuple(value.shape)}")
    return value.long()


def check_one_device(tokens: list[torch.Tensor]) -> None:
    """Raise ValueError for tokens on different devices."""
    devices = {t.device for t in tokens}
    if len(devices) > 1:
        names = " and ".join(sorted(map(str, devices)))
        raise ValueError(f"prompts and responses are on {names}, expected one device")


def to_host(prompts: list[torch.Tensor]) -> list[npt.NDArray[Any]]:
    """Prompts as arrays: views of CPU tensors, one copy for all tensors on a GPU."""
    if all(p.device.type == "cpu" for p in prompts):
        return [p.numpy() for p in prompts]
    check_one_device(prompts)
    return np.split(torch.cat(prompts).cpu().numpy(), np.cumsum([len(p) for p in prompts])[:-1])
