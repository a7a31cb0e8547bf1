"""Colour and simulate a proposal: how planners compare candidates."""

from __future__ import annotations

from dataclasses import dataclass, replace

from scheduler.colouring.colouring import MANY_TO_COLOUR, Shortage
from scheduler.colouring.scratch import ScratchColouring, colour_with_scratch
from scheduler.cost.simulate import Simulation, simulate
from scheduler.plan import Machine, Plan, Residency
from scheduler.trace import Trace

# Mapping existing pages with their page table entries, as measured for the design (DESIGN.md section 7).
_REMAP_BYTES_PER_S = 9.2e9

# What exchanges leave of a colouring's remaps, about.
_LEFT_BY_EXCHANGES = 1 / 3


# From this many residencies on, candidates are compared by the quicker colouring: planning stays within seconds.
_MANY = 700


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What a proposal (uncoloured residencies) costs, and the plan that was simulated to know it.

    Attributes:
        coloured: The proposal with chunks.
        is_final: Whether the finished plan will have the same chunks, hence the same remaps.
    """

    proposal: tuple[Residency, ...]
    plan: Plan
    coloured: ScratchColouring
    simulation: Simulation
    num_remapped_chunks: int
    is_final: bool

    @property
    def duration_ns(self) -> int:
        """The step's time, with that of its remaps; an estimate of theirs unless `is_final`."""
        num_chunks = self.num_remapped_chunks if self.is_final else int(self.num_remapped_chunks * _LEFT_BY_EXCHANGES)
        return self.simulation.duration_ns + remap_ns(num_chunks, self.plan.machine)

    @property
    def rank(self) -> tuple[int, int, int]:
        """Smaller is better: time, then bytes moved, then remaps."""
        s = self.simulation
        return self.duration_ns, s.loaded_nbytes + s.evicted_nbytes, self.num_remapped_chunks


def remap_ns(num_chunks: int, machine: Machine) -> int:
    """Time to map so many chunks elsewhere. The thread that computes does it, so it adds to the step."""
    if machine.remap_ns is not None:
        return num_chunks * machine.remap_ns
    return int(num_chunks * machine.chunk_nbytes / _REMAP_BYTES_PER_S * 1e9)


def estimate(residencies: tuple[Residency, ...], trace: Trace, machine: Machine) -> Simulation:
    """Simulate a proposal without colouring it, which takes a fourth of the time: about how long its ops wait."""
    plan = Plan(trace_fingerprint="", policy="", machine=machine, residencies=residencies)
    return simulate(plan, trace, with_timeline=False)


def evaluate(
    residencies: tuple[Residency, ...], trace: Trace, machine: Machine, *, is_final: bool = False
) -> Evaluation | Shortage:
    """Colour `residencies`, if `is_final` as well as it can be done, and simulate the result.

    A `Shortage` means that they do not colour.
    """
    quick = len(residencies) > _MANY and not is_final
    outcome = colour_with_scratch(residencies, trace, machine, quick=quick, exchanges=is_final)
    if isinstance(outcome, Shortage):
        return outcome
    outcome, plan, simulation = best_way(outcome, trace, machine)
    colouring = outcome.colouring
    return Evaluation(
        proposal=residencies,
        plan=plan,
        coloured=outcome,
        simulation=simulation,
        num_remapped_chunks=colouring.num_remapped_chunks,
        is_final=is_final
        or (not quick and not colouring.num_remapped_chunks)  # there is no need of exchanges
        or (len(residencies) > MANY_TO_COLOUR and not outcome.scratch),
    )


def best_way(coloured: ScratchColouring, trace: Trace, machine: Machine) -> tuple[ScratchColouring, Plan, Simulation]:
    """Of the ways that a colouring leaves open what takes less time, simulated, remaps included.

    They are its two chunk assignments, if it has two; and what gave way at the step's border copied within memory
    there, or evicted.
    """
    ways = [replace(own, other=None) for own in (coloured, coloured.other) if own is not None]
    ways += [replace(w, colouring=w.colouring.evicting(trace)) for w in ways if w.colouring.border_copies]
    best: tuple[int, ScratchColouring, Plan, Simulation] | None = None
    for own in ways:
        colouring = own.colouring
        plan = Plan(
            trace_fingerprint="",
            policy="",
            machine=machine,
            residencies=colouring.residencies,
            scratch=own.scratch,
            border_copies=colouring.border_copies,
        )
        simulation = simulate(plan, trace, with_timeline=False)
        duration_ns = simulation.duration_ns + remap_ns(colouring.num_remapped_chunks, machine)
        if best is None or duration_ns < best[0]:
            best = duration_ns, own, plan, simulation
    assert best is not None
    return best[1:]
