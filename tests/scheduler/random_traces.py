"""Random traces for the planner's tests: small, odd, and covering what real steps do.

A generated step has parameters (alive all the time), gradients that are freed and allocated anew
(the old one becomes the new one at the boundary), double buffers (the new one is allocated
before the old one is freed), activations, temporaries that live within one op, allocations and
frees between ops, variables that are never used, and workspaces that can never be away.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field, replace

from scheduler.plan import Machine
from scheduler.trace import Op, Trace, Use, Variable

TIMES = int(os.environ.get("OOC_TEST_TIMES", "1"))
"""How many times as many random cases the tests of every policy try: `OOC_TEST_TIMES=50` makes it thousands each."""


def random_trace(
    seed: int,
    *,
    num_ops: int = 12,
    cyclic: bool | None = None,
    max_nbytes: int = 40,
    between_ops: bool = True,
    not_evictable: bool = True,
) -> Trace:
    """A random legal trace; the same seed gives the same trace.

    Args:
        seed: Seed of the generator.
        num_ops: Length of the step.
        cyclic: Whether the step repeats; None: by chance.
        max_nbytes: Largest variable.
        between_ops: Whether variables may be allocated between ops.
        not_evictable: Whether some variables can never be away.
    """
    rng = random.Random(seed)
    return _Writer(rng, rng.random() < 0.6 if cyclic is None else cyclic).write(
        num_ops, max_nbytes, between_ops, not_evictable
    )


def random_machine(seed: int, num_chunks: int) -> Machine:
    """A machine with odd rates; chunks of 1 to 16 bytes."""
    rng = random.Random(seed + 77)
    rate = 10 ** rng.uniform(6, 10)
    return Machine(
        chunk_nbytes=rng.choice([1, 3, 8, 16]),
        num_chunks=num_chunks,
        load_bytes_per_s=rate * rng.uniform(0.5, 2),
        evict_bytes_per_s=rate * rng.uniform(0.5, 2),
        shared_bytes_per_s=rng.choice([None, rate, rate * 1.3]),
        latency_ns=rng.choice([0, 10, 1000]),
    )


@dataclass
class _Draft:
    nbytes: int
    birth: int | None
    death: int | None = None
    becomes: int | None = None
    evictable: bool = True
    dies_at_op: int | None = None
    label: str = ""


@dataclass
class _Writer:
    rng: random.Random
    cyclic: bool
    tick: int = 0
    drafts: list[_Draft] = field(default_factory=list)
    alive: list[int] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)

    def write(self, num_ops: int, max_nbytes: int, between_ops: bool, not_evictable: bool) -> Trace:
        rng = self.rng
        self.max_nbytes = max_nbytes
        for _ in range(rng.randint(0, 5)):
            self.new(None, label="parameter")
        renewed = [self.new(None, label="old") for _ in range(rng.randint(0, 3))] if self.cyclic else []
        if not_evictable and rng.random() < 0.3:
            self.drafts[self.new(None, label="workspace")].evictable = False
        self.parameters = [v for v in self.alive if v not in renewed]
        self.plan_renewals(renewed, num_ops)
        for index in range(num_ops):
            self.write_op(index, num_ops, between_ops, not_evictable)
        self.write_end()
        variables = tuple(
            Variable(
                nbytes=d.nbytes,
                birth_tick=d.birth,
                death_tick=d.death,
                becomes=d.becomes,
                evictable=d.evictable,
                label=d.label,
            )
            for d in self.drafts
        )
        return Trace(ops=tuple(self.ops), variables=variables, num_ticks=self.tick, cyclic=self.cyclic)

    def plan_renewals(self, renewed: list[int], num_ops: int) -> None:
        """For each old variable: the op at which it dies and the op at which its successor is born."""
        self.renewals: dict[int, list[int]] = {}
        for old in renewed:
            dies, born = self.rng.randrange(num_ops), self.rng.randrange(num_ops)
            if self.rng.random() < 0.7:
                dies, born = min(dies, born), max(dies, born)
            self.drafts[old].dies_at_op = dies
            self.renewals.setdefault(born, []).append(old)

    def new(self, birth: int | None, label: str = "") -> int:
        nbytes = self.rng.randint(1, self.max_nbytes)
        self.drafts.append(_Draft(nbytes=nbytes, birth=birth, label=label))
        self.alive.append(len(self.drafts) - 1)
        return len(self.drafts) - 1

    def next_tick(self) -> int:
        self.tick += 1
        return self.tick - 1

    def kill(self, v: int) -> None:
        self.drafts[v].death = self.next_tick()
        self.alive.remove(v)

    def write_op(self, index: int, num_ops: int, between_ops: bool, not_evictable: bool) -> None:
        rng = self.rng
        if between_ops and rng.random() < 0.15:
            v = self.new(self.next_tick(), label="between")
            self.drafts[v].dies_at_op = rng.randint(index, num_ops - 1)
            if rng.random() < 0.3:
                self.kill(v)
        start = self.next_tick()
        readable = [v for v in self.alive if self.drafts[v].evictable or rng.random() < 0.5]
        operands = rng.sample(readable, min(len(readable), rng.randint(0, 3)))
        uses = [Use(variable=v, reads=True, writes=rng.random() < 0.25) for v in operands]
        for v in [v for v in self.alive if self.drafts[v].dies_at_op == index and rng.random() < 0.4]:
            self.kill(v)  # freed within the op, before its results are allocated
        for old in self.renewals.get(index, []):
            v = self.new(self.next_tick(), label="renewed")
            self.drafts[v].nbytes = self.drafts[old].nbytes
            self.drafts[v].becomes = old
            uses.append(Use(variable=v, reads=False, writes=True))
        for _ in range(rng.choice([0, 1, 1, 2])):
            v = self.new(self.next_tick(), label="result")
            self.drafts[v].dies_at_op = rng.randint(index, num_ops - 1)
            if not_evictable and rng.random() < 0.05:
                self.drafts[v].evictable = False
            if rng.random() < 0.9:
                uses.append(Use(variable=v, reads=False, writes=True))
            if rng.random() < 0.3:
                self.kill(v)  # a temporary
        stop = self.next_tick() + 1
        duration = rng.choice([0, rng.randint(1, 2000), rng.randint(1, 2000)])
        self.ops.append(Op(name=f"op{index}", start_tick=start, stop_tick=stop, duration_ns=duration, uses=tuple(uses)))
        for v in [v for v in self.alive if (self.drafts[v].dies_at_op or num_ops) <= index]:
            if self.drafts[v].dies_at_op is not None:
                self.kill(v)

    def write_end(self) -> None:
        for v in list(self.alive):
            draft = self.drafts[v]
            if draft.dies_at_op is not None:
                self.kill(v)
            elif self.cyclic and draft.label in ("parameter", "workspace"):
                draft.becomes = v
        self.next_tick()
        for v in self.alive:
            # A workspace that is carried over with a changed identity cannot both stay and be double-buffered.
            assert not self.cyclic or self.drafts[v].becomes is not None, self.drafts[v]


def fixed(trace: Trace, *, duration_ns: int) -> Trace:
    """The same trace with every op taking `duration_ns`."""
    return replace(trace, ops=tuple(replace(op, duration_ns=duration_ns) for op in trace.ops))


def replayable(trace: Trace, *, share: float = 1.0, rng: random.Random | None = None) -> Trace:
    rng = rng or random.Random(0)
    return replace(trace, ops=tuple(replace(op, replayable=rng.random() < share) for op in trace.ops))
