"""A rival: saved tensors offloaded by torch's hooks, on streams of their own and read ahead, as fine-tuning tools do.

`torch.autograd.graph.save_on_cpu` copies on the compute stream and waits; here copies run beside the ops: one stream
each way, and the backward pass finds the tensors it needs next on their way back already. Parameters and small tensors
stay. **Nothing here has met a GPU**; without one the copies are plain ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

_LEAST_NBYTES = 1 << 20
_NUM_AHEAD = 3
"""How many saved tensors are read ahead of the one that the backward pass asks for."""


@dataclass(slots=True, eq=False)
class _Saved:
    host: torch.Tensor
    left: Any
    """An event behind the copy to the host."""
    device: torch.Tensor | None = None
    arrived: Any = None


class OffloadHooks:
    """Hooks for the forward passes of one training.

    Attributes:
        num_offloaded: Tensors that were copied to the host so far.
    """

    def __init__(self, device: torch.device, *, least_nbytes: int = _LEAST_NBYTES) -> None:
        self._device = device
        self._least_nbytes = least_nbytes
        self._is_cuda = device.type == "cuda"
        self._outward = torch.cuda.Stream(device) if self._is_cuda else None
        self._inward = torch.cuda.Stream(device) if self._is_cuda else None
        self._saved: list[_Saved | None] = []
        self.num_offloaded = 0

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """What the block's ops save is offloaded. One at a time; the backward pass comes before the next."""
        self._saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: torch.Tensor) -> tuple[int, torch.Tensor | None]:
        nbytes = tensor.numel() * tensor.element_size()
        is_parameter = isinstance(tensor, torch.nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)
        if nbytes < self._least_nbytes or tensor.device.type != self._device.type or is_parameter:
            return -1, tensor
        self.num_offloaded += 1
        host = torch.empty_like(tensor, device="cpu", pin_memory=self._is_cuda)
        left = None
        if self._is_cuda:
            self._outward.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._outward):
                host.copy_(tensor, non_blocking=True)
                left = self._outward.record_event()
            tensor.record_stream(self._outward)
        else:
            host.copy_(tensor)
        self._saved.append(_Saved(host, left))
        return len(self._saved) - 1, None

    def _unpack(self, packed: tuple[int, torch.Tensor | None]) -> torch.Tensor:
        index, kept = packed
        if kept is not None:
            return kept
        for ahead in range(index, max(index - 1 - _NUM_AHEAD, -1), -1):
            self._bring(self._saved[ahead])
        saved = self._saved[index]
        assert saved is not None, "saved tensors are unpacked once"
        assert saved.device is not None
        if saved.arrived is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(saved.arrived)
            saved.device.record_stream(current)
        self._saved[index] = None
        return saved.device

    def _bring(self, saved: _Saved | None) -> None:
        """Start the copy back, if it has not begun."""
        if saved is None or saved.device is not None:
            return
        if not self._is_cuda:
            saved.device = saved.host.clone()
            return
        with torch.cuda.stream(self._inward):
            self._inward.wait_event(saved.left)
            saved.device = saved.host.to(self._device, non_blocking=True)
            saved.arrived = self._inward.record_event()
