"""Files that are something else, hostile pickles, and the command `ooc fragmentation`."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread

from ooc.cli.main import main as ooc_main
from ooc.fragmentation import (
    BadFile,
    read_streams,
)
from ooc.fragmentation.cli import main
from ooc.fragmentation.unpickler import MAX_OPEN_MARKS, load_plain
from tests.fragmentation.cases import BASE, DATA, MIB, PROFILES, event, snapshot, written

# -- pickles that are no snapshots ---------------------------------------------------------------


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/this-must-not-exist-ooc",)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False) | st.text(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5) | st.tuples(inner)
    ),
    max_leaves=30,
)


@settings(max_examples=150, deadline=None)
@given(value=PLAIN, protocol=st.integers(2, 5))
def test_plain_pickles_are_read_as_python_reads_them(value: Any, protocol: int) -> None:
    assert load_plain(pickle.dumps(value, protocol=protocol)) == value
    assert load_plain(pickle._dumps(value, protocol=protocol)) == value  # type: ignore[attr-defined]


@settings(max_examples=150, deadline=None)
@given(noise=st.binary(max_size=60), at=st.integers(0, 400))
def test_damaged_pickles_are_refused_or_read(noise: bytes, at: int) -> None:
    """Whatever the bytes: an object of plain kinds, or BadFile."""
    data = pickle.dumps(snapshot())
    for damaged in (data[:at] + noise + data[at + len(noise) :], b"\x80\x04" + noise, data[:at]):
        try:
            load_plain(damaged)
        except BadFile:
            continue


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_code_in_a_pickle_is_refused_by_name(tmp_path: Path, protocol: int) -> None:
    document = snapshot()
    document["segments"].append(Evil())
    with pytest.raises(BadFile, match=r"refused: the pickle asks for '(posix|nt)\.system'.*Nothing was run"):
        read_streams(written(document, tmp_path, protocol))
    assert not Path("/tmp/this-must-not-exist-ooc").exists()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80\x04c__builtin__\neval\n.", "asks for '__builtin__.eval'"),
        (b"\x80\x04(i__builtin__\neval\n.", "asks for '__builtin__.eval'"),
        (b"\x80\x04\x82\x01.", "opcode EXT1"),
        (b"\x80\x04]}b.", "opcode BUILD"),
        (b"\x80\x04]]R.", "opcode REDUCE"),
        (b"\x80\x04Pid\n.", "opcode PERSID"),
        (b"\x80\x05\x96" + struct.pack("<Q", 1 << 40), "opcode BYTEARRAY8"),
        (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"x.", "cut off"),
        (b"\x80\x04X" + struct.pack("<I", 1 << 31) + b"x.", "cut off"),
        (b"\x80\x02]r" + struct.pack("<I", 0x7FFFFFFF) + b".", "memo entry 2147483647 when 0 exist"),
        (b"\x80\x04\x8b" + struct.pack("<i", 1 << 20) + b"\1" * (1 << 20) + b".", "integer of 1048576 bytes"),
        (b"\x80\x04\x8b" + struct.pack("<i", -5) + b".", "cut off"),
        (b"\x80\x04" + b"(" * 100_000, f"deeper than {MAX_OPEN_MARKS}"),
        (b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b".", "more than 65536 objects"),
        (b"\x80\x04})" + b"\x85" * 1_000_000 + b"Ns.", "a dict key at byte .* is a tuple"),
        (b"\x80\x06N.", "pickle protocol 6; this reads 2 to 5"),
        (b"\x80\x04K\x01K\x02a.", "appends to a int"),
        (b"\x80\x04h\x05.", "cut off"),
        (b"\x80\x04NN.", "objects left over"),
        (b"\x80\x04a.", "cut off"),
        (b"\x80\x04\x8c\x01\xff.", "not UTF-8"),
        (b"\x80\x04\xfe.", "unknown 0xfe"),
    ],
)
def test_hostile_pickles(data: bytes, message: str) -> None:
    with pytest.raises(BadFile, match=message):
        load_plain(data)


def test_a_list_that_refers_to_itself_many_times(tmp_path: Path) -> None:
    """10,000 traces that are one list of 10,000 events: a hundred million events in a small file."""
    one = [event("alloc", BASE + 512 * i, 512) for i in range(10_000)]
    document = {"segments": [], "device_traces": [one] * 10_000}
    with pytest.raises(BadFile, match="claims 100000000 events"):
        read_streams(written(document, tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: [d], "the pickle is a list"),
        (lambda _: {"model": {}}, "no list 'segments', but model"),
        (lambda _: 3, "the pickle is a int"),
        (lambda d: {**d, "segments": [], "device_traces": []}, "the snapshot is empty"),
        (lambda d: {**d, "segments": [{**d["segments"][0], "total_size": 5}]}, "has 5 bytes, but its blocks have"),
        (lambda d: {**d, "segments": [{}]}, "KeyError"),
        (lambda d: {**d, "device_traces": [[{"action": "alloc"}]]}, "event 0 of device_traces.0. .* KeyError: 'addr'"),
        (lambda d: {**d, "device_traces": [[event("alloc", BASE, -5)]]}, "has -5 bytes"),
        (lambda d: {**d, "device_traces": [[event("alloc", BASE, 1 << 70)]]}, "larger than any memory"),
        (lambda d: {**d, "device_traces": [[{**event("alloc", BASE, 1), "size": 1.5}]]}, "is a float, not an int"),
        (lambda d: {**d, "device_traces": [7]}, "is a int, not a list"),
        (lambda d: {**d, "allocator_settings": {"max_split_size": 5}}, "allocator_settings cannot be read"),
    ],
)
def test_pickles_that_are_no_snapshots(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(BadFile, match=message):
        read_streams(written(change(snapshot()), tmp_path))


def test_an_unknown_event_is_counted(tmp_path: Path) -> None:
    document = snapshot()
    document["device_traces"][0].append(event("segment_teleport", BASE, 1))
    (stream,) = read_streams(written(document, tmp_path))
    assert "1 events of the unknown kind 'segment_teleport' were passed over" in stream.notes


# -- files that are something else, and the command ----------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"hello", "neither a pickle nor JSON"),
        (b"PK\x03\x04" + bytes(30), "a zip archive"),
        (b"{", "not JSON"),
        (b'{"traceEvents": [{"name": "x"}', "cut off"),
        (b'{"traceEvents": [{"name": "[mem', "cut off"),
        (b'{"traceEvents": []}', "no traceEvents"),
        (b'{"traceEvents": [{"name": "x"}]}', "1 events, none of them '.memory.'"),
        (b'{"traceEvents": [3]}', "is a int, not an object"),
        (b'{"traceEvents": [{"name": "[memory]", "ts": 1, "args": {}}]}', "KeyError: 'Device Type'"),
        (b'{"a": 1} {"b": 2}', "something follows"),
        (b'{"schema": "ooc.plan"}', "of the kind 'ooc.plan'"),
        (b'{"schema": "ooc.trace", "schema_version": 99}', "schema version 99"),
        (b'{"schema": "ooc.trace", "schema_version": 1}', "not a complete trace"),
        (b"[" * 100_000, "not JSON"),
        (b'{"traceEvents": ' + b"[" * 100_000, "not JSON"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (gzip.compress(b'{"traceEvents": [{"name": "x"}' * 50, mtime=0)[:-20], "damaged or cut off"),
        (b"\x1f\x8b not gzip at all", "damaged"),
    ],
)
def test_files_that_are_something_else(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(BadFile, match=message) as caught:
        read_streams(path)
    assert str(path) in str(caught.value)
    assert main([str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_a_cut_off_snapshot(tmp_path: Path) -> None:
    data = pickle.dumps(snapshot())
    path = tmp_path / "cut.pickle"
    for length in range(2, len(data), 97):
        path.write_bytes(data[:length])
        with pytest.raises(BadFile, match=r"cut off|damaged"):
            read_streams(path)


def test_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nothing")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_command_exit_codes_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = snapshot()
    document["device_traces"][0] = [e for e in document["device_traces"][0] if e["action"] != "oom"]
    path = str(written(document, tmp_path))
    assert ooc_main(["fragmentation", "--json", path]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is None
    assert main(["--json", "--capacity", "42MiB", path]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True
    assert found["devices"] == ["cuda:0"]
    recorded = found["allocators"][0]["recorded"]
    assert all(pair["recorded"] == pair["replayed"] for pair in recorded.values())
    names = {"end_live_nbytes", "peak_reserved_nbytes", "end_reserved_nbytes", "num_device_allocs", "num_device_frees"}
    assert set(recorded) == names
    assert main(["--capacity", "41MiB", path]) == 1
    assert "does not fit" in capsys.readouterr().out
    assert main(["--capacity", "41MiB", "--allocator", "chunked-64KiB", path]) == 0
    capsys.readouterr()
    # Segments of 12 MiB: A and B share one, C fills one, D gets the 5 MiB behind B, E's has 2 MiB: 26 MiB.
    assert main(["--json", "--capacity", "41MiB", "--alloc-conf", "large_segment_size_mb:12", path]) == 0
    assert json.loads(capsys.readouterr().out)["allocators"][0]["peak_reserved_nbytes"] == 26 * MIB


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--allocator", "best"], "Options: caching, expandable"),
        (["--capacity", "16G"], "'16GiB'"),
        (["--alloc-conf", "x:1"], "unknown allocator setting"),
        (["--device", "cuda:7"], "Options: cpu"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, str(DATA / PROFILES[0])]) == 2
    assert message in capsys.readouterr().err


def test_the_example_in_the_readme(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    assert pickle.loads((DATA / "snapshot_by_hand.pickle").read_bytes()) == snapshot()
    text = (root / "ooc" / "fragmentation" / "README.md").read_text()
    command, _, shown = text.split("```\n$ ooc ")[1].split("```")[0].partition("\n")
    assert ooc_main(command.split()) == 1
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == shown.splitlines()


def test_the_table_and_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "out.png"
    assert main([str(written(snapshot(), tmp_path)), "--png", str(picture)]) == 1
    text = capsys.readouterr().out
    for words in (
        "First request that does not fit",
        "F at /home/me/train.py:7",
        "What lies between the free blocks",
        "D at /home/me/train.py:7",
        "What would have fitted:",
        "capacity 45.0 MiB (as recorded",
    ):
        assert words in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    pixels = imread(picture)
    assert pixels.shape[0] > 500
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 20  # something was drawn
    assert main([str(DATA / PROFILES[1]), "--png", str(tmp_path / "no" / "such" / "dir.png")]) == 2
