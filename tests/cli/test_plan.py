"""`ooc trace`, `plan`, `fit`, `profile` and `run --plan`: end to end, and what they say when it cannot be."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ooc.cli import fit, plan_tables
from ooc.cli.main import main
from ooc.cli.plan_tables import SweepMarks, _cells, draw_sweep, outcome_row
from ooc.replay.given_plan import GivenPlan, read_plan
from ooc.units import format_duration
from scheduler.budget import smallest_num_chunks
from scheduler.compare import compare
from scheduler.cost.bounds import lower_bounds
from scheduler.plan import Machine, Plan
from scheduler.planning import make_plan
from scheduler.policies import POLICIES
from scheduler.profiles import load_profile, profile_from_json
from scheduler.renaming import renamed
from scheduler.trace import Trace
from scheduler.verify import verify
from tests import forked

SCRIPT = Path(__file__).parents[1] / "scripts" / "small_net.py"
STEPS = Path(__file__).parents[1] / "data" / "steps"
MIB = 1 << 20


def python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """A Python process, with one thread in ops."""
    command = [sys.executable, *map(str, arguments)]
    return forked.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=600)


def ooc(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: recording runs a script as `__main__`."""
    return python("-m", "ooc", *arguments)


def read(path: Path) -> Trace:
    raw = path.read_bytes()
    return Trace.from_json((gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode())


@pytest.fixture(scope="module")
def fake_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script's step at batch 64, on fake tensors."""
    path = tmp_path_factory.mktemp("fake") / "step.json"
    done = ooc("trace", "--fake", "-o", path, SCRIPT, "--batch-size", "64")
    assert done.returncode == 0, done.stderr
    assert "fake tensors do not have" in done.stderr  # the script prints its loss
    return path


@pytest.fixture
def records_in_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ooc fit` within this process; those in which it records are forked from one that has imported torch."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[0] == sys.executable
        return python(*command[1:])

    monkeypatch.setattr(fit, "subprocess", SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired))


def plan_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# -- trace


def test_a_recorded_run_and_a_fake_one_agree_on_what_is_alive(fake_step: Path, tmp_path: Path) -> None:
    path = tmp_path / "real.json.gz"
    done = ooc("trace", "--budget", "64MiB", "-o", path, SCRIPT, "--batch-size", "64")
    assert done.returncode == 0, done.stderr
    assert "step 1 loss" in done.stdout
    assert "step 5 loss" not in done.stdout  # left as soon as the step was known
    real, fake = read(path), read(fake_step)
    assert real.metadata["script"] == [str(SCRIPT), "--batch-size", "64"]
    assert fake.metadata["times_of"] == "desktop"
    assert fake.peak_nbytes() == pytest.approx(real.peak_nbytes(), rel=0.2)
    assert sum(v.birth_tick is None for v in fake.variables) == sum(v.birth_tick is None for v in real.variables)


@pytest.mark.parametrize("fake", [["--fake"], ["--budget", "64MiB"]], ids=["fake", "real"])
def test_a_script_that_ends_too_soon_or_fails_says_so(fake: list[str], tmp_path: Path) -> None:
    soon = ooc("trace", *fake, "-o", tmp_path / "s.json", SCRIPT, "--steps", "1")
    assert soon.returncode == 1
    assert "two successive equal steps are needed" in soon.stderr
    failed = ooc("trace", *fake, "-o", tmp_path / "s.json", SCRIPT, "--fail")
    assert failed.returncode == 1
    assert "RuntimeError: the script's own" in failed.stderr
    assert not (tmp_path / "s.json").exists()


def test_bad_command_lines_of_trace_are_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        (["--fake", "-o", tmp_path / "none" / "s.json", SCRIPT], "there is no directory"),
        (["--fake", "-o", tmp_path / "s.json", tmp_path / "none.py"], "can't open file"),
        (["--profile", "rpi4", "-o", tmp_path / "s.json", SCRIPT], "--profile goes with --fake"),
    ):
        assert main(["trace", *map(str, arguments)]) == 2
        assert message in capsys.readouterr().err


# -- plan


def test_plan_compares_policies_and_writes_the_best(
    fake_step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "plan.json"
    found = plan_json(capsys, str(fake_step), "--budget", "30MiB", "--policy", "on_demand,auto,vdnn", "-o", str(output))
    rows = {row["policy"]: row for row in found["outcomes"]}
    assert list(rows) == ["on_demand", "auto", "vdnn"]
    assert found["chosen"] == "auto"
    assert not rows["vdnn"]["fits"]
    assert rows["vdnn"]["smallest_budget_nbytes"] > 30 * MIB
    assert rows["auto"]["peak_nbytes"] <= 30 * MIB
    assert rows["auto"]["duration_ns"] <= rows["on_demand"]["duration_ns"]
    plan = Plan.from_json(output.read_text())
    verify(plan, read(fake_step))
    assert plan.predicted["duration_ns"] == rows["auto"]["duration_ns"]


def test_plan_prints_a_table(fake_step: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(fake_step), "--budget", "30MiB", "--policy", "auto,vdnn"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (auto,) = (line for line in lines if "auto" in line)
    assert "yes" in auto
    assert "MiB" in auto
    assert any("vdnn" in line and "needs " in line for line in lines)


def test_a_profile_gives_other_times_unless_they_are_kept(fake_step: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = (str(fake_step), "--budget", "60MiB", "--policy", "auto")

    def time_ns(*more: str) -> int:
        return int(plan_json(capsys, *common, *more)["outcomes"][0]["duration_ns"])

    assert time_ns("--profile", "rpi4") > 10 * time_ns()
    assert time_ns("--profile", "rpi4", "--keep-times") == pytest.approx(time_ns(), rel=0.02)  # but for its store


def test_energy_is_an_objective_where_the_profile_has_it(fake_step: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = (str(fake_step), "--budget", "30MiB", "--policy", "auto,nntrainer", "--objective", "energy")
    found = plan_json(capsys, *common, "--profile", "rpi4")
    joules = {row["policy"]: row["energy_j"] for row in found["outcomes"]}
    assert joules[found["chosen"]] == min(joules.values())
    assert main(["plan", *common, "--profile", "pcie4"]) == 2
    assert "'pcie4' has no energy figures. Options: a profile with an 'energy' part" in capsys.readouterr().err


def test_an_infeasible_budget_names_op_variables_and_the_smallest_that_works(
    fake_step: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(fake_step), "--budget", "9MiB", "--policy", "auto,window"]) == 1
    message = capsys.readouterr().err
    trace = read(fake_step)
    machine = Machine(chunk_nbytes=64 << 10, num_chunks=0)  # as a session's
    least = smallest_num_chunks(trace, machine) * machine.chunk_nbytes
    assert "needs 24.0 MiB at once; the budget is 9.0 MiB" in message
    assert "operands: aten." in message
    assert f"budget >= {least / MIB:.1f} MiB ({least} bytes)" in message


def test_an_infeasible_deadline_says_the_fastest_possible(fake_step: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["plan", str(fake_step), "--budget", "60MiB", "--policy", "auto"]
    assert main([*common, "--deadline", "1.5x"]) == 0
    capsys.readouterr()
    assert main([*common, "--deadline", "1us"]) == 1
    ops_ms = read(fake_step).duration_ns / 1e6
    assert f"the fastest takes {ops_ms:.3f} ms (auto)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "3G"], "could mean two sizes"),
        (["--budget", "0"], "must be at least 1"),
        (["--budget", "9000TiB"], "no machine has that"),
        (["--budget", "4TiB", "--chunk", "64KiB"], "more than the 1048576 that can be planned"),
        (["--budget", "100", "--chunk", "64KiB"], "budget of 100 B: less than one chunk of 64.0 KiB"),
        (["--budget", "9MiB", "--policy", "best"], "policy 'best': there is no such policy. Options: all, auto"),
        (["--budget", "9MiB", "--profile", "vax"], "there is no profile 'vax'. Options: desktop"),
        (["--budget", "9MiB", "--deadline", "soon"], "deadline 'soon' is not a time. Options: 1.5s"),
        (["--budget", "9MiB", "--deadline", "0s"], "deadline '0s' is 0"),
        (["--sweep", "--budget", "9MiB"], "leave --budget and --deadline out"),
        (["--sweep", "--points", "1"], "--points 1: from 2 to 1000"),
        (["--sweep", "-o", "x.json"], "a sweep is drawn as .png"),
        ([], "no budget. Options: --budget SIZE"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    arguments: list[str], message: str, fake_step: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(fake_step), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ('{"schema": "ooc.plan"}', "not an ooc trace"),
        ('{"schema": "ooc.trace", "schema_version": 99}', "schema version 99"),
        ("\x1f\x8bbroken", "cannot read the trace"),
    ],
)
def test_files_that_are_not_traces_are_refused(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(text.encode("latin-1"))
    assert main(["plan", str(path), "--budget", "9MiB"]) == 2
    error = capsys.readouterr().err
    assert str(path) in error
    assert message in error


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("nbytes", 1 << 60, "at most 64 TiB make sense"),
        ("nbytes", -5, "has -5 bytes"),
        ("duration_ns", 10**18, "30 days"),
    ],
)
def test_absurd_sizes_in_a_trace_are_refused(
    field: str, value: int, message: str, fake_step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(fake_step.read_text())
    variable = next(v for v in document["variables"] if v["birth_tick"] is not None and v["becomes"] is None)
    (variable if field == "nbytes" else document["ops"][0])[field] = value
    path = tmp_path / "absurd.json"
    path.write_text(json.dumps(document))
    assert main(["plan", str(path), "--budget", "9MiB"]) == 2
    assert message in capsys.readouterr().err


def test_a_sweep_draws_a_picture_and_never_grows(
    fake_step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "sweep.png"
    arguments = ["--sweep", "--points", "4", "--policy", "auto,window", "--profile", "rpi4", "-o", str(picture)]
    document = plan_json(capsys, str(fake_step), *arguments)
    rows = document["outcomes"]
    assert document["least_budget_nbytes"].keys() == {"auto", "window"}
    fitting = [row["budget_nbytes"] for row in rows if row["fits"] and row["policy"] == "auto"]
    assert document["least_budget_nbytes"]["auto"] == min(fitting)
    assert document["knee_nbytes"] is None or document["knee_nbytes"] in fitting
    times = [row["duration_ns"] for row in rows if row["policy"] == "auto"]
    assert len(times) == 4
    assert times == sorted(times, reverse=True)
    assert all("energy_j" in row for row in rows if row["fits"])
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture.stat().st_size > 10_000


def test_no_two_policies_of_a_sweep_look_alike(monkeypatch: pytest.MonkeyPatch, fake_step: Path) -> None:
    """There are more policies than colours: twelve lines had ten."""
    drawn = []

    def keep(figure: Any, *_: Any, **__: Any) -> None:
        axis = figure.axes[0]
        drawn.extend((line.get_color(), line.get_linestyle(), line.get_marker()) for line in axis.get_lines())

    monkeypatch.setattr(plan_tables, "write_picture", keep)
    trace = read(fake_step)
    machine = load_profile("desktop").machine(chunk_nbytes=16 << 10, num_chunks=0)
    machine = replace(machine, num_chunks=trace.peak_nbytes() // machine.chunk_nbytes + 64)
    (outcome,) = compare(trace, machine, ("on_demand",))
    outcomes = [replace(outcome, policy=name) for name in POLICIES]
    marks = SweepMarks(least=dict.fromkeys(POLICIES), knee=None)
    points = [(machine.num_chunks, outcomes), (2 * machine.num_chunks, outcomes)]
    draw_sweep(points, chunk_nbytes=16 << 10, path=Path("unused.png"), title="a step", marks=marks)
    assert len(drawn) == len(POLICIES) + 1  # and the bound
    assert len(set(drawn)) == len(drawn)


def test_a_sweeps_marks_are_told(fake_step: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--sweep", "--points", "4", "--policy", "auto,on_demand", "--profile", "rpi4"]
    assert main(["plan", str(fake_step), *arguments]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^Least budget: auto \S+ \S+, on_demand \S+ \S+\.$", shown, re.MULTILINE)
    marked = [line for line in shown.splitlines() if re.search(r"\d \wi?B knee", line)]
    assert len(marked) == (0 if "No knee" in shown else 1)


def test_the_tables_time_includes_remaps(fake_step: Path) -> None:
    """As its "over bound" does: a plan with many remaps is not shown as the fastest."""
    trace = read(fake_step)
    machine = load_profile("desktop").machine(chunk_nbytes=16 << 10, num_chunks=0)
    machine = replace(machine, num_chunks=trace.peak_nbytes() // machine.chunk_nbytes + 64)
    (outcome,) = compare(trace, machine, ("on_demand",))
    assert outcome.plan is not None
    predicted = {**outcome.plan.predicted, "num_remapped_chunks": 1000, "remap_ns": 10**9}
    slow = replace(outcome, plan=replace(outcome.plan, predicted=predicted))
    assert slow.duration_ns > slow.plan.predicted["duration_ns"]  # type: ignore[union-attr]
    cells = _cells(slow, has_energy=False)
    assert cells[3] == format_duration(slow.duration_ns / 1e9)
    assert outcome_row(slow)["step_ns"] == slow.duration_ns


# -- fit


def test_the_smallest_budget_is_the_smallest(capsys: pytest.CaptureFixture[str]) -> None:
    step = STEPS / "lstm.json.gz"
    assert main(["fit", "--json", "--chunk", "16KiB", "--policy", "on_demand", str(step)]) == 0
    found = json.loads(capsys.readouterr().out)
    trace = read(step)
    machine = load_profile("desktop").machine(chunk_nbytes=16 << 10, num_chunks=0)
    assert found["budget_nbytes"] == smallest_num_chunks(trace, machine) * machine.chunk_nbytes
    assert main(["fit", "--json", "--chunk", "16KiB", "--slowdown", "1.0", "--policy", "on_demand", str(step)]) == 0
    at_full_speed = json.loads(capsys.readouterr().out)
    assert found["budget_nbytes"] < at_full_speed["budget_nbytes"] <= lower_bounds(trace, machine)["in_core_nbytes"]
    assert at_full_speed["duration_ns"] == at_full_speed["ops_ns"] == trace.duration_ns


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 8, 100])
@pytest.mark.parametrize("most", [1, 5, 64])
def test_the_largest_batch_is_the_largest(limit: int, most: int) -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= limit

    assert fit.largest_batch(fits, most) == min(limit, most)
    assert max(tried) <= most
    assert len(tried) == len(set(tried))


@pytest.mark.usefixtures("records_in_forks")
def test_fit_records_the_script_at_each_batch_that_it_tries(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--json", "--budget", "16MiB", "--most", "2", str(SCRIPT), "--batch-size", "{batch}"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == {"batch": 2, "budget_nbytes": 16 * MIB, "policy": "auto"}
    assert "batch 1: fits" in told.err


def test_fit_says_why_not_even_one_row_fits() -> None:
    """As a command, which records in a process of its own."""
    none = ooc("fit", "--budget", "1MiB", SCRIPT, "--batch-size", "{batch}")
    assert none.returncode == 1
    assert "not even a batch of 1: op " in none.stderr


@pytest.mark.usefixtures("records_in_forks")
def test_fit_finds_the_parts_of_a_batch(capsys: pytest.CaptureFixture[str]) -> None:
    parts = ["fit", "--json", "--budget", "64MiB", "--micro-batch", "8", str(SCRIPT), "--batch-size", "{batch}"]
    assert main(parts) == 0
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert (found["micro_batch"], found["batch"]) == (8, 8)  # there is room for all, and parts only add up gradients
    for line in ("1 x 8: ", "2 x 4: ", "8 x 1: "):
        assert line in told.err
    assert main(["fit", "--micro-batch", "8", str(SCRIPT), "--batch-size", "{batch}"]) == 2
    assert "--micro-batch goes with --budget SIZE" in capsys.readouterr().err
    assert main(["fit", "--budget", "1MiB", "--micro-batch", "0", str(SCRIPT), "--batch-size", "{batch}"]) == 2
    assert "--micro-batch 0: at least 1" in capsys.readouterr().err
    assert fit.part_sizes(12) == (12, 6, 3, 1)
    assert fit.part_sizes(1) == (1,)


@pytest.mark.usefixtures("records_in_forks")
def test_the_budget_that_fit_names_runs_and_hardly_less_does(capsys: pytest.CaptureFixture[str]) -> None:
    """Real steps: with the ops' own temporaries (oneDNN's copies), and ops run in parts as that budget has them."""
    arguments = ("--batch-size", "16")
    assert main(["fit", "--json", "--policy", "on_demand", str(SCRIPT), *arguments]) == 0
    budget_nbytes = json.loads(capsys.readouterr().out)["budget_nbytes"]
    good = ooc("run", "--budget", str(budget_nbytes), SCRIPT, *arguments)
    assert good.returncode == 0, good.stderr
    bad = ooc("run", "--budget", str(budget_nbytes * 9 // 10), SCRIPT, *arguments)
    assert bad.returncode == 1
    assert "BudgetTooSmall: " in bad.stderr


@pytest.mark.usefixtures("records_in_forks")
def test_fit_counts_what_runs_before_the_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The step needs a few MiB; 16 MiB of data are sorted before it (in, out, and 32 MiB of indices)."""
    script = tmp_path / "setup.py"
    script.write_text(f"import torch\ntorch.randn(4 << 20).sort()\n{SCRIPT.read_text()}")
    step = tmp_path / "step.json"
    assert ooc("trace", "--fake", "-o", step, script).returncode == 0
    assert main(["fit", "--json", "--policy", "on_demand", str(step)]) == 0
    assert 64 * MIB <= json.loads(capsys.readouterr().out)["budget_nbytes"] <= 66 * MIB
    assert main(["fit", "--json", "--budget", "40MiB", "--most", "1", "--fake", str(script), "--batch-size", "{batch}"])
    assert "an op before the first step needs 64.0 MiB at once" in capsys.readouterr().err


def test_small_budgets_are_planned_in_chunks_that_a_session_can_play(tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    small = tmp_path / "small.json"
    assert ooc("trace", "--fake", "-o", small, SCRIPT, "--batch-size", "8").returncode == 0
    assert main(["plan", str(small), "--policy", "on_demand", "--budget", "8MiB", "-o", str(output)]) == 0
    assert Plan.from_json(output.read_text()).machine.chunk_nbytes == 64 << 10


def test_fit_refuses_what_cannot_be_varied(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--budget", "1MiB", str(SCRIPT), "--batch-size", "8"]) == 2
    assert "do not contain {batch}" in capsys.readouterr().err
    assert main(["fit", str(STEPS / "lstm.json.gz"), "--slowdown", "2"]) == 2
    assert "fit's own options before the trace" in capsys.readouterr().err
    assert main(["fit", "--slowdown", "0.5", str(STEPS / "lstm.json.gz")]) == 2
    assert "--slowdown 0.5: from 1" in capsys.readouterr().err


# -- profile


def test_profile_measures_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.json"
    assert main(["profile", "-o", str(path), "--name", "mine", "--store", str(tmp_path)]) in (0, 1)
    error = capsys.readouterr().err
    if not path.exists():
        pytest.skip(f"no store in the temporary directory: {error}")
    profile = profile_from_json(path.read_text())
    assert profile.name == "mine"
    assert profile.energy is None
    assert profile.flops_per_s is not None
    assert profile.flops_per_s > 0
    assert load_profile(str(path)) == profile


# -- run --plan


def test_a_plan_from_a_recorded_run_is_played(tmp_path: Path) -> None:
    step, plan, report = tmp_path / "step.json", tmp_path / "plan.json", tmp_path / "report.json"
    assert ooc("trace", "--budget", "40MiB", "-o", step, SCRIPT, "--batch-size", "64").returncode == 0
    assert ooc("plan", step, "--budget", "40MiB", "--policy", "window", "-o", plan).returncode == 0
    done = ooc("run", "--plan", plan, "--report", report, SCRIPT, "--batch-size", "64", "--steps", "7")
    assert done.returncode == 0, done.stderr
    told = json.loads(report.read_text())
    assert told["given_plan_refused"] == ""
    assert told["budget_nbytes"] == 40 * MIB
    assert [s["mode"] for s in told["steps"]].count("planned") >= 3
    plain = python(SCRIPT, "--batch-size", "64", "--steps", "7")
    assert done.stdout == plain.stdout

    other = ooc("run", "--plan", plan, "--report", report, SCRIPT, "--batch-size", "32", "--steps", "5")
    assert other.returncode == 0, other.stderr
    assert "this step is another one than it was made for" in json.loads(report.read_text())["given_plan_refused"]


def test_a_given_plan_for_another_budget_or_step_is_refused_with_the_reason() -> None:
    trace = read(STEPS / "lstm.json.gz")
    machine = load_profile("desktop").machine(chunk_nbytes=1 << 14, num_chunks=400)
    given = GivenPlan(make_plan(trace, machine, "on_demand"), None)
    assert given.load(trace, machine, "auto", {}) is not None
    assert given.refusal == ""
    assert given.is_fixed(given.plan) and given.is_fixed(renamed(given.plan, range(399, -1, -1)))
    assert not given.is_fixed(make_plan(trace, machine, "window"))
    smaller = GivenPlan(given.plan, None)
    assert (
        smaller.load(trace, load_profile("desktop").machine(chunk_nbytes=1 << 14, num_chunks=399), "auto", {}) is None
    )
    assert "made for 400 chunks of 16.0 KiB, and the session has 399" in smaller.refusal


def test_run_refuses_files_that_are_not_plans_to_play(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(ValueError, match="cannot read the plan"):
        read_plan(path)
    path.write_text('{"schema": "ooc.trace"}')
    with pytest.raises(ValueError, match="not an ooc plan"):
        read_plan(path)
    done = ooc("run", "--plan", path, SCRIPT)
    assert done.returncode == 2
    assert "not an ooc plan" in done.stderr
