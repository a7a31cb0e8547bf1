"""A job of two processes that starts them itself: by torch.multiprocessing (`spawn`, `late`, `fork`), or as a program
once more (`beside`: as rank 1, `both`: as both). Prints its bits. A second argument: the rank that raises in mid-step.
"""

import os
import socket
import subprocess
import sys

import data_parallel
import torch
import torch.distributed as dist
from torch import multiprocessing

import ooc


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def train(rank: int, port: str, failing: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    data_parallel.train(failing)
    budget_nbytes = ooc.memory_stats().get("reserved_bytes.all.current")
    print(f"rank {rank}: budget {budget_nbytes}\n", end="", file=sys.stderr, flush=True)
    dist.destroy_process_group()


def main(how: str, failing: str = "") -> None:
    if "LOCAL_RANK" in os.environ:
        train(int(os.environ["LOCAL_RANK"]), os.environ["PORT"], failing)
        return
    port = free_port()
    if how in ("spawn", "fork"):
        kept = torch.ones(1 << 18)  # it comes back
        method = {} if how == "spawn" else {"start_method": "fork"}
        multiprocessing.start_processes(train, (port, failing), nprocs=2, **method)
        assert kept.sum() == 1 << 18
    elif how == "late":
        context = multiprocessing.spawn(train, (port, failing), nprocs=2, join=False)
        while not context.join():
            pass
    else:
        words = [sys.executable, os.path.abspath(sys.argv[0]), *sys.argv[1:]]
        others = ["1"] if how == "beside" else ["0", "1"]
        os.environ["PORT"] = port
        started = [subprocess.Popen(words, env={**os.environ, "LOCAL_RANK": other}) for other in others]
        if how == "beside":
            os.environ["LOCAL_RANK"] = "0"
            train(0, port, failing)
        sys.exit(max(process.wait() for process in started))


if __name__ == "__main__":
    main(*sys.argv[1:])
