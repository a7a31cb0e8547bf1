"""`ooc doctor --device cuda` over the fake: a machine that works, and each way in which a fresh one does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ooc.cli import doctor, doctor_cuda
from ooc.cli.doctor_cuda import Probe, examine, fake_probe
from ooc.cli.findings import Finding, Verdict
from vmm.cuda_calls import load_bindings
from vmm.testing.fake_cuda import CUresult, FakeCuda

NAMES = [
    "cuda-bindings",
    "CUDA driver",
    "torch with CUDA",
    "device",
    "virtual memory management",
    "CUDA context",
    "device memory",
    "virtual memory",
    "host memory",
    "pinned memory",
    "link, alone",
    "link, both ways",
    "session on the device",
]


def _small(monkeypatch: pytest.MonkeyPatch, probe: Probe) -> Probe:
    monkeypatch.setattr(doctor_cuda, "_LINK_NBYTES", 8 << 20)
    monkeypatch.setattr(doctor_cuda, "_TRIAL_BUDGET_NBYTES", 16 << 20)
    return probe


def _stop(findings: list[Finding]) -> Finding:
    """The only finding that would stop us; it is the last but for what was not looked at."""
    (found,) = (f for f in findings if f.verdict is Verdict.STOP)
    assert [f.name for f in findings[findings.index(found) + 1 :]] in (
        [],
        ["virtual memory management", "not looked at"],
        ["not looked at"],
    )
    return found


def test_a_machine_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()
    findings = examine(_small(monkeypatch, fake_probe(fake)))
    assert [f.name for f in findings] == NAMES, findings
    assert {f.verdict for f in findings} == {Verdict.FINE}
    assert (fake.left(), fake.races) == ([], ())


def _answering(call: str, result: CUresult, num_values: int = 0) -> Callable[[FakeCuda], None]:
    def prepare(fake: FakeCuda) -> None:
        setattr(fake, call, lambda *_: (result, *[None] * num_values))

    return prepare


def _other_bytes(fake: FakeCuda) -> None:
    """A driver whose second address shows something else."""
    fake.cuMemcpyDtoHAsync = lambda *_: (CUresult.CUDA_SUCCESS,)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("prepare", "name", "words"),
    [
        (_answering("cuInit", CUresult.CUDA_ERROR_NO_DEVICE), "CUDA driver", ["NO_DEVICE", "--gpus all"]),
        (_answering("cuInit", CUresult.CUDA_ERROR_UNKNOWN), "CUDA driver", ["nvidia-uvm", "nvidia-modprobe -u"]),
        (_answering("cuDeviceGet", CUresult.CUDA_ERROR_INVALID_DEVICE, 1), "CUDA driver", ["CUDA_VISIBLE_DEVICES"]),
        (_answering("cuMemHostRegister", CUresult.CUDA_ERROR_OUT_OF_MEMORY), "virtual memory", ["ulimit -l"]),
        (_other_bytes, "virtual memory", ["were not read at the other"]),
    ],
)
def test_what_is_wrong_is_named_with_a_remedy(
    prepare: Callable[[FakeCuda], None], name: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeCuda()
    prepare(fake)
    found = _stop(examine(_small(monkeypatch, fake_probe(fake))))
    assert found.name == name
    for word in words:
        assert word in f"{found.value} {found.remedy}"
    assert fake.left() == []


@pytest.mark.parametrize(
    ("options", "name", "verdict", "remedy"),
    [
        ({"has_vmm": False}, "virtual memory management", Verdict.STOP, "newer driver"),
        ({"compute_mode": 2}, "compute mode", Verdict.STOP, "nvidia-smi -c 0"),
        ({"compute_mode": 3}, "compute mode", Verdict.NOTE, "nvidia-smi -c 0"),
        ({"is_integrated": True}, "unified memory", Verdict.NOTE, "goes to the file"),
    ],
)
def test_what_the_device_says_of_itself(
    options: dict[str, Any], name: str, verdict: Verdict, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = {f.name: f for f in examine(_small(monkeypatch, fake_probe(FakeCuda(**options))))}
    assert findings[name].verdict is verdict and remedy in findings[name].remedy
    assert ("session on the device" in findings) is (verdict is Verdict.NOTE)


def test_others_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()
    fake.cuMemGetInfo = lambda: (CUresult.CUDA_SUCCESS, 100 << 20, 256 << 20)  # type: ignore[method-assign]
    findings = {f.name: f for f in examine(_small(monkeypatch, fake_probe(fake)))}
    assert findings["device memory"].verdict is Verdict.NOTE
    assert "100.0 MiB free of 256.0 MiB" in findings["device memory"].value


class _Torch:
    def __init__(self, version: str | None) -> None:
        self.version = version

    def is_initialized(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("version", "words"), [(None, "built without CUDA"), ("13.0", "the driver is too old: it knows CUDA 12.0")]
)
def test_torch_and_the_driver_must_go_together(version: str | None, words: str) -> None:
    found = _stop(examine(replace(fake_probe(), torch_cuda=_Torch(version))))
    assert found.name == "torch with CUDA" and words in found.value and "Options" in found.remedy


def test_settings_that_stand_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    found = _stop(examine(fake_probe()))
    assert "expandable segments" in found.value and "unset PYTORCH_CUDA_ALLOC_CONF" in found.remedy


def test_without_bindings_or_a_driver() -> None:
    found = _stop(examine(replace(fake_probe(), load=load_bindings)))
    assert found.name in ("cuda-bindings", "CUDA driver")
    assert "pip install cuda-bindings" in found.remedy or "install the NVIDIA driver" in found.remedy


def test_a_device_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(device="tpu") == 2
    assert "no device is called 'tpu'. Options: cpu, cuda" in capsys.readouterr().err
