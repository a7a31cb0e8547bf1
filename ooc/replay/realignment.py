"""Realigns a step and its plan where they differ harmlessly, so that the step stays on its plan.

- *Bystanders*: ops that touch no variable, which a step may go without.
- *Marks* (`ooc.tracing.operand_marks`), which stand in a plan after an op that runs in parts, and which no step has.
- *Omissions* (`ooc.replay.omissions`), in plans for steps that leave out ops.
- *Late bindings* (`ooc.replay.late_bindings`): what comes from outside, and is another storage each time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ooc.replay.executable_plan import ExecutablePlan
from ooc.replay.late_bindings import LateBindings
from ooc.replay.omissions import Omissions
from ooc.replay.replaying import PartOfReplay
from ooc.tracing.op_semantics import written_values


class Realignment(PartOfReplay):
    """Of the plan that an executor replays, on the session's thread and with its lock held. Owns nothing."""

    @functools.cached_property
    def _omissions(self) -> Omissions:
        return Omissions(*self._parts)

    @functools.cached_property
    def _late(self) -> LateBindings:
        return LateBindings(*self._parts)

    def adapt(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: Callable[[], str]) -> bool:
        """Let the op that is about to run be the next one of the plan, if it may; `place`: where the program calls it.

        True does not promise that it can be played now: more may differ. False: it may not be, or the step has left
        the plan.
        """
        executable, cursor = self._executor.active, self._dispatcher.cursor
        if executable is None or cursor >= executable.num_ops:
            return False
        addresses = self._dispatcher.occurrences(args, kwargs)
        if executable.funcs[cursor] is func:
            changed = self._dispatcher.operands(*written_values(func, args, kwargs))
            if self._vouch_for(executable, cursor, addresses, changed):
                return True
        if self._omissions.omit_to(func, addresses, place):
            return True
        if self._executor.active is None:
            return False
        return self._late.bind(addresses) if executable.funcs[cursor] is func else self._skip_to(func)

    def foresees(self, func: Any, addresses: Sequence[int], place: Callable[[], str]) -> bool:
        """Whether an op may be a later one of the plan, which goes on there: what is before it would be left out."""
        return self._omissions.foresees(func, addresses, place)

    def _vouch_for(
        self, executable: ExecutablePlan, index: int, addresses: Sequence[int], changed: Iterable[int]
    ) -> bool:
        """Note what an op changes that has not all operands of the next planned one. Whether it may be that now."""
        alive = [variable for variable in executable.occurrences[index] if executable.variable_alive[variable]]
        planned = iter([int(executable.variable_address[variable]) for variable in alive])
        # What it has twice may be planned to be two variables: samples that are drawn with replacement.
        known = [address for address in dict.fromkeys(addresses) if executable.record_at(address) is not None]
        if not addresses or not all(address in planned for address in known):
            return False  # of those that it does not know, only what was allocated beside it will be let pass
        unplanned = set(changed).difference(executable.changed_by(index))
        if unplanned and executable.reruns.by_op:
            return False  # ops may run again from what it was before
        for address in unplanned:
            if (record := executable.record_at(address)) is not None:
                record.written()
        return self._dispatcher.vouch()

    def omit_rest(self) -> bool:
        """At the step's end: leave out the ops of the plan that have not come. True if it is complete now."""
        return self._omissions.omit_rest()

    def _skip_to(self, func: Any) -> bool:
        """Skip planned ops that no step need have, up to the next `func`, but no acts around them. True if possible."""
        executable = self._executor.active
        assert executable is not None
        cursor = index = self._dispatcher.cursor
        while index < executable.num_ops and executable.funcs[index] is not func and executable.is_bystander(index):
            index += 1
        if index == cursor or index == executable.num_ops or executable.funcs[index] is not func:
            return False
        return self._pass_over(executable, cursor, index)

    def skip_marks(self, index: int) -> None:
        """After op `index`, skip the marks that stand there, but no acts around them."""
        executable = self._executor.active
        if executable is not None and (marks := executable.parts.marks_after(index)):
            self._pass_over(executable, marks.start, marks.stop)
