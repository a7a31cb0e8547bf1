"""Our threads and streams have names that profilers and debuggers show."""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import vmm.nvtx_ranges
from ooc.cli.memory_group import PssWatch
from ooc.telemetry.progress import Position, Progress, ProgressBar
from vmm.cuda_calls import CudaCalls
from vmm.device_streams import DeviceStreams
from vmm.nvtx_ranges import name_stream
from vmm.store import FileStore
from vmm.testing.fake_cuda import FakeCuda
from vmm.threads import name_this_thread


def _names() -> dict[str, str]:
    """Names by thread."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found[task.name] = (task / "comm").read_text().strip()
    return found


def _new_names_become(before: dict[str, str], *wanted: str) -> bool:
    """A thread that was just started names itself a moment later."""
    for _ in range(12_000):
        if {name for task, name in _names().items() if task not in before} >= set(wanted):
            return True
        time.sleep(0.01)
    return False


def test_transfer_threads() -> None:
    before = _names()
    store = FileStore()
    try:
        assert _new_names_become(before, "ooc-write", "ooc-read")
    finally:
        store.close()
    assert _names().keys() <= before.keys()  # not as many: one that an earlier test has left may end meanwhile


def test_threads_of_python() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    before = _names()
    progress = Progress("always", Terminal())
    bar = ProgressBar(progress, lambda: Position(mode="planned", num_done=0, num_ops=None))
    with PssWatch(os.getpid()):
        assert _new_names_become(before, "ooc-progress", "ooc-pss-watch")
    bar.close()


def test_a_name_that_the_kernel_would_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes, at most 15"):
        name_this_thread("x" * 16)
    done: list[dict[str, str]] = []
    thread = threading.Thread(target=lambda: (name_this_thread("y" * 15), done.append(_names())))
    thread.start()
    thread.join()
    assert "y" * 15 in done[0].values()


class Tools:
    """NVIDIA's library."""

    def __init__(self) -> None:
        self.named: dict[int, bytes] = {}

    def nvtxNameCuStreamA(self, stream: Any, name: bytes) -> None:  # noqa: N802
        self.named[stream.value] = name


def test_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = Tools()
    monkeypatch.setattr(vmm.nvtx_ranges, "_tools_library", lambda: tools)
    fake: Any = FakeCuda()
    streams = DeviceStreams(CudaCalls(fake), current=lambda: 0)
    assert tools.named == {streams.inward: b"ooc load", streams.outward: b"ooc evict"}
    streams.close()
    fake.close()


def test_without_the_library_streams_stay_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vmm.nvtx_ranges, "_tools_library", lambda: None)
    assert not name_stream(7, "ooc load")
