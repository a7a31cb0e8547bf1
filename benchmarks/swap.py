"""A swap file for the time of a benchmark."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path
from typing import Self


class SwapUnavailable(RuntimeError):
    """No swap file can be had here; the message says why."""


class SwapFile:
    """A swap file of our own, in use from now until `close()`. Needs root.

    Args:
        folder: Where the file is made; on a disk.
        nbytes: Its size.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.path = folder / f"ooc-swap-{os.getpid()}"
        try:
            self._make(nbytes)
            _call("mkswap", str(self.path))
            _call("swapon", str(self.path))
        except (OSError, SwapUnavailable) as error:
            self.path.unlink(missing_ok=True)
            raise SwapUnavailable(str(error)) from error

    def __repr__(self) -> str:
        return f"<SwapFile {self.path}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop swapping to it and delete it."""
        if self.path.exists():
            with contextlib.suppress(SwapUnavailable):
                _call("swapoff", str(self.path))
            self.path.unlink()

    def _make(self, nbytes: int) -> None:
        # Written, not preallocated: some file systems refuse to swap to extents never written.
        descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            zeros = bytes(1 << 20)
            for _ in range(-(-nbytes // len(zeros))):
                os.write(descriptor, zeros)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _call(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise SwapUnavailable(f"{command[0]} is not installed") from error
    except subprocess.CalledProcessError as error:
        raise SwapUnavailable(f"{' '.join(command)}: {error.stderr.strip()}") from error
