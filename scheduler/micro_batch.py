"""Micro-batches: one step's batch in several parts, gradients added up (Melon, MobiSys 2022).

A model without layers that work across samples may run forward and backward over a part of its batch at a time, with
one application of the summed gradients: less memory for activations, the same work, and the optimizer's once. Smaller
parts are less efficient (the recorded steps say by how much) and add up gradients more often; larger ones
need recomputation or paging. `choose_micro_batch` plans the whole step for each size and takes the fastest.

Batch norm in training computes over the samples of a batch, so that its parts are another computation: refused. Sums
are taken in another order, so the result differs in rounding: this is advice on how to train, nothing that a session
does by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from scheduler.plan import Machine, Plan, PlanError
from scheduler.planning import make_plan
from scheduler.trace import Op, Trace, Use, Variable

_CROSS_SAMPLE = "batch_norm"
_WITHOUT_BATCH = "no_training"


class CrossSampleLayers(PlanError):
    """The step cannot be cut into micro-batches.

    Attributes:
        op_index, op_name, where: The first op that works across the samples of a batch.
    """

    def __init__(self, op_index: int, op_name: str, where: str) -> None:
        self.op_index = op_index
        self.op_name = op_name
        self.where = where
        super().__init__(
            f"op {op_index} ({op_name}{', ' + where if where else ''}) computes over the samples of a batch, so "
            f"micro-batches would train another model. Options: the whole batch at once (paging, recomputation); "
            f"a norm over channels or groups in its place."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one size comes to.

    Attributes:
        size: Samples of a part; `count`: parts of the step.
        trace: The whole step in parts.
        plan: None where the policy finds none; `reason` says why.
    """

    size: int
    count: int
    trace: Trace
    plan: Plan | None
    reason: str = ""


def choose_micro_batch(
    traces: Mapping[int, Trace],
    machine: Machine,
    *,
    batch_size: int,
    add_bytes_per_s: float,
    policy: str = "melon",
    parameters: Mapping[str, Any] | None = None,
) -> tuple[MicroBatch, tuple[MicroBatch, ...]]:
    """The size of micro-batch whose whole step is planned to be the fastest within the budget; and all, large first.

    Of equally fast ones the largest.

    Args:
        traces: Plain training steps of the same model by their batch size.
        machine: Budget and rates.
        batch_size: Samples of a step; a multiple of each size.
        add_bytes_per_s: Rate at which the device goes through memory, for adding up gradients.
        policy, parameters: Who plans.

    Raises:
        CrossSampleLayers: The model works across samples, and a size is less than the batch.
        PlanError: No size fits.
        ValueError: A size that does not divide the batch, no trace, or a step without an optimizer.
    """
    if not traces:
        raise ValueError("no recorded steps to choose a micro-batch from")
    for size in traces:
        if size < 1 or batch_size % size:
            raise ValueError(f"a batch of {batch_size} does not come in micro-batches of {size}: it must be a multiple")
    found = []
    for size in sorted(traces, reverse=True):
        count = batch_size // size
        trace = in_micro_batches(traces[size], count, add_bytes_per_s=add_bytes_per_s)
        plan, reason = None, ""
        try:
            plan = make_plan(trace, machine, policy, **(parameters or {}))
        except PlanError as error:
            reason = str(error)
        found.append(MicroBatch(size=size, count=count, trace=trace, plan=plan, reason=reason))
    fitting = [(own.plan.step_ns, -own.size, own) for own in found if own.plan is not None]
    if not fitting:
        least = found[-1]
        raise PlanError(f"no micro-batch fits, not even {least.size} of {batch_size} samples: {least.reason}")
    return min(fitting, key=lambda own: own[:2])[2], tuple(found)


def require_no_cross_sample_layers(trace: Trace) -> None:
    """Raises `CrossSampleLayers` for a batch norm. A loss that compares samples looks like any other op."""
    for index, op in enumerate(trace.ops):
        if _CROSS_SAMPLE in op.name and _WITHOUT_BATCH not in op.name:
            raise CrossSampleLayers(index, op.name, op.where)


def in_micro_batches(trace: Trace, count: int, *, add_bytes_per_s: float) -> Trace:
    """The step with its forward and backward passes `count` times, gradients added up, and one optimizer.

    The passes are all ops before the optimizer's (see `optimizer_op`). What they make and free is there once for each
    part. What they make and the optimizer uses are the gradients: the first part's stay, those of the others are added
    to them as soon as they are made. What else the passes leave behind is the last part's.

    Args:
        trace: A plain step of one micro-batch.
        count: Parts; for 1 the trace is returned as it is.
        add_bytes_per_s: Each addition reads two gradients and writes one at this rate.

    Raises:
        CrossSampleLayers, ValueError: As in `choose_micro_batch`.
    """
    if count < 1 or not add_bytes_per_s > 0:
        raise ValueError(f"{count} micro-batches at {add_bytes_per_s} bytes/s: both must be positive")
    if count == 1:
        return trace
    require_no_cross_sample_layers(trace)
    return _Repeater(trace, count, add_bytes_per_s).repeated()


def optimizer_op(trace: Trace) -> int:
    """The first op of the optimizer.

    No later than the first change of a parameter or of the optimizer's state; earlier ops that read nothing but what
    these use (clipping of gradients, say) belong to it.

    Raises:
        ValueError: No op changes a parameter.
    """
    lasting = {v for v, variable in enumerate(trace.variables) if variable.kind in ("parameter", "optimizer_state")}
    changes = [i for i, op in enumerate(trace.ops) if any(use.writes and use.variable in lasting for use in op.uses)]
    if not changes:
        raise ValueError("no op of the step changes a parameter, so there is no optimizer to run once for all parts")
    first = changes[0]
    own = {use.variable for op in trace.ops[first:] for use in op.uses} | lasting
    while first and {use.variable for use in trace.ops[first - 1].uses if use.reads} <= own:
        if not any(use.reads for use in trace.ops[first - 1].uses):
            break
        first -= 1
    return first


_Key = tuple[int, int, int]
"""When something happens: part (the optimizer is one after the last), tick of the trace, place among what is added."""


class _Repeater:
    """Writes the repeated step: events with keys first, ticks when all are known."""

    def __init__(self, trace: Trace, count: int, add_bytes_per_s: float) -> None:
        self.trace = trace
        self.count = count
        self.add_bytes_per_s = add_bytes_per_s
        self.first = optimizer_op(trace)
        self.cut = trace.ops[self.first].start_tick
        in_optimizer = {use.variable for op in trace.ops[self.first :] for use in op.uses}
        self.last_use = {use.variable: i for i, op in enumerate(trace.ops[: self.first]) for use in op.uses}
        self.made = [v.birth_tick is not None and v.birth_tick < self.cut for v in trace.variables]
        self.gradients = [v for v in sorted(in_optimizer) if self.made[v] and v in self.last_use]
        self.home = [0 if v in self.gradients else count - 1 for v in range(len(trace.variables))]
        self.copy: dict[tuple[int, int], int] = {}  # variable and part -> index of its copy there
        self.variables: list[tuple[_Key | None, _Key | None, Variable]] = []
        self.ops: list[tuple[_Key, _Key, Op]] = []  # with the keys of the first and the last event

    def repeated(self) -> Trace:
        for v, variable in enumerate(self.trace.variables):
            self.variables.append((*self._life(v, self.home[v]), variable))
        for v, variable in enumerate(self.trace.variables):
            for part in (part for part in range(self.count) if self.made[v] and part != self.home[v]):
                self.copy[v, part] = len(self.variables)
                self.variables.append((*self._life(v, part), replace(variable, becomes=None)))
        for part in range(self.count + 1):
            own = self.trace.ops[: self.first] if part < self.count else self.trace.ops[self.first :]
            for op in own:
                self._write_op(op, part)
            if 0 < part < self.count:
                for v in self.gradients:
                    self._write_addition(v, part)
        return self._numbered()

    def _key(self, tick: int, part: int) -> _Key:
        return (part if tick < self.cut else self.count, tick, 0)

    def _life(self, v: int, part: int) -> tuple[_Key | None, _Key | None]:
        """Birth and death of a variable, or of its copy in a part."""
        variable = self.trace.variables[v]
        birth = None if variable.birth_tick is None else self._key(variable.birth_tick, part)
        if self.made[v] and part != self.home[v]:
            if v in self.gradients:
                return birth, self._addition(v, part, 2)
            dead = variable.death_tick
            return birth, (part, self.cut if dead is None else min(dead, self.cut), 0)
        if variable.death_tick is None:
            return birth, None
        if not self.made[v] and v not in self.last_use:
            part = 0  # freed by the passes without a use: old gradients
        return birth, self._key(variable.death_tick, part)

    def _addition(self, v: int, part: int, event: int) -> _Key:
        """An event of the addition of a gradient: right after the last op of the passes that uses it."""
        last = self.trace.ops[self.last_use[v]].stop_tick - 1
        return part, last, 3 * self.gradients.index(v) + event

    def _write_op(self, op: Op, part: int) -> None:
        uses = tuple(replace(u, variable=self.copy.get((u.variable, part), u.variable)) for u in op.uses)
        keys = ((part, op.start_tick, 0), (part, op.stop_tick - 1, 0))
        self.ops.append((*keys, replace(op, uses=uses)))

    def _write_addition(self, v: int, part: int) -> None:
        key = self._addition(v, part, 1)
        uses = (Use(variable=v, reads=True, writes=True), Use(variable=self.copy[v, part], reads=True, writes=False))
        duration_ns = round(3 * self.trace.variables[v].nbytes / self.add_bytes_per_s * 1e9)
        op = Op(name="add up gradients", start_tick=0, stop_tick=1, duration_ns=duration_ns, uses=uses)
        self.ops.append((key, key, op))

    def _numbered(self) -> Trace:
        keys = {key for first, last, _ in self.ops for key in (first, last)}
        keys.add((0, -1, 0))  # what is there at first is there for a tick at least
        keys |= {key for birth, death, _ in self.variables for key in (birth, death) if key is not None}
        tick = {key: index for index, key in enumerate(sorted(keys))}
        return replace(
            self.trace,
            ops=tuple(
                replace(op, start_tick=tick[first], stop_tick=tick[last] + 1)
                for first, last, op in sorted(self.ops, key=lambda own: own[0])
            ),
            variables=tuple(
                replace(
                    variable,
                    birth_tick=None if birth is None else tick[birth],
                    death_tick=None if death is None else tick[death],
                )
                for birth, death, variable in self.variables
            ),
            num_ticks=len(tick) + 1,
            metadata={k: v for k, v in self.trace.metadata.items() if k != "costs"} | {"micro_batches": self.count},
        )
