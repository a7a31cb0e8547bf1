// The parts of sparse tensors. A sparse tensor has no storage of its own; what it consists of has.
#pragma once

#include <c10/core/TensorImpl.h>

#include <cstring>
#include <typeinfo>

namespace {

// The members of at::SparseTensorImpl and at::SparseCsrTensorImpl, whose headers are of ATen and take seven seconds to
// compile. The same since 2021 (torch 1.9); tests/dispatch/test_sparse_operands.py compares what is found with what torch says.
using Part = const c10::TensorImpl*;  // a Tensor is one pointer to it

struct CooTensor : c10::TensorImpl {
  int64_t sparse_dim, dense_dim;
  Part indices, values;
};

struct CompressedTensor : c10::TensorImpl {
  Part compressed_indices, plain_indices, values;
};

// Whether this is an object of the class of that (mangled) name, and no wrapper that only has a sparse tensor's keys.
bool is_a(const c10::TensorImpl* impl, const char* name) { return std::strcmp(typeid(*impl).name(), name) == 0; }

// Call visit(impl) for each part of a tensor without storage, until it returns false.
template <class Visit>
bool for_each_part(const c10::TensorImpl* impl, Visit&& visit) {
  if (impl->is_sparse() && is_a(impl, "N2at16SparseTensorImplE")) {
    const auto* coo = static_cast<const CooTensor*>(impl);
    return visit(coo->indices) && visit(coo->values);
  }
  if (impl->is_sparse_compressed() && is_a(impl, "N2at19SparseCsrTensorImplE")) {
    const auto* compressed = static_cast<const CompressedTensor*>(impl);
    return visit(compressed->compressed_indices) && visit(compressed->plain_indices) &&
           visit(compressed->values);
  }
  return true;
}

}  // namespace
