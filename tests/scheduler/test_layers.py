"""NNTrainer's orders and merging against what its papers print."""

from __future__ import annotations

import pytest

from scheduler.layers import (
    CreateMode,
    Layer,
    LayerMemory,
    Procedure,
    TensorRequest,
    execution_orders,
    merged,
    placement_problem,
    theoretical_nbytes,
)
from scheduler.placement import lower_bound, place, require_valid

F, CG, CD, AG = Procedure.FORWARD, Procedure.GRADIENT, Procedure.DERIVATIVE, Procedure.APPLY
KIB = 1024


def floats(*shape: int) -> int:
    count = 4
    for size in shape:
        count *= size
    return count


def one_layer_and_loss(
    nbytes_in: int, nbytes_out: int, weights: dict[str, int]
) -> tuple[list[Layer], list[TensorRequest]]:
    """A layer and a mean-squared-error loss: the loss reads output and label, and writes the derivative."""
    requests = [
        TensorRequest(name="X0", nbytes=nbytes_in, uses=((0, F), (0, CG)), mode=CreateMode.PLACEHOLDER),
        TensorRequest(name="X1", nbytes=nbytes_out, uses=((0, F), (1, F), (1, CD))),
        TensorRequest(name="label", nbytes=nbytes_out, uses=((1, Procedure.ITERATION),), mode=CreateMode.PLACEHOLDER),
        TensorRequest(name="D1", nbytes=nbytes_out, uses=((1, CD), (0, CG), (0, CD))),
    ]
    for name, nbytes in weights.items():
        requests.append(TensorRequest(name=name, nbytes=nbytes, uses=((0, Procedure.MAX),)))
        requests.append(TensorRequest(name=f"d{name}", nbytes=nbytes, uses=((0, CG), (0, AG))))
    return [Layer(name="layer"), Layer(name="loss", is_trainable=False)], requests


def theoretical_kib(layers: list[Layer], requests: list[TensorRequest]) -> int:
    return theoretical_nbytes(merged(requests, layers)) // KIB


def test_figure_5s_orders() -> None:
    """Figure 5: three layers; layer 0 has F 0 and CG 9."""
    layers = [Layer(name=str(i)) for i in range(3)]
    found = execution_orders(layers)
    assert [o[F] for o in found] == [0, 1, 2]
    assert [(o[CG], o[CD], o[AG]) for o in found] == [(9, 10, 11), (6, 7, 8), (3, 4, 5)]


def test_orders_with_gradient_clipping_apply_after_all_gradients() -> None:
    found = execution_orders([Layer(name=str(i)) for i in range(3)], clips_gradients=True)
    assert [(o[CG], o[CD], o[AG]) for o in found] == [(7, 8, 9), (5, 6, 10), (3, 4, 11)]
    assert min(o[AG] for o in found) > max(o[CD] for o in found)


@pytest.mark.parametrize("clips", [False, True])
def test_a_frozen_layer_has_one_backward_order_that_no_other_layer_has(clips: bool) -> None:
    layers = [Layer(name="a"), Layer(name="b", is_trainable=False), Layer(name="c")]
    found = execution_orders(layers, clips_gradients=clips)
    assert found[1][CG] == found[1][CD] == found[1][AG]
    others = {o[p] for i, o in enumerate(found) for p in (F, CG, CD, AG) if i != 1}
    assert found[1][CG] not in others


def test_table_4_of_2022_linear() -> None:
    """64 samples of 150,528 to 10: 49,397 KiB, at the gradient: input, weight, its gradient, derivative and label."""
    layers, requests = one_layer_and_loss(
        floats(64, 150528), floats(64, 10), {"W": floats(150528, 10), "bias": floats(10)}
    )
    assert theoretical_kib(layers, requests) == 49_397


def test_table_4_of_icse_linear_to_300() -> None:
    """64 samples of 150,528 to 300: the paper prints 390,590 KiB; without its framework's last 6 KiB."""
    layers, requests = one_layer_and_loss(
        floats(64, 150528), floats(64, 300), {"W": floats(150528, 300), "bias": floats(300)}
    )
    assert theoretical_kib(layers, requests) == pytest.approx(390_590, rel=2e-5)


def test_table_4_conv2d() -> None:
    """64 x 3 x 224 x 224 to 64 x 3 x 112 x 112: 65,856 KiB, at the loss: input, output, label, derivative."""
    layers, requests = one_layer_and_loss(
        floats(64, 3, 224, 224), floats(64, 3, 112, 112), {"filter": floats(3, 3, 3, 3)}
    )
    assert theoretical_kib(layers, requests) == 65_856


def conv_activation_flatten(*, in_place: bool) -> tuple[list[Layer], list[TensorRequest]]:
    """Figure 5's model: convolution, sigmoid in place, flatten as a view, loss."""
    nbytes = floats(64, 3, 112, 112)
    layers = [Layer(name="conv"), *(Layer(name=n, is_trainable=False) for n in ("sigmoid", "flatten", "loss"))]
    view = {"mode": CreateMode.MODIFY_VIEW} if in_place else {}
    flat = {"mode": CreateMode.READ_ONLY_VIEW} if in_place else {}

    def target(name: str) -> dict[str, str]:
        return {"target": name} if in_place else {}

    requests = [
        TensorRequest(name="X0", nbytes=floats(64, 3, 224, 224), uses=((0, F), (0, CG)), mode=CreateMode.PLACEHOLDER),
        TensorRequest(name="W", nbytes=floats(3, 3, 3, 3), uses=((0, Procedure.MAX),)),
        TensorRequest(name="dW", nbytes=floats(3, 3, 3, 3), uses=((0, CG), (0, AG))),
        TensorRequest(name="X1", nbytes=nbytes, uses=((0, F), (1, F))),
        TensorRequest(name="X2", nbytes=nbytes, uses=((1, F), (1, CD), (2, F)), **view, **target("X1")),
        TensorRequest(name="X3", nbytes=nbytes, uses=((2, F), (3, F), (3, CD)), **flat, **target("X2")),
        TensorRequest(name="label", nbytes=nbytes, uses=((3, Procedure.ITERATION),), mode=CreateMode.PLACEHOLDER),
        TensorRequest(name="D3", nbytes=nbytes, uses=((3, CD), (2, CD))),
        TensorRequest(name="D2", nbytes=nbytes, uses=((2, CD), (1, CD)), **flat, **target("D3")),
        TensorRequest(name="D1", nbytes=nbytes, uses=((1, CD), (0, CG), (0, CD)), **view, **target("D2")),
    ]
    return layers, requests


def test_table_4_conv_activation_flatten_needs_the_merging() -> None:
    """The paper's 65,856 KiB hold only if X1, X2, X3 share memory, and D1, D2, D3."""
    layers, requests = conv_activation_flatten(in_place=True)
    memories = merged(requests, layers)
    assert {m.tensors for m in memories} >= {("X1", "X2", "X3"), ("D3", "D2", "D1")}
    assert theoretical_nbytes(memories) // KIB == 65_856
    apart = theoretical_kib(*conv_activation_flatten(in_place=False))
    assert apart > 65_856


def test_a_view_may_not_overwrite_what_is_read_later() -> None:
    """Line 25: the largest order of the target must not be above the smallest of the view."""
    layers = [Layer(name="a"), Layer(name="b")]
    target = TensorRequest(name="X", nbytes=8, uses=((0, F), (0, CG)))
    view = TensorRequest(name="Y", nbytes=8, uses=((1, F),), mode=CreateMode.MODIFY_VIEW, target="X")
    assert len(merged([target, view], layers)) == 2
    read_only = TensorRequest(name="Y", nbytes=8, uses=((1, F),), mode=CreateMode.READ_ONLY_VIEW, target="X")
    (memory,) = merged([target, read_only], layers)
    assert memory == LayerMemory(tensors=("X", "Y"), nbytes=8, first_order=0, last_order=5)


def test_the_sorting_planner_places_merged_tensors_at_the_theoretical_memory() -> None:
    layers, requests = conv_activation_flatten(in_place=True)
    problem = placement_problem(merged(requests, layers))
    placement = place(problem, "nntrainer")
    require_valid(problem, placement)
    assert lower_bound(problem) <= placement.height <= 1.2 * lower_bound(problem)


def test_bad_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="create mode MV with target None"):
        TensorRequest(name="X", nbytes=8, uses=((0, F),), mode=CreateMode.MODIFY_VIEW)
    with pytest.raises(ValueError, match="0 bytes"):
        TensorRequest(name="X", nbytes=0, uses=((0, F),))
    lost = TensorRequest(name="X", nbytes=8, uses=((0, F),), mode=CreateMode.EXTEND, target="W")
    with pytest.raises(ValueError, match="view of 'W', which nobody requests"):
        merged([lost], [Layer(name="a")])
