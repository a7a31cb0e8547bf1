// How the session says what goes before planned ops: methods of the native dispatcher (dispatch.cpp). Included there alone.
#pragma once

#include <structmember.h>

#include "dispatcher.h"

namespace {

// Where a slot of a Python class lies in its instances; -1 with an error.
Py_ssize_t slot_offset(PyObject* descriptor) {
  if (!Py_IS_TYPE(descriptor, &PyMemberDescr_Type)) {
    PyErr_SetString(PyExc_TypeError, "the descriptor of a slot, please");
    return -1;
  }
  return reinterpret_cast<PyMemberDescrObject*>(descriptor)->d_member->offset;
}

// prepare_acts(acquire, release, resident, loading, away, empty, transfer_type, ring, ring_length, no_guard,
//              (lift, reread, guard), records, slots, (engine, refusal, note, held, counters, writes, loads),
//              (submit, handle, descriptor, flags)): see `Acts`, `Moves`.
PyObject* dispatcher_prepare_acts(PyObject* object, PyObject* positional) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  auto* acts = new (std::nothrow) ooc::Acts();
  if (acts == nullptr) return PyErr_NoMemory();
  unsigned long long ring = 0, submit = 0, handle = 0;
  ooc::Moves& moves = acts->moves;
  long long length = 0;
  PyObject* slots = nullptr;
  bool is_right = PyArg_ParseTuple(
      positional, "OOOOOO!O!KLl(OOO)O!O!(OOOO!OO!O!)(KKii)", &acts->lock.acquire, &acts->lock.release, &acts->resident,
      &acts->loading, &acts->away, &PyTuple_Type, &acts->empty, &PyType_Type, &acts->transfer_type, &ring, &length,
      &acts->no_guard, &acts->lift, &acts->reread, &acts->guard, &PyDict_Type, &acts->records, &PyTuple_Type, &slots,
      &moves.engine, &moves.refusal, &moves.note, &PyDict_Type, &moves.held, &moves.counters, &PyList_Type,
      &moves.writes, &PyList_Type, &moves.loads, &submit, &handle, &moves.descriptor, &moves.flags);
  if (is_right && (PyTuple_GET_SIZE(slots) != ooc::kNumSlots || length <= 0)) {
    PyErr_Format(PyExc_ValueError, "prepare_acts: %zd slots, please, and a ring", Py_ssize_t{ooc::kNumSlots});
    is_right = false;
  }
  for (int i = 0; is_right && i < ooc::kNumSlots; ++i) {
    acts->slots[static_cast<size_t>(i)] = slot_offset(PyTuple_GET_ITEM(slots, i));
    is_right = acts->slots[static_cast<size_t>(i)] >= 0;
  }
  if (!is_right) {
    acts->disown();
    delete acts;
    return nullptr;
  }
  acts->ring = reinterpret_cast<const std::atomic<int64_t>*>(ring);
  acts->ring_length = length;
  moves.submit = reinterpret_cast<ooc::Moves::Submit>(submit);
  moves.handle = reinterpret_cast<void*>(handle);
  acts->own();
  acts->strangers = PyDict_New();
  acts->met = PyList_New(0);
  if (acts->strangers == nullptr || acts->met == nullptr) {
    delete acts;
    return nullptr;
  }
  delete std::exchange(self->acts, acts);
  Py_RETURN_NONE;
}

// allow_releases(which): which releases are done without Python, as `Acts::Releases`.
PyObject* dispatcher_allow_releases(PyObject* object, PyObject* number) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  const long which = PyLong_AsLong(number);
  if (PyErr_Occurred()) return nullptr;
  if (self->acts != nullptr) self->acts->releases = static_cast<ooc::Acts::Releases>(which);
  Py_RETURN_NONE;
}

// meet(address, record): ops of this step's plan may use what was allocated there, beside the plan.
PyObject* dispatcher_meet(PyObject* object, PyObject* positional) {
  const auto* self = reinterpret_cast<Dispatcher*>(object);
  PyObject *address, *record;
  if (!PyArg_UnpackTuple(positional, "meet", 2, 2, &address, &record)) return nullptr;
  if (self->acts != nullptr && PyDict_SetItem(self->acts->strangers, address, record) < 0) return nullptr;
  Py_RETURN_NONE;
}

// met() -> list: records that the planned op which comes next, or runs, uses beside the plan.
PyObject* dispatcher_met(PyObject* object, PyObject*) {
  const auto* self = reinterpret_cast<Dispatcher*>(object);
  return self->acts != nullptr ? PySequence_List(self->acts->met) : PyList_New(0);
}

// `which`: 0: before planned ops, 1: after them, 2: of transfers.
PyObject* get_num_acts(PyObject* object, void* which) {
  const ooc::Acts* acts = reinterpret_cast<Dispatcher*>(object)->acts;
  if (acts == nullptr) return PyLong_FromLong(0);
  const uint64_t counts[] = {acts->num_done, acts->num_followed, acts->moves.num_begun};
  return PyLong_FromUnsignedLongLong(counts[reinterpret_cast<intptr_t>(which)]);
}

}  // namespace
