"""Fixtures of the memory tests: each driver in turn, and the fake CUDA driver alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.vmm.fake_cases import GRANULE, OK
from tests.vmm.memory_cases import CASES, DriverCase
from vmm.driver import Driver
from vmm.testing.fake_cuda import FakeCuda
from vmm.transfers import TransferEngine


@pytest.fixture(scope="module", autouse=True)
def store_of_usual_speed() -> None:
    """Here the store itself is tested: nothing is patched."""


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Iterator[DriverCase]:
    made = request.param()
    yield made
    made.close()


@pytest.fixture
def driver(case: DriverCase) -> Iterator[Driver]:
    made = case.make()
    yield made
    made.close()


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    made = FakeCuda(total_nbytes=32 * GRANULE)
    assert made.cuInit(0) == (OK,)
    yield made
    made.close()


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine() as made:
        yield made
