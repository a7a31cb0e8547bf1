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
// up meanwhile is postponed and runs at the next bytecode after the section (ooc/dispatch/signals.py).

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <ctime>
#include <new>
#include <vector>

#include "../../../vmm/native/allocator.h"

namespace {

enum Flags : uint32_t { kBefore = 1, kAfter = 2, kIntercept = 4 };

// One op of the plan; laid out by ooc/replay/executable_plan.py as a numpy record.
struct PlanOp {
  uint32_t uses_start, uses_stop;      // the plan variables of its operands, in order of occurrence
  uint32_t allocs_start, allocs_stop;  // its planned allocations
  uint32_t flags;
  uint32_t reserved;
};

struct Dispatcher {
  PyObject_HEAD
  vmm::State* state;
  uint64_t (*this_thread)();
  PyTypeObject* tensor_type;
  Py_ssize_t cdata_offset;  // of the TensorImpl* in the Python object; -1: ask for _cdata
  PyObject *slow, *before, *after, *finish, *failed;
  PyObject* owner;  // the mode whose __torch_dispatch__ this is; torch asks for it as `__self__`
  // The plan being replayed. `funcs`, `calls` and `buffers` keep alive what the pointers point to.
  PyObject *funcs, *calls, *buffers;
  const PlanOp* ops;
  const uint32_t* uses;
  const uint64_t* variable_address;
  int64_t* op_start_ns;
  int64_t* op_stop_ns;
  uint32_t num_ops;
  uint32_t cursor;
  int planned;
  // Critical sections; only the session's thread, holding the GIL, changes these.
  uint64_t session_thread;
  uint32_t depth;
  uint64_t postponed;  // bit n - 1: signal n
};

// Python's signal handlers run on the main thread alone, so only its sections count.
class Section {
 public:
  explicit Section(Dispatcher* self) : self_(self->this_thread() == self->session_thread ? self : nullptr) { enter(); }
  ~Section() { exit(); }
  Section(const Section&) = delete;
  Section& operator=(const Section&) = delete;

  static void enter(Dispatcher* self) { ++self->depth; }
  static void exit(Dispatcher* self) {
    if (self->depth > 0) --self->depth;
    if (self->depth == 0 && self->postponed != 0) rearm(self);
  }

 private:
  void enter() {
    if (self_ != nullptr) enter(self_);
  }
  void exit() {
    if (self_ != nullptr) exit(self_);
  }
  // Let the interpreter believe that the signals arrive now.
  static void rearm(Dispatcher* self) {
    const uint64_t postponed = self->postponed;
    self->postponed = 0;
    for (int number = 1; number <= 64; ++number) {
      if ((postponed >> (number - 1)) & 1) PyErr_SetInterruptEx(number);
    }
  }

  Dispatcher* self_;
};

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1000000000 + t.tv_nsec;
}

// The storage address of a tensor if it lies in the arena, else 0.
uint64_t arena_address(const Dispatcher* self, PyObject* tensor) {
  const c10::TensorImpl* impl = nullptr;
  if (self->cdata_offset >= 0) {
    impl = *reinterpret_cast<c10::TensorImpl**>(reinterpret_cast<char*>(tensor) + self->cdata_offset);
  } else {
    PyObject* value = PyObject_GetAttrString(tensor, "_cdata");
    if (value == nullptr) {
      PyErr_Clear();
      return 0;
    }
    impl = reinterpret_cast<c10::TensorImpl*>(PyLong_AsUnsignedLongLong(value));
    Py_DECREF(value);
  }
  if (impl == nullptr || !impl->has_storage()) return 0;
  const c10::Storage& storage = impl->unsafe_storage();
  if (!storage) return 0;
  const auto address =
      reinterpret_cast<uint64_t>(storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get());
  const auto start = self->state->arena_start.load(std::memory_order_relaxed);
  const auto stop = self->state->arena_stop.load(std::memory_order_relaxed);
  return address >= start && address < stop ? address : 0;
}

// Call visit(address) for every arena operand in `object`, depth first, until it returns false.
template <class Visit>
bool for_each_operand(const Dispatcher* self, PyObject* object, Visit&& visit) {
  if (PyObject_TypeCheck(object, self->tensor_type)) {
    const uint64_t address = arena_address(self, object);
    return address == 0 || visit(address);
  }
  if (PyTuple_CheckExact(object) || PyList_Check(object) || PyTuple_Check(object)) {
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(object);
    for (Py_ssize_t i = 0; i < n; ++i) {
      if (!for_each_operand(self, PySequence_Fast_GET_ITEM(object, i), visit)) return false;
    }
    return true;
  }
  if (PyDict_Check(object)) {
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(object, &position, &key, &value)) {
      if (!for_each_operand(self, value, visit)) return false;
    }
  }
  return true;
}

// Every arena operand must be one that the plan expects, in the plan's order. One that the plan
// expects and that is not in the arena (it fell below the threshold this time) is harmless.
bool operands_match(const Dispatcher* self, const PlanOp& op, PyObject* args, PyObject* kwargs) {
  uint32_t expected = op.uses_start;
  auto visit = [&](uint64_t address) {
    while (expected < op.uses_stop && self->variable_address[self->uses[expected]] != address) ++expected;
    if (expected == op.uses_stop) return false;
    ++expected;
    return true;
  };
  return for_each_operand(self, args, visit) &&
         (kwargs == nullptr || kwargs == Py_None || for_each_operand(self, kwargs, visit));
}

// Whether the plan's next op is this one. Sets no Python error.
bool expected_next(const Dispatcher* self, PyObject* func, PyObject* args, PyObject* kwargs) {
  if (!self->planned || self->cursor >= self->num_ops) return false;
  if (self->this_thread() != self->state->owner_thread.load(std::memory_order_relaxed)) return false;
  return PyList_GET_ITEM(self->funcs, self->cursor) == func &&
         operands_match(self, self->ops[self->cursor], args, kwargs);
}

PyObject* call_op(PyObject* call, PyObject* args, PyObject* kwargs) {
  const bool named = kwargs != nullptr && kwargs != Py_None && PyDict_GET_SIZE(kwargs) > 0;
  return PyObject_Call(call, args, named ? kwargs : nullptr);
}

// Play the plan's next op, which this one is known to be.
PyObject* play(Dispatcher* self, PyObject* func, PyObject* types, PyObject* args, PyObject* kwargs) {
  const uint32_t index = self->cursor;
  const PlanOp& op = self->ops[index];
  PyObject* number = nullptr;
  if (op.flags & (kBefore | kAfter)) {
    number = PyLong_FromUnsignedLong(index);
    if (number == nullptr) return nullptr;
  }
  if (op.flags & kBefore) {
    PyObject* stays = PyObject_CallOneArg(self->before, number);
    if (stays == nullptr) {
      Py_DECREF(number);
      return nullptr;
    }
    const bool left = stays == Py_False;
    Py_DECREF(stays);
    if (left) {
      Py_DECREF(number);
      return PyObject_CallFunctionObjArgs(self->slow, func, types, args, kwargs, nullptr);
    }
  }
  const uint32_t flags = op.flags;
  PyObject* call = PyList_GET_ITEM(self->calls, index);
  Py_INCREF(call);
  vmm::State* state = self->state;
  state->window_next = op.allocs_start;
  state->window_stop = op.allocs_stop;
  state->position.store(2 * index + 1, std::memory_order_release);
  self->op_start_ns[index] = now_ns();
  PyObject* result = call_op(call, args, kwargs);
  state->position.store(2 * index + 2, std::memory_order_release);
  Py_DECREF(call);
  if (self->planned) {
    self->op_stop_ns[index] = now_ns();
    self->cursor = index + 1;
  }
  if (result == nullptr) {
    Py_XDECREF(number);
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject* named = kwargs == nullptr ? Py_None : kwargs;
    PyObject* replacement = PyObject_CallFunction(self->failed, "IOOO", index, func, args, named);
    if (replacement != nullptr) {
      Py_DECREF(replacement);
      PyErr_Restore(type, value, traceback);
    } else {
      Py_XDECREF(type);
      Py_XDECREF(value);
      Py_XDECREF(traceback);
    }
    return nullptr;
  }
  PyObject* done = Py_None;
  if (!self->planned) {
    PyObject* named = kwargs == nullptr ? Py_None : kwargs;
    done = PyObject_CallFunction(self->finish, "IOOOO", index, func, args, named, result);
  } else if (flags & kAfter) {
    done = PyObject_CallOneArg(self->after, number);
  } else {
    Py_INCREF(done);
  }
  Py_XDECREF(number);
  if (done == nullptr) {
    Py_DECREF(result);
    return nullptr;
  }
  Py_DECREF(done);
  return result;
}

PyObject* dispatcher_call(PyObject* object, PyObject* positional, PyObject*) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  PyObject *func, *types, *args = nullptr, *kwargs = Py_None;
  if (!PyArg_UnpackTuple(positional, "__torch_dispatch__", 2, 4, &func, &types, &args, &kwargs)) return nullptr;
  const Section section(self);
  if (args != nullptr && PyTuple_Check(types) && PyTuple_GET_SIZE(types) == 0 &&
      expected_next(self, func, args, kwargs) && !(self->ops[self->cursor].flags & kIntercept)) {
    return play(self, func, types, args, kwargs);
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

// install(funcs, calls, buffers, ops, uses, variable_address, start_ns, stop_ns, num_ops): the tables
// of a plan, as addresses; `buffers` owns them.
PyObject* dispatcher_install(PyObject* object, PyObject* positional) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  PyObject *funcs, *calls, *buffers;
  unsigned long long ops, uses, variable_address, start_ns, stop_ns;
  unsigned int num_ops;
  if (!PyArg_ParseTuple(positional, "O!O!OKKKKKI", &PyList_Type, &funcs, &PyList_Type, &calls, &buffers, &ops,
                        &uses, &variable_address, &start_ns, &stop_ns, &num_ops)) {
    return nullptr;
  }
  if (PyList_GET_SIZE(funcs) != num_ops || PyList_GET_SIZE(calls) != num_ops) {
    PyErr_SetString(PyExc_ValueError, "install: one function and one callable per op, please");
    return nullptr;
  }
  Py_INCREF(funcs);
  Py_INCREF(calls);
  Py_INCREF(buffers);
  Py_XSETREF(self->funcs, funcs);
  Py_XSETREF(self->calls, calls);
  Py_XSETREF(self->buffers, buffers);
  self->ops = reinterpret_cast<const PlanOp*>(ops);
  self->uses = reinterpret_cast<const uint32_t*>(uses);
  self->variable_address = reinterpret_cast<const uint64_t*>(variable_address);
  self->op_start_ns = reinterpret_cast<int64_t*>(start_ns);
  self->op_stop_ns = reinterpret_cast<int64_t*>(stop_ns);
  self->num_ops = num_ops;
  self->cursor = 0;
  self->planned = 0;
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
  self->state->owner_thread.store(self->this_thread(), std::memory_order_relaxed);
  self->planned = 1;
  Py_RETURN_NONE;
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

PyObject* dispatcher_enter(PyObject* object, PyObject*) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  if (self->this_thread() == self->session_thread) Section::enter(self);
  Py_RETURN_NONE;
}

PyObject* dispatcher_exit(PyObject* object, PyObject*) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  if (self->this_thread() == self->session_thread) Section::exit(self);
  Py_RETURN_NONE;
}

// call(function, *arguments): as one section from before its first bytecode to after its last.
PyObject* dispatcher_guarded(PyObject* object, PyObject* positional) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  const Py_ssize_t count = PyTuple_GET_SIZE(positional);
  if (count == 0) {
    PyErr_SetString(PyExc_TypeError, "guarded: a function, please");
    return nullptr;
  }
  const Section section(self);
  PyObject* arguments = PyTuple_GetSlice(positional, 1, count);
  if (arguments == nullptr) return nullptr;
  PyObject* result = PyObject_Call(PyTuple_GET_ITEM(positional, 0), arguments, nullptr);
  Py_DECREF(arguments);
  return result;
}

// postpone(signal, always) -> whether it will come again at the end of the section (or of the next).
PyObject* dispatcher_postpone(PyObject* object, PyObject* positional) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  int number, always;
  if (!PyArg_ParseTuple(positional, "ip", &number, &always)) return nullptr;
  if ((self->depth == 0 && !always) || number < 1 || number > 64) Py_RETURN_FALSE;
  self->postponed |= uint64_t{1} << (number - 1);
  Py_RETURN_TRUE;
}

PyObject* get_depth(PyObject* object, void*) {
  return PyLong_FromUnsignedLong(reinterpret_cast<Dispatcher*>(object)->depth);
}
PyObject* get_cursor(PyObject* object, void*) {
  return PyLong_FromUnsignedLong(reinterpret_cast<Dispatcher*>(object)->cursor);
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
  self->state = reinterpret_cast<vmm::State*>(state);
  self->this_thread = reinterpret_cast<uint64_t (*)()>(this_thread);
  self->session_thread = self->this_thread();
  self->cdata_offset = probe_cdata(sample);
  if (PyErr_Occurred()) PyErr_Clear();
  Py_INCREF(tensor_type);
  self->tensor_type = reinterpret_cast<PyTypeObject*>(tensor_type);
  self->slow = Py_NewRef(slow);
  self->before = Py_NewRef(before);
  self->after = Py_NewRef(after);
  self->finish = Py_NewRef(finish);
  self->failed = Py_NewRef(failed);
  return reinterpret_cast<PyObject*>(self);
}

int dispatcher_clear(PyObject* object) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  self->planned = 0;
  self->num_ops = 0;
  Py_CLEAR(self->owner);
  Py_CLEAR(self->slow);
  Py_CLEAR(self->before);
  Py_CLEAR(self->after);
  Py_CLEAR(self->finish);
  Py_CLEAR(self->failed);
  Py_CLEAR(self->funcs);
  Py_CLEAR(self->calls);
  Py_CLEAR(self->buffers);
  return 0;
}

int dispatcher_traverse(PyObject* object, visitproc visit, void* arg) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
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
  Py_CLEAR(reinterpret_cast<Dispatcher*>(object)->tensor_type);
  Py_TYPE(object)->tp_free(object);
}

PyMethodDef dispatcher_methods[] = {
    {"try_play", dispatcher_try_play, METH_VARARGS, "Play the next planned op if this is it."},
    {"operands", dispatcher_operands, METH_VARARGS, "Distinct arena addresses of the tensors within."},
    {"occurrences", dispatcher_occurrences, METH_VARARGS, "Arena addresses of the tensors within, repeats too."},
    {"address", dispatcher_address, METH_O, "A tensor's storage address if in the arena, else 0."},
    {"install", dispatcher_install, METH_VARARGS, "Set the tables of a plan."},
    {"start", dispatcher_start, METH_O, "Compare ops with the plan from this op on."},
    {"leave", dispatcher_leave, METH_NOARGS, "Stop comparing ops with the plan."},
    {"enter_section", dispatcher_enter, METH_NOARGS, "From now on signal handlers wait."},
    {"exit_section", dispatcher_exit, METH_NOARGS, "The section ends; what has waited comes at the next bytecode."},
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

PyModuleDef module_def = {PyModuleDef_HEAD_INIT, "_dispatch", "The hot path of a planned step.", -1,
                          nullptr, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__dispatch(void) {
  if (PyType_Ready(&dispatcher_type) < 0) return nullptr;
  PyObject* module = PyModule_Create(&module_def);
  if (module == nullptr) return nullptr;
  if (PyModule_AddObjectRef(module, "Dispatcher", reinterpret_cast<PyObject*>(&dispatcher_type)) < 0) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
