"""Steps, and where it is asked for ops, are named ranges for NVIDIA's profilers; without the package nothing is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

import ooc
import vmm.nvtx_ranges

NUM_STEPS = 6


class FakeNvtx:
    """What is used of the package, noting what is open after each call."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.open: list[str] = []

    @contextlib.contextmanager
    def annotate(self, name: str, *, domain: str) -> Iterator[None]:
        range_ = self.start_range(name, domain=domain)
        try:
            yield
        finally:
            self.end_range(range_)

    def start_range(self, name: str, *, domain: str) -> str:
        assert domain == "ooc"
        self.begun.append(name)
        self.open.append(name)
        return name

    def end_range(self, range_: str) -> None:
        self.open.remove(range_)


@pytest.fixture
def nvtx(monkeypatch: pytest.MonkeyPatch) -> FakeNvtx:
    fake = FakeNvtx()
    monkeypatch.setattr(vmm.nvtx_ranges, "_nvtx", fake)
    monkeypatch.delenv("OOC_NVTX", raising=False)
    return fake


def _train(boundary: str = "explicit") -> list[str]:
    """A few steps of one matrix product each. Their modes."""
    with ooc.Session("4MiB", step_boundary=boundary) as session:  # type: ignore[arg-type]
        weight = torch.nn.Parameter(torch.ones(160, 160))
        optimizer = torch.optim.SGD([weight], lr=0.01)
        for _ in range(NUM_STEPS):
            with session.step() if boundary == "explicit" else contextlib.nullcontext():
                weight.grad = weight.detach() @ weight.detach()
                optimizer.step()
        return [row.mode for row in session.steps.rows]


@pytest.mark.parametrize("boundary", ["explicit", "optimizer"])
def test_each_step_is_a_range(nvtx: FakeNvtx, boundary: str) -> None:
    modes = _train(boundary)
    assert len(modes) == NUM_STEPS
    # Where the optimizer bounds steps, the last range is of what came after the last boundary.
    assert nvtx.begun == ["step"] * (NUM_STEPS + (boundary == "optimizer"))
    assert nvtx.open == []


def test_each_op_is_a_range_on_demand_and_planned(nvtx: FakeNvtx, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOC_NVTX", "1")
    modes = _train()
    assert set(modes) == {"learning", "planned"}
    assert nvtx.begun.count("aten.mm.default") == NUM_STEPS
    assert nvtx.begun.count("step") == NUM_STEPS
    assert nvtx.open == []


def test_an_op_that_raises_ends_its_range(nvtx: FakeNvtx, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOC_NVTX", "1")
    with ooc.Session("4MiB") as session, pytest.raises(RuntimeError, match="shapes"), session.step():
        torch.ones(160, 160) @ torch.ones(161, 160)
    assert "aten.mm.default" in nvtx.begun
    assert nvtx.open == []


def test_without_the_package_nothing_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vmm.nvtx_ranges, "_nvtx", None)
    monkeypatch.setenv("OOC_NVTX", "1")
    assert not vmm.nvtx_ranges.names_ops()
    assert len(_train()) == NUM_STEPS
