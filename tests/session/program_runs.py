"""Many random programs (tests/session/programs.py), in processes of their own, so that a crash names its seed.

Each batch has a process forked from one that has imported torch and nothing else (tests/forked.py): what other tests
have left in this one, threads above all, cannot follow.

    python -m tests.session.program_runs --seed 17            # replay one seed verbosely; shrink it if it fails
    python -m tests.session.program_runs --seed 0 --count 500 # many; print those that fail
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import forked
from tests.session.program_failures import fails, shrink
from tests.session.programs import (
    Outcome,
    Program,
    generate,
    prepare_process,
    run_in_core,
    run_in_session,
)
from tests.store_speed import USUAL, store_speed

_HANG_S = 600
_MAX_FAILURES = 20
_RUNNER = "tests.session.program_runs:run_seed"
_ROOT = Path(__file__).parents[2]


@dataclass
class Tally:
    """What many programs did."""

    num_run: int = 0
    num_steady: int = 0
    num_steady_planned: int = 0
    modes: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)

    def add(self, program: Program, outcome: Outcome) -> None:
        self.num_run += 1
        self.modes.update(outcome.modes)
        if program.is_steady:
            self.num_steady += 1
            self.num_steady_planned += "planned" in outcome.modes

    def check(self, count: int) -> None:
        """Assert that so many were run, and none failed."""
        report = "\n".join(f"seed {seed}: {failure}" for seed, failure in list(self.failures.items())[:5])
        assert not self.failures, f"{len(self.failures)} of {self.num_run} programs failed\n{report}"
        assert self.num_run == count


def run_seed(seed: int) -> dict[str, Any]:
    """Run one seed in this process."""
    program = generate(seed)
    outcome = run_in_session(program, run_in_core(program))
    return {"modes": outcome.modes, "num_chunks": outcome.num_chunks}


def run_many(seeds: Sequence[int], *, batch: int = 250, runner: str = _RUNNER) -> Tally:
    """Run seeds in processes of their own, a batch each; one that dies names the seed that it was at.

    Args:
        seeds: Which programs.
        batch: How many a process runs; after a failure there is a new one.
        runner: `module:function` that runs one seed there. After 20 failures the rest is not run.
    """
    tally = Tally()
    todo = list(seeds)
    while todo and len(tally.failures) < _MAX_FAILURES:
        done, failure = _run_batch(todo[:batch], runner)
        for seed, result in done.items():
            if "error" in result:
                tally.num_run += 1
                tally.failures[seed] = result["error"]
            else:
                tally.add(generate(seed), Outcome(modes=tuple(result["modes"]), num_chunks=result["num_chunks"]))
        todo = todo[len(done) :]
        if failure is not None:
            tally.num_run += 1
            tally.failures[todo[0]] = failure
            todo = todo[1:]
    return tally


def _run_batch(seeds: Sequence[int], runner: str) -> tuple[dict[int, dict[str, Any]], str | None]:
    """Results of the seeds that were finished, and how the process died at the next one, if it did."""
    command = [sys.executable, "-m", "tests.session.program_runs", "--runner", runner, "--batch", *map(str, seeds)]
    ended = forked.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=_ROOT)
    done = {}
    for line in ended.stdout.splitlines():
        seed, _, body = line.partition(" ")
        done[int(seed)] = json.loads(body)
    if ended.returncode == 0:
        return done, None
    how = f"signal {signal.Signals(-ended.returncode).name}" if ended.returncode < 0 else f"exit {ended.returncode}"
    return done, f"{how}\n{ended.stderr[-3000:]}"


def _batch(seeds: Sequence[int], runner: str) -> None:
    """In the process of a batch: run seeds, a line on stdout for each. One that hangs ends the process."""
    module, _, name = runner.partition(":")
    run = getattr(importlib.import_module(module), name)
    prepare_process()
    with store_speed(USUAL):
        for seed in seeds:
            faulthandler.dump_traceback_later(_HANG_S, exit=True)
            try:
                result = run(seed)
            except (Exception, SystemExit):
                result = {"error": traceback.format_exc(limit=-6)}
            print(seed, json.dumps(result), flush=True)
            if "error" in result:
                gc.collect()
        faulthandler.cancel_dump_traceback_later()


def _replay(program: Program, *, do_shrink: bool) -> int:
    how = fails(program)
    if how and do_shrink:
        print(f"fails ({how}); shrinking")
        program = shrink(program)
    print(program, flush=True)
    print(repr(program), flush=True)
    prepare_process()
    with store_speed(USUAL):
        outcome = run_in_session(program, run_in_core(program), verbose=bool(how))
    print(outcome)
    return 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.session.program_runs", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--runner", default=_RUNNER, help="module:function that runs one seed")
    parser.add_argument("--batch", type=int, nargs="+", help="run these seeds in this process (for `run_many`)")
    arguments = parser.parse_args()
    if arguments.batch:
        _batch(arguments.batch, arguments.runner)
        return 0
    if arguments.count == 1:
        return _replay(generate(arguments.seed), do_shrink=not arguments.no_shrink)
    tally = run_many(range(arguments.seed, arguments.seed + arguments.count), runner=arguments.runner)
    for seed, failure in tally.failures.items():
        print(f"seed {seed}: {failure.strip()}\n")
    print(
        f"{tally.num_run} programs, {len(tally.failures)} failed; steps {dict(tally.modes)}; "
        f"{tally.num_steady_planned} of {tally.num_steady} steady programs had planned steps"
    )
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
