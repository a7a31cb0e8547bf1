"""Kinds of statement that run ops: allocations, views, functional and in-place ops, `out=`, ops with temporaries."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.session.program_statements import State, Statement, fit, generator, kind, matrix, size

# -- allocations


@kind(2, retryable=True)
def _empty_fill(state: State, s: Statement) -> None:
    x = torch.empty(size(s.p))
    x.fill_(s.q / 16 + state.step)
    state.put(s.dst, x)


@kind(1, retryable=True)
def _zeros(state: State, s: Statement) -> None:
    state.put(s.dst, torch.zeros(size(s.p)))


@kind(2, retryable=True)
def _randn(state: State, s: Statement) -> None:
    state.put(s.dst, torch.randn(size(s.p), generator=generator(s, state)))


@kind(1)
def _randn_default(state: State, s: Statement) -> None:
    state.put(s.dst, torch.randn(size(s.p)))


@kind(0.5, retryable=True)
def _full_like(state: State, s: Statement) -> None:
    state.put(s.dst, torch.full_like(state.get(s.a).detach().float(), 0.5))


@kind(0.5, retryable=True)
def _arange(state: State, s: Statement) -> None:
    state.put(s.dst, torch.arange(size(s.p), dtype=torch.float64))


@kind(1, retryable=True)
def _from_numpy(state: State, s: Statement) -> None:
    array = np.random.default_rng(s.q + state.step % 2).standard_normal(size(s.p)).astype(np.float32)
    state.put(s.dst, torch.from_numpy(array).clone())


@kind(0.5, retryable=True)
def _numpy_operand(state: State, s: Statement) -> None:
    """An operand whose memory is numpy's."""
    array = np.full(size(s.p), s.q / 8, dtype=np.float32)
    state.put(s.dst, torch.from_numpy(array) * fit(state.get(s.a), size(s.p)))


@kind(1)
def _storage(state: State, s: Statement) -> None:
    """A storage that no op allocates, or one that a user takes from its tensor."""
    n = size(s.p)
    if s.q % 3 == 0:
        storage = torch.UntypedStorage(4 * n)  # torch gives it memory without asking its allocator
        state.outside.add(storage.data_ptr())
    else:
        storage = torch.empty(4 * n, dtype=torch.uint8).untyped_storage()
    x = torch.empty(0)
    x.set_(storage, 0, (n,), (1,))
    x.fill_(s.q / 4)
    state.put(s.dst, x)


@kind(0.5, retryable=True)
def _empty_strided(state: State, s: Statement) -> None:
    n = max(size(s.p) // 64, 1)
    x = torch.empty_strided((n, 64), (1, n))
    x.fill_(s.q)
    state.put(s.dst, x)


@kind(0.7)
def _input(state: State, s: Statement) -> None:
    """One of the preloaded inputs, in turn."""
    if state.inputs:
        state.put(s.dst, state.inputs[(state.step + s.q) % len(state.inputs)])


# -- views


@kind(2)
def _slice(state: State, s: Statement) -> None:
    x = state.get(s.a).reshape(-1)
    start = s.p % max(x.numel() // 2, 1)
    state.put(s.dst, x[start : start + max(x.numel() // 2, 1)])


@kind(1)
def _step_slice(state: State, s: Statement) -> None:
    state.put(s.dst, state.get(s.a).reshape(-1)[:: 2 + s.p % 3])


@kind(1)
def _transpose(state: State, s: Statement) -> None:
    x = state.get(s.a).reshape(-1)
    columns = 2 + s.p % 6
    rows = x.numel() // columns
    if rows:
        state.put(s.dst, x[: rows * columns].reshape(rows, columns).t())


@kind(0.7)
def _as_strided(state: State, s: Statement) -> None:
    x = state.get(s.a).reshape(-1)
    rows = x.numel() // 3
    if rows:
        state.put(s.dst, x.as_strided((rows, 3), (1, rows)))


@kind(0.7)
def _expand(state: State, s: Statement) -> None:
    x = state.get(s.a).reshape(-1)[: 16 + s.p % 600]
    state.put(s.dst, x.expand(1 + s.q % 5, x.numel()))


@kind(0.5)
def _view_bytes(state: State, s: Statement) -> None:
    x = state.get(s.a)
    if x.is_contiguous() and x.dtype in (torch.float32, torch.float64) and not x.requires_grad:
        state.put(s.dst, x.reshape(-1).view(torch.int32).clone() & 0x3FFFFFFF)


@kind(0.7)
def _chunk_list(state: State, s: Statement) -> None:
    parts = state.get(s.a).reshape(-1).chunk(3)
    state.put(s.dst, parts[s.p % len(parts)])
    state.put(s.b, parts[s.q % len(parts)])


@kind(0.5)
def _detach(state: State, s: Statement) -> None:
    state.put(s.dst, state.get(s.a).detach())


@kind(0.4)
def _diagonal(state: State, s: Statement) -> None:
    n = int(size(s.p) ** 0.5)
    state.put(s.dst, matrix(state.get(s.a), n, n).diagonal())


# -- functional ops

_UNARY: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.sin,
    torch.tanh,
    torch.relu,
    torch.neg,
    torch.abs,
    torch.sigmoid,
    torch.clone,
    F.gelu,
    F.silu,
    lambda x: x.double().float(),
    lambda x: x.bfloat16().float(),
    lambda x: x.flip(0),
    lambda x: torch.roll(x, 17),
)

_BINARY: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    torch.add,
    torch.mul,
    torch.sub,
    torch.maximum,
    lambda a, b: torch.where(a > b, a, -b),
    lambda a, b: torch.lerp(a, b, 0.25),
    lambda a, b: torch.addcmul(a, a, b, value=0.5),
    lambda a, b: a / (b.abs() + 1),
)


@kind(5, retryable=True)
def _unary(state: State, s: Statement) -> None:
    state.put(s.dst, _UNARY[s.q % len(_UNARY)](fit(state.get(s.a), size(s.p))))


@kind(5, retryable=True)
def _binary(state: State, s: Statement) -> None:
    n = size(s.p)
    y = _BINARY[s.q % len(_BINARY)](fit(state.get(s.a), n), fit(state.get(s.b), n))
    state.put(s.dst, y.clamp(-8, 8))


@kind(1, retryable=True)
def _same_operand(state: State, s: Statement) -> None:
    """One variable as several operands, views included."""
    x = fit(state.get(s.a), size(s.p))
    state.put(s.dst, torch.addcmul(x, x, x[:1]).tanh() + torch.cat([x[1:], x[:1]]))


@kind(1, retryable=True)
def _dtype(state: State, s: Statement) -> None:
    kinds = (torch.float64, torch.bfloat16, torch.int64, torch.float32)
    x = fit(state.get(s.a), size(s.p)).detach()
    state.put(s.dst, torch.nan_to_num(x).clamp(-100, 100).to(kinds[s.q % 4]))


@kind(0.7)
def _dropout(state: State, s: Statement) -> None:
    state.put(s.dst, F.dropout(fit(state.get(s.a), size(s.p)), 0.3))


# -- in place


@kind(3)
def _in_place(state: State, s: Statement) -> None:
    x = state.get(s.dst)
    match s.q % 9:
        case 0:
            x.mul_(0.5)
        case 1:
            x.add_(1)
        case 2:
            x.clamp_(-1, 1)
        case 3:
            x.zero_()
        case 4:
            x.fill_(s.p / 8)
        case 5:
            x.neg_()
        case 6:
            x.reshape(-1)[: 1 + s.p % 2000].add_(0.5)
        case 7:
            x.t_() if x.dim() == 2 else x.abs_()
        case 8:
            x.reshape(-1)[-1:].fill_(3)


@kind(2)
def _copy_into(state: State, s: Statement) -> None:
    x = state.get(s.dst)
    x.copy_(fit(state.get(s.a), x.numel()).detach().reshape(x.shape))


@kind(1.5)
def _accumulate(state: State, s: Statement) -> None:
    x = state.get(s.dst)
    x.add_(fit(state.get(s.a), x.numel()).detach().reshape(x.shape), alpha=0.5)


@kind(0.7)
def _swap_halves(state: State, s: Statement) -> None:
    x = state.get(s.dst).reshape(-1)
    half = x.numel() // 2
    if half:
        first = x[:half].clone()
        x[:half].copy_(x[half : 2 * half])
        x[half : 2 * half].copy_(first)


@kind(0.7)
def _index_in_place(state: State, s: Statement) -> None:
    x = state.get(s.dst).reshape(-1)
    if not x.numel():
        return
    index = torch.randint(0, x.numel(), (size(s.p),), generator=generator(s, state))
    match s.q % 4:
        case 0:
            x.index_fill_(0, index, 0.25)
        case 1:
            x.index_add_(0, index, torch.ones(index.numel(), dtype=x.dtype))
        case 2:
            x.scatter_(0, index, 0.5)
        case 3:
            x.masked_fill_(x > 0.5, 0.125)


@kind(0.5)
def _random_in_place(state: State, s: Statement) -> None:
    state.get(s.dst).uniform_(-1, 1)


# -- out=


@kind(1.5)
def _out_binary(state: State, s: Statement) -> None:
    c = state.get(s.dst)
    if not c.requires_grad and c.dtype == torch.float32:
        a, b = (fit(state.get(r), c.numel()).detach().reshape(c.shape) for r in (s.a, s.b))
        torch.mul(a, b, out=c)


@kind(1)
def _out_resized(state: State, s: Statement) -> None:
    """The op gives its result's storage a size."""
    n = size(s.p)
    c = torch.empty(0)
    torch.add(fit(state.get(s.a), n).detach(), fit(state.get(s.b), n).detach(), out=c)
    state.put(s.dst, c)


@kind(0.7)
def _out_matmul(state: State, s: Statement) -> None:
    a, b = matrix(state.get(s.a), 96, 48).detach(), matrix(state.get(s.b), 80, 48).detach()
    c = torch.empty(96, 80)
    torch.matmul(a, b.t(), out=c)
    state.put(s.dst, c.tanh_())


@kind(0.5)
def _out_cat(state: State, s: Statement) -> None:
    n = size(s.p)
    c = torch.empty(2 * n)
    torch.cat([fit(state.get(s.a), n).detach(), fit(state.get(s.b), n).detach()], out=c)
    state.put(s.dst, c)


# -- ops with temporaries


@kind(2, retryable=True)
def _matmul(state: State, s: Statement) -> None:
    k = 16 + s.q % 100
    a, b = matrix(state.get(s.a), k, 64), matrix(state.get(s.b), k + 9, 64)
    state.put(s.dst, torch.tanh(a @ b.t()))


@kind(1, retryable=True)
def _bmm(state: State, s: Statement) -> None:
    a = fit(state.get(s.a), 4 * 48 * 40).reshape(4, 48, 40).transpose(0, 2)
    b = fit(state.get(s.b), 48 * 40 * 4).reshape(40, 48, 4)[:, :, : 1 + s.q % 4]
    state.put(s.dst, torch.bmm(a.transpose(1, 2), b).sin())


@kind(2, retryable=True)
def _conv(state: State, s: Statement) -> None:
    x = fit(state.get(s.a), 2 * 8 * 20 * 20).reshape(2, 8, 20, 20)
    w = fit(state.get(s.b), 12 * 8 * 3 * 3).reshape(12, 8, 3, 3)
    state.put(s.dst, F.conv2d(x, w * 0.1, padding=s.q % 2, stride=1 + s.p % 2))


@kind(1, retryable=True)
def _norms(state: State, s: Statement) -> None:
    x = matrix(state.get(s.a), max(size(s.p) // 64, 1), 64)
    match s.q % 4:
        case 0:
            y = F.layer_norm(x, (64,))
        case 1:
            y = F.softmax(x, -1)
        case 2:
            y = F.log_softmax(x.t(), -1)
        case _:
            y = F.group_norm(x.reshape(1, 64, -1), 8)
    state.put(s.dst, y)


@kind(1)
def _batch_norm(state: State, s: Statement) -> None:
    """Running statistics that the schema does not own up to, large enough to be variables."""
    channels = 1100
    x = matrix(state.get(s.a), 3, channels)
    mean, var = state.get(s.dst), state.get(s.b)
    ok = mean.numel() == channels == var.numel() and mean.dtype == var.dtype == torch.float32
    ok = ok and mean is not var and not mean.requires_grad and not var.requires_grad
    if not ok or not mean.is_contiguous() or not var.is_contiguous():
        state.put(s.dst, torch.zeros(channels))
        state.put(s.b, torch.ones(channels))
        return
    state.put(s.p, F.batch_norm(x, mean, var, training=True))


@kind(1, retryable=True)
def _indexing(state: State, s: Statement) -> None:
    x = fit(state.get(s.a), size(s.p))
    index = torch.randint(0, x.numel(), (size(s.q),), generator=generator(s, state))
    state.put(s.dst, x[index] if s.b % 2 else x.gather(0, index))


@kind(0.7, retryable=True)
def _embedding(state: State, s: Statement) -> None:
    index = torch.randint(0, 100, (1 + s.q * 3,), generator=generator(s, state))
    state.put(s.dst, F.embedding(index, matrix(state.get(s.a), 100, 40)))


@kind(1.5, retryable=True)
def _cat(state: State, s: Statement) -> None:
    n = size(s.p)
    parts = [fit(state.get(s.a), n), fit(state.get(s.b), n), fit(state.get(s.a), n)]
    y = torch.cat(parts) if s.q % 2 else torch.stack(parts, -1)
    state.put(s.dst, y)


@kind(1, retryable=True)
def _scans(state: State, s: Statement) -> None:
    x = torch.nan_to_num(fit(state.get(s.a), size(s.p))).detach()
    match s.q % 5:
        case 0:
            y = torch.cumsum(x, 0).sin()
        case 1:
            y = torch.sort(x, stable=True).values
        case 2:
            y = torch.argsort(x, stable=True).float()
        case 3:
            y = torch.topk(x, min(x.numel(), 50)).values
        case _:
            y = torch.cummax(x, 0).values
    state.put(s.dst, y)


@kind(1, retryable=True)
def _data_dependent(state: State, s: Statement) -> None:
    """Results whose size depends on the numbers."""
    x = torch.nan_to_num(fit(state.get(s.a), size(s.p))).detach()
    noise = torch.rand(x.numel(), generator=generator(s, state))
    match s.b % 3:
        case 0:
            y = torch.masked_select(x, noise > 0.5)
        case 1:
            y = torch.unique((noise * 500 * (1 + s.q)).long()).float()
        case _:
            y = torch.nonzero(noise > 0.7).float()
    state.put(s.dst, y)


@kind(0.7, retryable=True)
def _pool(state: State, s: Statement) -> None:
    x = fit(state.get(s.a), 2 * 6 * 30 * 30).reshape(2, 6, 30, 30)
    match s.q % 3:
        case 0:
            y = F.max_pool2d(x, 2)
        case 1:
            y = F.interpolate(x, scale_factor=1.5, mode="nearest")
        case _:
            y = F.pad(x, (1, 2, 3, 4))
    state.put(s.dst, y)


@kind(0.7, retryable=True)
def _attention(state: State, s: Statement) -> None:
    q, k, v = (fit(state.get(r), 2 * 2 * 24 * 32).reshape(2, 2, 24, 32) for r in (s.a, s.b, s.a))
    state.put(s.dst, F.scaled_dot_product_attention(q, k, v, is_causal=bool(s.q % 2)))


@kind(0.5)
def _lstm(state: State, s: Statement) -> None:
    if not state.modules:
        return
    lstm = next((m for m in state.modules if isinstance(m, torch.nn.LSTM)), None)
    if lstm is not None:
        y, _ = lstm(fit(state.get(s.a), 5 * 3 * 32).reshape(5, 3, 32))
        state.put(s.dst, y)
