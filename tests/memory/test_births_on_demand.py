"""Variables born on demand take addresses that show their chunks already; their chunks are free again when they die."""

from __future__ import annotations

import pytest
import torch

import ooc
from ooc.memory.births import LOOP_BIRTHS
from vmm.driver import MemoryFault

MIB = 1 << 20


def test_a_birth_on_demand_maps_nothing() -> None:
    with ooc.Session("4MiB", recompute=False) as session:  # trials of ops take memory of their own
        space = session.engine.memory.space
        for value in range(3):
            tensors = [torch.full((64 * size, 1024), float(value)) for size in (1, 3, 2)]
            del tensors
        assert space.num_maps == 0


def test_addresses_are_kept_for_life_while_chunks_serve_others() -> None:
    """What was evicted comes back to its addresses, into other chunks; births meanwhile take other addresses."""
    with ooc.Session("4MiB", recompute=False) as session:
        kept = [torch.full((256, 1024), float(value)) for value in range(3)]
        addresses = [tensor.untyped_storage().data_ptr() for tensor in kept]
        for value in range(6):
            other = torch.full((512, 1024), float(value))
            assert other.sum().item() == 512 * 1024 * value
            index = value % 3
            assert kept[index].sum().item() == 256 * 1024 * index
            del other
        assert session.engine.manager.counters.loaded_nbytes > 0
        assert [tensor.untyped_storage().data_ptr() for tensor in kept] == addresses


@pytest.mark.parametrize("debug", [False, True])
def test_their_chunks_serve_other_sizes(debug: bool) -> None:
    with ooc.Session("4MiB", debug=debug) as session:
        for num_rows in (960, 64, 512, 128, 960, 448, 512, 1000):
            a = torch.ones(num_rows, 1024)
            assert a.sum().item() == num_rows * 1024
            del a
        assert session.engine.manager.pool.num_chunks == 4 * MIB // session.engine.memory.driver.chunk_nbytes


def test_no_address_is_kept_for_long_of_what_is_freed() -> None:
    """Each size comes once. What a loop might want again soon may lie ready."""
    with ooc.Session("4MiB") as session:
        for num_rows in range(32, 900, 7):
            torch.ones(num_rows, 1024)
        assert len(session.engine.memory.space.reservations) <= 1 + LOOP_BIRTHS


def test_a_smaller_budget_takes_their_chunks() -> None:
    with ooc.Session("8MiB") as session:
        kept = torch.full((128, 1024), 3.0)
        for num_rows in (256, 512, 900):
            torch.ones(num_rows, 1024)
        session.set_budget("2MiB")
        tensor = torch.ones(300, 1024)
        assert tensor.sum().item() == 300 * 1024
        session.set_budget("8MiB")
        assert torch.ones(1000, 1024).sum().item() == 1000 * 1024
        assert kept.sum().item() == 128 * 1024 * 3


def test_the_peak_counts_variables_alone() -> None:
    with ooc.Session("8MiB") as session:
        for num_rows in (64, 128, 192, 256):
            torch.ones(num_rows, 1024)
        peak = session.engine.manager.peak_chunks * session.engine.memory.driver.chunk_nbytes
        assert MIB <= peak < 2 * MIB


def test_a_loop_takes_back_what_it_frees() -> None:
    with ooc.Session("4MiB", recompute=False) as session:
        manager = session.engine.manager
        first = torch.ones(64, 1024)
        address = first.untyped_storage().data_ptr()
        del first
        for value in range(5):
            again = torch.full((64, 1024), float(value))
            assert again.untyped_storage().data_ptr() == address
            assert again.sum().item() == 64 * 1024 * value
            del again
        session.engine.runner.absorb()
        assert manager.num_free == manager.num_chunks


def test_what_is_ready_for_its_size_is_free_for_others() -> None:
    """Sizes that fill the pool together, one after the other, then one that needs nearly all of it."""
    with ooc.Session("4MiB", recompute=False) as session:
        manager = session.engine.manager
        kept = [torch.ones(rows, 1024) for rows in (64, 128, 32, 96, 256)]
        kept.clear()
        large = torch.full((960, 1024), 2.0)
        assert large.sum().item() == 960 * 1024 * 2
        assert manager.counters.num_crowded == 0
        assert manager.counters.evicted_nbytes == 0
        del large
        session.engine.runner.absorb()
        assert manager.pool.num_free == manager.num_chunks


def test_a_mapping_that_fails_loses_no_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    with ooc.Session("4MiB", recompute=False) as session:
        manager, space = session.engine.manager, session.engine.memory.space
        torch.ones(64, 1024)

        def fail(*_: object) -> int:
            raise MemoryFault("no mapping is left")

        with monkeypatch.context() as patch:
            patch.setattr(space, "map", fail)
            with pytest.raises(MemoryFault):
                torch.ones(96, 1024)  # what was freed has another size: nothing is mapped for the next one of its own
        session.engine.runner.absorb()
        assert manager.pool.num_free == manager.num_chunks
        assert torch.ones(96, 1024).sum().item() == 96 * 1024


def test_a_release_that_fails_loses_no_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    with ooc.Session("4MiB", recompute=False) as session:
        manager, space = session.engine.manager, session.engine.memory.space
        tensors = [torch.ones(64, 1024) for _ in range(4)]
        tensors.clear()
        session.engine.runner.absorb()

        def fail(*_: object) -> None:
            raise MemoryFault("no mapping is left")

        with monkeypatch.context() as patch:
            patch.setattr(space, "release", fail)
            with pytest.raises(MemoryFault):
                _ = manager.pool
        assert manager.pool.num_free == manager.num_chunks


def test_a_loop_of_several_sizes_keeps_its_memory_where_memory_is_short() -> None:
    """What is not its own goes to make room for all of it, once; then none of its births needs the pool."""
    with ooc.Session("4MiB", chunk_nbytes="64KiB", recompute=False) as session:
        manager, runner = session.engine.manager, session.engine.runner
        kept = [torch.full((64, 1024), float(value)) for value in range(17)]  # one of them is away
        small = torch.zeros(4)
        for _ in range(400):  # nobody has used them for long
            small.add_(1)

        def turn(value: int) -> None:
            for num_rows in (48, 80, 32):
                x = torch.full((num_rows, 1024), float(value))
                assert x.sum().item() == num_rows * 1024 * value

        for value in range(3):
            turn(value)
        evicted, loaded = manager.counters.evicted_nbytes, manager.counters.loaded_nbytes
        num_maps, num_births = session.engine.memory.space.num_maps, runner.dispatcher.num_births
        for value in range(10):
            turn(value)
        assert runner.dispatcher.num_births - num_births == 30  # without Python
        assert session.engine.memory.space.num_maps == num_maps
        assert (manager.counters.evicted_nbytes, manager.counters.loaded_nbytes) == (evicted, loaded)
        assert all(float(tensor[0, 0]) == value for value, tensor in enumerate(kept))


def test_what_a_loop_wants_again_is_free_for_others_where_memory_is_short() -> None:
    """It is spared while something else can go, and taken before an allocation is refused."""
    with ooc.Session("4MiB", chunk_nbytes="64KiB", recompute=False) as session:
        manager = session.engine.manager
        kept = [torch.full((64, 1024), float(value)) for value in range(8)]  # half of it
        pinned = [manager.records[tensor.untyped_storage().data_ptr()] for tensor in kept]
        for record in pinned:
            record.pin()
        for num_rows in (48, 80, 32):
            torch.ones(num_rows, 1024)
        large = torch.full((512, 1024), 7.0)  # all of the rest
        assert manager.num_free == 0
        assert large.sum().item() == 512 * 1024 * 7
        for record in pinned:
            record.unpin()
        assert all(float(tensor[0, 0]) == value for value, tensor in enumerate(kept))


def test_what_a_loop_uses_itself_does_not_go_for_what_it_allocates() -> None:
    with ooc.Session("4MiB", chunk_nbytes="64KiB", recompute=False) as session:
        manager = session.engine.manager
        away = torch.full((128, 1024), 3.0)  # once the rest is there
        used = [torch.full((64, 1024), float(value)) for value in range(14)]  # 3.5 of 4 MiB

        def turn() -> None:
            for num_rows in (48, 80, 32):
                torch.ones(num_rows, 1024)
            assert sum(float(tensor[0, 0]) for tensor in used) == 91

        turn()
        moved = manager.counters.evicted_nbytes + manager.counters.loaded_nbytes
        assert moved > 0
        for _ in range(10):
            turn()
        assert manager.counters.evicted_nbytes + manager.counters.loaded_nbytes == moved
        assert float(away[0, 0]) == 3


def test_nothing_goes_for_a_loop_where_all_fits() -> None:
    with ooc.Session("4MiB", chunk_nbytes="64KiB", recompute=False) as session:
        kept = torch.ones(768, 1024)
        for _ in range(8):
            for num_rows in (48, 80, 128, 32, 224, 256):
                torch.ones(num_rows, 1024)
        assert session.engine.manager.counters.evicted_nbytes == 0
        assert kept.sum().item() == 768 * 1024
