// Notes which dispatch keys are off where torch hands an op to Python (outside.h). Included by dispatch.cpp alone.
#pragma once

#include <new>

#include "imports.h"
#include "outside.h"
#include "unnoticed_mode.h"

namespace {

thread_local uint64_t excluded_outside = 0;

// In place of the constructor of `c10::impl::ExcludeDispatchKeyGuard`. No other code switches off just these keys.
void note_exclusion(void* guard, c10::DispatchKeySet keys) {
  if (keys == ooc::kBeforePython) excluded_outside = c10::impl::tls_local_dispatch_key_set().excluded_.raw_repr();
  new (guard) c10::impl::ExcludeDispatchKeyGuard(keys);
}

bool is_outside_known() {
  static const bool is_known =  // once: it stays for good
      replace_import("_ZN3c104impl23ExcludeDispatchKeyGuardC1ENS_14DispatchKeySetE",
                     reinterpret_cast<uintptr_t>(&note_exclusion)) > 0;
  return is_known;
}

constexpr ooc::Outside outside{is_outside_known, [] { return excluded_outside; }, is_unnoticed};

// outside_keys() -> the keys (`torch._C.DispatchKeySet.raw_repr`) that were off where the op was handed over that is under
// way on this thread; None: nobody knows.
PyObject* dispatcher_outside_keys(PyObject*, PyObject*) {
  if (!is_outside_known()) Py_RETURN_NONE;
  return PyLong_FromUnsignedLongLong(excluded_outside);
}

}  // namespace
