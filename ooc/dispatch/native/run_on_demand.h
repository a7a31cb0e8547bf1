// Runs an op of a step that runs on demand where nothing is to be moved. Included by dispatch.cpp alone.
#pragma once

#include <algorithm>

#include "dispatcher.h"
#include "kinds.h"

namespace {

// Events of the allocator that may wait before Python takes them: the log must not grow for ever.
constexpr uint64_t kMostEvents = 4096;

struct Records {
  std::vector<PyObject*> found;  // owned
  Records() = default;
  Records(const Records&) = delete;
  Records& operator=(const Records&) = delete;
  ~Records() {
    for (PyObject* record : found) Py_DECREF(record);
  }
};

// Release the session's lock and pass a result on (owned); where that fails, or there is an error already, null.
PyObject* unlock(const ooc::Demand& demand, PyObject* result) {
  SetAside error;
  return error.pass_on(PyObject_CallNoArgs(demand.release), result);
}

// Append the distinct addresses that the op writes.
void note_written(const Dispatcher* self, const ooc::OpInfo& info, PyObject* args, PyObject* kwargs, size_t start,
                  std::vector<uint64_t>& addresses) {
  const auto note = [&](uint64_t address) {
    if (std::find(addresses.begin() + static_cast<ptrdiff_t>(start), addresses.end(), address) == addresses.end()) {
      addresses.push_back(address);
    }
    return true;
  };
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

// The op raised, or was refused memory: Python unpins its operands, and raises what explains it. If it raises nothing,
// the op's own error stands, or its result.
PyObject* fail_on_demand(Dispatcher* self, PyObject* func, PyObject* args, PyObject* kwargs, const Records& records,
                         const std::vector<uint64_t>& addresses, size_t num_operands, size_t num_noted,
                         PyObject* result) {
  SetAside error;
  PyObject* pinned = PyList_New(0);
  PyObject* written = PyList_New(0);
  for (PyObject* record : records.found) {
    if (pinned != nullptr) PyList_Append(pinned, record);
  }
  for (size_t i = num_operands; i < num_noted && written != nullptr; ++i) {
    PyObject* number = PyLong_FromUnsignedLongLong(addresses[i]);
    if (number != nullptr) PyList_Append(written, number);
    Py_XDECREF(number);
  }
  PyObject* done = nullptr;
  if (pinned != nullptr && written != nullptr) {
    PyObject* named = kwargs == nullptr ? Py_None : kwargs;
    done = PyObject_CallFunctionObjArgs(self->demand->failed, func, args, named, pinned, written,
                                        result == nullptr ? Py_True : Py_False, nullptr);
  }
  Py_XDECREF(pinned);
  Py_XDECREF(written);
  return error.pass_on(done, result);
}

// Run an op of a step that runs on demand, as `OpRunner._run_on_demand` does where nothing is to be moved.
// Null without an error: it is Python's.
PyObject* run_on_demand(Dispatcher* self, PyObject* func, PyObject* args, PyObject* kwargs) {
  ooc::Demand& demand = *self->demand;
  vmm::State* state = self->state;
  if (self->this_thread() != self->session_thread || state->num_events.load(std::memory_order_relaxed) > kMostEvents) {
    return nullptr;
  }
  // The first ops of a recording, one in another grad mode, and one that is waited for may begin what has a plan.
  const bool is_at_head = self->head != ooc::Head::kNone;
  if (is_at_head) {
    if (self->head == ooc::Head::kAll) return nullptr;
    if (c10::GradMode::is_enabled() != (self->head == ooc::Head::kTouching)) return nullptr;
  }
  if (self->watched_grad_mode >= 0 && c10::GradMode::is_enabled() != (self->watched_grad_mode != 0)) return nullptr;
  if (func == self->awaited_func) return nullptr;
  const ooc::OpInfo* info = demand.info_of(func);
  if (info == nullptr || info->call == nullptr) return nullptr;
  if (kwargs == Py_None) kwargs = nullptr;
  bool replayable = false;
  if (info->may_run_again) {
    const uint64_t kind = kind_of(self, func, args, kwargs);
    const ooc::Trial trial = self->trials->of(kind);
    if (trial == ooc::Trial::kSeen) return nullptr;  // it has come before: Python tries it
    if (trial == ooc::Trial::kNew) self->trials->set(kind, ooc::Trial::kSeen);
    replayable = trial == ooc::Trial::kRepeats;
  }
  std::vector<uint64_t> addresses;
  const auto note = [&](uint64_t address) {
    addresses.push_back(address);
    return true;
  };
  for_each_operand(self, args, note);
  if (kwargs != nullptr) for_each_operand(self, kwargs, note);
  const auto num_operands = static_cast<uint32_t>(addresses.size());
  if (is_at_head && num_operands != 0) return nullptr;
  PyObject* locked = PyObject_CallNoArgs(demand.acquire);
  if (locked == nullptr) return nullptr;
  Py_DECREF(locked);
  Records records;
  const uint32_t position = state->position.load(std::memory_order_relaxed);
  const uint32_t index = position / 2;
  const bool is_ours = demand.log != nullptr && !self->planned && position % 2 == 0 && index + 1 < demand.most_ops && demand.is_quiet() &&
                       demand.find_resident(addresses, records.found);
  PyObject* where = is_ours ? demand.sites.of_this_op() : nullptr;
  if (where == nullptr) return unlock(demand, nullptr);
  demand.pin(records.found, now_ns());
  note_written(self, *info, args, kwargs, num_operands, addresses);
  const auto num_noted = static_cast<uint32_t>(addresses.size());
  state->position.store(2 * index + 1, std::memory_order_release);
  const uint64_t cold_ns = state->cold_ns.load(std::memory_order_relaxed);
  PyObject* unlocked = unlock(demand, Py_NewRef(Py_None));
  if (unlocked == nullptr) {  // the op does not run: it writes nothing, and holds its operands no longer
    Py_DECREF(where);
    return fail_on_demand(self, func, args, kwargs, records, addresses, num_operands, num_operands, nullptr);
  }
  Py_DECREF(unlocked);
  const int64_t started = now_ns();
  PyObject* result = call_op(info->call, args, kwargs);
  const int64_t stopped = now_ns();
  if (result == nullptr || PyList_GET_SIZE(demand.refused) != 0) {
    Py_DECREF(where);
    return fail_on_demand(self, func, args, kwargs, records, addresses, num_operands, num_noted, result);
  }
  locked = PyObject_CallNoArgs(demand.acquire);
  if (locked == nullptr) {
    Py_DECREF(where);
    Py_DECREF(result);
    return fail_on_demand(self, func, args, kwargs, records, addresses, num_operands, num_noted, nullptr);
  }
  Py_DECREF(locked);
  demand.unpin(records.found);
  for_each_operand(self, result, [&](uint64_t address) {
    for (size_t i = num_noted; i < addresses.size(); ++i) {
      if (addresses[i] == address) return true;
    }
    addresses.push_back(address);
    return true;
  });
  demand.note_results(addresses.data() + num_noted, addresses.data() + addresses.size());
  demand.note_written(addresses.data() + num_operands, addresses.data() + num_noted);
  if (demand.log != nullptr) {
    if (is_at_head && addresses.size() > num_noted) {  // it has made a variable: that is a beginning, too
      self->head = ooc::Head::kNone;
      demand.log->has_begun = true;
    }
    const auto base = static_cast<uint32_t>(demand.log->addresses->size());
    demand.log->addresses->insert(demand.log->addresses->end(), addresses.begin(), addresses.end());
    const auto more_cold_ns = static_cast<int64_t>(state->cold_ns.load(std::memory_order_relaxed) - cold_ns);
    demand.log->ops->push_back({Py_NewRef(func), where, base, base + num_operands, base + num_noted,
                                base + static_cast<uint32_t>(addresses.size()),
                                std::max(stopped - started - more_cold_ns, int64_t{0}), replayable});
    state->position.store(2 * index + 2, std::memory_order_release);
  } else {
    Py_DECREF(where);
  }
  return unlock(demand, result);
}

}  // namespace
