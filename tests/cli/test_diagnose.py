"""Live recordings of programs that have no budget: `ooc.record_fragmentation`, `ooc run --diagnose`."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import ooc
from ooc.cli.main import main
from ooc.fragmentation import BadFile, read_streams
from ooc.fragmentation.frames import origin_of
from ooc.fragmentation.page_faults import PageFaultReport, StepCost, allocator_name
from tests import forked
from tests.cli.test_run import environment

SCRIPTS = Path(__file__).parents[1] / "scripts"
TRAIN = str(SCRIPTS / "train.py")
MIB = 1 << 20
TIMEOUT_S = 600

CPU = "cpu"
"""Tests of the profiler's way; on a machine with a GPU the default would be CUDA's."""


def train(num_steps: int) -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(num_steps):
        model(torch.randn(256, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_recording_replays_what_was_allocated() -> None:
    with ooc.record_fragmentation(device=CPU) as recording:
        kept = [torch.empty(MIB, dtype=torch.uint8) for _ in range(3)]
        torch.empty(5 * MIB, dtype=torch.uint8)  # freed at once
        del kept[0]
    (stream,) = recording.streams()
    assert stream.device == "cpu"
    older = int(stream.nbytes[: stream.num_initial].sum())  # of earlier tests' profiles in this process
    assert stream.peak_live_nbytes - older == 8 * MIB
    assert sorted(n for n in stream.nbytes.tolist() if n >= MIB) == [MIB] * 3 + [5 * MIB]
    report = recording.report(capacity=9 * MIB)
    verdicts = {s.replay.allocator: s.outcome.value for s in report.summaries}
    assert verdicts["first-fit-by-size"] == "fits"
    assert "test_diagnose.py" in " ".join(frame for buffer in range(4) for frame in stream.stack(buffer))
    recording.close()
    with pytest.raises(BadFile):
        recording.streams()


def test_without_stacks_no_python_frames_are_recorded() -> None:
    with ooc.record_fragmentation(device=CPU, stacks=False) as recording:
        train(1)
    (stream,) = recording.streams()
    assert not any(".py(" in frame for buffer in range(stream.num_buffers) for frame in stream.stack(buffer))


def test_it_stops_after_some_steps_and_keeps_its_file(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    recording = ooc.record_fragmentation(str(path), device=CPU, max_steps=2)
    with recording:
        train(2)
        assert not recording.is_recording
        torch.empty(64 * MIB, dtype=torch.uint8)
    assert recording.num_steps == 2
    recording.close()
    (stream,) = read_streams(path)
    assert 3 * MIB < stream.peak_live_nbytes < 64 * MIB


def test_it_records_beside_a_session() -> None:
    with ooc.Session("6MiB", plan_cache=False), ooc.record_fragmentation(device=CPU) as recording:
        train(2)
    assert recording.streams()


def test_a_recording_that_cannot_be_made_says_why() -> None:
    with pytest.raises(ValueError, match=r"device='tpu'. Options"):
        ooc.record_fragmentation(device="tpu")
    with pytest.raises(ValueError, match="max_steps=0: at least 1"):
        ooc.record_fragmentation(max_steps=0)
    recording = ooc.record_fragmentation(device=CPU)
    with pytest.raises(RuntimeError, match="nothing is recorded yet"):
        recording.streams()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        with pytest.raises(RuntimeError, match=r"torch.profiler is running already"):
            recording.start()
        assert not recording.is_recording
    with recording:
        torch.empty(8)
    with pytest.raises(RuntimeError, match="made once"):
        recording.start()


FLAT = """import torch
model = torch.nn.Linear(512, 512)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for _ in range(2):
    x = torch.randn(256, 512)
    doubled = x * 2
    loss = model(doubled).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_scripts_top_level_is_named_with_its_lines(tmp_path: Path) -> None:
    """Its functions have the line of their `def` in a profile, its top level none, and `x * 2` is no call at all."""
    script, report = tmp_path / "flat.py", tmp_path / "found.json"
    script.write_text(FLAT)
    done = run("-m", "ooc", "run", "--diagnose", "--report", str(report), str(script))
    assert done.returncode == 0, done.stderr
    document = json.loads(report.read_text())
    named = [line for row in (*document["holders"], *document["culprits"]) for line in row["lines"]]
    numbers = {line.partition("<module> at flat.py")[2] for line in named if "flat.py" in line}
    assert numbers <= {f":{number}" for number in range(1, 11)} and {":2", ":8", ":9"} <= numbers


def lines_recorded(recording: ooc.Recording) -> set[tuple[int, int]]:
    """Of each large buffer its size, and the innermost line."""
    (stream,) = recording.streams()
    new = range(stream.num_initial, stream.num_buffers)
    found = [(int(stream.nbytes[b]), origin_of(stream.stack(b)).lines) for b in new]
    return {(nbytes, int(lines[0].rpartition(":")[2])) for nbytes, lines in found if nbytes >= MIB}


def test_each_line_of_a_function_is_told_apart() -> None:
    """Also in a generator that is resumed, in a caller that was under way, and after an exception."""

    def made() -> Iterator[torch.Tensor]:
        for index in range(1, 3):
            yield torch.empty(index * MIB, dtype=torch.uint8)

    first = made.__code__.co_firstlineno
    with ooc.record_fragmentation(device=CPU) as recording:
        kept = [x + 1 for x in made()]
        with pytest.raises(RuntimeError):
            torch.empty(3) @ torch.empty(5)
        more = torch.empty(3 * MIB, dtype=torch.uint8)
        last = torch.cat([more, kept[0]])
    assert last is not None and sys.gettrace() is None
    lines = {2: (MIB, 2 * MIB), 6: (MIB, 2 * MIB), 9: (3 * MIB,), 10: (4 * MIB,)}
    assert lines_recorded(recording) == {(n, first + line) for line, sizes in lines.items() for n in sizes}


def test_lines_are_left_alone_where_somebody_traces_them() -> None:
    """A debugger's or a coverage tool's trace function stays, and so do the lines of the `def`s."""
    seen = []

    def trace(_frame: FrameType, event: str, _: object) -> None:
        seen.append(event)

    sys.settrace(trace)
    try:
        with ooc.record_fragmentation(device=CPU) as recording:
            torch.empty(3 * MIB, dtype=torch.uint8)
        assert sys.gettrace() is trace
    finally:
        sys.settrace(None)
    assert seen and {n for n, _ in lines_recorded(recording)} == {3 * MIB}


def test_another_thread_does_not_end_a_recording() -> None:
    """torch's profiler, ended by a thread that did not start it, ends the process by a signal."""
    found: list[BaseException] = []

    def end() -> None:
        train(2)
        try:
            recording.stop()
        except RuntimeError as error:
            found.append(error)

    with ooc.record_fragmentation(device=CPU, max_steps=1) as recording:
        thread = threading.Thread(target=end)
        thread.start()
        thread.join()
        assert recording.is_recording and recording.num_steps == 2
        assert "ends on the thread that it began on" in str(found[0])
        torch.empty(3 * MIB, dtype=torch.uint8)
    assert 3 * MIB in {n for n, _ in lines_recorded(recording)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_refused_where_there_is_none() -> None:
    with pytest.raises(ValueError, match="torch sees no CUDA device"):
        ooc.record_fragmentation(device="cuda")


@pytest.mark.gpu
def test_a_recording_on_cuda_replays_to_the_allocators_own_figures() -> None:
    torch.cuda.empty_cache()
    with ooc.record_fragmentation(device="cuda") as recording:
        kept = [torch.empty(3 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
        peak = torch.cuda.memory_allocated()
        del kept
    (stream,) = recording.streams()
    assert stream.peak_live_nbytes == pytest.approx(peak, rel=0.01)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return forked.run(command, env=environment(), timeout=TIMEOUT_S)


def test_diagnose_leaves_the_script_alone_and_tells_at_its_end(tmp_path: Path) -> None:
    report = tmp_path / "found.json"
    ours = run("-m", "ooc", "run", "--diagnose", "--report", str(report), TRAIN)
    plain = run(TRAIN)
    assert (ours.returncode, plain.returncode) == (0, 0)
    assert ours.stdout.replace(str(report), "") == plain.stdout
    assert "3 optimizer steps were recorded" in ours.stderr
    assert "What to do" in ours.stderr
    document = json.loads(report.read_text())
    assert document["schema"] == "ooc.fragmentation"
    assert document["peak_live_nbytes"] > MIB


def test_steps_that_only_fault_pages_are_counted(tmp_path: Path) -> None:
    """Each step maps 32 MiB of its own, writes it and gives it back: 8,192 pages, taken again in each step."""
    report = tmp_path / "found.json"
    script = tmp_path / "faults.py"
    script.write_text(
        "import mmap, torch\n"
        "x = torch.nn.Parameter(torch.ones(1 << 16))\n"
        "optimizer = torch.optim.SGD([x], lr=0.1)\n"
        "for _ in range(9):\n"
        "    with mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as fresh:\n"
        "        fresh.madvise(mmap.MADV_NOHUGEPAGE)\n"
        "        fresh[:] = bytes(1) * (32 << 20)\n"
        "    x.sum().backward()\n"
        "    optimizer.step()\n"
    )
    done = run("-m", "ooc", "run", "--diagnose", "--report", str(report), str(script))
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())["page_faults"]
    pages = (32 << 20) // mmap.PAGESIZE
    assert pages <= found["num_faults"] <= 3 * pages + 5000  # the bytes that are written are made first
    assert found["num_steps"] == 6 and not found["is_recorded"]  # of 9, three were recorded
    assert found["fault_ns"] > 0 and found["cost_ns"] <= found["system_ns"]
    assert "Memory given back and taken again" in done.stderr


def test_the_scripts_own_hooks_survive_the_end_of_a_recording(tmp_path: Path) -> None:
    """torch walks over all hooks while it calls them: one that goes from within ends the script with a RuntimeError."""
    script = tmp_path / "hooks.py"
    script.write_text(
        "import torch\n"
        "from torch.optim.optimizer import register_optimizer_step_post_hook\n"
        "calls = []\n"
        "register_optimizer_step_post_hook(lambda *_: calls.append(1))\n"
        "x = torch.nn.Parameter(torch.ones(8))\n"
        "optimizer = torch.optim.SGD([x], lr=0.1)\n"
        "for _ in range(6):\n"
        "    x.sum().backward()\n"
        "    optimizer.step()\n"
        "print(len(calls))\n"
    )
    done = run("-m", "ooc", "run", "--diagnose", str(script))
    assert (done.returncode, done.stdout) == (0, "6\n"), done.stderr


def cost(system_ns: int, num_faults: int, allocator: str = "glibc 2.36") -> PageFaultReport:
    step = StepCost(wall_ns=10**9, user_ns=10**9 - system_ns, system_ns=system_ns, num_faults=num_faults)
    return PageFaultReport(
        allocator=allocator, num_steps=5, is_recorded=False, step=step, fault_ns=1000, page_nbytes=4096
    )


def test_what_page_faults_cost_and_what_to_do() -> None:
    found = cost(400_000_000, 300_000)
    assert found.cost_ns == 300_000_000 and found.share == pytest.approx(0.3)
    text = "\n".join(found.lines("train.py", 100 * MIB))
    assert "takes at least 1.1 GiB again" in text and "30% of a step" in text
    assert "ooc run --budget 100MiB train.py" in text and "MALLOC_MMAP_MAX_=0" in text
    assert cost(200_000_000, 300_000).cost_ns == 200_000_000  # no more than the kernel took
    assert "nothing to gain" in "\n".join(cost(400_000_000, 10_000).lines("train.py", MIB))
    assert "MMAP_MAX" not in "\n".join(cost(400_000_000, 300_000, "jemalloc").lines("train.py", MIB))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/usr/lib/x86_64-linux-gnu/libjemalloc.so.2", "jemalloc"),
        ("/usr/lib/libtcmalloc_minimal.so.4.5.9", "tcmalloc"),
        ("/opt/libmimalloc.so.2.1", "mimalloc"),
        ("/usr/lib/x86_64-linux-gnu/libc.so.6", "glibc"),
    ],
)
def test_whose_malloc_it_is(path: str, name: str) -> None:
    maps = f"7f00-7f01 r-xp 00000000 08:01 131 {path}\n7ffd-7ffe rw-p 00000000 00:00 0 [stack]\n"
    assert allocator_name(maps).startswith(name)


def test_diagnose_tells_also_when_the_script_fails(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import torch\nx = torch.ones(1 << 20)\ny = x * 2\nraise ValueError('on purpose')\n")
    done = run("-m", "ooc", "run", "--diagnose", str(script))
    assert done.returncode == 1
    assert "most live at once 8.0 MiB" in done.stderr
    assert "ValueError: on purpose" in done.stderr
    assert 'runner.py", line' not in done.stderr  # the traceback is the script's own


def test_diagnose_of_a_script_that_allocates_nothing(tmp_path: Path) -> None:
    script = tmp_path / "idle.py"
    script.write_text("print('hello')\n")
    done = run("-m", "ooc", "run", "--diagnose", str(script))
    assert (done.returncode, done.stdout) == (0, "hello\n")
    assert "nothing to tell" in done.stderr


def test_diagnose_has_no_budget(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", "--diagnose", "--budget", "1GiB", TRAIN]) == 2
    assert "--budget is for running within one" in capsys.readouterr().err
    assert main(["run", "--diagnose", str(tmp_path / "none.py")]) == 2
    assert "can't open file" in capsys.readouterr().err
