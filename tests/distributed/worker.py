"""One rank of a job over gloo: runs each case without a session and under a tight one, and compares the bits.

`python -m tests.distributed.worker RANK WORLD FOLDER [CASE...]`. All ranks run the same cases in the same order;
each writes what it found to `FOLDER/rankN.json`, after every case, so that a rank that dies leaves what it had.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import ooc
from tests.distributed.cases import Case, Rank
from tests.distributed.collective_cases import ALL_CASES
from tests.harness import InCore, SessionLike, digest
from tests.quick_plans import QUICK_PLANS

_TIMEOUT_S = 800
_PATIENCE = timedelta(seconds=300)


def run(case: Case, rank: Rank, session: SessionLike) -> tuple[list[list[str]], Any]:
    """The digests that each step of a case leaves, and the session's report."""
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    found = []
    with session:
        for tensors in case.run(rank, session):
            found.append([digest(tensor) for tensor in tensors])
            del tensors
        report = session.report()
    return found, report


def compare(case: Case, rank: Rank) -> dict[str, Any]:
    """What became of a case on this rank."""
    started = time.monotonic()
    expected, _ = run(case, rank, InCore())
    dist.barrier()
    between = time.monotonic()
    budget = case.budgets.get(rank.index, case.budget)
    options: dict[str, Any] = {"chunk_nbytes": "64KiB", "debug": case.debug, **QUICK_PLANS}
    session = ooc.Session(budget=budget, **options) if budget else InCore()
    actual, report = run(case, rank, session)
    modes = [step["mode"] for step in report.get("steps", ())]
    wrong = [
        f"step {index} ({modes[index] if index < len(modes) else '-'}), tensor {place}"
        for index, (a, b) in enumerate(zip(expected, actual, strict=True))
        for place, (x, y) in enumerate(zip(a, b, strict=True))
        if x != y
    ]
    return {
        "num_compared": sum(map(len, expected)),
        "wrong": wrong,
        "modes": modes,
        "evicted_nbytes": sum(step["evicted_nbytes"] for step in report.get("steps", ())),
        "unplannable": list(report.get("unplannable", {}).values()),
        "why": [step["why"] for step in report.get("steps", ())],
        "not_played": report.get("not_played"),
        "planning_s": round(report.get("planning_s", 0), 2),
        "collectives": report.get("collectives"),
        "seconds": [round(between - started, 2), round(time.monotonic() - between, 2)],
    }


def main(arguments: Sequence[str]) -> None:
    index, size, folder = int(arguments[0]), int(arguments[1]), Path(arguments[2])
    names = arguments[3:] or [name for name, case in ALL_CASES.items() if size in (*case.sizes, *case.slow_sizes)]
    faulthandler.enable()
    faulthandler.dump_traceback_later(_TIMEOUT_S, exit=True)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rank = Rank(index=index, size=size, folder=folder)
    results: dict[str, Any] = {}
    for number, name in enumerate(names):
        # A group for each case: where one rank fails, the others learn it from their group, and the next case is run.
        store = dist.FileStore(str(folder / f"store{number}"), size)
        dist.init_process_group("gloo", store=store, rank=index, world_size=size, timeout=_PATIENCE)
        try:
            results[name] = compare(ALL_CASES[name], rank)
        except Exception:
            results[name] = {"error": traceback.format_exc()}
        (folder / f"rank{index}.json").write_text(json.dumps(results))
        dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(sys.argv[1:])
