"""Reservations of device addresses: as `AddressSpace`, but no mapping is taken away while work may use it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from vmm.addresses import AddressSpace, Reservation
from vmm.device_streams import DeviceEvent, DeviceStreams, WaitRule
from vmm.driver import Driver, MemoryFault, Still

__all__ = ["DeviceSpace"]

_MAX_LEAVING = 256
"""Reservations given back but still mapped. One wait of the host serves half of them, those that went first: most of
the time their use has ended, and nobody waits. Not tuned."""


class DeviceSpace(AddressSpace):
    """`AddressSpace` over a driver whose `unmap` does not wait for device work.

    Before anything that is mapped is replaced or taken away, the host waits for the end of all use
    (`observe`). In the steady state that never happens. What is released stays mapped, at addresses
    that nobody gets meanwhile, until the host has waited for another reason, or many have gathered.

    Args:
        driver: The device's.
        streams: The session's.
    """

    def __init__(self, driver: Driver, streams: DeviceStreams) -> None:
        super().__init__(driver)
        self._streams = streams
        self._leaving: deque[Reservation] = deque()
        self._half: DeviceEvent | None = None  # after which nothing uses the first half of what may gather there
        self._unused: dict[int, DeviceEvent] = {}  # by address
        self.num_stops = 0
        """How often the host had to wait before a mapping was taken away."""

    @property
    def num_leaving(self) -> int:
        """Reservations released whose mappings are still there."""
        return len(self._leaving)

    def note_unused(self, reservation: Reservation) -> None:
        """Nothing that comes from now on uses what a reservation shows, until it is mapped again.

        So that the host need wait no longer than that when other chunks are mapped there.
        """
        if reservation.runs is not None:
            self._unused[reservation.address] = self._streams.fence()

    def copy_chunks(self, source: int, target: int, num_chunks: int) -> None:
        """As `AddressSpace.copy_chunks`, behind all compute work so far; what comes after it is behind that.

        Raises:
            CudaFault: Nothing was copied.
        """
        chunk_nbytes, view = self._driver.chunk_nbytes, self._driver.view_address
        stream, nbytes = self._streams.follow(), num_chunks * chunk_nbytes
        self._streams.calls.copy_on_device(view + target * chunk_nbytes, view + source * chunk_nbytes, nbytes, stream)

    def map(self, reservation: Reservation, runs: Sequence[tuple[int, int]], *, still: Still | None = None) -> int:
        """As `AddressSpace.map`; waits where a chunk that is shown makes place for another."""
        if runs is reservation._given and not reservation.is_protected:
            self._unused.pop(reservation.address, None)
            return 0
        unused = self._unused.pop(reservation.address, None)
        if reservation.runs is not None and _chunks(reservation.runs) != _chunks(runs):
            if unused is None:
                self._observe()
            else:
                self.num_stops += 1
                self._streams.observe(WaitRule.HOST_AFTER_USE, unused)
        try:
            return super().map(reservation, runs, still=still)
        except MemoryFault:
            # What failed was undone. Whoever leaves a plan maps many variables back and has no other way: once more.
            return super().map(reservation, runs, still=still)

    def unmap(self, reservation: Reservation) -> None:
        """As `AddressSpace.unmap`, after the end of all use."""
        self._unused.pop(reservation.address, None)
        if reservation.runs is not None:
            self._observe()
        super().unmap(reservation)

    def vacate(self, first_chunk: int) -> None:
        """As `AddressSpace.vacate`, after the end of all use, of what was released before, too."""
        self._observe()
        self._unused.clear()
        super().vacate(first_chunk)

    def shrink(self, reservation: Reservation, nbytes: int) -> None:
        """As `AddressSpace.shrink`, after the end of all use."""
        if reservation.runs is not None and -(-nbytes // self._driver.chunk_nbytes) < reservation.num_chunks:
            self._observe()
        super().shrink(reservation, nbytes)

    def protect(self, reservation: Reservation) -> None:
        """As `AddressSpace.protect`, after the end of all use."""
        if reservation.runs is not None and not reservation.is_protected:
            self._observe()
        super().protect(reservation)

    def release(self, reservation: Reservation) -> None:
        """As `AddressSpace.release`, some time later. The reservation must not be used any more."""
        self._check(reservation)
        self._unused.pop(reservation.address, None)
        if reservation.runs is None:
            super().release(reservation)
            return
        if reservation in self._leaving:
            raise ValueError(f"{reservation!r} was released before")
        self._leaving.append(reservation)
        if len(self._leaving) == _MAX_LEAVING // 2:
            self._half = self._streams.fence()
        elif len(self._leaving) >= _MAX_LEAVING:
            self._release_half()

    def close(self) -> None:
        """Release every reservation, after the end of all use. Idempotent."""
        if self.reservations:
            self._observe()
        super().close()

    def _observe(self) -> None:
        self.num_stops += 1
        self._streams.observe_use()
        self._release_first(0)

    def _release_half(self) -> None:
        """Release what was given back first."""
        if self._half is None:
            self._observe()
            return
        self.num_stops += 1
        self._streams.observe(WaitRule.HOST_AFTER_USE, self._half)
        self._release_first(len(self._leaving) - _MAX_LEAVING // 2)
        self._half = self._streams.fence()

    def _release_first(self, num_left: int) -> None:
        self._half = None
        while len(self._leaving) > num_left:  # one that fails is tried again
            super().release(self._leaving[0])
            self._leaving.popleft()


def _chunks(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs with neighbours merged."""
    merged: list[tuple[int, int]] = []
    for first, count in runs:
        if merged and sum(merged[-1]) == first:
            merged[-1] = (merged[-1][0], merged[-1][1] + count)
        else:
            merged.append((first, count))
    return merged
