"""Plan cache on disk: the next run of the same step on the same machine need not plan again.

A plan is valid for a trace whatever the times in it, so a cached plan is looked up by the sequence
and by a coarse description of the machine, and checked by `scheduler.verify` before it is used.
What is predicted of it is computed anew from the present run's times and rates.

Settings: `OOC_PLAN_CACHE=0` turns it off; it lies in `plans/` of the cache directory (`OOC_CACHE_DIR`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import math
import os
import platform
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import scheduler
from ooc.settings import is_turned_off
from scheduler.cost.simulate import simulate
from scheduler.plan import Machine, Plan, PlanError
from scheduler.trace import Trace
from scheduler.verify import verify
from vmm.native_build import cache_directory
from vmm.printable import printable

_log = logging.getLogger(__name__)

LIMIT_NBYTES = 64 << 20
"""Size of all kept plans; a plan of a step of 5,000 ops takes about 0.5 MB."""
_PARTIAL_LIFETIME_S = 3600.0
_ROOM_AFTER = 0.75
"""Of the limit, so much is kept once it is passed, so that not every later save has to make room."""
_LOOK_AFTER = 64
"""Plans saved after which the directory is looked at again: other processes save there, too."""


class PlanCache:
    """A directory of plans by key. An error in it is logged, and costs no more than planning again.

    Args:
        directory: Where; made on first use.
        limit_nbytes: When all files together are larger, those used least recently go.
    """

    def __init__(self, directory: Path, *, limit_nbytes: int = LIMIT_NBYTES) -> None:
        self.directory = directory
        self.limit_nbytes = limit_nbytes
        self.num_hits = 0
        self._nbytes = 0  # of all files when the directory was looked at, and of those saved since
        self._num_saved = 0  # since then
        self._has_complained = False  # of a plan that could not be kept, since the last that could

    def __repr__(self) -> str:
        return f"<PlanCache in {self.directory}, {self.num_hits} hits>"

    @classmethod
    def default(cls) -> PlanCache | None:
        """The user's cache, or None where it is turned off."""
        if is_turned_off("OOC_PLAN_CACHE"):
            return None
        return cls(cache_directory() / "plans")

    def load(self, trace: Trace, machine: Machine, policy: str, parameters: Mapping[str, Any]) -> Plan | None:
        """The cached plan of this step, verified, with predictions for `machine`; None if there is none."""
        path = self._path(trace, machine, policy, parameters)
        try:
            text = path.read_text()
        except (FileNotFoundError, NotADirectoryError):
            return None  # where nothing can be kept, `save` says so
        except OSError as error:  # too many open files, a broken disk: the plan may be good the next time
            _log.warning("cannot read the kept plan %s: %s", path, error)
            return None
        except UnicodeDecodeError as error:
            self._reject(path, error)
            return None
        try:
            kept = Plan.from_json(text)
            if (kept.machine.num_chunks, kept.machine.chunk_nbytes) != (machine.num_chunks, machine.chunk_nbytes):
                raise PlanError(f"made for {kept.machine.num_chunks} chunks of {kept.machine.chunk_nbytes} bytes")
            plan = replace(kept, machine=machine)
            verify(plan, trace)
            result = simulate(plan, trace, with_timeline=False)
        except (PlanError, LookupError, TypeError, ValueError, ArithmeticError, AssertionError) as error:
            self._reject(path, error)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        self.num_hits += 1
        predicted = {
            **plan.predicted,
            "duration_ns": result.duration_ns,
            "stall_ns": result.stall_ns,
        }
        return replace(plan, predicted=predicted, bounds={})

    def save(self, plan: Plan, trace: Trace, parameters: Mapping[str, Any]) -> None:
        """Cache a plan, in place of an earlier one of the same step. `parameters` are those asked for."""
        path = self._path(trace, plan.machine, plan.policy, parameters)
        partial = None
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, partial = tempfile.mkstemp(prefix=".plan-", dir=self.directory)
            with os.fdopen(descriptor, "w") as file:
                file.write(plan.to_json())
                nbytes = file.tell()
            os.replace(partial, path)
            partial = None
            if self._num_saved % _LOOK_AFTER == 0 or self._nbytes + nbytes > self.limit_nbytes:
                self._shrink()
            else:
                self._nbytes += nbytes
            self._num_saved += 1
            self._has_complained = False
        except OSError as error:
            if not self._has_complained:
                _log.warning("cannot keep a plan in %s: %s", self.directory, error)
            self._has_complained = True
        finally:
            if partial is not None:
                with contextlib.suppress(OSError):
                    os.unlink(partial)

    def is_fixed(self, plan: Plan) -> bool:  # noqa: ARG002 - a given plan is (`ooc.replay.given_plan`)
        """Whether the plan must not be replaced by a better one."""
        return False

    def _path(self, trace: Trace, machine: Machine, policy: str, parameters: Mapping[str, Any]) -> Path:
        body = repr(
            (
                trace.fingerprint(),
                _replayable_digest(trace),
                machine.chunk_nbytes,
                machine.num_chunks,
                [_coarse(rate) for rate in (machine.load_bytes_per_s, machine.evict_bytes_per_s)],
                _coarse(machine.shared_bytes_per_s) if machine.shared_bytes_per_s else None,
                platform.machine(),
                torch.__version__,
                policy,
                sorted(parameters.items()),
                _planner_digest(),
            )
        )
        return self.directory / f"{hashlib.sha256(body.encode()).hexdigest()[:32]}.json"

    def _reject(self, path: Path, error: Exception) -> None:
        _log.warning("the kept plan %s is of no use and is removed: %s", path, printable(str(error)))
        with contextlib.suppress(OSError):
            path.unlink()

    def _shrink(self) -> None:
        """Look at the directory: remove plans used least recently until the rest is within the limit, and what a killed
        process left."""
        found = []
        for entry in os.scandir(self.directory):
            with contextlib.suppress(OSError):  # another process may have removed it
                status = entry.stat()
                if entry.name.endswith(".json"):
                    found.append((status.st_mtime_ns, status.st_size, entry.path))
                elif entry.name.startswith(".plan-") and time.time() - status.st_mtime > _PARTIAL_LIFETIME_S:
                    os.unlink(entry.path)
        total = sum(nbytes for _, nbytes, _ in found)
        wanted = self.limit_nbytes if total <= self.limit_nbytes else int(self.limit_nbytes * _ROOM_AFTER)
        for _, nbytes, path in sorted(found):
            if total <= wanted:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= nbytes
        self._nbytes = total


def _coarse(bytes_per_s: float) -> int:
    """The rate's power of two: a store measured twice differs by tens of percent, a hard disk from flash by more."""
    return round(math.log2(bytes_per_s))


def _replayable_digest(trace: Trace) -> str:
    """Which ops may run again: a plan that counts on more of them would be wrong, one that counts on fewer worse."""
    return hashlib.sha256(bytes(op.replayable for op in trace.ops)).hexdigest()


@functools.cache
def _planner_digest() -> str:
    """Identity of the planner that made a plan: its sources, since a version number lags behind them."""
    state = hashlib.sha256()
    for source in sorted(Path(scheduler.__file__ or "").parent.rglob("*.py")):
        state.update(source.read_bytes())
    return state.hexdigest()
