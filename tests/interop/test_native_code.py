"""Native code that torch runs without an op: packages of AOTInductor, oneDNN's fused groups, copies of storages."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ooc
from tests.interop.cases import SIDE, check_in_steps


class Package:
    """Has the interface of torch's own, and works by addresses as that does."""

    def __init__(self) -> None:
        self.weights: dict[str, int] = {}

    def load_constants(self, constants: Any, use_inactive: bool, check: bool, user_managed: bool = False) -> None:
        assert user_managed and check and not use_inactive
        self.weights = {name: address_of(tensor) for name, tensor in constants.items()}

    def boxed_run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        result = torch.empty(SIDE, SIDE, dtype=torch.int32)
        sources = [integers_at(address_of(inputs[0])), integers_at(self.weights["w"])]
        integers_at(address_of(result))[:] = [a + b for a, b in zip(*(source[:] for source in sources), strict=True)]
        inputs.clear()
        return [result]


def address_of(tensor: torch.Tensor) -> int:
    return torch._C.StorageBase.data_ptr(tensor.untyped_storage())  # type: ignore[no-any-return, attr-defined]


def integers_at(address: int) -> Any:
    return (ctypes.c_int32 * (SIDE * SIDE)).from_address(address)


@pytest.mark.parametrize("debug", [False, True])
def test_a_packages_run_is_an_op(monkeypatch: pytest.MonkeyPatch, debug: bool) -> None:
    """Its inputs, and its constants where they are the program's own tensors, are away when it runs."""
    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", Package)
    package = Package()

    def begin(integers: torch.Tensor) -> torch.Tensor:
        package.load_constants({"w": integers}, False, True, True)
        return integers + 1

    check_in_steps(begin, lambda a: package.boxed_run([a])[0].sum().item(), debug=debug)


def fused() -> tuple[Any, torch.Tensor]:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()).eval(), torch.randn(8, 8)
    with torch.no_grad():
        function = torch.jit.freeze(torch.jit.trace(model, x))
        for _ in range(3):
            function(x)
    return function, x


def test_there_is_no_fusion_while_a_session_is_open() -> None:
    native: Any = torch._C
    is_on = native._jit_llga_enabled
    torch.jit.enable_onednn_fusion(True)
    try:
        function, x = fused()
        assert "oneDNN" in str(function.graph_for(x)), "nothing to test"
        with pytest.warns(RuntimeWarning, match="oneDNN graph fusion"):
            session = ooc.Session("1MiB")
        with session:
            assert not is_on()
            with torch.no_grad():
                for _ in range(3):
                    function(x)
            assert "oneDNN" not in str(function.graph_for(x))
        assert is_on()
        torch.jit.enable_onednn_fusion(False)
        with ooc.Session("1MiB"):
            with pytest.warns(RuntimeWarning, match="oneDNN graph fusion"):
                torch.jit.enable_onednn_fusion(True)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                torch.jit.enable_onednn_fusion(True)  # one warning is enough
            assert torch.jit.onednn_fusion_enabled()
            assert not is_on()
        assert is_on()
    finally:
        torch.jit.enable_onednn_fusion(False)


def legacy_copy(tensor: torch.Tensor) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(tensor, buffer, _use_new_zipfile_serialization=False)
    buffer.seek(0)
    loaded: torch.Tensor = torch.load(buffer)
    return loaded


@pytest.mark.parametrize(
    "make",
    [
        copy.deepcopy,
        legacy_copy,
        lambda tensor: pickle.loads(pickle.dumps(tensor)),
        lambda tensor: torch.empty(0).set_(torch.UntypedStorage(4 * tensor.numel())).view_as(tensor).copy_(tensor),
    ],
    ids=["deepcopy", "legacy load", "pickle", "UntypedStorage"],
)
def test_copies_are_within_the_budget(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with ooc.Session("256KiB", chunk_nbytes="64KiB") as session:
        tensor = torch.randn(SIDE, SIDE)
        copies = [make(tensor) for _ in range(8)]
        assert session.memory_stats()["allocated_bytes.all.current"] >= 9 * 4 * SIDE * SIDE
        assert all(torch.equal(each, tensor) for each in copies)
    assert torch.UntypedStorage(8).nbytes() == 8
    assert torch.UntypedStorage([1, 2]).tolist() == [1, 2]
