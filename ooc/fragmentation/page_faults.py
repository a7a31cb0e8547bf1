"""What a CPU training step pays for memory that the C library gives back to the kernel and takes again.

PyTorch on a CPU takes each tensor from `malloc`. glibc's returns large blocks to the kernel as soon as they are freed,
so that the next step faults every page of its activations in anew: the kernel zeroes them, one fault for each 4 KiB.
The kernel counts those faults, and the processor time that it spends, by process; a script's steps are watched for
them while nothing records.
"""

from __future__ import annotations

import mmap
import os
import re
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from ooc.units import MIB, format_nbytes

MAX_STEPS = 20
"""Steps watched: medians of more change little."""

MIN_SHARE = 0.03
"""Of a step's time, what page faults must cost for a change to be worth it."""

_KEEP_GLIBC = "MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=1099511627776"
_KEEP_JEMALLOC = "MALLOC_CONF=dirty_decay_ms:-1,muzzy_decay_ms:-1"

_CALIBRATION_NBYTES = 32 * MIB

_ALLOCATORS = {"libjemalloc": "jemalloc", "libtcmalloc": "tcmalloc", "libmimalloc": "mimalloc", "libhoard": "Hoard"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What one step of the script took of the machine, between two calls of the optimizer.

    Attributes:
        wall_ns, user_ns, system_ns: Elapsed time; processor time of all threads, in the program and in the kernel.
        num_faults: Page faults served without reading a disk: pages taken from the kernel.
    """

    wall_ns: int
    user_ns: int
    system_ns: int
    num_faults: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFaultReport:
    """Medians of the steps watched, and what they mean.

    Attributes:
        allocator: Whose `malloc` the process has: "glibc 2.36", "jemalloc", ...
        num_steps: Steps watched; the first step, which must take its memory, is none of them.
        is_recorded: The steps were recorded by the profiler meanwhile, which takes time and memory, too: the
            script had no others.
        step: The medians.
        fault_ns: What a fault costs here, as measured: to map a page and zero it.
        page_nbytes: What one takes at least; huge pages take more.
    """

    allocator: str
    num_steps: int
    is_recorded: bool
    step: StepCost
    fault_ns: int
    page_nbytes: int

    @property
    def taken_nbytes(self) -> int:
        """Bytes that a step takes from the kernel, though the step before had as many."""
        return self.step.num_faults * self.page_nbytes

    @property
    def cost_ns(self) -> int:
        """Processor time of a step that goes into faults, as estimated: no more than the kernel took in all."""
        return min(self.step.num_faults * self.fault_ns, self.step.system_ns)

    @property
    def share(self) -> float:
        """That, of the step's processor time."""
        total = self.step.user_ns + self.step.system_ns
        return self.cost_ns / total if total else 0.0

    @property
    def is_worth_it(self) -> bool:
        """Whether keeping the pages would make steps faster by more than noise."""
        return self.share >= MIN_SHARE

    def lines(self, script: str, budget_nbytes: int) -> list[str]:
        """For people: what was measured, what it means, what to do.

        Args:
            script: What to run, as typed.
            budget_nbytes: A budget in which the script's step moves nothing.
        """
        step = self.step
        while_recorded = ", while they were recorded: a script with more steps gives better figures"
        measured = (
            f"A step ({self.num_steps} watched{while_recorded if self.is_recorded else ''}; medians): "
            f"{_seconds(step.wall_ns)}, {_seconds(step.user_ns + step.system_ns)} of processor time, of it "
            f"{_seconds(step.system_ns)} in the kernel; {step.num_faults:,} page faults."
        )
        if not self.is_worth_it:
            nothing = f"Little memory is given back from step to step ({self.allocator}): nothing to gain here."
            return [measured, nothing]
        meaning = (
            f"Each step {self.allocator} gives memory back to the kernel and takes at least "
            f"{format_nbytes(self.taken_nbytes)} again. That costs about {_seconds(self.cost_ns)} of processor time, "
            f"{self.share:.0%} of a step ({self.fault_ns / 1000:.1f} us a fault, as measured here)."
        )
        budget = f"ooc run --budget {-(-budget_nbytes // MIB)}MiB {script}"
        found = [
            measured,
            meaning,
            "To keep it, at full memory:",
            f"  {budget}: nothing moves, and the pages of its pool stay",
        ]
        if self.allocator.startswith("glibc"):
            found += [
                f"  {_KEEP_GLIBC} python {script}: glibc keeps what is freed, which may grow",
                f"  LD_PRELOAD=libjemalloc.so.2 {_KEEP_JEMALLOC} python {script}: so does jemalloc, if it is installed",
            ]
        elif self.allocator == "jemalloc":
            found.append(f"  {_KEEP_JEMALLOC} python {script}: jemalloc keeps what is freed")
        return found

    def document(self) -> dict[str, Any]:
        """The report as JSON-able data."""
        return {
            "allocator": self.allocator,
            "num_steps": self.num_steps,
            "is_recorded": self.is_recorded,
            **asdict(self.step),
            "taken_nbytes": self.taken_nbytes,
            "fault_ns": self.fault_ns,
            "cost_ns": self.cost_ns,
            "share": self.share,
        }


class PageFaultWatch:
    """Watches the steps of a script: from one call of an optimizer to the next.

    Args:
        is_recording: Whether a recording is under way, which costs time of its own; steps outside of it count for more.
    """

    def __init__(self, is_recording: Callable[[], bool]) -> None:
        self._is_recording = is_recording
        self._was_recording = True
        self._last: tuple[int, int, int, int] | None = None
        self._plain: list[StepCost] = []
        self._recorded: list[StepCost] = []
        self._hook: Any = None

    def __repr__(self) -> str:
        return f"<PageFaultWatch of {len(self._plain)} steps, and {len(self._recorded)} that were recorded>"

    def start(self) -> None:
        """Begin. To be called after the recording has begun: what its end takes is then not part of a step."""
        self._hook = register_optimizer_step_post_hook(lambda *_: self._stepped())

    def stop(self) -> None:
        """End. Idempotent."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def report(self) -> PageFaultReport | None:
        """What was seen; None: no two steps."""
        steps = self._plain or self._recorded[1:] or self._recorded
        if not steps:
            return None
        median = {
            name: int(statistics.median(getattr(step, name) for step in steps))
            for name in StepCost.__dataclass_fields__
        }
        return PageFaultReport(
            allocator=allocator_name(),
            num_steps=len(steps),
            is_recorded=not self._plain,
            step=StepCost(**median),
            fault_ns=measure_fault_ns(),
            page_nbytes=mmap.PAGESIZE,
        )

    def _stepped(self) -> None:
        if len(self._plain) >= MAX_STEPS:  # the hook stays: whoever calls it is walking over all hooks
            return
        now = _usage()
        is_recording = self._is_recording()
        if self._last is not None and is_recording == self._was_recording:
            wall, user, system, faults = (b - a for a, b in zip(self._last, now, strict=True))
            step = StepCost(wall_ns=wall, user_ns=user, system_ns=system, num_faults=faults)
            (self._recorded if is_recording else self._plain).append(step)
        self._was_recording = is_recording
        self._last = _usage()


def allocator_name(maps: str | None = None) -> str:
    """Whose `malloc` this process has.

    Args:
        maps: The text of /proc/self/maps; None: read it.
    """
    if maps is None:
        try:
            maps = Path("/proc/self/maps").read_text()
        except OSError:
            maps = ""
    loaded = set(re.findall(r"/(lib\w+?)(?:_minimal)?(?:[-.][\w.-]*)?\.so[.\d]*$", maps, re.MULTILINE))
    for library, name in _ALLOCATORS.items():
        if library in loaded:
            return name
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or "the C library"
    except (ValueError, OSError):
        return "the C library"


def measure_fault_ns() -> int:
    """Processor time of one page fault here: pages of a fresh mapping, touched one by one (some 10 ms)."""
    num_pages = _CALIBRATION_NBYTES // mmap.PAGESIZE
    with mmap.mmap(-1, _CALIBRATION_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as fresh:
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            fresh.madvise(mmap.MADV_NOHUGEPAGE)
        before = time.thread_time_ns()
        fresh[:: mmap.PAGESIZE] = bytes(num_pages)
        first = time.thread_time_ns() - before
        before = time.thread_time_ns()
        fresh[:: mmap.PAGESIZE] = bytes(num_pages)
        again = time.thread_time_ns() - before
    return max(first - again, 1) // num_pages


def _usage() -> tuple[int, int, int, int]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return time.monotonic_ns(), int(usage.ru_utime * 1e9), int(usage.ru_stime * 1e9), usage.ru_minflt


def _seconds(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e9:.2f} s" if nanoseconds >= 1e8 else f"{nanoseconds / 1e6:.1f} ms"
