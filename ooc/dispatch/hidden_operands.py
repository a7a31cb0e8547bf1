"""Ops that keep an operand where no later op names it: within an object of torch's, or a tensor's quantizer.

`quantized::linear_prepack` keeps the bias within an object, and `quantized::linear_dynamic`, which is given the object,
reads it. So such tensors count as given out (`ooc.interop.exports`) from that op on until they are freed: their
addresses show their bytes at any time, in memory or not.

Not seen: what a method of such an object is given in Python, which runs no op (`__setstate__` when one is loaded).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ooc.dispatch.python_bodies import has_python_body, run_watched
from ooc.memory.record import VariableRecord
from ooc.replay.dispatcher import Dispatcher
from ooc.tracing.collective_ops import is_collective

__all__ = ["HiddenOperands", "hides_operands", "uses_unnamed"]

_BY_QUANTIZERS = frozenset(
    {
        "aten::quantize_per_channel",
        "aten::_empty_per_channel_affine_quantized",
        "aten::_make_per_channel_quantized_tensor",
        "aten::q_per_channel_scales",  # this one and the next give what a quantizer has
        "aten::q_per_channel_zero_points",
    }
)

_READERS = frozenset({"aten", "quantized", "_quantized", "sparse", "mkldnn_prepacked", "prepacked", "profiler"})
"""Namespaces whose ops keep no tensor within an object that they are given: they make it with all that it has."""


class HiddenOperands:
    """Runs ops that hide operands, and those that are Python functions.

    Attributes:
        give_out: Told the address of each variable that is hidden, or used unnamed. Returns its record, if it has one.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.give_out: Callable[[int], VariableRecord | None] = lambda _address: None

    def __repr__(self) -> str:
        return f"<HiddenOperands, told to {self.give_out!r}>"

    def run(
        self,
        run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run an op, whatever it is, and give out what it hides, or uses unnamed."""
        if has_python_body(func):
            run = functools.partial(run_watched, run, dispatcher=self._dispatcher, give_out=self._give_out_seen)
        result = run(func, args, kwargs)
        if hides_operands(func):
            for address in self._dispatcher.operands(*args, *kwargs.values(), result):
                self.give_out(address)
        return result

    def _give_out_seen(self, address: int) -> None:
        """Give out what an op within a Python function names: a cache of its own is no workspace, and may move."""
        record = self.give_out(address)
        if record is not None:
            record.note_seen()


def uses_unnamed(func: Any) -> bool:
    """Whether an op or a later one may use what no op names: it hides operands, or is a Python function."""
    return hides_operands(func) or has_python_body(func)


@functools.cache
def hides_operands(func: Any) -> bool:
    """Whether what an op is given, or what it returns, may be used by later ops that do not name it."""
    schema = getattr(func, "_schema", None)
    if schema is None or is_collective(func):
        return False
    if schema.name in _BY_QUANTIZERS:
        return True
    given, made = ([value.type for value in values] for values in (schema.arguments, getattr(schema, "returns", ())))
    takes_tensors, takes_object = any(map(_has_tensor, given)), any(map(_has_object, given))
    if any(map(_has_object, made)) or (takes_object and func.namespace not in _READERS):
        return takes_tensors
    return takes_object and not takes_tensors and any(map(_has_tensor, made))  # they may be what the object has


def _has_object(kind: Any) -> bool:
    return kind.kind() in ("ClassType", "InterfaceType") or any(map(_has_object, kind.containedTypes()))


def _has_tensor(kind: Any) -> bool:
    return isinstance(kind, torch.TensorType) or any(map(_has_tensor, kind.containedTypes()))
