"""What is refused does not fit, as it is written; and the smallest budget that is named works."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from scheduler.budget import BudgetTooSmall, smallest_num_chunks
from scheduler.planning import make_plan
from scheduler.policies import _rerun_policies
from scheduler.trace import Op, Trace, Use, Variable
from tests.scheduler.model_traces import conv_net
from tests.scheduler.random_traces import TIMES, random_machine, random_trace, replayable

MIB = 1 << 20
# The policy, and how many steps it is tried on: `auto` and `window` search for longer.
POLICIES_TRIED = {
    "auto": 4,
    "on_demand": 16,
    "window": 4,
    "capuchin": 10,
    "dtr": 12,
    "melon": 12,
    "sublinear": 8,
    "lms": 8,
    "vdnn": 8,
    "nntrainer": 8,
}


def read_amount(text: str) -> float:
    """Bytes, as a person reads them."""
    number, unit = text.split()
    return float(number) * {"MiB": MIB, "bytes": 1}[unit]


def check(refused: BudgetTooSmall) -> None:
    """The need is larger than the budget, in bytes and as it is written; few variables are named."""
    assert refused.needed_nbytes > refused.budget_nbytes
    assert refused.smallest_budget_nbytes > refused.budget_nbytes
    said = str(refused)
    amounts = re.search(r"needs ([\d.]+ \w+) at once.*; the budget is ([\d.]+ \w+)\.", said)
    assert amounts is not None
    assert read_amount(amounts[1]) > read_amount(amounts[2])
    advised = re.search(r"budget >= ([\d.]+ \w+)", said)
    assert advised is not None and read_amount(advised[1]) >= refused.smallest_budget_nbytes
    assert said.count("MiB") + said.count("bytes") <= 20


@pytest.mark.parametrize("policy", POLICIES_TRIED)
def test_a_refusal_names_a_need_above_the_budget_and_a_budget_that_works(policy: str) -> None:
    num_refused = 0
    for seed in range(POLICIES_TRIED[policy] * TIMES):
        trace = random_trace(seed, num_ops=10, not_evictable=seed % 2 == 0)
        trace = replace(trace, ops=tuple(replace(op, replayable=seed % 3 > 0) for op in trace.ops))
        machine = random_machine(seed, 0)
        least = smallest_num_chunks(trace, machine)
        for num_chunks in {max(least - 1, 0), least}:
            small = replace(machine, num_chunks=num_chunks)
            try:
                make_plan(trace, small, policy)
            except BudgetTooSmall as refused:
                num_refused += 1
                check(refused)
                works = refused.smallest_budget_nbytes // machine.chunk_nbytes
                make_plan(trace, replace(machine, num_chunks=works), policy)  # verifies
    assert num_refused


def test_no_budget_is_looked_for_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` asks policies that find no plan; each of them tried up to 20 budgets, for its refusal's sake."""
    trace = replayable(conv_net(num_blocks=3))
    machine = replace(random_machine(0, 0), chunk_nbytes=MIB, load_bytes_per_s=1e9, evict_bytes_per_s=1e9)
    machine = replace(machine, num_chunks=smallest_num_chunks(trace, machine))
    searched = []

    def smallest(*_: object) -> int:
        searched.append(1)
        return machine.num_chunks + 1

    monkeypatch.setattr(_rerun_policies, "_smallest", smallest)
    make_plan(trace, machine, "auto", recompute=True)
    assert not searched
    with pytest.raises(BudgetTooSmall):
        make_plan(trace, machine, "melon")
    assert len(searched) == 1, "of one refusal that is read, one budget"


@pytest.mark.parametrize("missing_nbytes", [1, 20_000, 60_000])
def test_a_need_slightly_above_the_budget_is_not_written_as_the_same(missing_nbytes: int) -> None:
    """It used to say that an op "needs 108.0 MiB at once; the budget is 108.0 MiB"."""
    trace = with_many_fixed(0, 108 * MIB + missing_nbytes)
    machine = replace(random_machine(0, 0), chunk_nbytes=1, num_chunks=108 * MIB)
    with pytest.raises(BudgetTooSmall, match=r"needs 108\.1 MiB at once; the budget is 108\.0 MiB") as refused:
        make_plan(trace, machine)
    check(refused.value)


def with_many_fixed(num_fixed: int, nbytes: int) -> Trace:
    """One op that reads x and makes y, beside variables that no op reads and that can never be away."""
    fixed = [
        Variable(nbytes=MIB, birth_tick=None, death_tick=None, becomes=v, evictable=False) for v in range(num_fixed)
    ]
    x = Variable(nbytes=nbytes - MIB, birth_tick=None, death_tick=None, becomes=num_fixed, label="x")
    y = Variable(nbytes=MIB, birth_tick=1, death_tick=3, label="y")
    uses = (Use(variable=num_fixed, reads=True, writes=False), Use(variable=num_fixed + 1, reads=False, writes=True))
    op = Op(name="add", start_tick=0, stop_tick=2, duration_ns=1000, uses=uses)
    return Trace(ops=(op,), variables=(*fixed, x, y), num_ticks=4)


def test_what_can_never_be_away_is_not_listed_as_an_operand() -> None:
    """Of an `add` 71 operands used to be listed: all that the step could not move."""
    trace = with_many_fixed(71, 8 * MIB)
    machine = replace(random_machine(0, 0), chunk_nbytes=MIB, num_chunks=70)
    with pytest.raises(BudgetTooSmall) as refused:
        make_plan(trace, machine)
    assert refused.value.operands == (("x", 7 * MIB), ("y", MIB))
    assert refused.value.fixed == (71, 71 * MIB)
    assert refused.value.needed_nbytes == 79 * MIB
    assert "  operands: x 7.0 MiB, y 1.0 MiB\n  beside what can never be away: 71 more, 71.0 MiB\n" in str(
        refused.value
    )


def test_what_only_chunks_make_too_large_says_so() -> None:
    """Thirty operands of 10 KiB in chunks of 2 MiB: it said "needs 60.0 MiB", and listed 0.3 MiB."""
    num = 30
    variables = tuple(
        Variable(nbytes=10 << 10, birth_tick=None, death_tick=None, becomes=v, label=f"w{v}") for v in range(num)
    )
    uses = tuple(Use(variable=v, reads=True, writes=False) for v in range(num))
    op = Op(name="stack", start_tick=0, stop_tick=2, duration_ns=1, uses=uses)
    trace = Trace(ops=(op,), variables=variables, num_ticks=3)
    machine = replace(random_machine(0, 0), chunk_nbytes=2 * MIB, num_chunks=20)
    with pytest.raises(BudgetTooSmall) as refused:
        make_plan(trace, machine)
    assert refused.value.rounding_nbytes == num * (2 * MIB - (10 << 10))
    said = str(refused.value)
    assert "needs 60.0 MiB at once; the budget is 40.0 MiB" in said
    assert ", and 18 more\n  rounded up to chunks of 2.0 MiB, " in said and ": 59.7 MiB of it" in said
    assert "; smaller chunks; a smaller batch" in said
    with pytest.raises(BudgetTooSmall) as refused:  # where bytes are too many, chunks are not named
        make_plan(with_many_fixed(0, 108 * MIB), replace(machine, num_chunks=50))
    assert "chunks" not in str(refused.value)
