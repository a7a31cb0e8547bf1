"""Random programs through PyTorch's real caching allocator, and through the model and the report: do they differ?

    python -m tests.data.real_allocator.compare --torch VENV/lib/python3.11/site-packages/torch --cases 1000

For a new version of torch: what differs is printed with its number, and `--first NUMBER --cases 1` does it again.
Each program is compared twice. The model is told requests, frees and the limit, and has to hold the same bytes after
every command, to fail at the same request, or to end with the same blocks. The report is given the snapshot alone.
Exit code 1: some differ.
"""

from __future__ import annotations

import argparse
import pickle
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ooc.fragmentation import BadFile, CachingSettings, Stream, analysis, make_report, parse_settings
from ooc.fragmentation.caching import replay_caching
from ooc.fragmentation.read_snapshot import read_snapshot
from ooc.fragmentation.replay import Replay, mapped_in
from ooc.fragmentation.stream import ALLOC, EMPTY, FREE, RELEASE, PrivatePool
from tests.data.real_allocator.real import DEVICE_NBYTES, Command, add_arguments, build_for, document, play

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Commands for play.cpp, and what they run within: a device limit, or a memory fraction of so many bytes."""

    commands: list[Command]
    conf: str
    available_nbytes: int | None
    fraction_nbytes: int | None

    @property
    def capacity(self) -> int | None:
        return self.available_nbytes if self.fraction_nbytes is None else self.fraction_nbytes


# -- programs ------------------------------------------------------------------------------------


def random_program(seed: int) -> Program:
    """One of 30 to 300 commands; the same for the same seed."""
    chance = random.Random(seed)
    conf = _random_settings(chance)
    is_expandable = "expandable_segments:True" in conf
    limit = chance.choice([None, *(chance.randint(*bounds) * MIB for bounds in ((50, 300), (100, 1200), (500, 3000)))])
    by_fraction = limit is not None and chance.random() < (0.8 if "garbage" in conf else 0.25)
    commands: list[Command] = [("m", repr(limit / DEVICE_NBYTES))] if limit is not None and by_fraction else []
    sizes = _random_sizes(chance)
    num_streams, has_pools = chance.choice([1, 1, 1, 2, 3]), chance.random() < 0.25
    share_allocated, target = chance.uniform(0.4, 0.7), chance.choice([30, 100, 300])
    live: list[int] = []
    ended: list[tuple[str, int]] = []  # private pools that may be released: the letter of their kind, their number
    inside: tuple[str, int] | None = None
    num_buffers = num_pools = 0
    while len(commands) < target:
        draw = chance.random()
        if has_pools and chance.random() < 0.08:
            if inside is not None:
                commands.append(("Q" if inside[0] == "P" else "q", inside[1]))
                ended.append(inside)
                inside = None
            # PyTorch 2.13 crashes where a private pool of expandable segments is released.
            elif ended and chance.random() < 0.4 and not is_expandable:
                letter, number = ended.pop(chance.randrange(len(ended)))
                commands.append(("X" if letter == "P" else "x", number))
            else:
                num_pools += 1
                inside = chance.choice("pP"), num_pools
                commands.append(inside)
        elif draw < share_allocated or not live:
            nbytes = chance.choice(sizes if chance.random() < 0.85 else _random_sizes(chance))
            commands.append(("a", num_buffers, nbytes, chance.randrange(num_streams)))
            live.append(num_buffers)
            num_buffers += 1
        elif draw < 0.93 or inside is not None:
            buffer = live.pop(chance.randrange(len(live)) if chance.random() < 0.6 else -1)
            if num_streams > 1 and inside is None and chance.random() < 0.2:
                commands.append(("r", buffer, chance.randrange(num_streams)))
            commands.append(("f", buffer))
        elif draw < 0.95 and num_streams > 1:
            commands.append(("d", chance.randrange(num_streams)))
        elif draw < 0.965:
            commands.append(("e",))
        elif draw < 0.97:
            commands += [("f", buffer) for buffer in live]
            live = []
    return Program(
        commands=commands,
        conf=conf,
        available_nbytes=None if by_fraction else limit,
        fraction_nbytes=limit if by_fraction else None,
    )


def _random_settings(chance: random.Random) -> str:
    choices: list[tuple[float, list[str]]] = [
        (0.3, ["expandable_segments:True"]),
        (0.15, [f"large_segment_size_mb:{n}" for n in (32, 40, 64)]),
        (0.35, [f"max_split_size_mb:{n}" for n in (20, 21, 32, 64, 100, 128, 200, 512)]),
        (0.15, [f"max_non_split_rounding_mb:{n}" for n in (21, 30, 64, 100)]),
        (0.3, [f"garbage_collection_threshold:{x}" for x in (0.2, 0.4, 0.5, 0.6, 0.8, 0.9)]),
        (0.3, [f"roundup_power2_divisions:{x}" for x in ("2", "4", "16", "[64:8,256:4,>:1]", "[1:4,2:8,64:2,>:16]")]),
    ]
    chosen = [chance.choice(texts) for share, texts in choices if chance.random() < share]
    try:
        parse_settings(",".join(chosen))
    except ValueError:  # some sizes must not be below that of large segments
        chosen = [text for text in chosen if "large_segment" not in text]
    return ",".join(chosen)


def _random_sizes(chance: random.Random) -> list[int]:
    def one() -> int:
        kind = chance.random()
        if kind < 0.25:
            return chance.choice([1, 512, 20000, MIB - 1, MIB, int(2 ** chance.uniform(0, 20))])
        if kind < 0.55:
            return chance.choice([MIB + 1, 2 * MIB, 10 * MIB - 1, chance.randint(MIB + 1, 10 * MIB - 1)])
        if kind < 0.85:
            return chance.choice([chance.randint(10 * MIB, 60 * MIB), chance.randint(5, 30) * 2 * MIB])
        return chance.randint(60, 400) * MIB + chance.choice([0, 1, 513, 700_000])

    return [one() for _ in range(chance.randint(2, 10))]


# -- against the model ---------------------------------------------------------------------------


def model_differs(program: Program, played: dict[str, Any]) -> str:
    """The first difference between the model and the real allocator, up to the first failed request; "" if none."""
    settings = parse_settings(program.conf)
    if program.fraction_nbytes is None:
        settings = replace(settings, garbage_collection_threshold=0.0)  # without a fraction it has no effect
    else:
        settings = replace(settings, per_process_memory_fraction=program.fraction_nbytes / DEVICE_NBYTES)
    stream, ends = told(program, played, settings)
    replay = replay_caching(stream, program.capacity, settings, name="caching")
    failed_at = first_failure(program, played)
    for position, (reserved, _, active, *_) in enumerate(played["after"][:failed_at]):
        last = ends[position] - 1
        ours = (int(replay.reserved_nbytes[last]), int(replay.allocated_nbytes[last])) if last >= 0 else (0, 0)
        if ours != (reserved, active):
            return f"after command {position} {program.commands[position]}: {ours}, real {(reserved, active)}"
    failure = replay.failure
    if failed_at is not None:
        reserved, _, active, *_ = played["after"][failed_at]
        found = None if failure is None else (failure.event_index, failure.reserved_nbytes, failure.allocated_nbytes)
        real = (ends[failed_at] - 2, reserved, active)
        return "" if found == real else f"failed at, held, handed out: {found}, real {real}"
    stats = played["stats"]
    counts = (replay.num_device_allocs, replay.num_device_frees, replay.num_retries, failure)
    real_counts = (stats["num_device_alloc"], stats["num_device_free"], stats["num_alloc_retries"], None)
    if counts != real_counts:
        return f"calls and retries: {counts}, real {real_counts}"
    return "" if cut(replay, stream) == cut_for_real(played) else "the blocks at the end"


def told(program: Program, played: dict[str, Any], settings: CachingSettings) -> tuple[Stream, list[int]]:
    """The stream of the commands, and after how many events each is done. Frees are where the trace has them."""
    entries: dict[int, list[Any]] = {}
    for entry in played["device_trace"]:
        entries.setdefault(entry[-1], []).append(entry)
    kind, buffer, sizes, pools, ends = [], [], [], [], []
    attempts, retried = [], []
    live: dict[int, int] = {}
    numbers: dict[tuple[int, tuple[int, int]], int] = {}
    gone: dict[tuple[int, int], int] = {}
    num_retries = 0
    for position, (letter, *rest) in enumerate(program.commands):
        if letter in ("x", "X"):
            gone[(int(rest[0]), 0) if letter == "X" else (0, int(rest[0]))] = len(kind)
        after = played["after"][position][-1]
        if after > num_retries:
            retried.append(len(sizes))
            num_retries = after
        for action, address, size, cuda_stream, first, second, _ in entries.get(position, []):
            if action in ("alloc", "oom"):
                sizes.append(size if action == "alloc" else int(rest[1]))
                pools.append(numbers.setdefault((cuda_stream, (first, second)), len(numbers)))
                events = [ALLOC]
                if action == "oom":
                    attempts.append(len(sizes) - 1)
                    events.append(FREE)
                else:
                    live[address] = len(sizes) - 1
                kind += events
                buffer += [len(sizes) - 1] * len(events)
            elif action in ("free_requested", "free_completed"):
                kind.append(RELEASE if action == "free_requested" else FREE)
                buffer.append(live[address] if action == "free_requested" else live.pop(address))
        if letter == "e":
            kind.append(EMPTY)
            buffer.append(0)
        ends.append(len(kind))
    stream = Stream(
        source="commands",
        device="cuda:0",
        kind=np.array(kind, dtype=np.int8),
        buffer=np.array(buffer, dtype=np.int64),
        nbytes=np.array(sizes, dtype=np.int64),
        pool=np.array(pools, dtype=np.int64),
        attempts=frozenset(attempts),
        retried=frozenset(retried),
        settings=settings,
        private={
            number: PrivatePool(gone_event=gone.get(owner, len(kind)), is_graph=owner[0] != 0)
            for (_, owner), number in numbers.items()
            if any(owner)
        },
    )
    return stream.validate(), ends


def first_failure(program: Program, played: dict[str, Any]) -> int | None:
    failed = set(played["failed"])
    return next((i for i, command in enumerate(program.commands) if command[0] == "a" and command[1] in failed), None)


def cut(replay: Replay, stream: Stream) -> list[list[tuple[int, bool]]]:
    """At the end, of each segment its blocks in order: how large, and whether in use; wherever the segments lie."""
    assert replay.address is not None
    last = stream.num_events - 1
    used = {int(replay.address[b]): int(replay.block_nbytes[b]) for b in analysis.alive_in(replay, stream, last)}
    found = []
    for low, high in analysis._joined(mapped_in(replay, last), replay):
        at, blocks = low, []
        for start in sorted(address for address in used if low <= address < high):
            blocks += [(start - at, False)] * (start > at) + [(used[start], True)]
            at = start + used[start]
        found.append(blocks + [(high - at, False)] * (high > at))
    return sorted(found)


def cut_for_real(played: dict[str, Any]) -> list[list[tuple[int, bool]]]:
    return sorted([(b["size"], b["state"] != "inactive") for b in s["blocks"]] for s in played["segments"])


# -- against the report --------------------------------------------------------------------------


def report_differs(program: Program, played: dict[str, Any], at_failure: dict[str, Any] | None) -> str:
    """The first difference between the report on the snapshot and what is known of the run; "" if none.

    Args:
        at_failure: What was played up to the first failed request.
    """
    if not played["device_trace"]:
        return ""
    (stream,) = read_snapshot(pickle.dumps(document(played)))
    name = "expandable" if parse_settings(program.conf).expandable_segments else "caching"
    own = make_report(stream, names=(name,)).reference_summary
    assert own is not None
    for figure, (recorded, replayed) in analysis.meets_record(own.replay, stream).items():
        if recorded != replayed:
            return f"{figure}: recorded {recorded}, replayed {replayed}"
    failure = own.replay.failure
    if at_failure is not None:
        if failure is None:
            return "the failed request does not fail"
        free = [b["size"] for s in at_failure["segments"] for b in s["blocks"] if b["state"] == "inactive"]
        stats = at_failure["stats"]
        ours = failure.event_index, failure.largest_free_nbytes, failure.reserved_nbytes, failure.allocated_nbytes
        held, active = (stats[figure]["current"] for figure in ("reserved_bytes", "active_bytes"))
        real = stream.failures[0].event_index, max(free, default=0), held, active
        return "" if ours == real else f"failed at, largest free, held, handed out: {ours}, real {real}"
    stats = played["stats"]
    end = analysis.moment(own.replay, stream, stream.num_events - 1)
    trapped = stats["inactive_split_bytes"]["current"] if name == "caching" else end.trapped_nbytes
    figures = {
        "requested_bytes": (end.live_nbytes, stats["requested_bytes"]["current"]),
        "active_bytes": (end.live_nbytes + end.internal_nbytes, stats["active_bytes"]["current"]),
        "active_bytes, peak": (int(own.replay.allocated_nbytes.max(initial=0)), stats["active_bytes"]["peak"]),
        "inactive_split_bytes": (end.trapped_nbytes, trapped),  # PyTorch does not count it with expandable segments
        "reserved_bytes, peak": (own.replay.peak_reserved_nbytes, stats["reserved_bytes"]["peak"]),
    }
    return "; ".join(f"{name}: {ours}, real {real}" for name, (ours, real) in figures.items() if ours != real)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--cases", type=int, default=500, help="how many programs")
    parsed = parser.parse_args(arguments)
    num_failed = num_retried = num_differ = num_crashed = 0
    with tempfile.TemporaryDirectory() as to:
        player = build_for(parser, parsed, Path(to))
        for seed in range(parsed.first, parsed.first + parsed.cases):
            program = random_program(seed)

            def run(commands: list[Command], program: Program = program, seed: int = seed) -> dict[str, Any]:
                return play(
                    player,
                    parsed.torch,
                    commands,
                    conf=program.conf,
                    available_nbytes=program.available_nbytes,
                    addresses=f"random:{seed}",
                    with_totals=True,
                )

            try:
                played = run(program.commands)
                failed_at = first_failure(program, played)
                at_failure = None if failed_at is None else run(program.commands[: failed_at + 1])
            except subprocess.CalledProcessError as error:
                num_crashed += 1
                said = [line for line in error.stderr.splitlines() if "what()" in line] or [
                    f"signal {-error.returncode}"
                ]
                print(f"{seed} [{program.conf}] PyTorch crashed: {said[0].strip()[:160]}")
                continue
            num_failed += failed_at is not None
            num_retried += played["stats"]["num_alloc_retries"] > 0
            try:
                found = {"model": model_differs(program, played), "report": report_differs(program, played, at_failure)}
            except (BadFile, AssertionError) as error:
                found = {"error": repr(error)}
            num_differ += any(found.values())
            for where, text in found.items():
                if text:
                    print(f"{seed} [{program.conf}] capacity {program.capacity}: {where}: {text}")
    print(
        f"{parsed.cases} programs, {num_failed} with a failed request, {num_retried} with retries: "
        f"{num_differ} differ, {num_crashed} crashed in PyTorch"
    )
    return 1 if num_differ else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
