"""Tensors as the copy engine (TMA) reads them, and plans that live on a device: what backends share."""

from __future__ import annotations

import torch

ALIGNMENT = 16  # bytes: TMA's requirement for base addresses and strides
MAX_STRIDE = 2**40  # bytes: TMA's limit
MOST_STREAMS = 64  # that a plan remembers; PyTorch hands out 32 of a priority in turns
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # dq, dk, dv, dsinks


def tma_ready(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D] itself if TMA can read it in place (a slice of a wider tensor too), else a contiguous copy."""
    size = x.element_size()
    (st, sh, sd), unit, limit = x.stride(), ALIGNMENT // size, MAX_STRIDE // size
    aligned = x.data_ptr() % ALIGNMENT == 0 and st % unit == 0 and sh % unit == 0
    if aligned and sd == 1 and 0 < st < limit and 0 < sh < limit:
        return x
    return x.clone(memory_format=torch.contiguous_format)


class Plan:
    """The tensors of a layout's plan on one device."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors = tensors
        self._used_on: set[int] = set()

    def use(self, device: torch.device) -> None:
        """Keep the tensors' memory until the device's current stream has finished with it, even if the layout is
        dropped earlier.

        The allocator keeps a tensor's streams by handle until the tensor is freed, and asks each of them then. So a new
        stream with the handle of a destroyed one needs nothing more. As of any tensor, the last stream of a handle must
        live until the layout is dropped; PyTorch's own streams live for ever.
        """
        stream = torch._C._cuda_getCurrentRawStream(device.index)  # as for launches; making a Stream object takes 2 us
        if stream not in self._used_on:
            if len(self._used_on) == MOST_STREAMS:  # to tell the allocator again does no harm
                self._used_on.clear()
            for tensor in self._tensors:
                tensor.record_stream(torch.cuda.current_stream(device))
            self._used_on.add(stream)
