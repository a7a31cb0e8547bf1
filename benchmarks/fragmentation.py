"""How long `ooc fragmentation` takes for a large snapshot, and how much memory.

Writes a synthetic snapshot in PyTorch's format (a random program with stacks; no GPU is needed), then runs the command
on it in a process of its own and prints a table; --json writes one row per figure. The output is checked: the
replayed peak of requested bytes must be the one that the generator counted.

    python -m benchmarks.fragmentation [--events 1000000] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

KIB, MIB = 1 << 10, 1 << 20
NUM_STACKS, STACK_DEPTH, NUM_FRAMES = 400, 12, 2000
PERIOD = 2000
"""Allocations of one step: a training program asks for the same sizes again and again."""


COMMAND = """
import resource, sys
from ooc.cli.main import main
code = main(sys.argv[1:])
print("maxrss", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
sys.exit(code)
"""


def synthetic_snapshot(num_events: int, seed: int = 0) -> tuple[dict[str, Any], int]:
    """A snapshot as `_dump_snapshot` writes it, and its peak of requested bytes."""
    rng = random.Random(seed)
    frames = [{"filename": f"/site/module_{i}.py", "line": i, "name": f"call_{i}"} for i in range(NUM_FRAMES)]
    stacks = [rng.sample(frames, STACK_DEPTH) for _ in range(NUM_STACKS)]
    sizes = [int(2 ** rng.uniform(9, 24.5)) for _ in range(PERIOD)]
    trace: list[dict[str, Any]] = []
    live: list[tuple[int, int]] = []
    address = 1 << 40
    held = peak = asked = 0
    while len(trace) < num_events:
        size = sizes[asked % PERIOD]
        asked += 1
        trace.append(_event("alloc", address, size, stacks[asked % NUM_STACKS], len(trace)))
        live.append((address, size))
        address += -(-size // 512) * 512
        held += size
        peak = max(peak, held)
        while len(live) > 300 and len(trace) < num_events:
            gone, size = live.pop(rng.randrange(len(live)))
            trace.append(_event("free_requested", gone, size, [], len(trace)))
            trace.append(_event("free_completed", gone, size, [], len(trace)))
            held -= size
    segments = [_segment(at, size) for at, size in sorted(live)]
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "garbage_collection_threshold": 0.0}
    document = {"segments": segments, "device_traces": [trace], "allocator_settings": settings}
    return document, peak


def _event(action: str, address: int, size: int, frames: list[Any], time_us: int) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": 0,
        "time_us": 1_700_000_000_000_000 + time_us,
        "compile_context": "N/A",
        "user_metadata": "",
        "frames": list(frames),
    }


def _segment(address: int, size: int) -> dict[str, Any]:
    rounded = -(-size // 512) * 512
    block = {"address": address, "size": rounded, "requested_size": size, "state": "active_allocated", "frames": []}
    return {
        "device": 0,
        "address": address,
        "total_size": rounded,
        "allocated_size": rounded,
        "active_size": rounded,
        "requested_size": size,
        "stream": 0,
        "segment_type": "small" if rounded <= MIB else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [block],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "snapshot.pickle"
        expected = _write(path, options.events)
        command = [sys.executable, "-c", COMMAND, "fragmentation", "--json", str(path)]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        duration_s = time.perf_counter() - start
        file_nbytes = path.stat().st_size
    if done.returncode != 0:
        sys.exit(f"ooc fragmentation ended with {done.returncode}: {done.stderr}")
    report = json.loads(done.stdout)
    if report["peak_live_nbytes"] != expected:
        sys.exit(f"replayed peak {report['peak_live_nbytes']}, generated {expected}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    figures = [
        ("file size", "B", float(file_nbytes)),
        ("events in the file", "1", float(options.events)),
        ("events replayed", "1", float(report["num_events"])),  # two free events that follow each other are one
        ("whole command", "s", duration_s),
        ("whole command, processor", "s", cpu_s),
        ("peak resident memory", "B", float(_peak_nbytes(done.stderr))),
    ]
    for name, unit, value in figures:
        print(f"{name:24} {value / MIB:10.0f} MiB" if unit == "B" else f"{name:24} {value:10.1f} {unit}")
    if options.json is not None:
        machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        rows = [
            {"scenario": "fragmentation", "metric": n, "unit": u, "value": v, "machine": machine} for n, u, v in figures
        ]
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _peak_nbytes(stderr: str) -> int:
    """The command's own figure: that of all children would be the generator's, which is larger."""
    return int(stderr.rsplit("maxrss", 1)[1]) * KIB


def _write(path: Path, num_events: int) -> int:
    """Writes the snapshot in a child, so that its memory is not counted. Returns the peak."""
    code = (
        "import pickle, sys\n"
        "from benchmarks.fragmentation import synthetic_snapshot\n"
        "document, peak = synthetic_snapshot(int(sys.argv[2]))\n"
        "pickle.dump(document, open(sys.argv[1], 'wb'))\n"
        "print(peak)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(num_events)], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


if __name__ == "__main__":
    main()
