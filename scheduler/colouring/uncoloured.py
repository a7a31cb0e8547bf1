"""Whose chunks a residency may have to wait for, before there are chunks.

Colouring is most of the time that planning a long step takes. To compare proposals it is enough to know about how
long their ops wait. So chunks are only counted here: who comes takes what has been free for longest, first what
nobody has to write out. A colouring does about the same, since it avoids chunks whose bytes are still on their way out.
"""

from __future__ import annotations

import heapq
from collections import deque

from scheduler.plan import Evicted, Plan, occupied_ticks
from scheduler.trace import Trace


def likely_holders_before(plan: Plan, trace: Trace) -> list[tuple[int, int]]:
    """Pairs of residencies, in order: one, and another whose chunks it takes as soon as they are free.

    Only evicted residencies are named second: nobody waits for the others. In a cyclic trace the step begins with the
    chunks as the step before left them.
    """
    machine = plan.machine
    spans = [occupied_ticks(r, trace) for r in plan.residencies]
    sizes = [machine.chunks_of(trace.variables[r.variable].nbytes) for r in plan.residencies]
    evicted = [isinstance(r.stop, Evicted) for r in plan.residencies]
    num_clean = machine.num_chunks  # free, and nobody waits for them
    written: deque[list[int]] = deque()  # residency, and how many of the chunks that it left are still free
    pairs: list[tuple[int, int]] = []
    for _ in range(2 if trace.cyclic else 1):
        pairs = []
        holding: list[tuple[int, int]] = []
        for index, (start, stop) in enumerate(spans):
            while holding and holding[0][0] <= start:
                gone = heapq.heappop(holding)[1]
                if evicted[gone]:
                    written.append([gone, sizes[gone]])
                else:
                    num_clean += sizes[gone]
            missing = sizes[index] - num_clean
            num_clean = max(-missing, 0)
            while missing > 0 and written:
                first = written[0]
                pairs.append((index, first[0]))
                taken = min(missing, first[1])
                missing -= taken
                first[1] -= taken
                if not first[1]:
                    written.popleft()
            heapq.heappush(holding, (stop, index))
        for _, gone in sorted(holding):
            if evicted[gone]:
                written.append([gone, sizes[gone]])
            else:
                num_clean += sizes[gone]
    return sorted(pairs)
