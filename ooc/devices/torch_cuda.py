"""The parts of `torch.cuda` that a session on a GPU uses or replaces: allocator, streams, memory statistics.

`TorchCuda` is the only class that needs a GPU to run, and it only calls torch. The arguments of those calls are
decided elsewhere, and tested without a GPU.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from ooc.errors import DeviceUnavailable, Refused, SessionError
from vmm.cuda_table import ALLOCATE, FREE, CudaTable

__all__ = ["Refusals", "TorchCuda", "check_environment", "memory_stats", "replace_figures"]

_log = logging.getLogger(__name__)

_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_Undo = Callable[[], object]


class TorchCuda:
    """Calls `torch.cuda`; tests put another object in its place."""

    version = torch.version.cuda
    """Version of the CUDA toolkit that torch was built with; None: it was built without CUDA."""

    def is_initialized(self) -> bool:
        """Whether CUDA has been started in this process, and with it torch's own allocator."""
        return bool(torch.cuda.is_initialized())

    def use_allocator(self, path: Path) -> None:
        """Let torch call the table's functions for every CUDA allocation from now on.

        `record_stream` then does nothing, and need not: all compute work is one chain (`DeviceStreams.follow`).
        """
        allocator = torch.cuda.memory.CUDAPluggableAllocator(str(path), ALLOCATE, FREE)
        torch.cuda.memory.change_current_allocator(allocator)

    def start(self, index: int) -> None:
        """Start CUDA, and make the device's context current on this thread."""
        torch.cuda.set_device(index)
        torch.cuda.synchronize()

    def current_stream(self, index: int) -> int:
        """The handle of the stream on which this thread's next op runs."""
        return int(torch._C._cuda_getCurrentRawStream(index))


def check_environment(torch_cuda: Any, *, driver_version: int | None, is_ours: bool) -> None:
    """Raise unless torch's CUDA can be made to allocate from a session.

    Args:
        torch_cuda: A `TorchCuda` or its like.
        driver_version: As the driver says (13020 for 13.2); None: not known.
        is_ours: Whether torch allocates from our table already, since an earlier session.
    """
    if torch_cuda.version is None:
        raise DeviceUnavailable(
            f"device='cuda': this torch ({torch.__version__}) was built without CUDA.\n"
            "  Options: install a build of torch with CUDA; device='cpu'."
        )
    major = int(torch_cuda.version.split(".")[0])
    if driver_version is not None and driver_version // 1000 < major:
        raise DeviceUnavailable(
            f"device='cuda': the driver is too old: it knows CUDA {_dotted(driver_version)}, torch "
            f"({torch.__version__}) was built for {torch_cuda.version}.\n"
            f"  Options: a driver for CUDA {major}; a build of torch for CUDA {_dotted(driver_version)}."
        )
    for name in _ALLOCATOR_SETTINGS:
        if "expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", ""):
            raise Refused(
                f"{name}={os.environ[name]}: expandable segments are a feature of torch's own allocator, which a "
                f"session replaces.\n  Options: unset {name}; a session has no fragmentation for it to cure."
            )
    if torch_cuda.is_initialized() and not is_ours:
        raise SessionError(
            "CUDA is initialised already in this process, and torch's allocator cannot be changed any more.\n"
            "  Options: open the session before the first use of CUDA (before model.cuda(), torch.cuda.synchronize() "
            "or a tensor on the device); `ooc run` does."
        )
    if torch.backends.cudnn.benchmark:
        raise Refused(
            "torch.backends.cudnn.benchmark is on: its search asks torch's own allocator how much memory is free, "
            "which no other allocator can answer.\n  Options: torch.backends.cudnn.benchmark = False."
        )


def memory_stats(table: CudaTable) -> dict[str, Any]:
    """Memory statistics of the table, in the form of `torch.cuda.memory_stats_as_nested_dict`.

    The reserved bytes are the open session's pool. The "large pool" has large variables and what was allocated
    outside sessions; the "small pool" has the blocks of the heap.
    """
    numbers = table.numbers()
    large, small, unmanaged = (numbers[name] for name in ("large", "small", "unmanaged"))

    def by_pool(kind: str) -> dict[str, dict[str, int]]:
        counts = {"large_pool": _sum(large[kind], unmanaged[kind]), "small_pool": small[kind]}
        return {"all": _sum(*counts.values()), **counts}

    reserved = table.reserved_nbytes + unmanaged["nbytes"]["current"]
    peak = table.reserved_nbytes + unmanaged["nbytes"]["peak"]
    held = {"current": reserved, "peak": peak, "allocated": peak, "freed": peak - reserved}
    nothing = dict.fromkeys(("current", "peak", "allocated", "freed"), 0)
    found: dict[str, Any] = {
        "num_alloc_retries": 0,
        "num_ooms": numbers["num_refused"],
        "max_split_size": -1,
        "allocation": by_pool("num_blocks"),
        "active": by_pool("num_blocks"),
        "segment": {"all": nothing, "large_pool": nothing, "small_pool": nothing},
        "reserved_bytes": {"all": held, "large_pool": held, "small_pool": nothing},
        "inactive_split": {"all": nothing, "large_pool": nothing, "small_pool": nothing},
        "inactive_split_bytes": {"all": nothing, "large_pool": nothing, "small_pool": nothing},
        "oversize_allocations": nothing,
        "oversize_segments": nothing,
    }
    for name in ("allocated_bytes", "active_bytes", "requested_bytes"):
        found[name] = by_pool("nbytes")
    found["allocated"] = found["allocation"]  # as torch.accelerator names it
    return found


def replace_figures(table: CudaTable) -> _Undo:
    """Let torch's memory statistics (`torch.cuda.memory_allocated()` and others) report the table's. Returns an undo.

    torch's own functions raise with any allocator but its own, and scripts call them.
    """
    replaced = {
        "_cuda_memoryStats": lambda _device: memory_stats(table),
        "_cuda_resetPeakMemoryStats": lambda _device: table.reset_peaks(),
        "_cuda_resetAccumulatedMemoryStats": lambda _device: None,
        "_cuda_emptyCache": lambda: None,  # nothing is cached: the pool is the budget
        # torch.accelerator asks the allocator that was there before ours.
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_accelerator_getDeviceStats": lambda _device: memory_stats(table),
        "_accelerator_resetPeakStats": lambda _device: table.reset_peaks(),
        "_accelerator_resetAccumulatedStats": lambda _device: None,
        "_accelerator_emptyCache": lambda: None,
        "_accelerator_getMemoryInfo": lambda device: torch.cuda.mem_get_info(device),
    }
    undo = ExitStack()
    for name, function in replaced.items():
        _replace(undo, torch._C, name, function)
    return undo.close


class Refusals:
    """Refuses CUDA graphs while a session is open, since it cannot see the ops in them; announces compilation."""

    def __init__(self) -> None:
        self._undo = ExitStack()

    def install(self) -> None:
        """Refuse them from now on."""
        graphs = torch.cuda.graphs
        _replace(self._undo, graphs.graph, "__enter__", _refuse_capture)
        _replace(self._undo, graphs.CUDAGraph, "capture_begin", _refuse_capture)
        _replace(self._undo, torch.cuda, "make_graphed_callables", _refuse_capture)
        _replace(self._undo, torch, "compile", _announcing(torch.compile))

    def remove(self) -> None:
        """Refuse them no more. Idempotent."""
        self._undo.close()


def _refuse_capture(*_: Any, **__: Any) -> Any:
    raise Refused(
        "CUDA graph capture in a session: a graph replays its kernels without dispatching them, so nothing would "
        "load what they read.\n  Options: no torch.cuda.graph, make_graphed_callables or "
        "mode='reduce-overhead' in a session."
    )


def _announcing(compile_: Callable[..., Any]) -> Callable[..., Any]:
    def announced(*args: Any, **kwargs: Any) -> Any:
        _log.warning(
            "torch.compile in a session: Dynamo compiles nothing under a dispatch mode, so the function runs eagerly"
        )
        return compile_(*args, **kwargs)

    return announced


def _replace(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    if before is missing:
        undo.callback(delattr, owner, name)
    else:
        undo.callback(setattr, owner, name, before)


def _sum(*counts: dict[str, int]) -> dict[str, int]:
    return {name: sum(count[name] for count in counts) for name in counts[0]}


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
