"""A file in memory that the kernel backs with huge pages, whatever its setting for memfds.

`shmem_enabled`, mostly `never`, rules memfds; each tmpfs mount has a setting of its own. So the file lies on a tmpfs
that is mounted nowhere: nobody else can see it, and it goes when the file's last descriptor and mapping go. Whoever
may not mount does so in a user namespace of a process that is gone before the call returns.

`huge=within_size`: no huge page reaches past the end of the file, so the file takes no byte more than its length.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import subprocess
import sys

__all__ = ["open_huge_file"]

# The same numbers on every architecture that PyTorch runs on; since Linux 5.2.
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_CLOEXEC = 1  # FSOPEN_CLOEXEC, FSMOUNT_CLOEXEC
_SET_STRING, _CREATE = 1, 6  # FSCONFIG_*
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000

_HELPER_TIMEOUT_S = 10


def open_huge_file(name: str) -> int:
    """A new, empty file in memory with huge pages where they can be had; closed on exec.

    Args:
        name: What /proc/PID/maps shows.

    Raises:
        OSError: The kernel has no such thing, or does not let us.
    """
    try:
        return _on_own_tmpfs(name)
    except PermissionError:
        return _from_a_namespace(name)


def _on_own_tmpfs(name: str) -> int:
    """The file, on a mount that only this call knows. Needs CAP_SYS_ADMIN."""
    opened: list[int] = []
    try:
        context = _system_call(_FSOPEN, b"tmpfs", _CLOEXEC)
        opened.append(context)
        for key, value in (b"huge", b"within_size"), (b"size", b"0"):  # no limit beside the file's length
            _system_call(_FSCONFIG, context, _SET_STRING, key, value, 0)
        _system_call(_FSCONFIG, context, _CREATE, None, None, 0)
        mount = _system_call(_FSMOUNT, context, _CLOEXEC, 0)
        opened.append(mount)
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=mount)
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _from_a_namespace(name: str) -> int:
    """The file, made by a child in namespaces of its own, where it may mount."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-I", "-S", __file__, str(theirs.fileno()), name]
        try:
            done = subprocess.run(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, capture_output=True,
                timeout=_HELPER_TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.SubprocessError as error:
            raise OSError(errno.EPERM, f"no tmpfs of our own: {error}") from error
        theirs.close()
        if done.returncode:
            last_line = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise OSError(errno.EPERM, f"no tmpfs of our own: {last_line or f'exit code {done.returncode}'}")
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    os.set_inheritable(descriptors[0], False)
    return descriptors[0]


def _serve(descriptor: int, name: str) -> None:
    """The child: become root of namespaces that have nobody else, make the file, hand it over."""
    user, group = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS):
        raise _last_error("unshare")
    for file, text in ("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1"):
        with open(f"/proc/self/{file}", "w") as maps:
            maps.write(text)
    with socket.socket(fileno=descriptor) as connection:
        socket.send_fds(connection, [b"."], [_on_own_tmpfs(name)])


def _system_call(number: int, *arguments: int | bytes | None) -> int:
    result = int(ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        raise _last_error({_FSOPEN: "fsopen", _FSCONFIG: "fsconfig", _FSMOUNT: "fsmount"}[number])
    return result


def _last_error(call: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{call}: {os.strerror(code)}")


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2])
