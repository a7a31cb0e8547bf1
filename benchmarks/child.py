"""A benchmark's child process: trains one variant, one step for each line that its parent writes.

    python -m benchmarks.child VARIANT '{"workload": ..., ...}'

Waiting between steps lets the parent interleave variants, so that a slow minute hits all of them.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import asdict
from functools import partial

from benchmarks.rivals import checkpointed, saved_tensors_on_disk
from ooc import models
from ooc.cli.trial import TrialOptions, tell, train

VARIANTS = ("stock", "jemalloc", "checkpoint", "saved_on_disk", "cgroup_swap", "ours")
"""`jemalloc` and `cgroup_swap` are stock PyTorch in an environment that the parent makes."""

IN_BACKWARD = "ours_in_backward"
"""Ours with the optimizer inside the backward pass (`updates.py`)."""

PAGING_ONLY = "ours, paging only"
"""Ours without recomputation (`throttled.py`)."""

BY_POLICY = "ours by "
"""And a policy's name: ours by another policy than `auto`, with re-runs where it has them (`throttled.py`)."""

BY_PLAN = "the plan in "
"""And a file's name: ours by this plan, at the budget that it was made for; other steps run on demand (`modes.py`)."""

CHECKPOINT_IN_BACKWARD = "checkpoint_in_backward"
"""Checkpointing with the optimizer inside the backward pass, without a session (`throttled.py`)."""

_ROOM_NBYTES = 2 << 30
"""What a session has that only counts what a rival needs."""


def main() -> int:
    """Train as the command line says, and tell each step."""
    variant, text = sys.argv[1:]
    options = TrialOptions(**json.loads(text))
    try:
        report = _train(variant, options)
    except (RuntimeError, ValueError, OSError) as error:
        tell("error", message=str(error), type=type(error).__name__)
        return 1
    tell("done", report=report)
    return 0


def _train(variant: str, options: TrialOptions) -> dict[str, object]:
    workload = models.get(options.workload, options.preset, **options.sizes)
    run = partial(train, workload, num_steps=sys.maxsize, optimizer=options.optimizer, seed=options.seed)
    if variant in ("ours", IN_BACKWARD, PAGING_ONLY) or variant.startswith(BY_POLICY):
        from ooc.session import Session

        assert options.budget_nbytes is not None
        order = _in_backward() if variant == IN_BACKWARD else contextlib.nullcontext()
        recompute, policy = False if variant == PAGING_ONLY else None, options.policy
        if variant.startswith(BY_POLICY):
            recompute, policy = True, variant.removeprefix(BY_POLICY)
        how = {"policy": policy, "recompute": recompute, "background_planning": False}
        with order, Session(options.budget_nbytes, store=options.store, **how) as session:
            _follow_parent(run(step_context=session.step))
            return session.report()
    if variant.startswith(BY_PLAN):
        from ooc.replay.given_plan import read_plan
        from ooc.session import Session

        plan = read_plan(variant.removeprefix(BY_PLAN))
        own = plan.machine
        with Session(
            own.budget_nbytes,
            chunk_nbytes=own.chunk_nbytes,
            store=options.store,
            policy="on_demand",
            plan=plan,
            background_planning=False,
        ) as session:
            _follow_parent(run(step_context=session.step))
            report = session.report()
        played = (report["plan"] or {}).get("parameters")
        if played != dict(plan.parameters):
            raise RuntimeError(f"not the plan that was given ({plan.policy} {plan.parameters}) was played: {played}")
        return report
    if variant == "checkpoint":
        _follow_parent(run(transform=checkpointed))
    elif variant == CHECKPOINT_IN_BACKWARD:
        with _in_backward():
            _follow_parent(run(transform=checkpointed))
    elif variant == "saved_on_disk":
        _follow_parent(run(step_context=partial(saved_tensors_on_disk, options.store)))
    else:
        _follow_parent(run())
    return {}


def _in_backward() -> contextlib.AbstractContextManager[None]:
    from ooc.interop.step_in_backward import every_optimizer_in_backward

    return every_optimizer_in_backward()


def needed_nbytes(variant: str, options: TrialOptions, *, num_steps: int = 4) -> int:
    """What a planned step of stock or of a checkpointing variant has in memory at once, in tensors.

    In this process. The session has room for all of it, so nothing is moved, and nothing runs again for it.
    """
    from ooc.session import Session

    workload = models.get(options.workload, options.preset, **options.sizes)
    order = _in_backward() if variant == CHECKPOINT_IN_BACKWARD else contextlib.nullcontext()
    transform = checkpointed if variant in ("checkpoint", CHECKPOINT_IN_BACKWARD) else lambda model: model
    with order, Session(_ROOM_NBYTES, store=options.store, recompute=False, background_planning=False) as session:
        for _ in train(
            workload,
            num_steps=num_steps,
            optimizer=options.optimizer,
            seed=options.seed,
            transform=transform,
            step_context=session.step,
        ):
            pass
        return int(session.trace().peak_nbytes())


def _follow_parent(steps: object) -> None:
    """One step a line of input, until the input ends."""
    with contextlib.closing(steps):  # type: ignore[type-var]
        for _ in sys.stdin:
            tell("step", **asdict(next(steps)))  # type: ignore[call-overload]


if __name__ == "__main__":
    sys.exit(main())
