// How the session says where births on demand are noted, and how the allocator asks for one (births.h). Included by
// dispatch.cpp alone.
#pragma once

#include <atomic>

#include "demand_op.h"
#include "prepare_acts.h"

namespace {

std::atomic<Dispatcher*> bearer{nullptr};  // whose births are served

// `State::quick_allocate`: an address, or 0 where the allocation is Python's. Called on the session's thread, with no
// lock held.
uint64_t quick_allocate(uint64_t nbytes) {
  Dispatcher* self = bearer.load(std::memory_order_acquire);
  if (self == nullptr) return 0;
  const PyGILState_STATE gil = PyGILState_Ensure();
  uint64_t address = 0;
  const ooc::Demand* demand = self->demand;
  if (bearer.load() == self && demand != nullptr && demand->log != nullptr && !self->planned && demand->is_quiet()) {
    const Section section(self);
    ooc::SetAside error;  // what runs here may have been called with one
    if (demand->lock.take()) {
      address = self->births->serve(*demand, *self->state, nbytes, now_ns());
      demand->lock.give_back();
    }
    PyErr_Clear();
    error.pass_on(Py_NewRef(Py_None), nullptr);
  }
  PyGILState_Release(gil);
  return address;
}

void leave_births(Dispatcher* self) {
  Dispatcher* expected = self;
  if (bearer.compare_exchange_strong(expected, nullptr)) self->state->quick_allocate = nullptr;
  delete std::exchange(self->births, nullptr);
}

// prepare_births(manager, births, parts, (resident, ready, detached), prototype,
//                (chunk_nbytes, ready_fraction, loop_births, no_guard), (peek, drain), slots, record_slots): see `Births`.
PyObject* dispatcher_prepare_births(PyObject* object, PyObject* positional) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  auto* births = new (std::nothrow) ooc::Births();
  if (births == nullptr) return PyErr_NoMemory();
  unsigned long long peek = 0, drain = 0;
  PyObject *slots = nullptr, *record_slots = nullptr;
  bool is_right = PyArg_ParseTuple(positional, "OOO(O!O!O!)O(LLLl)(KK)O!O!", &births->manager, &births->births,
                                   &births->parts, &PyDict_Type, &births->resident, &PyDict_Type, &births->ready,
                                   &PyDict_Type, &births->detached, &births->prototype, &births->chunk_nbytes,
                                   &births->ready_fraction, &births->loop_births, &births->no_guard, &peek, &drain,
                                   &PyTuple_Type, &slots, &PyTuple_Type, &record_slots);
  if (is_right && (PyTuple_GET_SIZE(slots) != ooc::kNumBirthSlots || births->chunk_nbytes <= 0)) {
    PyErr_Format(PyExc_ValueError, "prepare_births: %d slots, please, and chunks", int{ooc::kNumBirthSlots});
    is_right = false;
  }
  for (Py_ssize_t i = 0; is_right && i < PyTuple_GET_SIZE(slots); ++i) {
    births->slots[static_cast<size_t>(i)] = slot_offset(PyTuple_GET_ITEM(slots, i));
    is_right = births->slots[static_cast<size_t>(i)] >= 0;
  }
  for (Py_ssize_t i = 0; is_right && i < PyTuple_GET_SIZE(record_slots); ++i) {
    births->record_slots.push_back(slot_offset(PyTuple_GET_ITEM(record_slots, i)));
    is_right = births->record_slots.back() >= 0;
  }
  if (!is_right) {
    births->disown();
    delete births;
    return nullptr;
  }
  births->peek = reinterpret_cast<ooc::TakeEvents>(peek);
  births->drain = reinterpret_cast<ooc::TakeEvents>(drain);
  births->own();
  leave_births(self);
  self->births = births;
  bearer.store(self, std::memory_order_release);
  self->state->quick_allocate = &quick_allocate;
  Py_RETURN_NONE;
}

PyObject* get_num_births(PyObject* object, void*) {
  const ooc::Births* births = reinterpret_cast<Dispatcher*>(object)->births;
  return PyLong_FromUnsignedLongLong(births != nullptr ? births->num_served : 0);
}

}  // namespace
