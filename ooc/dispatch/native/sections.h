// The dispatcher's methods for critical sections (ooc/dispatch/signals.py, undisturbed.h). Included by dispatch.cpp alone.
#pragma once

#include <cstring>

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
    self->is_collecting = false;
  }
  self->collector.leave(self->depth > 0 ? 1 : 0);
  Py_RETURN_NONE;
}

void set_collecting(Dispatcher* self, bool is_collecting) {
  if (self->this_thread() != self->session_thread) return;
  self->is_collecting = is_collecting;
  Section::handle_postponed(self);
}

// collection_ends(phase, info), the last of `gc.callbacks`: handlers come again.
PyObject* dispatcher_collection_ends(PyObject* object, PyObject* positional) {
  const char* phase;
  PyObject* info;
  if (!PyArg_ParseTuple(positional, "sO", &phase, &info)) return nullptr;
  if (std::strcmp(phase, "stop") == 0) set_collecting(reinterpret_cast<Dispatcher*>(object), false);
  Py_RETURN_NONE;
}

// Whether `collection_ends` is among the callbacks still: a program may have taken the last one for its own.
bool is_to_be_ended(PyObject* object) {
  PyObject* module = PyImport_ImportModule("gc");
  PyObject* callbacks = module != nullptr ? PyObject_GetAttrString(module, "callbacks") : nullptr;
  bool found = false;
  if (callbacks != nullptr && PyList_Check(callbacks)) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(callbacks) && !found; ++i) {
      PyObject* each = PyList_GET_ITEM(callbacks, i);
      found = PyCFunction_Check(each) && PyCFunction_GET_SELF(each) == object &&
              PyCFunction_GET_FUNCTION(each) == dispatcher_collection_ends;
    }
  }
  PyErr_Clear();
  Py_XDECREF(callbacks);
  Py_XDECREF(module);
  return found;
}

// collection_begins(phase, info), the first of `gc.callbacks`: signal handlers wait.
PyObject* dispatcher_collection_begins(PyObject* object, PyObject* positional) {
  const char* phase;
  PyObject* info;
  if (!PyArg_ParseTuple(positional, "sO", &phase, &info)) return nullptr;
  const bool begins = std::strcmp(phase, "start") == 0;
  if (begins || !is_to_be_ended(object)) set_collecting(reinterpret_cast<Dispatcher*>(object), begins);
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

// postpone(signal, always) -> whether it will come again at the end of the section (or of the next), or the collection.
PyObject* dispatcher_postpone(PyObject* object, PyObject* positional) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  int number, always;
  if (!PyArg_ParseTuple(positional, "ip", &number, &always)) return nullptr;
  if ((self->depth == 0 && !self->is_collecting && !always) || number < 1 || number > 64) Py_RETURN_FALSE;
  self->postponed |= uint64_t{1} << (number - 1);
  Py_RETURN_TRUE;
}

}  // namespace
