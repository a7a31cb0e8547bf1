// Torch takes other formulas while a dispatch mode is on: every tensor then counts as one of a class that dispatches for
// itself (ATen/TensorSubclassLikeUtils.h), which may have no storage. The gradients of `prod` and of `masked_fill` have
// other bits then, and singular values come from another routine. Our modes compute on the tensors themselves, so nobody
// but the dispatcher need know of them: the function that torch's kernels ask is replaced, in libtorch_cpu's table of
// imported functions, by one that does not count them.
//
// But for the sums of gradients, which have the same bits either way. In place they are made where nobody else has the
// addend, and whatever passes through Python counts one more: which op comes would depend on the way that others took,
// and a step would not be like the one before. So who asks from there is told the truth (`keep_noticed`), but while no
// step is compared with another (`notice`).
//
// Included by dispatch.cpp alone. Where nothing can be replaced (imports.h) torch goes on as it does under any mode.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "imports.h"

namespace {

// Classes whose modes are not noticed; they are never freed. Read without the GIL.
std::array<std::atomic<PyTypeObject*>, 4> unnoticed_types{};

bool is_unnoticed(const c10::impl::PyObject_TorchDispatchMode& mode) {
  const PyObject* object = mode.ptr(&mode.pyinterpreter());
  for (const auto& type : unnoticed_types) {
    if (type.load(std::memory_order_acquire) == Py_TYPE(object)) return true;
  }
  return false;
}

// Where torch's code calls from that is told of any mode. Zeros at the end.
std::array<std::atomic<uintptr_t>, 8> noticed_sites{};
std::atomic<bool> is_noticed{true};  // there; else our modes are noticed nowhere
thread_local std::vector<uintptr_t>* watched_sites = nullptr;  // where this thread calls from is noted there

// In place of `c10::impl::dispatch_mode_enabled`.
__attribute__((noinline)) bool is_any_mode_noticed() {
  using c10::impl::TorchDispatchModeTLS;
  const auto site = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  if (watched_sites != nullptr) watched_sites->push_back(site);
  const int64_t num_modes = TorchDispatchModeTLS::stack_len();
  if (num_modes == 0) return false;
  for (const auto& noticed : noticed_sites) {
    if (noticed.load(std::memory_order_relaxed) == site && is_noticed.load(std::memory_order_relaxed)) return true;
  }
  for (int64_t i = 0; i < num_modes; ++i) {
    if (!is_unnoticed(*TorchDispatchModeTLS::get_stack_at(i))) return true;
  }
  return false;
}

long replace_asked() {
  static const long num_replaced =  // once: it stays for good
      replace_import("_ZN3c104impl21dispatch_mode_enabledEv", reinterpret_cast<uintptr_t>(&is_any_mode_noticed));
  return num_replaced;
}

// leave_unnoticed(type) -> bool: torch's kernels do not ask for modes of this class any more. False: they do.
PyObject* leave_unnoticed(PyObject*, PyObject* type) {
  if (!PyType_Check(type)) return PyErr_Format(PyExc_TypeError, "leave_unnoticed(%R): a class, please", type);
  auto* wanted = reinterpret_cast<PyTypeObject*>(type);
  for (auto& known : unnoticed_types) {
    PyTypeObject* present = known.load();
    if (present == wanted) return PyBool_FromLong(replace_asked() > 0);
    if (present != nullptr) continue;
    Py_INCREF(type);
    known.store(wanted, std::memory_order_release);
    return PyBool_FromLong(replace_asked() > 0);
  }
  PyErr_SetString(PyExc_RuntimeError, "leave_unnoticed: there are too many classes");
  return nullptr;
}

// sites_of(function) -> list: from where torch's kernels ask for modes while this thread calls the function.
PyObject* sites_of(PyObject*, PyObject* function) {
  std::vector<uintptr_t> sites;
  watched_sites = &sites;
  PyObject* result = PyObject_CallNoArgs(function);
  watched_sites = nullptr;
  if (result == nullptr) return nullptr;
  Py_DECREF(result);
  PyObject* found = PyList_New(0);
  for (const uintptr_t site : sites) {
    PyObject* number = found != nullptr ? PyLong_FromUnsignedLongLong(site) : nullptr;
    if (number == nullptr || PyList_Append(found, number) < 0) Py_CLEAR(found);
    Py_XDECREF(number);
  }
  return found;
}

// keep_noticed(site): who asks from there is told of any mode.
PyObject* keep_noticed(PyObject*, PyObject* number) {
  const uint64_t site = PyLong_AsUnsignedLongLong(number);
  if (PyErr_Occurred()) return nullptr;
  for (auto& known : noticed_sites) {
    uintptr_t expected = 0;
    if (known.load() == site || known.compare_exchange_strong(expected, static_cast<uintptr_t>(site))) Py_RETURN_NONE;
  }
  PyErr_SetString(PyExc_RuntimeError, "keep_noticed: there are too many");
  return nullptr;
}

// notice(whether): whether who asks from `keep_noticed`'s sites is told of our modes from now on.
PyObject* notice(PyObject*, PyObject* whether) {
  is_noticed.store(whether == Py_True, std::memory_order_relaxed);
  Py_RETURN_NONE;
}

}  // namespace
