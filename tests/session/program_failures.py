"""A random program that fails: how, and what of it is needed to."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace

from tests.session.programs import (
    Program,
    Step,
    larger,
    prepare_process,
    run_in_core,
    run_in_session,
    run_once_at,
)
from tests.store_speed import USUAL, store_speed

_HANG_S = 20


def fails(program: Program, *, refusal_is_failure: bool = False) -> str:
    """Run a program in a forked child. The kind of failure, or an empty string."""
    with tempfile.TemporaryFile("w+") as errors:
        pid = os.fork()
        if pid == 0:
            os.dup2(errors.fileno(), 2)
            try:
                prepare_process()
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(_HANG_S)
                with store_speed(USUAL):
                    run = run_once_at if refusal_is_failure else run_in_session
                    run(program, run_in_core(program))
            except BaseException as error:
                print(f"\nfailed: {type(error).__name__}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if status == 0:
            return ""
        if os.WIFSIGNALED(status):
            return signal.Signals(os.WTERMSIG(status)).name
        errors.seek(0)
        return errors.read().rsplit("failed: ", 1)[-1].strip()[:40]


def shrink(program: Program) -> Program:
    """A smaller program that fails in the same way, by deleting what is not needed."""
    how = fails(program)
    if not how:
        return program
    for num_chunks in larger(program.num_chunks):  # the budget at which it fails; none is refused from then on
        if fails(replace(program, num_chunks=num_chunks), refusal_is_failure=True) == how:
            program = replace(program, num_chunks=num_chunks)
            break
    changed = True
    while changed:
        changed = False
        for candidate in _smaller(program):
            if fails(candidate, refusal_is_failure=True) == how:
                program, changed = candidate, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    for index, body in enumerate(program.bodies):
        width = len(body)
        while width >= 1:
            for start in range(0, len(body), width):
                rest = body[:start] + body[start + width :]
                inside = program.num_inside[index]
                inside -= min(max(inside - start, 0), width)
                yield replace(
                    program,
                    bodies=program.bodies[:index] + (rest,) + program.bodies[index + 1 :],
                    num_inside=program.num_inside[:index] + (inside,) + program.num_inside[index + 1 :],
                )
            width //= 2
    for index in range(len(program.steps)):
        yield replace(program, steps=program.steps[:index] + program.steps[index + 1 :])
    for name in ("parameters", "modules", "inputs"):
        for index in range(len(getattr(program, name))):
            value = getattr(program, name)
            yield replace(program, **{name: value[:index] + value[index + 1 :]})
    for index, step in enumerate(program.steps):
        if step.stop is not None:
            plain = Step(body=step.body)
            yield replace(program, steps=program.steps[:index] + (plain,) + program.steps[index + 1 :])
    for index, body in enumerate(program.bodies):
        for number, s in enumerate(body):
            if s.mask != 0xFFFF:
                whole = body[:number] + (replace(s, mask=0xFFFF),) + body[number + 1 :]
                yield replace(program, bodies=program.bodies[:index] + (whole,) + program.bodies[index + 1 :])
