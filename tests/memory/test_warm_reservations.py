"""Freed variables' reservations are taken over, and their chunks count as free all the same."""

from __future__ import annotations

import pytest
import torch

import ooc

MIB = 1 << 20


def _reservations(session: ooc.Session) -> int:
    return len(session.engine.memory.space.reservations)


def test_a_second_allocation_of_the_size_makes_no_system_call() -> None:
    with ooc.Session("4MiB", recompute=False) as session:  # trials of ops take memory of their own
        space = session.engine.memory.space
        num_maps = []
        for value in range(3):
            tensor = torch.full((256, 1024), float(value))
            del tensor
            num_maps.append(space.num_maps)
        assert num_maps == [1, 1, 1]


@pytest.mark.parametrize("debug", [False, True])
def test_their_chunks_serve_other_sizes(debug: bool) -> None:
    """Sizes that shrink and grow: each needs chunks that a freed variable of another size shows."""
    with ooc.Session("4MiB", debug=debug) as session:
        for num_rows in (960, 64, 512, 128, 960, 448, 512, 1000):
            a = torch.ones(num_rows, 1024)
            assert a.sum().item() == num_rows * 1024
            del a
        assert session.engine.manager.pool.num_chunks == 4 * MIB // session.engine.memory.driver.chunk_nbytes


def test_no_address_is_kept_beyond_the_pool() -> None:
    with ooc.Session("4MiB") as session:
        for num_rows in range(32, 900, 7):
            torch.ones(num_rows, 1024)
        # Each kept reservation has a chunk of its own at least.
        assert _reservations(session) <= session.engine.manager.pool.num_chunks + 1


def test_a_smaller_budget_takes_their_chunks() -> None:
    with ooc.Session("8MiB") as session:
        for num_rows in (256, 512, 900):
            torch.ones(num_rows, 1024)
        session.set_budget("2MiB")
        tensor = torch.ones(400, 1024)
        assert tensor.sum().item() == 400 * 1024
        session.set_budget("8MiB")
        assert torch.ones(1000, 1024).sum().item() == 1000 * 1024


def test_the_peak_counts_variables_alone() -> None:
    with ooc.Session("8MiB") as session:
        for num_rows in (64, 128, 192, 256):
            torch.ones(num_rows, 1024)
        peak = session.engine.manager.peak_chunks * session.engine.memory.driver.chunk_nbytes
        assert MIB <= peak < 2 * MIB
