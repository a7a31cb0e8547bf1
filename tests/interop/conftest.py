"""Fixtures of the tests of access from outside the dispatcher."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch computes in one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def ordinary_afterwards() -> Iterator[None]:
    """Afterwards `.grad` is torch's own again: no optimizer inside the backward pass is left."""
    yield
    gc.collect()
    assert "grad" not in vars(torch.Tensor), "an optimizer was not let go of"
