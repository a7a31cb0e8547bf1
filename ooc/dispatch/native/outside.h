// What an op's kernel calls goes through torch's dispatcher, too: another op, which the kernel is made of. Torch hands an
// op to a mode's Python with all dispatch keys switched off that come before Python, so what the op calls in there skips
// autocast, is not freed of a lazy conjugation, and, in inference mode, makes views that do not know of their base. Without
// a mode none of it is switched off that was not before. The bits differ then: nn.Bilinear's under autocast,
// torch.linalg.pinv's of complex numbers, which were plainly wrong.
//
// So an op under one of our modes runs with those switched on again that were on where torch handed it over. What was on
// there nobody tells, so it is noted: the function is replaced by which torch switches them off (imports.h), in
// libtorch_cpu. Where that cannot be, only those of conjugation and the like are switched on again, which no program
// switches off.
#pragma once

#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <cstdint>
#include <optional>

namespace ooc {

using c10::DispatchKey;
using c10::DispatchKeySet;

// Those that come before Python.
constexpr DispatchKeySet kBeforePython =
    DispatchKeySet(DispatchKeySet::FULL) ^ (DispatchKeySet(DispatchKeySet::FULL_AFTER, DispatchKey::Python) |
                                            DispatchKeySet(DispatchKey::Python));
constexpr DispatchKeySet kLazy =
    DispatchKeySet(DispatchKey::Conjugate) | DispatchKeySet(DispatchKey::Negative) |
    DispatchKeySet(DispatchKey::ZeroTensor);

// Of the thread that asks. In dispatch.cpp; another library has it from the dispatcher.
struct Outside {
  bool (*is_known)();
  uint64_t (*excluded)();  // the keys that were off where the op was handed to Python that was handed over last
  bool (*is_ours)(const c10::impl::PyObject_TorchDispatchMode&);  // one of our modes

  DispatchKeySet excluded_keys() const {
    return is_known() ? DispatchKeySet(DispatchKeySet::RAW, excluded()) : kBeforePython - kLazy;
  }
};

class AsOutside {
 public:
  AsOutside() = default;
  // The op that was handed over last runs while this lives, or more of ours.
  void begin(const Outside& outside) {
    const c10::impl::LocalDispatchKeySet now = c10::impl::tls_local_dispatch_key_set();
    DispatchKeySet wanted = kLazy | c10::autocast_dispatch_keyset;
    if (c10::InferenceMode::is_enabled()) wanted = wanted.add(DispatchKey::ADInplaceOrView);
    const DispatchKeySet more = (now.excluded_ & wanted) - outside.excluded_keys();
    if (!more.empty()) guard_.emplace(now.included_, now.excluded_ - more);
  }

 private:
  std::optional<c10::impl::ForceDispatchKeyGuard> guard_;
};

}  // namespace ooc
