"""Progress output of a training run: one line per step, and a bar while a step takes long.

Where stderr is not a terminal nothing is written, unless `always` is asked for. Of several ranks only the first writes.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TextIO, get_args

import torch

from ooc.units import format_duration, format_nbytes
from vmm.threads import name_this_thread

if TYPE_CHECKING:
    from ooc.telemetry.steps import StepRow

When = Literal["never", "auto", "always"]

_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "LOCAL_RANK")
_TICK_S = 0.25
_PATIENCE_S = 1.0
"""A step's bar appears after so many seconds, so that lines of short steps do not flicker."""
_BAR_CELLS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far the present step is: `num_done` ops of `num_ops`, which may not be known yet."""

    mode: str
    num_done: int
    num_ops: int | None


def parse_when(value: str) -> When:
    """Parse the setting. Raises ValueError with the options."""
    for option in get_args(When):
        if value == option:
            return option  # type: ignore[no-any-return]
    raise ValueError(f"progress={value!r}. Options: {', '.join(get_args(When))}")


def rank() -> int:
    """This process's rank: by torch.distributed if that is initialized, else by the launcher, else 0."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    for name in _RANK_VARIABLES:
        text = os.environ.get(name, "")
        if text.isdigit():
            return int(text)
    return 0


class Progress:
    """Writes one line per step, and one per plan made.

    Args:
        when: "never", "auto" (on a terminal) or "always".
        stream: Where to write; by default what is stderr at that moment.

    Attributes:
        is_on: Whether there is anything to write.
    """

    def __init__(self, when: When, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self.is_terminal = self._stream is not None and self._stream.isatty()
        self.is_on = self._stream is not None and (when == "always" or (when == "auto" and self.is_terminal))
        self._since = time.monotonic()
        self._planning_ops: int | None = None
        self._drawn = 0  # characters of the bar on the screen
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Progress {'on' if self.is_on else 'off'}>"

    def close(self) -> None:
        """Stop writing. Idempotent."""
        self.is_on = False

    def note_step(self, number: int, row: StepRow, resident_nbytes: int) -> None:
        """Write the line of a step that has ended."""
        self._since = time.monotonic()
        if self.is_on and rank() == 0:
            self._write(step_line(number, row, resident_nbytes))

    @contextmanager
    def planning(self, num_ops: int) -> Iterator[None]:
        """Show that a plan is being made, for the length of the block."""
        started = self._since = time.monotonic()
        self._planning_ops = num_ops
        try:
            yield
        finally:
            self._planning_ops = None
            self._since = time.monotonic()
            if self.is_on and rank() == 0:
                self._write(f"ooc: planned {num_ops} ops in {format_duration(time.monotonic() - started)}")

    def _write(self, line: str) -> None:
        with self._lock:
            self._clear()
            self._stream.write(f"{line}\n")
            self._stream.flush()

    def draw(self, position: Callable[[], Position]) -> None:
        """Draw the bar, if the present step has taken long enough for one."""
        if time.monotonic() - self._since < _PATIENCE_S or rank() != 0:
            return
        elapsed = format_duration(time.monotonic() - self._since)
        planning_ops = self._planning_ops
        what = f"ooc: planning {planning_ops} ops" if planning_ops is not None else bar_line(position())
        text = f"{what}, {elapsed}"
        with self._lock:
            self._clear()
            self._stream.write(text)
            self._stream.flush()
            self._drawn = len(text)

    def erase(self) -> None:
        """Erase the bar."""
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        if self._drawn:
            self._stream.write("\r" + " " * self._drawn + "\r")
            self._stream.flush()
            self._drawn = 0


class ProgressBar:
    """Draws the bar of a long step while it runs. Owns a thread where there is a terminal; `close()` ends it.

    Args:
        progress: Writes the bar.
        position: Where the step is; called from the bar's thread, must not block.
    """

    def __init__(self, progress: Progress, position: Callable[[], Position]) -> None:
        self._progress = progress
        self._position = position
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        if progress.is_on and progress.is_terminal:
            self._thread = threading.Thread(target=self._tick, name="ooc-progress", daemon=True)
            self._thread.start()

    def __repr__(self) -> str:
        return f"<ProgressBar {'drawn' if self._thread is not None else 'not drawn'}>"

    def close(self) -> None:
        """End the thread and erase the bar. Idempotent."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _tick(self) -> None:
        name_this_thread("ooc-progress")
        while not self._ending.wait(_TICK_S):
            self._progress.draw(self._position)
        self._progress.erase()


def step_line(number: int, row: StepRow, resident_nbytes: int) -> str:
    """The line of one step, with units."""
    share = row.stall_s / row.duration_s if row.duration_s else 0.0
    return (
        f"ooc: step {number} {row.mode.replace('_', ' ')} {format_duration(row.duration_s)}, stall {share:.1%}, "
        f"moved {format_nbytes(row.loaded_nbytes + row.evicted_nbytes)}, resident {format_nbytes(resident_nbytes)}, "
        f"remapped chunks {row.num_remapped_chunks}" + (f"; {row.why}" if row.why else "")
    )


def bar_line(position: Position) -> str:
    """How far a step is; as a bar where its length is known."""
    if not position.num_ops:
        return f"ooc: {position.mode}, {position.num_done} ops"
    done = min(position.num_done / position.num_ops, 1.0)
    cells = round(done * _BAR_CELLS)
    bar = "#" * cells + "." * (_BAR_CELLS - cells)
    return f"ooc: {position.mode} [{bar}] {position.num_done} of {position.num_ops} ops"
