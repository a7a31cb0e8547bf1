"""`OptimizerRounds`: optimizers that step in turns, whose steps are planned together, one round at a time.

A GAN's two optimizers take turns, an actor-critic's two or three, a WGAN's critic steps five times for one step of its
generator. Each such step is another sequence, and going from one plan to another costs bringing memory to where that
one begins with it, with nothing fetched ahead. A plan for the whole round follows itself.
"""

from __future__ import annotations

_LONGEST_ROUND = 12
_LEAST_STEPS = 10
_MOST_NEEDED = 32
"""Rounds are believed after two, and so many steps; after each step out of turn after twice as many, up to this."""
_NUM_FIRST = 3
"""The first rounds of any program are new: they are learned."""
_MOST_NEW = 6
"""What is new counts two, a round that was played counts one against that."""


class OptimizerRounds:
    """Which optimizers' steps end a period: each, or, where they take turns, the last one of a round."""

    def __init__(self) -> None:
        self._latest: list[int] = []
        self._round: tuple[int, ...] = ()
        self._place = 0  # in the round: how many of its steps were seen
        self._num_rounds = self._num_new = 0
        self._num_needed = 2  # rounds, before they are believed
        self._is_given_up = False
        self._num_steps_told = 1

    def __repr__(self) -> str:
        return f"<OptimizerRounds of {self.num_steps}>"

    @property
    def num_steps(self) -> int:
        """Steps of a round; 1: each is a period of its own."""
        return len(self._round) or 1

    def take_change(self) -> bool:
        """Whether there are more steps or fewer to a round than when this was asked last."""
        before, self._num_steps_told = self._num_steps_told, self.num_steps
        return before != self.num_steps

    def ends_with(self, optimizer: int) -> bool:
        """Note that an optimizer, told by its identity, has stepped: whether a period ends with that."""
        if self._round:
            if optimizer == self._round[self._place]:
                self._place = (self._place + 1) % len(self._round)
                return self._place == 0
            self.forget()  # out of turn: it may have been chance
            self._num_needed = min(2 * self._num_needed, _MOST_NEEDED)
        self._latest.append(optimizer)
        del self._latest[: -self._num_needed * _LONGEST_ROUND]
        if not self._is_given_up:
            self._round = _repeated(self._latest, self._num_needed)
        return True

    def note_period(self, *, is_new: bool) -> None:
        """Note what became of a round that has ended: whether it was like none before."""
        self._num_rounds += 1
        if self._num_rounds > _NUM_FIRST:
            self._num_new = self._num_new + 2 if is_new else max(self._num_new - 1, 0)
        if self._num_new >= _MOST_NEW:  # its steps may come again by themselves
            self.give_up()

    def give_up(self) -> None:
        """Take every step for itself from now on."""
        self._is_given_up = True
        self.forget()

    def forget(self) -> None:
        """Take every step for itself again, until they are seen to take turns."""
        self._latest.clear()
        self._round, self._place = (), 0
        self._num_rounds = self._num_new = 0


def _repeated(latest: list[int], times: int) -> tuple[int, ...]:
    """The shortest round of several optimizers that the latest steps have gone so often; empty if there is none."""
    for length in range(2, len(latest) // times + 1):
        last, num_rounds = latest[-length:], max(times, -(-_LEAST_STEPS // length))
        if len(set(last)) > 1 and latest[-num_rounds * length :] == last * num_rounds:
            return tuple(last)
    return ()
