"""Record the steps in `steps/`: `python -m tests.data.make_steps`. Small models on fake tensors, times of `desktop`."""

from __future__ import annotations

import gzip
from pathlib import Path

from benchmarks.planners import MODELS, record
from scheduler.profiles import load_profile


def main() -> None:
    folder = Path(__file__).parent / "steps"
    folder.mkdir(exist_ok=True)
    for name in MODELS:
        text = record(name, "small", load_profile("desktop")).to_json()
        (folder / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
