"""Which plan is expected next: what the predictor says, and what was replayed last."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ooc.replay.executable_plan import ExecutablePlan
from ooc.replay.predictor import SequencePredictor, likeliest


class Expectation:
    """Learns from the order in which sequences come."""

    def __init__(self) -> None:
        self._predictor = SequencePredictor()
        self._last_played = ""
        self._last_ended: str | None = None

    def __repr__(self) -> str:
        return f"<Expectation after {self._last_ended!r}>"

    def note_begin(self, key: str) -> None:
        """Note that the plan of a sequence is entered, or replayed again."""
        self._last_played = key

    def note_end(self, key: str | None) -> None:
        """Note that sequence `key` was the last to run; None: something that has no key."""
        self._last_ended = key
        if key is None:
            self._predictor.interrupt()
        else:
            self._predictor.note(key)

    def rename(self, old: str, new: str) -> None:
        """What was noted as `old` is called `new` from now on."""
        self._predictor.rename(old, new)

    def expected(self, plans: Mapping[str, ExecutablePlan]) -> ExecutablePlan | None:
        """The plan for what should come now, if there is one."""
        # A plan that turns out wrong costs little: the step bails out where it differs, and is
        # recorded whole. So any plan is better than none, the one replayed last above all others.
        if self._last_ended is None:
            return None
        keys = (self._predictor.next(), self._last_ended, self._last_played)
        return next((plans[key] for key in keys if key is not None and key in plans), None)

    def likeliest(self, fitting: Mapping[str, ExecutablePlan], num_alive: Callable[[], int]) -> ExecutablePlan | None:
        """Of plans that fit what begins now: the one that is expected, or else the one replayed last.

        But of micro-batches that begin alike, all but the first find gradients there: so see `predictor.likeliest`.
        Where no more than one fits, as for most ops, nobody is asked what is likely.
        """
        if len(fitting) < 2:
            return next(iter(fitting.values()), None)
        keys = (self._predictor.next(fitting.__contains__), self._last_played, *fitting)
        found = [fitting[key] for key in keys if key is not None and key in fitting]
        return likeliest(found, lambda plan: plan.num_alive, num_alive())
