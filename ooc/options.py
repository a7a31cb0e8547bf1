"""The arguments of a session, parsed and checked before any resource is taken."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ooc.devices.cpu import CpuDevice, find_device
from ooc.devices.protocols import Device
from ooc.replay.given_plan import GivenPlan
from ooc.replay.plan_cache import PlanCache
from ooc.settings import is_turned_off
from ooc.telemetry.progress import When, parse_when
from ooc.units import format_exactly, format_nbytes, parse_nbytes
from scheduler.plan import Plan
from scheduler.policies import POLICIES

_log = logging.getLogger(__name__)

StepBoundary = Literal["explicit", "optimizer"]


_RECOMPUTING = frozenset({"sublinear", "capuchin", "dtr", "melon", "checkmate", "poet"})
"""Policies that run ops again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """The checked arguments of a session. See `ooc.Session` for what each one means.

    Attributes:
        parameters: Parameters of the policy.
        cache: Where plans are stored and looked up; None: no cache.
        recompute: Whether ops are run again from the first plan on, so that they are tried in learning.
        recompute_if_slow: Whether they are where a plan waits for the store; they are tried only then.
    """

    budget_nbytes: int
    chunk_nbytes: int
    threshold_nbytes: int
    device: Device
    store: str | Path | None
    policy: str
    parameters: Mapping[str, Any]
    debug: bool
    step_boundary: StepBoundary
    cache: PlanCache | None
    progress: When
    recompute: bool
    recompute_if_slow: bool
    background_planning: bool

    @property
    def num_chunks(self) -> int:
        """Chunks of the pool: the whole chunks that the budget has."""
        return self.budget_nbytes // self.chunk_nbytes


def parse_options(
    budget: int | str,
    *,
    device: str | Device = "cpu",
    host_budget: int | str | None = None,
    store: str | Path | None = None,
    policy: str = "auto",
    window_nbytes: int | str | None = None,
    chunk_nbytes: int | str | None = None,
    threshold_nbytes: int | str | None = None,
    debug: bool = False,
    step_boundary: StepBoundary = "explicit",
    plan_cache: bool = True,
    plan: Plan | None = None,
    progress: str = "never",
    recompute: bool | None = None,
    background_planning: bool | None = None,
) -> SessionOptions:
    """Check the arguments of `ooc.Session`. Nothing is opened, reserved or written.

    Raises:
        ValueError: One of them is not what it must be; the message names it, its value and the options.
    """
    if step_boundary not in get_args(StepBoundary):
        raise ValueError(f"step_boundary={step_boundary!r}: Options: {', '.join(get_args(StepBoundary))}.")
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r}: there is no such policy. Options: {', '.join(sorted(POLICIES))}.")
    chosen = find_device(device, host_budget=host_budget)
    budget_nbytes = parse_nbytes(budget, what="budget")
    chunk = _choose_chunk(budget_nbytes, chunk_nbytes, chosen.granule_nbytes)
    if not isinstance(chosen, CpuDevice) and (rest := budget_nbytes % chunk):
        budget_nbytes -= rest
        _log.warning("budget: rounded down to %s, whole chunks", format_exactly(budget_nbytes))
    threshold = chosen.threshold_nbytes
    if threshold_nbytes is not None:
        threshold = parse_nbytes(threshold_nbytes, what="threshold")
    parameters: dict[str, Any] = {}
    if window_nbytes is not None:
        parameters["window_nbytes"] = parse_nbytes(window_nbytes, what="window")
    if_slow = recompute is None and policy == "auto"
    if recompute is None:  # asked for by its policy
        recompute = policy in _RECOMPUTING
    if "recompute" in POLICIES[policy].parameters:
        # With `if_slow` it is of ops that are known to repeat their bits, so of none at first.
        parameters["recompute"] = recompute or if_slow
    cache = PlanCache.default() if plan_cache else None
    if background_planning is None:
        background_planning = not is_turned_off("OOC_BACKGROUND_PLANNING")
    return SessionOptions(
        budget_nbytes=budget_nbytes,
        chunk_nbytes=chunk,
        threshold_nbytes=threshold,
        device=chosen,
        store=store,
        policy=policy,
        parameters=parameters,
        debug=debug,
        step_boundary=step_boundary,
        cache=cache if plan is None else GivenPlan(plan, cache),
        progress=parse_when(progress),
        recompute=recompute,
        recompute_if_slow=if_slow,
        background_planning=background_planning,
    )


def _choose_chunk(budget_nbytes: int, chunk: int | str | None, granule_nbytes: int) -> int:
    """The chunk size: as given, or the least power of two, from the granule to 2 MiB, that gives at most 16,384 chunks.

    A variable takes whole chunks, so large ones waste memory: within 2 GiB 1,000 turns of a GRU cell, 1,016 MiB of
    tensors of 128 to 384 KiB, moved 450 MiB a step with chunks of 512 KiB, and nothing with 128. Smaller ones cost
    nothing that could be measured, since chunks in a row are one mapping (24 convolutions at 0.75 of their 1.35 GiB: as
    fast with chunks of 64 as of 512 KiB). Were each a mapping of its own, more would come near the kernel's limit.

    Where the granule is 2 MiB, as on GPUs, each chunk that a variable brings along is driver calls of its own, which
    take as long for 2 MiB as for 16 (some 0.1 ms): there are at most 2,048 chunks, but of 16 MiB.
    """
    if chunk is not None:
        nbytes = parse_nbytes(chunk, what="chunk size")
        if nbytes % granule_nbytes:
            raise ValueError(
                f"chunk size {chunk!r} is {format_exactly(nbytes)}; it must be a multiple of "
                f"{format_exactly(granule_nbytes)}"
            )
    else:
        nbytes = granule_nbytes
        largest_nbytes, enough = (16 << 20, 2048) if granule_nbytes >= 2 << 20 else (2 << 20, 16384)
        while nbytes < largest_nbytes and budget_nbytes // nbytes > enough:
            nbytes *= 2
    if budget_nbytes < nbytes:
        raise ValueError(
            f"budget of {format_exactly(budget_nbytes)}: less than one chunk of {format_nbytes(nbytes)}. Options: a "
            f"budget of at least {format_nbytes(nbytes)}"
            + ("." if nbytes == granule_nbytes else f"; smaller chunks (multiples of {format_nbytes(granule_nbytes)}).")
        )
    return nbytes
