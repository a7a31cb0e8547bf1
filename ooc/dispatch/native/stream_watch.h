// On which stream of a device torch computes. A session's ops come one after the other whatever their streams
// (`DeviceStreams.follow`): where the program has gone to another stream since the last planned op, or the end of the
// chain has moved meanwhile, Python is asked to put the next op behind it. Else nothing is to be done.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <exception>

#include "op_times.h"

namespace ooc {

struct StreamWatch {
  PyObject* follow = nullptr;  // owned; null: a device whose ops are done when they return
  c10::Device device{c10::DeviceType::CPU};
  const uint64_t* num_moves = nullptr;  // of the chain's end from one stream to another; `follow` keeps it alive
  c10::StreamId seen_stream = 0;
  uint64_t seen_moves = 0;
  bool has_seen = false;
  Stamps* stamps = nullptr;
  void* begun = nullptr;  // borrowed: the event before the op on demand that is under way

  // The next op is about to be issued. False with an error.
  bool keep_up() {
    if (follow == nullptr) return true;
    c10::StreamId stream;
    try {
      stream = c10::impl::getDeviceGuardImpl(device.type())->getStream(device).id();
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
      return false;
    }
    if (has_seen && stream == seen_stream && *num_moves == seen_moves) return true;
    has_seen = false;
    PyObject* done = PyObject_CallNoArgs(follow);
    if (done == nullptr) return false;
    Py_DECREF(done);
    seen_stream = stream;
    seen_moves = *num_moves;
    has_seen = true;
    return true;
  }

  // The events before and after an op on demand, to be owned; null: its time is not taken.
  void* begin_op() { return begun = follow == nullptr ? nullptr : stamps->stamp(); }
  void* end_op(void* first) {
    begun = nullptr;
    return first == nullptr ? nullptr : stamps->stamp();
  }

  // What was issued of the op under way, if any, was waiting for memory: its time begins now.
  void begin_op_again() {
    if (begun != nullptr) stamps->stamp(begun);
  }

  // An event of an op that was not noted.
  void drop(void* event) {
    if (event == nullptr) return;
    if (event == begun) begun = nullptr;
    stamps->give_back(event);
  }
};

}  // namespace ooc
