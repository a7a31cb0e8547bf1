"""`LearningBudget`: how much time learning and planning may take while everything fits in memory."""

from __future__ import annotations

import contextlib
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ooc.memory.counters import Counters
from ooc.replay.executable_plan import ExecutablePlan

LEARNING_FRACTION = 0.05
"""Where nothing has to move, learning takes at most this part of the time so far. A planned op saves some 3 us, and
learning one takes 50 us (reinforce in benchmarks/scripts: 35 of 51 ms a step were spent on building traces)."""
MOST_FRACTION = 0.15
"""Where things have to move, so much of the time so far at most, once `FREE_SEQUENCES` were learned: as much as plans
have gained. A mixture of experts whose sizes lay about the threshold was never alike twice, and learning took half of
each step."""
FREE_SEQUENCES = 64
FREE_S = 4.0
"""So long the first sequences may take together, if that is no more than `FREE_SHARE` of the time; beyond,
`FREE_FRACTION` of it. Where LBFGS's history grows, each step has a turn of a loop more, and comparing 9,000 ops took a
third of the time."""
FREE_SHARE, LEAST_FREE_S = 0.25, 0.25
"""And that whatever part of the time it is. Of 30 steps of 9,400 tiny ops, each unlike the one before, nine took half a
second to one second more than the others' 0.1: they were all learned before the first 4 s had gone into that."""
FREE_FRACTION = 0.1
REPEATED_FRACTION = 0.15
"""What comes again just as it was is planned at once, so learning that may take so much of the time, whatever the rest
has taken. Where steps of LBFGS were alike at last, comparing steps of which each was longer had taken all there was."""
_CALM_PERIODS = 4
"""Periods in a row that had to move nothing before all is taken to fit: an evaluation may move what steps do not."""
_FIRST_CALM_PERIODS = 2
"""So many will do where nothing had to be moved yet: to learn 40,000 ops of a loop that fits took as long as a step."""
_LEARNING_S = 50e-6
"""What it takes to learn an op, about."""
_LONGEST_PAUSE, _LONGEST_WHOLE_PAUSE = 64, 8
"""The second for plans that were played to their end: on a busy machine one may have seemed to be a loss. Of a strictly
periodic loop, two optimizers in turns, no step was planned in 17 turns, with all plans at hand."""
_LEAST_FRACTION = 0.02
"""So much of it all the same where plans have gained nothing, in case that changes."""
_SAVED_NS = 3_000
"""What an op on a plan saves where nothing moves: 2.5 us of 1,110 ops in nanogpt, 4.7 of 1,274 in hf_trainer."""
_AWAKE_PERIODS = 16
"""So many periods are judged together, since a plan that is entered once may be played in each of them."""
_HOPELESS_PERIODS = 4
"""So many will do if in none of them a plan was played, or ops came just as before."""
_LOOK_NS = 100_000
"""What it takes to look for a plan for a period in vain, and to compare what has come with what came before."""
_SAVED_SHARE = 0.4
"""What it saves where something moves, in the time that an op takes of late, waits and all. At half of the memory:
0.37 of it in twelve layers of 192 (131 us an op on demand, 82 planned), 0.43 in episodes (60 and 34 us)."""
_VARYING = 1.1
"""Where steps leave out ops of their plan, those on it may take so many times what they took on demand in the median of
late: other ones ran then. Packed sequences of an LSTM, at half of their memory: 95 us an op on a plan that had nearly
all of them, 42 on demand: some 400 times a step the plan had to be aligned anew, and what stood in for others moved."""
_NUM_VARYING = 8
"""Of so many latest runs."""
_FREE_PLANS = 8
"""So many plans are entered once, whatever others have gained before them: those were of another part of the program,
or are replaced for what they were left for. Not plans that steps leave out ops of: each of these replaces one that was
left, and to enter one for the first time takes long (13,000 ops of packed sequences: 0.8 to 1.2 s, six times)."""
_LONG_S = 0.05
"""To join unlike steps in less time is not worth counting: mostly it turned out soon that there was nothing to join."""
JOIN_FREE_S = 1.0
"""So long joining unlike steps may take, or up to `FREE_S` where that is within `FREE_FRACTION`, before it has to earn
what it takes. In a TreeLSTM, a union that went on growing took 31 % of the first 20 s and saved 1 %."""
_MOST_SEQUENCES = 1024
"""Whose costs on demand are remembered."""
_VISIT_NS = 50_000
"""What Python takes more for an op at which something may begin than native code, which runs it elsewhere."""
_LATEST_SHARE = 0.25
"""Of the latest stay on a plan, in what such stays have gained of late; and of a period, in the time that ops take."""


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

    def note(self, gain_ns: float, *, longest_pause: int = _LONGEST_PAUSE) -> None:
        """Note what a stay has gained, and after a loss how many chances at most are to be let pass."""
        self.gain_ns += (gain_ns - self.gain_ns) * _LATEST_SHARE
        self._num_passed = 0
        self._pause = 0 if gain_ns >= 0 else min(max(2 * self._pause, 1), longest_pause)


class _OnDemand:
    """What an op of a sequence takes on demand, of late.

    Attributes:
        least_ns: What came faster counts at once, what came slower little by little.
        latest_ns: Of the latest runs.
    """

    __slots__ = ("latest_ns", "least_ns")

    def __init__(self, op_ns: float) -> None:
        self.least_ns = op_ns
        self.latest_ns = deque([op_ns], maxlen=_NUM_VARYING)

    def note(self, op_ns: float) -> None:
        """Note one more run."""
        self.least_ns = min(self.least_ns + (op_ns - self.least_ns) * _LATEST_SHARE, op_ns)
        self.latest_ns.append(op_ns)


@dataclass(slots=True)
class Stay:
    """On a plan, from where it is entered to where another one is, or none.

    Attributes:
        entered_ns: Processor time that it took to enter it.
        num_ops: Played, of all periods that have ended.
        is_late: It was entered in the midst of a step.
        is_at_border: It was entered between two whole steps, since somebody looked for what began.
    """

    plan: ExecutablePlan
    key: str
    entered_ns: int
    num_ops: int = 0
    is_late: bool = False
    is_at_border: bool = False

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
    room, learning may take a larger part of the time, as much as plans have gained, and a stake at first. What comes
    again just as it was has a part of its own. What plans themselves move says nothing: layers skipped at random left a
    plan in each step, and each time what had outlived it was evicted, at four times the memory that the step needs.

    To see where something begins takes time, too: Python looks at ops that native code would run. While everything
    fits, plans that are entered within periods must have saved that, or nobody looks for a while (`watches`). DQN with
    a replay buffer took 9.7 ms a step with all its borders looked at, 5.7 without, plain 3.5.

    And where all that plans save there is less than what it takes to look for them and to enter them, the session
    *rests*: for a number of periods nothing is learned, no plan is entered and no border looked at, then for more.
    What learning takes does not count: that is for later steps, and has its own limit. Two models trained in turns
    whose graphs reach across steps: 2.7 instead of 2.9 ms a step, plain 1.7.

    Plans that take longer to enter than they save until they are left are entered less and less often; so are all that
    were not entered yet, if most are such, and those that steps leave out ops of if these are. Then unlike steps are
    joined less and less often, too: each time takes long, and gives one more such plan.

    A plan that is played to its end is compared with what its sequence took on demand (`cost_ns`). Of one that is left
    before, only what it took to enter it is known, and guessed what each op has saved. To enter one takes processor
    time; that it waits for the store does not count there, since on demand the same would be waited for.

    Args:
        counters: Of what is moved.
        is_limited: Whether there are limits at all; without, what is learned does not depend on the clock.
        is_roomy: Whether a good part of the memory has never been in use: what moved did not so for want of room.
        clock: The time, in seconds.
        thread_clock: Processor time of the calling thread, in nanoseconds.

    Attributes:
        rests: Whether nothing is to be planned or learned in the present period; from `end_period` on, in the next one.
        watches: Whether to look within the present period for what has a plan.
    """

    def __init__(
        self,
        counters: Counters,
        *,
        is_limited: bool,
        is_roomy: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        thread_clock: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self._counters = counters
        self._is_limited = is_limited
        self._is_roomy = is_roomy
        self._clock = clock
        self._thread_clock = thread_clock
        self._on_demand: dict[str, _OnDemand] = {}  # by sequence; the one that came last at the end
        self._opened = clock()
        self._spent_s = 0.0
        self._uncounted_s = 0.0
        self._repeated_s = 0.0  # of that, on what came again when nothing else was to be learned
        self._num_learned = 0
        self._num_crowded = 0
        self._num_calm = 0
        self._ended_s, self._spent_then_s = self._opened, 0.0  # when the last period ended
        self._ns_per_op: float | None = None  # of late
        self._gained_s = 0.0  # by plans, as far as is known, less what others have lost
        self._account, self._num_plans = Account(), 0  # of all plans; and how many were
        self._unions_account = Account()  # of those that steps leave out ops of
        self._joining = Account()  # of joining unlike steps, less what that took
        self._joined_s = self._longest_join_s = 0.0
        self._borders = Account()  # of what was looked for within periods
        self._border_ns = 0.0  # what that has gained in this period
        self._planning = Account()  # of all that plans are, in a period
        self._num_awake, self._planned_ns = 0, 0  # periods since the last rest, and what plans have gained in them
        self._is_hopeful = False  # plans were played in these periods, or something came that may have one soon
        self.rests = False
        self.watches = True
        self._accounts: weakref.WeakKeyDictionary[object, Account] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"<LearningBudget, {self._num_calm} periods moved nothing, {self._spent_s:.2f} s spent>"

    @property
    def spent_s(self) -> float:
        """How long learning and planning have held training up so far, in seconds."""
        return self._spent_s

    @property
    def _elapsed_s(self) -> float:
        return self._clock() - self._opened

    @property
    def everything_fits(self) -> bool:
        """Whether nothing had to be moved for some periods, so that plans are of little use."""
        enough = _CALM_PERIODS if self._counters.num_crowded else _FIRST_CALM_PERIODS
        return self._is_limited and self._num_calm >= enough

    def end_period(self, *, num_ops: int = 0, num_planned: int = 0, num_at_borders: int = 0) -> None:
        """Note that a period of so many ops ends; `rests` then says whether the next one is to be one of rest.

        Args:
            num_ops: All of them.
            num_planned: Of these were on plans.
            num_at_borders: Of these were on plans that borders have found. Those of stays that were noted as
                `Stay.is_at_border` come on top.
        """
        is_calm = self._counters.num_crowded == self._num_crowded or self._is_roomy()
        self._num_calm = self._num_calm + 1 if is_calm else 0
        now, learning_s = self._clock(), self._spent_s - self._spent_then_s
        if num_ops > 0:
            ns_per_op = (now - self._ended_s - learning_s) * 1e9 / num_ops
            before = self._ns_per_op if self._ns_per_op is not None else ns_per_op
            self._ns_per_op = before + (ns_per_op - before) * _LATEST_SHARE
        self._ended_s, self._spent_then_s = now, self._spent_s
        if self.watches and self.everything_fits and (self._border_ns or num_at_borders):  # others tell nothing
            self._borders.note(self._border_ns + num_at_borders * _SAVED_NS)
        self._border_ns = 0.0
        self._decide_on_rest(num_planned)

    def _decide_on_rest(self, num_planned: int) -> None:
        if self.everything_fits and not self.rests:
            self._num_awake += 1
            self._is_hopeful = self._is_hopeful or num_planned > 0
            self._planned_ns += num_planned * _SAVED_NS if num_planned else -_LOOK_NS
            if self._num_awake < (_AWAKE_PERIODS if self._is_hopeful else _HOPELESS_PERIODS):
                return
            self._planning.note(self._planned_ns)
        self._num_awake, self._planned_ns, self._is_hopeful = 0, 0, False
        self.rests = self.everything_fits and not self._planning.may_try()

    def note_entry(self, entered_ns: int) -> None:
        """Note that to enter a plan took so much processor time."""
        self._planned_ns -= entered_ns

    def note_known(self) -> None:
        """Note that ops came as they have come before: a plan may be in the making."""
        self._is_hopeful = True

    def begin_period(self) -> None:
        """Note that a period begins: what entering its plan has moved was not for want of room."""
        self._num_crowded = self._counters.num_crowded
        looks = not self.everything_fits or self._borders.may_try()  # periods of rest count as passed, too
        self.watches = looks and not self.rests

    @contextlib.contextmanager
    def at_border(self) -> Iterator[None]:
        """Count the time in this block, less what learning takes, and Python's visit, as what borders cost."""
        started_s, learned_s = self._clock(), self._spent_s + self._uncounted_s
        try:
            yield
        finally:
            learned_s = self._spent_s + self._uncounted_s - learned_s
            self._border_ns -= (self._clock() - started_s - learned_s) * 1e9 + _VISIT_NS

    def may_learn(self, *, num_ops: int = 0, is_repeated: bool = False) -> bool:
        """Whether to learn from what ends, so many ops: from what has come just so before, sooner than from others."""
        expected_s = num_ops * _LEARNING_S
        if self.everything_fits:
            return self._is_within(LEARNING_FRACTION, expected_s=expected_s)
        if not self._is_limited:
            return True
        if is_repeated:
            return self._repeated_s <= REPEATED_FRACTION * self._elapsed_s
        is_free = self._spent_s + expected_s <= self._free_s(FREE_S)
        is_free = is_free or self._is_within(FREE_FRACTION, expected_s=expected_s)
        if is_free and self._num_learned < FREE_SEQUENCES:
            return True
        return self._is_within(_LEAST_FRACTION, at_most=MOST_FRACTION, expected_s=expected_s)

    def _is_within(self, fraction: float, *, at_most: float = 0.0, expected_s: float = 0.0) -> bool:
        """Whether this part of the time so far will not be spent yet when `expected_s` more are.

        Or up to a larger one what plans have gained.
        """
        elapsed_s = self._elapsed_s  # once: each look at the clock finds another time
        return self._spent_s + expected_s <= max(fraction * elapsed_s, min(self._gained_s, at_most * elapsed_s))

    def may_enter(self, plan: ExecutablePlan) -> bool:
        """Whether to enter this plan for what begins. One that was never entered is judged by others, if many were.

        Where everything fits, none that steps leave ops out of: to find them takes longer than to run on demand.
        """
        if self.everything_fits and plan.may_omit:
            return False
        account = self._accounts.get(plan)
        is_free = account is None and not plan.may_omit and self._num_plans < _FREE_PLANS
        if not self._is_limited or is_free:
            return True
        if account is None:
            account = self._unions_account if plan.may_omit else self._account
        return account.may_try()

    def may_join(self) -> bool:
        """Whether to look for what unlike steps have in common: at first in any case, then where that pays.

        And where there is the time for one as long as the longest: to begin a union of several steps anew may take
        seconds.
        """
        if not self._is_limited or self._is_joining_free():
            return True
        is_affordable = self._is_within(_LEAST_FRACTION, at_most=MOST_FRACTION, expected_s=self._longest_join_s)
        return is_affordable and self._joining.may_try()

    def _is_joining_free(self) -> bool:
        part_s = FREE_FRACTION * self._elapsed_s
        return self._joined_s < min(max(part_s, self._free_s(JOIN_FREE_S)), FREE_S)

    def _free_s(self, most_s: float) -> float:
        """Of so long, what may go into learning now, whatever plans gain."""
        return max(min(most_s, FREE_SHARE * self._elapsed_s), LEAST_FREE_S)

    @contextlib.contextmanager
    def joining(self) -> Iterator[None]:
        """Within `spending`: the time in this block goes into joining unlike steps, for plans that are to earn it."""
        started = self._clock()
        try:
            yield
        finally:
            joined_s = self._clock() - started
            self._joined_s += joined_s
            self._longest_join_s = max(self._longest_join_s, joined_s)
            if joined_s >= _LONG_S and not self._is_joining_free():
                self._joining.note(-joined_s * 1e9)

    def cost_ns(self) -> int:
        """What the session's thread has spent so far that plans could save: processor time, and waiting for transfers.

        Less what learning took. Not the time itself: a program may sleep, or wait for its data.
        """
        return self._thread_clock() + self._counters.stall_ns - round(self._spent_s * 1e9)

    def note_on_demand(self, key: str, *, num_ops: int, cost_ns: int) -> None:
        """Note that a sequence of ops ran on demand from its beginning to its end, and at what cost."""
        if num_ops <= 0:
            return
        op_ns = cost_ns / num_ops
        found = self._on_demand.pop(key, None)
        if found is None:
            found = _OnDemand(op_ns)
        else:
            found.note(op_ns)
        self._on_demand[key] = found
        if len(self._on_demand) > _MOST_SEQUENCES:
            del self._on_demand[next(iter(self._on_demand))]

    def note_stay(
        self,
        plan: object,
        *,
        num_ops: int,
        entered_ns: int,
        key: str = "",
        cost_ns: int | None = None,
        num_others: int = 0,
        may_omit: bool = False,
    ) -> None:
        """Note that a plan is played no longer: how many ops were, all in all.

        Args:
            plan: Which one.
            num_ops: Played from it since it was entered.
            entered_ns: Processor time of this thread that it took to enter it.
            key: Its sequence.
            cost_ns: What the stay has cost, entering included, where all of the plan's ops were played, on the sizes
                that its sequence has always had; or where steps leave out ops of it; else None.
            num_others: Ops that ran on demand once the plan was left, and are in `cost_ns`.
            may_omit: Whether steps leave out ops of it.
        """
        guess_ns = num_ops * _SAVED_SHARE * self._ns_per_op - entered_ns if self._ns_per_op is not None else None
        op_ns = self._op_on_demand_ns(key, may_omit=may_omit)
        gain_ns, tolerated_ns = guess_ns, 0.0
        if self.everything_fits:
            gain_ns = float(num_ops * _SAVED_NS - entered_ns)
        elif cost_ns is not None and op_ns is not None:
            gain_ns = min((num_ops + num_others) * op_ns - cost_ns, cost_ns)
            tolerated_ns = num_ops * op_ns * (_VARYING - 1) if may_omit else 0.0
            if num_others > 0 and guess_ns is not None:
                gain_ns = min(gain_ns, guess_ns)
        if gain_ns is None:
            return
        self._num_plans += plan not in self._accounts
        self._gained_s = max(self._gained_s + gain_ns / 1e9, 0.0)
        accounts = [self._account, self._accounts.setdefault(plan, Account())]
        if may_omit:
            accounts += [self._unions_account, self._joining]
        is_whole = cost_ns is not None and not (may_omit or num_others)
        longest_pause = _LONGEST_WHOLE_PAUSE if is_whole else _LONGEST_PAUSE
        for account in accounts:
            account.note(gain_ns + tolerated_ns, longest_pause=longest_pause)

    def is_loss(self, stay: Stay | None, begun_ns: int) -> bool:
        """Whether steps that leave out ops of their plan take longer on it than on demand, as far as they are known."""
        if stay is None or not stay.plan.may_omit or not stay.is_whole or not self._is_limited or self.everything_fits:
            return False
        op_ns = self._op_on_demand_ns(stay.key, may_omit=True)
        return op_ns is not None and self.cost_ns() - begun_ns > stay.num_ops * op_ns * _VARYING

    def _op_on_demand_ns(self, key: str, *, may_omit: bool) -> float | None:
        """What an op of a sequence takes on demand, to compare a stay on its plan with. None: it has not run so."""
        found = self._on_demand.get(key)
        if found is None:
            return None
        return statistics.median(found.latest_ns) if may_omit else found.least_ns

    def end_stay(self, stay: Stay, *, num_ops: int, num_replayed: int, begun_ns: int) -> None:
        """Note that a plan is played no longer, after which so many ops were recorded, of which it has played some.

        Where steps leave ops out of it, they count whole, also if they have left it: what that took, and the rest on
        demand, after a plan that had other things in mind.

        `begun_ns`: what `cost_ns` was when its sequence began.
        """
        may_omit = stay.plan.may_omit
        if stay.is_at_border:
            self._border_ns += (stay.num_ops + num_replayed) * _SAVED_NS
        self.note_stay(
            stay.plan,
            num_ops=stay.num_ops + num_replayed,
            entered_ns=stay.entered_ns,
            key=stay.key,
            cost_ns=self.cost_ns() - begun_ns if stay.is_whole and (may_omit or num_ops == 0) else None,
            num_others=num_ops - num_replayed,
            may_omit=may_omit,
        )

    @contextlib.contextmanager
    def spending(self, *, is_repeated: bool = False) -> Iterator[None]:
        """Count the time in this block as spent on learning; from what has come just so before, if that was asked."""
        started = self._clock()
        self._num_learned += 1
        try:
            yield
        finally:
            spent_s = self._clock() - started
            self._spent_s += spent_s
            self._repeated_s += spent_s * is_repeated

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Within `spending`: the time in this block does not count. The store is measured once for all."""
        started = self._clock()
        try:
            yield
        finally:
            uncounted_s = self._clock() - started
            self._spent_s -= uncounted_s
            self._uncounted_s += uncounted_s
