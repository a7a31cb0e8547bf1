"""A device that is none, for torch's streams and events: which stream is current, and what time it is, tests say."""

from __future__ import annotations

GUARD = r"""
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
long current_stream = 0;
bool fails = false;
bool records = true;
double now_ms = 0, step_ms = 0;  // each record comes so much after the one before
long num_events = 0;

struct Event {
  double at_ms;
};

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
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    TORCH_CHECK(records, "no event");
    if (*event == nullptr) {
      *event = new Event();
      ++num_events;
    }
    static_cast<Event*>(*event)->at_ms = now_ms += step_ms;
  }
  void synchronizeEvent(void*) const override {}
  double elapsedTime(void* first, void* last, const c10::DeviceIndex) const override {
    return static_cast<Event*>(last)->at_ms - static_cast<Event*>(first)->at_ms;
  }
};
const c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::PrivateUse1, new Guard());
}  // namespace

extern "C" __attribute__((visibility("default"))) void set_stream(long stream) { current_stream = stream; }
extern "C" __attribute__((visibility("default"))) void set_fails(int value) { fails = value != 0; }
extern "C" __attribute__((visibility("default"))) void set_records(int value) { records = value != 0; }
extern "C" __attribute__((visibility("default"))) void set_step_ms(double value) { step_ms = value; }
extern "C" __attribute__((visibility("default"))) long count_events() { return num_events; }
"""

LOAD = """
import ctypes, sys
from pathlib import Path
import torch, ooc
from vmm import native_build
from vmm.torch_cpu import torch_build_flags

include_dirs, library_dirs = torch_build_flags()
guard = ctypes.CDLL(str(native_build.build(
    "guard", [Path(sys.argv[1])], include_dirs=include_dirs, library_dirs=library_dirs, libraries=["c10"],
    extra_flags=["-std=c++20", "-Wno-unused-parameter"], meets_torch=True)))
"""
"""Loads the guard, whose source the command line names."""
