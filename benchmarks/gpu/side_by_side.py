"""Items that compare bits alone, many trainings at once: a machine is lent for minutes, and has many cores.

Memory by the driver's count and times mean nothing meanwhile, so that neither is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from benchmarks.gpu.child import Order
from benchmarks.gpu.figures import Figure, Measure, Overran, Shell, equal_steps, failed, share_nbytes, train_in_core
from benchmarks.gpu.machine_items import last_line

_CHUNK_NBYTES = 2 << 20
_SHARES = (0.65, 0.8, 0.95)
"""Of what a program needs in core: the least that its ops fit in."""
_UNKNOWN_NBYTES = 64 << 20
"""What a program is taken to need where nobody can tell: over the fake."""


def workloads(
    chosen: Sequence[tuple[str, str | None, float]],
    *,
    preset: Any = "full",
    chunk_nbytes: int = _CHUNK_NBYTES,
    host_nbytes: int = 8 << 30,
) -> Measure:
    """Each step of each workload in core and within a budget: name, optimizer (None: its own), share of the peak."""

    def one(shell: Shell, workload: str, optimizer: str | None, share: float) -> list[Figure]:
        name = ", ".join(part for part in (workload, optimizer, f"{share:g} of the peak") if part)
        order = Order(
            workload=workload,
            preset=preset,
            optimizer=optimizer,
            digests=True,
            host_budget_nbytes=host_nbytes,
        )
        order, expected = train_in_core(shell, order)
        if "error" in expected:
            return [failed(f"{name}, in core", expected)]
        budget_nbytes = share_nbytes(expected, share, chunk_nbytes)
        answer = shell.train(replace(order, variant="ours", budget_nbytes=budget_nbytes))
        if "error" in answer:
            return [failed(name, answer, may_be_too_small=True)]
        return [equal_steps(name, expected, answer, note=_modes(step["mode"] for step in answer["steps"]))]

    return _together([lambda shell, c=c: one(shell, *c) for c in chosen])


def programs(names: Sequence[str]) -> Measure:
    """`benchmarks.gpu.programs`: all losses, and what was trained."""

    def one(shell: Shell, name: str) -> list[Figure]:
        expected = _run(shell, name)
        if "error" in expected:
            return [failed(f"{name}, in core", expected)]
        for share in _SHARES:
            budget_nbytes = int((expected["peak_nbytes"] or _UNKNOWN_NBYTES) * share) // _CHUNK_NBYTES * _CHUNK_NBYTES
            answer = _run(shell, name, "--budget", str(budget_nbytes))
            if not answer.get("is_too_small"):
                break
        if "error" in answer:
            return [failed(name, answer, may_be_too_small=True)]
        is_same = answer["digest"] == expected["digest"]
        is_held = answer["peak_nbytes"] <= answer["budget_nbytes"]
        note = f"{share:g} of the peak; {_modes(answer['modes'])}{'' if is_held else '; more than the budget'}"
        return [
            Figure(
                variant=name, metric="same bits", unit="", value=float(is_same), is_good=is_same and is_held, note=note
            )
        ]

    return _together([lambda shell, name=name: one(shell, name) for name in names])


def _together(jobs: Sequence[Callable[[Shell], list[Figure]]]) -> Measure:
    def measure(shell: Shell) -> Iterable[Figure]:
        def figures(job: Callable[[Shell], list[Figure]]) -> list[Figure]:
            try:
                return job(shell)
            except Overran as overran:
                return [Figure(variant="?", metric="ends", unit="", value=None, overran=True, note=str(overran))]

        with ThreadPoolExecutor(max(len(jobs), 1)) as threads:
            for found in threads.map(figures, jobs):
                yield from found

    return measure


def _run(shell: Shell, name: str, *options: str) -> dict[str, Any]:
    code, output = shell.command(["-m", "benchmarks.gpu.programs", name, "--device", "cuda", *options])
    answer: dict[str, Any] | None = last_line(output)
    return answer if answer is not None else {"error": f"exit code {code}: {output.strip()[-200:] or 'no output'}"}


def _modes(modes: Iterable[str]) -> str:
    """How many steps ran how."""
    return ", ".join(f"{count} {mode}" for mode, count in Counter(modes).items())
