"""Files that commands are asked for: regular ones whole or not at all; devices, pipes and links as a shell's `>`."""

from __future__ import annotations

import errno
import gzip
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ooc.cli.run import _with_rank
from ooc.output_files import is_special, write_output
from ooc.telemetry.progress import rank
from tests import forked
from tests.fragmentation.cases import DATA
from tests.html_report.cases import synthetic

ROOT = Path(__file__).parent.parent
SCRIPT = str(ROOT / "tests" / "scripts" / "train.py")
SMALL = str(ROOT / "tests" / "scripts" / "small_net.py")


def test_a_link_is_followed_and_stays(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "real.json", tmp_path / "link.json"
    link.symlink_to(target)
    for content in ("made", "made again"):  # the first time the link leads nowhere
        write_output(link, content)
        assert link.is_symlink()
        assert target.read_text() == content
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["link.json", "real.json", "there"]


def test_a_circle_of_links_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match="symbolic links") as raised:
        write_output(tmp_path / "a", "x")
    assert raised.value.errno == errno.ELOOP


def test_a_pipe_is_written_into(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    write_output(pipe, b"through")
    reader.join()
    assert got == [b"through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("name", ["/dev/null", "link"])
def test_a_device_stays_one(name: str, tmp_path: Path) -> None:
    path = Path(name)
    if name == "link":
        path = tmp_path / "link"
        path.symlink_to("/dev/null")
    before = os.stat(path)
    write_output(path, "x")
    assert stat.S_ISCHR(os.stat(path).st_mode)
    assert os.stat(path).st_ino == before.st_ino


def test_a_full_device_says_so_and_stays() -> None:
    with pytest.raises(OSError, match="No space") as raised:
        write_output("/dev/full", "x")
    assert raised.value.errno == errno.ENOSPC
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_permissions_are_kept_and_new_files_get_the_umask(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("x")
    old.chmod(0o640)
    umask = os.umask(0o027)
    try:
        write_output(old, "y")
        write_output(new, "y")
    finally:
        os.umask(umask)
    assert stat.S_IMODE(old.stat().st_mode) == 0o640
    assert stat.S_IMODE(new.stat().st_mode) == 0o640


@pytest.mark.parametrize("code", [errno.EBUSY, errno.EACCES])
def test_a_file_that_cannot_be_replaced_is_written_in_place(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single file that is mounted into a container answers EBUSY."""
    path = tmp_path / "mounted"
    path.write_text("old, and longer")
    inode = path.stat().st_ino

    def refuses(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "replace", refuses)
    write_output(path, "new")
    assert path.read_text() == "new"
    assert path.stat().st_ino == inode
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match=os.strerror(code)):
        write_output(tmp_path / "not there yet", "new")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_standard_output_that_is_a_file_is_added_to(name: str) -> None:
    code = f"from ooc.output_files import write_output\nprint('a')\nwrite_output({name!r}, 'b\\n')\nprint('c')"
    assert _python("-c", code).stdout == "a\nb\nc\n"


def test_ranks_share_a_device_and_have_a_file_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "3")
    assert _with_rank(Path("/dev/null"), rank()) == Path("/dev/null")
    assert _with_rank(tmp_path / "run.json", rank()) == tmp_path / "run.rank3.json"
    assert is_special("/dev/stdout")
    assert not is_special(tmp_path / "nothing")


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Its standard output is a file."""
    command = [sys.executable, *arguments]
    return forked.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT, timeout=600)


def _commands(tmp_path: Path) -> dict[str, Callable[[str], list[str]]]:
    """Each option that names a file to write, as a command line that takes the name."""
    trace, plan = tmp_path / "trace.json", tmp_path / "plan.json"
    for path, part in zip((trace, plan), synthetic(), strict=True):
        path.write_text(part.to_json())
    step, budget = str(trace), "1GiB"
    return {
        "run": lambda name: ["run", "--budget", "6MiB", "--report", name, SCRIPT, "--steps", "2"],
        "diagnose": lambda name: ["run", "--diagnose", "--report", name, SMALL],
        "trace": lambda name: ["trace", "--fake", "-o", name, SMALL],
        "report": lambda name: ["report", step, str(plan), "-o", name],
        "trace_json": lambda name: ["report", step, str(plan), "--trace-json", name],
        "plan": lambda name: ["plan", step, "--budget", budget, "--policy", "auto", "-o", name],
        "fragmentation": lambda name: ["fragmentation", str(DATA / "snapshot_by_hand.pickle"), "--png", name],
    }


@pytest.mark.parametrize("command", ["run", "diagnose", "report", "trace_json", "trace", "plan", "fragmentation"])
def test_every_output_option_follows_links_and_keeps_devices(command: str, tmp_path: Path) -> None:
    line = _commands(tmp_path)[command]
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    done = _python("-m", "ooc", *line(str(link)))
    assert link.is_symlink(), done.stderr
    assert target.stat().st_size > 0, done.stderr
    full = _python("-m", "ooc", *line("/dev/full"))
    assert "No space left on device" in full.stderr
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)
    assert "Traceback" not in full.stderr


def test_compressed_traces_are_whole(tmp_path: Path) -> None:
    from ooc.cli.arguments import write_text

    write_text(str(tmp_path / "t.json.gz"), json.dumps({"a": 1}))
    assert json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes())) == {"a": 1}
