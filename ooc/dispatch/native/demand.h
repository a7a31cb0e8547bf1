// Ops on demand whose operands are all in memory: nothing is moved, so no Python of ours runs but where memory is
// allocated. What `OpRunner._run_on_demand` does for such an op, under the session's lock like there: pin its operands,
// run it, note what it wrote, and log it. Any doubt, and the op is Python's.
//
// A record (ooc/memory/record.py) is a Python object with slots; the few that change here are read and written in
// place. So there is one truth, whoever looks.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <array>
#include <cstdint>
#include <new>
#include <unordered_map>
#include <vector>

#include "call_sites.h"
#include "op_log.h"
#include "session_lock.h"

namespace ooc {

// Which ops on demand Python sees because something that has a plan may begin with them: none; those that touch a
// variable, or run in another grad mode than those before.
enum class Head : int { kNone = 0, kTouching = 1, kTouchingWithoutGradients = 2 };

// How an op is called, and which of its arguments it writes.
struct OpInfo {
  PyObject* call = nullptr;  // owned; null: an op that Python looks at first
  bool writes_all = false;
  bool may_run_again = false;  // as far as its schema tells
  std::vector<std::pair<Py_ssize_t, PyObject*>> written;  // position, name (owned)
};

class Demand {
 public:
  // All of these are owned. `empty`: lists that hold something where there is more to do than is done here.
  PyObject *records = nullptr, *resident = nullptr, *empty = nullptr;
  LockCalls lock;
  PyObject *refused = nullptr;   // the list of allocations that were refused in this op
  PyObject *describe = nullptr;  // describe(op) -> None or (call, None or ((position, name), ...), may run again)
  PyObject *failed = nullptr;    // failed(op, args, kwargs, records, written, raised): the op raised, or was refused memory
  PyObject* owners = nullptr;    // keeps alive what `sites` borrows
  Py_ssize_t state = 0, stored = 0, pins = 0, seen = 0, used = 0;  // where a record's slots lie
  Py_ssize_t most_ops = 0;
  CallSites sites;
  // Whether the log is compared with others: then it says where ops come from, of which node, and if they may run again.
  bool is_compared = true;
  OpLog* log = nullptr;  // owned: of the present step, while it runs on demand; null: nothing is done here

  Demand() = default;
  Demand(const Demand&) = delete;
  Demand& operator=(const Demand&) = delete;
  ~Demand() {
    stop();
    for (auto& [func, info] : infos_) {
      Py_DECREF(func);
      Py_XDECREF(info.call);
      for (auto& [position, name] : info.written) Py_DECREF(name);
    }
    for (PyObject* object : objects()) Py_XDECREF(object);
  }

  std::array<PyObject*, 9> objects() const {
    return {records, resident, lock.acquire, lock.release, empty, refused, describe, failed, owners};
  }
  // What was parsed is borrowed until `own`; `disown` forgets it.
  void own() {
    for (PyObject* object : objects()) Py_XINCREF(object);
    lock.look();
  }
  void disown() {
    records = resident = lock.acquire = lock.release = empty = refused = describe = failed = owners = nullptr;
  }

  void start(OpLog* next) {
    Py_INCREF(next);
    stop();
    log = next;
  }
  void stop() {
    OpLog* last = log;
    log = nullptr;
    Py_XDECREF(last);
  }

  // Null with an error where `describe` raised.
  const OpInfo* info_of(PyObject* func) {
    const auto found = infos_.find(func);
    if (found != infos_.end()) return &found->second;
    PyObject* described = PyObject_CallOneArg(describe, func);
    if (described == nullptr) return nullptr;
    OpInfo info;
    PyObject *call, *written;
    int may_run_again;
    if (described != Py_None && PyArg_ParseTuple(described, "OOp", &call, &written, &may_run_again)) {
      info.may_run_again = may_run_again != 0;
      info.writes_all = written == Py_None;
      for (Py_ssize_t i = 0; !info.writes_all && i < PyTuple_GET_SIZE(written); ++i) {
        Py_ssize_t position;
        PyObject* name;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(written, i), "nO", &position, &name)) break;
        info.written.emplace_back(position, Py_NewRef(name));
      }
      info.call = Py_NewRef(call);
    }
    Py_DECREF(described);
    if (PyErr_Occurred()) return nullptr;
    return &infos_.emplace(Py_NewRef(func), std::move(info)).first->second;
  }

  // What was described before; null: nothing was.
  const OpInfo* known_info(PyObject* func) const {
    const auto found = infos_.find(func);
    return found == infos_.end() ? nullptr : &found->second;
  }

  // An op that was called replayable is not, whatever its kind.
  void refuse(PyObject* func) {
    const auto found = infos_.find(func);
    if (found != infos_.end()) found->second.may_run_again = false;
  }

  bool is_quiet() const {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(empty); ++i) {
      if (PyList_GET_SIZE(PyTuple_GET_ITEM(empty, i)) != 0) return false;
    }
    return PyList_GET_SIZE(refused) == 0;
  }

  // A slot of a record; borrowed.
  static PyObject* get(PyObject* record, Py_ssize_t offset) {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(record) + offset);
  }
  static void set(PyObject* record, Py_ssize_t offset, PyObject* value) {  // takes over `value`
    PyObject** slot = reinterpret_cast<PyObject**>(reinterpret_cast<char*>(record) + offset);
    PyObject* before = *slot;
    *slot = value;
    Py_XDECREF(before);
  }

  // The managed records at these addresses, each once, new references. False: Python is to see to this op, either
  // because one of them is not in memory, or with an error.
  bool find_resident(const std::vector<uint64_t>& addresses, std::vector<PyObject*>& found) const {
    for (const uint64_t address : addresses) {
      PyObject* record = at(address);
      if (record == nullptr) {
        if (PyErr_Occurred()) return false;
        continue;
      }
      bool is_known = false;
      for (PyObject* other : found) is_known = is_known || other == record;
      if (is_known) continue;
      if (get(record, state) != resident) return false;
      found.push_back(Py_NewRef(record));
    }
    return true;
  }

  // The record managed at an address, borrowed, or null.
  PyObject* at(uint64_t address) const {
    PyObject* number = PyLong_FromUnsignedLongLong(address);
    if (number == nullptr) return nullptr;
    PyObject* record = PyDict_GetItemWithError(records, number);
    Py_DECREF(number);
    return record;
  }

  // An op is about to use them.
  void pin(const std::vector<PyObject*>& found, int64_t now_ns) const {
    for (PyObject* record : found) {
      add_pins(record, 1);
      set(record, seen, Py_NewRef(Py_True));
      PyObject* time = PyLong_FromLongLong(now_ns++);
      if (time != nullptr) set(record, used, time);
    }
    PyErr_Clear();  // without memory for a number it counts as used before
  }
  void unpin(const std::vector<PyObject*>& found) const {
    for (PyObject* record : found) add_pins(record, -1);
  }
  // An op has returned these, or written them.
  void note_results(const uint64_t* start, const uint64_t* stop) const {
    for (; start != stop; ++start) {
      if (PyObject* record = at(*start)) set(record, seen, Py_NewRef(Py_True));
    }
  }
  void note_written(const uint64_t* start, const uint64_t* stop) const {
    for (; start != stop; ++start) {
      if (PyObject* record = at(*start)) set(record, stored, Py_NewRef(Py_False));
    }
  }

 private:
  void add_pins(PyObject* record, long more) const {
    set(record, pins, PyLong_FromLong(PyLong_AsLong(get(record, pins)) + more));  // small: never a new object
  }

  std::unordered_map<PyObject*, OpInfo> infos_;
};

}  // namespace ooc
