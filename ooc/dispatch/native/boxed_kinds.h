// Kinds of op (kinds.h) of what lies on torch's stack of values: the same hash that its Python objects would have.
#pragma once

#include "boxed_stack.h"
#include "kinds.h"

// Of libtorch_python, as in boxed_stack.h.
struct THPDtype;
struct THPLayout;
PyObject* THPDevice_New(const at::Device& device);
namespace torch {
THPDtype* getTHPDtype(at::ScalarType type);  // borrowed, like the next two
THPLayout* getTHPLayout(at::Layout layout);
namespace utils {
PyObject* getTHPMemoryFormat(c10::MemoryFormat format);
}
}  // namespace torch

namespace {

// One argument of an op, as torch makes a Python object of it.
struct Parameter {
  enum class Is { kDtype, kLayout, kMemoryFormat, kOther } is;
  bool named_only;
  PyObject* name;  // owned
  const c10::IValue* usual;  // its default; null: none. Torch does not hand it on.
};

inline Parameter parameter_of(const c10::Argument& argument) {
  c10::TypePtr type = argument.real_type();
  if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  Parameter::Is is = Parameter::Is::kOther;
  if (type->kind() == c10::TypeKind::ScalarTypeType) is = Parameter::Is::kDtype;
  if (type->kind() == c10::TypeKind::LayoutType) is = Parameter::Is::kLayout;
  if (type->kind() == c10::TypeKind::MemoryFormatType) is = Parameter::Is::kMemoryFormat;
  const auto& usual = argument.default_value();
  return {is, argument.kwarg_only(), PyUnicode_InternFromString(argument.name().c_str()),
          usual.has_value() ? &*usual : nullptr};
}

enum class Mixed { kDone, kNever, kUnknown };  // kNever: not run again in any case; kUnknown: only Python can tell

inline Mixed mix_object(const Dispatcher* self, PyObject* object, uint64_t& hash) {  // takes over `object`
  if (object == nullptr) PyErr_Clear();
  const bool is_mixed = object != nullptr && mix_value(self, object, hash);
  Py_XDECREF(object);
  return is_mixed ? Mixed::kDone : Mixed::kUnknown;
}

inline void mix_type(PyTypeObject& type, uint64_t& hash) { hash = mixed(hash, reinterpret_cast<uint64_t>(&type)); }

inline Mixed mix_int(int64_t number, uint64_t& hash) {
  mix_type(PyLong_Type, hash);
  hash = mixed(hash, static_cast<uint64_t>(number));
  return Mixed::kDone;
}

// A number that stands for a tensor comes to Python as a number again.
inline Mixed mix_number(const Dispatcher* self, const c10::TensorImpl* impl, uint64_t& hash) {
  switch (c10::typeMetaToScalarType(impl->dtype())) {
    case c10::ScalarType::Double:
      mix_type(PyFloat_Type, hash);
      return Mixed::kDone;
    case c10::ScalarType::Long:
      return impl->device().is_cpu() ? mix_int(*static_cast<const int64_t*>(impl->data()), hash) : Mixed::kUnknown;
    case c10::ScalarType::Bool:
      if (!impl->device().is_cpu()) return Mixed::kUnknown;
      return mix_object(self, PyBool_FromLong(*static_cast<const bool*>(impl->data())), hash);
    default:
      return Mixed::kUnknown;
  }
}

inline Mixed mix_boxed(const Dispatcher* self, const c10::IValue& value, uint64_t& hash) {
  if (value.isTensor()) {
    if (!value.toTensor().defined()) return mix_object(self, Py_NewRef(Py_None), hash);
    const auto* impl = value.unsafeToTensorImpl();
    if (impl->is_wrapped_number()) return mix_number(self, impl, hash);
    return mix_tensor(self, impl, hash) ? Mixed::kDone : Mixed::kNever;
  }
  if (value.isInt()) return mix_int(value.toInt(), hash);
  if (value.isDouble()) {
    mix_type(PyFloat_Type, hash);
    return Mixed::kDone;
  }
  if (value.isNone()) return mix_object(self, Py_NewRef(Py_None), hash);
  if (value.isBool()) return mix_object(self, PyBool_FromLong(value.toBool()), hash);
  if (value.isList()) {
    const auto values = value.toListRef();
    mix_type(PyList_Type, hash);
    hash = mixed(hash, values.size());
    for (const c10::IValue& each : values) {
      if (each.isTensor() && each.toTensor().defined() && each.unsafeToTensorImpl()->is_wrapped_number()) {
        return Mixed::kUnknown;
      }
      if (const Mixed found = mix_boxed(self, each, hash); found != Mixed::kDone) return found;
    }
    return Mixed::kDone;
  }
  if (value.isString()) return mix_object(self, PyUnicode_FromString(value.toStringRef().c_str()), hash);
  if (value.isDevice()) return mix_object(self, THPDevice_New(value.toDevice()), hash);
  return Mixed::kUnknown;
}

inline Mixed mix_argument(const Dispatcher* self, const Parameter& parameter, const c10::IValue& value,
                          uint64_t& hash) {
  if (!value.isInt() || parameter.is == Parameter::Is::kOther) return mix_boxed(self, value, hash);
  PyObject* object = nullptr;
  switch (parameter.is) {
    case Parameter::Is::kDtype:
      object = reinterpret_cast<PyObject*>(torch::getTHPDtype(static_cast<at::ScalarType>(value.toInt())));
      break;
    case Parameter::Is::kLayout:
      object = reinterpret_cast<PyObject*>(torch::getTHPLayout(static_cast<at::Layout>(value.toInt())));
      break;
    default:
      object = torch::utils::getTHPMemoryFormat(static_cast<c10::MemoryFormat>(value.toInt()));
  }
  return mix_object(self, Py_XNewRef(object), hash);
}

// Whether an argument is as it is if nobody says anything. Tensors are not compared: their default is None.
inline bool is_usual(const Parameter& parameter, const c10::IValue& value) {
  if (parameter.usual == nullptr) return false;
  if (parameter.usual->isNone() || value.isNone() || value.isTensor()) {
    return parameter.usual->isNone() && value.isNone();
  }
  return *parameter.usual == value;
}

// The kind of an op with these arguments, from `first` on, as `kind_of` finds it for its Python objects. kUnknown: it
// does not.
inline Mixed boxed_kind_of(const Dispatcher* self, PyObject* func, const std::vector<Parameter>& parameters,
                           const c10::IValue* first, uint64_t& kind) {
  kind = 0;
  size_t num_positional = 0;
  while (num_positional < parameters.size() && !parameters[num_positional].named_only) ++num_positional;
  const size_t first_named = num_positional;
  while (num_positional > 0 && is_usual(parameters[num_positional - 1], first[num_positional - 1])) --num_positional;
  uint64_t hash = mixed(self->trials->environment, reinterpret_cast<uint64_t>(func));
  mix_type(PyTuple_Type, hash);
  hash = mixed(hash, num_positional);
  for (size_t i = 0; i < num_positional; ++i) {
    if (const Mixed found = mix_argument(self, parameters[i], first[i], hash); found != Mixed::kDone) return found;
  }
  mix_type(PyDict_Type, hash);
  for (size_t i = first_named; i < parameters.size(); ++i) {
    if (is_usual(parameters[i], first[i])) continue;
    if (!mix_value(self, parameters[i].name, hash)) return Mixed::kUnknown;
    if (const Mixed found = mix_argument(self, parameters[i], first[i], hash); found != Mixed::kDone) return found;
  }
  kind = hash == 0 ? 1 : hash;
  return Mixed::kDone;
}

}  // namespace
