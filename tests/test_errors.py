"""What errors say."""

from __future__ import annotations

import pytest

from ooc.errors import BudgetTooSmall

MIB = 1 << 20


def refusal(needed_nbytes: int, budget_nbytes: int) -> str:
    """The first line."""
    error = BudgetTooSmall(
        op_index=3, op_name="aten.add", where="train.py:7", needed_nbytes=needed_nbytes, budget_nbytes=budget_nbytes
    )
    return str(error).splitlines()[0]


@pytest.mark.parametrize("missing_nbytes", [4096, 65536, 20 * MIB])
def test_a_need_slightly_above_the_budget_does_not_read_as_if_it_fitted(missing_nbytes: int) -> None:
    """Of 2 GiB and some MiB it said "needs 2.0 GiB at once; the budget is 2.0 GiB"."""
    said = refusal(2048 * MIB + missing_nbytes, 2048 * MIB)
    assert said.startswith("op 3 (aten.add, train.py:7) needs 2.0 GiB (")
    assert said.endswith(" more than there is) at once; the budget is 2.0 GiB.")


def test_a_need_far_above_the_budget_is_said_as_ever() -> None:
    assert refusal(96 * MIB, 64 * MIB).endswith("needs 96.0 MiB at once; the budget is 64.0 MiB.")
