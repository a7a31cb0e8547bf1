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

from vmm.cuda_calls import CudaCalls, load_bindings
from vmm.files import default_directory
from vmm.machine import memory_room
from vmm.sizes import format_nbytes

_Found = tuple[bool | None, str]
_PACKAGES = ("pytest", "numpy", "cuda-bindings", "cupy-cuda13x", "cupy-cuda12x", "cupy", "nvtx", "transformers", "timm")


def look(*, fake: bool) -> dict[str, _Found]:
    """Everything, each for itself: what fails names its reason and keeps nothing else from being looked at."""
    wanted: dict[str, Callable[[], _Found]] = {
        "versions": _versions,
        "compiler": _compiler,
        "native parts": _native_parts,
        "host memory": _host_memory,
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
    return None, f"{format_nbytes(memory_room().available_nbytes)} available, {os.cpu_count()} cores"


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
