"""Plans one step in a process of its own: a request as JSON on stdin, the answer as JSON on stdout.

    python -m scheduler.worker < request.json

It runs at a low priority, and ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scheduler.colouring import native
from scheduler.plan import Machine, PlanError
from scheduler.planning import make_plan
from scheduler.trace import Trace

NICENESS = 10
_PR_SET_PDEATHSIG = 1


def answer(request: Mapping[str, Any]) -> dict[str, str]:
    """The plan asked for, without lower bounds, or why there is none, as plain data.

    Args:
        request: `trace` (a `Trace` as JSON text), `machine` (a `Machine`'s fields), `policy` and its `parameters`;
            `colouring`, if there is one: the path of a library to colour by (`scheduler.colouring.native`).
    """
    if request.get("colouring"):
        with contextlib.suppress(OSError):  # without it, it takes longer
            native.use(Path(request["colouring"]))
    try:
        trace = Trace.from_json(request["trace"])
        machine = Machine(**request["machine"])
        plan = make_plan(trace, machine, policy=request["policy"], with_bounds=False, **request["parameters"])
        return {"plan": plan.to_json()}
    except PlanError as error:
        return {"refusal": str(error)}
    except Exception as error:  # noqa: BLE001 - whoever asked decides what becomes of it
        return {"fault": repr(error)}


def main() -> int:
    """Answer one request."""
    with contextlib.suppress(
        OSError, AttributeError
    ):  # first: at a low priority it may be long until the next statement
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    json.dump(answer(json.load(sys.stdin)), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
