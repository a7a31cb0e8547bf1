"""Plans kept on disk: found again, checked, bounded, and never trusted."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import ooc
import ooc.replay.plan_maker
from ooc.replay.plan_cache import PlanCache
from scheduler.plan import Machine, Plan
from scheduler.planning import make_plan
from scheduler.trace import Op, Trace, Use, Variable
from tests.session.continuation import BUDGET, Trainer
from vmm.store_speed import StoreSpeed

MACHINE = Machine(chunk_nbytes=1024, num_chunks=3, load_bytes_per_s=1e9, evict_bytes_per_s=1e9)


def make_trace(num_ops: int = 6) -> Trace:
    """Ops that each use one of three parameters of two chunks, so that something must move."""
    ops = tuple(
        Op(
            name=f"op{i}",
            start_tick=i,
            stop_tick=i + 1,
            duration_ns=1000,
            uses=(Use(variable=i % 3, reads=True, writes=True),),
        )
        for i in range(num_ops)
    )
    variables = tuple(Variable(nbytes=2048, birth_tick=None, death_tick=None, becomes=i) for i in range(3))
    return Trace(ops=ops, variables=variables, num_ticks=num_ops)


@pytest.fixture
def cache(tmp_path: Path) -> PlanCache:
    return PlanCache(tmp_path / "plans")


def kept(cache: PlanCache, trace: Trace) -> Plan:
    """Plan a trace and keep the plan."""
    plan = make_plan(trace, MACHINE, with_bounds=False)
    cache.save(plan, trace, {})
    return plan


def test_found_again_with_predictions_for_the_present_machine(cache: PlanCache) -> None:
    trace = make_trace()
    plan = kept(cache, trace)
    assert cache.load(trace, MACHINE, "auto", {}) == plan
    slower = replace(MACHINE, load_bytes_per_s=0.9e9)  # the same power of two
    found = cache.load(trace, slower, "auto", {})
    assert found is not None
    assert found.residencies == plan.residencies
    assert found.machine == slower
    assert found.predicted["duration_ns"] > plan.predicted["duration_ns"]
    assert cache.num_hits == 2


@pytest.mark.parametrize(
    ("machine", "policy", "parameters", "num_ops"),
    [
        (replace(MACHINE, num_chunks=4), "auto", {}, 6),
        (replace(MACHINE, chunk_nbytes=2048), "auto", {}, 6),
        (replace(MACHINE, load_bytes_per_s=1e7), "auto", {}, 6),
        (MACHINE, "on_demand", {}, 6),
        (MACHINE, "auto", {"wrap": False}, 6),
        (MACHINE, "auto", {}, 7),
    ],
)
def test_not_found_for_anything_else(
    cache: PlanCache, machine: Machine, policy: str, parameters: dict[str, bool], num_ops: int
) -> None:
    kept(cache, make_trace())
    assert cache.load(make_trace(num_ops), machine, policy, parameters) is None


def _damage_text(text: str) -> str:
    return text[: len(text) // 2]


def _damage_schema(text: str) -> str:
    return text.replace('"schema_version":1', '"schema_version":999')


def _damage_chunks(text: str) -> str:
    document = json.loads(text)
    for residency in document["residencies"]:
        residency["chunks"] = [[2, 2]]  # chunk 3 of 3: well-formed, but not a legal plan
    return json.dumps(document)


def _damage_depth(_: str) -> str:
    return "[" * 100_000


def _damage_number(text: str) -> str:
    return text.replace('"schema_version":1', '"schema_version":1' + "0" * 5000)


def _damage_nbytes(text: str) -> str:
    document = json.loads(text)
    for residency in document["residencies"]:
        residency["chunks"] = [[10**30, 1]]
    return json.dumps(document)


@pytest.mark.parametrize(
    "damage", [_damage_text, _damage_schema, _damage_chunks, _damage_depth, _damage_number, _damage_nbytes]
)
def test_damaged_file_is_ignored_with_a_warning(
    cache: PlanCache, caplog: pytest.LogCaptureFixture, damage: object
) -> None:
    trace = make_trace()
    plan = kept(cache, trace)
    (path,) = cache.directory.iterdir()
    path.write_text(damage(path.read_text()))  # type: ignore[operator]
    with caplog.at_level(logging.WARNING):
        assert cache.load(trace, MACHINE, "auto", {}) is None
    assert str(path) in caplog.text
    assert not path.exists()
    cache.save(plan, trace, {})
    assert cache.load(trace, MACHINE, "auto", {}) == plan


def test_size_is_bounded_and_what_was_used_last_stays(cache: PlanCache) -> None:
    traces = [make_trace(num_ops) for num_ops in range(4, 10)]
    kept(cache, traces[0])
    (first,) = cache.directory.iterdir()
    cache.limit_nbytes = 4 * first.stat().st_size
    (cache.directory / ".plan-left-by-a-killed-process").write_text("x")
    os.utime(cache.directory / ".plan-left-by-a-killed-process", (0, 0))
    for age, trace in enumerate(traces[1:]):
        os.utime(first, (2e9, 2e9))  # used again and again
        before = set(cache.directory.iterdir())
        kept(cache, trace)
        for path in set(cache.directory.iterdir()) - before:
            os.utime(path, (1e9 + age, 1e9 + age))
    paths = list(cache.directory.iterdir())
    assert all(path.suffix == ".json" for path in paths)
    assert sum(path.stat().st_size for path in paths) <= cache.limit_nbytes
    assert first in paths
    assert len(paths) >= 2


def test_not_every_save_looks_at_every_file(cache: PlanCache, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[object] = []
    scandir = os.scandir
    monkeypatch.setattr("ooc.replay.plan_cache.os.scandir", lambda path: looks.append(path) or scandir(path))
    for num_ops in range(4, 16):
        kept(cache, make_trace(num_ops))
    assert looks.count(cache.directory) == 1  # the planner's sources are looked at, too, once a process


def test_unusable_directory_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    cache = PlanCache(tmp_path / "file" / "plans")
    trace = make_trace()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            cache.save(make_plan(trace, MACHINE), trace, {})
        assert cache.load(trace, MACHINE, "auto", {}) is None
        assert caplog.text.count("cannot keep a plan") == 1  # a long run would say it for each of its plans
        (tmp_path / "file").unlink()
        cache.save(make_plan(trace, MACHINE), trace, {})
        assert cache.load(trace, MACHINE, "auto", {}) is not None
        shutil.rmtree(tmp_path / "file")
        (tmp_path / "file").write_text("")
        cache.save(make_plan(trace, MACHINE), trace, {})
    assert caplog.text.count("cannot keep a plan") == 2  # it had worked in between
    assert "is removed" not in caplog.text  # there was nothing to remove


def test_plan_that_cannot_be_read_now_is_kept(
    cache: PlanCache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = make_trace()
    plan = kept(cache, trace)

    def refuse(self: Path, *_: object, **__: object) -> str:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(self))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Path, "read_text", refuse)
        assert cache.load(trace, MACHINE, "auto", {}) is None
    assert "cannot read the kept plan" in caplog.text
    assert cache.load(trace, MACHINE, "auto", {}) == plan


def test_second_session_plans_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same losses from the kept plan as from a new one."""
    monkeypatch.setenv("OOC_PLAN_CACHE", "1")
    monkeypatch.setattr("ooc.replay.plan_cache.cache_directory", lambda: tmp_path)
    planned: list[str] = []
    inner = ooc.replay.plan_maker.make_plan

    def counted(trace: Trace, *arguments: object, **named: object) -> Plan:
        planned.append(trace.fingerprint())
        return inner(trace, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(ooc.replay.plan_maker, "make_plan", counted)
    losses, modes = [], []
    for _ in range(2):
        with ooc.Session(BUDGET, debug=True) as session:
            session.steps._speed = StoreSpeed(
                write_bytes_per_s=1e9,
                read_bytes_per_s=1e9,
                write_together_bytes_per_s=5e8,
                read_together_bytes_per_s=5e8,
            )
            trainer = Trainer()
            run = []
            for index in range(5):
                with session.step():
                    run.append(trainer.step(index))
            modes.append([row.mode for row in session.steps.rows])
        losses.append(run)
    assert losses[0] == losses[1]
    assert modes[0] == modes[1]
    assert "planned" in modes[1]
    assert len(planned) == 1
    assert len(list((tmp_path / "plans").iterdir())) == 1
