"""Makes plans in another process, at a low priority, while training goes on; they are taken at a step boundary.

One plan at a time. The process (`scheduler.worker`) knows neither torch nor this session; it gets a trace and a machine
in a file and leaves a plan in another, and ends with this one, however that ends.
"""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import scheduler
from scheduler.plan import Machine, Plan, PlanError
from scheduler.policies import POLICIES
from scheduler.trace import Trace

_log = logging.getLogger(__name__)

HELD_UP_FRACTION = 0.05
"""Training is held up by planning for at most this part of the time so far."""
_REST_FOR_QUICK = 0.5
"""Of that, so much is kept for quick plans: one plan of 330 ops took all of it, and segments after that had none."""
_SECONDS_PER_OP = {False: 1e-3, True: 1.5e-4}
"""What a plan takes, before one was made: 938 ops of a transformer took 0.1 s with room for all, 0.4 s at 0.6 of it. A
quick one: 355 to 1,580 ops took 0.10 to 0.15 ms an op."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What a plan is asked for.

    Attributes:
        key: Of the sequence.
        trace, machine: What to plan.
        old_ns: A step of the present plan on that machine; None: there is none.
    """

    key: str
    trace: Trace
    machine: Machine
    old_ns: int | None = None


class BackgroundPlanner:
    """Makes plans beside training. Owns a process while one is made; `close()` ends it.

    Args:
        policy, parameters: As for `make_plan`.
        has_quick: Whether training may also wait for quick plans.
        colouring: The library to colour by (`scheduler.colouring.native`), if there is one.
    """

    def __init__(
        self,
        *,
        policy: str,
        parameters: Mapping[str, Any],
        has_quick: bool = False,
        colouring: Path | None = None,
    ) -> None:
        self.has_quick = has_quick
        self._colouring = colouring
        self._policy = policy
        self._parameters = dict(parameters)
        self._process: subprocess.Popen[bytes] | None = None
        self._request: PlanRequest | None = None
        self._answer: IO[bytes] | None = None
        self._opened = time.monotonic()
        self._is_able = True
        self._held_up_s = 0.0
        self._seconds_per_op = dict(_SECONDS_PER_OP)  # by whether it is a quick one
        if "time_limit_s" in POLICIES[policy].parameters:
            self._seconds_per_op[False] = math.inf  # a solver's: minutes, and nobody can tell before

    def __repr__(self) -> str:
        return f"<BackgroundPlanner {'planning' if self.is_busy else 'idle'}>"

    @property
    def is_busy(self) -> bool:
        """Whether a plan is being made, or waits to be taken."""
        return self._request is not None

    def is_for(self, key: str) -> bool:
        """Whether the plan that is being made, or waits to be taken, is of this sequence."""
        return self._request is not None and self._request.key == key

    def may_hold_up(self, trace: Trace, *, is_quick: bool = False) -> bool:
        """Whether training may wait for this plan, for all that is known of how long plans, or quick ones, take."""
        if not self._is_able:
            return True
        allowed_s = (time.monotonic() - self._opened) * HELD_UP_FRACTION
        if self.has_quick and not is_quick:
            allowed_s *= 1.0 - _REST_FOR_QUICK
        return self._held_up_s + len(trace.ops) * self._seconds_per_op[is_quick] <= allowed_s

    def note_held_up(self, num_ops: int, seconds: float, *, is_quick: bool = False) -> None:
        """Training has waited so long for the plan, or the quick plan, of so many ops."""
        self._held_up_s += seconds
        self._seconds_per_op[is_quick] = max(seconds / max(num_ops, 1), _SECONDS_PER_OP[is_quick] / 10)

    def ask(self, request: PlanRequest) -> bool:
        """Begin to make a plan. False: one is being made, or no process can be started; ask again."""
        if self.is_busy or not self._is_able:
            return False
        body = {
            "trace": request.trace.to_json(),
            "machine": asdict(request.machine),
            "policy": self._policy,
            "parameters": self._parameters,
            "colouring": str(self._colouring) if self._colouring is not None else None,
        }
        paths = [str(Path(scheduler.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        answer: IO[bytes] | None = None
        try:
            answer = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `_end`
            with tempfile.TemporaryFile() as question:
                question.write(json.dumps(body).encode())
                question.seek(0)
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "scheduler.worker"],
                    stdin=question,
                    stdout=answer,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
                    # Ctrl-C is for the training. Not a session of its own: where the kernel groups processes by session
                    # (sched_autogroup_enabled), its low priority would count only within that.
                    process_group=0,
                )
        except (OSError, TypeError, ValueError) as error:
            if answer is not None:
                answer.close()
            _log.warning("plans are made in this process: no other can be started (%s)", error)
            self._is_able = False
            return False
        self._answer, self._request = answer, request
        return True

    def take(self) -> tuple[PlanRequest, Plan] | None:
        """The plan that is ready, if one is. Raises `PlanError` if there is none to be had."""
        if self._process is None or self._request is None or self._process.poll() is None:
            return None
        return self._finished()

    def wait(self) -> None:
        """Wait until the plan under way, if any, is ready to be taken."""
        if self._process is not None:
            self._process.wait()

    def cancel(self) -> None:
        """Give up the plan under way, if any."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._end()

    def close(self) -> None:
        """End the process. Idempotent."""
        self._is_able = False
        self.cancel()

    def become_inherited(self) -> None:
        """In a forked child: the process is the parent's."""
        if self._process is not None:
            self._process.returncode = 0
        self._is_able = False
        self._end()

    def _finished(self) -> tuple[PlanRequest, Plan]:
        request, answer, process = self._request, self._answer, self._process
        assert request is not None
        assert answer is not None
        assert process is not None
        try:
            answer.seek(0)
            text = answer.read()
            body = json.loads(text) if text else {"fault": f"its process ended with {process.returncode}"}
        except ValueError as error:
            body = {"fault": repr(error)}
        finally:
            self._end()
        if "plan" in body:
            plan = Plan.from_json(body["plan"])
            if plan.trace_fingerprint != request.trace.fingerprint():
                raise PlanError("a plan of another step came back")
            return request, plan
        raise PlanError(body.get("refusal") or f"a fault in the planner: {body.get('fault')}")

    def _end(self) -> None:
        if self._answer is not None:
            self._answer.close()
        self._process = self._request = self._answer = None
