"""Is a placement right? Every pair of buffers is looked at; nothing is shared with the planners."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from scheduler.placement.problem import Placement, Problem


class PlacementError(ValueError):
    """A placement that breaks a rule; the message lists the first faults."""


def faults_of(problem: Problem, placement: Placement) -> list[str]:
    """Everything that is wrong with `placement`, in words. Empty: it is right.

    O(n^2) in the number of pieces, 50,000 of them in seconds. A capacity is not checked: `Placement.fits` tells.
    """
    buffers, faults = problem.buffers, []
    if len(placement.offsets) != len(buffers):
        return [f"{len(placement.offsets)} offsets for {len(buffers)} buffers"]
    if placement.runs is not None and len(placement.runs) != len(buffers):
        return [f"runs of {len(placement.runs)} buffers, but there are {len(buffers)}"]
    pieces: list[list[tuple[int, int]]] = []  # of each buffer: [start, stop) in bytes of the arena
    for index, buffer in enumerate(buffers):
        occupied = buffer.nbytes + (-buffer.nbytes) % problem.alignment
        runs = placement.runs[index] if placement.runs is not None else ((placement.offsets[index], occupied),)
        pieces.append([(offset, offset + nbytes) for offset, nbytes in runs])
        if sum(nbytes for _, nbytes in runs) != occupied or any(nbytes <= 0 for _, nbytes in runs):
            faults.append(f"buffer {index}: pieces {runs} do not make {occupied} bytes")
        if not runs or runs[0][0] != placement.offsets[index]:
            faults.append(f"buffer {index}: its first piece is not at its offset {placement.offsets[index]}")
        for start, stop in pieces[index]:
            if start < 0 or stop > placement.height:
                faults.append(f"buffer {index}: [{start}, {stop}) lies outside the height {placement.height}")
            if start % problem.alignment:
                faults.append(f"buffer {index}: offset {start} is no multiple of {problem.alignment}")
        if any(a[1] > b[0] for a, b in pairwise(sorted(pieces[index]))):
            faults.append(f"buffers {index} and {index} share bytes while both are alive")
    owner = np.array([index for index, own in enumerate(pieces) for _ in own], dtype=np.int64)
    low, high = np.array([piece for own in pieces for piece in own], dtype=np.int64).reshape(-1, 2).T.copy()
    birth = np.array([b.start for b in buffers], dtype=np.int64)[owner]
    death = np.array([b.stop for b in buffers], dtype=np.int64)[owner]
    for at, index in enumerate(owner.tolist()):  # with every piece before it
        clash = (birth[:at] < death[at]) & (death[:at] > birth[at]) & (low[:at] < high[at]) & (high[:at] > low[at])
        if clash.any():
            others = np.unique(owner[:at][clash]).tolist()
            faults += [f"buffers {o} and {index} share bytes while both are alive" for o in others if o != index]
    if placement.bound > placement.height:
        faults.append(f"the height {placement.height} is below its own bound {placement.bound}")
    return faults


def require_valid(problem: Problem, placement: Placement) -> None:
    """Raises `PlacementError` naming the first faults, if there are any."""
    faults = faults_of(problem, placement)
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise PlacementError(f"placement by {placement.planner!r}: {'; '.join(faults[:5])}{more}")
