"""The file behind a store: which directory, no name, no page cache, and its space in advance."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import tempfile
from collections.abc import Iterator
from ctypes import addressof, c_char
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = [
    "BLOCK_NBYTES",
    "FULL_ERRORS",
    "DirectoryFacts",
    "StoreError",
    "StoreUnavailable",
    "allocate_space",
    "anonymous_memory",
    "check_directory",
    "default_directory",
    "directory_facts",
    "file_system_name",
    "is_in_memory",
    "open_file",
]

BLOCK_NBYTES = max(4096, mmap.PAGESIZE)
"""Alignment of every extent and transfer: O_DIRECT needs the device's logical block, at most 4096; mapping
an extent needs whole pages, which some boards have of 16 or 64 KiB."""

FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What a file system answers that has no room: disk, quota, file size limit."""

_NO_TMPFILE_ERRORS = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL})
_MEMORY_FILE_SYSTEMS = frozenset({0x01021994, 0x858458F6, 0x958458F6})
"""statfs's magic numbers of tmpfs, ramfs and hugetlbfs (linux/magic.h)."""


class StoreError(RuntimeError):
    """The store cannot do what was asked."""


class StoreUnavailable(StoreError):
    """No store can be made in the directory.

    Attributes:
        directory: The directory.
    """

    def __init__(self, message: str, *, directory: str) -> None:
        super().__init__(message)
        self.directory = directory


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryFacts:
    """What a directory offers a store.

    Attributes:
        directory: Which.
        file_system: Its type ("ext4").
        is_in_memory: Whether its files are kept in memory.
        supports_direct: Whether O_DIRECT works there.
        free_nbytes: What its file system has left for this user.
    """

    directory: str
    file_system: str
    is_in_memory: bool
    supports_direct: bool
    free_nbytes: int


def directory_facts(directory: str | Path) -> DirectoryFacts:
    """Look at a directory; makes and drops a file without a name there.

    Raises:
        StoreUnavailable: It is missing, is not a directory, or cannot be written.
    """
    path = Path(directory)
    check_directory(path, allow_memory=True)
    descriptor, is_direct = open_file(path, direct=True)
    try:
        status = os.fstatvfs(descriptor)
    finally:
        os.close(descriptor)
    return DirectoryFacts(
        directory=str(path),
        file_system=file_system_name(path),
        is_in_memory=is_in_memory(path),
        supports_direct=is_direct,
        free_nbytes=status.f_bavail * status.f_frsize,
    )


def default_directory(*, allow_memory: bool = False) -> Path:
    """$OOC_STORE if set, else the first of $TMPDIR, /var/tmp and the current directory that will do.

    Raises:
        StoreUnavailable: None of them will.
    """
    own = os.environ.get("OOC_STORE")
    if own:
        return Path(own)
    temporary = os.environ.get("TMPDIR")
    candidates = [Path(temporary)] if temporary else []
    candidates += [Path("/var/tmp"), Path.cwd()]
    reasons = []
    for candidate in candidates:
        try:
            check_directory(candidate, allow_memory=allow_memory)
        except StoreUnavailable as error:
            reasons.append(str(error).splitlines()[0])
        else:
            return candidate
    raise StoreUnavailable(
        "no directory for the store:\n"
        + "".join(f"  {reason}\n" for reason in reasons)
        + "  Options: set OOC_STORE, or the store argument, to a directory on a disk.",
        directory="",
    )


def check_directory(directory: Path, *, allow_memory: bool) -> None:
    options = "\n  Options: another directory (OOC_STORE, or the store argument)"
    if not directory.exists():
        raise StoreUnavailable(
            f"store directory {directory} does not exist.{options}; mkdir -p {directory}.", directory=str(directory)
        )
    if not directory.is_dir():
        raise StoreUnavailable(f"store directory {directory} is not a directory.{options}.", directory=str(directory))
    if not os.access(directory, os.W_OK | os.X_OK):
        raise StoreUnavailable(
            f"store directory {directory} is not writable for user {os.geteuid()}.{options}; "
            f"chown or chmod u+wx {directory}.",
            directory=str(directory),
        )
    if not allow_memory and is_in_memory(directory):
        raise StoreUnavailable(
            f"store directory {directory} is kept in memory ({file_system_name(directory)}): what is "
            f"evicted there frees no memory.{options} on a disk.",
            directory=str(directory),
        )


def open_file(directory: Path, *, direct: bool) -> tuple[int, bool]:
    """An unlinked file, and whether it bypasses the page cache."""
    try:
        descriptor = _open_unlinked(directory)
    except OSError as error:
        raise StoreUnavailable(
            f"cannot make a file in store directory {directory}: {error}.\n"
            "  Options: another directory (OOC_STORE, or the store argument).",
            directory=str(directory),
        ) from error
    try:
        is_direct = direct and _switch_to_direct(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, is_direct


def file_system_name(directory: Path | str) -> str:
    """The type of the file system that holds `directory`, as in /proc/mounts ("ext4"); "unknown" if not found."""
    path = PurePosixPath(os.path.realpath(directory))
    best: tuple[int, str] = (-1, "unknown")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, tail = line.partition(" - ")
        point = PurePosixPath(fields.split()[4].replace("\\040", " "))
        if path.is_relative_to(point) and len(point.parts) >= best[0]:  # the later of equals covers the earlier
            best = (len(point.parts), tail.split()[0])
    return best[1]


def is_in_memory(directory: Path | str) -> bool:
    """Whether files in `directory` are kept in memory (tmpfs, ramfs, hugetlbfs), by statfs."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = (ctypes.c_long * 64)()  # struct statfs is at most 120 bytes; f_type is its first word
    if libc.statfs(os.fsencode(directory), ctypes.byref(buffer)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(directory))
    return (buffer[0] & 0xFFFFFFFF) in _MEMORY_FILE_SYSTEMS


def _open_unlinked(directory: Path) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE_ERRORS:
            raise
    descriptor, path = tempfile.mkstemp(prefix=".ooc-store-", dir=directory)
    os.unlink(path)
    return descriptor


def _switch_to_direct(descriptor: int) -> bool:
    """Set O_DIRECT and see whether a block can be written and read. False, and unset, if not."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    block = mmap.mmap(-1, BLOCK_NBYTES)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.pwrite(descriptor, block, 0)
        if os.preadv(descriptor, [block], 0) == BLOCK_NBYTES:
            return True
    except OSError as error:
        if error.errno in FULL_ERRORS:
            return True  # nothing is known against it, and there is no room for data anyway
    finally:
        block.close()
        os.ftruncate(descriptor, 0)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return False


def allocate_space(descriptor: int, offset: int, nbytes: int) -> None:
    """Let the file have `[offset, offset + nbytes)` with its disk space."""
    try:
        os.posix_fallocate(descriptor, offset, nbytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        # A file system without fallocate: the C library writes single bytes instead, which O_DIRECT
        # refuses. Write zeros, block by block.
        with anonymous_memory(1 << 20) as (address, length):
            zeros = (c_char * length).from_address(address)
            place, stop = offset, offset + nbytes
            while place < stop:  # a call may write less than it was given
                place += os.pwrite(descriptor, memoryview(zeros)[: min(length, stop - place)], place)


@contextlib.contextmanager
def anonymous_memory(nbytes: int) -> Iterator[tuple[int, int]]:
    """Address and length of page-aligned zeros, for the time of the block."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    handle = c_char.from_buffer(memory)
    try:
        yield addressof(handle), nbytes
    finally:
        del handle  # a mapping that is referred to cannot be closed
        memory.close()
