"""Explains why an op does not fit the budget, by the names of parameters and modules and by shapes.

All of this is looked up after the op has failed, so a step that fits pays nothing for it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from ooc.dispatch.dry_run import DryRun
from ooc.dispatch.expected_need import ExpectedNeed
from ooc.errors import BudgetTooSmall
from ooc.memory.no_room import NoRoom
from ooc.memory.record import VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.tracing.gradients import raw_gradient
from ooc.tracing.heap import instances_of, modules_and_optimizers
from ooc.tracing.op_semantics import REGION_NAMESPACE
from ooc.tracing.recorded_ops import OpRecord


def budget_too_small(
    *,
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    operands: Sequence[VariableRecord],
    no_room: NoRoom,
    new_nbytes: int,
    manager: ResidencyManager,
    earlier_ops: Sequence[OpRecord],
    address_of: Callable[[Any], int],
    threshold_nbytes: int,
    place: str,
    earlier_needed_nbytes: int = 0,
    expect: Callable[[str, int, Sequence[int], Sequence[int]], ExpectedNeed | None] = lambda *_: None,
) -> BudgetTooSmall:
    """Make the error for an op whose operands, or an allocation of `new_nbytes`, did not fit the budget.

    The budget that it asks for is the larger of two lower bounds: what had to be in memory together
    when the op failed, and operands and results together, which every op needs at its end.

    Args:
        func, args, kwargs: The op.
        operands: Records that it had pinned.
        no_room: The pool's refusal.
        new_nbytes: The allocation that failed, 0 if it was an operand's load.
        manager: Knows what else cannot be evicted.
        earlier_ops: Ops of the step so far; their number is the op's index.
        address_of: A tensor's storage address in the arena, else 0.
        threshold_nbytes: Smaller storages are not counted.
        place: Where in the program the op is (`ooc.tracing.call_sites`).
        earlier_needed_nbytes: The largest need refused before.
        expect: Guesses what the rest of the step needs, from this op, its need, and the sizes of operands and results.
    """
    names = _names(address_of)
    tensors = _operand_tensors(func, args, kwargs, address_of)
    pinned = {id(record): record for record in operands}
    must_stay = [
        record
        for record in manager.records.values()
        if id(record) not in pinned and record.state.holds_chunks and (record.pins or not record.seen)
    ]
    listed = [(_label(record, names, tensors, earlier_ops), record.nbytes) for record in operands]
    listed += [(_label(record, names, tensors, earlier_ops), record.nbytes) for record in must_stay]
    results = _result_sizes(func, args, kwargs, threshold_nbytes)
    made = {record.nbytes for record in must_stay}
    if new_nbytes:
        what = "result" if new_nbytes in results else "temporary"
        listed.append((f"{what} being allocated", new_nbytes))
    listed += [("result still to come", nbytes) for nbytes in results if nbytes != new_nbytes and nbytes not in made]
    together = no_room.num_needed + no_room.num_pinned
    at_its_end = sum(map(manager.chunks_of, [r.nbytes for r in operands] + results))
    needed_nbytes = max(together, at_its_end) * manager.chunk_nbytes
    unnamed = together - sum(manager.chunks_of(nbytes) for _, nbytes in listed)
    if unnamed > 0:  # freed while the op was left
        listed.append(("what the op had allocated for itself", unnamed * manager.chunk_nbytes))
    expected = None
    with contextlib.suppress(Exception):  # a guess, about a step that has just failed: no reason to fail otherwise
        expected = expect(str(func), needed_nbytes, [record.nbytes for record in operands], results)
    return BudgetTooSmall(
        op_index=len(earlier_ops),
        op_name=str(func),
        where=_where(place, tensors, names),
        needed_nbytes=needed_nbytes,
        budget_nbytes=manager.num_chunks * manager.chunk_nbytes,
        operands=listed,
        is_at_least=unnamed > 0 or (new_nbytes > 0 and bool(results) and new_nbytes not in results),
        earlier_needed_nbytes=earlier_needed_nbytes,
        expected_nbytes=expected.nbytes if expected is not None else 0,
        expected_for=expected.reason if expected is not None else "",
        advice=_advice(str(func)),
        look_ahead=_dry_run(manager, address_of, threshold_nbytes, 0 if operands else needed_nbytes).look_ahead,
    )


def _dry_run(
    manager: ResidencyManager, address_of: Callable[[Any], int], threshold_nbytes: int, created_nbytes: int
) -> DryRun:
    is_autocast = torch.is_autocast_enabled("cpu")
    return DryRun(
        budget_nbytes=manager.num_chunks * manager.chunk_nbytes,
        chunk_nbytes=manager.chunk_nbytes,
        threshold_nbytes=threshold_nbytes,
        has_gradients=torch.is_grad_enabled() or torch._C._current_autograd_node() is not None,
        autocast_dtype=torch.get_autocast_dtype("cpu") if is_autocast else None,
        optimizers=tuple(
            weakref.ref(found)
            for found in instances_of(torch.optim.Optimizer)
            if any(
                address_of(parameter) in manager.records
                for group in found.param_groups
                for parameter in group["params"]
            )
        ),
        created_nbytes=created_nbytes,
    )


_DATA_PARALLEL = os.path.join("torch", "nn", "parallel", "distributed.py")


def _advice(op_name: str) -> str:
    """What avoids an op's need where more is known than its operands.

    That of a compiled region, or an allocation of DistributedDataParallel's own, which does not grow with the batch.
    """
    if op_name.startswith(REGION_NAMESPACE):
        return (
            "This is one compiled region: what it uses, makes and keeps for the backward pass is in memory together. "
            "Options: compile smaller blocks (block.compile())."
        )
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith(_DATA_PARALLEL):
            if frame.f_code.co_name == "_sync_final_model":
                return (
                    "This is the broadcast at the end of DistributedDataParallel.join(), which copies the model "
                    "together (250 MiB at a time). Options: batches of equal number on all ranks, without join()."
                )
            if frame.f_code.co_name == "__init__" and "cat" in op_name:
                return (
                    "This is the broadcast in DistributedDataParallel's constructor, which copies the model together: "
                    "250 MiB at a time where a rank has no session, else an eighth of the least budget, or one tensor. "
                    "Options: a session on each rank; init_sync=False, with equal weights on all ranks (a seed, a "
                    "checkpoint)."
                )
            if frame.f_code.co_name in ("__init__", "_ddp_init_helper"):
                return (
                    "This is DistributedDataParallel's first bucket: all gradients together, whatever bucket_cap_mb "
                    "says, until it sorts them anew after the first step. Options: bucket_cap_mb_list=[1, 25], or "
                    "find_unused_parameters=True, which make small ones from the start."
                )
            if frame.f_code.co_name in ("_pre_forward", "_rebuild_buckets", "_sync_buffers"):
                return (
                    "This is memory of DistributedDataParallel's own: its buckets, or its broadcast of buffers. "
                    "Options: a smaller bucket_cap_mb; gradient_as_bucket_view=True; broadcast_buffers=False, where "
                    "they are equal on all ranks."
                )
        frame = frame.f_back
    return ""


def _operand_tensors(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], address_of: Callable[[Any], int]
) -> dict[int, tuple[str, torch.Tensor]]:
    """Each operand by its storage address: the argument's name in the op's schema, and the tensor."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        values = value if isinstance(value, list | tuple) else [value]
        for item in values:
            if isinstance(item, torch.Tensor) and (address := address_of(item)):
                found.setdefault(address, (argument.name, item))
    return found


def _label(
    record: VariableRecord,
    names: Mapping[int, str],
    tensors: Mapping[int, tuple[str, torch.Tensor]],
    earlier_ops: Sequence[OpRecord],
) -> str:
    """A tensor in a line, such as `weight (layers.3.weight) float32[4096, 4096]`."""
    name = names.get(record.address, "")
    if record.address not in tensors and not record.seen:
        return "allocated in this op"
    if not name:
        for index in range(len(earlier_ops) - 1, -1, -1):
            op = earlier_ops[index]
            if record.address in op.results and record.address not in op.occurrences:
                name = f"made by op {index}, {op.func}{f', {op.where}' if op.where else ''}"
                break
    if record.address not in tensors:
        return name or record.label or "memory given out or in use"
    argument, tensor = tensors[record.address]
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{argument}{f' ({name})' if name else ''} {dtype}{shape_of(tensor)}"


def shape_of(tensor: torch.Tensor) -> str:
    """A tensor's shape for a message; a nested tensor of torch's older kind refuses to tell one."""
    return "[nested]" if tensor.is_nested and tensor.layout is torch.strided else str(list(tensor.shape))


def _result_sizes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], threshold_nbytes: int) -> list[int]:
    """Sizes of the op's new results, found by running it on tensors without data; empty where that fails."""

    def without_data(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    # Any op may refuse tensors without data, each in its own way; then there is no second bound.
    with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):  # it is not the program's call
        arguments = tree_map(without_data, (tuple(args), dict(kwargs)))
        results = func(*arguments[0], **arguments[1])
        known = {storage_of(t) for t in _tensors(arguments)}
        made = {storage_of(t): t.untyped_storage().nbytes() for t in _tensors(results)}
        return [nbytes for key, nbytes in made.items() if key not in known and nbytes >= threshold_nbytes]
    return []


def storage_of(tensor: torch.Tensor) -> int:
    """An identity of a tensor's storage, also of one without data."""
    return int(tensor.untyped_storage()._cdata)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor))


def _names(address_of: Callable[[Any], int]) -> dict[int, str]:
    """Names of parameters, buffers, gradients and optimizer state, by storage address."""
    found: dict[int, str] = {}
    by_parameter: dict[int, str] = {}
    modules, optimizers = modules_and_optimizers()
    for root in _roots(modules):
        for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
            by_parameter.setdefault(id(tensor), name)
            found.setdefault(address_of(tensor), name)
            if isinstance(tensor, nn.Parameter) and (gradient := raw_gradient(tensor)) is not None:
                found.setdefault(address_of(gradient), f"gradient of {name}")
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    found.setdefault(address_of(value), f"{key} of {by_parameter.get(id(parameter), 'a parameter')}")
    found.pop(0, None)
    return found


def _roots(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules that are not part of another one."""
    modules = list(modules)
    children = {id(child) for module in modules for child in module._modules.values() if child is not None}
    return [module for module in modules if id(module) not in children]


def _where(place: str, tensors: Mapping[int, tuple[str, torch.Tensor]], names: Mapping[int, str]) -> str:
    """Where in the program the op is; where that names no module, with the module that owns one of its parameters."""
    owners = (names.get(address, "").rpartition(" of ")[2].rpartition(".")[0] for address in tensors)
    owner = next((owner for owner in owners if owner), "")
    if not owner or ("(" in place and not place.startswith("backward (")):
        return place
    return f"{owner}, {place}" if place else owner
