"""Training programs as people write them for a GPU, small, each in core or within a budget.

    python -m benchmarks.gpu.programs NAME [--budget 300MiB] [--device cuda|cpu|fake]

The answer is the last line: a hash of all losses and of what was trained, and how the steps ran. The gate compares
those of a program that trains in core with those of the same one within a session (`side_by_side.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import ooc

_VOCABULARY = 2000
_LENGTH = 257
_NUM_STEPS = 18
_SMALLER = 4
"""By so much models are narrower where the CPU computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a program trains.

    Attributes:
        device: Of its tensors.
        step: Makes the context of a step; of programs that say where their steps end.
        scale: Widths and pictures' sides are divided by it.
    """

    device: torch.device
    step: Callable[[], AbstractContextManager[Any]]
    scale: int

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """Ops in a smaller type; in bfloat16 on the CPU, which has little else."""
        is_gpu = self.device.type == "cuda"
        return torch.autocast(self.device.type, dtype if is_gpu else torch.bfloat16)


Trained = tuple[nn.Module, list[float]]


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.projections(self.first(x)).view(batch, length, 3, 8, width // 8)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        dropout = 0.1 if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        found: Tensor = x + self.mlp(self.second(x))
        return found


class _LanguageModel(nn.Module):
    def __init__(self, width: int, *, recomputes: bool = False) -> None:
        super().__init__()
        self.token = nn.Embedding(_VOCABULARY, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(6))
        self.head = nn.Linear(width, _VOCABULARY, bias=False)
        self.recomputes = recomputes

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes and self.training else block(x)
        found: Tensor = self.head(x)
        return found

    def loss(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def pictures(place: Place) -> Trained:
    """Workers, pinned batches, channels last, float16 under a gradient scaler, which skips steps by what it sees."""
    side = 64 // place.scale
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(512, 3, side, side), torch.randint(10, (512,)))
    is_gpu = place.device.type == "cuda"
    loader = DataLoader(data, 64, shuffle=True, num_workers=2, pin_memory=is_gpu, generator=generator)
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
    layers += [nn.Dropout2d(0.1), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(128 * (side // 4) ** 2, 10)]
    model = nn.Sequential(*layers).to(place.device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True)
    scaler, losses = torch.amp.GradScaler(place.device.type), []
    for _ in range(2):
        for batch, labels in loader:
            with place.step():
                x = batch.to(place.device, non_blocking=True, memory_format=torch.channels_last)
                y = labels.to(place.device, non_blocking=True)
                with place.autocast(torch.float16):
                    loss = F.cross_entropy(model(x), y)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                losses.append(loss.item())
    return model, losses


def _language(
    place: Place,
    *,
    recomputes: bool = False,
    num_micro_batches: Callable[[int], int] = lambda _: 1,
    lengths: Iterator[int] | None = None,
    fetches: Callable[[Tensor], Tensor] | None = None,
) -> Trained:
    """A language model in bfloat16; an evaluation and a moving average every fifth step; state saved and read back."""
    model = _LanguageModel(512 // place.scale, recomputes=recomputes).to(place.device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=60)
    fetch = fetches or (lambda tokens: tokens.to(place.device))
    generator = torch.Generator().manual_seed(2)
    average: dict[str, Tensor] = {}
    losses = []
    for index in range(_NUM_STEPS):
        with place.step():
            for _ in range(num_micro_batches(index)):
                length = next(lengths) if lengths is not None else _LENGTH
                tokens = fetch(torch.randint(_VOCABULARY, (8, length), generator=generator))
                with contextlib.nullcontext() if recomputes else place.autocast(torch.bfloat16):
                    loss = model.loss(tokens)
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
        if index % 5 == 4:
            model.eval()
            with torch.no_grad():
                losses.append(float(model.loss(tokens)))
            model.train()
            for name, parameter in model.named_parameters():
                now = parameter.detach()
                average[name] = average[name].lerp_(now, 0.1) if name in average else now.clone()
        if index == 11:
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.seek(0)
            saved = torch.load(file, map_location=place.device)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            del saved
    return model, losses


def language(place: Place) -> Trained:
    """See `_language`."""
    return _language(place)


def recomputed(place: Place) -> Trained:
    """With torch's own checkpoints, in float32."""
    return _language(place, recomputes=True)


def accumulated(place: Place) -> Trained:
    """One to three micro-batches a step."""
    return _language(place, num_micro_batches=lambda index: 1 + index % 3)


def any_length(place: Place) -> Trained:
    """Each batch of another length: no step is like another."""
    generator = torch.Generator().manual_seed(4)
    return _language(place, lengths=iter(lambda: 65 + int(torch.randint(0, 200, (1,), generator=generator)), None))


def fetched_ahead(place: Place) -> Trained:
    """Batches come on a stream of their own, with `record_stream`."""
    if place.device.type != "cuda":
        return _language(place)
    other = torch.cuda.Stream()

    def fetch(tokens: Tensor) -> Tensor:
        with torch.cuda.stream(other):
            moved = tokens.pin_memory().to(place.device, non_blocking=True)
        torch.cuda.current_stream().wait_stream(other)
        moved.record_stream(torch.cuda.current_stream())
        return moved

    return _language(place, fetches=fetch)


def experts(place: Place) -> Trained:
    """Rows go to experts by what a gate says: shapes that depend on data."""
    width = 512 // place.scale
    gate = nn.Linear(width, 6)
    own = nn.ModuleList(
        nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)) for _ in range(6)
    )
    model = nn.ModuleList([gate, own]).to(place.device)
    optimizer, losses = torch.optim.Adam(model.parameters(), 1e-3), []
    for _ in range(_NUM_STEPS):
        with place.step():
            x = torch.randn(2048, width, device=place.device)
            weights, chosen = gate(x).softmax(-1).max(-1)
            y = torch.zeros_like(x)
            for number, expert in enumerate(own):
                rows = (chosen == number).nonzero().squeeze(1)
                if rows.numel():
                    y = y.index_copy(0, rows, expert(x[rows]) * weights[rows, None])
            large = y[y.abs() > 0.1]
            loss = (y - x.flip(1)).square().mean() + (large.square().mean() if large.numel() else 0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return model, losses


def recurrent(place: Place) -> Trained:
    """An LSTM whose state goes on from step to step."""
    width = 512 // place.scale
    token, lstm, head = (
        nn.Embedding(500, 256),
        nn.LSTM(256, width, 3, batch_first=True, dropout=0.2),
        nn.Linear(width, 500),
    )
    model = nn.ModuleList([token, lstm, head]).to(place.device)
    optimizer, losses, state = torch.optim.RMSprop(model.parameters(), 1e-3), [], None
    for _ in range(_NUM_STEPS):
        with place.step():
            tokens = torch.randint(500, (32, 65)).to(place.device)
            out, state = lstm(token(tokens[:, :-1]), None if state is None else tuple(s.detach() for s in state))
            loss = F.cross_entropy(head(out).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return model, losses


def adversarial(place: Place) -> Trained:
    """Two networks with an optimizer each, the one's layers under spectral normalization."""
    generator = nn.Sequential(
        nn.ConvTranspose2d(64, 128, 4),
        nn.BatchNorm2d(128),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(128, 64, 4, 2, 1),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(64, 3, 4, 2, 1),
        nn.Tanh(),
    )
    critic = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 64, 4, 2, 1)),
        nn.LeakyReLU(0.2),
        nn.Conv2d(64, 128, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(2048, 1),
    )
    model, losses = nn.ModuleList([generator, critic]).to(place.device), []
    makes, judges = (torch.optim.Adam(part.parameters(), 2e-4, (0.5, 0.999)) for part in (generator, critic))
    for _ in range(_NUM_STEPS):
        with place.step():
            made = generator(torch.randn(256, 64, 1, 1, device=place.device))
            real = torch.rand(256, 3, 16, 16, device=place.device)
            first = F.softplus(critic(made.detach())).mean() + F.softplus(-critic(real)).mean()
            judges.zero_grad()
            first.backward()
            judges.step()
            second = F.softplus(-critic(made)).mean()
            makes.zero_grad()
            second.backward()
            makes.step()
            losses.append(first.item() + second.item())
    return model, losses


PROGRAMS: dict[str, Callable[[Place], Trained]] = {
    program.__name__: program
    for program in (
        pictures,
        language,
        recomputed,
        accumulated,
        any_length,
        fetched_ahead,
        experts,
        recurrent,
        adversarial,
    )
}
"""By name."""


def run(name: str, *, device: str, budget: str | None) -> dict[str, Any]:
    """Train, in core where there is no budget. A hash of all bits; the need, or how the steps ran."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.manual_seed(0)
    where = torch.device("cpu" if device == "fake" else device)
    scale = 1 if where.type == "cuda" else _SMALLER
    if budget is None:
        place = Place(device=where, step=contextlib.nullcontext, scale=scale)
        digest = _digest(*PROGRAMS[name](place))
        return {"digest": digest, "peak_nbytes": torch.cuda.max_memory_allocated() if where.type == "cuda" else 0}
    with ooc.Session(budget, plan_cache=False, step_boundary="explicit", **_options(device)) as session:
        digest = _digest(*PROGRAMS[name](Place(device=where, step=session.step, scale=scale)))
        report = session.report()
    modes = [step["mode"] for step in report["steps"]]
    return {
        "digest": digest,
        "peak_nbytes": report["peak_nbytes"],
        "budget_nbytes": report["budget_nbytes"],
        "modes": modes,
    }


def _options(device: str) -> dict[str, Any]:
    if device == "cuda":
        return {"device": "cuda", "host_budget": "2GiB"}
    if device == "fake":
        from ooc.testing.fake_device import FakeCudaDevice

        return {"device": FakeCudaDevice(host_budget=256 << 20)}
    return {}


def _digest(model: nn.Module, losses: list[float]) -> str:
    found = hashlib.sha256(repr([loss.hex() for loss in losses]).encode())
    for name, value in model.state_dict().items():
        found.update(name.encode())
        found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()[:32]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=sorted(PROGRAMS))
    parser.add_argument("--budget", help="within a session of so many bytes; in core by default")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu", "fake"))
    options = parser.parse_args()
    try:
        answer = run(options.name, device=options.device, budget=options.budget)
    except ooc.BudgetTooSmall as error:
        answer = {"error": str(error), "is_too_small": True}
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
