"""Writes every file that a command is asked for: whole or not at all, and never in place of a device.

A name may be a symbolic link (its target is written), a device or a pipe (written into, as a shell's `>`
would), or one of the process's own descriptors (`/dev/stdout`). Only a regular file is replaced.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import stat
import sys
from pathlib import Path
from typing import Any

__all__ = ["is_special", "write_output", "write_picture"]

_CANNOT_REPLACE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EXDEV})
"""The directory takes no new file, or the name is a mount point: an old file can still be written in place."""

_MOST_LINKS = 40
"""As many as the kernel follows before it answers ELOOP."""


def write_output(path: str | Path, content: str | bytes) -> None:
    """Write `content` to `path`; whoever looks at a regular file sees the old one or the whole new one.

    A file that is there keeps its permissions. Text is UTF-8. Raises OSError.
    """
    data = content.encode() if isinstance(content, str) else content
    descriptor = _own_descriptor(path)
    if descriptor is not None:
        _flush_streams()
        _write_all(os.dup(descriptor), data)
        return
    try:
        before: os.stat_result | None = os.stat(path)
    except FileNotFoundError:
        before = None
    if before is not None and not stat.S_ISREG(before.st_mode):
        _write_all(os.open(path, os.O_WRONLY | os.O_CLOEXEC), data)
        return
    if before is not None and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    target = Path(os.path.realpath(path))
    try:
        _replace(target, data, before)
    except OSError as error:
        if before is None or error.errno not in _CANNOT_REPLACE:
            raise
        _write_all(os.open(target, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC), data)


def write_picture(figure: Any, path: str | Path, *, dpi: int | None = None) -> None:
    """Write a matplotlib figure as `write_output` does: in the format of the name's suffix, else as PNG."""
    suffix = Path(path).suffix[1:].lower()
    buffer = io.BytesIO()
    kind = suffix if suffix in figure.canvas.get_supported_filetypes() else "png"
    figure.savefig(buffer, format=kind, **({"dpi": dpi} if dpi is not None else {}))
    write_output(path, buffer.getvalue())


def is_special(path: str | Path) -> bool:
    """Whether something that is no regular file lies at `path`: a device, a pipe, a descriptor, a directory."""
    if _own_descriptor(path) is not None:
        return True
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


def _replace(target: Path, data: bytes, before: os.stat_result | None) -> None:
    partial = target.with_name(f".ooc-{secrets.token_hex(8)}.partial")
    # The kernel applies the umask, which nobody can ask for without setting it for all threads.
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        if before is not None:
            with contextlib.suppress(OSError):  # file systems without permissions
                os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
        _write_all(descriptor, data)
        os.replace(partial, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def _write_all(descriptor: int, data: bytes) -> None:
    """Write to an open descriptor and close it."""
    with open(descriptor, "wb") as file:
        file.write(data)


def _own_descriptor(path: str | Path) -> int | None:
    """The number N where `path` leads to this process's `/proc/self/fd/N`, as `/dev/stdout` does.

    Opened anew, a regular file behind it would be written from its start, over what was printed before.
    """
    name = os.path.abspath(path)
    for _ in range(_MOST_LINKS):
        directory, last = os.path.split(name)
        parent = os.path.realpath(directory)
        if parent in (f"/proc/{os.getpid()}/fd", f"/proc/{os.getpid()}/task/{os.getpid()}/fd") and last.isdigit():
            return int(last)
        try:
            name = os.path.join(parent, os.readlink(os.path.join(parent, last)))
        except OSError:  # no link
            return None
    return None


def _flush_streams() -> None:
    """What was printed so far comes before what is written now."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
