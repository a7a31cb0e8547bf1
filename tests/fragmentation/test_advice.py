"""The first line of a report, advice that can be typed as it stands, and what changed between two files."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from ooc.cli.main import main as ooc_main
from ooc.fragmentation import make_report, parse_settings, read_streams
from ooc.fragmentation.cli import main
from ooc.fragmentation.difference import compare_reports
from ooc.fragmentation.stream import ALLOC, FREE, Stream
from ooc.options import parse_options
from ooc.units import parse_nbytes
from tests.fragmentation.cases import BY_HAND, DATA, MIB, PROFILES, snapshot, stream_of, written

REAL = DATA / "real_allocator"
NAMES = ("out_of_memory", "expandable", "two_streams_full")


def of_gpu(stream: Stream, **more: Any) -> Stream:
    events = list(zip(stream.kind.tolist(), stream.buffer.tolist(), strict=True))
    made = stream_of(events, stream.nbytes.tolist(), **more)
    object.__setattr__(made, "device", "cuda:0")
    return made


def test_fragmentation_is_named_with_what_would_have_fitted() -> None:
    (stream,) = read_streams(DATA / "snapshot_by_hand.pickle")
    line = make_report(stream).headline
    assert line.startswith(
        "Out of memory: 16.0 MiB were asked for by F at /home/me/train.py:7. Fragmentation: 24.0 MiB"
    )
    assert "in pieces of at most 15.0 MiB" in line
    assert line.endswith("fitted with PYTORCH_ALLOC_CONF=expandable_segments:True (peak 42.0 MiB, 16.0 MiB less).")


def test_too_much_at_once_is_named_with_what_is_missing() -> None:
    """33 MiB are live at once in 30: no setting can help, and none is offered."""
    (stream,) = read_streams(DATA / "snapshot_by_hand.pickle")
    report = make_report(stream, capacity=30 * MIB)
    assert report.remedies == ()
    assert report.headline.startswith("Out of memory")
    # 28 MiB of what a device of 30 has left, 2 MiB of them for small tensors; the replay without a limit held 58 MiB.
    assert report.headline.endswith(
        "No setting helps: hold 3.0 MiB less at once, or keep the rest outside: ooc run --device cuda --budget 26MiB "
        "train.py (peak 28.0 MiB with 2.0 MiB for tensors below 64.0 KiB, which no budget counts, 30.0 MiB less)."
    )


@pytest.mark.parametrize("name", NAMES)
def test_recorded_failures_of_the_real_allocator(name: str) -> None:
    """Each first line has the size that was refused, what was left, and an option or why there is none."""
    (stream,) = read_streams(REAL / f"{name}.pickle")
    report = make_report(stream)
    line = report.headline
    assert line.startswith("Out of memory: ")
    assert re.search(r"(Fragmentation|Too much is live|The allocator needed)", line)
    assert re.search(r"(It would have fitted with PYTORCH|It would have fitted with ooc run|No setting)", line)
    # Each way out says what it would save, in bytes.
    ways = [line for line in (*report.advice, line) if "ooc run " in line or "_ALLOC_CONF=" in line]
    assert ways and all(re.search(r", [\d.]+ [KMG]iB less\)", way) for way in ways)
    for budget, peak in re.findall(r"--budget (\S+) .*?\(peak (\S+ \S+) ", line):
        assert parse_nbytes(budget, what="budget") < float(peak.split()[0]) * MIB <= (report.capacity_nbytes or 0)
    # An option that is named fits when it is replayed on its own.
    if report.remedies and report.remedies[0].text.startswith("PYTORCH"):
        settings = parse_settings(report.remedies[0].text.split("=")[1].split(":", 1)[0] + ":True")
        again = make_report(stream, settings=settings, capacity=report.capacity_nbytes)
        assert not again.does_not_fit


def test_nothing_failed() -> None:
    assert make_report(of_gpu(BY_HAND)).headline == (
        "Nothing failed. At its peak: 40.0 MiB held for 21.0 MiB in use, 48% lost."
    )
    assert make_report(of_gpu(BY_HAND), capacity=64 * MIB).headline.startswith(
        "Fits in 64.0 MiB. At its peak: 40.0 MiB"
    )


def commands(report_lines: list[str]) -> list[list[str]]:
    found = [re.search(r"ooc (run .*?\.py)", line) for line in report_lines]
    return [shlex.split(match[1]) for match in found if match]


@pytest.mark.parametrize("capacity", [None, 30 * MIB, 41 * MIB, 45 * MIB])
def test_advice_for_a_gpu_is_for_a_gpu(capacity: int | None) -> None:
    (stream,) = read_streams(DATA / "snapshot_by_hand.pickle")
    report = make_report(stream, capacity=capacity)
    for command in commands([*report.advice, report.headline]):
        assert command[command.index("--device") + 1] == "cuda"
        assert command[-1] == "/home/me/train.py" or command[-1] == "train.py"
        if "--chunk" in command:
            assert parse_nbytes(command[command.index("--chunk") + 1], what="chunk") % (2 * MIB) == 0
        assert parse_nbytes(command[command.index("--budget") + 1], what="budget") % (2 * MIB) == 0
    assert not any("static" in line for line in report.advice)  # no setting of PyTorch's makes one
    for remedy in report.remedies:
        assert remedy.gain_nbytes is not None and remedy.peak_nbytes > 0
        if remedy.text.startswith("PYTORCH"):
            assert remedy.text.startswith("PYTORCH_ALLOC_CONF=")
            parse_settings(remedy.text.split("=")[1].partition(": ")[0])  # what is advised is accepted


def test_a_budget_below_the_peak_says_what_is_held_beside_it() -> None:
    """It used to read `--budget 34MiB ... (peak 36.0 MiB)`: as if the budget were too small for its own peak."""
    (stream,) = read_streams(DATA / "snapshot_by_hand.pickle")
    lines = [remedy.line() for remedy in make_report(stream).remedies if "--budget" in remedy.text]
    assert lines
    for line in lines:
        budget = parse_nbytes(re.search(r"--budget (\S+)", line)[1], what="budget")  # type: ignore[index]
        peak, small = re.search(r"\(peak (\S+) MiB with (\S+) MiB for tensors below 64.0 KiB", line).groups()  # type: ignore[union-attr]
        assert budget == (float(peak) - float(small)) * MIB < float(peak) * MIB


def test_settings_that_were_there_stay_in_what_is_advised(tmp_path: Path) -> None:
    document = snapshot()
    document["allocator_settings"]["roundup_power2_divisions"] = {str(1 << i): 4 for i in range(16)}
    (stream,) = read_streams(written(document, tmp_path))
    report = make_report(stream)
    texts = [remedy.text for remedy in report.remedies if "expandable" in remedy.text]
    assert texts and all("roundup_power2_divisions:4" in text for text in texts)


@pytest.mark.parametrize("capacity", [None, 2 * MIB, 3 * MIB])
def test_advice_for_a_cpu_has_no_settings_of_cudas_allocator(capacity: int | None) -> None:
    (stream,) = read_streams(DATA / PROFILES[0])
    report = make_report(stream, capacity=capacity)
    text = "\n".join([*report.advice, report.headline])
    assert "ALLOC_CONF" not in text and "--device cuda" not in text
    found = commands(list(report.advice))
    assert found
    for command in found:
        chunk = command[command.index("--chunk") + 1] if "--chunk" in command else None
        parse_options(command[command.index("--budget") + 1], chunk_nbytes=chunk)  # a session accepts it


def test_two_files_what_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After the change C, of 12 MiB, is gone: 13 MiB less are held by its line, and nothing fails."""
    before = tmp_path / "before.pickle"
    before.write_bytes((DATA / "snapshot_by_hand.pickle").read_bytes())
    (one,) = read_streams(before)
    kept = [(k, b) for k, b in zip(one.kind.tolist(), one.buffer.tolist(), strict=True) if b not in (2, 5)]
    names = {0: 0, 1: 1, 3: 2, 4: 3}
    other = of_gpu(stream_of([(k, names[b]) for k, b in kept], [int(one.nbytes[b]) for b in names]))
    object.__setattr__(other, "stack", lambda buffer: (f"{'ABDE'[buffer]} at /home/me/train.py:{9 + buffer}",))
    found = compare_reports(make_report(one), make_report(other))
    assert "less at the peak" in found.headline
    assert found.headline.endswith("Most of it: C at /home/me/train.py:7, 13.0 MiB less.")
    assert "The first ran out of memory, the second did not." in found.headline
    by_line = {change.origin.lines[0].split(" ")[0]: change.change_nbytes for change in found.lines}
    assert by_line["C"] == -13 * MIB
    assert "D" not in by_line  # the line moved, but holds what it held

    paths = [str(REAL / "two_streams.pickle"), str(REAL / "two_streams_full.pickle")]
    assert ooc_main(["fragmentation", *paths]) == 1  # the second ran out of memory
    shown = capsys.readouterr().out
    assert shown.startswith("20.0 MiB less at the peak (14%): 144.0 MiB, then 124.0 MiB. The second ran out of memory.")
    assert main([*paths[::-1], "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {"before", "after", "changed"}
    assert document["changed"]["headline"].startswith("20.0 MiB more at the peak")
    assert main([paths[0], paths[0]]) == 0
    assert capsys.readouterr().out.startswith("The peak held is the same: 144.0 MiB.")


def test_of_one_peak_the_calls_that_wait_for_the_device_are_named_with_their_cause() -> None:
    """One program; with expandable segments its 82 MiB are mapped in more calls, and a request more is made again."""
    before, after = (make_report(read_streams(REAL / f"{name}.pickle")[0]) for name in ("out_of_memory", "expandable"))
    found = compare_reports(before, after)
    one, other = before.reference_summary, after.reference_summary
    assert one is not None and other is not None
    calls = [s.replay.num_device_allocs + s.replay.num_device_frees for s in (one, other)]
    assert calls[1] > calls[0]
    assert found.headline.startswith(
        f"The peak held is the same: 82.0 MiB. Slower: {calls[1]} calls of the device, which waits for each, "
        f"instead of {calls[0]}, "
    )
    assert found.headline.endswith("(defaults -> expandable_segments:True).")
    assert compare_reports(after, before).headline.startswith("The peak held is the same: 82.0 MiB. Faster: ")
    assert compare_reports(after, after).headline == "The peak held is the same: 82.0 MiB."


def test_two_files_that_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(REAL / "graph.pickle")
    assert main([path, path, path]) == 2
    assert "3 files: it takes one, or two to compare" in capsys.readouterr().err
    assert main([path, str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main([path, path, "--png", str(tmp_path / "a.png")]) == 2
    assert "--png draws one file" in capsys.readouterr().err


def test_more_held_with_no_more_asked_for_is_not_the_programs_doing() -> None:
    """The same requests in another order of frees: what is kept changes, not what is asked for."""
    sizes = [3 * MIB, 4 * MIB, 12 * MIB, 5 * MIB]
    first = of_gpu(stream_of([(ALLOC, i) for i in range(3)] + [(FREE, 2), (ALLOC, 3)], sizes))
    second = of_gpu(stream_of([(ALLOC, 0), (ALLOC, 1), (ALLOC, 2), (FREE, 0), (ALLOC, 3)], sizes))
    found = compare_reports(make_report(first), make_report(second))
    assert found.figures[1].after > found.figures[1].before
    assert "20.0 MiB more at the peak" in found.headline
