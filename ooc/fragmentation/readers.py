"""Which reader a file needs, by its first bytes; its name does not matter."""

from __future__ import annotations

from pathlib import Path

from ooc.fragmentation.errors import BadFile
from ooc.fragmentation.read_kineto import read_kineto, top_level_items
from ooc.fragmentation.read_snapshot import read_snapshot
from ooc.fragmentation.read_trace import read_trace
from ooc.fragmentation.stream import Stream
from ooc.units import GIB, format_nbytes

MAX_PICKLE_NBYTES = 2 * GIB
_KNOWN = (
    "Read are: pickles of torch.cuda.memory._dump_snapshot(), Chrome traces of torch.profiler (.json or .json.gz) "
    "with profile_memory=True, and traces of ooc."
)


def read_streams(path: str | Path) -> list[Stream]:
    """The allocation streams in a file, one a device.

    Raises:
        BadFile: It cannot be read, is not what it seems, or is damaged; the message says which.
    """
    path = Path(path)
    try:
        return _read(path)
    except OSError as error:
        raise BadFile(f"cannot be read: {error.strerror or error}", path=str(path)) from None
    except BadFile as error:
        raise BadFile(error.reason, path=str(path)) from None


def _read(path: Path) -> list[Stream]:
    with open(path, "rb") as file:
        head = file.read(64)
    if not head:
        raise BadFile("the file is empty")
    if head[:1] == b"\x80":
        nbytes = path.stat().st_size
        if nbytes > MAX_PICKLE_NBYTES:
            raise BadFile(
                f"the snapshot has {format_nbytes(nbytes)}; up to {format_nbytes(MAX_PICKLE_NBYTES)} are read. Record "
                "fewer events (max_entries) or no stacks (context=None)."
            )
        return read_snapshot(path.read_bytes())
    if head[:4] == b"PK\x03\x04":
        raise BadFile(f"a zip archive (a checkpoint of torch.save?), not a recording of memory. {_KNOWN}")
    if head[:2] != b"\x1f\x8b" and head.lstrip()[:1] not in (b"{", b"["):
        raise BadFile(f"neither a pickle nor JSON: it begins with {head[:12]!r}. {_KNOWN}")
    for number, (key, value) in enumerate(top_level_items(path)):
        if key == "schema":
            if value != "ooc.trace":
                raise BadFile(f"a document of ooc, but of the kind {value!r}; a trace is needed. {_KNOWN}")
            return read_trace(path.read_text(encoding="utf-8"))
        if key == "traceEvents" or number > 1000:
            break
    return read_kineto(path)
