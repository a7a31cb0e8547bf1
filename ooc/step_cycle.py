"""The step boundary: records what the last step did, and chooses the plan that the next one replays.

A *period* reaches from the start of one step to the start of the next, so that what the user does between steps is
planned, too; where optimizers take turns, over a round of steps (`ooc.replay.optimizer_rounds`). At the boundary the
period that ends is recorded or checked against its plan, and the plan of the sequence that is predicted to come next
is entered.

A period has *borders* within it, where one segment of it may end and another begin: where a backward pass ends, where
gradients are switched on or off (an evaluation), where a plan ends. What begins there is told by its first op.

- Whole steps are planned as long as they come again (`ooc.replay.segmentation`). What comes in between without
  gradients, where a plan has not begun or has ended, is a segment all the same: the plan of the step is left at its
  head and entered there again.
- Otherwise each border ends a segment, which is a sequence of its own.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from ooc.dispatch.comparison import Comparison
from ooc.dispatch.op_runner import OpRunner
from ooc.interop.exports import Exports
from ooc.learner import Learner
from ooc.memory.record import VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.op_counts import NumOps, OpCounts
from ooc.replay.differences import difference
from ooc.replay.executable_plan import ExecutablePlan
from ooc.replay.late_entry import LatePlans
from ooc.replay.learning_budget import LearningBudget, Stay
from ooc.replay.optimizer_rounds import OptimizerRounds
from ooc.replay.segmentation import Segmentation
from ooc.replay.sequences import Sequences
from ooc.replay.union_plans import UnionPlans
from ooc.step_notes import StepNotes
from ooc.telemetry.progress import Position, Progress
from ooc.telemetry.steps import StepLog
from ooc.telemetry.timeline import Timeline
from ooc.telemetry.why import UnplannedSteps
from ooc.tracing.op_semantics import makes_tensors
from ooc.tracing.recorder import StepRecorder

_log = logging.getLogger(__name__)

_MOST_IN_BETWEEN = 0.2
"""A step where no more than this part of the ops ran on demand had something in between, and was not new itself."""


class StepCycle:
    """Begins and ends steps and periods, on the session's thread; takes the session's lock where records change.

    Args:
        runner: Runs the ops; its executor replays plans.
        resident_nbytes: Bytes in memory now, for the progress line.

    Attributes:
        rounds: How many steps a period has.
    """

    def __init__(
        self,
        *,
        runner: OpRunner,
        manager: ResidencyManager,
        sequences: Sequences,
        learning: LearningBudget,
        exports: Exports,
        steps: StepLog,
        timeline: Timeline,
        progress: Progress,
        resident_nbytes: Callable[[], int],
        is_open: Callable[[], bool],
    ) -> None:
        self._runner = runner
        self._executor = runner.executor
        self._lock = runner.lock
        self._manager = manager
        self._sequences = sequences
        self._learning = learning
        self._exports = exports
        self._steps = steps
        self._timeline = timeline
        self._is_open = is_open
        self._thread = threading.get_ident()
        self._num_backward = 0  # backward passes since the last boundary
        self._last_optimizer: int | None = None  # identity of the one that ended the last step
        self._why = UnplannedSteps(sequences.unplannable)
        self._unions = UnionPlans(sequences, learning)
        self._learner = Learner(
            runner=runner,
            manager=manager,
            sequences=sequences,
            unions=self._unions,
            budget=learning,
            steps=steps,
            why=self._why,
        )
        self._segmentation = Segmentation()
        self.rounds = OptimizerRounds()
        self._comparison = Comparison(runner.recording, learning)
        self._is_between = False  # in what comes between steps without gradients, in a period that is planned whole
        self._backward_depth = self._num_passes = 0  # backward passes under way, and those that this period has had
        self._was_new = False  # what the period that ends had: something like nothing before
        self._keys: list[str | None] = []  # of the segments of the present period
        self._counts = OpCounts(runner)
        self._notes = StepNotes(
            runner=runner,
            sequences=sequences,
            counts=self._counts,
            steps=steps,
            progress=progress,
            why=self._why,
            resident_nbytes=resident_nbytes,
        )
        self._at_start = NumOps(0, 0)  # when the present period began
        # The plan of this period, to be entered again if it is left at its head.
        self._awaited: ExecutablePlan | None = None
        self._entered: ExecutablePlan | None = None  # the plan that was entered last
        self._heads: tuple[Any, ...] = ()  # the functions with which what has a plan may begin
        self._begun_ns = learning.cost_ns()  # when the present sequence did
        self._stay: Stay | None = None  # of the same, until it ends
        self._late = LatePlans(manager.records.get)
        self._tried: list[ExecutablePlan] = []  # plans that were entered and left at their heads before this very op
        self._most_ops = 0  # of the longest plan that was replayed
        runner.borders = self

    def __repr__(self) -> str:
        return f"<StepCycle after {self._steps.num_steps} steps>"

    def close(self) -> None:
        """End the profiler range of the present step, and rest no more. Idempotent."""
        self._notes.close()
        self._comparison.rest(False)

    def begin_step(self, *, begins_period: bool = True) -> None:
        """Note that a step begins."""
        with self._lock:
            if begins_period:
                self._timeline.begin_step(self._executor.active)
            self._notes.begin()

    def begin_first_step(self) -> None:
        """Begin the first step of a session in which the program's optimizers, or backward passes, end steps."""
        self._notes.begin()
        self._watch()

    def end_step(self) -> None:
        """Note that a step ends; from here on the kernel serves stray touches of evicted variables."""
        with self._lock:
            if self._is_open():
                self._exports.step_ends()
            self._notes.end(in_segments=self._segmentation.is_on)

    def optimizer_stepped(self, optimizer: object) -> None:
        """Handle the return of an optimizer's `step`: end the step and its period, and begin the next ones.

        Optimizers that step in a row, with no backward pass in between, end one step together: the first of them does.
        """
        if not self._is_open() or threading.get_ident() != self._thread:
            return
        in_a_row = self._num_backward == 0 and self._last_optimizer not in (None, id(optimizer))
        if not in_a_row:
            self._last_optimizer = id(optimizer)
            self._pass_boundary(ends_period=self.rounds.ends_with(id(optimizer)))

    def backward_ended(self, *, has_optimizer: Callable[[], bool]) -> None:
        """Handle the end of a backward pass: in a program without an optimizer, it ends the step."""
        if not self._is_open() or threading.get_ident() != self._thread:
            return
        self._num_backward += 1
        if self._last_optimizer is None and not has_optimizer():
            self._pass_boundary()

    def backward_begins(self) -> None:
        """Note that a backward pass begins: its ops run without gradients, which means nothing."""
        if self._is_open() and threading.get_ident() == self._thread:
            self._backward_depth += 1
            self._runner.dispatcher.watch(-1, None, ())

    def backward_left(self) -> None:
        """Note that a backward pass is over, well or not: a segment ends here."""
        if threading.get_ident() != self._thread or not self._backward_depth:
            return
        self._backward_depth -= 1
        self._num_passes += not self._backward_depth
        if self._backward_depth or not self._is_open():
            return
        if self._in_segments:
            with self._lock, self._learning.at_border():
                self._end_segment()
        self._watch()

    def _pass_boundary(self, *, ends_period: bool = True) -> None:
        with self._lock:  # all of it: what garbage or a signal calls comes afterwards
            self._num_backward = 0
            self._notes.end(in_segments=self._segmentation.is_on)
            if ends_period:
                self.begin_period()
                self._exports.step_ends()
            self.begin_step(begins_period=ends_period)

    def begin_period(self) -> None:
        """Learn from the period that ends, and enter the plan that is predicted for the next one."""
        with self._lock:
            self._exports.step_begins()
            planned, on_demand = self._counts.now().since(self._at_start)
            num_at_borders = planned if self._segmentation.is_on else 0
            self._learning.end_period(num_ops=planned + on_demand, num_planned=planned, num_at_borders=num_at_borders)
            is_other = self.rounds.take_change()
            if self._segmentation.is_on and not is_other:
                self._end_segment()
                if self._learning.watches:
                    complete = self._sequences.active_key if self._executor.is_complete() else None
                    self._segmentation.note_segments(self._keys, complete)
                if self._executor.active is not None and not self._segmentation.is_on:
                    self._pass(lambda: None)  # else the whole step would begin with what that plan does not have
            else:
                self._was_new = False
                self._pass((lambda: None) if is_other or self._learning.rests else self._expected)
                is_new = self._was_new and on_demand > _MOST_IN_BETWEEN * (planned + on_demand)
                if self.rounds.num_steps > 1 and not self._comparison.is_at_rest:
                    self.rounds.note_period(is_new=is_new)
                elif not self._comparison.is_at_rest:  # else nobody knows what it was
                    self._segmentation.note_whole(
                        is_new=is_new, num_passes=self._num_passes, unions=self._unions.of_whole_steps()
                    )
            self._at_start, self._num_passes = self._counts.now(), 0
            if is_other:  # what begins now begins as one of the plans so far, and would leave it
                self._segmentation = Segmentation()
                self._sequences.forget_plans()
                self.give_up_retired()
            self._keys.clear()
            self._sequences.is_segmented = self._segmentation.is_on
            self._is_between = False
            if self._segmentation.is_on or self._learning.rests:
                self._awaited = None
            elif self._executor.active is not None and self._executor.active.grad_mode:
                self._awaited = self._executor.active
            self._comparison.rest(self._learning.rests)
            self._learning.begin_period()
            self._watch()

    def _expected(self) -> ExecutablePlan | None:
        """The plan for the whole of the period that begins. None, too, where it is to be learned as one from now on."""
        if self._segmentation.note_pieces(self._keys):
            self._sequences.join(self._keys)
            self._awaited = None
        return self._sequences.expected()

    # -- borders within a period

    def op_comes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before an op that Python sees: pass a border if there is one here."""
        executor, active = self._executor, self._executor.active
        if self._backward_depth or not self._is_open():
            return
        if active is None:
            with self._learning.at_border():
                self._comes_on_demand(func, args, kwargs)
            return
        cursor = self._runner.dispatcher.cursor
        if cursor > active.num_idle:
            self._tried.clear()
            if cursor < active.num_ops:
                return
        grad_mode = torch.is_grad_enabled()
        is_other = grad_mode != active.grad_mode
        if func in active.funcs[cursor : active.num_idle + (not is_other)]:
            return
        addresses = self._runner.dispatcher.occurrences(args, kwargs)
        if not addresses and not makes_tensors(func):
            return  # it may come at any place, and changes nothing
        is_other = is_other and (bool(addresses) or func in active.funcs[active.num_idle : active.num_idle + 1])
        with self._lock, self._learning.at_border():
            if executor.active is not active or torch._C._current_autograd_node() is not None:
                return
            chosen, place = self._chosen(func, addresses, grad_mode), self._runner.recording.call_sites.of_this_op
            if chosen is active and cursor < active.num_ops:
                return
            if cursor == active.num_ops and cursor:
                if chosen is None and not (is_other or self._in_segments or self._is_between):
                    return
                self._pass(lambda: self._chosen(func, addresses, grad_mode), is_begun=True)
            elif is_other or (chosen is not None and not executor.realignment.foresees(func, addresses, place)):
                self._runner.bail_out(difference(active, cursor, func, place()))
                self._enter(chosen, is_begun=True)
            else:
                return
            self._began(grad_mode)

    def _comes_on_demand(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder, awaited = self._runner.recording.recorder, self._awaited
        if recorder is None or not (self._in_segments or self._is_between or awaited is not None):
            return
        if recorder.num_ops > recorder.num_replayed:
            self._tried.clear()
        grad_mode = torch.is_grad_enabled()
        is_head = not recorder.is_begun
        num_played, entered = recorder.num_replayed - recorder.num_beside, self._entered
        is_same_mode = awaited is not None and entered is not None and entered.grad_mode == awaited.grad_mode
        if entered is not None and is_same_mode and num_played > entered.num_idle:
            awaited = self._awaited = None  # it, or another plan for what it is for, was left in its middle
            self._watch()
        is_awaited = awaited is not None and grad_mode == awaited.grad_mode and func is awaited.head
        is_border = (self._in_segments or self._is_between) and grad_mode != recorder.grad_mode
        if not (is_head or is_awaited or is_border):
            return
        addresses = self._runner.dispatcher.occurrences(args, kwargs)
        if not addresses:
            may_begin = is_awaited or grad_mode != recorder.grad_mode or func in self._heads
            if not may_begin or not makes_tensors(func):
                return
        with self._lock:
            if torch._C._current_autograd_node() is not None:
                return
            only = awaited if not (is_head or is_border) else None
            chosen = self._chosen(func, addresses, grad_mode, only)
            if is_head:
                if chosen is not None:
                    self._enter(chosen, is_begun=True)
            elif is_border or chosen is not None:
                self._pass(lambda: self._chosen(func, addresses, grad_mode, only), is_begun=True)
            else:
                return
            if chosen is not None and chosen is awaited and self._executor.active is not chosen:
                self._awaited = None  # what it is for has begun, on demand
            self._began(grad_mode)

    def _began(self, grad_mode: bool) -> None:
        """A segment begins with the op that is about to run."""
        recorder = self._runner.recording.recorder
        if recorder is not None and not recorder.is_begun:
            recorder.grad_mode = grad_mode
        self._is_between = self._learning.watches and not (self._segmentation.is_on or grad_mode)
        self._watch()

    def _chosen(
        self, func: Any, addresses: list[int], grad_mode: bool, only: ExecutablePlan | None = None
    ) -> ExecutablePlan | None:
        """The plan for what begins with this op; with `only`, that or none."""

        @functools.cache
        def records() -> dict[int, VariableRecord]:  # most ops begin no plan: nobody asks
            return {record.address: record for record in self._executor.live_records()} | self._manager.records

        def fits(plan: ExecutablePlan) -> bool:
            return (
                plan not in self._tried
                and only in (None, plan)
                and plan.may_start_with(func, addresses, grad_mode, lambda address: records().get(address))
            )

        return self._sequences.starting_with(fits, lambda: len(records()))

    def _end_segment(self) -> None:
        """End a segment of a period that is not planned whole. What begins now is told by its first op."""
        executor = self._executor
        if executor.active is not None and executor.is_complete():
            return  # what comes after the plan's end is still its own, until an op comes
        recorder = self._runner.recording.recorder
        if executor.active is None and recorder is not None and recorder.num_ops == 0:
            return
        if executor.active is None or self._runner.dispatcher.cursor > 0:
            self._pass(lambda: None)

    @property
    def _in_segments(self) -> bool:
        """Whether borders end segments in this period."""
        return self._segmentation.is_on and self._learning.watches

    def _watch(self) -> None:
        """Let Python see ops on demand that may be at a border, also once a plan is left in its middle."""
        begun = self._executor.active or self._runner.recording.recorder
        awaited, matters = self._awaited, self._in_segments or self._is_between
        if self._backward_depth:
            self._runner.dispatcher.watch(-1, None, ())
        else:
            mode = int(begun.grad_mode) if begun is not None and matters else -1
            self._heads = self._sequences.heads() if matters or awaited is not None else ()
            self._runner.dispatcher.watch(mode, awaited.head if awaited is not None else None, self._heads)

    def _pass(self, choose: Callable[[], ExecutablePlan | None], *, is_begun: bool = False) -> None:
        """Pass a border: learn from the sequence that ends, and enter the chosen plan.

        With `is_begun` what begins has shown by its first op what it is.
        """
        executor, sequences = self._executor, self._sequences
        recorder = self._runner.recording.recorder
        if recorder is None or recorder.num_ops > recorder.num_replayed:
            self._tried.clear()
        if executor.active is not None and not executor.is_complete():
            executor.realignment.omit_rest()
        if executor.active is not None and not executor.is_complete():
            self._was_new = self._was_new or self._runner.dispatcher.cursor > 0
            self._runner.bail_out("the step ended before the plan")
        if executor.active is not None and executor.active.persistent_is_missing():
            lost = executor.active
            self._runner.bail_out("a variable that lived across steps was freed")
            self._unions.note_refused(lost)
            sequences.retire(lost)
        is_main = executor.active is not None and executor.active.num_ops >= self._most_ops // 2
        is_main = is_main and executor.so_far is None  # else nobody knows when its first ops ran
        self._timeline.end_period(executor.active if is_main else None, self._steps.num_steps - 1)
        if executor.active is not None:
            self._most_ops = max(self._most_ops, executor.active.num_ops)
            executor.active.num_alive = executor.active.num_entered
            if self._stay is not None:
                self._stay.num_ops += executor.num_played()
            key = sequences.active_key
            self._counts.end_sequence()
            sequences.note_end(key)
        else:
            sequences.take_ready()  # first, so that what has just been recorded can be planned next
            key = self._learn()
        self._keys.append(key)
        self.give_up_retired()
        sequences.take_ready()
        if executor.active is not None:
            self._unions.note_played(executor.active)
        follower = choose()
        if executor.active is not None:
            replayed = executor.active
            refined = sequences.refine(replayed, self._manager.store, is_part=executor.so_far is not None)
            if follower is replayed:
                follower = refined
            is_loss = follower is replayed and self._learning.is_loss(self._stay, self._begun_ns)
            if follower is replayed and not is_loss and executor.rotate():
                self._late.begin(follower)
                sequences.begin(follower)
                return
            if executor.active is not None:
                executor.bail_out("its plan costs more" if is_loss else "another plan is expected", is_over=True)
            self.give_up_retired()
        self._enter(follower, is_begun=is_begun)

    def op_differs(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """A plan was left since this op came instead of another. Whether the step goes on with another plan now."""
        if threading.get_ident() != self._thread or not self._manager.is_host or not self._is_open():
            return False
        with self._lock:
            recorder = self._runner.recording.recorder
            if recorder is None or self._manager.flights or self._executor.mid_op_pins:
                return False
            self._runner.absorb()
            addresses = self._runner.dispatcher.occurrences(args, kwargs)
            plan = self._late.take(self._sequences.latest_first().values(), recorder, func, addresses)
            if plan is None:
                return False
            self._enter(plan, so_far=recorder)
            self._awaited = None
            return self._executor.active is plan

    def _enter(
        self, follower: ExecutablePlan | None, *, is_begun: bool = False, so_far: StepRecorder | None = None
    ) -> None:
        """Begin a sequence by a plan, or go on with it after `so_far`; on demand without one, or if that cannot be."""
        executor = self._executor
        self._end_stay()
        if so_far is None:
            self._late.begin(follower)
            self._comparison.begin()
            self._runner.start_recording()
            self._begun_ns = self._learning.cost_ns()
        if follower is None:
            return
        if not self._learning.may_enter(follower):
            if self._learning.everything_fits:
                self._why.note_all_fits()
            elif so_far is None:
                self._why.note_loss()
            return
        left_because, left = executor.bailout_reason, self._sequences.active_key  # if this step has left a plan before
        self._sequences.begin(follower)
        self._entered = follower
        self._tried.append(follower)
        started_ns = time.thread_time_ns()
        self._unions.prepare(follower, self._manager.records)
        if executor.enter(follower, self._sequences.others(follower), is_begun=is_begun, so_far=so_far):
            self._runner.recording.stop()
            key, entered_ns = self._sequences.active_key or "", time.thread_time_ns() - started_ns
            self._stay = Stay(follower, key, entered_ns=entered_ns)
            self._learning.note_entry(entered_ns)
            if so_far is not None:
                self._stay.is_late, self._stay.num_ops = True, -so_far.num_replayed
            self._stay.is_at_border = is_begun and not self._segmentation.is_on and follower is not self._awaited
            self._steps.note_plan(self._manager.num_chunks - self._manager.num_free)
        else:
            _log.info("cannot play the plan: %s", executor.bailout_reason)
            if so_far is not None:
                self._sequences.active_key = left
            else:
                self._steps.note_refusal(executor.bailout_reason)
                self._why.note_refusal(executor.bailout_reason)
            if follower.waits_in_vain:
                self._unions.note_refused(follower)
            if follower.waits_in_vain or follower.is_outgrown:  # it is planned anew in the memory that there is
                self._sequences.retire(follower)
                self.give_up_retired()
            executor.bailout_reason = left_because

    def _end_stay(self) -> None:
        stay, self._stay, recorder = self._stay, None, self._runner.recording.recorder
        if stay is not None:
            num_ops, num_replayed = (recorder.num_ops, recorder.num_replayed) if recorder is not None else (0, 0)
            self._learning.end_stay(stay, num_ops=num_ops, num_replayed=num_replayed, begun_ns=self._begun_ns)

    def give_up_retired(self) -> None:
        """Free what is held for plans that will not be replayed again."""
        while self._sequences.retired:
            self._executor.retire(self._sequences.retired.pop())

    def position(self) -> Position:
        """How far the present step is (`OpCounts.position`)."""
        return self._counts.position(self._sequences.num_plans, self._sequences.last_num_ops)

    def _learn(self) -> str | None:
        """Learn what was recorded since the last border. The key of the last sequence; None if it is incomplete."""
        recorder = self._runner.recording.recorder
        assert recorder is not None
        self._runner.absorb()
        self._counts.end_sequence()
        if recorder.is_cut:
            self._sequences.note_end(None)
            self._was_new = self._was_new or self.rounds.num_steps > 1  # too long
            return None
        in_segments = self._segmentation.is_on
        is_unsplit = in_segments and not self._learning.watches  # it may be some of them, one after the other
        if self._comparison.is_at_rest or is_unsplit:
            self._why.note_all_fits()
            self._sequences.note_end(None)
            return None
        cost_ns = self._learning.cost_ns() - self._begun_ns
        learned = self._learner.learn(recorder, in_segments=in_segments, in_pieces=in_segments or self._is_between)
        if learned.is_repeated:
            self._comparison.note_repeated(is_learned=recorder.is_compared)
        self._was_new, key = self._was_new or learned.is_new, learned.key
        if key is not None and not learned.is_new:
            self._learning.note_known()
        if key is not None and learned.is_one and not recorder.num_replayed:
            self._learning.note_on_demand(key, num_ops=recorder.num_ops, cost_ns=cost_ns)
        return key
