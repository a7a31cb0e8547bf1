// What goes before and after a planned op, whichever way it came: from Python (dispatch.cpp) or as a stack of values
// (boxed.cpp).
#pragma once

#include "dispatcher.h"

namespace {

// Compares the storages of an op's operands with those that the plan expects, in the plan's order. One that the plan
// expects and that is not in the arena (it fell below the threshold this time) is harmless, and so is a stranger: one
// that was allocated beside the plan in this step, and stays where it is. So is what comes again, in place of another
// that the plan expects (samples drawn with replacement). But the plan's first op that touches a variable is not the same
// op on small tensors: that may come any number of times before it. Where steps leave out ops, no op is that uses what is
// alive: a sum of small gradients would be taken for one of large ones that is left out. Nor is an op that changes
// operands surely the same with some of them: `h.add_(y)` would be taken for `y.add_(small)`, and nobody would note that y
// has changed. Python looks at what such an op really changes (`Realignment.vouch_for`).
class Expected {
 public:
  Expected(const Dispatcher* self, const PlanOp& op)
      : self_(self),
        start_(op.uses_start),
        next_(op.uses_start),
        stop_(op.uses_stop),
        flags_(op.flags),
        is_met_((op.flags & kTouches) == 0) {
    if (self_->acts != nullptr) self_->acts->forget_met();
  }

  // Whether it is the op, as far as that can be told by operands, once all of them were compared. `changes_large()` says
  // whether it changes anything in the arena now, or may; it is asked where the plan's op changes only what is small.
  template <class ChangesLarge>
  bool is_met(ChangesLarge&& changes_large) const {
    if (!is_met_ || (flags_ & kDoubted) != 0) return false;
    if (self_->vouched_for == self_->cursor + 1) return true;
    if (!has_any_) return (flags_ & kOmittable) == 0 || !has_alive();
    if ((flags_ & kHidden) != 0) return (flags_ & kChanges) == 0 && !changes_large();
    return (flags_ & kChanges) == 0 || (!has_skipped_ && next_ == stop_);
  }

  bool operator()(uint64_t address) {
    has_any_ = true;
    uint32_t next = next_;
    while (next < stop_ && !is_at(self_->uses[next], address)) ++next;
    if (next == stop_) {
      return is_met_ = comes_again(address) || (self_->acts != nullptr && self_->acts->meets_stranger(address));
    }
    has_skipped_ = has_skipped_ || next != next_;
    if (next - start_ < 64) compared_ |= uint64_t{1} << (next - start_);
    next_ = next + 1;
    return is_met_ = true;
  }

 private:
  bool is_at(uint32_t variable, uint64_t address) const {
    return self_->variable_address[variable] == address && self_->variable_alive[variable] != 0;
  }

  bool has_alive() const {
    for (uint32_t use = start_; use < stop_; ++use) {
      if (self_->variable_alive[self_->uses[use]] != 0) return true;
    }
    return false;
  }

  bool comes_again(uint64_t address) {
    for (uint32_t use = start_; use < next_ && use - start_ < 64; ++use) {
      if ((compared_ >> (use - start_) & 1) != 0 && is_at(self_->uses[use], address)) return has_skipped_ = true;
    }
    return false;
  }

  const Dispatcher* self_;
  uint32_t start_, next_, stop_, flags_;
  uint64_t compared_ = 0;  // of the first 64 operands that the plan expects, those that have come
  bool has_any_ = false, has_skipped_ = false;
  bool is_met_;
};

// Whether a plan is being replayed on this thread, and has ops left. Sets no Python error.
bool is_replaying(const Dispatcher* self) {
  return self->planned && self->cursor < self->num_ops &&
         self->this_thread() == self->state->owner_thread.load(std::memory_order_relaxed);
}

// Which arguments the plan's next op changes, if native code has that from an earlier step; null: it cannot tell.
const ooc::OpInfo* known_changes(const Dispatcher* self) {
  if (self->demand == nullptr) return nullptr;
  const ooc::OpInfo* info = self->demand->known_info(PyList_GET_ITEM(self->funcs, self->cursor));
  return info == nullptr || info->call == nullptr || info->writes_all ? nullptr : info;
}

// Whether Python need not see a planned op. At the head it does in another grad mode: something else may begin there.
bool is_native(const PlanOp& op) {
  if (op.flags & kIntercept) return false;
  return !(op.flags & kHead) || c10::GradMode::is_enabled() == ((op.flags & kGradients) != 0);
}

PyObject* call_with_index(PyObject* function, uint32_t index) {
  PyObject* number = PyLong_FromUnsignedLong(index);
  if (number == nullptr) return nullptr;
  PyObject* result = PyObject_CallOneArg(function, number);
  Py_DECREF(number);
  return result;
}

enum class Start { kError, kLeft, kRuns };

// Waits, loads and remaps before an op, and its window of planned allocations. kLeft: the step is off its plan.
Start start_planned(Dispatcher* self, uint32_t index) {
  const PlanOp op = self->ops[index];
  const auto is_expected = [&] { return self->planned && self->cursor == index; };
  using Outcome = ooc::Acts::Outcome;
  const bool has_acts = (op.flags & kBefore) != 0;
  const Outcome acts = has_acts && self->acts != nullptr ? self->acts->play(index, is_expected) : Outcome::kPythons;
  if (acts == Outcome::kError) return Start::kError;
  if (acts == Outcome::kLeft) return Start::kLeft;
  if (has_acts && acts == Outcome::kPythons) {
    PyObject* stays = call_with_index(self->before, index);
    if (stays == nullptr) return Start::kError;
    const bool left = stays == Py_False;
    Py_DECREF(stays);
    if (left) return Start::kLeft;
  }
  if (!self->stream.keep_up()) return Start::kError;
  vmm::State* state = self->state;
  state->window_next = op.allocs_start;
  state->window_stop = op.allocs_stop;
  state->position.store(2 * index + 1, std::memory_order_release);
  self->op_start_ns[index] = now_ns();
  self->op_nodes[index] = static_cast<int64_t>(at::sequence_number::peek());
  return Start::kRuns;
}

// The op has returned or raised. False: it has left the plan meanwhile.
bool stop_planned(Dispatcher* self, uint32_t index) {
  std::atomic<uint32_t>& position = self->state->position;
  if (self->planned) {
    position.store(2 * index + 2, std::memory_order_release);
  } else {  // the recording may have fewer ops than the plan
    position.store((position.load(std::memory_order_relaxed) | 1) + 1, std::memory_order_release);
  }
  if (!self->planned) return false;
  self->op_stop_ns[index] = now_ns();
  self->cursor = index + 1;
  return true;
}

// Evictions and drops after an op. False with an error.
bool finish_planned(Dispatcher* self, uint32_t index, uint32_t flags) {
  if (!(flags & kAfter)) return true;
  if (self->acts != nullptr) {
    using Outcome = ooc::Acts::Outcome;
    const auto outcome = self->acts->follow(index, [&] { return self->planned && self->cursor == index + 1; });
    if (outcome != Outcome::kPythons) return outcome != Outcome::kError;
  }
  PyObject* done = call_with_index(self->after, index);
  Py_XDECREF(done);
  return done != nullptr;
}

inline PyObject* or_none(PyObject* kwargs) { return kwargs == nullptr ? Py_None : kwargs; }

}  // namespace
