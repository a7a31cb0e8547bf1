// The dispatcher's methods for kinds of op (kinds.h) and what is known of them. Included by dispatch.cpp alone.
#pragma once

#include "kinds.h"

namespace {

// kind(func, args, kwargs) -> int; 0: not run again in any case.
PyObject* dispatcher_kind(PyObject* object, PyObject* positional) {
  PyObject *func, *args, *kwargs;
  if (!PyArg_UnpackTuple(positional, "kind", 3, 3, &func, &args, &kwargs)) return nullptr;
  return PyLong_FromUnsignedLongLong(kind_of(reinterpret_cast<Dispatcher*>(object), func, args, kwargs));
}

// trial(kind) -> int, as `ooc::Trial`.
PyObject* dispatcher_trial(PyObject* object, PyObject* kind) {
  const uint64_t number = PyLong_AsUnsignedLongLong(kind);
  if (PyErr_Occurred()) return nullptr;
  return PyLong_FromLong(static_cast<long>(reinterpret_cast<Dispatcher*>(object)->trials->of(number)));
}

// set_trial(kind, trial)
PyObject* dispatcher_set_trial(PyObject* object, PyObject* positional) {
  unsigned long long kind;
  int trial;
  if (!PyArg_ParseTuple(positional, "Ki", &kind, &trial)) return nullptr;
  reinterpret_cast<Dispatcher*>(object)->trials->set(kind, static_cast<ooc::Trial>(trial));
  Py_RETURN_NONE;
}

// set_environment(number): a part of each kind from now on.
PyObject* dispatcher_set_environment(PyObject* object, PyObject* number) {
  const uint64_t environment = PyLong_AsUnsignedLongLongMask(number);
  if (PyErr_Occurred()) return nullptr;
  reinterpret_cast<Dispatcher*>(object)->trials->environment = environment;
  Py_RETURN_NONE;
}

// refuse(func): never called replayable again.
PyObject* dispatcher_refuse(PyObject* object, PyObject* func) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  if (self->demand != nullptr) self->demand->refuse(func);
  Py_RETURN_NONE;
}

}  // namespace
