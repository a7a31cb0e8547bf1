"""Rematerialisation and paging as a mixed-integer program: Checkmate's and POET's planners.

Read `graph.py` (what is planned), `program.py` (the program and its solver), `rounding.py` (when it is too
large to solve), `transfers.py` (when to page, and the execution plan), then `from_trace.py` (from an `ooc` trace to
a graph). `gaps.py` is the same question asked of the trace itself, with a binary for each gap between uses; `poet` for
energy asks that. `scheduler.policies.checkmate` and `poet` play the answer on a trace.
"""
