"""What random programs are made of: statements, the variables they work on, and the register of their kinds.

There is one function per kind: tests/session/program_ops.py has those that run ops, and
tests/session/program_training.py those of training and of tensors' lives. A statement names registers
and small integers, never shapes: operands are cut or repeated to what it needs, so that any list of
statements is a valid program and a failing one can be shrunk by deleting statements. Every kind is
deterministic, and every byte of every storage is written before it is looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

SIZES = (64, 1023, 1024, 1025, 3000, 4096, 16384, 16385, 20000, 33000, 50000)
"""Elements (of 4 bytes) of results: below, at and above a threshold of 4 KiB, up to 4 chunks of 64 KiB."""

_MAX_NUMEL = 1 << 17


@dataclass(frozen=True, slots=True)
class Statement:
    """One line of a program: `kind(dst, a, b, p, q)`, executed in step i if bit `i % 16` of `mask` is set."""

    kind: str
    dst: int
    a: int
    b: int
    p: int
    q: int
    mask: int = 0xFFFF

    def __str__(self) -> str:
        mask = "" if self.mask == 0xFFFF else f"  # mask {self.mask:016b}"
        return f"{self.kind}(dst={self.dst}, a={self.a}, b={self.b}, p={self.p}, q={self.q}){mask}"


class Interrupted(Exception):
    """The program's own exception in mid-step, caught by its user."""


@dataclass
class State:
    """A running program's variables."""

    registers: list[Any]
    step: int = 0
    kept: list[Tensor] = field(default_factory=list)
    for_ever: list[Tensor] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    closures: list[torch.optim.LBFGS] = field(default_factory=list)
    modules: list[torch.nn.Module] = field(default_factory=list)
    cycles: list[Any] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    outside: set[int] = field(default_factory=set)
    views: dict[int, Any] = field(default_factory=dict)

    def get(self, index: int) -> Tensor:
        """The tensor in a register; a constant where there is none."""
        value = self.registers[index % len(self.registers)]
        return value if isinstance(value, Tensor) else torch.full((64,), 0.25)

    def put(self, index: int, value: Tensor) -> None:
        """Set a register. What would be too large is cut."""
        if value.numel() > _MAX_NUMEL:
            value = value.reshape(-1)[:_MAX_NUMEL].clone()
        self.registers[index % len(self.registers)] = value

    def tensors(self) -> list[Tensor]:
        """Every live tensor that the program can name."""
        found = [r for r in self.registers if isinstance(r, Tensor)]
        found += [p.grad for p in self.parameters if p.grad is not None]
        for optimizer in self.optimizers:
            for entry in optimizer.state.values():
                found += [v for v in entry.values() if isinstance(v, Tensor)]
        for module in self.modules:
            found += [*module.parameters(), *module.buffers()]
            found += [p.grad for p in module.parameters() if p.grad is not None]
        return found + self.kept + self.for_ever + self.inputs + self.parameters

    def step_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Step, without gradients that a statement gave another size: torch's fused kernels would read beyond them."""
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.shape != parameter.shape:
                parameter.grad = None
        optimizer.step()

    def clear(self) -> None:
        """Forget everything."""
        self.registers = []
        self.views.clear()
        lives = (self.kept, self.for_ever, self.inputs, self.parameters, self.modules, self.cycles)
        for own in (*lives, self.optimizers, self.closures):
            own.clear()


Kind = Callable[[State, Statement], None]
KINDS: dict[str, Kind] = {}
WEIGHTS: dict[str, float] = {}
RETRYABLE: set[str] = set()
"""Kinds that can be run again after a transfer failed in them: they change nothing but a register."""


def kind(weight: float = 1.0, *, retryable: bool = False) -> Callable[[Kind], Kind]:
    """Register a kind of statement."""

    def register(function: Kind) -> Kind:
        name = function.__name__.strip("_")
        KINDS[name], WEIGHTS[name] = function, weight
        if retryable:
            RETRYABLE.add(name)
        return function

    return register


_length_percent = 100


def set_length(percent: int) -> None:
    """From now on results have so many hundredths of their sizes, as with a batch of another length."""
    global _length_percent
    _length_percent = percent


def size(p: int) -> int:
    """The number of elements that a statement's parameter asks for."""
    return max(SIZES[p % len(SIZES)] * _length_percent // 100, 1)


def fit(x: Tensor, numel: int) -> Tensor:
    """A 1-d float32 tensor of `numel` elements made of `x`: a view where that is possible."""
    flat = x.reshape(-1)
    if flat.dtype != torch.float32:
        flat = flat.to(torch.float32)
    if flat.numel() == 0:
        return torch.ones(numel)
    if flat.numel() >= numel:
        return flat[:numel]
    if flat.numel() == 1:
        return flat.expand(numel)
    return flat.repeat(-(-numel // flat.numel()))[:numel]


def matrix(x: Tensor, rows: int, columns: int) -> Tensor:
    """`x` as a matrix."""
    return fit(x, rows * columns).reshape(rows, columns)


def generator(s: Statement, state: State) -> torch.Generator:
    """A generator that gives the same numbers in every step, or others in each."""
    return torch.Generator().manual_seed(s.q * 7 + (state.step if s.q % 2 else 0))
