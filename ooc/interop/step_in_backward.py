"""Applies each gradient as soon as it is complete, inside the backward pass, and frees it there.

In the ordinary order a model larger than memory passes through it up to three times a step: parameters for the forward
and the backward pass, then all gradients, parameters and optimizer state again. Here a parameter, its gradient and its
state are in memory together once, while the gradient is fresh. NNTrainer trains in this order. It changes when an
update is computed, never how, so the bits are those of the ordinary order wherever an update of one parameter
looks at no other.

[Note: the first step is watched] Whether the rest of the loop allows this order shows only when it runs. So up to the
first `step()` nothing is applied: gradients are left, and what the program does with them is noted. How often each is
added to says how many backward passes make a step. What would differ (clipping by a global norm, a scaler, a second
optimizer's backward pass) is refused there, while everything is still as in the ordinary order.

[Note: why a step finds nothing] `step()` itself is not replaced: with no gradient left, it updates nothing. Its hooks,
its learning-rate scheduler and the session's step boundary work as ever. What was not applied (a gradient that the
program set, a parameter that took part in fewer backward passes) is applied there.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ooc.errors import Refused
from ooc.interop.gradient_access import GradientOwner, find_owner, note_owner, reader, release_owner
from ooc.interop.update_rules import (
    ORDINARY_ORDER,
    as_at_step,
    is_under_autocast,
    require_independent,
    require_one_process,
    require_same_kernel,
    require_same_settings,
    settings_of,
    unhooked,
)
from ooc.tracing.gradients import raw_gradient, set_raw_gradient

_log = logging.getLogger(__name__)


class _Phase(Enum):
    """Where a parameter is between two `zero_grad`s."""

    CLEARED = "no gradient of a backward pass"
    ARRIVED = "a backward pass has given a gradient, and no step() followed yet"
    STEPPED = "step() has come, and zero_grad() has not: the ordinary order would still have the gradient"


class StepInBackward:
    """One optimizer whose updates run inside the backward pass; made by `ooc.step_in_backward`.

    Args:
        optimizer: Not kept alive by this.
        micro_batches: Backward passes to a step; None: as many as the first step has.
        takes_over: Whether a parameter of another such optimizer becomes this one's. (A script may make its optimizer
            anew. That the older one is not used any more shows when it is.)

    Raises:
        Refused: Its updates cannot be computed one by one.
    """

    def __init__(self, optimizer: Optimizer, *, micro_batches: int | None = None, takes_over: bool = False) -> None:
        if micro_batches is not None and micro_batches < 1:
            raise ValueError(f"micro_batches={micro_batches}: backward passes to a step. Options: at least 1; None.")
        require_independent(optimizer)
        require_one_process()
        self._optimizer = weakref.ref(optimizer)
        self._name = type(optimizer).__name__
        self._given = micro_batches
        self._num_passes: int | None = None
        self._takes_over = takes_over
        self._updates: dict[int, _Update] = {}
        self._mixed_groups: set[int] = set()
        self._used: dict[int, dict[str, Any]] = {}
        self._has_begun = False
        self._is_stepping = False
        self._autocasts: bool | None = None
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(self._before_state_dict),
            optimizer.register_load_state_dict_pre_hook(lambda *_: self._before_state_dict(None)),
        ]
        self._end = weakref.finalize(optimizer, _release, self._updates, self._name)
        self._look_at_groups(optimizer)

    def __repr__(self) -> str:
        passes = "watching the first step" if self._num_passes is None else f"{self._num_passes} passes to a step"
        return f"<StepInBackward of {self._name}, {len(self._updates)} parameters, {passes}>"

    @property
    def num_passes(self) -> int | None:
        """Backward passes after which a gradient is applied; None during the first step, which is watched."""
        return self._num_passes

    @property
    def is_ahead(self) -> bool:
        """Whether gradients have been applied that the ordinary order would still have: no `step()` has followed."""
        return any(update.is_applied for update in self._updates.values())

    def remove(self) -> None:
        """Go back to the ordinary order. Idempotent. After `zero_grad()`, and before the next backward pass."""
        self._end()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # -- the step

    def prepare_step(self) -> None:
        """`step()` begins: our hook before it comes last of all, and the one after it first.

        So hooks of the program see, and are refused, what they would be refused elsewhere.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        optimizer._optimizer_step_pre_hooks.move_to_end(self._hooks[0].id)
        optimizer._optimizer_step_post_hooks.move_to_end(self._hooks[1].id, last=False)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._check_step(optimizer)
            return None

        def closure_then_check() -> Any:
            loss = closure()
            self._check_step(optimizer)
            return loss

        return (args[0], closure_then_check, *args[2:]), {k: v for k, v in kwargs.items() if k != "closure"}

    def _check_step(self, optimizer: Optimizer) -> None:
        """Refuse what the ordinary order would do otherwise; then let `step()` read gradients."""
        is_watching = self._num_passes is None
        for update in self._updates.values():
            update.check_step(is_watching=is_watching)
        for index, used in self._used.items():
            require_same_settings(
                self._name, used, optimizer.param_groups[index] if index < len(optimizer.param_groups) else {}
            )
        autocasts = is_under_autocast(optimizer)
        if not is_watching and autocasts is not self._autocasts and self._used:
            raise Refused(
                f"{self._name}.step: autocast is {'on' if autocasts else 'off'} here, and was not so in the "
                f"step before. Options: always call step() outside of autocast; {ORDINARY_ORDER}."
            )
        self._autocasts = autocasts
        self._is_stepping = True

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._is_stepping = False
        most = max((update.num_arrived for update in self._updates.values()), default=0)
        for update in self._updates.values():
            update.stepped(frees=self._num_passes is None)
        if self._num_passes is None and most:
            self._num_passes = self._given or most
            _log.info("%s: updates run inside the backward pass from here on: %r", self._name, self)
        self._used.clear()
        self._has_begun = False
        self._look_at_groups(optimizer)

    def _before_state_dict(self, _: Any) -> None:
        if self.is_ahead:
            raise Refused(
                f"{self._name}.state_dict or load_state_dict, between the backward pass and step(): the updates of "
                f"this step are in the state already. Options: after step(); {ORDINARY_ORDER}."
            )

    # -- the backward pass

    def arrived(self, update: _Update) -> None:
        """A gradient is complete for this backward pass: apply it if it was the last one before a step."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        self._is_stepping = False
        if not self._has_begun:
            self._has_begun = True
            require_one_process()
            self._look_at_groups(optimizer)
        group_index = update.group_index
        if group_index is None:  # taken out of the optimizer
            return
        gradient = raw_gradient(update.tensor)
        if gradient is None:  # a hook of the program has taken it
            return
        update.note_arrival(gradient, counts=not _accumulating.depth)
        limit = self._num_passes if self._num_passes is not None else self._given
        if limit is not None and update.num_arrived > limit:
            raise Refused(_too_many(update, limit))
        group = optimizer.param_groups[group_index]
        if self._num_passes is None:
            self._used[group_index] = settings_of(group)
            return
        if update.num_arrived < self._num_passes or _accumulating.depth:
            return
        if group_index not in self._used:
            self._used[group_index] = settings_of(group)
        require_same_kernel(group, update.tensor, gradient, is_mixed=group_index in self._mixed_groups)
        del gradient
        self._apply(optimizer, group, update)

    def _apply(self, optimizer: Optimizer, group: dict[str, Any], update: _Update) -> None:
        """The optimizer's own step, over one parameter."""
        groups = optimizer.param_groups
        update.is_applied = True
        self._is_stepping = True
        optimizer.param_groups = [{**group, "params": [update.tensor]}]
        try:
            with as_at_step(update.tensor, self._autocasts):
                unhooked(type(optimizer).step)(optimizer)
        finally:
            optimizer.param_groups = groups
            self._is_stepping = False
        set_raw_gradient(update.tensor, None)
        update.note_version()

    def _look_at_groups(self, optimizer: Optimizer) -> None:
        """Find each parameter's group, and the parameters that have come and gone."""
        seen = set()
        self._mixed_groups.clear()
        for index, group in enumerate(optimizer.param_groups):
            if len({tensor.device for tensor in group["params"]}) > 1:
                self._mixed_groups.add(index)
            for tensor in group["params"]:
                seen.add(id(tensor))
                update = self._updates.get(id(tensor))
                if update is None and tensor.requires_grad:
                    update = self._take(tensor)
                if update is not None:
                    update.group_index = index
        if len(seen) == len(self._updates):
            return
        for key, update in self._updates.items():
            if key not in seen:
                update.group_index = None

    def _take(self, tensor: Tensor) -> _Update:
        other = find_owner(tensor)
        if other is not None and not self._takes_over:
            raise Refused(
                f"step_in_backward of a {self._name}: its parameter of shape {tuple(tensor.shape)} belongs to another "
                f"optimizer that runs inside the backward pass, {type(other.optimizer).__name__}. Options: each "
                f"parameter in one optimizer; remove() the other one first; {ORDINARY_ORDER}."
            )
        update = _Update(tensor, self)
        if other is not None:
            update.follow(other)
        self._updates[id(tensor)] = update
        note_owner(update)
        return update

    # -- asked by updates

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer; None if it is gone."""
        return self._optimizer()

    @property
    def is_stepping(self) -> bool:
        """Whether the optimizer itself is reading gradients now."""
        return self._is_stepping

    @property
    def is_watching(self) -> bool:
        """Whether the first step is not over yet."""
        return self._num_passes is None


class _Update:
    """One parameter: how far it is in the present step.

    Attributes:
        group_index: Its group in the optimizer; None if it is in none any more.
        num_arrived: Backward passes of this step that gave it a gradient.
        is_applied: Whether this step's gradient has been applied, and freed.
    """

    def __init__(self, tensor: Tensor, owner: StepInBackward) -> None:
        self.tensor = tensor
        self.group_index: int | None = None
        self.num_arrived = 0
        self.is_applied = False
        self._owner = owner
        self._phase = _Phase.CLEARED
        self._read_by = ""
        self._version = 0
        self._hook = tensor.register_post_accumulate_grad_hook(lambda _: self._owner.arrived(self))

    @property
    def optimizer(self) -> Optimizer | None:
        return self._owner.optimizer

    def follow(self, other: GradientOwner) -> None:
        """Take the parameter over from another optimizer."""
        if other.is_waiting_for_zero_grad:
            self._phase = _Phase.STEPPED
        other.release()

    @property
    def is_waiting_for_zero_grad(self) -> bool:
        return self._phase is _Phase.STEPPED

    def release(self) -> None:
        """Take the hook off the parameter. Idempotent."""
        self._hook.remove()
        release_owner(self)

    # -- what the step does

    def note_arrival(self, gradient: Tensor, *, counts: bool) -> None:
        """A backward pass has added its gradient."""
        if gradient.requires_grad:
            raise Refused(
                f"{self._place()}: its gradient has a graph of its own (backward(create_graph=True)), which its update "
                f"would change. Options: torch.autograd.grad for the inner derivative; {ORDINARY_ORDER}."
            )
        if self._phase is _Phase.STEPPED:
            raise Refused(
                f"{self._place()}: a backward pass gives it a gradient, and since step() nothing has cleared the one "
                "before, to which the ordinary order would add. Two causes: zero_grad() is not called between steps; "
                "or the loss of another optimizer comes this way, as a generator's does through its discriminator. "
                f"Options: zero_grad() after step(); requires_grad_(False) meanwhile; {ORDINARY_ORDER}."
            )
        if self.is_applied:
            raise Refused(_too_many(self, self._owner.num_passes or 1))
        self._phase = _Phase.ARRIVED
        self._read_by = ""
        self.num_arrived += counts
        self._version = self.tensor._version

    def note_version(self) -> None:
        """The update is done. Autograd must see that the parameter changed: fused kernels do not say so."""
        if self.tensor._version == self._version:
            torch.autograd.graph.increment_version(self.tensor)
        self._version = self.tensor._version

    def check_step(self, *, is_watching: bool) -> None:
        """`step()` begins: refuse it if the ordinary order would compute something else."""
        if self._phase is _Phase.STEPPED and raw_gradient(self.tensor) is None:
            raise Refused(
                f"{self._place()}: a second step() without a backward pass or zero_grad() in between. The ordinary "
                "order would apply the same gradient again, and it is gone. Options: one step() for each backward "
                f"pass; {ORDINARY_ORDER}."
            )
        if self._phase is not _Phase.ARRIVED:
            return
        if is_watching and self._read_by:
            raise Refused(_was_read(self._place(), self._read_by))
        if (is_watching or self.is_applied) and self.tensor._version != self._version:
            raise Refused(
                f"{self._place()}: it was changed between the backward pass and step(), and would have been updated "
                f"before that instead of after it. Options: change it after step(); {ORDINARY_ORDER}."
            )

    def stepped(self, *, frees: bool) -> None:
        """`step()` is over. Free the gradient, so that a watched step ends as all that follow begin."""
        if self._phase is _Phase.ARRIVED:
            self._phase = _Phase.STEPPED
            if frees:
                set_raw_gradient(self.tensor, None)
        self.num_arrived = 0
        self.is_applied = False
        self._read_by = ""

    # -- what the program does: see `ooc.interop.gradient_access.GradientOwner`

    def before_read(self) -> None:
        if self._owner.is_stepping:
            return
        if self.is_applied or self._phase is _Phase.STEPPED:
            raise Refused(_was_read(self._place(), reader()))
        if self._owner.is_watching and self._phase is _Phase.ARRIVED:
            self._read_by = self._read_by or reader()

    def before_write(self, *, clears: bool) -> None:
        if self._phase is _Phase.STEPPED:
            self._phase = _Phase.CLEARED
        elif self._phase is _Phase.ARRIVED and not self._owner.is_stepping:
            what = "cleared" if clears else "set"
            raise Refused(
                f"{self._place()}: its gradient is {what} by {reader()} between the backward pass and step(), and was "
                f"to be applied inside the backward pass. Options: zero_grad() after step(); {ORDINARY_ORDER}."
            )

    def before_zero_grad(self, *, set_to_none: bool) -> None:
        if self._phase is _Phase.STEPPED and not set_to_none:
            raise Refused(
                "zero_grad(set_to_none=False): it would leave gradients of zeros, and there are none. Options: "
                f"zero_grad(), whose gradients of None are torch's default; {ORDINARY_ORDER}."
            )
        self.before_write(clears=True)

    def before_step(self) -> None:
        self._owner.prepare_step()

    def _place(self) -> str:
        optimizer = self.optimizer
        return f"step_in_backward of {type(optimizer).__name__}, parameter of shape {tuple(self.tensor.shape)}"


class _Accumulating:
    depth = 0


_accumulating = _Accumulating()


@contextlib.contextmanager
def accumulating() -> Iterator[None]:
    """Within this, backward passes only add up gradients; they are applied in the first one after it."""
    _accumulating.depth += 1
    try:
        yield
    finally:
        _accumulating.depth -= 1


def step_in_backward(optimizer: Optimizer, *, micro_batches: int | None = None) -> StepInBackward:
    """Let an optimizer apply each gradient inside the backward pass, as soon as it is complete, and free it.

    The loop stays as it is: `step()` ends the step, and `zero_grad()` clears nothing. The first step is taken in the
    ordinary order and watched. The results are those of the ordinary order, to the last bit. Between the backward
    pass and `step()` the program must not use the parameters: they are new already.

    Args:
        optimizer: One of `torch.optim` whose update of one parameter looks at no other: SGD, Adam, AdamW, Adagrad,
            RMSprop and others.
        micro_batches: Backward passes to a step, where gradients are accumulated; None: as many as the first step has.
            Where that varies, the most: a step that has fewer ends in the ordinary order.

    Returns:
        A handle, whose `remove()` goes back to the ordinary order.

    Raises:
        Refused: The optimizer cannot be applied so (LBFGS, for one), or processes share the gradients. Later, from the
            backward pass or `step()`, where the loop does what this order cannot: clips by a global norm, scales
            gradients, reads or changes them, or changes the learning rate between the two.
    """
    return StepInBackward(optimizer, micro_batches=micro_batches)


@contextlib.contextmanager
def every_optimizer_in_backward(*, micro_batches: int | None = None) -> Iterator[None]:
    """Do so with every optimizer that is made within this; `micro_batches` as there."""
    before: Callable[..., None] = Optimizer.__init__

    @functools.wraps(before)
    def ours(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        StepInBackward(self, micro_batches=micro_batches, takes_over=True)

    Optimizer.__init__ = ours
    try:
        yield
    finally:
        if Optimizer.__init__ is ours:
            Optimizer.__init__ = before


def _release(updates: dict[int, _Update], name: str) -> None:
    """The end: of the optimizer, of this order, or of the process."""
    if any(update.is_applied for update in updates.values()):
        _log.warning(
            "step_in_backward of %s: parameters were updated in a last backward pass that no step() followed; in the "
            "ordinary order they would not have been",
            name,
        )
    for update in updates.values():
        update.release()
    updates.clear()


def _too_many(update: _Update, num_passes: int) -> str:
    expected = f"{num_passes} backward passes" if num_passes > 1 else "backward pass"
    return (
        f"{update._place()}: a gradient comes after the {expected} that a step was to have. Options: with the most "
        "backward passes that a step has as N, ooc run --step-in-backward=N, or in the program "
        "step_in_backward(optimizer, micro_batches=N); there ooc.accumulating() around all but the last; "
        f"{ORDINARY_ORDER}."
    )


def _was_read(place: str, who: str) -> str:
    return (
        f"{place}: its gradient is read between the backward pass and zero_grad(), by {who}. It is applied and freed "
        "inside the backward pass, so clipping by a global norm, a gradient scaler and logs of gradients find nothing. "
        "Options: no clipping (a max_norm of 0 or None, as the program has it); "
        "Tensor.register_post_accumulate_grad_hook, made before the optimizer, for what needs one parameter's gradient "
        f"alone; {ORDINARY_ORDER}."
    )
