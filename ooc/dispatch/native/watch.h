// What the dispatcher looks out for: ops on demand that are Python's because something that has a plan may begin with
// them, and the stream on which planned ops run. Included by dispatch.cpp alone.
#pragma once

#include <string>
#include <utility>

#include "dispatcher.h"

namespace {

// at_head(head): as `ooc::Head`, until something has begun.
PyObject* dispatcher_at_head(PyObject* object, PyObject* head) {
  const long value = PyLong_AsLong(head);
  if (PyErr_Occurred()) return nullptr;
  reinterpret_cast<Dispatcher*>(object)->head = static_cast<ooc::Head>(value);
  Py_RETURN_NONE;
}

// watch(mode, func, heads): ops in another grad mode than this, and `func`, at any place; and `heads`, a tuple of
// functions, until something has begun. -1 and None: none.
PyObject* dispatcher_watch(PyObject* object, PyObject* positional) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  int mode;
  PyObject *func, *heads;
  if (!PyArg_ParseTuple(positional, "iOO!", &mode, &func, &PyTuple_Type, &heads)) return nullptr;
  self->watched_grad_mode = mode;
  Py_XSETREF(self->awaited_func, func == Py_None ? nullptr : Py_NewRef(func));
  Py_XSETREF(self->heads, Py_NewRef(heads));
  Py_RETURN_NONE;
}

// compare(whether): as `ooc::Demand::is_compared`.
PyObject* dispatcher_compare(PyObject* object, PyObject* whether) {
  ooc::Demand* demand = reinterpret_cast<Dispatcher*>(object)->demand;
  if (demand != nullptr) demand->is_compared = whether == Py_True;
  Py_RETURN_NONE;
}

// follow_stream(device, num_moves, follow): see `ooc::StreamWatch`.
PyObject* dispatcher_follow_stream(PyObject* object, PyObject* positional) {
  const char* device;
  unsigned long long num_moves;
  PyObject* follow;
  if (!PyArg_ParseTuple(positional, "sKO", &device, &num_moves, &follow)) return nullptr;
  ooc::StreamWatch watch;
  try {
    watch.device = c10::Device(std::string(device));
    c10::impl::getDeviceGuardImpl(watch.device.type());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
    return nullptr;
  }
  watch.stamps = ooc::Stamps::of(watch.device);
  watch.num_moves = reinterpret_cast<const uint64_t*>(num_moves);
  watch.follow = Py_NewRef(follow);
  auto* self = reinterpret_cast<Dispatcher*>(object);
  Py_XDECREF(std::exchange(self->stream, watch).follow);
  Py_RETURN_NONE;
}

// begin_op_again(): see `ooc::StreamWatch`.
PyObject* dispatcher_begin_op_again(PyObject* object, PyObject*) {
  reinterpret_cast<Dispatcher*>(object)->stream.begin_op_again();
  Py_RETURN_NONE;
}

}  // namespace
