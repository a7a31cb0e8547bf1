// What ops played from torch's stack of values have in common, planned ones (boxed.cpp) and those on demand
// (boxed_demand.h): the mode and the GIL out of the way, the tensors in a value, telling Python of what went wrong.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/PyInterpreter.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <memory>

#include "dispatcher.h"

// Of libtorch_python; their headers would bring pybind11's.
c10::impl::PyInterpreter* getPyInterpreter();
PyObject* THPVariable_Wrap(const at::TensorBase& tensor);

namespace {

using c10::impl::TorchDispatchModeTLS;
using torch::jit::Stack;

using Vtable = c10::impl::PyInterpreterVTable;

class Gil {
 public:
  Gil() : state_(PyGILState_Ensure()) {}
  ~Gil() { PyGILState_Release(state_); }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  PyGILState_STATE state_;
};

// Takes the session's mode off this thread's stack of modes, as torch does while a mode's Python runs: what an op, or
// our own code around it, dispatches is not seen.
class ModeOff {
 public:
  ModeOff() : mode_(TorchDispatchModeTLS::pop_stack()) {}
  ~ModeOff() { TorchDispatchModeTLS::push_non_infra_mode_onto_stack(mode_); }
  ModeOff(const ModeOff&) = delete;
  ModeOff& operator=(const ModeOff&) = delete;

 private:
  std::shared_ptr<c10::impl::PyObject_TorchDispatchMode> mode_;
};

class WithoutGil {
 public:
  WithoutGil() : thread_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(thread_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* thread_;
};

// Call visit(TensorImpl*) for each tensor in a value, in order, until it returns false. False, too, for a value that
// may hold tensors where we do not look.
template <class Visit>
bool for_each_tensor(const c10::IValue& value, Visit&& visit) {
  if (value.isTensor()) {
    const auto* impl = value.unsafeToTensorImpl();
    return impl == nullptr || !value.toTensor().defined() || visit(impl);
  }
  if (value.isTensorList()) {
    const c10::List<at::Tensor> list = value.toTensorList();
    for (size_t i = 0; i < list.size(); ++i) {
      const at::Tensor tensor = list.get(i);
      if (tensor.defined() && !visit(tensor.unsafeGetTensorImpl())) return false;
    }
    return true;
  }
  if (value.isList()) {
    for (const c10::IValue& each : value.toListRef()) {
      if (!for_each_tensor(each, visit)) return false;
    }
    return true;
  }
  return !(value.isTuple() || value.isGenericDict() || value.isObject() || value.isPyObject());
}

// Plans tell an op's allocations apart by their numbers, and were recorded with ops that came through Python. There a
// number that stands for a tensor is made into one again within the op, which is an allocation.
void count_wrapped_numbers(Dispatcher* self, const Stack& arguments) {
  uint32_t num_numbers = 0;
  for (const c10::IValue& value : arguments) {
    if (value.isTensor() && value.unsafeToTensorImpl()->is_wrapped_number()) ++num_numbers;
  }
  self->state->counted_position = self->state->position.load(std::memory_order_relaxed);
  self->state->num_counted = num_numbers;
}

// The tensors that an op has returned, as Python objects; null with an error.
PyObject* wrapped(const Stack& stack, size_t start) {
  PyObject* list = PyList_New(0);
  const auto append = [&](const at::Tensor& tensor) {
    PyObject* object = THPVariable_Wrap(tensor);
    if (object == nullptr || PyList_Append(list, object) < 0) Py_CLEAR(list);
    Py_XDECREF(object);
  };
  for (size_t i = start; i < stack.size() && list != nullptr; ++i) {
    if (stack[i].isTensor() && stack[i].toTensor().defined()) append(stack[i].toTensor());
    if (!stack[i].isTensorList()) continue;
    for (const at::Tensor& tensor : stack[i].toTensorVector()) {
      if (list != nullptr && tensor.defined()) append(tensor);
    }
  }
  return list;
}

// Tell Python what became of an op: torch makes Python objects of it once more, and `Dispatcher.__call__` sees by
// `rare` what is meant. Throws what that raised.
void tell_python(const Vtable& torchs, Dispatcher* self, const c10::OperatorHandle& op, Stack& arguments, Rare& rare) {
  self->rare = &rare;
  try {
    torchs.dispatch(op, &arguments);
  } catch (...) {
    self->rare = nullptr;
    if (!rare.is_told) throw;
    PyErr_Clear();
  }
  self->rare = nullptr;
}

// The schema by which torch's dispatcher knows the op that `func` stands for, and what calling `func` calls; owned.
struct Known {
  PyObject* call;
  const c10::FunctionSchema* schema;
};

Known known(PyObject* func) {
  Known found{nullptr, nullptr};
  PyObject* schema = PyObject_GetAttrString(func, "_schema");
  PyObject* name = schema != nullptr ? PyObject_GetAttrString(schema, "name") : nullptr;
  PyObject* overload = name != nullptr ? PyObject_GetAttrString(schema, "overload_name") : nullptr;
  const char* texts[2] = {overload != nullptr ? PyUnicode_AsUTF8(name) : nullptr,
                          overload != nullptr ? PyUnicode_AsUTF8(overload) : nullptr};
  if (texts[0] != nullptr && texts[1] != nullptr) {
    const auto op = c10::Dispatcher::singleton().findOp({texts[0], texts[1]});
    PyObject* call = PyObject_GetAttrString(func, "_op");
    if (op.has_value() && op->hasSchema() && call != nullptr) {
      found = {call, &op->schema()};
    } else {
      Py_XDECREF(call);
    }
  }
  PyErr_Clear();  // no op of torch's
  Py_XDECREF(overload);
  Py_XDECREF(name);
  Py_XDECREF(schema);
  return found;
}

}  // namespace
