"""Recording a program's allocations while it runs, for scripts that have no budget and no session.

On the CPU torch.profiler's memory events are taken, on CUDA the caching allocator's own history. Both
end in a file that `ooc.fragmentation.readers` reads, so that live and recorded programs are
analysed in the same way.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ooc.fragmentation.line_notes import LineNotes
from ooc.fragmentation.readers import read_streams
from ooc.fragmentation.report import Report, make_report
from ooc.fragmentation.settings import CachingSettings
from ooc.fragmentation.stream import Stream

MAX_CUDA_ENTRIES = 1_000_000
"""Events that the CUDA history keeps, the newest; with stacks about 1 KiB each."""


class Recording:
    """Records from `start()` to `stop()`; use it as a context manager. See `record_fragmentation`.

    Attributes:
        device: "cpu" or "cuda": whose memory.
        num_steps: Optimizer steps seen while recording.
        is_recording: Whether it is under way.
    """

    def __init__(
        self, *, device: str | None = None, max_steps: int | None = None, stacks: bool = True, path: str | None = None
    ) -> None:
        if device not in (None, "cpu", "cuda"):
            raise ValueError(f"device={device!r}. Options: 'cpu', 'cuda', None (CUDA where there is one)")
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device='cuda': torch sees no CUDA device. Options: 'cpu'")
        if max_steps is not None and max_steps < 1:
            raise ValueError(f"max_steps={max_steps}: at least 1, or None for all")
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.num_steps = 0
        self.is_recording = False
        self._max_steps = max_steps
        self._stacks = stacks
        self._keep = Path(path) if path is not None else None
        self._directory: str | None = None
        self._file: Path | None = None
        self._profiler: Any = None
        self._hook: Any = None
        self._lines = LineNotes()
        self._thread = 0

    def __repr__(self) -> str:
        state = "recording" if self.is_recording else "recorded" if self._file is not None else "not started"
        return f"<Recording of {self.device} memory, {state}, {self.num_steps} steps>"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin. Raises RuntimeError if another profiler, or this recording, is running or over."""
        if self.is_recording or self._file is not None:
            raise RuntimeError("a recording is made once. Options: a new one")
        if self.device == "cpu":
            if torch.autograd._profiler_enabled():
                raise RuntimeError("torch.profiler is running already, and there can be one. Options: its own trace")
            self._profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, with_stack=self._stacks
            )
            self._profiler.start()
            if self._stacks:
                self._lines.start()
        else:
            torch.cuda.memory._record_memory_history(
                context="all" if self._stacks else None, stacks="python", max_entries=MAX_CUDA_ENTRIES
            )
        self.is_recording, self._thread = True, threading.get_ident()
        self._hook = register_optimizer_step_post_hook(lambda *_: self._stepped())

    def stop(self) -> None:
        """End, and write down what was recorded. Idempotent.

        Raises:
            RuntimeError: On a CPU, on another thread than it began on: torch's profiler would crash. It goes on.
        """
        if self.is_recording and not self._may_end():
            raise RuntimeError("a recording on a CPU ends on the thread that it began on. Options: stop() there")
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._end()

    def _end(self) -> None:
        """End the recording. The hook stays where it is: whoever calls it is walking over all hooks."""
        if not self.is_recording:
            return
        self.is_recording = False
        file = self._target()
        if self.device == "cpu":
            self._lines.stop()
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            profiler.export_chrome_trace(str(file))
        else:
            try:
                torch.cuda.memory._dump_snapshot(str(file))
            finally:
                torch.cuda.memory._record_memory_history(enabled=None)
        self._file = file

    def close(self) -> None:
        """Delete the temporary file. What was read before stays. Idempotent."""
        self.stop()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def streams(self) -> list[Stream]:
        """The allocation streams, one a device.

        Raises:
            RuntimeError: Not recorded yet.
            BadFile: Nothing was allocated, or the file is gone.
        """
        if self._file is None:
            raise RuntimeError("nothing is recorded yet: stop() comes first (leave the `with` block)")
        return read_streams(self._file)

    def report(
        self,
        *,
        capacity: int | None = None,
        settings: CachingSettings | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> Report:
        """What became of the memory, and what would have fitted (see `ooc.fragmentation.make_report`).

        Of several devices the one with the highest peak.
        """
        stream = max(self.streams(), key=lambda s: s.wanted_nbytes)
        return make_report(stream, capacity=capacity, settings=settings, progress=progress)

    def _stepped(self) -> None:
        if not self.is_recording:
            return
        self.num_steps += 1
        if self._max_steps is not None and self.num_steps >= self._max_steps and self._may_end():
            self._end()

    def _may_end(self) -> bool:
        """Whether this thread may: torch's profiler belongs to the thread that started it."""
        return self.device != "cpu" or threading.get_ident() == self._thread

    def _target(self) -> Path:
        if self._keep is not None:
            return self._keep
        self._directory = tempfile.mkdtemp(prefix="ooc-recording-")
        return Path(self._directory) / ("trace.json" if self.device == "cpu" else "snapshot.pickle")

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


def record_fragmentation(
    path: str | None = None, *, device: str | None = None, max_steps: int | None = None, stacks: bool = True
) -> Recording:
    """Record the allocations of a `with` block, with or without a session.

        with ooc.record_fragmentation(max_steps=3) as recording:
            train()
        print(recording.report().advice)

    Args:
        path: Where the recording is kept, for `ooc fragmentation` later; a temporary file if not given.
        device: "cpu" (through torch.profiler, so it sees all of torch's allocations, but no other
            profiler can run meanwhile) or "cuda" (the caching allocator's history); CUDA where there is one,
            if not given.
        max_steps: Stop after so many optimizer steps; the recording grows with each. None: none. On a CPU it stops in a
            step of the thread that it began on.
        stacks: Note where in the program each allocation was made. Costs time and memory.

    Raises:
        ValueError: A bad argument.
    """
    return Recording(device=device, max_steps=max_steps, stacks=stacks, path=path)
