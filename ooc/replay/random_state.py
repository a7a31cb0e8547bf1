"""State of the random-number generators that an op draws from, saved before it and set again for a re-run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

__all__ = ["Apart", "RandomState", "default_generators", "generators_of"]

Apart = Callable[[], AbstractContextManager[Any]]
"""Makes a context in which what torch allocates on the host is no variable of the session."""


class RandomState:
    """The states of some generators at this moment.

    A generator's state is read and set on the host: 5 KiB on the CPU; on a CUDA device a seed and an offset of 16
    bytes, which kernels get by value when they are launched. So nobody waits for the device.

    Args:
        generators: Whose.
        apart: Where the states are allocated: an op that is run again must not find its memory taken by them.
    """

    __slots__ = ("_apart", "_states")

    def __init__(self, generators: Iterable[torch.Generator], apart: Apart) -> None:
        self._apart = apart
        with apart():
            self._states = [(generator, generator.get_state()) for generator in generators]

    def __repr__(self) -> str:
        return f"<RandomState of {len(self._states)} generators>"

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """For the time of the block the generators are in these states; then they go on from where they were."""
        if not self._states:
            yield
            return
        now = RandomState([generator for generator, _ in self._states], self._apart)
        self.restore()
        try:
            yield
        finally:
            now.restore()

    def restore(self) -> None:
        """Set these states."""
        for generator, state in self._states:
            generator.set_state(state)

    def has_changed(self) -> bool:
        """Whether a generator is in another state now."""
        with self._apart():
            return any(not torch.equal(generator.get_state(), state) for generator, state in self._states)


def generators_of(own: torch.Generator | None, devices: Iterable[torch.device]) -> Sequence[torch.Generator]:
    """The generators that an op draws from: the one that it was given, else the default ones of its devices.

    Args:
        own: The op's argument `generator`.
        devices: Those of its operands, and its argument `device`. An op that names none runs on the CPU.
    """
    if own is not None:
        return (own,)
    numbers = {_number(device) for device in devices if device.type == "cuda"}
    on_host = not numbers or any(device.type == "cpu" for device in devices)
    return (*([torch.default_generator] if on_host else []), *(_cuda_generators()[n] for n in sorted(numbers)))


def default_generators(device: torch.device) -> Sequence[torch.Generator]:
    """All generators that an op on this device may draw from without being given one."""
    return generators_of(None, (torch.device("cpu"), device))


def _number(device: torch.device) -> int:
    return int(device.index if device.index is not None else torch.cuda.current_device())


def _cuda_generators() -> Sequence[torch.Generator]:
    found: Sequence[torch.Generator] = torch.cuda.default_generators
    return found
