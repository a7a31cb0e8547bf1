"""What `auto` tries, and the best so far: our own choices of gaps, others' plans, other times of their transfers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from types import ModuleType
from typing import Any

import numpy as np

from scheduler.budget import BudgetTooSmall, IntArray
from scheduler.chains import Chain, residencies_of
from scheduler.colouring.colouring import Shortage
from scheduler.cost.bounds import lower_bounds
from scheduler.cost.evaluate import Evaluation, estimate, evaluate
from scheduler.cost.links import while_both_busy
from scheduler.plan import Machine, Residency
from scheduler.policies import (
    capuchin,
    checkmate,
    dtr,
    lms,
    melon,
    nntrainer,
    on_demand,
    poet,
    sublinear,
    vdnn,
    window,
)
from scheduler.policies._candidates import fastest_of, planned_for_less
from scheduler.policies._mixed_walk import MUCH_STALL, mixed
from scheduler.policies._placement import Placement
from scheduler.policies._recompute import exchanged, with_slack
from scheduler.policies._remat_search import fewest_reruns
from scheduler.policies._slack import retimed, shortest
from scheduler.policies._timing_climb import climbed
from scheduler.selection import Selection
from scheduler.trace import Trace

# What is tried, one after another until nothing stalls: the share of the budget that the choice of gaps leaves
# free for what is on its way in or out, and whether a gap's length alone decides. Found on the synthetic steps of
# tests/scheduler/model_traces.py and on recorded ones, at rates that make them stall. Weighing the choice by bytes
# to be moved was tried and stalls more: it prefers short stays of parameters, whose loads then crowd together.
_CANDIDATES = ((0.0, False), (0.25, False), (0.1, False), (0.0, True), (0.45, False))

_ROUNDS = 3  # placements per choice, each with the times that the one before it was simulated to have
_MOST_IN_VAIN = 2  # choices in a row without improvement after which the search ends

# A bound on the search, in ops simulated: a few seconds on one core of 2026.
_MOST_OPS_SIMULATED = 40_000

# Stalls below this share of the step are not worth another candidate of ours, nor a look at the others' plans.
NO_STALL = 0.002
_NO_STALL_AT_ALL = 0.00002

# The most ops of a step for which others are asked. They search their own parameters by simulation, or walk op by op:
# together 50 s of a core for 2,752 ops, and minutes for 8,000, which is why only a thorough search asks them, and of a
# long step only the quick ones (`capuchin` takes 0.3 s for 5,000 ops, and 0.7 to 2.3 for 10,000); while training waits,
# only that one. Who has the others' plans anyway takes the best (`scheduler.compare`).
_MOST_OPS_FOR_OTHERS = 4_000
_MOST_OPS_FOR_QUICK = 12_000
_QUICK = (capuchin, on_demand, vdnn)

# The others, the likely winners first.
OTHERS = (capuchin, window, on_demand, vdnn, lms, nntrainer)

# Likewise, those that recompute: asked where that is allowed and some op may run again.
_RECOMPUTING = (poet, capuchin, melon, dtr, sublinear, checkmate)

# Those of them that solve programs, or move nothing as the fewest re-runs do: two thirds of the search's time.
# Where the programs need not be solved, and the search for the fewest re-runs has found something, they are not asked:
# at no rate and budget tried was one of them the best then (`resnet32`'s published recording, and the steps of
# tests/scheduler/model_traces.py at 40 and 70 % of their peaks, with stores of 0.1 and 1 GB/s).
_SLOW_OR_LIKE_FEWEST = (poet, melon, dtr, sublinear, checkmate)

_MOST_OPS_FOR_FEWEST = 10_000  # for which the fewest re-runs are looked for: about ten seconds of a core for 8,000
# So many of the fastest candidates are placed by our own rules and timed anew; of short steps, so many ops together.
_MOST_ADOPTED = 6
_OPS_AT_LEAST = 2_000

# Shares of the memory within which a short step's transfers are timed, too, so that some stays free: fewer remaps.
_SHARES_FOR_TRANSFERS = (0.94, 0.8)

_MOST_IN_HASTE = 3  # choices that training waits for, of a step with many ops

# The most ops of a step for which others' choices are placed by our rules, and the fastest one is timed anew: a fourth
# of the time for 3,500 ops, and steps up to 1.8 % faster, most of it remaps (3,918 and 0 of a transformer).
_MOST_OPS_FOR_ANOTHER = 4_000

# So many candidates at most are coloured as the finished plan will be, the fastest first.
MOST_FINALS = 10

# Recorded steps of ResNet-50 and GPT need no remaps when planned for this share of the pool, and hardly stall for it.
SLACK = 0.92

# A step with more ops is long: only two choices are looked at, since each takes seconds.
_MOST_OPS_SEARCHED = 4_000

# The share of the in-core peak from which a long step is planned for the whole budget first: on a transformer of
# 10,000 ops a plan for less has fewer remaps below it, and more above.
_MUCH_OF_PEAK = 3 / 8


class Search:
    """Candidates, and the best one so far."""

    def __init__(self, trace: Trace, machine: Machine, chains: tuple[Chain, ...], pinned: IntArray) -> None:
        self.trace = trace
        self.machine = machine
        self.chains = chains
        self.pinned = pinned
        self.best: Evaluation | None = None
        self.best_choice = _CANDIDATES[0]
        self.in_haste = False
        self.fallback: tuple[Residency, ...] = ()
        self.considered: list[Evaluation] = []
        self.retimed: list[Evaluation] = []  # of what was considered; they must not crowd out others
        self.num_tried = 0
        self.num_in_vain = 0  # choices in a row that did not improve on the best
        self.most_tried = max(_MOST_OPS_SIMULATED // len(trace.ops), _ROUNDS)

    def _most(self, least: int) -> int:
        """How many candidates are looked at more closely: `least`, or more of a short step."""
        return max(least, _OPS_AT_LEAST // len(self.trace.ops))

    @property
    def _paces(self) -> tuple[Machine, ...]:
        """The machine with its links' rates alone, and with those while both are busy."""
        shared = while_both_busy(self.machine)
        return (self.machine,) if shared == self.machine else (self.machine, shared)

    @property
    def is_long(self) -> bool:
        """Whether only a few choices are looked at."""
        return len(self.trace.ops) > _MOST_OPS_SEARCHED

    @property
    def is_over(self) -> bool:
        """Whether another candidate could not save a time worth the search, or the search took long enough."""
        if self.num_tried >= self.most_tried or self.num_in_vain >= _MOST_IN_VAIN:
            return True
        return self.is_good

    @property
    def is_perfect(self) -> bool:
        """Whether no other plan could be faster by anything that counts."""
        limit_ns = (1 + _NO_STALL_AT_ALL) * self.trace.duration_ns
        return any(found.duration_ns <= limit_ns for found in self.candidates)

    @property
    def is_good(self) -> bool:
        """Whether the best choice hardly waits, without remaps."""
        return self.best is not None and self._is_good(self.best)

    @property
    def candidates(self) -> list[Evaluation]:
        """The best choice, and what was considered."""
        return [*self.first_timed, *self.retimed]

    @property
    def first_timed(self) -> list[Evaluation]:
        """The same without those that were timed anew."""
        return self.considered if self.best is None else [self.best, *self.considered]

    def returned(
        self, found: Evaluation | None, evaluations: dict[tuple[Residency, ...], Evaluation] | None
    ) -> tuple[Residency, ...]:
        """What the policy returns for the candidate that was found; `evaluations` gets it if it is final."""
        if found is None:
            return self.fallback
        if evaluations is not None and found.is_final:
            evaluations[found.proposal] = found
        return found.proposal

    def fastest(self, *, most_finals: int | None = None) -> Evaluation | None:
        """The fastest candidate, coloured as the finished plan will be.

        Until then its remaps are an estimate. So all are coloured that could still be the fastest, up to `most_finals`
        of them (if given), and as many of those with other times of their transfers.
        """
        most = most_finals or self._most(MOST_FINALS)
        return fastest_of((self.retimed, self.first_timed), self.trace, self.machine, most=most)

    @property
    def beats_all_that_move(self) -> bool:
        """Whether a plan with re-runs takes less time than any plan without them can."""
        best_ns = min((found.duration_ns for found in self.considered), default=0)
        return 0 < best_ns <= lower_bounds(self.trace, self.machine)["duration_ns"]

    def try_reruns(self, parameters: Mapping[str, Any]) -> None:
        """The fewest re-runs, then what other recomputing policies propose."""
        coloured = []
        if len(self.trace.ops) <= _MOST_OPS_FOR_FEWEST and not self.is_perfect:
            fewest = fewest_reruns(self.trace, self.machine, wrap=parameters["wrap"])
            coloured = [own for own in map(self.consider, fewest) if own is not None]
            # One alone: the fastest are chosen from among so many, and those with slack must not crowd out others.
            if (best := with_slack(coloured, self.trace, wrap=parameters["wrap"])) is not None:
                self.considered.append(best)
        in_haste = coloured and not parameters["exact"]
        self.try_others([own for own in _RECOMPUTING if not in_haste or own not in _SLOW_OR_LIKE_FEWEST], parameters)

    def try_mixed(self, *, wrap: bool) -> None:
        """Paging and re-runs in one walk. Last, since what others find is built upon in order of rank."""
        limit_ns = (1 + MUCH_STALL) * self.trace.duration_ns
        if any(found.duration_ns <= limit_ns for found in self.candidates):
            return
        for proposal in mixed(self.trace, self.machine, wrap=wrap, most=1):
            if self.consider(proposal) is not None:
                self.exchange()

    def exchange(self) -> None:
        """Note the fastest so far with some of its gaps recomputed."""
        fastest = min(self.candidates, key=lambda found: found.rank, default=None)
        if fastest is not None and not self.is_perfect:
            self.consider(exchanged(fastest, self.trace).proposal)

    def try_choices(self) -> None:
        """Our own candidates, until another one is not worth its time."""
        for reserve, by_length in _CANDIDATES[:_MOST_IN_HASTE] if self.in_haste else _CANDIDATES:
            self.try_choice(reserve, by_length=by_length)
            if self.is_over:
                break

    def try_few_choices(self) -> None:
        """For a long step: a choice for the whole budget or one for a little less; both only where that may pay.

        With much of the peak in memory, few remaps are to be saved, and the whole budget comes first; another follows
        if it stalls. With little, a choice for less has fewer remaps, and the other one follows if there are none left.
        """
        all_held = Selection(self.trace, self.chains).occupancy.held
        budgets = [self.machine.num_chunks, int(self.machine.num_chunks * SLACK)]
        much = self.machine.num_chunks >= _MUCH_OF_PEAK * int(all_held.max())
        for num_chunks in budgets if much else reversed(budgets):
            outcome = self._try(self._placed_by_estimate(num_chunks))
            if outcome is None:
                continue
            hardly_stalls = outcome.simulation.stall_ns <= NO_STALL * self.trace.duration_ns
            if self._is_good(outcome) or (hardly_stalls if much else outcome.num_remapped_chunks):
                return

    def _placed_by_estimate(self, num_chunks: int) -> tuple[Residency, ...]:
        """A choice for so many chunks, placed within them."""
        return self._placed_in_haste(self._chosen(num_chunks), replace(self.machine, num_chunks=num_chunks))

    def _placed_in_haste(self, selection: Selection, machine: Machine) -> tuple[Residency, ...]:
        """A choice placed within `machine`, by the times that it is estimated to have, if that is shorter."""
        proposal = self._placed(selection, self._unhindered_ns(), machine)
        times = estimate(proposal, self.trace, self.machine)
        if times.stall_ns <= _NO_STALL_AT_ALL * self.trace.duration_ns:
            return proposal
        placed = self._placed(selection, [*times.op_start_ns, times.duration_ns], machine)
        better = estimate(placed, self.trace, self.machine)
        if better.duration_ns >= times.duration_ns:
            return proposal
        return self._placed(selection, [*better.op_start_ns, better.duration_ns], machine)

    def _chosen(self, num_chunks: int, *, by_length: bool = False) -> Selection:
        """A choice of gaps for so many chunks."""
        selection = Selection(self.trace, self.chains)
        price = self.machine.chunks_per_latency
        selection.choose(np.maximum(self.pinned, num_chunks), by_length=by_length, price=price)
        return selection

    def _try(self, proposal: tuple[Residency, ...]) -> Evaluation | None:
        """Note one of our own proposals for this budget; None if it does not colour."""
        outcome = evaluate(proposal, self.trace, self.machine)
        if isinstance(outcome, Shortage):
            self.fallback = proposal
            return None
        self.num_tried += 1
        is_better = self.best is None or outcome.rank < self.best.rank
        self.best = outcome if is_better else self.best
        self.num_in_vain = 0 if is_better else self.num_in_vain + 1
        return outcome

    def try_others(self, policies: Sequence[ModuleType], parameters: Mapping[str, Any]) -> None:
        """Look at other policies' plans, until nothing could be faster.

        Args:
            policies: Whom to ask.
            parameters: For those that take them.
        """
        for policy in policies:
            if self.is_perfect:
                return
            if len(self.trace.ops) > (_MOST_OPS_FOR_QUICK if policy in _QUICK else _MOST_OPS_FOR_OTHERS):
                continue
            taken = inspect.signature(policy.schedule).parameters
            known_ns = min((found.duration_ns for found in self.candidates), default=None)
            asked = {**parameters, "search_smallest": False, "limit_ns": known_ns}  # nobody reads a refusal
            own = {name: value for name, value in asked.items() if name in taken}
            try:
                tuned = policy.tune(self.trace, self.machine, own) if hasattr(policy, "tune") else own
                proposal = policy.schedule(self.trace, self.machine, **tuned)
                if self._is_hopeless(proposal, known_ns):
                    continue
                if self.consider(proposal) is None:
                    less = planned_for_less(policy, tuned, proposal, self.trace, self.machine)
                    if less is not None:
                        self.consider(less)
            except BudgetTooSmall:
                continue

    def _is_hopeless(self, proposal: tuple[Residency, ...], known_ns: int | None) -> bool:
        """Whether, in haste, a long step's proposal is not worth its colouring: slower even without remaps."""
        if known_ns is None or not (self.in_haste and self.is_long):
            return False
        return estimate(proposal, self.trace, self.machine).duration_ns >= known_ns

    def adopt_choices(self) -> None:
        """Place the gaps that the fastest candidates have away by our own rules: others choose well and wait long."""
        seen: set[bytes] = set()
        for candidate in sorted(self.candidates, key=lambda found: found.rank):
            found = candidate
            if self.is_perfect or len(seen) == self._most(_MOST_ADOPTED) or len(self.trace.ops) > _MOST_OPS_FOR_ANOTHER:
                return
            selection = Selection(self.trace, self.chains)
            selection.choose_as(found.proposal)
            if selection.chosen.tobytes() in seen:
                continue
            seen.add(selection.chosen.tobytes())
            for machine, into in zip(self._paces, (self.considered, self.retimed), strict=False):
                for _ in range(_ROUNDS):
                    times = found.simulation
                    placed = self._placed(selection, [*times.op_start_ns, times.duration_ns], machine)
                    better = self.consider(placed, into)
                    if better is None or better.rank >= found.rank:
                        break
                    found = better

    def retime_one(self) -> None:
        """In haste: the fastest candidate with the best of other times of its transfers."""
        if self.candidates and not self.is_perfect and len(self.trace.ops) <= _MOST_OPS_FOR_ANOTHER:
            self._retime(min(self.candidates, key=lambda found: found.rank), ())
            self.retimed = sorted(self.retimed, key=lambda found: found.rank)[:1]

    def retime(self) -> None:
        """The fastest candidates with other times of their transfers, then the best with its simulated waits."""
        seen: set[tuple[Residency, ...]] = set()
        for found in sorted(self.candidates, key=lambda found: found.rank):
            if self.is_perfect or len(self.trace.ops) > _MOST_OPS_FOR_ANOTHER:
                return
            if len(seen) == self._most(_MOST_ADOPTED):
                break
            stays = shortest(found.proposal, self.trace, self.machine)
            if stays not in seen:  # or it was timed anew in the same ways
                seen.add(stays)
                self._retime(found, ())
        if seen and self._most(_MOST_ADOPTED) > _MOST_ADOPTED:
            best = min(self.candidates, key=lambda found: found.rank)
            for share in _SHARES_FOR_TRANSFERS:
                self._retime(best, (), share)
        for _ in range(_ROUNDS if seen else 0):
            best = min(self.candidates, key=lambda found: found.rank)
            if self.is_perfect or not self._retime(best, best.simulation.op_stall_ns):
                break
        self.retimed.extend(climbed(self.candidates, self.trace) if seen else ())

    def _retime(self, found: Evaluation, waits_ns: Sequence[int], share: float = 1.0) -> bool:
        """Note other timings of a candidate, within a share of the memory; says whether one is better."""
        machine = replace(self.machine, num_chunks=int(self.machine.num_chunks * share))
        proposals = retimed(found.proposal, self.trace, machine, waits_ns)
        outcomes = [self.consider(proposal, self.retimed) for proposal in proposals]
        return any(outcome is not None and outcome.rank < found.rank for outcome in outcomes)

    def _placed(
        self, selection: Selection, op_start_ns: Sequence[int], machine: Machine | None = None
    ) -> tuple[Residency, ...]:
        chosen, held = selection.gaps_chosen, selection.occupancy.held
        placement = Placement(self.trace, machine or self.machine, self.chains, chosen, held, op_start_ns)
        return residencies_of(self.chains, placement.place(), self.trace)

    def consider(self, proposal: tuple[Residency, ...], into: list[Evaluation] | None = None) -> Evaluation | None:
        """Note a proposal that is not one of ours for this budget; None if it does not colour."""
        outcome = evaluate(proposal, self.trace, self.machine)
        if isinstance(outcome, Shortage):
            return None
        (self.considered if into is None else into).append(outcome)
        return outcome

    def _unhindered_ns(self) -> list[int]:
        """The start of each op and the step's end, if nothing ever waited."""
        return list(accumulate((op.duration_ns for op in self.trace.ops), initial=0))

    def _is_good(self, outcome: Evaluation) -> bool:
        no_stall = outcome.simulation.stall_ns <= NO_STALL * self.trace.duration_ns
        return no_stall and not outcome.num_remapped_chunks

    def try_choice(self, reserve: float, *, by_length: bool) -> None:
        """Choose as if the budget were smaller by `reserve`, then place within the whole budget."""
        selection = self._chosen(int(self.machine.num_chunks * (1 - reserve)), by_length=by_length)
        if self.in_haste:
            if self._try(self._placed_in_haste(selection, self.machine)) is self.best:
                self.best_choice = (reserve, by_length)
            return
        op_start_ns = self._unhindered_ns()
        for _ in range(_ROUNDS):
            proposal = self._placed(selection, op_start_ns)
            outcome = self._try(proposal)
            if outcome is not None and outcome is self.best:
                self.best_choice = (reserve, by_length)
            if outcome is None or outcome is not self.best or self.is_over:
                return
            op_start_ns = [*outcome.simulation.op_start_ns, outcome.simulation.duration_ns]
