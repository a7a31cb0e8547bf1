"""The CUDA device with torch's CPU tensors: the fake driver below, torch's CPU allocator asking the CUDA table above.

Installing it is for good, so programs that use it run in processes of their own.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch

from ooc.devices.cuda import CudaDevice, CudaMemory
from ooc.testing.fake_device import FakeKernels
from vmm import native_build
from vmm.cuda_table import ALLOCATE, FREE, DriverPointers
from vmm.testing.fake_cuda import FakeCuda
from vmm.testing.fake_cuda.contexts import CONTEXT
from vmm.torch_cpu import torch_build_flags

CHUNK_NBYTES = 64 << 10
_UNMAP = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_size_t)
_SYNCHRONIZE = ctypes.CFUNCTYPE(ctypes.c_int)


class HostedTorch:
    """In place of `TorchCuda`: a CPU allocator that asks the functions that torch's CUDA half would ask."""

    version = "12.0"

    def __init__(self) -> None:
        include_dirs, library_dirs = torch_build_flags()
        path = native_build.build(
            "ooc_host_allocator",
            [Path(__file__).parent / "native" / "host_allocator.cpp"],
            include_dirs=include_dirs,
            library_dirs=library_dirs,
            libraries=["c10"],
            extra_flags=["-std=c++20", "-Wno-unused-parameter"],
            cache_key=torch.__version__,
        )
        self.library = ctypes.CDLL(str(path))
        self.library.host_install.argtypes = (ctypes.c_uint64, ctypes.c_uint64)
        self.library.host_context_set.argtypes = (ctypes.c_uint64,)
        self.library.host_memory_num_freed.restype = ctypes.c_uint64
        self.memory: Any = None

    def is_initialized(self) -> bool:
        return False

    def use_allocator(self, path: Path) -> None:
        table = ctypes.CDLL(str(path))
        self.library.host_install(*(_address(getattr(table, name)) for name in (ALLOCATE, FREE)))

    def start(self, index: int) -> None:
        assert index == 0
        self.make_current(CONTEXT)

    def current(self) -> int:
        """As `Contexts.current`, where the native table and the fake both look: none on a new thread."""
        found = ctypes.c_uint64()
        self.library.host_context_get(ctypes.byref(found))
        return found.value

    def make_current(self, context: int) -> None:
        """As `Contexts.make_current`."""
        self.library.host_context_set(context)

    def current_stream(self, index: int) -> int:
        assert index == 0
        return 0


class HostedMemory(FakeKernels, CudaMemory):
    """Ops run on the host, as kernels of the fake."""

    def __init__(self, *, bindings: FakeCuda, **options: Any) -> None:
        self.fake = bindings
        super().__init__(bindings=bindings, arena_nbytes=1 << 30, **options)


class HostedDevice(CudaDevice):
    """A device of `num_chunks` chunks, for one session; the fake lives on, as a real device would.

    Sessions after the first go to a fake of their own, while what outlived the first is freed in the first's.
    """

    granule_nbytes = CHUNK_NBYTES
    threshold_nbytes = CHUNK_NBYTES // 2
    memory_type = HostedMemory

    def __init__(
        self,
        *,
        num_chunks: int,
        host_budget_nbytes: int | None = 64 << 20,
        seed: int = 0,
        is_integrated: bool = False,
    ) -> None:
        self.torch = torch_ = HostedTorch()
        self.fake = FakeCuda(
            total_nbytes=num_chunks * CHUNK_NBYTES,
            granularity=CHUNK_NBYTES,
            seed=seed,
            is_integrated=is_integrated,
            contexts=torch_,
        )
        self.unmapped: list[tuple[int, int]] = []
        self._callbacks = (_SYNCHRONIZE(self._synchronize), _UNMAP(self._unmap))
        library = torch_.library
        pointers = DriverPointers(
            *map(_address, (library.host_memory_allocate, library.host_memory_free)),
            *map(_address, self._callbacks),
            *map(_address, (library.host_context_get, library.host_context_set)),
        )
        super().__init__(
            bindings=self.fake, torch_cuda=torch_, pointers=pointers, host_budget_nbytes=host_budget_nbytes
        )

    def _synchronize(self) -> int:
        return int(self.fake.cuCtxSynchronize()[0])

    def _unmap(self, address: int, nbytes: int) -> int:
        self.unmapped.append((address, nbytes))
        return int(self.fake.cuMemUnmap(address, nbytes)[0])


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
