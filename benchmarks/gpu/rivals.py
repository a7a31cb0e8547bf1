"""What users of a card try before us: managed memory under torch, and DeepSpeed's ZeRO-Offload.

**Nothing here has met a GPU.** Each is run in a process of its own, which the gate ends when its time is up.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vmm import native_build

_LEFT_NBYTES = 256 << 20
"""Left free beside the smaller card: the libraries of torch take some when they start."""


def use_managed_memory(card_nbytes: int, stack: contextlib.ExitStack, *, fake: bool) -> None:
    """Let torch allocate managed memory, on a card that has only `card_nbytes` left: the rest is held.

    Over the fake only the library is built and loaded, and torch's memory stays as it is.
    """
    path = native_build.build(
        "ooc_managed_memory",
        [Path(__file__).parent / "native" / "managed.cpp"],
        libraries=["dl"],
        extra_flags=["-std=c++20"],
    )
    library = ctypes.CDLL(str(path))
    assert library.managed_allocate
    assert library.managed_free
    if fake:
        return
    from vmm.cuda_calls import CudaCalls, load_bindings

    allocator = torch.cuda.memory.CUDAPluggableAllocator(str(path), "managed_allocate", "managed_free")
    torch.cuda.memory.change_current_allocator(allocator)
    torch.cuda.init()
    torch.cuda.synchronize()
    calls = CudaCalls(load_bindings())
    held_nbytes = calls.memory_info().free_nbytes - card_nbytes - _LEFT_NBYTES
    if held_nbytes > 0:
        held = int(calls.call("cuMemAlloc", held_nbytes, what="the part of the card that is held"))
        stack.callback(calls.call, "cuMemFree", held, what="the part of the card that was held")


def with_deepspeed(model: nn.Module, optimizer: torch.optim.Optimizer, batch_size: int) -> tuple[Any, Any]:
    """ZeRO stage 2 with the optimizer's state and step on the host.

    Raises:
        ValueError: DeepSpeed is not installed.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise ValueError("NotInstalled: deepspeed")
    deepspeed: Any = importlib.import_module("deepspeed")
    deepspeed.init_distributed(
        dist_backend="nccl", auto_mpi_discovery=False, init_method="tcp://127.0.0.1:29517", rank=0, world_size=1
    )
    config = {
        "train_micro_batch_size_per_gpu": batch_size,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    engine, offloaded, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine, offloaded


def deepspeed_step(engine: Any, loss: torch.Tensor) -> None:
    """Backward pass and update, as its engine wants them."""
    engine.backward(loss)
    engine.step()
