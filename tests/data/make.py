"""Makes the recorded profiles of this directory: `python -m tests.data.make`. See README.md."""

from __future__ import annotations

import gzip
import json
import pickle
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.cuda import _memory_viz
from torch.profiler import ProfilerActivity, profile

BASE = 0x7F0000000000
"""Where recorded addresses begin, wherever they did on the machine that recorded them."""
KEPT = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args")


def cnn() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4096, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(8, 3, 32, 32)), torch.randint(0, 10, (8,))).backward()
        optimizer.step()


def encoder() -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 256, batch_first=True), 2)
    optimizer = torch.optim.AdamW(model.parameters())
    loss = model(torch.randn(4, 32, 64)).square().mean()
    loss.backward()
    optimizer.step()
    return model.layers[0].linear1.weight


def record(work: Any, path: Path, *, with_stack: bool) -> None:
    """Profile `work()` and keep what the tests need of it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=with_stack) as profiler:
        work()
    with tempfile.TemporaryDirectory() as directory:
        raw = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(raw))
        document = json.loads(raw.read_text())
    for key in ("traceName", "host_name", "trace_id"):
        document.pop(key, None)
    document["traceEvents"] = [
        {key: event[key] for key in KEPT if key in event}
        for event in document["traceEvents"]
        if event.get("name") == "[memory]" or event.get("cat") in ("cpu_op", "python_function")
    ]
    for event in document["traceEvents"]:
        if event["name"] != "[memory]":
            event.pop("args", None)
    text = json.dumps(document, separators=(",", ":")).replace(str(Path(torch.__file__).parent), "torch")
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def snapshot(work: Any, path: Path) -> None:
    """Profile `work()` and let torch make a memory snapshot of the profile, as its own viewer does."""
    work()  # else lazy set-up is recorded, which differs from one machine to the next
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True, with_stack=True
    ) as profiler:
        kept = work()
    del kept
    document = _memory_viz._profile_to_snapshot(profiler)
    entries = [*document["segments"], *(e for trace in document["device_traces"] for e in trace)]
    lowest = min(entry.get("addr", entry.get("address")) for entry in entries)
    for entry in entries:
        key = "addr" if "addr" in entry else "address"
        entry[key] += BASE - lowest
        entry.pop("frames", None)
    for block in (block for segment in document["segments"] for block in segment["blocks"]):
        block.pop("frames", None)
    path.write_bytes(pickle.dumps(document, protocol=4))


if __name__ == "__main__":
    here = Path(__file__).parent
    snapshot(cnn, here / "snapshot_cnn_cpu.pickle")
    snapshot(encoder, here / "snapshot_encoder_cpu.pickle")
    record(cnn, here / "kineto_cnn_cpu.json.gz", with_stack=True)
    record(encoder, here / "kineto_encoder_cpu.json.gz", with_stack=False)
