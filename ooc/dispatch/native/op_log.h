// The ops of a step that ran on demand, as compact as the hot path leaves them: a Python object that
// ooc/tracing/recorder.py turns into records when somebody asks.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

#include "../../../vmm/native/allocator.h"
#include "op_times.h"

namespace ooc {

struct LoggedOp {
  PyObject* func;   // owned
  PyObject* where;  // owned: a str, or None where nobody asked yet
  uint32_t occurrences, written, results, stop;  // ranges of `addresses`, one after the other
  int64_t duration_ns;  // the host's, until the device's is settled and is longer
  bool replayable;
  long long node;  // `CallSites::node_number`
};

struct OpLog {
  PyObject_HEAD
  std::vector<LoggedOp>* ops;
  std::vector<uint64_t>* addresses;
  std::vector<vmm::Event>* events;  // allocations and frees that came between them, until somebody takes them
  OpTimes* times;  // owned; null: of a device whose ops are done when they return
  bool has_begun;  // an op has touched a variable that was the first to

  // The newest op ran between these events, which are the log's from now on.
  void note_time(Stamps* stamps, void* first, void* last) {
    if (times == nullptr) times = new OpTimes(stamps);
    if (times->note(static_cast<uint32_t>(ops->size() - 1), first, last)) settle();
  }

  // Wait for the last op; what each took on the device is its duration from now on, if that is longer than to issue it.
  void settle() const {
    if (times == nullptr) return;
    times->settle([this](uint32_t op, int64_t ns) { (*ops)[op].duration_ns = std::max((*ops)[op].duration_ns, ns); });
  }
};

// A tuple of numbers: the cycle collector follows a list for ever, a tuple of numbers no longer than it takes to look.
inline PyObject* address_tuple(const std::vector<uint64_t>& addresses, uint32_t start, uint32_t stop) {
  PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(stop - start));
  if (tuple == nullptr) return nullptr;
  for (uint32_t i = start; i < stop; ++i) {
    PyObject* number = PyLong_FromUnsignedLongLong(addresses[i]);
    if (number == nullptr) {
      Py_DECREF(tuple);
      return nullptr;
    }
    PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i - start), number);
  }
  return tuple;
}

// (func, where, occurrences, written, results, duration_ns, replayable, node) of one op.
inline PyObject* logged_entry(const OpLog* log, const LoggedOp& op) {
  const std::vector<uint64_t>& addresses = *log->addresses;
  return Py_BuildValue("(OONNNLOL)", op.func, op.where, address_tuple(addresses, op.occurrences, op.written),
                       address_tuple(addresses, op.written, op.results), address_tuple(addresses, op.results, op.stop),
                       static_cast<long long>(op.duration_ns), op.replayable ? Py_True : Py_False, op.node);
}

// entries() -> the entries of all ops, of a log to which nothing is added: each object that is made may have garbage
// collected, whose finalizers run ops. On a device it waits for the last of them.
inline PyObject* op_log_entries(PyObject* object, PyObject*) {
  const auto* log = reinterpret_cast<OpLog*>(object);
  log->settle();
  const auto size = static_cast<Py_ssize_t>(log->ops->size());
  PyObject* found = PyList_New(size);
  if (found == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* entry = logged_entry(log, (*log->ops)[static_cast<size_t>(i)]);
    if (entry == nullptr) {
      Py_DECREF(found);
      return nullptr;
    }
    PyList_SET_ITEM(found, i, entry);
  }
  return found;
}

// A place among the log's ops, or -1 with an error.
inline Py_ssize_t logged_place(const OpLog* log, PyObject* number, Py_ssize_t most) {
  const Py_ssize_t place = PyLong_AsSsize_t(number);
  if (place == -1 && PyErr_Occurred()) return -1;
  if (place >= 0 && place <= most) return place;
  PyErr_Format(PyExc_IndexError, "op %zd of %zu", place, log->ops->size());
  return -1;
}

// entry(place) -> that of one op, of a log to which nothing is added.
inline PyObject* op_log_entry(PyObject* object, PyObject* number) {
  const auto* log = reinterpret_cast<OpLog*>(object);
  const Py_ssize_t place = logged_place(log, number, static_cast<Py_ssize_t>(log->ops->size()) - 1);
  if (place < 0) return nullptr;
  log->settle();
  return logged_entry(log, (*log->ops)[static_cast<size_t>(place)]);
}

// settle(): give each op its time on the device; waits for the last of them.
inline PyObject* op_log_settle(PyObject* object, PyObject*) {
  reinterpret_cast<OpLog*>(object)->settle();
  Py_RETURN_NONE;
}

// detach() -> a log with all of them, to which nothing is added; this one has none then.
inline PyObject* op_log_detach(PyObject* object, PyObject*);

// operands(start) -> ([func, ...], [(place, addresses of operands), ...]) from op `start` on, the latter of ops that have
// any; of a log to which nothing is added.
inline PyObject* op_log_operands(PyObject* object, PyObject* start) {
  const auto* log = reinterpret_cast<OpLog*>(object);
  const auto size = static_cast<Py_ssize_t>(log->ops->size());
  const Py_ssize_t first = logged_place(log, start, size);
  if (first < 0) return nullptr;
  PyObject* funcs = PyList_New(size - first);
  PyObject* used = PyList_New(0);
  bool is_done = funcs != nullptr && used != nullptr;
  for (Py_ssize_t i = first; is_done && i < size; ++i) {
    const LoggedOp& op = (*log->ops)[static_cast<size_t>(i)];
    PyList_SET_ITEM(funcs, i - first, Py_NewRef(op.func));
    if (op.occurrences == op.written) continue;
    PyObject* entry = Py_BuildValue("(nN)", i - first, address_tuple(*log->addresses, op.occurrences, op.written));
    is_done = entry != nullptr && PyList_Append(used, entry) == 0;
    Py_XDECREF(entry);
  }
  PyObject* found = is_done ? PyTuple_Pack(2, funcs, used) : nullptr;
  Py_XDECREF(funcs);
  Py_XDECREF(used);
  return found;
}

// signature(start) -> a hash of the ops' identities, which goes on from `start`.
inline PyObject* op_log_signature(PyObject* object, PyObject* start) {
  const auto* log = reinterpret_cast<OpLog*>(object);
  uint64_t hash = PyLong_AsUnsignedLongLong(start);
  if (PyErr_Occurred()) return nullptr;
  for (const LoggedOp& op : *log->ops) {
    hash = (hash ^ reinterpret_cast<uint64_t>(op.func)) * 0x100000001b3ULL;
  }
  return PyLong_FromUnsignedLongLong(hash);
}

inline Py_ssize_t op_log_length(PyObject* object) {
  return static_cast<Py_ssize_t>(reinterpret_cast<OpLog*>(object)->ops->size());
}

inline PyObject* op_log_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* log = reinterpret_cast<OpLog*>(type->tp_alloc(type, 0));
  if (log == nullptr) return nullptr;
  log->ops = new (std::nothrow) std::vector<LoggedOp>();
  log->addresses = new (std::nothrow) std::vector<uint64_t>();
  log->events = new (std::nothrow) std::vector<vmm::Event>();
  if (log->ops == nullptr || log->addresses == nullptr || log->events == nullptr) {
    Py_DECREF(log);
    return PyErr_NoMemory();
  }
  return reinterpret_cast<PyObject*>(log);
}

// What it owns are ops of torch's and texts, which own nothing of ours: no cycle goes through it.
inline void op_log_dealloc(PyObject* object) {
  auto* log = reinterpret_cast<OpLog*>(object);
  if (log->ops != nullptr) {
    for (const LoggedOp& op : *log->ops) {
      Py_DECREF(op.func);
      Py_DECREF(op.where);
    }
  }
  delete log->ops;
  delete log->addresses;
  delete log->events;
  delete log->times;
  Py_TYPE(object)->tp_free(object);
}

// take_events() -> [(address, nbytes, kind, position, ordinal), ...], oldest first; there are none then.
inline PyObject* op_log_take_events(PyObject* object, PyObject*) {
  std::vector<vmm::Event>& events = *reinterpret_cast<OpLog*>(object)->events;
  PyObject* found = PyList_New(static_cast<Py_ssize_t>(events.size()));
  for (size_t i = 0; found != nullptr && i < events.size(); ++i) {
    const vmm::Event& event = events[i];
    PyObject* row = Py_BuildValue("(KKIII)", static_cast<unsigned long long>(event.address),
                                  static_cast<unsigned long long>(event.nbytes), unsigned{event.kind}, event.position,
                                  unsigned{event.ordinal});
    if (row == nullptr) {
      Py_CLEAR(found);
    } else {
      PyList_SET_ITEM(found, static_cast<Py_ssize_t>(i), row);
    }
  }
  if (found != nullptr) events.clear();
  return found;
}

inline PyMethodDef op_log_methods[] = {
    {"entries", op_log_entries, METH_NOARGS, "The ops, oldest first, as tuples."},
    {"entry", op_log_entry, METH_O, "One op, as a tuple."},
    {"settle", op_log_settle, METH_NOARGS, "Give each op its time on the device, and wait for the last of them."},
    {"detach", op_log_detach, METH_NOARGS, "All of them as a log of their own; this one is empty then."},
    {"operands", op_log_operands, METH_O, "From one op on, the ops, and operands' addresses by place."},
    {"take_events", op_log_take_events, METH_NOARGS, "Allocations and frees so far; there are none then."},
    {"signature", op_log_signature, METH_O, "A hash of the ops."},
    {nullptr, nullptr, 0, nullptr}};

inline PyObject* op_log_has_begun(PyObject* object, void*) {
  return PyBool_FromLong(reinterpret_cast<OpLog*>(object)->has_begun);
}

inline PyGetSetDef op_log_getset[] = {
    {"has_begun", op_log_has_begun, nullptr, "Whether the first op that touches a variable is among them.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

inline PySequenceMethods op_log_sequence = {op_log_length};

inline PyTypeObject op_log_type = [] {
  PyTypeObject t = {PyVarObject_HEAD_INIT(nullptr, 0)};
  t.tp_name = "ooc._dispatch.OpLog";
  t.tp_basicsize = sizeof(OpLog);
  t.tp_flags = Py_TPFLAGS_DEFAULT;
  t.tp_new = op_log_new;
  t.tp_dealloc = op_log_dealloc;
  t.tp_methods = op_log_methods;
  t.tp_getset = op_log_getset;
  t.tp_as_sequence = &op_log_sequence;
  t.tp_doc = "Ops that ran on demand; see ooc/dispatch/native/op_log.h.";
  return t;
}();

inline PyObject* op_log_detach(PyObject* object, PyObject*) {
  PyObject* detached = op_log_new(&op_log_type, nullptr, nullptr);
  if (detached == nullptr) return nullptr;
  auto* from = reinterpret_cast<OpLog*>(object);
  auto* to = reinterpret_cast<OpLog*>(detached);
  to->ops->swap(*from->ops);
  to->addresses->swap(*from->addresses);
  std::swap(to->times, from->times);
  to->ops->shrink_to_fit();
  to->addresses->shrink_to_fit();
  return detached;
}

}  // namespace ooc
