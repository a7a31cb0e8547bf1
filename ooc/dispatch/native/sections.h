// The dispatcher's methods for critical sections (ooc/dispatch/signals.py, undisturbed.h). Included by dispatch.cpp alone.
#pragma once

#include "dispatcher.h"

namespace {

// enter_section() -> whether this is the session's thread, which alone has sections.
PyObject* dispatcher_enter(PyObject* object, PyObject*) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  if (self->this_thread() != self->session_thread) Py_RETURN_FALSE;
  Section::enter(self);
  Py_RETURN_TRUE;
}

PyObject* dispatcher_exit(PyObject* object, PyObject*) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  if (self->this_thread() == self->session_thread) {
    Section::exit(self);
  } else {
    self->collector.go_on();
  }
  Py_RETURN_NONE;
}

// hold_garbage(): another thread than the session's holds its lock, until it calls exit_section().
PyObject* dispatcher_hold_garbage(PyObject* object, PyObject*) {
  reinterpret_cast<Dispatcher*>(object)->collector.wait();
  Py_RETURN_NONE;
}

// be_alone(): in a forked child. Other threads, and the sections that they were in, are no more.
PyObject* dispatcher_be_alone(PyObject* object, PyObject*) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  if (self->this_thread() != self->session_thread) {
    self->depth = 0;
    self->postponed = 0;
    self->is_underway = false;
  }
  self->collector.leave(self->depth > 0 ? 1 : 0);
  Py_RETURN_NONE;
}

// call(function, *arguments): as one section from before its first bytecode to after its last.
PyObject* dispatcher_guarded(PyObject* object, PyObject* positional) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  const Py_ssize_t count = PyTuple_GET_SIZE(positional);
  if (count == 0) {
    PyErr_SetString(PyExc_TypeError, "guarded: a function, please");
    return nullptr;
  }
  const Section section(self);
  PyObject* arguments = PyTuple_GetSlice(positional, 1, count);
  if (arguments == nullptr) return nullptr;
  PyObject* result = PyObject_Call(PyTuple_GET_ITEM(positional, 0), arguments, nullptr);
  Py_DECREF(arguments);
  return result;
}

// postpone(signal, always) -> whether it will come again at the end of the section (or of the next).
PyObject* dispatcher_postpone(PyObject* object, PyObject* positional) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  int number, always;
  if (!PyArg_ParseTuple(positional, "ip", &number, &always)) return nullptr;
  if ((self->depth == 0 && !always) || number < 1 || number > 64) Py_RETURN_FALSE;
  self->postponed |= uint64_t{1} << (number - 1);
  Py_RETURN_TRUE;
}

}  // namespace
