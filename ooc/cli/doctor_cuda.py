"""`ooc doctor --device cuda`: checks whether a session on this GPU would work, and says what to fix.

Checks run in the order in which things can go wrong on a fresh machine: bindings, driver, torch, device, context,
memory, mappings, pinning, links, and last a real session. A check that depends on a failed one is left out.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ooc.cli.findings import Finding, Verdict
from ooc.devices.cuda import CudaDevice, shares_host_memory
from ooc.devices.cuda_memory import DeviceMemory
from ooc.devices.host_memory import VARIABLE, host_memory_nbytes
from ooc.devices.protocols import Device
from ooc.devices.torch_cuda import TorchCuda, check_environment
from ooc.testing.fake_device import FakeCudaDevice
from ooc.units import GIB, MIB, format_duration, format_nbytes, format_rate
from vmm.cuda import CudaDriver
from vmm.cuda_calls import CudaCalls, load_bindings
from vmm.files import default_directory
from vmm.host_blocks import HostBlocks
from vmm.machine import meminfo_nbytes, memory_room
from vmm.testing.fake_cuda import FakeCuda

__all__ = ["Probe", "examine", "fake_probe", "real_probe"]

_PINNED_NBYTES = GIB
_LINK_NBYTES = 64 * MIB
_TRIAL_BUDGET_NBYTES = 128 * MIB
_FREE_SHARE = 0.9
"""With less of the device's memory free, other processes hold a part that matters."""
_SLOW_LINK_BYTES_PER_S = 5e9
"""PCIe 3.0 with 16 lanes has twice as much; pageable copies, or 4 lanes, have less."""
_NOBODY, _ONE_PROCESS = 2, 3
"""CU_COMPUTEMODE_PROHIBITED and CU_COMPUTEMODE_EXCLUSIVE_PROCESS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The device that is checked, and how it is reached.

    Attributes:
        load: Imports the driver's bindings.
        torch_cuda: A `TorchCuda` or its like, for `check_environment`.
        start: Makes the device's context current on this thread.
        device: The `Device` of the session.
        index: The device's number.
        tensors_on: Where the session's tensors are made.
        nbytes: Upper bound on what is pinned to see how fast that is.
    """

    load: Callable[[], Any]
    torch_cuda: Any
    start: Callable[[], object]
    device: Device
    index: int
    tensors_on: str
    nbytes: int = _PINNED_NBYTES


def real_probe(index: int = 0) -> Probe:
    """Make the probe of this machine's GPU."""
    device = CudaDevice(index=index, host_budget_nbytes=4 * _TRIAL_BUDGET_NBYTES)
    return Probe(
        load=load_bindings,
        torch_cuda=TorchCuda(),
        start=device.start,
        device=device,
        index=index,
        tensors_on=f"cuda:{index}",
    )


def fake_probe(fake: FakeCuda | None = None) -> Probe:
    """Make a probe of a fake GPU, for tests of the doctor."""
    found = fake if fake is not None else FakeCuda(granularity=2 << 20)

    class Torch:
        version = "12.0"

        def is_initialized(self) -> bool:
            return False

    return Probe(
        load=lambda: found,
        torch_cuda=Torch(),
        start=lambda: None,
        device=FakeCudaDevice(host_budget=4 * _TRIAL_BUDGET_NBYTES),
        index=0,
        tensors_on="cpu",
        nbytes=16 * MIB,
    )


def examine(probe: Probe, store: str | None = None) -> list[Finding]:
    """Run the checks, until one fails that the rest depends on."""
    findings: list[Finding] = []
    looks = _looks(probe, store)
    for index, (name, look) in enumerate(looks):
        try:
            findings.extend(look())
        # Any failure is a finding: a doctor that crashes says nothing.
        except Exception as error:  # noqa: BLE001
            first, *rest = (str(error) or type(error).__name__).splitlines()
            remedy = " ".join(line.strip() for line in rest)
            findings.append(Finding(name=name, value=first, verdict=Verdict.STOP, remedy=remedy))
        if any(f.verdict is Verdict.STOP for f in findings):
            left = ", ".join(name for name, _ in looks[index + 1 :])
            if left:
                findings.append(Finding(name="not looked at", value=left, verdict=Verdict.NOTE))
            break
    return findings


def _looks(probe: Probe, store: str | None) -> list[tuple[str, Callable[[], Iterator[Finding]]]]:
    known: dict[str, Any] = {}
    return [
        ("cuda-bindings", lambda: _bindings(probe, known)),
        ("CUDA driver", lambda: _driver(probe, known)),
        ("torch with CUDA", lambda: _torch(probe, known)),
        ("device", lambda: _device(probe, known)),
        ("CUDA context", lambda: _context(probe)),
        ("device memory", lambda: _memory(known)),
        ("virtual memory", lambda: _mapping(probe, known)),
        ("pinned memory", lambda: _pinning(probe, known)),
        ("link", lambda: _link(probe, known)),
        ("session on the device", lambda: _session(probe, store)),
    ]


def _bindings(probe: Probe, known: dict[str, Any]) -> Iterator[Finding]:
    known["calls"] = CudaCalls(probe.load())
    try:
        version = importlib.metadata.version("cuda-bindings")
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    yield Finding(name="cuda-bindings", value=version)


def _driver(probe: Probe, known: dict[str, Any]) -> Iterator[Finding]:
    calls: CudaCalls = known["calls"]
    calls.call("cuInit", 0, what="starting CUDA")
    version = known["version"] = int(calls.call("cuDriverGetVersion", what="the driver's version"))
    count = int(calls.call("cuDeviceGetCount", what="the number of devices"))
    known["device"] = int(calls.call("cuDeviceGet", probe.index, what=f"device {probe.index} of {count}"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = f", CUDA_VISIBLE_DEVICES={visible}" if visible is not None else ""
    yield Finding(
        name="CUDA driver", value=f"knows CUDA {version // 1000}.{version % 1000 // 10}, {count} devices{shown}"
    )


def _torch(probe: Probe, known: dict[str, Any]) -> Iterator[Finding]:
    check_environment(probe.torch_cuda, driver_version=known["version"], is_ours=False)
    yield Finding(name="torch with CUDA", value=f"torch {torch.__version__}, built for CUDA {probe.torch_cuda.version}")


def _device(probe: Probe, known: dict[str, Any]) -> Iterator[Finding]:
    calls: CudaCalls = known["calls"]
    kinds = calls.bindings.CUdevice_attribute

    def ask(name: str) -> int:
        attribute = getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(calls.call("cuDeviceGetAttribute", attribute, known["device"], what=f"the device's {name}"))

    name = calls.call("cuDeviceGetName", 128, known["device"], what="the device's name").split(b"\0")[0].decode()
    capability = f"{ask('COMPUTE_CAPABILITY_MAJOR')}.{ask('COMPUTE_CAPABILITY_MINOR')}"
    yield Finding(name="device", value=f"{name}, compute capability {capability}")
    mode = ask("COMPUTE_MODE")
    if mode in (_NOBODY, _ONE_PROCESS):
        yield Finding(
            name="compute mode",
            value="no process may use the device" if mode == _NOBODY else "one process may use the device",
            verdict=Verdict.STOP if mode == _NOBODY else Verdict.NOTE,
            remedy="nvidia-smi -c 0, as root.",
        )
    if shares_host_memory(calls, probe.index):
        yield Finding(
            name="unified memory",
            value="the device's memory is the host's",
            verdict=Verdict.NOTE,
            remedy="What is evicted goes to the file: a store on a fast disk.",
        )
    has_vmm = ask("VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED")
    yield Finding(
        name="virtual memory management",
        value="yes" if has_vmm else "no",
        verdict=Verdict.FINE if has_vmm else Verdict.STOP,
        remedy="" if has_vmm else "A newer driver; a virtual GPU profile that allows it; another device.",
    )


def _context(probe: Probe) -> Iterator[Finding]:
    started = time.perf_counter()
    probe.start()
    yield Finding(name="CUDA context", value=f"made in {format_duration(time.perf_counter() - started)}")


def _memory(known: dict[str, Any]) -> Iterator[Finding]:
    info = known["calls"].memory_info()
    if known["calls"].shares_host_memory(known["device"]):  # whose page cache the driver counts as used
        yield Finding(name="device memory", value=f"{format_nbytes(info.total_nbytes)}, the host's")
        return
    is_shared = info.free_nbytes < _FREE_SHARE * info.total_nbytes
    yield Finding(
        name="device memory",
        value=f"{format_nbytes(info.free_nbytes)} free of {format_nbytes(info.total_nbytes)}",
        verdict=Verdict.NOTE if is_shared else Verdict.FINE,
        remedy="Others use the device: nvidia-smi names them; a budget below what is free." if is_shared else "",
    )


def _mapping(probe: Probe, known: dict[str, Any]) -> Iterator[Finding]:
    """Map one chunk at two addresses: what is written at the first must be read at the second."""
    calls: CudaCalls = known["calls"]
    driver = CudaDriver(4, 2 << 20, bindings=calls.bindings, device_index=probe.index, arena_nbytes=64 << 20)
    with driver:
        blocks = HostBlocks(calls, budget_nbytes=2 << 20, block_nbytes=1 << 20)
        try:
            ((source, nbytes),) = blocks.segments(blocks.take(1) or (), 1 << 20)
            ((target, _),) = blocks.segments(blocks.take(1) or (), 1 << 20)
            address = driver.reserve(2)
            driver.map(address, [(1, 1), (1, 1)])
            ctypes.memset(source, 0xA5, nbytes)
            ctypes.memset(target, 0, nbytes)
            calls.copy_to_device(address, source, nbytes, 0)
            calls.copy_to_host(target, address + driver.chunk_nbytes, nbytes, 0)
            calls.call("cuStreamSynchronize", 0, what="a copy through two addresses")
            if ctypes.string_at(target, nbytes) != ctypes.string_at(source, nbytes):
                raise RuntimeError("bytes written at one address of a chunk were not read at the other")
        finally:
            calls.call("cuCtxSynchronize", what="the end of the copies")
            blocks.close()
        granularity = format_nbytes(driver.granularity)
    yield Finding(name="virtual memory", value=f"granularity {granularity}, one chunk at two addresses")


def _pinning(probe: Probe, known: dict[str, Any]) -> Iterator[Finding]:
    memory, room = meminfo_nbytes(), memory_room().available_nbytes
    said = os.environ.get(VARIABLE)
    yield Finding(
        name="host memory",
        value=f"{format_nbytes(memory['MemTotal'])}, of which {format_nbytes(room)} available"
        + (f", {VARIABLE}={said}" if said else ""),
        remedy=f"A session pins half of what is available; {VARIABLE} says what there is." if not said else "",
    )
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shown = "no limit" if limit == resource.RLIM_INFINITY else format_nbytes(limit)
    nbytes = min(probe.nbytes, host_memory_nbytes(room) // 4) >> 21 << 21
    started = time.perf_counter()
    blocks = HostBlocks(known["calls"], budget_nbytes=nbytes, block_nbytes=2 << 20)
    took_s = time.perf_counter() - started
    blocks.close()
    yield Finding(
        name="pinned memory",
        value=f"{format_nbytes(nbytes)} at {format_rate(nbytes / took_s)}; locked memory (ulimit -l): {shown}",
    )


def _link(probe: Probe, known: dict[str, Any]) -> Iterator[Finding]:
    calls: CudaCalls = known["calls"]
    memory = DeviceMemory(
        num_chunks=_LINK_NBYTES >> 21,
        chunk_nbytes=2 << 20,
        bindings=calls.bindings,
        current_stream=lambda: 0,
        host_budget_nbytes=_LINK_NBYTES,
        file_directory=None,
        staging_nbytes=0,
        arena_nbytes=2 * _LINK_NBYTES,
        device_index=probe.index,
    )
    try:
        speed = memory.store.measure()
    finally:
        memory.close()
    slowest = min(speed.read_bytes_per_s, speed.write_bytes_per_s)
    is_slow = slowest < _SLOW_LINK_BYTES_PER_S and not isinstance(calls.bindings, FakeCuda)
    yield Finding(
        name="link, alone",
        value=f"in {format_rate(speed.read_bytes_per_s)}, out {format_rate(speed.write_bytes_per_s)}",
        verdict=Verdict.NOTE if is_slow else Verdict.FINE,
        remedy="Slow for a GPU: lspci -vv tells its lanes; another slot or NUMA node." if is_slow else "",
    )
    yield Finding(
        name="link, both ways",
        value=f"in {format_rate(speed.read_together_bytes_per_s)}, out {format_rate(speed.write_together_bytes_per_s)}",
    )


def _session(probe: Probe, store: str | None) -> Iterator[Finding]:
    """Keep twice the budget alive in a session, and read everything back."""
    from ooc.session import Session

    started = time.perf_counter()
    directory = store if store is not None else str(default_directory())
    with Session(_TRIAL_BUDGET_NBYTES, store=directory, device=probe.device, plan_cache=False) as session:
        opened_s = time.perf_counter() - started
        count = 2 * _TRIAL_BUDGET_NBYTES // (8 * MIB)
        tensors = [torch.full((2 * MIB,), float(i), device=probe.tensors_on) for i in range(count)]
        wrong = [i for i, tensor in enumerate(tensors) if not bool((tensor == i).all())]
        del tensors
        peak = session.report()["peak_nbytes"]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {count} tensors came back with other bytes")
    yield Finding(
        name="session on the device",
        value=f"opened in {format_duration(opened_s)}; {format_nbytes(2 * _TRIAL_BUDGET_NBYTES)} of tensors went out "
        f"of {format_nbytes(peak)} and came back whole",
    )
