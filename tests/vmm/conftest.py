"""Fixtures of the memory tests: each driver in turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.vmm.memory_cases import CASES, DriverCase
from vmm.driver import Driver


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
