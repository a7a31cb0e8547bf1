"""Transformers: a byte-level GPT, BERT, a plain encoder, and one with tied and frozen weights."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ooc.models.text import next_byte_batch
from ooc.models.workload import Batch, Preset, Workload, generator, register

NUM_BYTES = 256


class SelfAttention(nn.Module):
    """Multi-head self-attention with one fused projection for queries, keys and values."""

    def __init__(self, width: int, num_heads: int, dropout: float, *, causal: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.num_heads = num_heads
        self.dropout = dropout
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.num_heads, width // self.num_heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=self.causal
        )
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class PreNormBlock(nn.Module):
    """GPT's block: each half normalises its own input and adds to the stream."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = SelfAttention(width, num_heads, dropout, causal=True)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """A decoder over bytes.

    Args:
        tied: The head shares the token embedding's weight.
        vocabulary: Tokens that the embedding and the head have room for; bytes are the first of them.
    """

    def __init__(
        self,
        *,
        width: int,
        depth: int,
        num_heads: int,
        context: int,
        dropout: float = 0.1,
        tied: bool = True,
        vocabulary: int = NUM_BYTES,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(PreNormBlock(width, num_heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token(tokens) + self.position(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_byte_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of the next byte, per byte."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@register("gpt")
def gpt(
    preset: Preset,
    *,
    batch_size: int | None = None,
    depth: int | None = None,
    width: int | None = None,
    context: int | None = None,
    dropout: float = 0.1,
    tied: bool = True,
) -> Workload:
    """A byte-level GPT: 2 x 128 over 64 bytes when small, 6 x 256 (4.9 M parameters) over 256 when full."""
    small = preset == "small"
    depth = depth or (2 if small else 6)
    width = width or (128 if small else 256)
    context = context or (64 if small else 256)
    batch_size = batch_size or (8 if small else 16)
    return Workload(
        name="",
        preset=preset,
        batch_size=batch_size,
        build=partial(
            GPT, width=width, depth=depth, num_heads=width // 32, context=context, dropout=dropout, tied=tied
        ),
        make_batch=partial(next_byte_batch, batch_size=batch_size, context=context),
        loss=next_byte_loss,
        optimizer="adamw",
        description=f"{depth} x {width}, batch {batch_size} of {context} bytes",
    )


@register("gpt_1b")
def gpt_1b(preset: Preset, *, batch_size: int | None = None, context: int | None = None) -> Workload:
    """GPT-3 XL's shape (Brown et al. 2020, table 2.1): 24 x 2048, 50,304 tokens, 1.31 G parameters when full.

    Parameters, gradients and AdamW's state take 16 bytes a parameter, 19.6 GiB. Small: 2 x 128, 512 tokens.
    """
    small = preset == "small"
    depth, width, num_heads = (2, 128, 4) if small else (24, 2048, 16)
    context = context or (64 if small else 1024)
    batch_size = batch_size or 4
    return Workload(
        name="",
        preset=preset,
        batch_size=batch_size,
        build=partial(
            GPT,
            width=width,
            depth=depth,
            num_heads=num_heads,
            context=context,
            dropout=0.0,
            vocabulary=512 if small else 50304,
        ),
        make_batch=partial(next_byte_batch, batch_size=batch_size, context=context),
        loss=next_byte_loss,
        optimizer="adamw_foreach",
        description=f"{depth} x {width}, batch {batch_size} of {context} bytes",
    )


class PostNormBlock(nn.Module):
    """BERT's block: each half adds to its input and then normalises the sum."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = SelfAttention(width, num_heads, dropout, causal=False)
        self.norm1 = nn.LayerNorm(width, eps=1e-12)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norm2 = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(self.attention(x)))
        return self.norm2(x + self.dropout(self.mlp(x)))


class BERT(nn.Module):
    """Devlin et al. 2019: token, position and segment embeddings, an encoder, a masked-token head.

    The head's weight is the token embedding; its bias is its own.
    """

    def __init__(
        self, *, vocabulary: int, width: int, depth: int, num_heads: int, context: int, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.segment = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(PostNormBlock(width, num_heads, dropout) for _ in range(depth)))
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width, eps=1e-12))
        self.decoder = nn.Linear(width, vocabulary)
        for embedding in (self.token, self.position, self.segment):
            nn.init.normal_(embedding.weight, std=0.02)
        self.decoder.weight = self.token.weight

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions) + self.segment(segments)
        x = self.blocks(self.dropout(self.norm(x)))
        return self.decoder(self.transform(x))


_IGNORED = -100
"""Cross entropy's own mark for a position without a target."""


def _masked_token_batch(step_index: int, *, batch_size: int, context: int, vocabulary: int) -> Batch:
    """Tokens with 15 % hidden behind token 0, segments of two halves, and the hidden tokens."""
    source = generator(step_index)
    tokens = torch.randint(1, vocabulary, (batch_size, context), generator=source)
    hidden = torch.rand(batch_size, context, generator=source) < 0.15
    segments = (torch.arange(context) >= context // 2).long().expand(batch_size, context).contiguous()
    return tokens.masked_fill(hidden, 0), segments, tokens.masked_fill(~hidden, _IGNORED)


def _masked_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    tokens, segments, targets = batch
    return F.cross_entropy(model(tokens, segments).flatten(0, 1), targets.flatten(), ignore_index=_IGNORED)


@register("bert")
def bert(preset: Preset, *, batch_size: int | None = None, context: int | None = None) -> Workload:
    """BERT: 2 x 128 over 1,000 tokens when small; BERT-base (109.5 M parameters) when full."""
    small = preset == "small"
    batch_size = batch_size or (8 if small else 4)
    context = context or (64 if small else 128)
    vocabulary = 1000 if small else 30522
    width, depth = (128, 2) if small else (768, 12)
    return Workload(
        name="",
        preset=preset,
        batch_size=batch_size,
        build=partial(
            BERT,
            vocabulary=vocabulary,
            width=width,
            depth=depth,
            num_heads=width // 64,
            context=context if small else 512,
        ),
        make_batch=partial(_masked_token_batch, batch_size=batch_size, context=context, vocabulary=vocabulary),
        loss=_masked_token_loss,
        optimizer="adamw",
        description=f"{depth} x {width}, batch {batch_size} of {context} tokens, vocabulary {vocabulary}",
    )


class Encoder(nn.Module):
    """torch's own encoder layers over continuous inputs, and a linear head."""

    def __init__(self, *, width: int, depth: int, num_heads: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, num_heads, 4 * width, dropout, batch_first=True) for _ in range(depth))
        )
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(1))


def _vector_batch(step_index: int, *, batch_size: int, context: int, width: int, num_classes: int) -> Batch:
    source = generator(step_index)
    x = torch.randn(batch_size, context, width, generator=source)
    return x, torch.randint(num_classes, (batch_size,), generator=source)


def _vector_loss(model: nn.Module, batch: Batch) -> Tensor:
    x, labels = batch
    return F.cross_entropy(model(x), labels)


@register("encoder")
def encoder(preset: Preset, *, batch_size: int | None = None, dropout: float = 0.0) -> Workload:
    """A Transformer encoder: full is 6 x 512 on 16 sequences of 256 tokens."""
    small = preset == "small"
    batch_size = batch_size or (4 if small else 16)
    width, depth, context = (128, 2, 64) if small else (512, 6, 256)
    return Workload(
        name="",
        preset=preset,
        batch_size=batch_size,
        build=partial(Encoder, width=width, depth=depth, num_heads=width // 64, num_classes=10, dropout=dropout),
        make_batch=partial(_vector_batch, batch_size=batch_size, context=context, width=width, num_classes=10),
        loss=_vector_loss,
        optimizer="sgd",
        description=f"{depth} x {width}, batch {batch_size} of {context} tokens",
    )


class TiedFrozen(GPT):
    """A GPT whose head is tied to its embedding and whose middle blocks are frozen.

    Gradients flow through the frozen blocks but not into them: their weights are read in the
    forward and backward pass and never change.
    """

    def __init__(self, *, width: int, depth: int, num_heads: int, context: int) -> None:
        super().__init__(width=width, depth=depth, num_heads=num_heads, context=context, tied=True)
        for block in list(self.blocks)[1:-1]:
            block.requires_grad_(False)


@register("tied_frozen")
def tied_frozen(preset: Preset, *, batch_size: int | None = None) -> Workload:
    """Tied embeddings around frozen middle blocks."""
    small = preset == "small"
    width, depth, context = (128, 3, 64) if small else (256, 6, 256)
    batch_size = batch_size or (8 if small else 16)
    return Workload(
        name="",
        preset=preset,
        batch_size=batch_size,
        build=partial(TiedFrozen, width=width, depth=depth, num_heads=width // 32, context=context),
        make_batch=partial(next_byte_batch, batch_size=batch_size, context=context),
        loss=next_byte_loss,
        optimizer="adamw",
        description=f"{depth} x {width}, {depth - 2} blocks frozen, batch {batch_size} of {context} bytes",
    )
