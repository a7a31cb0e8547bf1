"""From stacks as PyTorch records them to the user's lines: no row may show the allocator, the unwinder or torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ooc.fragmentation import make_report, read_streams
from ooc.fragmentation.cli import main
from ooc.fragmentation.frames import MAX_LINES, Origin, op_of, origin_of
from tests.fragmentation.cases import BASE, DATA, MIB, PROFILES, block, event, segment, snapshot, written

TORCH = "/opt/conda/lib/python3.11/site-packages/torch"


def cpp(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "filename": "??", "line": 0} for name in names]


def c(name: str, file: str, line: int) -> dict[str, Any]:
    return {"name": name, "filename": file, "line": line}


ALLOCATOR = cpp(
    "torch::unwind::unwind()",
    "torch::CapturedTraceback::gather(bool, bool, bool)",
    "torch::cuda::(anonymous namespace)::gather_with_cpp()",
    "c10::cuda::CUDACachingAllocator::Native::DeviceCachingAllocator::malloc(unsigned long, CUstream_st*)",
    "c10::cuda::CUDACachingAllocator::Native::NativeCachingAllocator::malloc(void**, signed char, unsigned long)",
    "c10::cuda::CUDACachingAllocator::Native::NativeCachingAllocator::allocate(unsigned long)",
    "at::TensorBase at::detail::_empty_generic<long>(c10::ArrayRef<long>, c10::Allocator*)",
    "at::detail::empty_cuda(c10::ArrayRef<long>, c10::ScalarType)",
    "at::native::empty_cuda(c10::ArrayRef<long>)",
    "at::_ops::empty_memory_format::redispatch(c10::DispatchKeySet, c10::ArrayRef<c10::SymInt>)",
    "at::(anonymous namespace)::structured_addmm_out_cuda_functional::set_output_raw_strided(long)",
    "at::meta::structured_addmm::meta(at::Tensor const&, at::Tensor const&)",
    "c10::impl::wrap_kernel_functor_unboxed_<...>::call(c10::OperatorKernel*, c10::DispatchKeySet)",
    "at::_ops::addmm::redispatch(c10::DispatchKeySet, at::Tensor const&)",
    "torch::autograd::VariableType::(anonymous namespace)::addmm(c10::DispatchKeySet)",
    "void std::__invoke_impl<void>(std::__invoke_other)",
    "at::_ops::addmm::call(at::Tensor const&, at::Tensor const&)",
    "at::native::linear(at::Tensor const&, at::Tensor const&)",
    "at::_ops::linear::call(at::Tensor const&, at::Tensor const&)",
    "torch::autograd::THPVariable_linear(_object*, _object*, _object*)",
)
"""Twenty frames, as a snapshot of a GPU has them before the first frame of Python."""

PYTHONS_OWN = [
    c("cfunction_call", "/usr/local/src/conda/python-3.11.9/Objects/methodobject.c", 542),
    c("_PyObject_MakeTpCall", "/usr/local/src/conda/python-3.11.9/Objects/call.c", 214),
    c("forward", f"{TORCH}/nn/modules/linear.py", 134),
    c("_PyEval_EvalFrameDefault", "/usr/local/src/conda/python-3.11.9/Python/ceval.c", 4769),
    c("_call_impl", f"{TORCH}/nn/modules/module.py", 1775),
    c("_wrapped_call_impl", f"{TORCH}/nn/modules/module.py", 1764),
    c("slot_tp_call", "/usr/local/src/conda/python-3.11.9/Objects/typeobject.c", 7494),
]
OUTERMOST = [
    c("<module>", "/home/me/project/train.py", 80),
    c("_run_code", "<frozen runpy>", 88),
    c("main", "/opt/conda/lib/python3.11/site-packages/torch/distributed/run.py", 918),
    c("pymain_run_python", "/usr/local/src/conda/python-3.11.9/Modules/main.c", 600),
    c("__libc_start_call_main", "../sysdeps/nptl/libc_start_call_main.h", 58),
    c("__libc_start_main_impl", "../csu/libc-start.c", 392),
    *cpp("_start", "clone", "start_thread", "??"),
]
MODEL = c("forward", "/home/me/project/net.py", 41)
STEP = c("step", "/home/me/project/train.py", 57)
BACKWARD = cpp(
    *[frame["name"] for frame in ALLOCATOR[:9]],
    "at::_ops::convolution_backward::call(at::Tensor const&, at::Tensor const&)",
    "torch::autograd::generated::ConvolutionBackward0::apply(std::vector<at::Tensor>&&)",
    "torch::autograd::Node::operator()(std::vector<at::Tensor>&&)",
    "torch::autograd::Engine::evaluate_function(std::shared_ptr<torch::autograd::GraphTask>&)",
    "torch::autograd::Engine::thread_main(std::shared_ptr<torch::autograd::GraphTask> const&)",
    "torch::autograd::python::PythonEngine::thread_init(int, bool)",
    "execute_native_thread_routine",
    "start_thread",
    "__GI___clone3",
)


def stack_of(frames: list[dict[str, Any]], tmp_path: Path) -> tuple[str, ...]:
    """As the reader gives it."""
    entry = {**event("alloc", BASE, 512), "frames": frames}
    document = {**snapshot(), "segments": [], "device_traces": [[entry]]}
    (stream,) = read_streams(written(document, tmp_path))
    return stream.stack(0)


def test_the_users_frame_behind_thirty_of_torchs(tmp_path: Path) -> None:
    stack = stack_of([*ALLOCATOR, *PYTHONS_OWN, MODEL, *PYTHONS_OWN[-4:], STEP, *OUTERMOST], tmp_path)
    found = origin_of(stack)
    assert found.lines == (
        "forward at /home/me/project/net.py:41",
        "step at /home/me/project/train.py:57",
        "<module> at /home/me/project/train.py:80",
    )
    assert (found.library, found.module, found.doing) == ("", "", "")
    assert op_of(stack) == "aten::linear"  # what the program called, not what torch called for it
    assert found.texts("aten::linear")[0] == "forward at /home/me/project/net.py:41 (aten::linear)"


def test_a_stack_so_deep_that_the_script_is_far_out(tmp_path: Path) -> None:
    library = [
        c(f"call_{i}", "/home/me/venv/lib/python3.11/site-packages/transformers/trainer.py", i + 1) for i in range(150)
    ]
    found = origin_of(stack_of([*ALLOCATOR, *PYTHONS_OWN, *library, *OUTERMOST], tmp_path))
    assert found.lines == ("<module> at /home/me/project/train.py:80",)
    assert found.library == "call_0 at transformers/trainer.py:1"


def test_backward_on_autograds_own_thread(tmp_path: Path) -> None:
    stack = stack_of(BACKWARD, tmp_path)
    assert origin_of(stack) == Origin(doing="backward: ConvolutionBackward0")
    assert origin_of(stack).texts(op_of(stack)) == ["backward: ConvolutionBackward0, aten::convolution_backward"]


@pytest.mark.parametrize("start", [["execute_native_thread_routine"], []])
def test_a_thread_is_started_by_a_library_without_names(start: list[str], tmp_path: Path) -> None:
    """A stripped libc shows whatever exported name comes before: as in snapshots of programs on Debian."""
    stack = stack_of([*BACKWARD[:-3], *cpp(*start, "pthread_condattr_setpshared", "__xmknodat")], tmp_path)
    assert origin_of(stack) == Origin(doing="backward: ConvolutionBackward0")


@pytest.mark.parametrize(
    ("frames", "lines", "library", "doing"),
    [
        ([c("forward", f"{TORCH}/nn/modules/conv.py", 1)], (), "", ""),
        ([c("cell", "/tmp/ipykernel_314/2718.py", 3)], ("cell at /tmp/ipykernel_314/2718.py:3",), "", ""),
        ([c("<module>", "<stdin>", 3)], ("<module> at <stdin>:3",), "", ""),
        ([c("run", "/usr/lib/python3.11/threading.py", 982)], (), "", ""),
        ([c("f", "/home/me/torch/train.py", 9)], ("f at /home/me/torch/train.py:9",), "", ""),
        ([c("f", "/home/me/pytorch/torch/nn/functional.py", 9)], (), "", ""),
        ([c("f", "/home/me/ooc/train.py", 9)], ("f at /home/me/ooc/train.py:9",), "", ""),
        ([c("f", "/home/me/ooc/ooc/dispatch/mode.py", 9)], (), "", ""),
        ([c("call", "/tmp/torchinductor_me/ab/cabc.py", 9)], (), "", ""),
        (
            [c("_single", f"{TORCH}/optim/adam.py", 5), c("step", f"{TORCH}/optim/adam.py", 9), STEP],
            ("step at /home/me/project/train.py:57",),
            "",
            "optimizer step",
        ),
        (
            [c("mlp", "/v/lib/python3.12/dist-packages/timm/mlp.py", 4), STEP],
            ("step at /home/me/project/train.py:57",),
            "mlp at timm/mlp.py:4",
            "",
        ),
        (
            [c("mlp", "/v/lib/python3.12/dist-packages/timm/mlp.py", 4)],
            ("mlp at timm/mlp.py:4",),
            "",
            "",
        ),
        # A program in C++: its own functions, built with line numbers.
        ([*cpp("at::rand(c10::ArrayRef<long>)"), c("Net::forward(at::Tensor)", "/home/me/net.cpp", 7)],)
        + (("Net::forward(at::Tensor) at /home/me/net.cpp:7",), "", ""),
    ],
)
def test_whose_frame_it_is(
    frames: list[dict[str, Any]], lines: tuple[str, ...], library: str, doing: str, tmp_path: Path
) -> None:
    found = origin_of(stack_of([*ALLOCATOR, *frames], tmp_path))
    assert (found.lines, found.library, found.doing) == (lines, library, doing)


def test_lines_and_modules_of_a_profile() -> None:
    (stream,) = read_streams(DATA / PROFILES[0])
    origins = {origin_of(stream.stack(buffer)) for buffer in range(stream.num_initial, stream.num_buffers)}
    lines = {line for origin in origins for line in origin.lines}
    assert lines == {f"{name} at tests/data/make.py:{n}" for name, n in (("cnn", 18), ("record", 40), ("<module>", 62))}
    modules = {origin.module for origin in origins}
    assert {"Conv2d_0", "BatchNorm2d_0"} <= {module.split(" > ")[-1] for module in modules}
    assert {"backward: ConvolutionBackward0", "optimizer step"} <= {origin.doing for origin in origins}
    assert "aten::conv2d" in {op_of(stream.stack(buffer)) for buffer in range(stream.num_buffers)}


def test_rows_are_grouped_by_line_and_no_row_shows_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two lines of a program, four buffers each, by different ways through torch, and holes between them."""
    one, other = [MODEL, STEP, *OUTERMOST], [STEP, *OUTERMOST]
    trace = [event("segment_alloc", BASE, 20 * MIB)]
    blocks = []
    for i in range(8):
        way = [*ALLOCATOR[: 12 + i], *PYTHONS_OWN[: i % 4]]
        frames = way + (one if i % 2 else other)
        trace.append({**event("alloc", BASE + 2 * i * MIB, MIB), "frames": frames})
        trace.append(event("alloc", BASE + (2 * i + 1) * MIB, MIB))
        blocks += [{**block(MIB, MIB, "x"), "frames": frames}, block(MIB, 0)]
    for i in range(8):
        for action in ("free_requested", "free_completed"):
            trace.append(event(action, BASE + (2 * i + 1) * MIB, MIB))
    blocks.append(block(4 * MIB, 0))
    document = {**snapshot(), "segments": [segment(BASE, blocks)], "device_traces": [trace]}
    path = written(document, tmp_path)
    (stream,) = read_streams(path)
    report = make_report(stream, names=("caching",))
    lines = [(len(h.origin.lines), h.num_buffers) for h in report.holders if h.origin.lines]
    assert sorted(lines) == [(2, 4), (3, 4)]
    assert {holder.origin.lines[:1] for holder in report.holders} == {
        (),
        ("forward at /home/me/project/net.py:41",),
        ("step at /home/me/project/train.py:57",),
    }
    assert main([str(path), "--capacity", "15MiB"]) == 1
    shown = capsys.readouterr().out
    assert "forward at /home/me/project/net.py:41" in shown
    for word in ("unwind", "CapturedTraceback", "c10::", "at::", "_PyEval", "libc_start", "module.py", "runpy"):
        assert word not in shown


def test_an_origin_is_short() -> None:
    deep = tuple(f"f{i} at /home/me/a.py:{i + 1}" for i in range(40))
    assert len(origin_of(deep).lines) == MAX_LINES
    assert origin_of(()).texts() == ["(no stack was recorded)"]
    assert not origin_of(()).is_known
