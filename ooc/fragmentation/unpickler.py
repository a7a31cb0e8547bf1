"""Reads the pickle of a memory snapshot without running anything in it.

A pickle is a program; the standard unpickler runs it. This one knows only the opcodes that build
dict, list, tuple, str, int, float, bool and None, which is all that a snapshot is made of. Any
other opcode is refused by name before it has done anything, and a reference to a class or
function is refused with that name in the message.

What a hostile file could still try, and why it fails:

- A memo index of two thousand million: the memo is a list that grows by one; an index beyond its
  end is refused. (CPython's own unpickler allocates an array of that length.)
- Nesting: open brackets and the stack are counted. A tuple in a tuple in a tuple needs neither,
  and hashing such a thing overflows the C stack, so only a str may be a dict key.
- A length beyond the end of the file: compared with the file before anything is allocated.
- A small file in which one list occurs a million times: nothing here expands it; the reader of
  snapshots counts events against the file's length.

Python writes protocol 4 (up to 3.13) or 5; protocols 2 and 3 are read too.
"""

from __future__ import annotations

import pickletools
import re
import struct
from typing import Any

from ooc.fragmentation.errors import BadFile
from scheduler.garbage import without_collections

MAX_OPEN_MARKS = 64
"""A snapshot nests seven deep: snapshot, segments, segment, blocks, block, frames, frame."""
MAX_STACK = 1 << 16
"""Items on the stack. Python's pickler writes batches of 1,000 items, thus 2,000 keys and values."""
MAX_INT_NBYTES = 64
"""Longest integer. Addresses and times take 8 bytes."""
_OPS_BETWEEN_CHECKS = 4096

_OLDEST_PROTOCOL, _NEWEST_PROTOCOL = 2, 5
_LONG_GETS = re.compile(rb"(?:j[\s\S]{4}){2,}")
"""Two and more memo references in a row: what most of a snapshot's bytes are, its stack frames."""
_NAMES = {ord(op.code): op.name for op in pickletools.opcodes}


def load_plain(data: bytes) -> Any:
    """The object in the pickle `data`.

    Raises:
        BadFile: An opcode outside the list, a limit exceeded, or an end before the end.
    """
    if not data:
        raise BadFile("the file is empty")
    with without_collections():  # they would double the time
        try:
            return _load(data)
        except IndexError:
            raise BadFile(
                f"the pickle is damaged or cut off: it ends within its {len(data)} bytes, before its STOP opcode, "
                "or takes from an empty stack. Copy the file again, or dump the snapshot again."
            ) from None
        except UnicodeDecodeError as error:
            raise BadFile(f"the pickle is damaged: a string in it is not UTF-8 ({error.reason})") from None


def _load(data: bytes) -> Any:
    """One loop, because a call per opcode would take half of the time.

    Operands are cut off without a look at the end of the file: beyond it, the next opcode's index fails.
    """
    stack: list[Any] = []
    push = stack.append
    open_stacks: list[list[Any]] = []
    memo: list[Any] = []
    remember = memo.append
    from_bytes = int.from_bytes
    position = 0
    while True:
        if len(stack) > MAX_STACK:
            raise _too_many()
        for _ in range(_OPS_BETWEEN_CHECKS):
            op = data[position]
            position += 1
            if op == 0x68:  # BINGET
                push(memo[data[position]])
                position += 1
            elif op == 0x94:  # MEMOIZE
                remember(stack[-1])
            elif op == 0x8A:  # LONG1
                length = data[position]
                position += 1
                if length > MAX_INT_NBYTES:
                    raise _too_long(length)
                push(from_bytes(data[position : position + length], "little", signed=True))
                position += length
            elif op == 0x28:  # MARK
                if len(open_stacks) >= MAX_OPEN_MARKS:
                    raise BadFile(f"the pickle nests deeper than {MAX_OPEN_MARKS} levels; a snapshot nests 7 deep")
                open_stacks.append(stack)
                stack = []
                push = stack.append
            elif op == 0x6A:  # LONG_BINGET
                run = _LONG_GETS.match(data, position - 1)
                if run is not None:
                    # The whole run at once: [0x6A, index, 0x6A, index, ...], 5 bytes each.
                    stack.extend([memo[index] for _, index in struct.iter_unpack("<BI", run.group())])
                    position = run.end()
                else:
                    push(memo[from_bytes(data[position : position + 4], "little")])
                    position += 4
            elif op == 0x4B:  # BININT1
                push(data[position])
                position += 1
            elif op == 0x7D:  # EMPTY_DICT
                push({})
            elif op == 0x75:  # SETITEMS
                items, stack = stack, _popped(open_stacks)
                push = stack.append
                _set_items(stack[-1], items, position)
            elif op == 0x5D:  # EMPTY_LIST
                push([])
            elif op == 0x65:  # APPENDS
                items, stack = stack, _popped(open_stacks)
                push = stack.append
                _list_on(stack, position).extend(items)
            elif op == 0x4A:  # BININT
                push(from_bytes(data[position : position + 4], "little", signed=True))
                position += 4
            elif op == 0x4D:  # BININT2
                push(data[position] | data[position + 1] << 8)
                position += 2
            elif op == 0x8C:  # SHORT_BINUNICODE
                length = data[position]
                position += 1
                push(str(data[position : position + length], "utf-8", "surrogatepass"))
                position += length
            elif op == 0x74:  # TUPLE
                items, stack = stack, _popped(open_stacks)
                push = stack.append
                push(tuple(items))
            elif op == 0x2E:  # STOP
                if len(stack) != 1 or open_stacks:
                    raise BadFile("the pickle is damaged: it stops with brackets open or objects left over")
                return stack[0]
            elif op in _RARE:
                position = _rare(op, data, position, stack, memo)
            else:
                _refuse(op, data, position, stack)


_RARE = frozenset(b"\x80\x95qr)\x85\x86\x87asX\x8d\x8bG\x88\x89N")


def _rare(op: int, data: bytes, position: int, stack: list[Any], memo: list[Any]) -> int:
    """Opcodes that are few in a snapshot. Returns the position behind the operand."""
    if op == 0x80:  # PROTO
        if not _OLDEST_PROTOCOL <= data[position] <= _NEWEST_PROTOCOL:
            raise BadFile(
                f"pickle protocol {data[position]}; this reads {_OLDEST_PROTOCOL} to {_NEWEST_PROTOCOL}. "
                "Dump the snapshot again with a current Python."
            )
        return position + 1
    if op == 0x95:  # FRAME: only a hint for buffered readers
        _take(data, position, 8)
        return position + 8
    if op in (0x71, 0x72):  # BINPUT, LONG_BINPUT
        width = 1 if op == 0x71 else 4
        index = int.from_bytes(_take(data, position, width), "little")
        if index > len(memo):
            raise BadFile(f"the pickle stores memo entry {index} when {len(memo)} exist; Python counts them up by one")
        memo[index : index + 1] = [stack[-1]]
        return position + width
    if op == 0x47:  # BINFLOAT
        stack.append(struct.unpack(">d", _take(data, position, 8))[0])
        return position + 8
    if op in (0x58, 0x8D):  # BINUNICODE, BINUNICODE8
        width = 4 if op == 0x58 else 8
        length = int.from_bytes(_take(data, position, width), "little")
        stack.append(str(_take(data, position + width, length), "utf-8", "surrogatepass"))
        return position + width + length
    if op == 0x8B:  # LONG4
        length = int.from_bytes(_take(data, position, 4), "little", signed=True)
        stack.append(_integer(data, position + 4, length))
        return position + 4 + length
    if op in (0x88, 0x89, 0x4E):  # NEWTRUE, NEWFALSE, NONE
        stack.append({0x88: True, 0x89: False, 0x4E: None}[op])
    elif op == 0x29:  # EMPTY_TUPLE
        stack.append(())
    elif op in (0x85, 0x86, 0x87):  # TUPLE1, TUPLE2, TUPLE3
        count = op - 0x84
        if len(stack) < count:
            raise IndexError
        stack[-count:] = [tuple(stack[-count:])]
    elif op == 0x61:  # APPEND
        item = stack.pop()
        _list_on(stack, position).append(item)
    elif op == 0x73:  # SETITEM
        value, key = stack.pop(), stack.pop()
        _set_items(stack[-1], [key, value], position)
    return position


def _take(data: bytes, position: int, length: int) -> bytes:
    piece = data[position : position + length]
    if len(piece) != length or length < 0:
        raise IndexError
    return piece


def _integer(data: bytes, position: int, length: int) -> int:
    if length > MAX_INT_NBYTES:
        raise _too_long(length)
    return int.from_bytes(_take(data, position, length), "little", signed=True)


def _popped(open_stacks: list[list[Any]]) -> list[Any]:
    if not open_stacks:
        raise IndexError
    return open_stacks.pop()


def _list_on(stack: list[Any], position: int) -> list[Any]:
    target = stack[-1]
    if type(target) is not list:
        raise BadFile(f"the pickle is damaged: it appends to a {type(target).__name__} at byte {position}")
    return target


def _set_items(target: Any, items: list[Any], position: int) -> None:
    keys = items[::2]
    if type(target) is not dict or len(items) % 2:
        raise BadFile(f"the pickle is damaged: it sets items of a {type(target).__name__} at byte {position}")
    if not set(map(type, keys)) <= {str}:
        kinds = sorted({type(key).__name__ for key in keys} - {"str"})
        raise BadFile(f"a dict key at byte {position} is a {kinds[0]}; the keys of a snapshot are all str")
    target.update(zip(keys, items[1::2], strict=True))


def _too_long(length: int) -> BadFile:
    return BadFile(f"the pickle has an integer of {length} bytes; a snapshot's have at most {MAX_INT_NBYTES}")


def _too_many() -> BadFile:
    return BadFile(f"the pickle keeps more than {MAX_STACK} objects open at once; a snapshot's need about 2,000")


def _refuse(op: int, data: bytes, position: int, stack: list[Any]) -> None:
    """Raises `BadFile`, naming what the file asked for."""
    name = _NAMES.get(op, f"unknown 0x{op:02x}")
    wanted = ""
    if name == "STACK_GLOBAL" and len(stack) >= 2 and all(isinstance(s, str) for s in stack[-2:]):
        wanted = f"{stack[-2]}.{stack[-1]}"
    elif name in ("GLOBAL", "INST"):
        lines = data[position : position + 400].split(b"\n")[:2]
        wanted = ".".join(line.decode("ascii", "replace") for line in lines)
    what = f"asks for {wanted[:200]!r}" if wanted else f"has the opcode {name}"
    raise BadFile(
        f"refused: the pickle {what} at byte {position - 1}. A memory snapshot holds only dict, list, tuple, str, "
        "int, float, bool and None; loading anything else could run code. Nothing was run. If this is a pickle of "
        "torch.cuda.memory._dump_snapshot(), it was changed after it was written."
    )
