"""Ops that came at a plan's head, and that it does not have, stand in the recording at the place where they ran."""

from __future__ import annotations

import pytest
import torch

from ooc.replay.ops_beside import OpsBeside
from ooc.tracing.recorded_ops import OpRecord
from tests.session.test_segments import digest, model, planned_share, run, train_step
from vmm.table import between_ops, inside_op
from vmm.torch_cpu import Event


def _op(name: str) -> OpRecord:
    return OpRecord(func=name, where="", occurrences=(), written=())


@pytest.mark.parametrize(
    ("omitted", "replayed", "expected"),
    [
        ([], ["p0", "p1", "p2"], ["b0", "b0'", "p0", "p1", "b2", "p2"]),
        ([0], ["p1", "p2"], ["b0", "b0'", "p1", "b2", "p2"]),
        ([0, 1], ["p2"], ["b0", "b0'", "b2", "p2"]),
        ([2], ["p0", "p1"], ["b0", "b0'", "p0", "p1", "b2"]),
    ],
)
def test_they_stand_where_they_ran(omitted: list[int], replayed: list[str], expected: list[str]) -> None:
    beside = OpsBeside()
    for cursor, name in ((0, "b0"), (0, "b0'"), (2, "b2")):
        beside.note(cursor, 5, name, "", ())
    beside.note(6, 5, "after the head", "", ())
    positions = [place(index) for index in range(len(replayed)) for place in (between_ops, inside_op)]
    events = [Event(address=index, nbytes=0, kind=0, position=p, ordinal=0) for index, p in enumerate(positions)]

    ops, moved = beside.joined([_op(name) for name in replayed], events, omitted)

    assert [op.func for op in ops] == expected
    for event, after in zip(events, moved, strict=True):
        name = replayed[event.position // 2]
        if event.position % 2:
            assert after.position == inside_op(expected.index(name))
        else:  # after the replayed op before it, and before whatever ran beside since
            before = replayed[: event.position // 2][-1:]
            assert after.position == between_ops(expected.index(before[0]) + 1 if before else 0)
    beside.begin()
    assert beside.joined([], [], []) == ([], [])


def test_what_begins_with_small_ops_and_a_large_allocation_is_planned() -> None:
    """Each third step tables are filled, beginning with ops that the plan of the steps takes for none of its own."""

    def program() -> list[object]:
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        kept: list[torch.Tensor] = []
        for index in range(36):
            train_step(net, optimizer, index)
            if index % 3 == 0:
                with torch.no_grad():
                    scale = torch.full((3,), 2.0) * torch.arange(3)
                    kept = [torch.full((40_000,), float(index)) for _ in range(24)]
                    for table, weight in zip(kept, net.parameters(), strict=False):
                        table[: weight.shape[0]] += weight.sum() * scale[1]
        return digest(net) + [float(table.double().sum()) for table in kept]

    rows = run(program)
    assert planned_share(rows[10:]) >= 0.95, [(row.mode, row.why) for row in rows]
