"""Measures the memory of a child process: by a control group where one can be made, else by PSS.

A control group's high-water mark misses nothing and counts each page once, page cache included.
PSS (each page divided by the number of its mappings) is sampled, so it can miss a short peak. RSS
is never used: it counts every alias of a chunk again.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from vmm.threads import name_this_thread

_PSS_INTERVAL_S = 0.05
_REMOVE_PATIENCE_S = 5.0
_numbers = itertools.count()


class MemoryGroupUnavailable(RuntimeError):
    """Raised where no memory control group can be made; the message says why."""


class ControlGroup:
    """A control group in `directory`. `close()` removes it."""

    directory: Path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def command(self, command: Sequence[str]) -> list[str]:
        """`command`, wrapped so that it enters the group before it starts."""
        return ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(self.directory), *command]

    def close(self) -> None:
        """Remove the group. Its processes must have ended; waits a moment for the kernel to notice."""
        deadline = time.monotonic() + _REMOVE_PATIENCE_S
        while self.directory.exists():
            try:
                self.directory.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)


class MemoryGroup(ControlGroup):
    """A memory control group of its own, version 1 or 2. `close()` removes it.

    Args:
        limit_nbytes: The kernel holds its processes' memory to this, by reclaim, then swap (where
            there is any), then by killing.
        root: Where control groups are mounted.

    Raises:
        MemoryGroupUnavailable: None can be made, or it has no memory controller.
    """

    def __init__(self, *, limit_nbytes: int | None = None, root: Path = Path("/sys/fs/cgroup")) -> None:
        self.limit_nbytes = limit_nbytes
        self.version, parent = _parent_group(root)
        _remove_orphans(parent)
        self.directory = parent / f"ooc-{os.getpid()}-{next(_numbers)}"
        try:
            self.directory.mkdir()
        except OSError as error:
            raise MemoryGroupUnavailable(f"cannot make {self.directory}: {error.strerror}") from error
        try:
            if not (self.directory / self._file("peak")).exists():
                raise MemoryGroupUnavailable(f"{self.directory} has no {self._file('peak')}: no memory controller")
            if limit_nbytes is not None:
                (self.directory / self._file("limit")).write_text(str(limit_nbytes))
        except OSError as error:
            self.close()
            raise MemoryGroupUnavailable(f"cannot limit {self.directory}: {error.strerror}") from error
        except MemoryGroupUnavailable:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<MemoryGroup v{self.version} {self.directory}, limit {self.limit_nbytes}>"

    def peak_nbytes(self) -> int:
        """The most bytes charged at once, by the kernel's own high-water mark."""
        return int((self.directory / self._file("peak")).read_text())

    def _file(self, what: str) -> str:
        names = {
            1: {"peak": "memory.max_usage_in_bytes", "limit": "memory.limit_in_bytes"},
            2: {"peak": "memory.peak", "limit": "memory.max"},
        }
        return names[self.version][what]


class PssWatch:
    """Samples a process's PSS on a thread of its own, from now until `close()`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._peak_nbytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ooc-pss-watch", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<PssWatch of {self._pid}, peak {self._peak_nbytes}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def peak_nbytes(self) -> int:
        """The largest sample so far; 0 where the kernel has none."""
        return self._peak_nbytes

    def close(self) -> None:
        """Stop sampling. Idempotent."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        name_this_thread("ooc-pss-watch")
        path = Path(f"/proc/{self._pid}/smaps_rollup")
        while not self._stop.wait(_PSS_INTERVAL_S):
            # The process may end, or not have started its program yet, between two samples.
            with contextlib.suppress(OSError):
                for line in path.read_text().splitlines():
                    if line.startswith("Pss:"):
                        self._peak_nbytes = max(self._peak_nbytes, int(line.split()[1]) * 1024)


class MeasuredProcess:
    """A child process whose peak memory is watched, by whichever means this machine has.

    Args:
        limit_nbytes: Limit the child to this by a memory control group.
        is_told: Whether its standard input is a pipe, too.

    Attributes:
        process: The child; its standard output is a pipe of text.
        source: "cgroup" or "pss".

    Raises:
        MemoryGroupUnavailable: There is a limit, and no control group to hold it.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: dict[str, str] | None = None,
        limit_nbytes: int | None = None,
        is_told: bool = False,
    ) -> None:
        self._group: MemoryGroup | None = None
        self._watch: PssWatch | None = None
        self._peak_nbytes = 0
        try:
            self._group = MemoryGroup(limit_nbytes=limit_nbytes)
            command = self._group.command(command)
        except MemoryGroupUnavailable:
            if limit_nbytes is not None:
                raise
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if is_told else None,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
        except BaseException:
            if self._group is not None:
                self._group.close()
            raise
        if self._group is None:
            self._watch = PssWatch(self.process.pid)
        self.source = "cgroup" if self._group is not None else "pss"

    def __repr__(self) -> str:
        return f"<MeasuredProcess {self.process.pid}, memory by {self.source}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def peak_nbytes(self) -> int:
        """The most memory that the process was seen to hold, so far or before `close()`."""
        if self._group is not None:
            return self._group.peak_nbytes()
        return self._watch.peak_nbytes() if self._watch is not None else self._peak_nbytes

    def close(self) -> None:
        """Kill the process if it still runs, wait for it, and remove what watched it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what it was not alive to read
                    pipe.close()
        if self._group is not None or self._watch is not None:
            self._peak_nbytes = self.peak_nbytes()
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._group is not None:
            self._group.close()
            self._group = None


def _remove_orphans(parent: Path) -> None:
    """Remove the groups that killed processes of `ooc` have left behind."""
    for directory in parent.glob("ooc-*-*"):
        maker = directory.name.split("-")[1]
        if not Path("/proc", maker).exists():
            with contextlib.suppress(OSError):  # its own children may still run in it
                directory.rmdir()


def _parent_group(root: Path) -> tuple[int, Path]:
    """The version and directory of a group in which one can be made."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError as error:
        raise MemoryGroupUnavailable(f"no control groups: {error.strerror}") from error
    paths: dict[int, str] = {}
    for line in lines:
        identity, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            paths[1] = path
        elif identity == "0" and not controllers:
            paths[2] = path
    if 1 in paths and (root / "memory").is_dir():
        # In a container the group's own path may lie outside what is mounted.
        own = root / "memory" / paths[1].lstrip("/")
        return 1, own if own.is_dir() else root / "memory"
    if 2 in paths and (root / "cgroup.controllers").exists():
        own = root / paths[2].lstrip("/")
        # A group with processes cannot have groups with controllers in it (the root can): make a sibling.
        parent = own.parent if own.is_dir() and own != root else root
        with contextlib.suppress(OSError):
            (parent / "cgroup.subtree_control").write_text("+memory")
        return 2, parent
    raise MemoryGroupUnavailable(f"no memory control groups under {root}")
