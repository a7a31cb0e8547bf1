// The hot path of a planned step: compare the op and its operands with the plan, open the op's
// window of planned allocations, call the op. A CPython extension against c10's headers only.
//
// Everything that is not hot is a Python callable that the session gives us:
//   slow(func, types, args, kwargs)   anything but the op that the plan expects
//   before(index) -> bool             waits, loads, remaps before op `index`; False: left the plan
//   after(index)                      evictions, drops after it
//   finish(index, func, args, kwargs, result)  the op left the plan while it ran
//   failed(index, func, args, kwargs) the op raised
//
// Each call is one critical section on the session's thread: a signal's Python handler that comes
// up meanwhile is postponed and runs at the next bytecode after the section (ooc/dispatch/signals.py). Its Python frames
// are beyond the program's recursion limit, and no garbage is collected (undisturbed.h).

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/PythonTorchFunctionTLS.h>

#include <new>
#include <utility>
#include <vector>

#include "kind_methods.h"
#include "noted_keys.h"
#include "play.h"
#include "prepare_acts.h"
#include "prepare_births.h"
#include "prepare_demand.h"
#include "run_on_demand.h"
#include "sections.h"
#include "unnoticed_mode.h"
#include "watch.h"

namespace {

// Whether the plan's next op is this one. Sets no Python error.
bool expected_next(const Dispatcher* self, PyObject* func, PyObject* args, PyObject* kwargs) {
  if (!is_replaying(self) || PyList_GET_ITEM(self->funcs, self->cursor) != func) return false;
  Expected expected(self, self->ops[self->cursor]);
  return for_each_operand(self, args, expected) &&
         (kwargs == nullptr || kwargs == Py_None || for_each_operand(self, kwargs, expected)) &&
         expected.is_met([&] { return changes_large(self, args, kwargs); });
}

// Play the plan's next op, which this one is known to be.
PyObject* play(Dispatcher* self, PyObject* func, PyObject* types, PyObject* args, PyObject* kwargs) {
  const uint32_t index = self->cursor;
  const uint32_t flags = self->ops[index].flags;
  switch (start_planned(self, index)) {
    case Start::kError:
      return nullptr;
    case Start::kLeft:
      return PyObject_CallFunctionObjArgs(self->slow, func, types, args, kwargs, nullptr);
    case Start::kRuns:
      break;
  }
  PyObject* call = Py_NewRef(PyList_GET_ITEM(self->calls, index));
  PyObject* result = call_op(call, args, kwargs);
  Py_DECREF(call);
  const bool stays = stop_planned(self, index);
  if (result == nullptr) {
    SetAside error;
    return error.pass_on(PyObject_CallFunction(self->failed, "IOOO", index, func, args, or_none(kwargs)), nullptr);
  }
  if (!stays) {
    PyObject* done = PyObject_CallFunction(self->finish, "IOOOO", index, func, args, or_none(kwargs), result);
    if (done == nullptr) Py_CLEAR(result);
    Py_XDECREF(done);
  } else if (!finish_planned(self, index, flags)) {
    Py_CLEAR(result);
  }
  return result;
}

// An op that ran without Python is told to Python. Ends with an error, unless Python has run it in parts: with its result.
PyObject* take_note(Dispatcher* self, PyObject* func, PyObject* args, PyObject* kwargs) {
  Rare& rare = *std::exchange(self->rare, nullptr);
  PyObject* done = nullptr;
  switch (rare.kind) {
    case Rare::kRaise:
      PyErr_Restore(rare.type, rare.value, rare.traceback);
      rare.type = rare.value = rare.traceback = nullptr;
      return nullptr;
    case Rare::kFailed:
      done = PyObject_CallFunction(self->failed, "IOOO", rare.index, func, args, or_none(kwargs));
      break;
    case Rare::kFinish:
      done = PyObject_CallFunction(self->finish, "IOOOO", rare.index, func, args, or_none(kwargs), rare.result);
      break;
    case Rare::kFailedOnDemand:
      done = tell_failed(*self->demand, func, args, kwargs, rare.result);
      if (done != nullptr && PyTuple_Check(done)) {
        rare.is_done = true;
        PyObject* result = Py_NewRef(PyTuple_GET_ITEM(done, 0));
        Py_DECREF(done);
        return result;
      }
      if (done == nullptr || rare.type == nullptr) break;
      Py_DECREF(done);  // what went wrong was no op's error: it is raised after all
      PyErr_Restore(rare.type, rare.value, rare.traceback);
      rare.type = rare.value = rare.traceback = nullptr;
      return nullptr;
  }
  if (done == nullptr) return nullptr;
  Py_DECREF(done);
  rare.is_told = true;
  PyErr_SetString(PyExc_RuntimeError, "noted");  // for boxed.cpp alone
  return nullptr;
}

// Whether no operand is of a subclass that dispatches for itself. torch names its own class for some ops (detach).
bool are_plain(const Dispatcher* self, PyObject* types) {
  if (!PyTuple_Check(types)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(types); ++i) {
    if (PyTuple_GET_ITEM(types, i) != reinterpret_cast<PyObject*>(self->plain_type)) return false;
  }
  return true;
}

// What runs below a dispatch mode is no call of the program's: `__torch_function__` of subclasses and modes, which calling
// an op from Python would ask, has had its turn above, or, in a backward pass, has none.
class NoTorchFunction {
 public:
  NoTorchFunction() { Tls::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED); }
  ~NoTorchFunction() { Tls::set_disabled_state(before_); }
  NoTorchFunction(const NoTorchFunction&) = delete;
  NoTorchFunction& operator=(const NoTorchFunction&) = delete;

 private:
  using Tls = at::impl::PythonTorchFunctionTLS;
  const at::impl::TorchFunctionDisabledState before_ = Tls::get_disabled_state();
};

PyObject* dispatcher_call(PyObject* object, PyObject* positional, PyObject*) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  PyObject *func, *types, *args = nullptr, *kwargs = Py_None;
  if (!PyArg_UnpackTuple(positional, "__torch_dispatch__", 2, 4, &func, &types, &args, &kwargs)) return nullptr;
  const bool is_ours = self->this_thread() == self->session_thread;
  if (self->rare != nullptr && is_ours) return take_note(self, func, args, kwargs);
  const Section section(self);
  if (is_ours && std::exchange(self->is_underway, false)) Section::exit(self);  // which `section` takes over from
  const NoTorchFunction none;
  ooc::AsOutside keys;
  keys.begin(outside);
  // Composite ops come whole then (ooc/tracing/composites.py), unless boxed.cpp has taken them apart.
  const bool may_be_whole = self->schemas_of == nullptr && c10::InferenceMode::is_enabled();
  const bool is_plain = !may_be_whole && args != nullptr && are_plain(self, types);
  if (is_plain && expected_next(self, func, args, kwargs) && is_native(self->ops[self->cursor])) {
    return play(self, func, types, args, kwargs);
  }
  if (is_plain && self->demand != nullptr && self->demand->log != nullptr && !self->planned) {
    PyObject* result = run_on_demand(self, func, args, kwargs);
    if (result != nullptr || PyErr_Occurred()) return result;
  }
  return PyObject_Call(self->slow, positional, nullptr);
}

// try_play(func, types, args, kwargs) -> (result,) or None when the plan expects something else.
// For ops that Python intercepts and runs as parts.
PyObject* dispatcher_try_play(PyObject* object, PyObject* positional) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  PyObject *func, *types, *args, *kwargs;
  if (!PyArg_UnpackTuple(positional, "try_play", 4, 4, &func, &types, &args, &kwargs)) return nullptr;
  if (!expected_next(self, func, args, kwargs)) Py_RETURN_NONE;
  PyObject* result = play(self, func, types, args, kwargs);
  if (result == nullptr) return nullptr;
  PyObject* pair = PyTuple_Pack(1, result);
  Py_DECREF(result);
  return pair;
}

// operands(*objects) -> distinct storage addresses in the arena, in order of occurrence.
PyObject* dispatcher_operands(PyObject* object, PyObject* positional) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  std::vector<uint64_t> found;
  for_each_operand(self, positional, [&](uint64_t address) {
    for (uint64_t seen : found) {
      if (seen == address) return true;
    }
    found.push_back(address);
    return true;
  });
  PyObject* result = PyTuple_New(static_cast<Py_ssize_t>(found.size()));
  if (result == nullptr) return nullptr;
  for (size_t i = 0; i < found.size(); ++i) {
    PyTuple_SET_ITEM(result, static_cast<Py_ssize_t>(i), PyLong_FromUnsignedLongLong(found[i]));
  }
  return result;
}

// occurrences(*objects) -> storage addresses in the arena, one per operand, repeats included.
PyObject* dispatcher_occurrences(PyObject* object, PyObject* positional) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  PyObject* result = PyList_New(0);
  if (result == nullptr) return nullptr;
  for_each_operand(self, positional, [&](uint64_t address) {
    PyObject* number = PyLong_FromUnsignedLongLong(address);
    if (number != nullptr) PyList_Append(result, number);
    Py_XDECREF(number);
    return true;
  });
  return result;
}

// install(funcs, calls, buffers, ops, uses, variable_address, start_ns, stop_ns, nodes, num_ops, (before, after,
// variable_alive, variable_nbytes, deaths, num_deaths)): the tables of a plan, as addresses; `buffers` owns them. The last
// six: see `PlanActs`, `Moves`.
PyObject* dispatcher_install(PyObject* object, PyObject* positional) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  PyObject *funcs, *calls, *buffers, *before, *after;
  unsigned long long ops, uses, variable_address, start_ns, stop_ns, nodes, alive, nbytes, deaths, num_deaths;
  unsigned int num_ops;
  if (!PyArg_ParseTuple(positional, "O!O!OKKKKKKI(O!O!KKKK)", &PyList_Type, &funcs, &PyList_Type, &calls, &buffers, &ops,
                        &uses, &variable_address, &start_ns, &stop_ns, &nodes, &num_ops, &PyList_Type, &before,
                        &PyList_Type, &after, &alive, &nbytes, &deaths, &num_deaths)) {
    return nullptr;
  }
  for (PyObject* list : {funcs, calls, before, after}) {
    if (PyList_GET_SIZE(list) == num_ops) continue;
    PyErr_SetString(PyExc_ValueError, "install: one function, one callable and acts before and after per op, please");
    return nullptr;
  }
  PyObject* schemas = self->schemas_of != nullptr ? self->schemas_of(funcs, calls) : PyBytes_FromString("");
  if (schemas == nullptr) return nullptr;
  Py_XSETREF(self->funcs, Py_NewRef(funcs));
  Py_XSETREF(self->calls, Py_NewRef(calls));
  Py_XSETREF(self->buffers, Py_NewRef(buffers));
  Py_XSETREF(self->schema_bytes, schemas);
  self->ops = reinterpret_cast<const PlanOp*>(ops);
  self->uses = reinterpret_cast<const uint32_t*>(uses);
  self->variable_address = reinterpret_cast<const uint64_t*>(variable_address);
  self->variable_alive = reinterpret_cast<const uint8_t*>(alive);
  self->op_start_ns = reinterpret_cast<int64_t*>(start_ns);
  self->op_stop_ns = reinterpret_cast<int64_t*>(stop_ns);
  self->op_nodes = reinterpret_cast<int64_t*>(nodes);
  self->num_ops = num_ops;
  self->cursor = 0;
  self->planned = 0;
  if (self->acts != nullptr) {
    Py_XSETREF(self->acts->plan.before, Py_NewRef(before));
    Py_XSETREF(self->acts->plan.after, Py_NewRef(after));
    self->acts->moves.variable_nbytes = reinterpret_cast<const uint64_t*>(nbytes);
    self->acts->plan.alive = reinterpret_cast<const uint8_t*>(alive);
    self->acts->plan.deaths = reinterpret_cast<const uint32_t*>(deaths);
    self->acts->plan.num_deaths = reinterpret_cast<const uint32_t*>(num_deaths);
  }
  const auto* all = reinterpret_cast<const void* const*>(PyBytes_AS_STRING(schemas));
  self->schemas = self->schemas_of != nullptr ? all : nullptr;
  Py_RETURN_NONE;
}

// start(cursor): from now on ops are compared with the plan, beginning at op `cursor`.
PyObject* dispatcher_start(PyObject* object, PyObject* number) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  const unsigned long cursor = PyLong_AsUnsignedLong(number);
  if (PyErr_Occurred()) return nullptr;
  if (self->ops == nullptr || cursor > self->num_ops) {
    PyErr_Format(PyExc_ValueError, "start: op %lu of a plan of %u ops", cursor, self->num_ops);
    return nullptr;
  }
  self->cursor = static_cast<uint32_t>(cursor);
  self->vouched_for = 0;
  if (self->acts != nullptr) self->acts->start(self->cursor);
  self->state->owner_thread.store(self->this_thread(), std::memory_order_relaxed);
  self->planned = 1;
  Py_RETURN_NONE;
}

// vouch() -> whether it is news: the next planned op may be played with fewer operands than planned, though it changes some.
PyObject* dispatcher_vouch(PyObject* object, PyObject*) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  return PyBool_FromLong(std::exchange(self->vouched_for, self->cursor + 1) != self->cursor + 1);
}

PyObject* dispatcher_leave(PyObject* object, PyObject*) {
  reinterpret_cast<Dispatcher*>(object)->planned = 0;
  Py_RETURN_NONE;
}

PyObject* dispatcher_address(PyObject* object, PyObject* tensor) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  if (!PyObject_TypeCheck(tensor, self->tensor_type)) return PyLong_FromLong(0);
  return PyLong_FromUnsignedLongLong(arena_address(self, tensor));
}

PyObject* get_depth(PyObject* object, void*) {
  return PyLong_FromUnsignedLong(reinterpret_cast<Dispatcher*>(object)->depth);
}
PyObject* get_cursor(PyObject* object, void*) {
  return PyLong_FromUnsignedLong(reinterpret_cast<Dispatcher*>(object)->cursor);
}
PyObject* get_num_boxed(PyObject* object, void*) {
  return PyLong_FromUnsignedLongLong(reinterpret_cast<Dispatcher*>(object)->num_boxed);
}
PyObject* get_num_boxed_demand(PyObject* object, void*) {
  return PyLong_FromUnsignedLongLong(reinterpret_cast<Dispatcher*>(object)->num_boxed_demand);
}
PyObject* get_planned(PyObject* object, void*) {
  return PyBool_FromLong(reinterpret_cast<Dispatcher*>(object)->planned);
}

// Where in a Python tensor the TensorImpl pointer lies (it moved between torch versions), probed
// against what torch itself says; -1 where neither place holds it.
Py_ssize_t probe_cdata(PyObject* tensor) {
  PyObject* value = PyObject_GetAttrString(tensor, "_cdata");
  if (value == nullptr) return -1;
  const auto expected = PyLong_AsUnsignedLongLong(value);
  Py_DECREF(value);
  const Py_ssize_t size = Py_TYPE(tensor)->tp_basicsize;
  for (Py_ssize_t offset = sizeof(PyObject); offset + 8 <= size && offset <= 32; offset += 8) {
    if (*reinterpret_cast<uint64_t*>(reinterpret_cast<char*>(tensor) + offset) == expected) return offset;
  }
  return -1;
}

PyObject* dispatcher_new(PyTypeObject* type, PyObject* positional, PyObject*) {
  unsigned long long state, this_thread;
  PyObject *sample, *tensor_type, *slow, *before, *after, *finish, *failed;
  if (!PyArg_ParseTuple(positional, "KKOOOOOOO", &state, &this_thread, &sample, &tensor_type, &slow, &before,
                        &after, &finish, &failed)) {
    return nullptr;
  }
  auto* self = reinterpret_cast<Dispatcher*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->trials = new (std::nothrow) ooc::Trials();
  if (self->trials == nullptr) {
    Py_DECREF(self);
    return PyErr_NoMemory();
  }
  self->state = reinterpret_cast<vmm::State*>(state);
  self->this_thread = reinterpret_cast<uint64_t (*)()>(this_thread);
  self->session_thread = self->this_thread();
  self->outside = &outside;
  is_outside_known();
  self->cdata_offset = probe_cdata(sample);
  self->watched_grad_mode = -1;
  if (PyErr_Occurred()) PyErr_Clear();
  Py_INCREF(tensor_type);
  self->tensor_type = reinterpret_cast<PyTypeObject*>(tensor_type);
  self->plain_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(Py_TYPE(sample)));
  self->slow = Py_NewRef(slow);
  self->before = Py_NewRef(before);
  self->after = Py_NewRef(after);
  self->finish = Py_NewRef(finish);
  self->failed = Py_NewRef(failed);
  return reinterpret_cast<PyObject*>(self);
}

int dispatcher_clear(PyObject* object) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  if (self->detach != nullptr) self->detach(self);
  self->planned = 0;
  self->num_ops = 0;
  self->schemas = nullptr;
  leave_births(self);
  delete std::exchange(self->demand, nullptr);
  delete std::exchange(self->acts, nullptr);
  Py_CLEAR(self->awaited_func);
  Py_CLEAR(self->heads);
  Py_CLEAR(self->stream.follow);
  Py_CLEAR(self->owner);
  Py_CLEAR(self->slow);
  Py_CLEAR(self->before);
  Py_CLEAR(self->after);
  Py_CLEAR(self->finish);
  Py_CLEAR(self->failed);
  Py_CLEAR(self->funcs);
  Py_CLEAR(self->calls);
  Py_CLEAR(self->buffers);
  Py_CLEAR(self->schema_bytes);
  return 0;
}

int dispatcher_traverse(PyObject* object, visitproc visit, void* arg) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  if (self->demand != nullptr) {
    for (PyObject* owned : self->demand->objects()) Py_VISIT(owned);
  }
  if (self->acts != nullptr) {
    int stop = 0;
    self->acts->for_each_owned([&](PyObject* owned) { stop = stop != 0 || owned == nullptr ? stop : visit(owned, arg); });
    if (stop != 0) return stop;
  }
  if (self->births != nullptr) {
    for (PyObject* owned : self->births->objects()) Py_VISIT(owned);
  }
  Py_VISIT(self->awaited_func);
  Py_VISIT(self->heads);
  Py_VISIT(self->stream.follow);
  Py_VISIT(self->owner);
  Py_VISIT(self->slow);
  Py_VISIT(self->before);
  Py_VISIT(self->after);
  Py_VISIT(self->finish);
  Py_VISIT(self->failed);
  Py_VISIT(self->funcs);
  Py_VISIT(self->calls);
  Py_VISIT(self->buffers);
  return 0;
}

void dispatcher_dealloc(PyObject* object) {
  PyObject_GC_UnTrack(object);
  dispatcher_clear(object);
  delete reinterpret_cast<Dispatcher*>(object)->trials;
  reinterpret_cast<Dispatcher*>(object)->collector.leave(0);
  Py_CLEAR(reinterpret_cast<Dispatcher*>(object)->tensor_type);
  Py_CLEAR(reinterpret_cast<Dispatcher*>(object)->plain_type);
  Py_TYPE(object)->tp_free(object);
}

PyMethodDef dispatcher_methods[] = {
    {"try_play", dispatcher_try_play, METH_VARARGS, "Play the next planned op if this is it."},
    {"operands", dispatcher_operands, METH_VARARGS, "Distinct arena addresses of the tensors within."},
    {"occurrences", dispatcher_occurrences, METH_VARARGS, "Arena addresses of the tensors within, repeats too."},
    {"address", dispatcher_address, METH_O, "A tensor's storage address if in the arena, else 0."},
    {"install", dispatcher_install, METH_VARARGS, "Set the tables of a plan."},
    {"start", dispatcher_start, METH_O, "Compare ops with the plan from this op on."},
    {"prepare_demand", dispatcher_prepare_demand, METH_VARARGS, "Say what ops on demand need."},
    {"prepare_acts", dispatcher_prepare_acts, METH_VARARGS, "Say what goes before planned ops, and where it is noted."},
    {"prepare_births", dispatcher_prepare_births, METH_VARARGS, "Say where births on demand are noted."},
    {"allow_releases", dispatcher_allow_releases, METH_O, "Which releases are done without Python from now on."},
    {"meet", dispatcher_meet, METH_VARARGS, "Planned ops may use what was allocated beside the plan in this step."},
    {"met", dispatcher_met, METH_NOARGS, "What the planned op that comes next, or runs, uses beside the plan."},
    {"kind", dispatcher_kind, METH_VARARGS, "What an op has in common with those tried once for all."},
    {"trial", dispatcher_trial, METH_O, "What is known of a kind of op."},
    {"set_trial", dispatcher_set_trial, METH_VARARGS, "Note what is known of a kind of op."},
    {"set_environment", dispatcher_set_environment, METH_O, "A part of every kind from now on."},
    {"refuse", dispatcher_refuse, METH_O, "Never call this op replayable again."},
    {"new_lock", dispatcher_new_lock, METH_NOARGS, "A reentrant lock that native code takes in place."},
    {"new_log", dispatcher_new_log, METH_NOARGS, "An empty log of ops."},
    {"demand", dispatcher_demand, METH_O, "Log ops on demand here from now on; None: leave each to Python."},
    {"at_head", dispatcher_at_head, METH_O, "Which ops on demand Python sees because something may begin with them."},
    {"watch", dispatcher_watch, METH_VARARGS, "Leave ops on demand in another grad mode to Python."},
    {"compare", dispatcher_compare, METH_O, "Whether the logs of ops on demand are compared from now on."},
    {"follow_stream", dispatcher_follow_stream, METH_VARARGS, "Call this before planned ops on another stream."},
    {"begin_op_again", dispatcher_begin_op_again, METH_NOARGS, "The time of the op under way begins now."},
    {"vouch", dispatcher_vouch, METH_NOARGS, "The next planned op may have fewer operands, though it changes some."},
    {"outside_keys", dispatcher_outside_keys, METH_NOARGS, "Dispatch keys that were off where the op came from."},
    {"leave", dispatcher_leave, METH_NOARGS, "Stop comparing ops with the plan."},
    {"enter_section", dispatcher_enter, METH_NOARGS, "From now on nothing of the program's comes in between."},
    {"exit_section", dispatcher_exit, METH_NOARGS, "The section ends; what has waited comes at the next bytecode."},
    {"hold_garbage", dispatcher_hold_garbage, METH_NOARGS, "Another thread holds the session's lock."},
    {"be_alone", dispatcher_be_alone, METH_NOARGS, "In a forked child: other threads' sections are over."},
    {"collection_begins", dispatcher_collection_begins, METH_VARARGS, "For gc.callbacks: signal handlers wait."},
    {"collection_ends", dispatcher_collection_ends, METH_VARARGS, "For gc.callbacks: they come again."},
    {"guarded", dispatcher_guarded, METH_VARARGS, "Call a function as one critical section."},
    {"postpone", dispatcher_postpone, METH_VARARGS, "Let a signal come again when the section ends."},
    {nullptr, nullptr, 0, nullptr}};

PyObject* get_owner(PyObject* object, void*) {
  PyObject* owner = reinterpret_cast<Dispatcher*>(object)->owner;
  return Py_NewRef(owner != nullptr ? owner : Py_None);
}
int set_owner(PyObject* object, PyObject* value, void*) {
  Py_XINCREF(value);
  Py_XSETREF(reinterpret_cast<Dispatcher*>(object)->owner, value);
  return 0;
}

PyGetSetDef dispatcher_getset[] = {
    {"__self__", get_owner, set_owner, "The mode that this dispatches for.", nullptr},
    {"cursor", get_cursor, nullptr, "Index of the next planned op.", nullptr},
    {"depth", get_depth, nullptr, "Critical sections entered on the session's thread.", nullptr},
    {"num_boxed", get_num_boxed, nullptr, "Planned ops that were played without Python so far.", nullptr},
    {"num_boxed_demand", get_num_boxed_demand, nullptr, "Ops on demand that were run without Python so far.", nullptr},
    {"num_acts", get_num_acts, nullptr, "Planned ops before which Python had nothing to do, though something was.", nullptr},
    {"num_acts_after", get_num_acts, nullptr, "The same after planned ops.", reinterpret_cast<void*>(1)},
    {"num_moves", get_num_acts, nullptr, "Planned transfers that began without Python.", reinterpret_cast<void*>(2)},
    {"num_births", get_num_births, nullptr, "Births on demand without Python so far.", nullptr},
    {"planned", get_planned, nullptr, "Whether ops are compared with a plan.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyTypeObject dispatcher_type = [] {
  PyTypeObject t = {PyVarObject_HEAD_INIT(nullptr, 0)};
  t.tp_name = "ooc._dispatch.Dispatcher";
  t.tp_basicsize = sizeof(Dispatcher);
  t.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
  t.tp_new = dispatcher_new;
  t.tp_dealloc = dispatcher_dealloc;
  t.tp_traverse = dispatcher_traverse;
  t.tp_clear = dispatcher_clear;
  t.tp_call = dispatcher_call;
  t.tp_methods = dispatcher_methods;
  t.tp_getset = dispatcher_getset;
  t.tp_doc = "The hot path of a planned step; see ooc/dispatch/native/dispatch.cpp.";
  return t;
}();

PyMethodDef module_methods[] = {
    {"leave_unnoticed", leave_unnoticed, METH_O, "Let torch's kernels not ask for modes of a class."},
    {"sites_of", sites_of, METH_O, "From where they ask while a function runs."},
    {"keep_noticed", keep_noticed, METH_O, "Tell those that ask from there of any mode."},
    {"notice", notice, METH_O, "Whether to tell them."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module_def = {PyModuleDef_HEAD_INIT, "_dispatch", "The hot path of a planned step.", -1,
                          module_methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__dispatch(void) {
  for (PyTypeObject* type : {&dispatcher_type, &ooc::op_log_type, &ooc::session_lock_type}) {
    if (PyType_Ready(type) < 0) return nullptr;
  }
  PyObject* module = PyModule_Create(&module_def);
  if (module == nullptr) return nullptr;
  if (PyModule_AddObjectRef(module, "Dispatcher", reinterpret_cast<PyObject*>(&dispatcher_type)) < 0 ||
      PyModule_AddObjectRef(module, "OpLog", reinterpret_cast<PyObject*>(&ooc::op_log_type)) < 0) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
