"""`RecordedOps`: the ops of a recording, as compact as they came until somebody asks for records.

A record for each op of a step, with its lists of addresses, would be objects by the ten thousand for the cycle
collector to follow, and most recordings are never looked at: those of steps that do not come again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ooc.memory.step_uses import Operands
from ooc.tracing.op_log import Entry, OpLog


@dataclass(slots=True, kw_only=True)
class OpRecord:
    """One op of a recording. Addresses are those that its storages had at the time.

    Attributes:
        func: The `OpOverload`.
        occurrences: One address per operand, repeats included, in order.
        written: Addresses of operands that the op changes.
        results: Addresses of what it returned.
        in_flight: Addresses that it goes on using after it has returned: a collective's operands.
        is_held: Whether that ends only when the program says so (a send or receive).
        landed: Addresses no more in use so, since the program has waited between the op before and this one.
        replayable: Whether it may be run again later in the step.
        sliced: Of an op that ran in parts, addresses of operands that it reads in slices, wherever they are
            (`ooc.tracing.operand_marks`). None: it ran as a whole.
        node: The number of the autograd node that it runs for, as -1 - number; going forward, one more than that of
            the youngest node, which the first op with this number has made. 0: nobody knows.
    """

    func: Any
    where: str
    occurrences: Sequence[int]
    written: Sequence[int]
    results: Sequence[int] = ()
    duration_ns: int = 0
    in_flight: Sequence[int] = ()
    is_held: bool = False
    landed: Sequence[int] = ()
    replayable: bool = False
    sliced: Sequence[int] | None = None
    node: int = 0

    def note_device_ns(self, ns: int) -> None:
        """So long it took on the device: that is its duration, if issuing it took no longer."""
        self.duration_ns = max(self.duration_ns, ns)


class RecordedOps:
    """Ops in order: stretches that native code has logged, and records of those that came through Python.

    Attributes:
        log: Where native code notes the next ops; None: all come through Python.
    """

    def __init__(self) -> None:
        self.log: OpLog | None = None
        self._parts: list[list[OpRecord] | OpLog] = []  # none is empty
        self._starts: list[int] = []  # of each part, its first op's place
        self._num_in_parts = 0

    def __repr__(self) -> str:
        return f"<RecordedOps: {len(self)} in {len(self._parts)} parts>"

    def __len__(self) -> int:
        """How many there are. At once, unlike `records`."""
        return self._num_in_parts + (len(self.log) if self.log is not None else 0)

    def extend(self, ops: Sequence[OpRecord]) -> None:
        """Add ops that came through Python."""
        self._detach()
        if not ops:
            return
        last = self._parts[-1] if self._parts else None
        if isinstance(last, list):
            last.extend(ops)
        else:
            self._add(list(ops))
        self._num_in_parts = self._starts[-1] + len(self._parts[-1])

    def last(self) -> OpRecord | None:
        """The last op, whose record may be changed; None if there are none."""
        self._detach()
        last = self._parts[-1] if self._parts else ()
        found = last if isinstance(last, list) else self.records()
        return found[-1] if found else None

    def drop_last(self) -> None:
        """Forget the last op."""
        if self.last() is None:
            return
        if not isinstance(self._parts[-1], list):
            self.records()
        del self._parts[-1][-1]  # type: ignore[union-attr]  # a list
        self._num_in_parts -= 1
        if not self._parts[-1]:
            del self._parts[-1], self._starts[-1]

    def records(self) -> list[OpRecord]:
        """All of them as records, which are kept from now on. Read it only: `extend` adds to them."""
        found = self.as_records()
        if found:
            self._parts, self._starts = [found], [0]
        return found

    def as_records(self) -> list[OpRecord]:
        """The same, but what is compact stays so, and is made into records again when somebody asks again."""
        self._detach()
        if len(self._parts) == 1 and isinstance(self._parts[0], list):
            return self._parts[0]
        found: list[OpRecord] = []
        for part in self._parts:
            found += part if isinstance(part, list) else map(_record, part.entries())
        return found

    def at(self, index: int) -> OpRecord:
        """One of them. What is compact stays so."""
        self._detach()
        place = bisect_right(self._starts, index) - 1
        part, offset = self._parts[place], index - self._starts[place]
        return part[offset] if isinstance(part, list) else _record(part.entry(offset))

    def operands_since(self, start: int) -> Operands:
        """The ops from one on, with the addresses of their operands."""
        self._detach()
        funcs: list[Any] = []
        used: list[tuple[int, Sequence[int]]] = []
        for index in range(max(bisect_right(self._starts, start) - 1, 0), len(self._parts)):
            part, skipped, before = self._parts[index], max(start - self._starts[index], 0), len(funcs)
            if isinstance(part, list):
                some = Operands.of((op.func, op.occurrences) for op in part[skipped:])
            else:
                some = Operands(*part.operands(skipped))
            funcs += some.funcs
            used += [(before + place, found) for place, found in some.used] if before else some.used
        return Operands(funcs, used)

    def hashed(self, start: int, step: Any) -> int:
        """Continue a hash of which ops there were, by `step(hash, func)` for those that came through Python."""
        found = start
        for part in (*self._parts, *([self.log] if self.log is not None else [])):
            if isinstance(part, list):
                for op in part:
                    found = step(found, op.func)
            else:
                found = part.signature(found)
        return found

    def settle(self) -> None:
        """Give the ops that native code has logged their times on the device."""
        self._detach()
        for part in self._parts:
            if not isinstance(part, list):
                part.settle()

    def _add(self, part: list[OpRecord] | OpLog) -> None:
        self._parts.append(part)
        self._starts.append(self._num_in_parts)

    def _detach(self) -> None:
        """What native code has logged so far is a part of its own from now on."""
        if self.log is not None and len(self.log):
            self._add(self.log.detach())
            self._num_in_parts += len(self._parts[-1])


def forward_ops(ops: Sequence[OpRecord]) -> tuple[int, ...]:
    """For each op of a backward pass the op among these whose gradient it is a part of; -1: none, or nobody knows.

    An op that writes to a view has made one more node when it was over, which no op came by: so the node is of the op
    before it. Not beyond the last op going forward: what is made there is a checkpoint's, within the backward pass.
    """
    numbers, makers = list[int](), list[int]()
    found = []
    for index, op in enumerate(ops):
        if op.node > 0 and (not numbers or op.node > numbers[-1]):
            numbers.append(op.node)
            makers.append(index)
        found.append(-1)
        if op.node < 0:
            place = bisect_right(numbers, -op.node) - 1
            if place >= 0 and (numbers[place] == -op.node or place + 1 < len(numbers)):
                found[index] = makers[place]
    return tuple(found)


def _record(entry: Entry) -> OpRecord:
    func, where, occurrences, written, results, duration_ns, replayable, node = entry
    return OpRecord(
        func=func,
        where=where,
        occurrences=occurrences,
        written=written,
        results=results,
        duration_ns=duration_ns,
        replayable=replayable,
        node=node,
    )
