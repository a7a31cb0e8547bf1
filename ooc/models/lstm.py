"""A recurrent language model over bytes: few ops, each over a whole sequence."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from ooc.models.text import next_byte_batch
from ooc.models.transformers import NUM_BYTES, next_byte_loss
from ooc.models.workload import Preset, Workload, register


class LSTMLanguageModel(nn.Module):
    """Embedding, stacked LSTM with dropout between the layers, linear head."""

    def __init__(self, *, width: int, depth: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.token = nn.Embedding(NUM_BYTES, width)
        self.lstm = nn.LSTM(width, width, depth, batch_first=True, dropout=dropout)
        self.head = nn.Linear(width, NUM_BYTES)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.token(tokens))
        return self.head(states)


@register("lstm")
def lstm(preset: Preset, *, batch_size: int | None = None, context: int | None = None) -> Workload:
    """An LSTM over bytes: 2 x 128 over 32 bytes when small, 6 x 512 over 64 when full.

    oneDNN runs a layer's whole sequence as one op, whose workspace sets the smallest budget: many
    layers over short sequences train in a small share of their memory, two over long ones do not.
    """
    small = preset == "small"
    batch_size = batch_size or 32
    context = context or (32 if small else 64)
    width, depth = (128, 2) if small else (512, 6)
    return Workload(
        name="",
        preset=preset,
        batch_size=batch_size,
        build=partial(LSTMLanguageModel, width=width, depth=depth),
        make_batch=partial(next_byte_batch, batch_size=batch_size, context=context),
        loss=next_byte_loss,
        optimizer="adam",
        description=f"{depth} x {width}, batch {batch_size} of {context} bytes",
    )
