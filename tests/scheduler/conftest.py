"""Plans are coloured natively, as in a session: they are the same otherwise, and take longer."""

from __future__ import annotations

import pytest

from ooc.replay.native_colouring import colour_natively


@pytest.fixture(scope="session", autouse=True)
def native_colouring() -> None:
    colour_natively()
