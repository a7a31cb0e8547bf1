"""Why steps were not planned: of the report, of the progress line, and as a hint at the end."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args

import pytest
import torch
from torch import nn

import ooc
from ooc.replay.learning_budget import LearningBudget
from ooc.replay.sequences import Sequences
from ooc.reporting.hints import _REMEDIES, NO_STEP, hint, planned_share, trains_elsewhere
from ooc.telemetry.why import _MOST_COMPARED, Cause, UnplannedSteps, compare
from ooc.tracing.recorded_ops import OpRecord
from tests.session.program_segments import forced_segments
from vmm.torch_cpu import ALLOC, Event

KIB = 1 << 10


def op(name: str) -> OpRecord:
    return OpRecord(func=name, where=f"{name}.py:1", occurrences=(), written=())


def made(index: int, nbytes: int) -> Event:
    return Event(address=nbytes, nbytes=nbytes, kind=ALLOC, position=2 * index + 1)


OPS = [FIRST := op("mm"), op("relu"), op("sum")]


class Recorded(NamedTuple):
    ops: list[OpRecord]
    events: list[Event]

    @property
    def num_ops(self) -> int:
        return len(self.ops)

    def funcs(self) -> list[Any]:
        return [op.func for op in self.ops]

    def op(self, index: int) -> OpRecord:
        return self.ops[index]


def test_another_op() -> None:
    reason = compare(Recorded(OPS, []), Recorded([FIRST, op("sin")], []))
    assert reason.cause == "ops"
    assert reason.text == "op 1 (sin, sin.py:1) came, where the step before had relu (relu.py:1)"


def test_another_size() -> None:
    events = [made(0, 64 * KIB), made(1, 128 * KIB)]
    other = [made(0, 64 * KIB), made(1, 192 * KIB)]
    reason = compare(Recorded(OPS, events), Recorded(OPS, other))
    assert reason.cause == "sizes"
    assert "op 1 (relu, relu.py:1) made 192.0 KiB, 128.0 KiB in the step before" in reason.text


def test_a_size_that_crossed_the_threshold() -> None:
    before, now = [made(0, 64 * KIB), made(2, 64 * KIB)], [made(0, 64 * KIB), made(1, 64 * KIB)]
    reason = compare(Recorded(OPS, before), Recorded(OPS, now))
    assert reason.cause == "sizes"
    assert "op 1 (relu, relu.py:1) made 64.0 KiB here, and not in the step before" in reason.text


def test_equal_steps() -> None:
    events = [made(0, 64 * KIB)]
    assert compare(Recorded(OPS, events), Recorded(OPS[:2], events)).cause == "again"


def _rows(lengths: list[int], *, skip: int | None = None, is_elastic: bool = True) -> list[dict[str, Any]]:
    with ooc.Session("8MiB", step_boundary="optimizer") as session:
        session.engine.sequences._is_elastic = is_elastic
        model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, length in enumerate(lengths):
            x = model(torch.ones(length, 128))
            if number == skip:
                x = torch.sin(x)
            x.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        report = session.report()
        rows: list[dict[str, Any]] = report["steps"]
        rows.append({"hint": report["hint"]})
        return rows


def test_steps_of_other_lengths_say_so_and_the_hint_names_the_remedy() -> None:
    *rows, last = _rows([200, 220, 250, 280, 310, 340, 370], is_elastic=False)
    assert [row["cause"] for row in rows[:2]] == ["first"] * 2
    assert "made the model" in rows[1]["why"]
    assert [row["cause"] for row in rows[2:]] == ["sizes"] * 5
    assert "test_why.py" in rows[3]["why"]
    assert "multiple of 16" in last["hint"]
    assert "For example: the same ops on other sizes" in last["hint"]
    assert "--budget" not in last["hint"]  # all fits


def test_the_hint_says_what_would_fit_where_not_all_does() -> None:
    step = {"mode": "learning", "duration_s": 1.0, "num_planned_ops": 0, "num_demand_ops": 9, "cause": "ops", "why": ""}
    report = {"steps": [step] * 8, "budget_nbytes": 8 * 1024 * KIB, "in_core_peak_nbytes": 8 * 1024 * KIB + 1}
    assert (hint(report) or "").endswith(
        ". The nearer --budget is to 9MiB, what its tensors take at once, the less moves"
    )
    assert "--budget" not in (hint({**report, "in_core_peak_nbytes": 8 * 1024 * KIB}) or "")


def test_segments_of_other_lengths_say_so_too() -> None:
    """Once whole steps have never come again, segments are planned, and compared."""
    with forced_segments():
        *rows, last = _rows([200, 220, 250, 280, 310, 340, 370], is_elastic=False)
    assert [row["cause"] for row in rows[3:]] == ["sizes"] * 4
    assert "ops was not planned: the same ops on other sizes: op" in rows[4]["why"]
    assert "test_why.py" in rows[4]["why"]
    assert "multiple of 16" in last["hint"]


def test_a_segment_that_is_planned_has_no_reason() -> None:
    with forced_segments():
        rows = _rows([256] * 8)
    assert [row["mode"] for row in rows[5:8]] == ["planned"] * 3
    assert not any(row["why"] or row["cause"] for row in rows[5:8])


def test_a_step_that_leaves_its_plan_says_where_and_what_was_expected() -> None:
    rows = _rows([256] * 8, skip=6)
    assert rows[5]["mode"] == "planned"
    assert not rows[5]["why"]
    assert rows[6]["cause"] == "left"
    assert "aten.sin.default, tests/telemetry/test_why.py:" in rows[6]["why"]
    assert "is not what the plan expects: aten.sum.default, tests/telemetry/test_why.py:" in rows[6]["why"]


def test_an_op_beside_the_plan_that_takes_its_room_is_named() -> None:
    with ooc.Session("8MiB", step_boundary="optimizer", background_planning=False, plan_cache=False) as session:
        model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(8):
            x = model(torch.ones(256, 128))
            if number == 6:
                torch.zeros(7 * 256 * KIB)
            x.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        rows = session.report()["steps"]
    assert rows[5]["mode"] == "planned"
    assert "aten.zeros.default allocates 7.0 MiB that the plan does not have" in rows[6]["why"], rows[6]


def wider(many: torch.Tensor, line: torch.Tensor) -> torch.Tensor:
    return (many * line)[:256]


def test_an_op_that_takes_more_room_than_planned_is_named_with_its_own_line() -> None:
    """The plan has the same op, of another line, where what is made is smaller."""
    with ooc.Session("8MiB", step_boundary="optimizer", background_planning=False, plan_cache=False) as session:
        model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        few, many = torch.ones(256, 1), torch.ones(7 * 1024, 1)
        line = few.T
        for number in range(8):
            x = few * line if number != 6 else wider(many, line)
            model(x[:, :128]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        rows = session.report()["steps"]
    assert rows[5]["mode"] == "planned"
    own = next(
        number for number, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "return (many *" in text
    )
    why = f"aten.mul.Tensor, tests/telemetry/test_why.py:{own}) allocates 7.0 MiB that the plan does not have"
    assert why in rows[6]["why"], rows[6]


def test_steps_whose_plan_takes_long_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dozens of equal steps may end before it is made: they were seen more than twice."""
    monkeypatch.setattr(Sequences, "_plan_shape", lambda *_: None)
    *rows, last = _rows([256] * (_MOST_COMPARED + 8))
    assert rows[2]["why"] == "as the step before: it is planned as soon as it was seen twice"
    assert rows[3]["why"] == "as those before it: their plan is being made, or another one was expected here"
    assert rows[-12]["why"] == "as those before it: their plan is being made, or another one was expected here"
    assert (
        rows[-1]["why"] == "the steps before it were alike: their plan is being made, or another one was expected here"
    )
    assert {row["cause"] for row in rows[5:]} == {"again"}
    assert "the run ended before a plan was made" in last["hint"]


@pytest.mark.parametrize("has_model", [False, True])
def test_the_first_steps_of_a_session_say_that_they_are(has_model: bool) -> None:
    with ooc.Session("8MiB") as session:
        model = nn.Linear(128, 256) if has_model else None
        weight = torch.zeros(128, 256) if model is None else model.weight.detach()
        for _ in range(3):
            with session.step():
                (torch.ones(200, 128) @ weight.T if has_model else torch.ones(200, 128) @ weight).sum().item()
        causes = [row.cause for row in session.steps.rows]
    assert causes[0] == "first"
    assert "ops" not in causes


def test_segments_that_cannot_be_planned_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that their plan is being made, however often they come."""

    def plan_shape(self: Sequences, key: str, *_: Any) -> None:
        self.unplannable[key] = "op 3 needs more than there is"

    monkeypatch.setattr(Sequences, "_plan_shape", plan_shape)
    with forced_segments():
        *rows, last = _rows([256] * 12)
    assert {row["cause"] for row in rows[6:]} == {"unplannable"}
    assert rows[-1]["why"].endswith("ops was not planned: it cannot be planned: op 3 needs more than there is")
    assert "there is no plan for most steps" in last["hint"]


@pytest.mark.parametrize("in_segments", [False, True])
def test_what_was_not_learned_for_want_of_time_says_so_and_the_hint_names_the_remedy(
    in_segments: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LearningBudget, "may_learn", lambda _, **__: False)
    with forced_segments() if in_segments else nullcontext():
        *rows, last = _rows([256] * (_MOST_COMPARED + 8))
    causes = [row["cause"] for row in rows[4:]]  # where nothing is learned, segments are tried again and again
    assert causes.count("unlearned") >= len(causes) - (0 if in_segments else 4)
    assert "again" not in causes
    assert "learning has taken its share of the time" in rows[4]["why"]
    assert "OOC_BACKGROUND_PLANNING=0" in last["hint"]


def test_a_segment_in_a_planned_step_says_why_it_is_not_planned() -> None:
    reasons: dict[str, str] = {}
    steps = UnplannedSteps(reasons)
    recording: Any = SimpleNamespace(num_ops=len(OPS), ops=OPS, events=[])
    steps.note_period(recording, "k")
    assert steps.in_part(90, 10).text == "10 of its 100 ops are a segment that has no plan yet"
    steps.note_unlearned(recording, "k")
    assert steps.in_part(90, 10).cause == "unlearned"
    reasons["k"] = "too large"
    steps.note_period(recording, "k")
    assert steps.in_part(90, 10).text == "10 of its 100 ops are a segment that cannot be planned: too large"


def test_steps_that_come_again_are_said_to_be_planned_soon_once() -> None:
    """Though what was learned last is not what came before it: two kinds of steps in turns, of the same ops."""
    steps = UnplannedSteps({})
    recording: Any = SimpleNamespace(num_ops=len(OPS), num_replayed=0, ops=OPS, events=[])
    recorder: Any = Recorded(OPS, [])
    recording.funcs, recording.op = recorder.funcs, recorder.op
    texts = []
    for number in range(4):
        steps.note_period(recording, f"key {number}")
        texts.append(steps.explain(recorder, was_planned=False, bailout="").text)
    assert texts[0] == "as the step before: it is planned as soon as it was seen twice"
    assert texts[1:] == ["as those before it: their plan is being made, or another one was expected here"] * 3


def test_a_plan_that_is_not_entered_for_what_it_cost_says_what_such_plans_were_left_for() -> None:
    steps = UnplannedSteps({})
    recorder: Any = Recorded(OPS, [])
    steps.note_loss()
    first = steps.explain(recorder, was_planned=False, bailout="")
    assert (first.cause, first.text.endswith("too early to save it")) == ("refused", True)
    steps.explain(recorder, was_planned=True, bailout="op 1 (relu) allocates 2.0 MiB that the plan does not have")
    steps.note_loss()
    text = steps.explain(recorder, was_planned=False, bailout="").text
    assert text.startswith("its plan was not entered: plans like it have cost more than they saved")
    assert text.endswith("; the last that was left: op 1 (relu) allocates 2.0 MiB that the plan does not have")


def test_each_cause_has_a_remedy() -> None:
    """But for planned steps, and those that need no plan."""
    assert set(get_args(Cause)) - {"", "fits"} == set(_REMEDIES)


def test_no_step() -> None:
    with ooc.Session("8MiB", step_boundary="optimizer") as session:
        torch.ones(256, 256).sum()
        assert hint(session.report()) == NO_STEP


def test_a_loop_on_another_thread() -> None:
    with ooc.Session("1MiB", step_boundary="optimizer") as session:

        def train() -> None:
            model = nn.Linear(512, 512)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                model(torch.ones(64, 512)).sum().backward()
                optimizer.step()

        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        report = session.report()
    text = hint(report)
    assert trains_elsewhere(report)
    assert text is not None
    assert "other threads allocated" in text
    assert "MiB outside the budget" in text


def test_shares_are_of_time() -> None:
    steps = [{"mode": "planned", "duration_s": 1.0}] * 9 + [{"mode": "off_plan", "duration_s": 11.0}]
    assert planned_share(steps) == 0.45


def test_a_step_that_was_planned_in_part_counts_in_part() -> None:
    step = {"mode": "off_plan", "duration_s": 2.0, "num_planned_ops": 90, "num_demand_ops": 10, "cause": "ops"}
    assert planned_share([step, {**step, "num_planned_ops": 0}]) == 0.45
    assert hint({"steps": [step] * 8}) is None


def test_an_optimizer_step_that_comes_sooner_is_called_so() -> None:
    """It begins with an op of the profiler's, which nobody has called."""
    enter = torch.ops.profiler._record_function_enter_new.default
    begins = OpRecord(func=enter, where="train.py:9", occurrences=(), written=())
    reason = compare(Recorded(OPS, []), Recorded([FIRST, begins], []))
    expected = "op 1 (profiler._record_function_enter_new.default, as an optimizer's step begins with, train.py:9) came"
    assert reason.text.startswith(expected), reason
