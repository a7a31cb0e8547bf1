// Kinds of op: what ops have in common that are tried once for all before they are run again
// (ooc/replay/rerun_trials.py). A kind is a hash of the op, of the geometry of its operands and of its other arguments,
// as torch hands them to Python. boxed_kinds.h finds the same from torch's stack of values.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>

#include <cstring>
#include <unordered_map>

#include "dispatcher.h"

namespace {

constexpr uint64_t kAlignment = 64;  // of the widest vector register, and of what torch allocates

inline uint64_t mixed(uint64_t hash, uint64_t value) {
  hash ^= value + 0x9e3779b97f4a7c15ULL + (hash << 6) + (hash >> 2);
  hash ^= hash >> 31;
  return hash * 0xbf58476d1ce4e5b9ULL;
}

// False: a tensor of which no re-run could be given a stand-in.
inline bool mix_tensor(const Dispatcher* self, const c10::TensorImpl* impl, uint64_t& hash) {
  if (impl == nullptr || impl->layout() != c10::kStrided || !impl->has_storage()) return false;
  // Nested tensors have no sizes to be asked for, wrapper subclasses (the Python key) sizes of their own.
  const c10::DispatchKeySet keys = impl->key_set();
  if (keys.has(c10::DispatchKey::NestedTensor) || keys.has(c10::DispatchKey::Python)) return false;
  const c10::ScalarType type = c10::typeMetaToScalarType(impl->dtype());
  if (c10::isQIntType(type) || impl->is_conj() || impl->is_neg()) return false;
  const bool is_managed = arena_address(self, impl) != 0;
  if (!is_managed && impl->unsafe_storage().nbytes() >= self->state->threshold) return false;
  hash = mixed(hash, static_cast<uint64_t>(type) * 4 + static_cast<uint64_t>(impl->requires_grad()) * 2 + is_managed);
  // Vectorized kernels may sum in another order where memory is aligned otherwise. Variables always begin with a page;
  // a small storage may begin anywhere, and a re-run reads a copy of it.
  if (!is_managed) hash = mixed(hash, reinterpret_cast<uint64_t>(impl->unsafe_storage().data()) % kAlignment);
  for (const int64_t size : impl->sizes()) hash = mixed(hash, static_cast<uint64_t>(size));
  hash = mixed(hash, ~uint64_t{0});
  for (const int64_t stride : impl->strides()) hash = mixed(hash, static_cast<uint64_t>(stride));
  hash = mixed(hash, static_cast<uint64_t>(impl->storage_offset()));
  return true;
}

inline bool mix_value(const Dispatcher* self, PyObject* value, uint64_t& hash) {
  if (PyObject_TypeCheck(value, self->tensor_type)) {
    return self->cdata_offset >= 0 && mix_tensor(self, tensor_impl(self, value), hash);
  }
  hash = mixed(hash, reinterpret_cast<uint64_t>(Py_TYPE(value)));
  // A number that may change from step to step (a learning rate, a bias correction). Kernels, and how they divide the
  // work among threads, are chosen by types, sizes and integers; a factor only changes the values.
  if (PyFloat_Check(value)) return true;
  // Programs make a generator for each batch. A re-run draws from the state that the run has found.
  if (std::strcmp(Py_TYPE(value)->tp_name, "torch._C.Generator") == 0) return true;
  if (PyList_Check(value) || PyTuple_Check(value)) {
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(value);
    hash = mixed(hash, static_cast<uint64_t>(n));
    for (Py_ssize_t i = 0; i < n; ++i) {
      if (!mix_value(self, PySequence_Fast_GET_ITEM(value, i), hash)) return false;
    }
    return true;
  }
  if (PyDict_Check(value)) {
    PyObject *key, *each;
    Py_ssize_t position = 0;
    while (PyDict_Next(value, &position, &key, &each)) {
      if (!mix_value(self, key, hash) || !mix_value(self, each, hash)) return false;
    }
    return true;
  }
  int overflow = 1;
  const long long number = PyLong_CheckExact(value) ? PyLong_AsLongLongAndOverflow(value, &overflow) : 0;
  const auto own = overflow == 0 ? static_cast<uint64_t>(number) : static_cast<uint64_t>(PyObject_Hash(value));
  if (PyErr_Occurred()) {
    PyErr_Clear();
    return false;
  }
  hash = mixed(hash, own);
  return true;
}

// 0: an op that is not run again in any case.
inline uint64_t kind_of(const Dispatcher* self, PyObject* func, PyObject* args, PyObject* kwargs) {
  uint64_t hash = mixed(self->trials->environment, reinterpret_cast<uint64_t>(func));
  if (!mix_value(self, args, hash)) return 0;
  if (kwargs != nullptr && kwargs != Py_None && !mix_value(self, kwargs, hash)) return 0;
  return hash == 0 ? 1 : hash;
}

}  // namespace
