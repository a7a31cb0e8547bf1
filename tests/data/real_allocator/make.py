"""Plays training runs through PyTorch's real CUDA caching allocator, without a GPU, and keeps its snapshots.

    python -m tests.data.real_allocator.make --torch VENV/lib/python3.11/site-packages/torch [--cuda-include DIR]

The allocator is `libc10_cuda.so` of a CUDA build of torch (torch 2.13.0+cu130 made what is here). Below it lies
`fake_cudart.cpp`, which counts bytes and gives out addresses; above it `play.cpp`, which reads requests and frees.
Those come from real training steps on the CPU, recorded by torch.profiler and read by our own reader. What another
CUDA stream uses, what a graph captures, and how much memory there is, is made up here: a CPU run has none of it.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ooc.fragmentation import read_streams
from ooc.fragmentation.stream import ALLOC, FREE
from tests.data.real_allocator.real import DEVICE_NBYTES, Command, add_arguments, build_for, document, play

HERE = Path(__file__).parent
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One recording: what is played, and within what.

    Attributes:
        work: The training run, step by step: each call of the iterator does one.
        arrange: From the steps' commands to those that are played.
        conf: PYTORCH_CUDA_ALLOC_CONF.
        available_nbytes: Of the device, what the process can get; None: all.
    """

    work: Callable[[], Iterator[None]]
    arrange: Callable[[list[list[Command]]], list[Command]]
    conf: str = ""
    available_nbytes: int | None = None


# -- training runs -------------------------------------------------------------------------------


def growing_batches() -> Iterator[None]:
    """A small convolutional network, fed with larger and larger images."""
    torch.manual_seed(0)
    widths = (3, 32, 64, 64)
    layers = [
        layer
        for i, (a, b) in enumerate(pairwise(widths))
        for layer in (nn.Conv2d(a, b, 3, padding=1, stride=1 + (i == 1)), nn.BatchNorm2d(b), nn.ReLU())
    ]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for side in (64, 88, 72, 112):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(8, 3, side, side)), torch.randint(0, 10, (8,))).backward()
        optimizer.step()
        yield


def varying_lengths() -> Iterator[None]:
    """A Transformer encoder, fed with sequences of different lengths, as text is."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(384, 6, 1536, batch_first=True), 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for length in (96, 160, 128):
        optimizer.zero_grad()
        model(torch.randn(8, length, 384)).square().mean().backward()
        optimizer.step()
        yield


def recorded(work: Callable[[], Iterator[None]]) -> list[list[Command]]:
    """The requests (`a`) and frees (`f`) of each step of `work()`, in order."""
    for _ in work():
        pass  # else lazy set-up is recorded
    steps: list[list[Command]] = []
    ended = 0
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in work():
            torch.empty(STEP_ENDS_NBYTES, dtype=torch.uint8)
            ended += 1
    with tempfile.TemporaryDirectory() as to:
        profiler.export_chrome_trace(f"{to}/trace.json")
        (stream,) = read_streams(Path(to) / "trace.json")
    steps.append([])
    for kind, buffer in zip(stream.kind.tolist(), stream.buffer.tolist(), strict=True):
        nbytes = int(stream.nbytes[buffer])
        if nbytes == STEP_ENDS_NBYTES:
            if kind == ALLOC:
                steps.append([])
        elif nbytes and kind == ALLOC:
            steps[-1].append(("a", buffer, nbytes, 0))
        elif nbytes and kind == FREE:
            steps[-1].append(("f", buffer))
    if len(steps) != ended + 1:
        raise RuntimeError(f"{ended} steps were run, but {len(steps) - 1} found in the profile")
    return steps


STEP_ENDS_NBYTES = 123_457
"""A request of this size, which nothing else makes, marks the end of a step."""


# -- what a CPU run does not have ----------------------------------------------------------------


def as_it_is(steps: list[list[Command]]) -> list[Command]:
    return [command for step in steps for command in step]


def emptied_after_two_steps(steps: list[list[Command]]) -> list[Command]:
    return [*as_it_is(steps[:2]), ("e",), *as_it_is(steps[2:])]


def with_a_second_stream(steps: list[list[Command]]) -> list[Command]:
    """Buffers from 256 KiB on are allocated on a second stream in every other step; each third is used on both.

    As gradients are when they are reduced. The second stream is done with what it has every 60 requests and frees.
    """
    found: list[Command] = []
    num_large = num_played = 0
    shared = set()
    for number, step in enumerate(steps):
        for kind, buffer, *rest in step:
            if kind == "a":
                is_large = int(rest[0]) >= 256 << 10
                num_large += is_large
                if is_large and num_large % 3 == 0:
                    shared.add(buffer)
                found.append(("a", buffer, rest[0], number % 2 if is_large else 0))
            else:
                found += [("r", buffer, stream) for stream in (0, 1) if buffer in shared]
                found.append(("f", buffer))
            num_played += 1
            if num_played % 60 == 0:
                found.append(("d", 1))
    return found


def with_a_captured_step(steps: list[list[Command]]) -> list[Command]:
    """The second step is captured into a CUDA graph; after the third the graph is gone and the cache is emptied."""
    first, second, third, *others = steps
    return [
        *first,
        ("P", 1),
        *second,
        ("Q", 1),
        *third,
        ("e",),
        ("X", 1),
        ("e",),
        *as_it_is(others),
    ]


def with_a_fraction(nbytes: int) -> Callable[[list[list[Command]]], list[Command]]:
    """`set_per_process_memory_fraction`, so that it makes `nbytes`."""
    return lambda steps: [("m", repr(nbytes / DEVICE_NBYTES)), *as_it_is(steps)]


CASES = {
    "out_of_memory": Case(work=growing_batches, arrange=as_it_is, available_nbytes=80 * MIB),
    "expandable": Case(
        work=growing_batches,
        arrange=emptied_after_two_steps,
        conf="expandable_segments:True",
        available_nbytes=62 * MIB,
    ),
    "two_streams": Case(work=varying_lengths, arrange=with_a_second_stream, available_nbytes=144 * MIB),
    "two_streams_full": Case(work=varying_lengths, arrange=with_a_second_stream, available_nbytes=108 * MIB),
    "graph": Case(work=varying_lengths, arrange=with_a_captured_step),
    "picked_segments": Case(
        work=growing_batches,
        arrange=with_a_fraction(90 * MIB),
        conf="max_split_size_mb:20,garbage_collection_threshold:0.6,roundup_power2_divisions:8",
    ),
}


def until_the_first_failure(commands: list[Command], played: dict[str, Any]) -> list[Command]:
    """As a program ends that writes its snapshot when it runs out of memory."""
    for position, (kind, *rest) in enumerate(commands):
        if kind == "a" and rest[0] in played["failed"]:
            return commands[: position + 1]
    return commands


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parsed = parser.parse_args(arguments)
    expected = {}
    with tempfile.TemporaryDirectory() as to:
        player = build_for(parser, parsed, Path(to))
        steps = {work: recorded(work) for work in (growing_batches, varying_lengths)}
        for name, case in CASES.items():
            commands = case.arrange(steps[case.work])
            for _ in range(2):
                played = play(player, parsed.torch, commands, conf=case.conf, available_nbytes=case.available_nbytes)
                commands = until_the_first_failure(commands, played)
            (HERE / f"{name}.pickle").write_bytes(pickle.dumps(document(played), protocol=4))
            expected[name] = played["stats"]
    (HERE / "memory_stats.json").write_text(json.dumps(expected, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
