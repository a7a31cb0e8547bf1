"""After an accident in mid-step: are the books true, and does training go on from what is there?

Which ops of a broken step have run depends on when it broke, so it cannot be compared with an
in-core run. What can: take what is readable after the accident (`snapshot`), train on within the
session, and train on in core from the snapshot. Both must agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

import ooc
from ooc.memory.record import State

Arrays = Mapping[str, npt.NDArray[Any]]

WIDTH = 160
BATCH = 256
BUDGET = "1536KiB"
"""A step needs about 3 MiB in core; its largest op about 1 MiB."""


class Trainer:
    """A small model whose step has many ops; every variable but the biases is above the threshold."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            *(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())), nn.Linear(WIDTH, 10)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)
        for parameter in self.model.parameters():
            # Made by AdamW itself in its first step, one entry after the other: an exception between
            # two of them leaves a state that AdamW cannot go on from, in core as well.
            self.optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def step(self, index: int, between: Callable[[], object] = lambda: None) -> str:
        """One step on the batch of this index; its loss to the last bit. `between` runs after the forward pass."""
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randn(BATCH, WIDTH, generator=generator)
        targets = torch.randint(0, 10, (BATCH,), generator=generator)
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(inputs), targets)
        between()
        loss.backward()
        self.optimizer.step()
        return loss.item().hex()

    def snapshot(self) -> dict[str, npt.NDArray[Any]]:
        """Copies of all parameters and optimizer state."""
        found = {}
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                found[name] = np.array(parameter.detach().numpy(), copy=True)
                for key, value in self.optimizer.state.get(parameter, {}).items():
                    found[f"{name}/{key}"] = np.array(value.detach().numpy(), copy=True)
        return found

    @classmethod
    def restored(cls, arrays: Arrays) -> Trainer:
        """A new trainer in the state of a snapshot."""
        made = cls()
        with torch.no_grad():
            for name, parameter in made.model.named_parameters():
                parameter.copy_(torch.from_numpy(arrays[name]))
                state = {
                    key.rpartition("/")[2]: torch.from_numpy(np.array(value, copy=True))
                    for key, value in arrays.items()
                    if key.startswith(f"{name}/")
                }
                if state:
                    made.optimizer.state[parameter] = state
        return made


def in_core(arrays: Arrays, indices: range) -> tuple[list[str], dict[str, npt.NDArray[Any]]]:
    """Losses and final state of training on from a snapshot, without a session."""
    trainer = Trainer.restored(arrays)
    losses = [trainer.step(index) for index in indices]
    return losses, trainer.snapshot()


def assert_arrays_equal(expected: Arrays, actual: Arrays) -> None:
    """To the last bit."""
    assert list(expected) == list(actual)
    wrong = [name for name in expected if expected[name].tobytes() != actual[name].tobytes()]
    assert not wrong, f"{len(wrong)} of {len(expected)} differ: {wrong}"


def assert_books_true(session: ooc.Session) -> None:
    """Every chunk is free or held by one record that is mapped there; nothing is pinned or under way."""
    live_nbytes = session.engine.live_nbytes()  # leaves the plan, if one is being played
    manager = session.engine.manager
    with session.engine.lock:
        manager.land()
    assert session.engine.executor.active is None
    assert live_nbytes == sum(record.nbytes for record in manager.records.values())
    held: list[int] = []
    for address, record in manager.records.items():
        assert record.address == address
        assert record.pins == 0, record
        assert record.state is not State.LOADING, record
        assert record.variable_index == -1, record
        if record.state is State.RESIDENT:
            chunks = [c for first, count in record.runs for c in range(first, first + count)]
            assert len(chunks) == manager.chunks_of(record.nbytes), record
            held += chunks
            assert record.reservation.runs is not None, record
            mapped = [c for first, count in record.reservation.runs for c in range(first, first + count)]
            assert mapped == chunks, record
            assert not record.reservation.is_protected, record
        else:
            assert record.slot is not None, record
            assert record.stored, record
    assert len(held) == len(set(held)), "two records share a chunk"
    assert len(held) + manager.num_free == manager.pool.num_chunks
    owned = {id(record): record for record in manager.records.values()}
    sequences = session.engine.sequences
    for executable in (*sequences._plans.values(), *sequences.retired):  # they keep some for what a step makes
        owned.update((id(v.record), v.record) for v in executable.variables if v.record is not None)
    slots = [record.slot for record in owned.values() if record.slot is not None]
    assert session.engine.memory.store.num_slots == len(slots), (
        f"{session.engine.memory.store.num_slots} slots, of which {slots} are owned"
    )
    assert len(manager.space.reservations) == len(owned)
