"""The memory of a POSIX pool: one file in memory, all of its pages made, and the linear view of it.

The file can be made longer and shorter while it is in use: that is how a budget changes. See DESIGN.md, "OS and driver
behaviour we rely on", for the facts behind each choice.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable

from vmm import machine
from vmm.driver import MemoryFault
from vmm.sizes import format_exactly, format_nbytes
from vmm.syscalls import (
    MADV_COLD,
    MADV_POPULATE_READ,
    MADV_POPULATE_WRITE,
    MAP_FIXED,
    MAP_NORESERVE,
    Syscalls,
)

__all__ = ["HUGE_PAGE_NBYTES", "NOTHING", "PROT_NONE", "PoolFile"]

PROT_NONE = 0
NOTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
"""With PROT_NONE: addresses that are held and show nothing."""
HUGE_PAGE_NBYTES = 2 << 20

_COMMIT_STEP_NBYTES = 64 << 20  # older kernels undo a fallocate that a signal interrupts: steps keep what is done
_FILE_NAME = "ooc-chunks"
_HUGE_SETTINGS = frozenset({"always", "within_size", "advise", "force"})


class PoolFile:
    """`num_chunks` chunks of `chunk_nbytes` bytes in one file. Without a page until `show` makes them.

    Args:
        num_chunks, chunk_nbytes: Length of the file.
        dontfork: A forked child does not see the view.
        huge_pages: As `vmm.posix.PosixDriver`.
        syscalls: What makes the system calls.
        checkpoint: Called between the pieces in which `show` makes pages; it may raise.

    Raises:
        MemoryFault: The machine has less memory, or no such file can be made. Nothing is left behind.
    """

    def __init__(
        self,
        num_chunks: int,
        chunk_nbytes: int,
        *,
        dontfork: bool,
        huge_pages: bool,
        syscalls: Syscalls,
        checkpoint: Callable[[], None],
    ) -> None:
        self._chunk_nbytes = chunk_nbytes
        self._dontfork = dontfork
        self._huge_pages = huge_pages
        self.has_huge_pages = False
        """It is a file of huge pages, each of which is clear as a whole as soon as a part of it was touched."""
        self.is_split = False
        """Its huge pages were split, so that every mapping is to say that they stay so (`MADV_NOHUGEPAGE`)."""
        self._sys = syscalls
        self._checkpoint = checkpoint
        self._view_address = 0
        self.num_chunks = num_chunks
        """Chunks that exist."""
        self.descriptor = -1
        """Of the file; -1 when it was closed."""
        self._check_room(0, num_chunks)
        try:
            self.descriptor = self._open()
            self._sys.ftruncate(self.descriptor, num_chunks * chunk_nbytes)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise MemoryFault(f"{self._what(num_chunks)}: {error}.") from error
            raise

    def __repr__(self) -> str:
        return f"<PoolFile {self.num_chunks} chunks of {self._chunk_nbytes} bytes>"

    def close(self) -> None:
        """Let go of the file. Idempotent. What is mapped keeps its pages."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            self._sys.close(descriptor)

    def show(self, view_address: int) -> None:
        """Map the file at addresses that somebody holds, and make its pages. Raises `MemoryFault`."""
        self._view_address = view_address
        self._show(0, self.num_chunks)
        self._commit(0, self.num_chunks)

    def resize(self, num_chunks: int) -> None:
        """Make the file, and its view, longer or shorter. What was in chunks beyond the end is lost.

        The caller holds addresses for so long a view, and nothing beyond the new end is mapped anywhere else: a
        touch of such a mapping would end the process (SIGBUS).

        Raises:
            MemoryFault: The memory is not there; the pool is as it was.
        """
        before, self.num_chunks = self.num_chunks, num_chunks
        if num_chunks > before:
            try:
                self._check_room(before, num_chunks)
                self._sys.ftruncate(self.descriptor, num_chunks * self._chunk_nbytes)
                self._show(before, num_chunks)
                self._commit(before, num_chunks)
            except BaseException as error:
                self._cut(before)
                if isinstance(error, OSError):
                    raise MemoryFault(f"{self._what(num_chunks)}: {error}.") from error
                raise
        elif num_chunks < before:
            self._hide(num_chunks, before)
            self._cut(num_chunks)

    def _cut(self, num_chunks: int) -> None:
        self.num_chunks = num_chunks
        self._sys.ftruncate(self.descriptor, num_chunks * self._chunk_nbytes)

    def _check_room(self, start: int, stop: int) -> None:
        """Beyond what is there the kernel kills a process instead of failing a call."""
        room = machine.memory_room()
        if (stop - start) * self._chunk_nbytes <= room.available_nbytes:
            return
        most_nbytes = start * self._chunk_nbytes + room.available_nbytes
        raise MemoryFault(
            f"{self._what(stop)} does not fit into memory: {format_nbytes(room.available_nbytes)} are available"
            + (f" beside the {format_nbytes(start * self._chunk_nbytes)} that it has" if start else "")
            + f".\n  {room.explanation}\n"
            f"  Options: a budget of at most {most_nbytes >> 20}MiB; end other processes; "
            "a higher limit for the control group."
        )

    def _open(self) -> int:
        if self._huge_pages:
            with contextlib.suppress(OSError):  # a wish: small pages do as well
                descriptor = self._sys.open_huge_file(_FILE_NAME)
                self.has_huge_pages = True
                return descriptor
        return self._sys.memfd_create(_FILE_NAME)

    def _show(self, start: int, stop: int) -> None:
        address, nbytes = self._place(start), (stop - start) * self._chunk_nbytes
        flags, prot = mmap.MAP_SHARED | MAP_FIXED, mmap.PROT_READ | mmap.PROT_WRITE
        try:
            self._sys.mmap(address, nbytes, prot, flags, self.descriptor, start * self._chunk_nbytes)
            if self._dontfork:
                self._sys.madvise(address, nbytes, mmap.MADV_DONTFORK)
        except OSError as error:
            raise MemoryFault(f"the linear view of {format_exactly(nbytes)}: {error}.") from error

    def _hide(self, start: int, stop: int) -> None:
        nbytes = (stop - start) * self._chunk_nbytes
        self._sys.mmap(self._place(start), nbytes, PROT_NONE, NOTHING | MAP_FIXED, -1, 0)

    def _commit(self, start: int, stop: int) -> None:
        """Give the file its pages, huge ones where the kernel lets us ask for them.

        For a memfd, fallocate alone would make small pages, since it knows nothing of the mapping's advice.
        """
        begin, end = start * self._chunk_nbytes, stop * self._chunk_nbytes
        is_wish = self._huge_pages and not self.has_huge_pages
        asks_for_huge = is_wish and machine.shmem_huge_pages() in _HUGE_SETTINGS
        if asks_for_huge:
            with contextlib.suppress(OSError):  # a wish: small pages do as well
                self._sys.madvise(self._view_address + begin, end - begin, mmap.MADV_HUGEPAGE)
        try:
            for offset in range(begin, end, _COMMIT_STEP_NBYTES):
                step = min(_COMMIT_STEP_NBYTES, end - offset)
                if asks_for_huge:
                    with contextlib.suppress(OSError):
                        self._sys.madvise(self._view_address + offset, step, MADV_POPULATE_WRITE)
                self._sys.fallocate(self.descriptor, offset, step)
                self._checkpoint()
        except OSError as error:
            room = machine.memory_room()
            raise MemoryFault(
                f"{self._what(stop)} could not be had: {error}.\n  {room.explanation}\n  Options: a smaller budget."
            ) from error
        if self.has_huge_pages and machine.samples_accesses():
            self._split_huge_pages(begin, end)

    def _split_huge_pages(self, begin: int, end: int) -> None:
        """Make small pages of the huge ones, where they lie: side by side, so that transfers stay as quick.

        A look at one byte of a huge page, as the kernel takes when it samples accesses, walks every mapping of all its
        chunks, and there are thousands: 0.14 to 0.23 of a core on ResNet-50 (DESIGN.md, "Figures"). The kernel splits
        a huge page when one of its small ones alone is called cold.

        Wherever 2 MiB of the file are mapped in one piece, aligned alike, the kernel would put them together again, and
        take them out of all other mappings meanwhile: 20,000 to 45,000 faults a step of ResNet-50.
        """
        self.is_split = True
        page_nbytes = machine.page_nbytes()
        with contextlib.suppress(OSError):  # so that they are not put together again
            self._sys.madvise(self._view_address + begin, end - begin, mmap.MADV_NOHUGEPAGE)
        for offset in range(begin, end, HUGE_PAGE_NBYTES):
            with contextlib.suppress(OSError):  # a wish: huge pages do as well
                self._sys.madvise(self._view_address + offset, page_nbytes, MADV_POPULATE_READ)
                self._sys.madvise(self._view_address + offset, page_nbytes, MADV_COLD)

    def _place(self, chunk: int) -> int:
        return self._view_address + chunk * self._chunk_nbytes

    def _what(self, num_chunks: int) -> str:
        nbytes = num_chunks * self._chunk_nbytes
        chunks = f"{num_chunks} chunks of {format_nbytes(self._chunk_nbytes)}"
        return f"a pool of {format_nbytes(nbytes)} ({nbytes} bytes, {chunks})"
