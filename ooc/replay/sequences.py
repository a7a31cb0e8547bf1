"""Op sequences that were observed, their plans, and the plan to replay in the next step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from ooc.memory.protocols import Store
from ooc.replay.background import BackgroundPlanner, PlanRequest
from ooc.replay.elastic import Alignment, Envelope, Plannable, Shape
from ooc.replay.executable_plan import ExecutablePlan
from ooc.replay.expectation import Expectation
from ooc.replay.first_plans import FirstPlans
from ooc.replay.first_sightings import FirstSightings, name_of
from ooc.replay.op_timings import told_anew
from ooc.replay.plan_cache import PlanCache
from ooc.replay.plan_maker import PlanMaker, attempt
from ooc.replay.proven_ops import ProvenOps
from ooc.replay.rerun_trials import RerunTrials
from ooc.replay.step_unions import StepUnion
from ooc.replay.stoppable import Stopped
from ooc.replay.twins import Twin, Twins
from ooc.tracing.observed import Observed
from ooc.tracing.recorder import RecordedStep
from scheduler.cost.bounds import lower_bounds
from scheduler.plan import Machine, Plan, PlanError
from scheduler.trace import Trace

_log = logging.getLogger(__name__)

_MAX_SEQUENCES = 64
"""Sequences without a plan that are remembered: a step that is never the same twice must not fill memory."""
_MAX_KEYS = 1024
_REFINE_AFTER, _QUICK_AFTER = (3, 8), 2
"""Steps replayed from a plan after which it is made anew: early, and with a better minimum; a quick one earlier."""
_COSTS, _LOST = ("loaded_nbytes", "recompute_ns"), ("stall_ns", "recompute_ns")
_MOST_REPLACED = 2
"""Observations after which what most variables are replaced by in each step is taken to be new in each step."""
_WORTHWHILE = 0.995
"""A new plan must be predicted to take at most this part of the old one's time: a change is not free."""
_ANY_NS = 1 << 62
_WORTHWHILE_STALL = 0.005
"""Below this part of the step, a stall is no reason to plan anew."""


class Sequences:
    """Learns op sequences, and plans each that was observed twice.

    Steps that differ in sizes alone are one sequence (`ooc.replay.elastic`). The next one is predicted
    (`ooc.replay.predictor`), so sequences that take turns, and an evaluation every few steps, are all
    replayed from their plans.

    Args:
        planning: Told the number of ops, is entered while a plan is made.
        is_elastic: Whether steps that differ in sizes share a plan. Sessions always do; tests of what it takes do not.
        in_background: Make plans in another process where training would be held up by them.
        trials: Who knows which ops repeat their bits; a plan that waits for the store is to have its ops tried.
        is_timed: Whether a planned step tells how long ops take. Not on a device: there it tells how long launches
            take, and a plan made anew for those would take computation to be free.
    """

    def __init__(
        self,
        *,
        policy: str,
        parameters: Mapping[str, Any],
        intercepts: Container[Any],
        view_address: int,
        cache: PlanCache | None = None,
        planning: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext(),
        is_elastic: bool = True,
        in_background: bool = False,
        trials: RerunTrials | None = None,
        is_timed: bool = True,
    ) -> None:
        self.maker = PlanMaker(
            policy=policy,
            parameters=parameters,
            cache=cache,
            planning=planning,
            in_background=in_background,
            moves_first=not parameters.get("recompute") or (trials is not None and not trials.is_on),
        )
        self._is_timed = is_timed
        self._proven = ProvenOps(trials)
        self._intercepts = intercepts
        self._view_address = view_address
        self._is_elastic = is_elastic
        self._seen: dict[str, Shape] = {}
        self._united: dict[str, StepUnion] = {}
        self._envelopes: dict[str, Envelope] = {}  # of the plans
        self._first = FirstPlans(self.maker, self._proven.applied)
        self._plans: dict[str, ExecutablePlan] = {}
        self._asked: dict[str, Machine] = {}  # what the first plan of each sequence was made for
        self.unplannable: dict[str, str] = {}  # sequences that cannot be planned, with the reason
        self._expectation = Expectation()
        self._sightings, self._twins = FirstSightings(), Twins()
        self._keys: dict[int, str] = {}  # by a recording's signature, as last learned
        self._segments: set[str] = set()  # what is a part of a step: it has a plan only while those are planned
        self._joined: set[str] = set()  # of these, what is to be planned as one
        self.is_segmented = False
        """Whether what is noted are segments of steps (`ooc.replay.segmentation`)."""
        self.active_key: str | None = None
        self.last_trace: Trace | None = None
        self._last: ExecutablePlan | None = None
        self.last_num_ops: int | None = None
        self.draws: set[tuple[Any, str]] = set()  # see `ooc.tracing.observed.Draws`
        self.retired: list[ExecutablePlan] = []
        """Plans that will not be replayed again; whoever empties the list gives back what they keep."""

    def __repr__(self) -> str:
        return f"<Sequences: {len(self._seen)} seen, {len(self._plans)} planned, {len(self.unplannable)} unplannable>"

    @property
    def background(self) -> BackgroundPlanner | None:
        """Who makes plans beside training, if anybody."""
        return self.maker.background

    @property
    def last_plan(self) -> Plan | None:
        """The plan that was made, or taken, last; with its lower bounds."""
        last, trace = self._last, self.last_trace
        if last is not None and trace is not None and not last.plan.bounds:
            recompute = last.plan.recomputes
            last.plan = replace(last.plan, bounds=lower_bounds(trace, last.plan.machine, recompute=recompute))
        return last.plan if last is not None else None

    @property
    def num_plans(self) -> int:
        """Sequences that have a plan."""
        return len(self._plans)

    def earlier_traces(self) -> Iterator[Trace]:
        """Those of steps that were recorded, the latest first; each is built when it is asked for."""
        for recording in reversed(list(self._sightings.recordings())):
            yield recording.build().trace
        for shape in reversed(self._seen.values()):
            yield shape.observed.trace

    def note(self, recording: RecordedStep, machine: Callable[[], Machine]) -> str:
        """Note a step that ran on demand, and learn from it (`learn`) if it may be a repetition. Returns its key."""
        self.last_num_ops = recording.num_ops
        key = name_of(recording)
        for repeated in self._sightings.note(recording):
            known = self._keys.get(repeated.signature)
            if known is not None and known not in self._plans and self._must_wait(self._seen.get(known)):
                self._remember(known, self._seen[known])
                return known  # all that could be learned from it is that it comes again
            key = self.learn(repeated.build(self.draws), machine())
            self._expectation.rename(name_of(repeated), key)
            self._keys.pop(repeated.signature, None)
            self._keys[repeated.signature] = key
            if len(self._keys) > _MAX_KEYS:
                del self._keys[next(iter(self._keys))]
        return key

    def is_repeated(self, recording: RecordedStep, *, is_kept: bool) -> bool:
        """Whether a step like this was noted before. If not, this one is; `is_kept`: and learned from later."""
        is_repeated = self._sightings.has(recording)
        if not is_repeated:
            self._sightings.note(recording, is_kept=is_kept)
        return is_repeated

    def note_union(self, key: str, union: StepUnion, recording: RecordedStep, machine: Callable[[], Machine]) -> None:
        """Note that a step belongs to a union of steps, which is this sequence; plan it if its plan lacks something."""
        self._united[key] = union
        if self.is_segmented:
            self._segments.add(key)
        self._expectation.rename(name_of(recording), key)
        if not self.covers(key) and key not in self.unplannable:
            self._plan_shape(key, union, machine())

    def covers(self, key: str) -> bool:
        """Whether a union has a plan for all that is known of it."""
        union, envelope = self._united.get(key), self._envelopes.get(key)
        return union is not None and envelope is not None and union.fits(envelope)

    def has_plan(self, key: str) -> bool:
        """Whether a sequence has a plan."""
        return key in self._plans

    def give_up(self, key: str) -> None:
        """Forget a union, and its plan."""
        self._united.pop(key, None)
        if key in self._plans:
            self._retire(key)

    def key_of_plan(self, executable: ExecutablePlan) -> str | None:
        """The sequence that this plan is for; None: another plan has taken its place."""
        return next((key for key, plan in self._plans.items() if plan is executable), None)

    def _must_wait(self, shape: Plannable | None) -> bool:
        """Whether a sequence seen twice has no plan because another one's is being made beside training."""
        return shape is not None and shape.num_seen >= 2 and self.maker.must_wait(shape.observed.trace)

    def key_of(self, signature: int) -> str | None:
        """The sequence that a step with these ops was last time; None if that was never learned."""
        return self._keys.get(signature)

    def is_new(self, key: str) -> bool:
        """Whether the sequence of this key has been seen only once."""
        shape = self._known(key)
        return shape is None or (key not in self._plans and shape.num_seen < 2)

    def _known(self, key: str) -> Plannable | None:
        return self._seen.get(key) or self._united.get(key)

    def learn(self, observed: Observed, machine: Machine) -> str:
        """Note a step that ran on demand; plan its sequence if it was seen before. Returns its key."""
        self.last_num_ops = len(observed.trace.ops)
        key, alignment = self._find(observed) or (self._new_key(observed), None)
        (self._segments.add if self.is_segmented else self._segments.discard)(key)
        shape = self._seen[key] if alignment is not None else Shape(observed)
        self._remember(key, shape)
        if alignment is None:
            return key
        changed, throughout = shape.num_persistent_changed(observed, alignment)
        plan = self._plans.get(key)
        if plan is not None and (not plan.can_be_bound(observed, alignment) or self._proven.gives_up(key, plan)):
            # Its parameters were replaced (a load_state_dict by assignment, a new optimizer), and will not come back.
            self._retire(key)
            plan = None
        if plan is None and shape.has_lost(alignment):
            self._remember(key, Shape(observed))  # a plan for what is gone could never be entered
            return key
        fits = plan is not None and shape.fits(self._envelopes[key], observed, alignment)
        shape.add(observed, alignment)
        if plan is not None:
            plan.num_alive = observed.num_alive
        are_replaced = changed * 2 > throughout and shape.num_seen <= _MOST_REPLACED
        # If parameters were replaced between the two observations, a third one is needed to know them from batches,
        # or the gradients that an optimizer's step begins with, that are new in each step.
        if not (fits or key in self.unplannable or not observed.trace.ops or are_replaced):
            self._plan_shape(key, shape, machine)
        return key

    def _new_key(self, observed: Observed) -> str:
        key = observed.trace.fingerprint() + ("" if observed.grad_mode else " without gradients")
        while key in self._seen:
            key += ", other storages"
        return key

    def _find(self, observed: Observed) -> tuple[str, Alignment] | None:
        """The shape that an observed step has, seen most recently first; None: it is new.

        So are the same ops on another model's parameters (two networks of one form that are trained in turns), unless
        the storages are new each time anyway.
        """
        others: list[Twin] = []
        for key, shape in reversed(self._seen.items()):
            alignment = shape.align(observed, exactly=not self._is_elastic)
            if alignment is None:
                continue
            changed, throughout = shape.num_persistent_changed(observed, alignment)
            if changed * 2 <= throughout:
                return key, alignment
            others.append((key, shape, alignment))
        return self._twins.joined(observed, others)

    def _remember(self, key: str, shape: Shape) -> None:
        self._seen.pop(key, None)
        self._seen[key] = shape  # last in order: the one seen most recently
        for old in list(self._seen)[:-_MAX_SEQUENCES]:
            if old not in self._plans:
                del self._seen[old]
                self._segments.discard(old)
                self.unplannable.pop(old, None)

    def retire(self, executable: ExecutablePlan) -> None:
        """Give up a plan that waits for variables that will not come back."""
        if (key := self.key_of_plan(executable)) is not None:
            self._retire(key)

    def retire_drawn(self) -> None:
        """Give up plans that were left where an op joins what is drawn anew in each step."""
        for key in [key for key, plan in self._plans.items() if plan.draws]:
            self.draws |= self._plans[key].draws
            self._retire(key)

    def _retire(self, key: str) -> None:
        self.retired.append(self._plans.pop(key))
        del self._envelopes[key]

    def _plan_shape(
        self, key: str, shape: Plannable, machine: Machine, ready: tuple[Envelope, Plan] | None = None
    ) -> None:
        """Make a plan for a sequence, or take one that was made beside training; or have it made there.

        A wider plan replaces the old.
        """
        if ready is None and self._must_wait(shape):
            return
        started = time.monotonic()
        self._asked[key] = machine
        try:
            found: tuple[Envelope, Plan, bool] | None
            if ready is not None:
                found = (*ready, False)
            else:
                present, is_segment = self._plans.get(key), key in self._segments
                found = self._first.make(key, shape, machine, present=present, is_segment=is_segment)
            if found is None:
                return  # if the other process is busy, it is asked for when this sequence comes again
            envelope, plan, is_quick = found
            if not is_quick:
                self.maker.keep(plan, envelope.trace)
            observed = shape.for_plan(envelope)
            if observed is None:
                return  # it has grown since
            executable = self._proven.with_room(key, plan, envelope, observed, self.maker.here, self._make_executable)
            executable = self._with_trials(key, executable, plan.step_ns)
        except Stopped:
            _log.info("planning was interrupted; it is tried again when this sequence comes again")
            return
        except PlanError as error:
            self._note_unplannable(key, str(error))
            _log.warning("this sequence stays on demand: %s", error)
            return
        except Exception as error:  # noqa: BLE001 - a fault of the planner's must not end the user's training
            self._note_unplannable(key, f"a fault in the planner: {error!r}")
            _log.exception("a fault in the planner; this sequence stays on demand. Please report it")
            return
        executable.is_quick = is_quick
        if key in self._plans:
            self._retire(key)
        self._plans[key] = executable
        self._envelopes[key] = envelope
        self.last_trace, self._last = envelope.trace, executable
        _log.info("planned %d ops in %.2f s: %s", executable.num_ops, time.monotonic() - started, dict(plan.predicted))

    def take_ready(self) -> None:
        """At a step boundary: take the plan that was made beside training, if one is ready and still of use."""
        if self.background is None:
            return
        self._first.ask_next(self._plans)
        try:
            found = self.background.take()
        except PlanError as error:
            self._note_background_failure(error)
            return
        if found is None:
            return
        (request, plan), asked = found, self._first.taken()
        key, shape, present = request.key, self._known(request.key), self._plans.get(request.key)
        is_interim = present is not None and self.maker.is_interim(present.plan)
        if shape is None or key in self.unplannable:
            return
        if asked is not None and (is_interim or asked.still_replaces(present)):
            self._plan_shape(key, shape, request.machine, (asked.envelope, plan))
        elif present is not None and present.trace.fingerprint() == request.trace.fingerprint():
            self._replace(key, present, request.trace, plan, request.old_ns or present.plan.step_ns)

    def _note_background_failure(self, error: PlanError) -> None:
        """As `_plan_shape` does where a plan is made here."""
        asked = self._first.taken()
        if asked is None or (shape := self._known(key := asked.key)) is None:
            _log.warning("cannot plan anew: %s", error)
            return
        if key in self._plans and self.maker.is_interim(self._plans[key].plan):
            self._retire(key)
        if not self._first.goes_on_without_headroom(asked, shape):
            self._note_unplannable(key, str(error))
            _log.warning("this sequence stays on demand: %s", error)

    def _make_executable(self, plan: Plan, envelope: Envelope, observed: Observed, area: int = 0) -> ExecutablePlan:
        return ExecutablePlan(
            trace=envelope.trace,
            plan=plan,
            observed=observed,
            view_address=self._view_address,
            intercepts=self._intercepts,
            elastic=envelope.elastic,
            standing=envelope.standing,
            may_omit=envelope.may_omit,
            num_chunks=area,
        )

    def plan_beside(
        self, executable: ExecutablePlan, trace: Trace, machine: Machine
    ) -> tuple[str, ExecutablePlan] | None:
        """Another plan for the sequence of a plan, to be taken by `adopt`; None if there is none."""
        key = self.key_of_plan(executable)
        if key is None or executable.may_omit:
            return None
        try:
            plan = self.maker.for_the_rest(trace, machine)
            return key, self._make_executable(plan, Envelope.of(executable, trace), executable.observed)
        except (PlanError, Stopped):
            return None

    def adopt(self, key: str, executable: ExecutablePlan) -> None:
        """Take a plan of `plan_beside`, which is being replayed, for its sequence's."""
        self._plans[key], self._envelopes[key] = executable, Envelope.of(executable, executable.trace)
        self._asked[key] = executable.plan.machine
        self.last_trace, self._last = executable.trace, executable
        self.begin(executable)

    def join(self, keys: Iterable[str | None]) -> None:
        """These come in a row in each step, and are learned as one from now on. Until they come alone, or it fails."""
        self._joined = {key for key in keys if key is not None}
        self._segments |= self._joined

    def _note_unplannable(self, key: str, why: str) -> None:
        self.unplannable[key] = why
        self._segments -= self._joined

    def forget_plans(self) -> None:
        """The budget has changed: no plan made so far is of use. Each sequence is planned anew when it is next seen."""
        self.retired += self._plans.values()
        for known in (self._plans, self._envelopes, self._asked, self.unplannable):
            known.clear()
        self._first.forget()
        self._proven.forget_empty()
        self.active_key = None
        if self.background is not None:
            self.background.cancel()

    def refine(self, executable: ExecutablePlan, store: Store, *, is_part: bool = False) -> ExecutablePlan:
        """Plan anew with the measured times and rates, after a step was replayed whole from this plan.

        The first plan rests on steps on demand and on an idle store. The better of the two by simulation is returned.
        """
        if executable.may_omit or is_part:
            return executable  # what ops take that some steps leave out is not measured
        key, log = self.key_of_plan(executable), executable.timings
        tried = executable.trials is not None and executable.trials.was_installed
        if key is None or not (tried or self._is_timed):
            return executable  # another one has just taken its place, or op times tell nothing
        stands_for, executable.stands_for = executable.stands_for, None
        if not tried:  # else ops have taken more than their own time
            log.note(executable.op_start_ns, executable.op_stop_ns, executable.between, store)
            after = (_QUICK_AFTER, *_REFINE_AFTER) if executable.is_quick else _REFINE_AFTER
            executable.is_due |= log.num_played in after and any(map(executable.plan.predicted.get, _COSTS))
            if stands_for is None and not executable.is_due:
                return executable
        if self.maker.is_fixed(executable.plan):
            return executable
        machine = log.machine(executable.plan.machine, store)
        proves = tried and self._proven.take(key, executable)
        trace = stands_for or self._proven.applied(key, executable.trace)
        trace = log.timed(self._proven.untouched(key, trace))
        executable.plan = told_anew(executable.plan, trace, machine)
        if self._last is executable:
            self.last_trace = trace
        told, old_ns = executable.plan.predicted, executable.plan.step_ns
        must_go, lost_ns = stands_for is not None or executable.leaves_room, sum(told.get(key, 0) for key in _LOST)
        may_gain = lost_ns >= _WORTHWHILE_STALL * told["duration_ns"] or told["num_remapped_chunks"]
        executable.is_due = executable.is_due and bool(may_gain)
        if not must_go and not (proves if tried else may_gain):
            return executable
        present = self._plan_anew(key, executable, trace, machine, _ANY_NS if must_go else old_ns)
        found = self._with_trials(key, present, min(old_ns, present.plan.step_ns))
        if found is not present:
            self._put(key, present, found)
        return found

    def _with_trials(self, key: str, executable: ExecutablePlan, step_ns: int) -> ExecutablePlan:
        """The plan for the next step: one that leaves room to try ops, if re-runs may pay and this one leaves none."""
        if self.maker.is_fixed(executable.plan):
            return executable
        machine = self._proven.have_tried(key, executable, step_ns)
        if machine is None or not self.maker.may_hold_up(executable.trace):
            return executable
        try:
            plan = replace(self.maker.here(executable.trace, machine), machine=executable.plan.machine)
            own = Envelope.of(executable, executable.trace), executable.observed
            roomy = self._make_executable(plan, *own, plan.machine.num_chunks)
        except (PlanError, Stopped):
            return executable  # what has no room is not called replayable
        self._proven.have_tried(key, roomy, step_ns)
        roomy.timings = executable.timings
        return roomy

    def _plan_anew(
        self, key: str, executable: ExecutablePlan, trace: Trace, machine: Machine, old_ns: int
    ) -> ExecutablePlan:
        """The plan to go on with: a new one for what was measured, if it is worth it."""
        background, executable.is_due = self.background, False
        if background is not None and background.is_for(key):
            return executable  # for what was measured a little earlier
        if background is not None and not background.may_hold_up(trace):
            request = PlanRequest(key=key, trace=trace, machine=machine, old_ns=old_ns)
            executable.is_due = not background.ask(request)
            return executable
        plan = attempt(lambda: self.maker.here(trace, machine))
        return self._replace(key, executable, trace, plan, old_ns) if plan is not None else executable

    def _replace(self, key: str, executable: ExecutablePlan, trace: Trace, plan: Plan, old_ns: int) -> ExecutablePlan:
        """Take a new plan for a sequence if it is worth it. The plan to go on with; the other is `retired`."""
        _log.info("planned anew: %.4f s a step instead of %.4f s", plan.step_ns / 1e9, old_ns / 1e9)
        if plan.step_ns > old_ns * _WORTHWHILE:
            return executable
        own = Envelope.of(executable, trace), executable.observed
        better = attempt(lambda: self._proven.with_room(key, plan, *own, self.maker.here, self._make_executable))
        if better is None or better.plan.step_ns > old_ns * _WORTHWHILE:  # for all the room that it leaves
            return executable
        # For the next run to find: it will ask with what it measures when it begins.
        self.maker.keep(replace(plan, machine=self._asked[key]), trace)
        better.timings = executable.timings
        self._put(key, executable, better)
        return better

    def _put(self, key: str, old: ExecutablePlan, new: ExecutablePlan) -> None:
        """Take a plan for a sequence in place of another."""
        self._plans[key] = new
        self.retired.append(old)
        self.last_trace, self._last = new.trace, new

    def others(self, executable: ExecutablePlan) -> list[ExecutablePlan]:
        """All plans but this one."""
        return [plan for plan in self._plans.values() if plan is not executable]

    def note_end(self, key: str | None) -> None:
        """Note that sequence `key` was the last to run; None: something that has no key."""
        self.active_key = None
        self._expectation.note_end(key)

    def expected(self) -> ExecutablePlan | None:
        """The plan for what should come now, if there is one."""
        return self._expectation.expected(self.latest_first())

    def heads(self) -> tuple[Any, ...]:
        """The functions with which what has a plan may begin."""
        heads = (plan.head for plan in self.latest_first().values() if plan.num_idle != plan.num_ops)
        return tuple({id(head): head for head in heads}.values())  # to hash an OpOverload takes ten times as long

    def starting_with(
        self, fits: Callable[[ExecutablePlan], bool], num_alive: Callable[[], int]
    ) -> ExecutablePlan | None:
        """The plan for what begins now, of those that fit: what is expected, or else the one replayed last."""
        fitting = {k: plan for k, plan in self.latest_first().items() if plan.num_idle != plan.num_ops and fits(plan)}
        return self._expectation.likeliest(fitting, num_alive)

    def latest_first(self) -> dict[str, ExecutablePlan]:
        """The plans for segments, or for whole steps, whichever there are now; the one replayed last comes first."""
        plans = reversed(self._plans.items())
        return {key: plan for key, plan in plans if (key in self._segments) == self.is_segmented}

    def begin(self, executable: ExecutablePlan) -> None:
        """Note that a plan is entered, or replayed again."""
        key = self.key_of_plan(executable)
        assert key is not None
        self.active_key = key
        self._expectation.note_begin(key)
        self._plans[key] = self._plans.pop(key)  # last in order: the one replayed most recently
