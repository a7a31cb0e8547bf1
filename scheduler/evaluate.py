"""Colour and simulate a proposal: how planners compare candidates."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.colouring import Shortage, colour
from scheduler.plan import Machine, Plan, Residency
from scheduler.simulate import Simulation, simulate
from scheduler.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What a proposal (uncoloured residencies) costs, and the plan that was simulated to know it."""

    proposal: tuple[Residency, ...]
    plan: Plan
    simulation: Simulation
    num_remapped_chunks: int

    @property
    def rank(self) -> tuple[int, int, int]:
        """Smaller is better: time, then bytes moved, then remaps."""
        s = self.simulation
        return s.duration_ns, s.loaded_nbytes + s.evicted_nbytes, self.num_remapped_chunks


def evaluate(residencies: tuple[Residency, ...], trace: Trace, machine: Machine) -> Evaluation | Shortage:
    """Colour `residencies` and simulate the result. A `Shortage` means that they do not colour."""
    outcome = colour(residencies, trace, machine)
    if isinstance(outcome, Shortage):
        return outcome
    plan = Plan(trace_fingerprint="", policy="", machine=machine, residencies=outcome.residencies)
    simulation = simulate(plan, trace, with_timeline=False)
    return Evaluation(
        proposal=residencies, plan=plan, simulation=simulation, num_remapped_chunks=outcome.num_remapped_chunks
    )
