"""`LearningBudget`: how much time learning and planning may take while everything fits in memory."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ooc.memory.counters import Counters
from ooc.replay.executable_plan import ExecutablePlan

LEARNING_FRACTION = 0.05
"""Where nothing has to move, learning takes at most this part of the time so far. A planned op saves about 7 us, and
learning one takes 50 us (reinforce in benchmarks/scripts: 35 of 51 ms a step were spent on building traces)."""
MOST_FRACTION = 0.15
"""Where things have to move, so much of the time so far, once `FREE_SEQUENCES` were learned. A mixture of experts whose
sizes lay about the threshold was never alike twice, and learning took half of each step."""
FREE_SEQUENCES = 64
FREE_S = 4.0
"""So long the first sequences may take together, whatever part of the time that is; beyond, `FREE_FRACTION` of it.
Where LBFGS's history grows, each step has a turn of a loop more, and comparing 9,000 ops took a third of the time."""
FREE_FRACTION = 0.25
_CALM_PERIODS = 4
"""Periods in a row that had to move nothing before all is taken to fit: an evaluation may move what steps do not."""
_LONGEST_PAUSE = 64
_LEAST_FRACTION = 0.02
"""So much of it all the same where hardly an op is planned, in case that changes."""
_SAVED_NS = 5_000
"""What an op on a plan saves where nothing moves."""
_SAVED_SHARE = 0.4
"""What it saves where something moves, in the time that an op takes of late, waits and all. At half of the memory:
0.37 of it in twelve layers of 192 (131 us an op on demand, 82 planned), 0.43 in episodes (60 and 34 us)."""
_VARYING = 1.3
"""Where steps leave out ops of their plan, an op on demand counts so many times what it took of late, since other ones
ran then. Packed sequences of an LSTM, at half of their memory: 95 us an op on a plan that had nearly all of them, 42 on
demand: some 400 times a step the plan had to be aligned anew, and what stood in for something else was moved."""
_FREE_PLANS = 8
"""So many plans are entered once, whatever others have gained before them: those were of another part of the program,
or are replaced for what they were left for."""
_MOST_SEQUENCES = 1024
"""Whose costs on demand are remembered."""
_LATEST_SHARE = 0.25
"""Of the latest stay on a plan, in what such stays have gained of late; and of a period, in the time that ops take."""
_LATEST_PERIOD = 0.05
"""Of the latest period, in the share of ops that were planned of late: some twenty periods count."""


class Account:
    """What it has gained to enter a plan, or plans; if that is a loss, it is tried ever more seldom.

    Attributes:
        gain_ns: By each stay on the plan, of late; 0 before the first.
    """

    def __init__(self) -> None:
        self.gain_ns = 0.0
        self._pause = 0  # chances to let pass before the next trial
        self._num_passed = 0

    def __repr__(self) -> str:
        return f"<Account: {self.gain_ns / 1e6:.3f} ms a stay, {self._num_passed} of {self._pause} chances passed>"

    def may_try(self) -> bool:
        """Whether to take this chance. Where not, it counts as passed."""
        if self.gain_ns >= 0 or self._num_passed >= self._pause:
            return True
        self._num_passed += 1
        return False

    def note(self, gain_ns: float) -> None:
        """Note what a stay has gained."""
        self.gain_ns += (gain_ns - self.gain_ns) * _LATEST_SHARE
        self._num_passed = 0
        self._pause = 0 if gain_ns >= 0 else min(max(2 * self._pause, 1), _LONGEST_PAUSE)


@dataclass(slots=True)
class Stay:
    """On a plan, from where it is entered to where another one is, or none.

    Attributes:
        entered_ns: Processor time that it took to enter it.
        num_ops: Played, of all periods that have ended.
        is_late: It was entered in the midst of a step.
    """

    plan: ExecutablePlan
    key: str
    entered_ns: int
    num_ops: int = 0
    is_late: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether what it cost can be compared: of sizes that differ nobody knows which were compared.

        Where steps leave out ops, too, they are all the same: what that takes may be more than what a plan saves.
        """
        return not self.is_late and (self.plan.may_omit or not self.plan.is_elastic)


class LearningBudget:
    """Decides at each border whether to learn from what ends, and whether to enter a plan for what begins.

    A plan saves waiting for what is moved. Where nothing had to be moved for some periods it only saves a few
    microseconds an op, so learning may take a small part of the time so far. As soon as anything moves for want of
    room, learning may take a larger part of the time, and a yet larger one at first: the more, the more of the ops are
    planned for it. What plans themselves move says nothing: layers skipped at random left a plan in each step, and each
    time what had outlived it was evicted, at four times the memory that the step needs.

    Plans that take longer to enter than they save until they are left are entered less and less often; so are all that
    were not entered yet, if most are such. A plan that is played to its end is compared with what its sequence took on
    demand (`cost_ns`). Of one that is left before, only what it took to enter it is known, and guessed what each op has
    saved. To enter one takes processor time; that it waits for the store does not count there, since on demand the same
    would be waited for.

    Args:
        counters: Of what is moved.
        is_limited: Whether there are limits at all; without, what is learned does not depend on the clock.
        clock: The time, in seconds.
        thread_clock: Processor time of the calling thread, in nanoseconds.
    """

    def __init__(
        self,
        counters: Counters,
        *,
        is_limited: bool,
        clock: Callable[[], float] = time.monotonic,
        thread_clock: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self._counters = counters
        self._is_limited = is_limited
        self._clock = clock
        self._thread_clock = thread_clock
        self._on_demand_ns: dict[str, float] = {}  # by sequence, an op, of late; the one that came last at the end
        self._opened = clock()
        self._spent_s = 0.0
        self._num_learned = 0
        self._num_crowded = 0
        self._num_calm = 0
        self._ended_s, self._spent_then_s = self._opened, 0.0  # when the last period ended
        self._ns_per_op: float | None = None  # of late
        self._planned_share = 1.0  # of the ops of late; none have been planned before, which says nothing
        self._account, self._num_plans = Account(), 0  # of all plans; and how many were
        self._accounts: weakref.WeakKeyDictionary[object, Account] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"<LearningBudget, {self._num_calm} periods moved nothing, {self._spent_s:.2f} s spent>"

    @property
    def everything_fits(self) -> bool:
        """Whether nothing had to be moved for some periods, so that plans are of little use."""
        return self._is_limited and self._num_calm >= _CALM_PERIODS

    def end_period(self, *, num_planned: int = 0, num_ops: int = 0) -> None:
        """Note that a period of so many ops ends, and how many of them were replayed from plans."""
        self._num_calm = self._num_calm + 1 if self._counters.num_crowded == self._num_crowded else 0
        now, learning_s = self._clock(), self._spent_s - self._spent_then_s
        if num_ops > 0:
            ns_per_op = (now - self._ended_s - learning_s) * 1e9 / num_ops
            before = self._ns_per_op if self._ns_per_op is not None else ns_per_op
            self._ns_per_op = before + (ns_per_op - before) * _LATEST_SHARE
            self._planned_share += (num_planned / num_ops - self._planned_share) * _LATEST_PERIOD
        self._ended_s, self._spent_then_s = now, self._spent_s

    def begin_period(self) -> None:
        """Note that a period begins: what entering its plan has moved was not for want of room."""
        self._num_crowded = self._counters.num_crowded

    def may_learn(self) -> bool:
        """Whether to learn from the period that ends."""
        if self.everything_fits:
            return self._is_within(LEARNING_FRACTION)
        if not self._is_limited:
            return True
        if self._num_learned < FREE_SEQUENCES and (self._spent_s < FREE_S or self._is_within(FREE_FRACTION)):
            return True
        return self._is_within(max(MOST_FRACTION * min(2 * self._planned_share, 1.0), _LEAST_FRACTION))

    def _is_within(self, fraction: float) -> bool:
        return self._spent_s <= fraction * (self._clock() - self._opened)

    def may_enter(self, plan: object) -> bool:
        """Whether to enter this plan for what begins. One that was never entered is judged by others, if many were."""
        if not self._is_limited or (plan not in self._accounts and self._num_plans < _FREE_PLANS):
            return True
        return self._accounts.get(plan, self._account).may_try()

    def cost_ns(self) -> int:
        """What the session's thread has spent so far that plans could save: processor time, and waiting for transfers.

        Less what learning took. Not the time itself: a program may sleep, or wait for its data.
        """
        return self._thread_clock() + self._counters.stall_ns - round(self._spent_s * 1e9)

    def note_on_demand(self, key: str, *, num_ops: int, cost_ns: int) -> None:
        """Note that a sequence of ops ran on demand from its beginning to its end, and at what cost."""
        if num_ops <= 0:
            return
        latest = cost_ns / num_ops
        before = self._on_demand_ns.pop(key, latest)
        self._on_demand_ns[key] = min(before + (latest - before) * _LATEST_SHARE, latest)
        if len(self._on_demand_ns) > _MOST_SEQUENCES:
            del self._on_demand_ns[next(iter(self._on_demand_ns))]

    def note_stay(
        self,
        plan: object,
        *,
        num_ops: int,
        entered_ns: int,
        key: str = "",
        cost_ns: int | None = None,
        may_omit: bool = False,
    ) -> None:
        """Note that a plan is played no longer: how many ops were, all in all.

        Args:
            plan: Which one.
            num_ops: Played from it since it was entered.
            entered_ns: Processor time of this thread that it took to enter it.
            key: Its sequence.
            cost_ns: What the stay has cost, entering included, where all of the plan's ops were played, on the sizes
                that its sequence has always had; else None.
            may_omit: Whether steps leave out ops of it.
        """
        on_demand_ns = self._op_on_demand_ns(key, may_omit=may_omit)
        if self.everything_fits:
            gain_ns = float(num_ops * _SAVED_NS - entered_ns)
        elif cost_ns is not None and on_demand_ns is not None:
            gain_ns = num_ops * on_demand_ns - cost_ns
        elif self._ns_per_op is not None:
            gain_ns = num_ops * _SAVED_SHARE * self._ns_per_op - entered_ns
        else:
            return
        self._num_plans += plan not in self._accounts
        for account in (self._account, self._accounts.setdefault(plan, Account())):
            account.note(gain_ns)

    def is_loss(self, stay: Stay | None, begun_ns: int) -> bool:
        """Whether steps that leave out ops of their plan take longer on it than on demand, as far as they are known."""
        if stay is None or not stay.plan.may_omit or not stay.is_whole or not self._is_limited or self.everything_fits:
            return False
        on_demand_ns = self._op_on_demand_ns(stay.key, may_omit=True)
        return on_demand_ns is not None and self.cost_ns() - begun_ns > stay.num_ops * on_demand_ns

    def _op_on_demand_ns(self, key: str, *, may_omit: bool) -> float | None:
        """What an op of a sequence counts on demand, to compare a stay on its plan with. None: it has not run so."""
        found = self._on_demand_ns.get(key)
        return found * _VARYING if found is not None and may_omit else found

    def end_stay(self, stay: Stay, *, num_ops: int, num_replayed: int, begun_ns: int) -> None:
        """Note that a plan is played no longer, after which so many ops were recorded, of which it has played some.

        `begun_ns`: what `cost_ns` was when its sequence began.
        """
        cost_ns = self.cost_ns() - begun_ns if num_ops == 0 and stay.is_whole else None
        num_played = stay.num_ops + num_replayed
        self.note_stay(
            stay.plan,
            num_ops=num_played,
            entered_ns=stay.entered_ns,
            key=stay.key,
            cost_ns=cost_ns,
            may_omit=stay.plan.may_omit,
        )

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """Count the time in this block as spent on learning."""
        started = self._clock()
        self._num_learned += 1
        try:
            yield
        finally:
            self._spent_s += self._clock() - started

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Within `spending`: the time in this block does not count. The store is measured once for all."""
        started = self._clock()
        try:
            yield
        finally:
            self._spent_s -= self._clock() - started
