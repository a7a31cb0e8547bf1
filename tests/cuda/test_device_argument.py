"""`device=`: what is refused, and with what words."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ooc
import ooc.devices.cuda
from ooc.cli.main import main
from ooc.devices.cuda import CudaDevice, CudaMemory
from ooc.errors import DeviceUnavailable, Refused, SessionError
from ooc.options import _choose_chunk
from ooc.testing.fake_device import FakeCudaDevice
from tests.cuda.cases import CudaSession as FakeSession
from vmm.cuda_table import cuda_table
from vmm.driver import MemoryFault
from vmm.machine import memory_room
from vmm.store import StoreFull, StoreUnavailable
from vmm.testing.fake_cuda import CUresult, FakeCuda


def _without_gpu() -> Any:
    """Bindings that load, on a machine without the driver's library."""

    class Bindings:
        def __getattr__(self, name: str) -> Any:
            def call(*_: Any) -> Any:
                raise RuntimeError("Failed to dlopen libcuda.so.1")

            return call

    return Bindings()


def test_cuda_without_a_driver_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ooc.devices.cuda, "load_bindings", _without_gpu)
    with pytest.raises(DeviceUnavailable, match=r"cuInit could not be called: Failed to dlopen(.|\n)*NVIDIA driver"):
        ooc.Session("64MiB", device="cuda")


class FakeTorch:
    """torch's CUDA half in some state; it must not be asked to start."""

    def __init__(self, *, version: str | None = "12.0", is_initialized: bool = False) -> None:
        self.version = version
        self._is_initialized = is_initialized

    def is_initialized(self) -> bool:
        return self._is_initialized


def _device(fake: FakeCuda, **state: Any) -> CudaDevice:
    return CudaDevice(bindings=fake, torch_cuda=FakeTorch(**state), host_budget_nbytes=1 << 20)


def _refusal(expected: type[Exception], device: CudaDevice) -> str:
    with pytest.raises(expected) as caught:
        ooc.Session("64MiB", device=device)
    assert ooc._current.session is None
    return str(caught.value)


def test_a_torch_without_cuda() -> None:
    said = _refusal(DeviceUnavailable, _device(FakeCuda(), version=None))
    assert "built without CUDA" in said and "device='cpu'" in said


def test_a_driver_that_is_too_old() -> None:
    said = _refusal(DeviceUnavailable, _device(FakeCuda(), version="13.0"))
    assert "it knows CUDA 12.0" in said and "a driver for CUDA 13" in said


def test_no_gpu_but_a_driver() -> None:
    fake = FakeCuda()
    fake.cuInit = lambda flags: (CUresult.CUDA_ERROR_NO_DEVICE,)  # type: ignore[method-assign]
    assert "no CUDA device is visible" in _refusal(DeviceUnavailable, _device(fake))


def test_cuda_was_started_before() -> None:
    said = _refusal(SessionError, _device(FakeCuda(), is_initialized=True))
    assert "initialised already" in said and "ooc run" in said


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64, expandable_segments:True")
    said = _refusal(Refused, _device(FakeCuda()))
    assert f"unset {name}" in said
    monkeypatch.setenv(name, "expandable_segments:False")
    assert "unset" not in _refusal(SessionError, _device(FakeCuda(), is_initialized=True))


def test_cudnn_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert "benchmark = False" in _refusal(Refused, _device(FakeCuda()))


def _memory(fake: FakeCuda, num_chunks: int, **options: Any) -> CudaMemory:
    """A device's memory as `CudaDevice.open` makes it, but without torch."""
    chosen = {"host_budget_nbytes": 8 << 20, "staging_nbytes": 1 << 20, "file_directory": "/var/tmp", **options}
    return CudaMemory(
        table=cuda_table(),
        num_chunks=num_chunks,
        num_small_chunks=1,
        chunk_nbytes=2 << 20,
        bindings=fake,
        current_stream=lambda: 0,
        arena_nbytes=1 << 30,
        **chosen,
    )


def test_a_device_without_virtual_memory_management() -> None:
    fake = FakeCuda()
    fake.cuDeviceGetAttribute = lambda attribute, device: (CUresult.CUDA_SUCCESS, 0)  # type: ignore[method-assign]
    with pytest.raises(MemoryFault, match=r"no virtual memory management(.|\n)*Options: another device"):
        _memory(fake, 4)
    assert fake.left() == []


def test_a_budget_above_the_free_memory_and_two_processes_on_one_card() -> None:
    fake = FakeCuda(total_nbytes=32 << 20)
    with pytest.raises(
        MemoryFault,
        match=r"needed 128.0 MiB \(134217728 bytes\)\n *free +32.0 MiB(.|\n)*at most 32MiB; end other processes",
    ):
        _memory(fake, 64)
    first = _memory(fake, 8)
    with pytest.raises(MemoryFault, match=r"needed 24.0 MiB .*\n *free +16.0 MiB"):
        _memory(fake, 12)
    first.close()
    assert fake.left() == []


def test_host_memory_that_cannot_be_pinned() -> None:
    fake = FakeCuda()
    fake.cuMemHostRegister = lambda *_: (CUresult.CUDA_ERROR_OUT_OF_MEMORY,)  # type: ignore[method-assign]
    with pytest.raises(MemoryFault, match=r"cannot pin(.|\n)*ulimit -l"):
        _memory(fake, 4)
    assert fake.left() == []


def test_a_directory_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    fake = FakeCuda()
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(StoreFull, match=r"needs 1.0 MiB .* more(.|\n)*No space left(.|\n)*larger disk"):
        _memory(fake, 4, file_directory="/var/tmp")
    assert fake.left() == []


def test_a_host_without_memory_to_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    room = replace(memory_room(), available_nbytes=1 << 12)
    monkeypatch.setattr(ooc.devices.cuda, "memory_room", lambda: room)
    device = CudaDevice(bindings=FakeCuda(), torch_cuda=FakeTorch())
    with pytest.raises(ValueError, match=r"host budget of 2\.0 KiB .*at least 64\.0 KiB"):
        ooc.Session("64MiB", device=device)


def test_host_memory_that_is_said_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """For hosts that are given memory as they use it: half of what is said, not of what the kernel has available."""
    monkeypatch.setenv("OOC_HOST_NBYTES", "96KiB")
    device = CudaDevice(bindings=FakeCuda(), torch_cuda=FakeTorch())
    with pytest.raises(ValueError, match=r"host budget of 48\.0 KiB .*at least 64\.0 KiB"):
        ooc.Session("64MiB", device=device)
    monkeypatch.setenv("OOC_HOST_NBYTES", "96G")
    with pytest.raises(ValueError, match="OOC_HOST_NBYTES"):
        ooc.Session("64MiB", device=device)


@pytest.mark.parametrize(
    ("budget_nbytes", "granule_nbytes", "chunk_nbytes"),
    [
        (1 << 30, 2 << 20, 2 << 20),
        (4 << 30, 2 << 20, 2 << 20),
        (8 << 30, 2 << 20, 4 << 20),
        (16 << 30, 2 << 20, 8 << 20),
        (128 << 30, 2 << 20, 16 << 20),
        (128 << 30, 64 << 10, 2 << 20),
        (2 << 30, 64 << 10, 128 << 10),
        (1 << 30, 64 << 10, 64 << 10),
        (256 << 20, 64 << 10, 64 << 10),
    ],
)
def test_large_pools_have_larger_chunks(budget_nbytes: int, granule_nbytes: int, chunk_nbytes: int) -> None:
    """On a device each costs driver calls of its own whenever it is mapped; on the host only their number is kept."""
    assert _choose_chunk(budget_nbytes, None, granule_nbytes) == chunk_nbytes


def test_chunks_that_the_device_does_not_map() -> None:
    fake = FakeCuda(granularity=4 << 20)
    with pytest.raises(ValueError, match=r"chunks of 2.0 MiB .*multiple of the device's granularity, 4.0 MiB"):
        _memory(fake, 4)
    assert fake.left() == []


def test_a_store_in_memory_is_no_store() -> None:
    fake = FakeCuda()
    with pytest.raises(StoreUnavailable, match="/dev/shm"):
        _memory(fake, 4, file_directory="/dev/shm")
    assert fake.left() == []


def test_a_budget_is_rounded_down_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"), FakeSession((4 << 20) + 1000, device=FakeCudaDevice()) as session:
        assert session.budget_nbytes == 4 << 20
    assert "rounded down to 4.0 MiB (4194304 bytes)" in caplog.text


def test_a_budget_of_one_chunk() -> None:
    with pytest.raises(ValueError, match="none is left"):
        _memory(FakeCuda(), 1)
    with pytest.raises(ValueError, match="less than one chunk"):
        ooc.Session("1MiB", device=_device(FakeCuda()))


def test_a_host_budget_is_for_a_gpu() -> None:
    with pytest.raises(ValueError, match=r"host_budget='1GiB': only for device='cuda'"):
        ooc.Session("64MiB", host_budget="1GiB")


def test_graphs_are_refused_by_name_and_compilation_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    """Only while a session is open."""
    before = torch.compile
    memory = _memory(FakeCuda(), 4)
    for capture in (
        lambda: torch.cuda.graphs.graph.__enter__(None),
        lambda: torch.cuda.graphs.CUDAGraph.capture_begin(None),
        lambda: torch.cuda.make_graphed_callables(None, None),
    ):
        with pytest.raises(Refused, match="CUDA graph capture in a session"):
            capture()
    with caplog.at_level("WARNING"):
        torch.compile(lambda x: x)
    assert "runs eagerly" in caplog.text
    assert not torch._C._is_multithreading_enabled()
    memory.close()
    memory.close()
    assert torch.compile is before
    assert torch._C._is_multithreading_enabled()


def test_no_op_is_waited_for_until_its_time_is_asked_for() -> None:
    fake = FakeCuda(eagerness=0.0)
    memory = _memory(fake, 4)
    ops = memory.watch(None)  # type: ignore[arg-type]
    done: list[str] = []
    times: list[int] = []
    begun = ops.begins("op", (), ())
    fake.launch(0, lambda: done.append("first"), name="op")
    ops.ended(begun, times.append)
    ops.ended(ops.begins("op", (), ()), None)  # has failed
    assert done == [] and times == []
    ops.settle()
    assert done == ["first"] and len(times) == 1 and times[0] > 0

    def second() -> None:
        fake.launch(0, lambda: done.append("second"), name="op")

    (call,) = ops.calls_of(SimpleNamespace(calls=[second]))
    assert call is second
    ops.follow()
    call()
    assert done == ["first"]
    memory.close()
    assert done == ["first", "second"]
    assert fake.races == ()


def test_no_such_device() -> None:
    with pytest.raises(ValueError, match=r"device='tpu': there is no such device. Options: device='cpu'"):
        ooc.Session("64MiB", device="tpu")


def test_the_command_line_passes_it_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise AssertionError('must not run')")
    monkeypatch.setattr(ooc.devices.cuda, "load_bindings", _without_gpu)
    assert main(["run", "--budget", "64MiB", "--device", "cuda", str(script)]) == 2
    assert "ooc run: device='cuda': this machine cannot run it" in capsys.readouterr().err


def test_the_command_line_passes_the_host_budget_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise AssertionError('must not run')")
    given = []

    def look(self: CudaDevice) -> Any:
        given.append(self._host_budget_nbytes)
        raise DeviceUnavailable("no GPU here")

    monkeypatch.setattr(CudaDevice, "_find_driver", look)
    run = ["run", "--budget", "64MiB"]
    assert main([*run, "--device", "cuda", "--host-budget", "3MiB", str(script)]) == 2
    monkeypatch.setenv("OOC_HOST_BUDGET", "5MiB")
    assert main([*run, "--device", "cuda", str(script)]) == 2
    assert given == [3 << 20, 5 << 20]
    capsys.readouterr()
    assert main([*run, str(script)]) == 2
    assert "host_budget='5MiB': only for device='cuda'" in capsys.readouterr().err
    assert main([*run, "--device", "cuda", "--host-budget", "3G", str(script)]) == 2
    assert "ooc run: --host-budget: host budget '3G' could mean two sizes" in capsys.readouterr().err
    assert given == [3 << 20, 5 << 20]
