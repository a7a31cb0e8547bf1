"""From a recorded stack to the lines of the user's program.

A stack as PyTorch records it begins with what every stack has: the unwinder, the allocator, torch's C++, CPython's own
C functions, then torch's Python. The first line that somebody who hunts memory can change lies behind twenty or thirty
of them. An `Origin` is what remains: the user's own lines, the library that they went through, the module, the op.

Three notations are read: a memory snapshot's (`forward at /home/me/net.py:7`, C++ names without a line), a profiler's
(`net.py(7): forward`, `nn.Module: Linear_0`, `aten::addmm`, paths relative to the program's `sys.path`), and those of
`ooc trace` (`aten.addmm.default at layers.0 (net.py:7)`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

MAX_LINES = 3
"""The user's lines that tell one place from another, the innermost ones."""

MAX_MODULES = 3

_AT = re.compile(r"(?P<name>.*) at (?P<file>.+):(?P<line>\d+)", re.DOTALL)
_PROFILED = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): (?P<name>.+)", re.DOTALL)
_TRACED = re.compile(r"(?P<op>\w+\.\w[\w.]*) at (?P<where>.*\S)", re.DOTALL)
_OP = re.compile(r"at::_ops::(\w+)::(?:call|redispatch)\b")
_NODE = re.compile(r"torch::autograd::(?:generated::)?(\w*(?:Backward\d*|AccumulateGrad|Grad))::apply\b")
_PYTHON_FILE = re.compile(r"(\.pyw?|<ipython-input-[^>]*>|<stdin>|<string>|<unknown>)$")
_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
_STANDARD = re.compile(r".*[/\\]lib(?:64)?[/\\]python3(?:\.\d+t?)?[/\\]|.*\.zip[/\\]|.*[/\\]Python3\d+[/\\][Ll]ib[/\\]")
_TORCH = re.compile(
    r"(?:^|.*[/\\])torch[/\\](?:_\w+|accelerator|amp|ao|autograd|backends|compiler|cpu|csrc|cuda|distributed|distributions"
    r"|export|fft|func|futures|fx|jit|library|linalg|masked|monitor|mps|mtia|multiprocessing|nested|nn|numa|onnx|optim"
    r"|package|profiler|quantization|signal|sparse|special|storage|testing|utils|xpu|functional|hub|overrides|random"
    r"|serialization|types)(?:[/\\].*)?(?:\.py)?$"
)
_GENERATED = re.compile(r"torchinductor|torch_compile_debug|fx_generated_|<eval_with_key>|[/\\]triton[/\\]")
_OWN = re.compile(
    r"(?:^|.*[/\\])(?:ooc[/\\](?:cli|devices|dispatch|fragmentation|interop|memory|replay|reporting|telemetry|tracing"
    r"|__main__\.py|_current\.py|engine\.py|session\.py|step_cycle\.py)|vmm[/\\](?:driver|native_build|posix|store)\b)"
)
_LIBRARIES = re.compile(
    "accelerate|apex|axolotl|composer|datasets|deepspeed|diffusers|fairscale|fairseq|fastai|flash_attn|ignite|keras"
    "|kornia|lightning|lightning_fabric|mmcv|mmengine|monai|numpy|open_clip|peft|pytorch_lightning|ray|scipy"
    "|sentence_transformers|timm|torchaudio|torchmetrics|torchtext|torchtitan|torchtune|torchvision|transformers|trl"
    "|unsloth|vllm|xformers"
)
"""Packages known by name: a profiler's paths do not say which are installed ones."""

_NOT_THEIRS = re.compile(
    r"^(?:torch::|at::|c10::|c10d::|std::|void (?:torch|at|c10|std)::|pybind11|__gnu_cxx|caffe2::|non-virtual thunk)"
)
_BELOW_PYTHON = re.compile(
    r"(?:^|[/\\])(?:Python|Objects|Modules|Include|Parser|Programs|csu|nptl|sysdeps|pytorch[\w.-]*|torch|aten|c10|pybind11"
    r"|glibc[\w.-]*|gcc[\w.-]*|c\+\+)[/\\]"
)
_NEVER = re.compile(
    r"^(?:_?Py\w*|_start|__libc_start\w*|_init|clone3?|__clone3?|start_thread|execute_native_thread_routine|main|\?\?|0x.*"
    r"|method_\w+|cfunction_\w+|slot_\w+|type_call|object_\w+|pymain_\w+|run_\w+|_?_?GI_\w+|builtin_\w+|vectorcall_\w+"
    r"|function_code_fastcall|THP\w+|.*CapturedTraceback.*|.*unwind.*)"
)

_THREAD_START = re.compile(
    r"^execute_native_thread_routine\b|^torch::autograd::\w*Engine::thread_init\b|::thread_init\("
)
"""Where a thread of torch begins: what is further out started it, and is nobody's who hunts memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where in a user's program memory was asked for; what rows of the report are grouped by.

    Attributes:
        lines: The user's own frames, innermost first, at most `MAX_LINES`. Where the stack has none, those of
            libraries; where it has no such either, what is left without torch, the allocator and the interpreter.
        library: The innermost frame of an installed library (not torch) that the user's line went through; or empty.
        module: The `nn.Module`s around it, outermost first, where the recording has them; or empty.
        doing: What torch was doing for that line: "backward: ConvolutionBackward0", "optimizer step"; or empty.
    """

    lines: tuple[str, ...] = ()
    library: str = ""
    module: str = ""
    doing: str = ""

    @property
    def is_known(self) -> bool:
        """Whether anything was recorded that says where."""
        return bool(self.lines or self.module or self.doing)

    def texts(self, op: str = "") -> list[str]:
        """For people, one line each, what they can change first."""
        about = [text for text in (self.module and f"module {self.module}", self.doing, op) if text]
        if self.library:
            about.insert(0, f"through {self.library}")
        if not self.lines:
            return [", ".join(about)] if about else ["(no stack was recorded)"]
        texts = [self.lines[0] + (f" ({', '.join(about)})" if about else "")]
        return texts + [f"  called by {line}" for line in self.lines[1:]]


@dataclass(frozen=True, slots=True)
class _Frame:
    """One entry of a stack. `kind` is one of the constants below."""

    kind: int
    text: str


_MACHINERY, _USERS, _LIBRARY, _MODULE, _OPERATOR, _BACKWARD, _OPTIMIZER, _FOREIGN = range(8)


def origin_of(stack: Iterable[str]) -> Origin:
    """What a stack (innermost frame first, as a `Stream` has it) says of the user's program."""
    return _origin(tuple(stack))


def op_of(stack: Iterable[str]) -> str:
    """The op that the program called, such as `aten::addmm`, not those that torch called for it; or empty."""
    return _op(tuple(stack))


def is_users_file(file: str, name: str) -> bool:
    """Whether a function of this name, in this file, is of the user's program rather than of a library's."""
    return _located(name, file, 1).kind == _USERS


@lru_cache(maxsize=4096)
def _origin(stack: tuple[str, ...]) -> Origin:
    users: list[str] = []
    libraries: list[str] = []
    foreign: list[str] = []
    modules: list[str] = []
    library = doing = ""
    for text in stack:
        if _THREAD_START.search(text):
            break  # libc's, under whatever name its stripped library has there: "pthread_condattr_setpshared"
        frame = _read(text)
        if frame.kind == _USERS:
            users.append(frame.text)
        elif frame.kind == _LIBRARY:
            libraries.append(frame.text)
            if not users and not library:
                library = frame.text
        elif frame.kind == _MODULE:
            modules.append(frame.text)
        elif frame.kind == _BACKWARD and not users:
            doing = doing or f"backward: {frame.text}"
        elif frame.kind == _OPTIMIZER and not users and not doing:
            doing = "optimizer step"
        elif frame.kind == _FOREIGN:
            foreign.append(frame.text)
    if not users:
        library = ""
    # A root module says little, and its children say it again.
    inner = modules[:MAX_MODULES] if len(modules) <= MAX_MODULES else modules[:-1][:MAX_MODULES]
    return Origin(
        lines=tuple((users or libraries or foreign)[:MAX_LINES]),
        library=library,
        module=" > ".join(reversed(inner)),
        doing=doing,
    )


@lru_cache(maxsize=4096)
def _op(stack: tuple[str, ...]) -> str:
    found = ""
    for text in stack:
        frame = _read(text)
        if frame.kind == _OPERATOR:
            found = frame.text
        elif frame.kind in (_USERS, _LIBRARY, _MODULE, _BACKWARD) and found:
            break
    return found


@lru_cache(maxsize=65536)
def _read(text: str) -> _Frame:
    """One frame: what it is, and what to show of it."""
    if match := _AT.fullmatch(text):
        return _located(match["name"], match["file"], int(match["line"]))
    if text.startswith("nn.Module: "):
        return _Frame(_MODULE, text.removeprefix("nn.Module: "))
    if (match := _PROFILED.fullmatch(text)) and not text.startswith("<built-in"):
        return _located(match["name"], match["file"], int(match["line"]))
    if match := _TRACED.fullmatch(text):
        return _Frame(_USERS, match["where"])
    return _named(text)


def _located(name: str, file: str, line: int) -> _Frame:
    """A frame of a file: Python's, or C++ built with line numbers."""
    shown = f"{name} at {file}:{line}" if line else f"{name} at {file}"  # a profiler's module has no line
    if file.startswith(("<frozen ", "<__")):
        return _Frame(_MACHINERY, shown)
    if not _PYTHON_FILE.search(file):
        is_theirs = not _NOT_THEIRS.match(name) and not _BELOW_PYTHON.search(file) and file != "??"
        return _Frame(_FOREIGN, shown) if is_theirs else _machinery(_named(name))
    if _TORCH.fullmatch(file):
        is_optimizer = re.search(r"(?:^|[/\\])torch[/\\]optim[/\\]", file) is not None
        return _Frame(_OPTIMIZER if is_optimizer and name.startswith(("step", "wrapper")) else _MACHINERY, shown)
    if _GENERATED.search(file) or _OWN.match(file):
        return _Frame(_MACHINERY, shown)
    if installed := _INSTALLED.match(file):
        rest = file[installed.end() :]
        is_torch = rest.replace("\\", "/").split("/")[0] in ("torch", "functorch", "triton", "_distutils_hack")
        return _Frame(_MACHINERY if is_torch else _LIBRARY, f"{name} at {rest}:{line}")
    if _STANDARD.match(file):
        return _Frame(_MACHINERY, shown)
    if not re.match(r"[/\\]|[A-Za-z]:", file):  # a profiler's, relative to sys.path
        first = re.split(r"[/\\]", file)[0]
        if _LIBRARIES.fullmatch(first):
            return _Frame(_LIBRARY, shown)
        if first.removesuffix(".py") in sys.stdlib_module_names - {"test", "__main__"} and file != first:
            return _Frame(_MACHINERY, shown)
        if file == first and first.removesuffix(".py") in (
            "runpy",
            "threading",
            "contextlib",
            "functools",
            "bdb",
            "pdb",
        ):
            return _Frame(_MACHINERY, shown)
    return _Frame(_USERS, shown)


def _named(name: str) -> _Frame:
    """A frame without a line: C++, an op of a profiler, or a kind of variable of ours."""
    if match := _OP.search(name):
        return _Frame(_OPERATOR, f"aten::{match[1]}")
    if match := _NODE.search(name):
        return _Frame(_BACKWARD, match[1])
    if name.startswith("autograd::engine::evaluate_function: "):
        return _Frame(_BACKWARD, name.removeprefix("autograd::engine::evaluate_function: "))
    if re.fullmatch(r"\w+::\w[\w.]*", name) and not _NOT_THEIRS.match(name):
        return _Frame(_OPERATOR, name)
    if name.startswith("<built-in") or _NOT_THEIRS.match(name) or _NEVER.match(name):
        return _Frame(_MACHINERY, name)
    return _Frame(_FOREIGN, name)


def _machinery(frame: _Frame) -> _Frame:
    return _Frame(_MACHINERY, frame.text) if frame.kind == _FOREIGN else frame
