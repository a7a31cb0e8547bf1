// Runs an op that came from Python, of a step that runs on demand. Included by dispatch.cpp alone.
#pragma once

#include "demand_op.h"
#include "play.h"
#include "kinds.h"

namespace {

// Call note(address) for all that the op writes.
template <class Note>
void for_each_written(const Dispatcher* self, const ooc::OpInfo& info, PyObject* args, PyObject* kwargs, Note&& note) {
  if (info.writes_all) {
    for_each_operand(self, args, note);
    if (kwargs != nullptr) for_each_operand(self, kwargs, note);
    return;
  }
  for (const auto& [position, name] : info.written) {
    PyObject* value = nullptr;
    if (position < PyTuple_GET_SIZE(args)) {
      value = PyTuple_GET_ITEM(args, position);
    } else if (kwargs != nullptr) {
      value = PyDict_GetItemWithError(kwargs, name);
      if (value == nullptr) PyErr_Clear();
    }
    if (value != nullptr) for_each_operand(self, value, note);
  }
}

// The op raised (`result` is null), or was refused memory. If Python raises nothing, the op's own error stands, or its
// result; or what Python has got by running it in parts, in a tuple.
PyObject* fail_on_demand(const Dispatcher* self, PyObject* func, PyObject* args, PyObject* kwargs, const DemandOp& op,
                         PyObject* result) {
  SetAside error;
  PyObject* details = op.details(result == nullptr);
  PyObject* done = tell_failed(*self->demand, func, args, kwargs, details);
  Py_XDECREF(details);
  if (done != nullptr && PyTuple_Check(done)) {
    Py_XDECREF(result);
    result = Py_NewRef(PyTuple_GET_ITEM(done, 0));
    Py_DECREF(done);
    return result;
  }
  return error.pass_on(done, result);
}

// Null without an error: it is Python's.
PyObject* run_on_demand(Dispatcher* self, PyObject* func, PyObject* args, PyObject* kwargs) {
  if (self->this_thread() != self->session_thread) return nullptr;
  DemandOp op(self);
  if (!op.may_come()) return nullptr;
  const ooc::OpInfo* info = op.info_of(func);
  if (info == nullptr) return nullptr;
  if (kwargs == Py_None) kwargs = nullptr;
  if (op.has_kind(*info) && !op.take_kind(kind_of(self, func, args, kwargs))) return nullptr;
  for_each_operand(self, args, op);
  if (kwargs != nullptr) for_each_operand(self, kwargs, op);
  if (!op.has_operands()) return nullptr;
  switch (op.start([&](auto&& note) { for_each_written(self, *info, args, kwargs, note); })) {
    case DemandOp::Start::kPythons:
    case DemandOp::Start::kError:
      return nullptr;
    case DemandOp::Start::kFails:
      return fail_on_demand(self, func, args, kwargs, op, nullptr);
    case DemandOp::Start::kRuns:
      break;
  }
  const int64_t started = now_ns();
  PyObject* result = call_op(info->call, args, kwargs);
  const int64_t stopped = now_ns();
  if (result == nullptr || op.is_refused()) return fail_on_demand(self, func, args, kwargs, op, result);
  if (!op.lock_and_stop(stopped - started, [&](auto&& note) { for_each_operand(self, result, note); })) {
    Py_DECREF(result);
    return fail_on_demand(self, func, args, kwargs, op, nullptr);
  }
  if (!self->demand->lock.give_back()) Py_CLEAR(result);
  return result;
}

// Whether the plan's next op, with these arguments, changes what is in the arena, or may.
bool changes_large(const Dispatcher* self, PyObject* args, PyObject* kwargs) {
  const ooc::OpInfo* info = known_changes(self);
  if (info == nullptr) return true;
  bool is_found = false;
  for_each_written(self, *info, args, kwargs == Py_None ? nullptr : kwargs, [&](uint64_t) {
    is_found = true;
    return false;
  });
  return is_found;
}

}  // namespace
