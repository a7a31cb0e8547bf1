"""The file store's directory and file: full disks, wrong directories, and systems that lack a call."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vmm.memory_cases import Memory, fill
from vmm import files
from vmm.store import FileStore, StoreError, StoreFull, StoreUnavailable

MIB = 1 << 20


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory(8 * MIB)
    yield made
    made.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    point = tmp_path / "small"
    point.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(point)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.decode().strip()}")
    yield point
    subprocess.run(["umount", str(point)], check=True)


def test_a_full_disk_is_known_before_anything_is_written(small_disk: Path, memory: Memory) -> None:
    with FileStore(small_disk, allow_memory=True, growth_nbytes=4 * MIB) as store:
        slot = store.allocate(3 * MIB)
        noise = fill(memory, 3 * MIB, 11)
        store.write(slot, [(memory.address, 3 * MIB)]).wait()
        for request in (lambda: store.allocate(9 * MIB), lambda: store.reserve(20 * MIB)):
            with pytest.raises(StoreFull) as caught:
                request()
            error = caught.value
            assert error.free_nbytes == 4 * MIB
            assert error.needed_nbytes > 4 * MIB
            assert str(error.needed_nbytes) in str(error)
            assert str(small_disk) in str(error)
            assert store.file_nbytes == 4 * MIB == os.fstat(store.descriptor).st_size
        last = store.allocate(5 * MIB - 4096)  # less than a growth step is left, but enough: 1 + 4 MiB
        assert store.file_nbytes <= 8 * MIB
        store.free(last)
        store.read(slot, [(memory.address + 4 * MIB, 3 * MIB)]).wait()
        assert memory[4 * MIB : 7 * MIB] == noise
        with pytest.raises(StoreFull):
            store.measure()
    assert os.statvfs(small_disk).f_bfree * os.statvfs(small_disk).f_frsize == 8 * MIB


def test_a_file_size_limit_is_a_full_store(tmp_path: Path) -> None:
    script = (
        "import resource, sys\nfrom vmm.store import FileStore, StoreFull\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({2 * MIB}, {2 * MIB}))\n"
        "store = FileStore(sys.argv[1], allow_memory=True)\nstore.allocate(1 << 20)\n"
        "try:\n    store.allocate(4 << 20)\nexcept StoreFull as error:\n    print('ulimit -f' in str(error))\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, cwd=root, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"does not exist[\s\S]*mkdir -p") as caught:
        FileStore(tmp_path / "missing")
    assert caught.value.directory == str(tmp_path / "missing")


def test_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable, match="is not a directory"):
        FileStore(tmp_path / "file")


def test_directory_that_cannot_be_written(tmp_path: Path) -> None:
    script = (
        "import os, sys\nfrom vmm.store import FileStore, StoreUnavailable\n"
        "if os.geteuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "try:\n    FileStore(sys.argv[1])\nexcept StoreUnavailable as error:\n    print(error)\n"
    )
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_mode & 0o005 != 0o005 and parent.stat().st_uid == os.geteuid():
            parent.chmod(0o755)  # pytest's directories are private
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", script, str(closed)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert "is not writable for user" in done.stdout, done.stderr
    assert "chmod" in done.stdout


def test_a_directory_in_memory_is_refused() -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir() or not files.is_in_memory(shared):
        pytest.skip("no tmpfs at /dev/shm")
    with pytest.raises(StoreUnavailable, match="kept in memory"):
        FileStore(shared)
    FileStore(shared, allow_memory=True).close()


def test_default_directory_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_memory: set[Path] = set()
    monkeypatch.setattr(files, "is_in_memory", lambda directory: Path(directory) in in_memory)
    own, temporary, current = (tmp_path / name for name in ("own", "temporary", "current"))
    for directory in (own, temporary, current):
        directory.mkdir()
    monkeypatch.chdir(current)
    monkeypatch.setenv("OOC_STORE", str(own))
    monkeypatch.setenv("TMPDIR", str(temporary))
    assert files.default_directory() == own
    in_memory.add(own)
    with pytest.raises(StoreUnavailable, match="kept in memory"):  # named by the user: no silent other place
        FileStore()
    monkeypatch.delenv("OOC_STORE")
    assert files.default_directory() == temporary
    in_memory.add(temporary)
    assert files.default_directory() == Path("/var/tmp")
    in_memory.add(Path("/var/tmp"))
    assert files.default_directory() == current
    in_memory.add(current)
    with pytest.raises(StoreUnavailable, match="no directory for the store") as caught:
        FileStore()
    assert all(str(directory) in str(caught.value) for directory in (temporary, "/var/tmp", current))


def test_the_file_has_no_name_and_is_private(tmp_path: Path) -> None:
    with FileStore(tmp_path, allow_memory=True) as store:
        store.allocate(MIB)
        assert list(tmp_path.iterdir()) == []
        status = os.fstat(store.descriptor)
        assert status.st_nlink == 0
        assert status.st_mode & 0o777 == 0o600
        assert not os.get_inheritable(store.descriptor)


def test_without_o_tmpfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: Memory) -> None:
    real_open = os.open

    def old_open(path: object, flags: int, mode: int = 0o777, **options: object) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "injected")
        return real_open(path, flags, mode, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", old_open)
    with FileStore(tmp_path, allow_memory=True) as store:
        assert list(tmp_path.iterdir()) == []
        assert os.fstat(store.descriptor).st_mode & 0o777 == 0o600
        slot = store.allocate(4096)
        store.write(slot, [(memory.address, 4096)]).wait()


def test_without_o_direct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    real_pwrite = os.pwrite

    def pwrite(*_: object) -> int:
        raise OSError(errno.EINVAL, "injected")

    monkeypatch.setattr(os, "pwrite", pwrite)
    with caplog.at_level(logging.WARNING), FileStore(tmp_path, allow_memory=True) as store:
        monkeypatch.setattr(os, "pwrite", real_pwrite)
        assert not store.is_direct
        assert "buffered" in repr(store)
        assert "O_DIRECT does not work" in caplog.text
        slot = store.allocate(MIB)
        noise = fill(memory, MIB, 12)
        store.write(slot, [(memory.address, MIB)])
        store.read(slot, [(memory.address + MIB, MIB)]).wait()
        assert memory[MIB : 2 * MIB] == noise


def test_without_fallocate_the_space_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "injected")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with FileStore(tmp_path, allow_memory=True, growth_nbytes=4096) as store:
        store.allocate(2 * MIB + 4096)
        status = os.fstat(store.descriptor)
        assert status.st_size == 2 * MIB + 4096
        assert status.st_blocks * 512 >= 2 * MIB + 4096


def test_every_failure_to_grow_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileStore(tmp_path, allow_memory=True, growth_nbytes=MIB) as store:
        store.allocate(MIB)
        for code, expected in ((errno.ENOSPC, StoreFull), (errno.EDQUOT, StoreFull), (errno.EIO, StoreError)):

            def refuse(descriptor: int, offset: int, nbytes: int, code: int = code) -> None:
                os.ftruncate(descriptor, offset + nbytes // 2)  # it may have got part of the way
                raise OSError(code, os.strerror(code))

            with monkeypatch.context() as patch:
                patch.setattr(os, "posix_fallocate", refuse)
                with pytest.raises(expected, match=str(tmp_path)):
                    store.allocate(4096)
            assert (store.file_nbytes, store.used_nbytes, store.num_slots) == (MIB, MIB, 1)
            assert os.fstat(store.descriptor).st_size == MIB
        store.allocate(4096)
