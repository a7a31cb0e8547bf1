"""Small models trained in core and in a session whose plan recomputes, and what tests ask of both runs."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ooc
from tests.session.program_reruns import slow_store
from tests.store_speed import SLOW, store_speed

CHUNK_NBYTES = 1 << 16
NUM_STEPS = 6

Batch = tuple[Tensor, Tensor]
Hook = Callable[["Training", int, Tensor], None]


class Attention(nn.Module):
    """Self-attention with dropout, by hand or by torch's fused kernel."""

    def __init__(self, width: int, *, fused: bool) -> None:
        super().__init__()
        self.width, self.fused = width, fused
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
            y = F.dropout(scores.softmax(-1), 0.1, self.training) @ v
        return self.out(y.transpose(1, 2).flatten(-2))


def convolutions() -> nn.Module:
    """Convolution, batch norm, ReLU (every other one in place) and dropout."""
    layers: list[nn.Module] = []
    for index in range(5):
        layers.append(nn.Conv2d(3 if index == 0 else 8, 8, 3, padding=1))
        layers += [nn.BatchNorm2d(8), nn.ReLU(inplace=index % 2 == 0), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


def encoder(*, fused: bool) -> nn.Module:
    """Embeddings, attention, layer norm, GELU and dropout."""
    blocks: list[nn.Module] = [nn.Embedding(50, 32)]
    for _ in range(3):
        blocks += [nn.LayerNorm(32), Attention(32, fused=fused), nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.2)]
        blocks += [nn.Linear(128, 32), nn.RReLU(inplace=True), nn.FeatureAlphaDropout(0.1)]
    return nn.Sequential(*blocks, nn.Linear(32, 10))


@dataclass(kw_only=True)
class Case:
    """A model with its batches, and the budget in chunks."""

    model: Callable[[], nn.Module]
    num_chunks: int
    batch: Callable[[], Batch]
    autocast: bool = False
    policy: str = "sublinear"


def _images(count: int = 8) -> Batch:
    return torch.randn(count, 3, 32, 32), torch.randint(0, 10, (count,))


def many_images() -> Batch:
    """More of them than one case's steps usually take."""
    return _images(12)


def _words(count: int = 8) -> Batch:
    return torch.randint(0, 50, (count, 64)), torch.randint(0, 10, (count, 64))


CASES = {
    "convolutions": Case(model=convolutions, num_chunks=51, batch=_images),
    "convolutions_dtr": Case(model=convolutions, num_chunks=28, batch=_images, policy="dtr"),
    "convolutions_melon": Case(model=convolutions, num_chunks=28, batch=_images, policy="melon"),
    "convolutions_capuchin": Case(model=convolutions, num_chunks=28, batch=_images, policy="capuchin"),
    "convolutions_auto": Case(model=convolutions, num_chunks=28, batch=_images, policy="auto"),
    "encoder": Case(model=lambda: encoder(fused=False), num_chunks=45, batch=_words, policy="dtr"),
    "encoder_fused": Case(model=lambda: encoder(fused=True), num_chunks=22, batch=_words, policy="auto"),
    "convolutions_autocast": Case(model=convolutions, num_chunks=33, batch=_images, autocast=True, policy="dtr"),
    "encoder_autocast": Case(
        model=lambda: encoder(fused=False), num_chunks=18, batch=_words, autocast=True, policy="auto"
    ),
}


@dataclass
class Training:
    """One run: what every step left behind, as digests."""

    case: Case
    digests: list[tuple[str, ...]] = field(default_factory=list)
    notes: list[Any] = field(default_factory=list)
    session: ooc.Session | None = None

    def run(self, *, hook: Hook | None = None, sizes: Sequence[int] = (), num_steps: int = NUM_STEPS) -> None:
        """Train; `hook` is called between forward and backward, `sizes` are those of the batches."""
        torch.manual_seed(11)
        model = self.case.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for index in range(num_steps):
            step = contextlib.nullcontext() if self.session is None else self.session.step()
            with step:
                inputs, targets = self.case.batch()
                if sizes:
                    inputs, targets = inputs[: sizes[index]], targets[: sizes[index]]
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.case.autocast):
                    output = model(inputs)
                    loss = F.cross_entropy(output.float().flatten(0, -2), targets.flatten())
                optimizer.zero_grad()
                try:
                    if hook is not None:
                        hook(self, index, output)
                    loss.backward()
                except ZeroDivisionError:
                    del loss, output, inputs, targets
                    continue
                optimizer.step()
            tensors = [loss, *(p.grad for p in model.parameters()), *model.parameters(), *model.buffers()]
            tensors.append(torch.get_rng_state())
            self.digests.append(tuple(_digest(t) for t in tensors if t is not None))
            del loss, output, inputs, targets, tensors

    @property
    def modes(self) -> list[str]:
        """The steps' modes."""
        assert self.session is not None
        return [row["mode"] for row in self.session.report()["steps"]]


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().clone().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


@contextlib.contextmanager
def session(case: Case, **options: Any) -> Iterator[ooc.Session]:
    """A session in which the case's plan recomputes: from the start, or with `recompute=None` where it waits."""
    with store_speed(SLOW) if options.get("recompute", True) is None else slow_store():
        arguments: dict[str, Any] = {
            "debug": True,
            "policy": case.policy,
            "plan_cache": False,
            "recompute": True,
            **options,
        }
        with ooc.Session(case.num_chunks * CHUNK_NBYTES, chunk_nbytes=CHUNK_NBYTES, **arguments) as opened:
            yield opened


def compare(case: Case, *, hook: Hook | None = None, num_steps: int = NUM_STEPS, **options: Any) -> Training:
    """Train in core and in a session; assert that every bit is the same. The run in the session."""
    sizes = options.pop("sizes", ())
    expected = Training(case)
    expected.run(hook=hook, num_steps=num_steps, sizes=sizes)
    with session(case, **options) as opened:
        actual = Training(case, session=opened)
        actual.run(hook=hook, num_steps=num_steps, sizes=sizes)
        counters = opened.engine.manager.counters
        report = opened.report()
        actual.session = None
        actual.notes += [("num_reruns", counters.num_reruns), ("steps", report["steps"]), ("report", report)]
    assert len(actual.digests) == len(expected.digests)
    for index, (one, other) in enumerate(zip(expected.digests, actual.digests, strict=True)):
        assert one == other, f"step {index} ({report['steps'][index]['mode']})"
    return actual


def noted(training: Training, name: str) -> Any:
    """What `compare` noted under a name."""
    return next(note[1] for note in training.notes if isinstance(note, tuple) and note[0] == name)


def saved_tensors(output: Tensor) -> list[Tensor]:
    """What autograd holds for the backward pass, in the order of a walk from the output."""
    found, seen, waiting = [], set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [after for after, _ in node.next_functions]
        for name in sorted(dir(node)):
            value = getattr(node, name) if name.startswith("_saved_") else None
            if isinstance(value, Tensor):
                found.append(value)
    return found


def node_at(output: Tensor, depth: int) -> Any:
    """The node of the backward pass so many steps from the output."""
    node: Any = output.grad_fn
    for _ in range(depth):
        node = next(after for after, _ in node.next_functions if after is not None and after.next_functions)
    return node


def digest(tensor: Tensor) -> str:
    """Of a tensor's bytes, read by an op of the session."""
    return _digest(tensor)
