// How the session says what ops on demand need, and where they are logged (demand.h). Included by dispatch.cpp alone.
#pragma once

#include <new>

#include "prepare_acts.h"

namespace {

// prepare_demand(records, resident, acquire, release, empty, refused, describe, failed, owners,
//                (find, kind, forward, current_node), slots, most_ops): see `Demand`.
PyObject* dispatcher_prepare_demand(PyObject* object, PyObject* positional) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  auto* demand = new (std::nothrow) ooc::Demand();
  if (demand == nullptr) return PyErr_NoMemory();
  PyObject* slots[5];
  if (!PyArg_ParseTuple(positional, "O!OOOO!O!OOO(OOOO)(OOOOO)n", &PyDict_Type, &demand->records, &demand->resident,
                        &demand->lock.acquire, &demand->lock.release, &PyTuple_Type, &demand->empty, &PyList_Type,
                        &demand->refused, &demand->describe, &demand->failed, &demand->owners, &demand->sites.find,
                        &demand->sites.kind, &demand->sites.forward, &demand->sites.current_node, &slots[0], &slots[1],
                        &slots[2], &slots[3], &slots[4], &demand->most_ops) ||
      (demand->state = slot_offset(slots[0])) < 0 || (demand->stored = slot_offset(slots[1])) < 0 ||
      (demand->pins = slot_offset(slots[2])) < 0 || (demand->seen = slot_offset(slots[3])) < 0 ||
      (demand->used = slot_offset(slots[4])) < 0) {
    demand->disown();
    delete demand;
    return nullptr;
  }
  demand->own();
  delete self->demand;
  self->demand = demand;
  Py_RETURN_NONE;
}

PyObject* dispatcher_new_lock(PyObject*, PyObject*) {
  return ooc::session_lock_new(&ooc::session_lock_type, nullptr, nullptr);
}

PyObject* dispatcher_new_log(PyObject*, PyObject*) { return ooc::op_log_new(&ooc::op_log_type, nullptr, nullptr); }

// demand(log): from now on ops that run on demand are logged there; None: Python sees each.
PyObject* dispatcher_demand(PyObject* object, PyObject* log) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  if (self->demand == nullptr) Py_RETURN_NONE;
  if (log == Py_None) {
    self->demand->stop();
  } else if (Py_TYPE(log) == &ooc::op_log_type) {
    self->demand->start(reinterpret_cast<ooc::OpLog*>(log));
  } else {
    PyErr_SetString(PyExc_TypeError, "demand: an OpLog or None, please");
    return nullptr;
  }
  Py_RETURN_NONE;
}

}  // namespace
