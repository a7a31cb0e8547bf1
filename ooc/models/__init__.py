"""Workloads by name: models in plain torch with batches, losses and optimizers.

`get("gpt")` gives one; the demo, the benchmarks and the bitwise tests train them.
"""

from ooc.models import deeplab, densenet, lstm, pix2pix, tiny_ops, transformers, unet, vision
from ooc.models.workload import (
    OPTIMIZERS,
    PRESETS,
    Batch,
    Preset,
    Workload,
    get,
    make_optimizer,
    names,
    num_parameters,
)

__all__ = [
    "OPTIMIZERS",
    "PRESETS",
    "Batch",
    "Preset",
    "Workload",
    "deeplab",
    "densenet",
    "get",
    "lstm",
    "make_optimizer",
    "names",
    "num_parameters",
    "pix2pix",
    "tiny_ops",
    "transformers",
    "unet",
    "vision",
]
