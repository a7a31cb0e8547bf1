"""A session that ends badly, or gives its tensors up: no later one gets their addresses before they are freed."""

from __future__ import annotations

import gc
import traceback

import pytest
import torch
from torch import Tensor

import ooc
from ooc.devices.cpu import CpuMemory
from ooc.replay.reruns import Reruns
from tests.session.recomputed import CASES, Training, session
from vmm.table import AllocatorTable
from vmm.torch_cpu import cpu_allocator

LENGTH = 20_000


def open_session() -> ooc.Session:
    return ooc.Session("4MiB", chunk_nbytes="64KiB", debug=True)


def places(tensors: list[Tensor]) -> set[int]:
    """The granules where their bytes are."""
    found: set[int] = set()
    for tensor in tensors:
        start = tensor.untyped_storage().data_ptr()
        found.update(range(start >> 16, (start + tensor.untyped_storage().nbytes() + 0xFFFF) >> 16))
    return found


def give_up(count: int) -> tuple[list[Tensor], set[int]]:
    """Tensors of a session that was closed without them, and where they were."""
    with open_session() as earlier:
        tensors = [torch.full((LENGTH,), float(index)) for index in range(count)]
        where = places(tensors)
        earlier.close(bring_back=False)
    return tensors, where


def test_addresses_of_what_was_given_up() -> None:
    """They are free when the tensors are, and that is no free of another session's."""
    held, where = give_up(5)
    with open_session() as later:
        ours = [torch.full((LENGTH,), 7.0) for _ in range(12)]
        assert not places(ours) & where
        held.clear()
        gc.collect()
        assert all(tensor.sum().item() == 7.0 * LENGTH for tensor in ours)
        assert len(later.engine.live_records()) == len(ours)
    assert all(tensor.sum().item() == 7.0 * LENGTH for tensor in ours)
    del ours
    with open_session():
        # What other tests have left free may come first.
        assert places([torch.full((LENGTH,), 7.0) for _ in range(400)]) & where


def test_without_the_rule_a_late_free_is_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuMemory, "abandon_tensors", lambda *_: None)
    held, _ = give_up(5)
    with open_session() as later:
        ours = [torch.full((LENGTH,), 7.0) for _ in range(12)]
        held.clear()
        assert len(later.engine.live_records()) < len(ours)


def test_what_cannot_be_made_again_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step ends by an exception, and the re-run fails that its variables need: they alone are lost, and said so."""
    outputs: list[Tensor] = []
    kept: list[Tensor] = []

    def fails(*_: object) -> None:
        raise RuntimeError("the re-run fails, says the test")

    def stop(_: Training, index: int, output: Tensor) -> None:
        if index == 4:
            outputs.append(output)
            monkeypatch.setattr(Reruns, "run_now", fails)
            raise KeyError("on purpose")

    def train_in_session() -> None:
        with session(case) as opened:
            kept.append(torch.full((LENGTH,), 3.0))
            Training(case, session=opened).run(hook=stop)

    def train() -> str:
        said = r"could not be brought back: .*discarded"
        with pytest.raises(ooc.SessionError, match=said) as raised:
            train_in_session()
        return "".join(traceback.format_exception(raised.value))

    case = CASES["convolutions"]
    said = train()
    assert "says the test" in said
    assert "on purpose" in said
    assert kept[0].sum().item() == 3.0 * LENGTH
    monkeypatch.undo()
    where = set(cpu_allocator().detached)
    with session(case) as opened:
        training = Training(case, session=opened)
        training.run(num_steps=2)
        assert not where & {record.address for record in opened.engine.live_records()}
        outputs.clear()
        gc.collect()
        training.run(num_steps=2)
    assert len(cpu_allocator().detached) < len(where)


@pytest.mark.parametrize("first", [0, 1])
def test_storages_of_reruns_that_outlive_their_session(first: int) -> None:
    """Held by a traceback, say. The one that is freed last counts, in whatever order they are."""
    held: list[Tensor] = []
    with open_session() as earlier:
        allocator: AllocatorTable = earlier.engine.memory.allocator
        held.append(torch.full((LENGTH,), 1.0))
        address, nbytes = held[0].untyped_storage().data_ptr(), held[0].untyped_storage().nbytes()
        held.clear()
        for _ in range(2):
            with allocator.rerunning([(nbytes, address)]):
                held.append(torch.empty(LENGTH))
        assert {tensor.untyped_storage().data_ptr() for tensor in held} == {address}
    with open_session() as later:
        ours = [torch.full((LENGTH,), 7.0) for _ in range(6)]
        assert address >> 16 not in places(ours)
        del held[first]
        assert allocator.is_alive(address)
        held.clear()
        assert not allocator.is_alive(address)
        assert len(later.engine.live_records()) == len(ours)
    assert allocator.state.num_rerun_alive == 0
