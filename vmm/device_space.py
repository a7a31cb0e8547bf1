"""Reservations of device addresses: as `AddressSpace`, but no mapping is taken away while work may use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vmm.addresses import AddressSpace, Reservation
from vmm.driver import Driver

__all__ = ["DeviceSpace"]

_MAX_LEAVING = 256
"""Reservations given back but still mapped. One wait of the host serves them all; not tuned, no GPU has been seen."""


class DeviceSpace(AddressSpace):
    """`AddressSpace` over a driver whose `unmap` does not wait for device work.

    Before anything that is mapped is replaced or taken away, the host waits for the end of all use
    (`observe`). In the steady state that never happens. What is released stays mapped, at addresses
    that nobody gets meanwhile, until the host has waited for another reason, or many have gathered.

    Args:
        driver: The device's.
        observe: Lets the host see the end of all device work on mapped ranges.
    """

    def __init__(self, driver: Driver, *, observe: Callable[[], None]) -> None:
        super().__init__(driver)
        self._observe_use = observe
        self._leaving: list[Reservation] = []
        self.num_stops = 0
        """How often the host had to wait before a mapping was taken away."""

    @property
    def num_leaving(self) -> int:
        """Reservations released whose mappings are still there."""
        return len(self._leaving)

    def map(self, reservation: Reservation, runs: Sequence[tuple[int, int]]) -> int:
        """As `AddressSpace.map`; waits where a chunk that is shown makes place for another."""
        if runs is reservation._given and not reservation.is_protected:
            return 0
        if reservation.runs is not None and _chunks(reservation.runs) != _chunks(runs):
            self._observe()
        return super().map(reservation, runs)

    def unmap(self, reservation: Reservation) -> None:
        """As `AddressSpace.unmap`, after the end of all use."""
        if reservation.runs is not None:
            self._observe()
        super().unmap(reservation)

    def protect(self, reservation: Reservation) -> None:
        """As `AddressSpace.protect`, after the end of all use."""
        if reservation.runs is not None and not reservation.is_protected:
            self._observe()
        super().protect(reservation)

    def release(self, reservation: Reservation) -> None:
        """As `AddressSpace.release`, some time later. The reservation must not be used any more."""
        self._check(reservation)
        if reservation.runs is None:
            super().release(reservation)
            return
        if reservation in self._leaving:
            raise ValueError(f"{reservation!r} was released before")
        self._leaving.append(reservation)
        if len(self._leaving) >= _MAX_LEAVING:
            self._observe()

    def close(self) -> None:
        """Release every reservation, after the end of all use. Idempotent."""
        if self.reservations:
            self._observe()
        super().close()

    def _observe(self) -> None:
        self.num_stops += 1
        self._observe_use()
        while self._leaving:
            super().release(self._leaving[-1])
            self._leaving.pop()


def _chunks(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs with neighbours merged."""
    merged: list[tuple[int, int]] = []
    for first, count in runs:
        if merged and sum(merged[-1]) == first:
            merged[-1] = (merged[-1][0], merged[-1][1] + count)
        else:
            merged.append((first, count))
    return merged
