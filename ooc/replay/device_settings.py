"""Settings of torch that its CUDA kernels ask for beside their arguments; a re-run needs them to repeat its bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["CudaSettings"]

_PRECISIONS = (("cuda", "conv"), ("cuda", "rnn"), ("cuda", "matmul"))
_C: Any = torch._C  # one of whose stubs is wrong in each version


@dataclass(frozen=True, slots=True)
class CudaSettings:
    """Which libraries' algorithms may be chosen, and with which precision.

    Attributes:
        cudnn: Whether it is used; whether it searches for algorithms; whether they must be deterministic.
        precisions: Of products of float32: "ieee" or "tf32", by library and kind of op.
        tf32: The older switches for the same, of cuDNN and cuBLAS; None where the newer ones contradict them: torch
            keeps both, and refuses to tell an older one that disagrees.
        reduced: Whether sums of half-precision products may be rounded in between.
        backends: Which library multiplies matrices, and which solves systems.
    """

    cudnn: tuple[bool, bool, bool]
    precisions: tuple[str, ...]
    tf32: tuple[bool | None, ...]
    reduced: tuple[Any, ...]
    backends: tuple[Any, ...]

    @classmethod
    def now(cls) -> CudaSettings:
        """Those of this moment."""
        return cls(
            (_C._get_cudnn_enabled(), _C._get_cudnn_benchmark(), _C._get_cudnn_deterministic()),
            tuple([_C._get_fp32_precision_getter(*of) for of in _PRECISIONS]),
            (_older(_C._get_cudnn_allow_tf32), _older(_C._get_cublas_allow_tf32)),
            (
                _C._get_cublas_allow_fp16_reduced_precision_reduction(),
                _C._get_cublas_allow_bf16_reduced_precision_reduction(),
                _C._get_cublas_allow_fp16_accumulation(),
            ),
            (_C._get_blas_preferred_backend(), _C._get_linalg_preferred_backend()),
        )

    def apply(self) -> None:
        """Set them."""
        enabled, benchmark, deterministic = self.cudnn
        _C._set_cudnn_enabled(enabled)
        _C._set_cudnn_benchmark(benchmark)
        _C._set_cudnn_deterministic(deterministic)
        cudnn_tf32, cublas_tf32 = self.tf32
        if cudnn_tf32 not in (None, _older(_C._get_cudnn_allow_tf32)):
            _C._set_cudnn_allow_tf32(cudnn_tf32)
        if cublas_tf32 not in (None, _older(_C._get_cublas_allow_tf32)):
            _C._set_cublas_allow_tf32(cublas_tf32)
        for of, precision in zip(_PRECISIONS, self.precisions, strict=True):
            if _C._get_fp32_precision_getter(*of) != precision:
                _C._set_fp32_precision_setter(*of, precision)
        fp16, bf16, accumulation = self.reduced
        _C._set_cublas_allow_fp16_reduced_precision_reduction(*_several(fp16))
        _C._set_cublas_allow_bf16_reduced_precision_reduction(*_several(bf16))
        _C._set_cublas_allow_fp16_accumulation(accumulation)
        blas, linalg = self.backends
        _C._set_blas_preferred_backend(blas)
        _C._set_linalg_preferred_backend(linalg)


def _older(getter: Callable[[], bool]) -> bool | None:
    try:
        return getter()
    except RuntimeError:
        return None


def _several(value: Any) -> tuple[Any, ...]:
    """A setting that newer versions of torch have made a tuple of."""
    return tuple(value) if isinstance(value, tuple) else (value,)
