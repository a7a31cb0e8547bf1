"""The GPU gate: correctness first, then figures, in shards of at most nine minutes.

    make gpu-gate              all shards, what has been done already is kept
    make gpu-gate SHARD=1      one of them

`items.py` says what is measured, `child.py` trains in a process of its own, `gate.py` runs, resumes and
prints. `--fake` runs the same over the fake driver, small, to try the gate itself; its figures mean nothing.
"""
