"""Planned ops of a device whose ops run on streams (native/stream_watch.h): Python is called only where the stream is
another than at the op before, or the end of the chain has moved. Streams are those of a device that is none.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
long current_stream = 0;
bool fails = false;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device device) const override { return device; }
  c10::Device getDevice() const override { return {type(), 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override {
    TORCH_CHECK(!fails, "no stream");
    return c10::Stream(c10::Stream::UNSAFE, device, current_stream);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
const c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::PrivateUse1, new Guard());
}  // namespace

extern "C" __attribute__((visibility("default"))) void set_stream(long stream) { current_stream = stream; }
extern "C" __attribute__((visibility("default"))) void set_fails(int value) { fails = value != 0; }
"""

SCRIPT = """
import ctypes, sys
from pathlib import Path
import torch, ooc
from vmm import native_build
from vmm.torch_cpu import torch_build_flags

include_dirs, library_dirs = torch_build_flags()
guard = ctypes.CDLL(str(native_build.build(
    "guard", [Path(sys.argv[1])], include_dirs=include_dirs, library_dirs=library_dirs, libraries=["c10"],
    extra_flags=["-std=c++20", "-Wno-unused-parameter"], meets_torch=True)))
num_moves = ctypes.c_uint64()
called, raised = [], []

def follow():
    called.append(session.engine.runner.dispatcher.cursor)
    if raised:
        raise raised.pop()

def step(*streams, between=lambda: None):
    # Six planned ops on variables, the third one on another stream where a second stream is given.
    with session.step():
        x = torch.ones(1 << 16)
        y = x + 1
        guard.set_stream(streams[-1])
        between()
        z = y * weight
        guard.set_stream(streams[0])
        found = float((z - x).sum())
    return found, session.steps.rows[-1].mode

with ooc.Session("4MiB", threshold_nbytes="64KiB", plan_cache=False, background_planning=False,
                 step_boundary="explicit") as session:
    weight = torch.full((1 << 16,), 3.0)
    expected = 5.0 * (1 << 16)
    dispatcher = session.engine.runner.dispatcher
    for wrong in ("no-device", "xla"):
        try:
            dispatcher.follow_stream(wrong, 0, follow)
        except ValueError as error:
            print(error)
        else:
            raise AssertionError(wrong)
    dispatcher.follow_stream("privateuseone:0", ctypes.addressof(num_moves), follow)
    for _ in range(5):
        assert step(0)[0] == expected
    assert session.steps.rows[-1].mode == "planned" and dispatcher.num_boxed > 0
    assert called == called[:1], called  # once, at the first planned op of all
    called.clear()
    assert step(0) == (expected, "planned") and called == []
    assert step(0, 7) == (expected, "planned") and len(called) == 2, called  # there and back
    called.clear()
    def move(): num_moves.value += 1
    assert step(0, between=move) == (expected, "planned") and len(called) == 1, called
    called.clear()
    raised.append(OSError("the chain is broken"))
    try:
        step(0, 7)
    except OSError as error:
        assert str(error) == "the chain is broken"
    else:
        raise AssertionError("nothing was raised")
    guard.set_stream(0)
    for _ in range(3):
        assert step(0)[0] == expected
    assert session.steps.rows[-1].mode == "planned"
    guard.set_fails(1)
    try:
        step(0)
    except RuntimeError as error:
        assert "no stream" in str(error)
    else:
        raise AssertionError("nothing was raised")
    guard.set_fails(0)
    for _ in range(3):
        assert step(0)[0] == expected
    assert session.steps.rows[-1].mode == "planned"
"""


@pytest.mark.parametrize("with_boxed", [True, False])
def test_python_is_called_where_the_stream_is_another(with_boxed: bool, tmp_path: Path) -> None:
    source = tmp_path / "guard.cpp"
    source.write_text(GUARD)
    script = SCRIPT
    if not with_boxed:
        hide = "import ooc.dispatch.mode as mode\nmode.boxed_ops = lambda: None\n"
        script = script.replace("num_moves = c", f"{hide}num_moves = c").replace(" and dispatcher.num_boxed > 0", "")
    done = subprocess.run(
        [sys.executable, "-c", script, str(source)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
