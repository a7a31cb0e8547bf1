"""Parts of a list op take the route that CUDA would take for the whole list; on fake tensors, which have no bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ooc.tracing import op_semantics as ops
from ooc.tracing.list_routes import LoopedOp

MUL = torch.ops.aten._foreach_mul_.List


def _parts(lists: Sequence[Sequence[Tensor]], func: Any = MUL) -> list[tuple[Any, int]]:
    """What is called for how many tensors, one tensor's bytes at a time."""
    called: list[tuple[Any, int]] = []
    ops.run_list_op(
        func, tuple(lists), {}, limit_nbytes=1, run=lambda func, args, _: called.append((func, len(args[0])))
    )
    return called


def _lists(second: Sequence[Tensor], **options: Any) -> list[list[Tensor]]:
    return [[torch.empty(2, 3, 4, 4, device="cuda", **options) for _ in second], list(second)]


def _dense(*shape: int, **options: Any) -> Tensor:
    return torch.empty(*shape, device="cuda", **options)


def test_alike_tensors_keep_the_kernel() -> None:
    with FakeTensorMode():
        assert _parts(_lists([_dense(2, 3, 4, 4)] * 3)) == [(MUL, 1)] * 3
        last = [t.to(memory_format=torch.channels_last) for t in _lists([_dense(2, 3, 4, 4)] * 3)[0]]
        assert _parts([last, last]) == [(MUL, 1)] * 3


@pytest.mark.parametrize("kind", ["strides", "dtype", "own dtype", "gaps"])
def test_one_tensor_that_differs_sends_all_parts_through_the_loop(kind: str) -> None:
    with FakeTensorMode():
        alike = [_dense(2, 3, 4, 4) for _ in range(2)]
        lists = {
            "strides": lambda: _lists([*alike, _dense(2, 3, 4, 4).to(memory_format=torch.channels_last)]),
            "dtype": lambda: _lists([*alike, _dense(2, 3, 4, 4, dtype=torch.float64)]),
            "own dtype": lambda: [[*alike, _dense(5, dtype=torch.float64)]] * 2,
            "gaps": lambda: [[*alike, torch.empty_strided((2, 3, 4, 4), (96, 32, 8, 2), device="cuda")]] * 2,
        }[kind]()
        found = _parts(lists)
    assert [count for _, count in found] == [1, 1, 1]
    assert len({id(func) for func, _ in found}) == 1  # plans compare ops by identity
    looped = found[0][0]
    assert isinstance(looped, LoopedOp) and looped._schema is MUL._schema and str(looped) == f"{MUL} (looped)"


def test_the_host_has_one_route() -> None:
    mixed = [[torch.ones(2), torch.ones(2, dtype=torch.float64)]] * 2
    assert _parts(mixed) == [(MUL, 1)] * 2


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (MUL, ([1.5, 2.0], [3.0, 0.5])),
        (torch.ops.aten._foreach_addcdiv_.ScalarList, ([1.5, 2.0], [3.0, 0.5], [0.1, 7.0], (0.3, 0.4))),
        (torch.ops.aten._foreach_lerp_.Scalar, ([1.5, 2.0], [3.0, 0.5], 0.1)),
        (torch.ops.aten._foreach_norm.Scalar, ([-1.5, 2.0], 1)),
    ],
)
def test_the_loop_does_what_the_op_does(op: Any, args: tuple[Any, ...]) -> None:
    def made() -> list[Any]:
        return [[torch.full((3,), x) for x in value] if isinstance(value, list) else value for value in args]

    expected, found = made(), made()
    looped = LoopedOp(op)
    first, second = op(*expected), looped(*found)
    for a, b in zip(first or expected[0], second or found[0], strict=True):
        assert torch.equal(a, b)
