"""The GPU gate's own logic: shards, resuming, verdicts, the table; and one item for real, over the fake driver."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import gate
from benchmarks.gpu.budget_items import budget_changes
from benchmarks.gpu.child import Order
from benchmarks.gpu.fake_items import FAKE_ITEMS
from benchmarks.gpu.figures import Figure, Item, Overran, Shell
from benchmarks.gpu.gate import ITEMS_S, SHARD_S, Results, shards
from benchmarks.gpu.items import COMPUTE, ITEMS, NOT_THERE, bitwise, other, ours, throughput
from tests.cuda.forked_gate import ForkedProcesses

MIB = 1 << 20
CONTEXT_NBYTES = 300 * MIB


def _answer(num_steps: int = 7, *, mode: str = "planned", used_nbytes: int = 0, **last: Any) -> dict[str, Any]:
    step = {
        "s": 0.5,
        "mode": mode,
        "num_remapped_chunks": 0,
        "stopping_calls": {},
        "mapping_calls": {},
        "digest": "same",
        "device_used_nbytes": CONTEXT_NBYTES + used_nbytes,
    }
    steps = [dict(step) for _ in range(num_steps)]
    steps[-1].update(last)
    return {"steps": steps, "batch_size": 8, "peak_nbytes": 100 * MIB, "context_nbytes": CONTEXT_NBYTES}


class Scripted:
    """In core all is well; out of core comes what the script says, from the smallest budget on `BudgetTooSmall`."""

    def __init__(self, answer: dict[str, Any], *, smallest_nbytes: int = 0) -> None:
        self.answer = answer
        self.smallest_nbytes = smallest_nbytes
        self.orders: list[Order] = []

    def train(self, order: Order) -> dict[str, Any]:
        self.orders.append(order)
        if order.budget_nbytes is None:
            return _answer(mode="in_core")
        if order.budget_nbytes < self.smallest_nbytes:
            return {"error": "BudgetTooSmall: op 3", "is_too_small": True}
        return self.answer

    def command(self, arguments: Sequence[str]) -> tuple[int, str]:
        raise AssertionError(arguments)


def _wrong(shell: Shell) -> list[Figure]:
    return [figure for figure in bitwise("gpt")(shell) if figure.is_good is False]


def test_shards_leave_time_for_the_gate_itself_and_keep_the_order() -> None:
    parts = shards(ITEMS)
    assert [item for part in parts for item in part] == list(ITEMS)
    assert all(sum(item.limit_s for item in part) <= ITEMS_S for part in parts)
    assert ITEMS_S + 30 <= SHARD_S == 8.5 * 60
    assert len({item.name for item in ITEMS}) == len(ITEMS)
    assert [item.name for item in parts[0]][:4] == ["preflight", "doctor", "tests", "demo"]
    assert {"bitwise conv_stack", "bitwise gpt"} < {item.name for item in parts[1]}
    assert "resnet50 16GiB" in {item.name for item in parts[2]}
    with pytest.raises(ValueError, match="more than a shard's"):
        shards([Item(name="long", limit_s=ITEMS_S + 1, measure=lambda _: ())])


def test_all_is_well() -> None:
    shell = Scripted(_answer(), smallest_nbytes=15 * MIB)
    assert _wrong(shell) == []
    budgets = [order.budget_nbytes for order in shell.orders[1:]]
    assert budgets == [110 * MIB, 50 * MIB, 50 * MIB, 24 * MIB, 16 * MIB]
    assert [order.debug for order in shell.orders[1:]] == [False, False, True, False, False]
    assert all(order.digests for order in shell.orders)


@pytest.mark.parametrize(
    ("answer", "metric", "note"),
    [
        (_answer(digest="other"), "bit for bit", "first other bits in step 6, which ran planned"),
        (_answer(mode="off_plan"), "planned", ""),
        (_answer(used_nbytes=200 * MIB), "by the driver's count", "context 300 MiB"),
        (_answer(stopping_calls={"cuEventSynchronize": 2}), "stop the host or map", ""),
        (_answer(mapping_calls={"cuMemMap": 1}), "stop the host or map", ""),
        ({"error": "RuntimeError: no"}, "trains", "RuntimeError: no"),
    ],
)
def test_what_is_wrong_is_called_wrong(answer: dict[str, Any], metric: str, note: str) -> None:
    found = _wrong(Scripted(answer, smallest_nbytes=0))
    assert any(metric in figure.metric and note in figure.note for figure in found), found


def test_an_op_without_a_deterministic_algorithm_only_warns() -> None:
    class Strict(Scripted):
        def train(self, order: Order) -> dict[str, Any]:
            if not order.warns:
                return {"error": "RuntimeError: max_pool2d does not have a deterministic implementation"}
            return super().train(order)

    shell = Strict(_answer(), smallest_nbytes=15 * MIB)
    figures = list(bitwise("resnet50")(shell))
    assert figures[0].variant == "in core once more" and figures[0].is_good
    assert not [figure for figure in figures if figure.is_good is False]
    assert all(order.warns for order in shell.orders)


def test_a_budget_change_is_judged_by_bits_and_by_the_drivers_memory() -> None:
    def act(name: str, nbytes: int, expected: int) -> dict[str, Any]:
        return {"act": name, "nbytes": nbytes, "expected_nbytes": expected}

    good = [act("half", 500 * MIB, 512 * MIB), act("yielded", 1024 * MIB, 1024 * MIB)]
    for disturbances, digest, num_wrong in (
        (good, "same", 0),
        ([*good, act("back", 200 * MIB, 0)], "same", 1),
        ([act("half", 0, 512 * MIB)], "other", 2),
    ):
        shell = Scripted({**_answer(digest=digest), "disturbances": disturbances})
        figures = list(budget_changes("gpt")(shell))
        assert sum(figure.is_good is False for figure in figures) == num_wrong, figures
        assert shell.orders[-1].disturbs and shell.orders[-1].digests
    failed = list(budget_changes("gpt")(Scripted({"error": "RuntimeError: no"})))
    assert failed[-1].is_good is False


def test_remaps_explain_calls() -> None:
    assert _wrong(Scripted(_answer(mapping_calls={"cuMemMap": 1}, num_remapped_chunks=1))) == []


def test_throughput_has_a_line_for_what_does_not_fit() -> None:
    class OutOfMemory(Scripted):
        def train(self, order: Order) -> dict[str, Any]:
            if order.variant == "in_core":
                return {"error": "OutOfMemoryError: CUDA out of memory\nmore"}
            return super().train(order)

    variants = (other("in_core"), other("checkpoint"), ours("auto"))
    figures = list(throughput("resnet50", (64, 128), 1 << 30, variants)(OutOfMemory(_answer())))
    assert len(figures) == 2 * 3
    assert (figures[0].value, figures[0].note) == (None, "OutOfMemoryError: CUDA out of memory")
    assert figures[-1].value == 16.0
    assert not any(figure.is_good is False for figure in figures)


def test_why_steps_left_their_plans_is_said_once() -> None:
    answer = _answer(mode="off_plan")
    for index, step in enumerate(answer["steps"]):
        step["why"] = "op 7 came" if index else "another one"
    (figure,) = throughput("resnet50", (64,), 1 << 30, (ours("auto"),))(Scripted(answer))
    assert figure.note.endswith("off its plan: another one; off its plan: op 7 came"), figure.note


def test_the_limit_is_the_slower_of_computation_and_links() -> None:
    """Steps of 0.5 s; computation takes 0.4 s; 3 GB in at 10 GB/s and 2 GB out at 5 GB/s, no contention."""

    class Timed(Scripted):
        def train(self, order: Order) -> dict[str, Any]:
            answer = super().train(order)
            if order.variant == "aliased":
                return _answer(mode="in_core") | {"steps": [dict(s, s=0.4) for s in answer["steps"]]}
            return answer

    link = {"read_bytes_per_s": 1e10, "write_bytes_per_s": 5e9}
    link |= {"read_together_bytes_per_s": 1e10, "write_together_bytes_per_s": 5e9}
    more = {"link": link, "live_nbytes": 60 * MIB, "occupied_nbytes": 80 * MIB}
    by_moved = {}
    for gb_out in 1, 2, 3:
        moved = {"loaded_nbytes": 3 * 10**9, "evicted_nbytes": gb_out * 10**9}
        shell = Timed(_answer(**moved) | more)
        figures = list(throughput("resnet50", (8,), 1 << 30, (COMPUTE, ours("auto")))(shell))
        by_moved[gb_out] = {figure.metric: figure.value for figure in figures}
    assert by_moved[1]["both links are busy for at least"] == pytest.approx(0.3)
    assert [by_moved[gb]["fraction of the limit"] for gb in by_moved] == pytest.approx([0.8, 0.8, 1.2])
    assert by_moved[1]["internal fragmentation"] == pytest.approx(0.25)


def test_host_memory_is_pinned_for_what_is_away() -> None:
    shell = Scripted(_answer())
    measure = throughput("resnet50", (100,), 1 << 30, (ours("auto", chunk_nbytes=4 * MIB),), sample_nbytes=50 * MIB)
    list(measure(shell))
    (order,) = shell.orders
    assert order.host_budget_nbytes == 5000 * MIB + (2 << 30)
    assert (order.chunk_nbytes, order.budget_nbytes, order.policy) == (4 * MIB, 1 << 30, "auto")


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    calls: list[str] = []

    def item(name: str, value: float | None) -> Item:
        def measure(_: Shell) -> Iterable[Figure]:
            calls.append(name)
            yield Figure(variant="v", metric="m", unit="s", value=value, is_good=value is not None, note="a | b")

        return Item(name=name, limit_s=10, measure=measure)

    items = [item("first", 1.5), item("second", None), item("third", 1.0)]
    path = tmp_path / "deep" / "results.jsonl"
    gate.run(items[:2], Results(path), fake=True, commit="c0ffee")
    path.write_text(path.read_text() + '{"item": "thi')  # cut off
    results = Results(path)
    assert list(results.items) == ["first", "second"]
    gate.run(items[:2], results, fake=True, commit="c0ffee")
    assert calls == ["first", "second"]
    assert results.items["first"]["commit"] == "c0ffee"
    assert gate.is_wrong(results)
    lines = gate.table(items, results).splitlines()
    assert "| first | v | m | 1.5 s | good: a | b |" in lines
    assert "| second | v | m | not measured | WRONG: a | b |" in lines
    assert "| third | | | not measured | |" in lines
    assert len(lines) == 3 + 3 + len(NOT_THERE)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gate, "_machine", lambda: None)
    monkeypatch.setattr(gate, "_diagnose", lambda: print("the doctor's findings"))
    assert gate.main([]) == 2
    told = capsys.readouterr().out
    assert "torch sees no CUDA device" in told and "the doctor's findings" in told
    assert gate.main(["--list"]) == 0
    assert capsys.readouterr().out.startswith("shard 1: preflight (60 s), doctor (45 s), tests (130 s)")
    with pytest.raises(SystemExit):
        gate.main(["--shard", "99"])
    assert gate.main(["--list", "--only", "side by side", "--only", "demo"]) == 0
    assert capsys.readouterr().out.count(" s)") == 3
    with pytest.raises(SystemExit):
        gate.main(["--list", "--only", "no such item"])


def test_a_child_that_dies_is_an_answer_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "deep" / "failed.log"
    shell = gate.Processes(limit_s=600, fake=True, log=log)
    assert "ValueError" in shell.train(Order(workload="nothing"))["error"]
    for text in log.read_text(), capsys.readouterr().out:
        assert "Traceback" in text and "models.get" in text


def test_an_item_whose_time_is_up_is_neither_right_nor_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It costs only itself, keeps what it had, tells what the process had said, and is measured again if asked."""
    again: list[int] = []

    def hangs(shell: Shell) -> Iterable[Figure]:
        again.append(1)
        yield Figure(variant="v", metric="m", unit="s", value=1.0)
        if len(again) == 1:
            shell.command(["-c", "import time; print('as far as this', flush=True); time.sleep(60)"])

    def fast(shell: Shell) -> Iterable[Figure]:
        assert shell.command(["-c", "print('done')"]) == (0, "done\n")
        yield Figure(variant="v", metric="m", unit="s", value=2.0, is_good=True)

    items = [Item(name="hangs", limit_s=8, measure=hangs), Item(name="fast", limit_s=60, measure=fast)]
    results = Results(tmp_path / "r.jsonl")
    gate.run(items, results, fake=True, commit="c")
    assert not gate.is_wrong(results)
    assert "as far as this" in capsys.readouterr().out
    lines = gate.table(items, results).splitlines()
    assert "| hangs | v | m | 1 s |  |" in lines
    (overran,) = (line for line in lines if "overran" in line)
    assert "not measured" in overran and "8 s were used up" in overran and "WRONG" not in overran
    assert "| fast | v | m | 2 s | good |" in lines
    gate.run(items, Results(tmp_path / "r.jsonl"), fake=True, commit="c")
    assert len(again) == 1
    gate.run(items, Results(tmp_path / "r.jsonl"), fake=True, commit="c", retries=True)
    assert len(again) == 2


def test_no_process_is_started_when_time_is_up() -> None:
    for ask in (lambda shell: shell.train(Order(workload="gpt")), lambda shell: shell.command(["-c", "1"])):
        with pytest.raises(Overran, match="0 s were used up before"):
            ask(gate.Processes(limit_s=0, fake=True))


def test_a_shard_ends_in_time_whatever_its_items_do(tmp_path: Path) -> None:
    limits: list[float] = []

    def look(shell: Any) -> Iterable[Figure]:
        limits.append(shell._limit_s)
        yield Figure(variant="v", metric="m", unit="s", value=1.0)

    items = [Item(name=name, limit_s=limit_s, measure=look) for name, limit_s in (("long", 400), ("short", 15))]
    now = time.monotonic()
    results = Results(tmp_path / "r.jsonl")
    gate.run(items, results, fake=True, commit="c", stops_s=now + 300)
    assert 200 < limits[0] <= 300 and limits[1] == 15
    gate.run([Item(name="late", limit_s=60, measure=look)], results, fake=True, commit="c", stops_s=now + 5)
    assert "late" not in results.items and len(limits) == 2


def test_what_a_child_started_ends_with_it(tmp_path: Path) -> None:
    """A test's own process would go on holding the device's memory."""
    path = tmp_path / "pid"
    script = f"""
import os, subprocess, sys, time
started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(path)!r} + ".partial", "w").write(str(started.pid))
os.rename({str(path)!r} + ".partial", {str(path)!r})
time.sleep(600)
"""
    for limit_s in (2, 10, 80):  # the first is long enough where there is not much else to do
        with pytest.raises(Overran):
            gate.Processes(limit_s=limit_s, fake=True).command(["-c", script])
        if path.exists():
            break
    for _ in range(2000):  # it has been killed; when it is gone is the kernel's choice
        if not _runs(int(path.read_text())):
            return
        time.sleep(0.05)
    raise AssertionError("the child's child runs on")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_an_item_that_fails_costs_no_other(tmp_path: Path) -> None:
    def measure(_: Shell) -> Iterable[Figure]:
        yield Figure(variant="v", metric="m", unit="s", value=1.0)
        raise KeyError("steps")

    items = [Item(name=name, limit_s=10, measure=measure) for name in ("first", "second")]
    results = Results(tmp_path / "r.jsonl")
    gate.run(items, results, fake=True, commit="c")
    assert list(results.items) == ["first", "second"]
    figures = results.items["first"]["figures"]
    assert [(f["value"], f["is_good"]) for f in figures] == [(1.0, None), (None, False)]
    assert "KeyError('steps')" in figures[1]["note"]


def test_what_the_machine_has_is_looked_at_first() -> None:
    assert ITEMS[0].name == FAKE_ITEMS[0].name == "preflight"
    figures = {f.variant: f for f in ITEMS[0].measure(gate.Processes(limit_s=600, fake=True))}
    assert {"compiler", "native parts", "packages", "host memory", "pinning", "store"} <= set(figures)
    assert "MemTotal" in figures["host memory"].note and "MemAvailable" in figures["host memory"].note
    assert "registered at" in figures["pinning"].note
    assert not [f for f in figures.values() if f.is_good is False]
    real = {f.variant: f for f in ITEMS[0].measure(gate.Processes(limit_s=600, fake=False))}
    if not torch.cuda.is_available():
        assert real["device"].is_good is False


def test_without_git_the_commit_is_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    found = gate._commit()
    assert re.fullmatch("no-commit-[0-9a-f]{12}", found)
    assert gate._commit() == found
    monkeypatch.setattr(gate, "_MEASURED", ("benchmarks",))
    assert gate._commit() != found  # other files: what was measured before does not count


def test_a_shard_whose_items_all_fail_ends_and_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A child that is killed, one that hangs, an item that raises: each is told in full, last of all, and kept."""

    def killed(shell: Shell) -> Iterable[Figure]:
        code, _ = shell.command(["-c", "import os; print('so far', flush=True); os.kill(os.getpid(), 9)"])
        yield Figure(variant="v", metric="exit code", unit="", value=code, is_good=code == 0, note="x" * 300)

    def hangs(shell: Shell) -> Iterable[Figure]:
        shell.command(["-c", "import time; time.sleep(60)"])
        yield Figure(variant="v", metric="m", unit="", value=1.0)

    def raises(_: Shell) -> Iterable[Figure]:
        raise KeyError("steps")

    measures = {"killed": (killed, 60), "hangs": (hangs, 2), "raises": (raises, 5)}
    items = tuple(Item(name=name, limit_s=limit_s, measure=m) for name, (m, limit_s) in measures.items())
    monkeypatch.setattr(gate, "FAKE_ITEMS", items)
    assert gate.main(["--fake", "--shard", "1", "--out", str(tmp_path), "--commit", "c"]) == 1
    end = capsys.readouterr().out.partition("| raises | gate |")[2]
    assert f"WRONG: killed, v, exit code: {'x' * 300}\n  | so far\n  | exit code -9" in end
    assert "overran: hangs, gate, ends in time" in end
    assert "WRONG: raises, gate, measures: KeyError('steps')" in end
    kept = Results(tmp_path / "fake-c.jsonl").items
    assert set(kept) == set(measures)
    assert all(
        found["commit"] == "c" and found["machine"]["gpu"] == "fake" and found["date"] for found in kept.values()
    )
    assert "so far" in (tmp_path / "fake-c.log").read_text()


def test_the_first_shard_ends_within_nine_minutes() -> None:
    """By the last item's end, what hangs in the driver, and the imports of a slow disk."""
    assert gate._LAST_ITEM_S + 2 * gate._END_S + 30 <= 9 * 60


def test_failed_tests_are_named() -> None:
    class Failing(Scripted):
        def command(self, arguments: Sequence[str]) -> tuple[int, str]:
            assert list(arguments[:6]) == ["-m", "pytest", "-v", "-m", "gpu", "--require-gpu"]
            return 1, "..F\nFAILED tests/gpu/test_driver.py::test_it[cuda] - assert 1 == 2\n1 failed, 2 passed"

    (item,) = (item for item in ITEMS if item.name == "tests")
    total, failed = item.measure(Failing(_answer()))
    assert (total.is_good, total.note) == (False, "1 failed, 2 passed")
    assert (failed.variant, failed.note, failed.is_good) == ("test_it[cuda]", "assert 1 == 2", False)


def test_tests_that_failed_before_time_was_up_are_named() -> None:
    class Late(Scripted):
        def command(self, _: Sequence[str]) -> tuple[int, str]:
            told = "tests/gpu/test_driver.py::test_a PASSED [ 5%]\ntests/gpu/test_driver.py::test_b FAILED [ 9%]\n"
            raise Overran("time was up", output=told + "tests/gpu/test_driver.py::test_c ")

    (item,) = (item for item in ITEMS if item.name == "tests")
    found: list[Figure] = []
    with pytest.raises(Overran):
        found.extend(item.measure(Late(_answer())))
    figures = list(gate._figures(item, Late(_answer())))  # type: ignore[arg-type]
    assert [(f.variant, f.is_good, f.overran) for f in figures] == [("test_b", False, False), ("gate", None, True)]


def test_an_item_over_the_fake_driver(tmp_path: Path) -> None:
    """Half the memory, in processes of their own, as on a GPU."""

    class Fewer(ForkedProcesses):
        half = 0

        def train(self, order: Order) -> dict[str, Any]:
            if order.budget_nbytes is None:
                in_core = super().train(order)
                self.half = in_core["peak_nbytes"] // 2 // (64 << 10) * (64 << 10)
                return in_core
            kept = not order.debug and order.budget_nbytes == self.half
            return super().train(order) if kept else {"error": "left out", "is_too_small": True}

    shell = Fewer(limit_s=600, fake=True)
    figures = [f for f in bitwise("conv_stack", preset="small", chunk_nbytes=64 << 10)(shell) if f.variant == "half"]
    assert [figure.is_good for figure in figures] == [True] * 4, figures
    results = Results(tmp_path / "r.jsonl")
    results.add("bitwise conv_stack", figures, took_s=1.0, machine=shell.machine, commit="c")
    assert "fake driver" in Results(tmp_path / "r.jsonl").items["bitwise conv_stack"]["machine"]["gpu"]


def test_driver_calls_over_the_fake() -> None:
    (item,) = (item for item in FAKE_ITEMS if item.name == "driver calls")
    figures = list(item.measure(gate.Processes(limit_s=600, fake=True)))
    assert {figure.variant for figure in figures} == {"idle", "loaded"}
    names = {figure.metric for figure in figures}
    assert names >= {"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease", "cuEventRecord"}
    assert all(figure.value is not None and figure.value > 0 for figure in figures)


def test_the_doctor_and_the_demo_are_figures() -> None:
    (doctor,) = (item for item in FAKE_ITEMS if item.name == "doctor")
    figures = {figure.variant: figure for figure in doctor.measure(ForkedProcesses(limit_s=600, fake=True))}
    assert figures["session on the device"].is_good and "came back whole" in figures["session on the device"].note
    assert not [f for f in figures.values() if f.is_good is False]

    class Told(Scripted):
        def command(self, arguments: Sequence[str]) -> tuple[int, str]:
            assert list(arguments) == ["-m", "ooc", "demo", "--device", "cuda"]
            return 1, "in core, step 0: loss 1.0\nlosses equal to the last bit: 11 of 12\n"

    (demo,) = (item for item in ITEMS if item.name == "demo")
    code, equal = demo.measure(Told(_answer()))
    assert (code.value, code.is_good) == (1, False)
    assert (equal.metric, equal.note) == ("losses equal to the last bit", "11 of 12")


def test_a_child_needs_torch_and_numpy_alone() -> None:
    """An image for GPUs has no more: what ooc's command line needs is not imported."""
    script = """
import sys
blocked = {"rich", "matplotlib", "scipy", "psutil", "safetensors"}
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ImportError(f"{name} is not here")
sys.meta_path.insert(0, Blocker())
import benchmarks.gpu.gate
from benchmarks.gpu.child import Order, run
order = Order(workload="conv_stack", preset="small", variant="ours", budget_nbytes=2 << 20, num_steps=5, fake=True)
assert run(order)["steps"][-1]["mode"] == "planned"
"""
    code, output = gate.Processes(limit_s=600, fake=True).command(["-c", script])
    assert code == 0, output
