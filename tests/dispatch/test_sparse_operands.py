"""Sparse tensors have no storage of their own: an op that names one uses its indices and its values.

Before these were seen, a plan could give the chunks of a sparse tensor's indices to others while it was in use.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import ooc

COUNT, WIDTH = 131_072, 512
LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def _sparse(layout: torch.layout) -> tuple[torch.Tensor, list[torch.Tensor]]:
    dense = torch.rand(256, 256)
    if layout is torch.sparse_coo:
        made = dense.to_sparse()
        return made, [made._indices(), made._values()]
    made = dense.to_sparse(layout=layout, blocksize=(4, 4) if layout in LAYOUTS[3:] else None)
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return made, [made.crow_indices(), made.col_indices(), made.values()]
    return made, [made.ccol_indices(), made.row_indices(), made.values()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_parts_of_a_sparse_tensor_are_its_operands(layout: torch.layout) -> None:
    with ooc.Session("32MiB", threshold_nbytes=64) as session:
        operands = session.engine.runner.dispatcher.operands
        made, parts = _sparse(layout)
        assert operands(made) == tuple(part.untyped_storage().data_ptr() for part in parts)
        assert all(session.engine.manager.records[address].seen for address in operands(made))
        assert operands(made.to("meta")) == ()


def _products(step_of: Callable[[], object] | None) -> list[float]:
    """Products with a sparse matrix that nobody but the sparse tensor holds, after layers that need the room."""
    torch.manual_seed(4)
    layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.01)
    losses = []

    def step() -> float:
        values = torch.randn(COUNT) * 2
        indices = torch.randint(WIDTH, (2, COUNT))
        matrix = torch.sparse_coo_tensor(indices, values, (WIDTH, WIDTH), check_invariants=False)
        del indices, values
        x = torch.randn(WIDTH, WIDTH)
        for layer in layers:
            x = torch.relu(layer(x))
        loss = torch.sparse.mm(matrix, x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    for _ in range(6):
        if step_of is None:
            losses.append(step())
        else:
            with step_of():  # type: ignore[attr-defined]
                losses.append(step())
    return losses


@pytest.mark.parametrize("debug", [False, True])
def test_a_sparse_matrix_is_in_memory_when_it_is_used(debug: bool) -> None:
    plain = _products(None)
    with ooc.Session("8MiB", chunk_nbytes="64KiB", debug=debug, plan_cache=False) as session:
        ours = _products(session.step)
        modes = [step["mode"] for step in session.report()["steps"]]
    assert ours == plain
    assert modes[-1] == "planned"


def _recommender(step_of: Callable[[], object] | None, *, clear_first: bool) -> tuple[list[float], torch.Tensor]:
    """Sparse gradients, summed, in two optimizers."""
    torch.manual_seed(3)
    users, items = nn.Embedding(4096, 64, sparse=True), nn.EmbeddingBag(4096, 64, mode="mean", sparse=True)
    head = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizers = [
        torch.optim.SparseAdam([*users.parameters(), *items.parameters()], lr=0.01),
        torch.optim.Adagrad(head.parameters(), lr=0.01),
    ]
    losses = []

    def step() -> float:
        total = 0.0
        if clear_first:
            for optimizer in optimizers:
                optimizer.zero_grad()
        for _ in range(2):
            found = torch.cat([users(torch.randint(4096, (512,))), items(torch.randint(4096, (512, 5)))], 1)
            loss = head(found).square().mean()
            loss.backward()
            total += loss.item()
        for optimizer in optimizers:
            optimizer.step()
        if not clear_first:
            for optimizer in optimizers:
                optimizer.zero_grad()
        return total

    for _ in range(7):
        if step_of is None:
            losses.append(step())
        else:
            with step_of():  # type: ignore[attr-defined]
                losses.append(step())
    return losses, torch.cat([users.weight.detach().sum(1), items.weight.detach().sum(1)]).clone()


@pytest.mark.parametrize("clear_first", [False, True])
def test_sparse_gradients_change_no_bit(clear_first: bool) -> None:
    losses, weights = _recommender(None, clear_first=clear_first)
    with ooc.Session("6MiB", chunk_nbytes="64KiB", threshold_nbytes="16KiB", debug=True, plan_cache=False) as session:
        ours, ours_weights = _recommender(session.step, clear_first=clear_first)
        assert ours == losses
        assert torch.equal(ours_weights, weights)
        assert not session.report()["unplannable"]
