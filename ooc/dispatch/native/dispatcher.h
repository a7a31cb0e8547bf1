// What the native dispatcher knows, and what all of its parts ask: its Python object, critical sections, and the
// operands of an op. Included by dispatch.cpp alone.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/SequenceNumber.h>
#include <c10/core/GradMode.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <ctime>

#include "../../../vmm/native/allocator.h"
#include "acts.h"
#include "births.h"
#include "demand.h"
#include "outside.h"
#include "set_aside.h"
#include "sparse.h"
#include "stream_watch.h"
#include "trials.h"
#include "undisturbed.h"

namespace {

// kHead: nothing before this op has touched a variable, and this op is to run in the grad mode that kGradients says.
// kTouches: it is the first that touches one, and does so in each step.
// kDoubted: the present step is going to leave it out.
// kOmittable: steps may leave it out, so on small tensors alone it is another op where one of its operands is alive.
// kChanges: it changes operands that it names; kHidden: the order of its large operands does not tell which.
enum Flags : uint32_t {
  kBefore = 1, kAfter = 2, kIntercept = 4, kHead = 8, kGradients = 16, kTouches = 32, kChanges = 64, kHidden = 128,
  kDoubted = 256, kOmittable = 512
};

// One op of the plan; laid out by ooc/replay/executable_plan.py as a numpy record.
struct PlanOp {
  uint32_t uses_start, uses_stop;      // the plan variables of its operands, in order of occurrence
  uint32_t allocs_start, allocs_stop;  // its planned allocations
  uint32_t flags;
  uint32_t reserved;
};

// What `Dispatcher.__call__` is called for when an op that ran without Python is told to it.
struct Rare {
  // Raise what follows; a planned op raised; it left the plan while it ran; an op on demand raised, or was refused memory.
  enum Kind { kRaise, kFailed, kFinish, kFailedOnDemand } kind;
  uint32_t index = 0;
  PyObject* result = nullptr;  // owned: the tensors that it has returned; kFailedOnDemand: (records, written, raised)
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;  // owned: to be raised
  bool is_told = false;  // Python has taken note, and raised nothing
  bool is_done = false;  // Python has run the op in parts: its results are on the stack of its arguments

  Rare(Kind kind, uint32_t index) : kind(kind), index(index) {}
  Rare(const Rare&) = delete;
  Rare& operator=(const Rare&) = delete;
  ~Rare() {
    for (PyObject* object : {result, type, value, traceback}) Py_XDECREF(object);
  }
};

struct Dispatcher {
  PyObject_HEAD
  vmm::State* state;
  uint64_t (*this_thread)();
  PyTypeObject* tensor_type;  // whatever is a tensor
  PyTypeObject* plain_type;   // torch.Tensor itself
  Py_ssize_t cdata_offset;  // of the TensorImpl* in the Python object; -1: ask for _cdata
  PyObject *slow, *before, *after, *finish, *failed;
  PyObject* owner;  // the mode whose __torch_dispatch__ this is; torch asks for it as `__self__`
  // The plan being replayed. `funcs`, `calls` and `buffers` keep alive what the pointers point to.
  PyObject *funcs, *calls, *buffers;
  const PlanOp* ops;
  const uint32_t* uses;
  const uint64_t* variable_address;  // what it says of a variable that is not alive is another's, maybe its successor's
  const uint8_t* variable_alive;
  PyObject* schema_bytes;  // owns `schemas`
  const void* const* schemas;  // of each op that may be played without Python; null: of none
  int64_t* op_start_ns;
  int64_t* op_stop_ns;
  int64_t* op_nodes;  // how many autograd nodes there had been when an op began, its own included
  uint32_t num_ops;
  uint32_t cursor;
  uint32_t vouched_for;  // one past the planned op of which Python has noted what it really changes; 0: none
  int planned;
  // Critical sections; only the session's thread, holding the GIL, changes these.
  uint64_t session_thread;
  uint32_t depth;
  uint64_t postponed;  // bit n - 1: signal n
  bool is_underway;    // a section began as torch took an op towards Python; the op's own takes over from it
  bool is_collecting;  // garbage, on the session's thread
  ooc::Collector collector;
  ooc::Head head;          // which ops on demand are Python's because something may begin with them
  int watched_grad_mode;   // ops on demand in the other grad mode are Python's; -1: it does not matter
  PyObject* awaited_func;  // this one, too; null: none
  PyObject* heads;         // and these, a tuple of functions, until something has begun; null: none
  ooc::Demand* demand;  // ops that run on demand; null until the session says how
  ooc::Acts* acts;      // what goes before planned ops; null: all of it is Python's
  ooc::Births* births;  // into memory that lies ready; null: all of them are Python's
  ooc::Trials* trials;  // which kinds of op may run again
  ooc::StreamWatch stream;
  const ooc::Outside* outside;  // how ops run as without a mode
  // Set by boxed.cpp.
  Rare* rare;  // what the next call is for; null: an op to run
  uint64_t num_boxed;         // planned ops that were played without Python
  uint64_t num_boxed_demand;  // ops on demand that were run so
  PyObject* (*schemas_of)(PyObject* funcs, PyObject* calls);  // bytes: an address, or 0, for each op; owned
  void (*detach)(Dispatcher*);
  ooc::CallSites::NodeOf node_of;  // null: Python is asked
};

// Nothing of the program's comes in between: signal handlers, which run on the main thread alone, wait, so do finalizers,
// and there are frames enough. On another thread than the session's it is none: what must be whole there holds the lock.
class Section {
 public:
  explicit Section(Dispatcher* self) : self_(self->this_thread() == self->session_thread ? self : nullptr) { enter(); }
  ~Section() { exit(); }
  Section(const Section&) = delete;
  Section& operator=(const Section&) = delete;

  static void enter(Dispatcher* self) {
    if (self->depth++ > 0) return;
    ooc::add_frames(ooc::kOwnFrames);
    self->collector.wait();
  }
  static void exit(Dispatcher* self) {
    if (self->depth == 1) {
      ooc::add_frames(-ooc::kOwnFrames);
      self->collector.go_on();
    }
    if (self->depth > 0) --self->depth;
    handle_postponed(self);
  }
  static void handle_postponed(Dispatcher* self) {
    if (self->depth == 0 && !self->is_collecting && self->postponed != 0) rearm(self);
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

// Null for what is no initialised tensor.
const c10::TensorImpl* tensor_impl(const Dispatcher* self, PyObject* tensor) {
  if (self->cdata_offset >= 0) {
    return *reinterpret_cast<c10::TensorImpl**>(reinterpret_cast<char*>(tensor) + self->cdata_offset);
  }
  PyObject* value = PyObject_GetAttrString(tensor, "_cdata");
  if (value == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  const auto* impl = reinterpret_cast<const c10::TensorImpl*>(PyLong_AsUnsignedLongLong(value));
  Py_DECREF(value);
  return impl;
}

// The address of a tensor's own storage if it lies in the arena and is the session's, else 0.
uint64_t arena_address(const Dispatcher* self, const c10::TensorImpl* impl) {
  if (impl == nullptr || !impl->has_storage()) return 0;
  const c10::Storage& storage = impl->unsafe_storage();
  if (!storage) return 0;
  const auto address =
      reinterpret_cast<uint64_t>(storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get());
  const auto start = self->state->arena_start.load(std::memory_order_relaxed);
  const auto stop = self->state->arena_stop.load(std::memory_order_relaxed);
  if (address < start || address >= stop) return 0;
  if (self->state->num_detached.load(std::memory_order_relaxed) != 0) {  // of an earlier session: nobody moves it
    const uint32_t* detached = self->state->detached.load(std::memory_order_relaxed);
    if (__atomic_load_n(&detached[(address - start) >> vmm::kGranuleShift], __ATOMIC_RELAXED) != 0) return 0;
  }
  return address;
}

inline uint64_t arena_address(const Dispatcher* self, PyObject* tensor) {
  return arena_address(self, tensor_impl(self, tensor));
}

// Call visit(address) for the storages of a tensor that lie in the arena, until it returns false.
template <class Visit>
bool for_each_storage(const Dispatcher* self, const c10::TensorImpl* impl, Visit&& visit) {
  const auto one = [&](const c10::TensorImpl* each) {
    const uint64_t address = arena_address(self, each);
    return address == 0 || visit(address);
  };
  if (impl == nullptr) return true;
  return impl->has_storage() ? one(impl) : for_each_part(impl, one);
}

// Call visit(address) for every arena operand in `object`, depth first, until it returns false.
template <class Visit>
bool for_each_operand(const Dispatcher* self, PyObject* object, Visit&& visit) {
  if (PyObject_TypeCheck(object, self->tensor_type)) {
    return for_each_storage(self, tensor_impl(self, object), visit);
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

using ooc::SetAside;

inline PyObject* call_op(PyObject* call, PyObject* args, PyObject* kwargs) {
  const bool named = kwargs != nullptr && kwargs != Py_None && PyDict_GET_SIZE(kwargs) > 0;
  return PyObject_Call(call, args, named ? kwargs : nullptr);
}

}  // namespace
