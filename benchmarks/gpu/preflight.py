"""What a borrowed machine has of what the gate needs.

    python -m benchmarks.gpu.preflight [fake]

One line of JSON: by name, whether it is good (null: neither) and what was found.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ooc.devices.host_memory import VARIABLE
from vmm.cuda_calls import CudaCalls, load_bindings
from vmm.files import default_directory
from vmm.host_blocks import HostBlocks
from vmm.machine import meminfo_nbytes, memory_room
from vmm.sizes import format_nbytes
from vmm.testing.fake_cuda import FakeCuda

_PINNED_NBYTES, _FAKE_PINNED_NBYTES = 4 << 30, 64 << 20
_Found = tuple[bool | None, str]
_PACKAGES = ("pytest", "numpy", "cuda-bindings", "cupy-cuda13x", "cupy-cuda12x", "cupy", "nvtx", "transformers", "timm")


def look(*, fake: bool) -> dict[str, _Found]:
    """Everything, each for itself: what fails names its reason and keeps nothing else from being looked at."""
    wanted: dict[str, Callable[[], _Found]] = {
        "versions": _versions,
        "compiler": _compiler,
        "native parts": _native_parts,
        "host memory": _host_memory,
        "pinning": lambda: _pinning(FakeCuda() if fake else None),
        "store": _store,
        "packages": _packages,
    }
    if not fake:
        wanted |= {"driver": _driver, "device": _device, "virtual memory": _virtual_memory}
    found = {}
    for name, ask in wanted.items():
        try:
            found[name] = ask()
        except Exception as error:  # noqa: BLE001 - whatever is wrong is what is asked for
            found[name] = False, repr(error)[:300]
    return found


def _versions() -> _Found:
    return None, f"Python {platform.python_version()}, torch {torch.__version__}, {platform.platform()}"


def _compiler() -> _Found:
    from vmm.native_build import find_compiler

    header = Path(sysconfig.get_path("include")) / "Python.h"
    return header.exists(), f"{' '.join(find_compiler())}; {header}{'' if header.exists() else ' is missing'}"


def _native_parts() -> _Found:
    from ooc.dispatch.extension import dispatcher_type
    from vmm.cuda_table import cuda_table

    started = time.monotonic()
    dispatcher_type()
    cuda_table()
    return True, f"built or found in {time.monotonic() - started:.1f} s"


def _host_memory() -> _Found:
    memory = meminfo_nbytes()
    said = os.environ.get(VARIABLE, "not set")
    return None, (
        f"MemTotal {format_nbytes(memory['MemTotal'])}, MemAvailable {format_nbytes(memory['MemAvailable'])}, room "
        f"{format_nbytes(memory_room().available_nbytes)}, {VARIABLE} {said}, {os.cpu_count()} cores"
    )


def _pinning(fake: FakeCuda | None) -> _Found:
    """How fast host memory is pinned, our way and the driver's: sessions pin before they train."""
    if fake is None:
        torch.zeros(1, device="cuda")  # makes the context current
    calls = CudaCalls(fake if fake is not None else load_bindings())
    nbytes = _FAKE_PINNED_NBYTES if fake is not None else min(_PINNED_NBYTES, memory_room().available_nbytes // 2)
    started = time.monotonic()
    HostBlocks(calls, budget_nbytes=nbytes, block_nbytes=2 << 20).close()
    both_s = time.monotonic() - started
    started = time.monotonic()
    blocks = HostBlocks(calls, budget_nbytes=nbytes, block_nbytes=2 << 20)
    pinned_s = time.monotonic() - started
    blocks.close()
    started = time.monotonic()
    address = int(calls.call("cuMemHostAlloc", nbytes // 8, 0, what="pinned memory"))
    alloc_s = time.monotonic() - started
    calls.call("cuMemFreeHost", address, what="pinned memory")
    return True, (
        f"{format_nbytes(nbytes)} registered at {nbytes / pinned_s / 1e9:.1f} GB/s, allocated by the driver at "
        f"{nbytes / 8 / alloc_s / 1e9:.1f} GB/s; the first time, given back again, in {both_s:.2f} s"
    )


def _store() -> _Found:
    directory = default_directory()
    return None, f"{directory}, {format_nbytes(shutil.disk_usage(directory).free)} free"


def _packages() -> _Found:
    """By their metadata: importing some of them takes longer than all the rest."""
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    missing = [name for name in _PACKAGES if name not in found]
    return "pytest" in found, f"{found}; not here: {', '.join(missing) or 'none'}"


def _driver() -> _Found:
    calls = CudaCalls(load_bindings())
    calls.call("cuInit", 0, what="starting CUDA")
    version = int(calls.call("cuDriverGetVersion", what="the driver's version"))
    return True, f"CUDA {version}, cuda-bindings {importlib.metadata.version('cuda-bindings')}"


def _device() -> _Found:
    free, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name(0)
    return True, f"{name}, {format_nbytes(free)} of {format_nbytes(total)} free, CUDA {torch.version.cuda}"


def _virtual_memory() -> _Found:
    from vmm.cuda import CudaDriver

    torch.zeros(1, device="cuda")  # makes the context current
    with CudaDriver(4, 2 << 20, bindings=load_bindings(), arena_nbytes=64 << 20) as driver:
        address = driver.reserve(2)
        driver.map(address, [(1, 1), (1, 1)])
        return True, f"granularity {driver.granularity}, one chunk at two addresses"


def main() -> int:
    """Look, and tell."""
    print(json.dumps(look(fake=sys.argv[1:] == ["fake"])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
