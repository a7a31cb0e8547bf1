// Which ops on demand are Python's, because something that has a plan may begin with them. Included by dispatch.cpp alone.
#pragma once

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

}  // namespace
