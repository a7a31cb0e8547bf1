"""PyTorch's real CUDA caching allocator over a fake CUDA runtime: build the player, play commands, read the snapshot.

It takes a CUDA build of torch and CUDA's headers, g++, and no GPU. See tests/data/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
DEVICE_NBYTES = 80 << 30
Command = tuple[str | int | float, ...]
"""A line of what play.cpp reads."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the CUDA build of torch is, and CUDA's headers."""
    parser.add_argument("--torch", type=Path, default=Path(torch.__file__).parent, help="a CUDA build's torch folder")
    parser.add_argument("--cuda-include", type=Path, help="with cuda_runtime_api.h (default: beside torch)")


def build_for(parser: argparse.ArgumentParser, parsed: argparse.Namespace, to: Path) -> Path:
    """Build the player with what `parsed` says of `add_arguments`. Returns it."""
    include = parsed.cuda_include or next(iter(parsed.torch.parent.glob("nvidia/cu*/include")), None)
    if not (parsed.torch / "lib" / "libc10_cuda.so").exists() or include is None:
        parser.error(
            f"{parsed.torch} is no CUDA build of torch, or has no CUDA headers beside it. Options: both arguments"
        )
    return build(parsed.torch, include, to)


def build(torch_at: Path, cuda_include: Path, to: Path) -> Path:
    """Compile the fake runtime and the player into `to`. Returns the player. For builds with CUDA 13."""
    script = to / "cudart.map"
    script.write_text("libcudart.so.13 { global: *; };\n")
    runtime = to / "libcudart.so.13"
    player = to / "play"
    compiler = ["g++", "-std=c++20", "-O1", f"-I{torch_at / 'include'}", f"-I{cuda_include}"]
    as_library = ["-fPIC", "-shared", f"-Wl,-soname,{runtime.name}", f"-Wl,--version-script={script}"]
    against = [f"-L{to}", f"-l:{runtime.name}", f"-L{torch_at / 'lib'}", "-lc10_cuda", "-lc10"]
    subprocess.run([*compiler, HERE / "fake_cudart.cpp", "-o", runtime, *as_library], check=True)
    subprocess.run([*compiler, HERE / "play.cpp", "-o", player, *against], check=True)
    return player


def play(
    player: Path,
    torch_at: Path,
    commands: Sequence[Command],
    *,
    conf: str = "",
    available_nbytes: int | None = None,
    addresses: str = "low",
    with_totals: bool = False,
) -> dict[str, Any]:
    """What the real allocator did with `commands`.

    Args:
        conf: PYTORCH_CUDA_ALLOC_CONF.
        available_nbytes: Of the device, what the process can get; None: all.
        addresses: How cudaMalloc places; see fake_cudart.cpp.
        with_totals: Also, after each command, the bytes and retries so far.

    Raises:
        subprocess.CalledProcessError: The allocator crashed, or does not accept `conf`.
    """
    environment = {key: value for key, value in os.environ.items() if not key.endswith("ALLOC_CONF")}
    environment["LD_LIBRARY_PATH"] = f"{player.parent}:{torch_at / 'lib'}"
    environment["FAKE_CUDA_TOTAL"] = str(DEVICE_NBYTES)
    environment["FAKE_CUDA_ADDRESSES"] = addresses
    if conf:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = conf
    if available_nbytes is not None:
        environment["FAKE_CUDA_AVAILABLE"] = str(available_nbytes)
    text = "".join(" ".join(map(str, command)) + "\n" for command in commands)
    arguments = [str(player)] + ["totals"] * with_totals
    done = subprocess.run(
        arguments, input=text, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    return json.loads(done.stdout)


def document(played: dict[str, Any]) -> dict[str, Any]:
    """What torch.cuda.memory._dump_snapshot would pickle, had history been recorded with context=None."""
    segments = []
    for segment in played["segments"]:
        at, blocks = segment["address"], []
        for block in segment["blocks"]:
            blocks.append({"address": at, **block, "frames": []})
            at += block["size"]
        owner = tuple(segment["segment_pool_id"])
        segments.append({**segment, "segment_pool_id": owner, "frames": [], "blocks": blocks})
    trace = [
        {
            "action": action,
            "device_free" if action == "oom" else "addr": address,
            "size": size,
            "stream": stream,
            "time_us": index,
            "compile_context": "N/A",
            "user_metadata": "",
            "pool_id": (first, second),
        }
        for index, (action, address, size, stream, first, second, _) in enumerate(played["device_trace"])
    ]
    settings = dict(played["settings"])
    return {
        "segments": segments,
        "device_traces": [trace],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": settings.pop("conf"),
            "roundup_power2_divisions": {str(1 << i): n for i, n in enumerate(settings.pop("roundup"))},
            **settings,
        },
        "external_annotations": [],
    }
