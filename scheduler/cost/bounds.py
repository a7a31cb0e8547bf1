"""Lower bounds: what no plan of a trace on a machine can beat, each with the reason.

Every plan states its distance from them, so that "slow" can be told from "impossible to be fast".
"""

from __future__ import annotations

import numpy as np

from scheduler.budget import IntArray, smallest_num_chunks
from scheduler.chains import Chain, chains_of
from scheduler.cost.least_wait import least_wait_ns
from scheduler.cost.links import least_busy_ns
from scheduler.plan import Machine
from scheduler.reruns import ReplayGraph
from scheduler.trace import Trace


def lower_bounds(trace: Trace, machine: Machine, *, recompute: bool = False) -> dict[str, int]:
    """Lower bounds for any legal plan.

    Args:
        trace, machine: What is planned, and for what.
        recompute: Whether ops may be run again. If not, the bounds hold for plans without re-runs
            only. If so, what re-runs can bring back need not be moved (its compute is not counted).

    Returns:
        `smallest_budget_nbytes`: what the most demanding op pins at once, in whole chunks. A plan
            holds at least that at that op.
        `in_core_nbytes`: most chunk bytes alive at once: the budget from which nothing moves
            (but for what must be away at the boundary).
        `loaded_nbytes`, `evicted_nbytes`: see `_traffic`.
        `compute_ns`: ops run one after another.
        `duration_ns`: the larger of compute with its least wait (`scheduler.cost.least_wait`), and the links'
            least busy time, because these can at best overlap fully.
    """
    exempt = _recomputable(trace) if recompute else frozenset()
    loaded, evicted = _traffic(trace, machine, exempt)
    links_ns = least_busy_ns(machine, loaded, evicted)
    wait_ns = least_wait_ns(trace, machine, exempt, discards=recompute)
    return {
        "smallest_budget_nbytes": smallest_num_chunks(trace, machine) * machine.chunk_nbytes,
        "in_core_nbytes": _in_core_chunks(trace, machine) * machine.chunk_nbytes,
        "loaded_nbytes": loaded,
        "evicted_nbytes": evicted,
        "compute_ns": trace.duration_ns,
        "duration_ns": max(trace.duration_ns + wait_ns, links_ns),
    }


def _recomputable(trace: Trace) -> frozenset[int]:
    """Variables that a re-run may bring back for some of their uses.

    That takes an op that makes them and may run again; one that changes them after the re-run need not.
    """
    graph = ReplayGraph(trace)
    return frozenset(v for v, maker in enumerate(graph.maker) if maker is not None and graph.may_rerun[maker])


def _in_core_chunks(trace: Trace, machine: Machine) -> int:
    change = np.zeros(trace.num_ticks + 1, dtype=np.int64)
    for index, v in enumerate(trace.variables):
        start, stop = trace.lifetime(index)
        change[start] += machine.chunks_of(v.nbytes)
        change[stop] -= machine.chunks_of(v.nbytes)
    return int(np.cumsum(change).max(initial=0))


def _traffic(trace: Trace, machine: Machine, exempt: frozenset[int]) -> tuple[int, int]:
    """Least bytes in and out per step.

    In: what starts away and is used must be loaded once. And at any tick, of the bytes that are
    alive and used again later, at most the budget is in memory; the rest is loaded after that
    tick, at the latest for that use. Loads of what starts away and is used before the tick
    come on top, since they happen before it.

    Out: at any tick at most the budget is in memory. Of what is away, all but what no op ever
    writes has been written out once in the step. And what must end away, and was changed since it came
    in, is written out.
    """
    if not trace.ops:
        return 0, 0
    chains = chains_of(trace, machine)
    used_again = np.zeros(trace.num_ticks + 1, dtype=np.int64)
    loaded_before = np.zeros(trace.num_ticks + 1, dtype=np.int64)
    changing = np.zeros(trace.num_ticks + 1, dtype=np.int64)
    must_load = must_evict = 0
    for chain in chains:
        if not chain.pins or chain.variable in exempt:
            continue
        nbytes = trace.variables[chain.variable].nbytes
        last = chain.stop_tick if chain.is_cycle else chain.pins[-1].start_tick
        _fold_add(used_again, chain.start_tick, last, nbytes)
        if chain.starts_away:
            must_load += nbytes
            loaded_before[chain.pins[0].start_tick] += nbytes
        if chain.num_writes:
            _fold_add(changing, chain.start_tick, chain.stop_tick, nbytes)
            if chain.ends_away:
                must_evict += nbytes
    _drop_before_first_load(changing, chains, trace)
    excess_in = np.maximum(np.cumsum(used_again)[:-1] - machine.budget_nbytes, 0)
    excess_out = np.maximum(np.cumsum(changing)[:-1] - machine.budget_nbytes, 0)
    loaded = max(must_load, int((np.cumsum(loaded_before)[:-1] + excess_in).max(initial=0)))
    return loaded, max(must_evict, int(excess_out.max(initial=0)))


def _fold_add(change: IntArray, start: int, stop: int, nbytes: int) -> None:
    """Add `nbytes` over an unrolled interval, folded onto the step."""
    whole = len(change) - 1
    while start < stop:
        base = start // whole * whole
        end = min(stop, base + whole)
        change[start - base] += nbytes
        change[end - base] -= nbytes
        start = end


def _drop_before_first_load(changing: IntArray, chains: tuple[Chain, ...], trace: Trace) -> None:
    """Before its first change, what starts away needs no write in this step to be away."""
    for chain in chains:
        if chain.starts_away and chain.num_writes:
            first = next(pin.start_tick for pin in chain.pins if pin.writes)
            nbytes = trace.variables[chain.variable].nbytes
            _fold_add(changing, chain.start_tick, first, -nbytes)
