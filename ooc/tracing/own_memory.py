"""Estimates what ops allocate for themselves, which tensors without data do not show.

Mostly these are oneDNN's copies of operands and results in layouts of its own. Found by recording ops that ran (torch
2.13, AVX-512): 35 convolutions of 3 to 512 channels, kernels of 1 to 9, with one and two threads, mostly within a
tenth; four LSTM layers. Of 30 other ops two allocated more than a fiftieth of their operands beside their results:
batch norm's backward op, and dropout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

_CONVOLUTIONS = ("aten::convolution", "aten::convolution_backward")
_ONEDNN_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK = 16
"""Channels of a result are padded to a block where they are fewer than half of one; an input's are read as they are."""

RNN_WORKSPACE_OUTPUTS = 18
"""What an LSTM layer keeps for its backward op, in sizes of its output: 15.8 to 17 were found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnMemory:
    """What an op allocates for itself, in bytes.

    Attributes:
        before_nbytes: Before it allocates its results, and given back by then.
        with_results_nbytes: Beside its results.
    """

    before_nbytes: int = 0
    with_results_nbytes: int = 0


def own_memory(func: Any, args: Sequence[Any]) -> OwnMemory:
    """What an op on the CPU is estimated to allocate for itself, with these arguments."""
    name = func._schema.name
    if name == "aten::mkldnn_rnn_layer":
        weights = sum(map(_nbytes, args[1:5]))
        return OwnMemory(with_results_nbytes=RNN_WORKSPACE_OUTPUTS * _rnn_output_nbytes(args) + 2 * weights)
    if name == "aten::mkldnn_rnn_layer_backward":
        weights = sum(map(_nbytes, args[1:5]))
        return OwnMemory(with_results_nbytes=RNN_WORKSPACE_OUTPUTS * _nbytes(args[7]) + 3 * weights)
    if name == "aten::native_batch_norm_backward":
        return OwnMemory(with_results_nbytes=_nbytes(args[1]))
    if name == "aten::native_dropout":
        return OwnMemory(with_results_nbytes=_nbytes(args[0]))
    if name not in _CONVOLUTIONS:
        return OwnMemory()
    if name == "aten::convolution":
        x, weight = args[:2]
        out_nbytes = _result_nbytes(args)
        mask: Sequence[bool] = (False, True)
        out_channels = weight.shape[1] * args[8] if args[6] else weight.shape[0]
    else:
        out, x, weight = args[:3]
        mask, out_nbytes, out_channels = args[10], _nbytes(out), out.shape[1]
    if x.dtype not in _ONEDNN_TYPES or x.dim() < 4 or _is_channels_last(x) or _is_channels_last(weight):
        return OwnMemory()
    x_copy = _nbytes(x) if x.shape[1] >= _BLOCK // 4 else 0
    out_copy = out_nbytes * _BLOCK // out_channels if 2 * out_channels < _BLOCK else out_nbytes
    if all(length == 1 for length in weight.shape[2:]):  # one product of matrices, as they lie
        out_copy = 0
        x_copy = x_copy if torch.get_num_threads() > 1 else 0
        weight_copy = 0
    else:
        weight_copy = _nbytes(weight)
    if mask[0] and not mask[1]:  # the derivative alone
        return OwnMemory(before_nbytes=x_copy + out_copy + weight_copy, with_results_nbytes=x_copy)
    return OwnMemory(with_results_nbytes=x_copy + out_copy + weight_copy)


def _rnn_output_nbytes(args: Sequence[Any]) -> int:
    x, hidden = args[0], args[5]
    return int(x.shape[0] * x.shape[1] * hidden.shape[-1] * x.element_size())


def _result_nbytes(args: Sequence[Any]) -> int:
    """Of a convolution, by its arguments."""
    x, weight, _, stride, padding, dilation, is_transposed, output_padding, groups = args[:9]
    num_dims = x.dim() - 2

    def of(values: Sequence[int], index: int) -> int:
        return int(values[index] if len(values) > 1 else values[0])

    count = x.shape[0] * (weight.shape[1] * groups if is_transposed else weight.shape[0])
    for index in range(num_dims):
        length, reach = x.shape[2 + index], of(dilation, index) * (weight.shape[2 + index] - 1)
        if is_transposed:
            made = (length - 1) * of(stride, index) - 2 * of(padding, index) + reach + of(output_padding, index) + 1
        else:
            made = (length + 2 * of(padding, index) - reach - 1) // of(stride, index) + 1
        count *= made
    return int(count * x.element_size())


def _is_channels_last(tensor: torch.Tensor) -> bool:
    layout = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return tensor.dim() in (4, 5) and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=layout)


def _nbytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
