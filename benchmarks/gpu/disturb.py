"""Changes a session's budget between steps, and gives all of it back, with the driver's own count each time."""

from __future__ import annotations

from typing import Any

import ooc


def disturb(session: ooc.Session, index: int, num_steps: int) -> list[dict[str, Any]]:
    """What is done before step `index`: half the budget, then all, then none for a moment, late enough to have a plan.

    Returns:
        Each act with the bytes that the driver's free memory grew by, and those that it should have.
    """
    chunk_nbytes, budget_nbytes = session.chunk_nbytes, session.budget_nbytes
    acts = {num_steps // 2: "half", num_steps - 4: "whole", num_steps - 2: "yielded"}
    act = acts.get(index)
    if act is None:
        return []
    before = _free_nbytes(session)
    if act == "yielded":
        with session.yielded():
            given_back = _free_nbytes(session) - before
        return [
            {"act": act, "nbytes": given_back, "expected_nbytes": budget_nbytes // chunk_nbytes * chunk_nbytes},
            {"act": "back", "nbytes": _free_nbytes(session) - before, "expected_nbytes": 0},
        ]
    new_nbytes = budget_nbytes // 2 if act == "half" else budget_nbytes * 2
    session.set_budget(new_nbytes)
    num_chunks = budget_nbytes // chunk_nbytes - new_nbytes // chunk_nbytes
    return [{"act": act, "nbytes": _free_nbytes(session) - before, "expected_nbytes": num_chunks * chunk_nbytes}]


def _free_nbytes(session: ooc.Session) -> int:
    """By the driver, after all work: the device's memory that other processes could have."""
    calls = session.engine.memory.driver.calls
    calls.call("cuCtxSynchronize", what="the end of all work")
    free: int = calls.memory_info().free_nbytes
    return free
