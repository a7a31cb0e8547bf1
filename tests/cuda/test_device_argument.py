"""`device=`: what is refused, and with what words."""

from __future__ import annotations

from typing import Any

import pytest

import ooc
import ooc.devices
from ooc.cli import main
from ooc.errors import DeviceUnavailable
from vmm.fake_cuda import FakeCuda


def _without_gpu() -> Any:
    """Bindings that load, on a machine without the driver's library."""

    class Bindings:
        def __getattr__(self, name: str) -> Any:
            def call(*_: Any) -> Any:
                raise RuntimeError("Failed to dlopen libcuda.so.1")

            return call

    return Bindings()


def test_cuda_without_a_driver_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ooc.devices, "load_bindings", _without_gpu)
    with pytest.raises(DeviceUnavailable, match=r"cuInit could not be called: Failed to dlopen(.|\n)*NVIDIA driver"):
        ooc.Session("64MiB", device="cuda")


def test_cuda_with_a_driver_says_what_is_not_there_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ooc.devices, "load_bindings", FakeCuda)
    with pytest.raises(DeviceUnavailable, match=r"there is a GPU, but(.|\n)*device='cpu'"):
        ooc.Session("64MiB", device="cuda")


def test_no_such_device() -> None:
    with pytest.raises(ValueError, match=r"device='tpu': there is no such device. Options: device='cpu'"):
        ooc.Session("64MiB", device="tpu")


def test_the_command_line_passes_it_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise AssertionError('must not run')")
    monkeypatch.setattr(ooc.devices, "load_bindings", _without_gpu)
    assert main(["run", "--budget", "64MiB", "--device", "cuda", str(script)]) == 2
    assert "ooc run: device='cuda': this machine cannot run it" in capsys.readouterr().err
