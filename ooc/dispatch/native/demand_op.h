// An op of a step that runs on demand, where nothing is to be moved: what is looked at and noted before and after it,
// whichever way it came, from Python (run_on_demand.h) or as a stack of values (boxed_demand.h). What
// `OpRunner._run_on_demand` does for such an op.
#pragma once

#include <algorithm>

#include "dispatcher.h"

namespace {

// Events of the allocator that may wait before Python takes them: the log must not grow for ever.
constexpr uint64_t kMostEvents = 4096;

// An op on demand raised, or was refused memory: Python unpins its operands, and raises what explains it. `details`:
// (records pinned, addresses written, whether it raised); null with an error, which is passed on.
inline PyObject* tell_failed(const ooc::Demand& demand, PyObject* func, PyObject* args, PyObject* kwargs,
                             PyObject* details) {
  if (details == nullptr) return nullptr;
  PyObject* named = kwargs == nullptr ? Py_None : kwargs;
  return PyObject_CallFunctionObjArgs(demand.failed, func, args, named, PyTuple_GET_ITEM(details, 0),
                                      PyTuple_GET_ITEM(details, 1), PyTuple_GET_ITEM(details, 2), nullptr);
}

class DemandOp {
 public:
  enum class Start { kPythons, kError, kFails, kRuns };  // kFails: with an error, and operands that are pinned

  explicit DemandOp(Dispatcher* self) : self_(self), demand_(*self->demand), state_(self->state) {}
  DemandOp(const DemandOp&) = delete;
  DemandOp& operator=(const DemandOp&) = delete;
  ~DemandOp() {
    for (PyObject* record : records_) Py_DECREF(record);
    Py_XDECREF(where_);
    self_->stream.drop(first_);
    self_->stream.drop(last_);
  }

  // Whether Python need not look at what comes now, whatever op it is. The first ops of a recording, and one in another
  // grad mode, may begin what has a plan.
  bool may_come() {
    if (state_->num_events.load(std::memory_order_relaxed) > kMostEvents) return false;
    is_at_head_ = self_->head != ooc::Head::kNone;
    if (is_at_head_ && c10::GradMode::is_enabled() != (self_->head == ooc::Head::kTouching)) return false;
    return self_->watched_grad_mode < 0 || c10::GradMode::is_enabled() == (self_->watched_grad_mode != 0);
  }

  // How the op is called; null, maybe with an error, if it is Python's. One that is waited for may begin what has a plan.
  const ooc::OpInfo* info_of(PyObject* func) {
    if (func == self_->awaited_func || (is_at_head_ && is_a_head(func))) return nullptr;
    func_ = func;
    const ooc::OpInfo* info = demand_.info_of(func);
    return info != nullptr && info->call != nullptr ? info : nullptr;
  }

  // Whether it is to be known if the op may run again.
  bool has_kind(const ooc::OpInfo& info) const { return info.may_run_again && demand_.is_compared; }

  // False: Python tries this kind of op, which has come before.
  bool take_kind(uint64_t kind) {
    const ooc::Trial trial = self_->trials->of(kind);
    if (trial == ooc::Trial::kSeen) return false;
    if (trial == ooc::Trial::kNew) self_->trials->set(kind, ooc::Trial::kSeen);
    replayable_ = trial == ooc::Trial::kRepeats;
    return true;
  }

  // An operand of the op's: all of them in order before `has_operands`.
  bool operator()(uint64_t address) {
    addresses_.push_back(address);
    return true;
  }

  bool has_operands() {
    num_operands_ = num_noted_ = addresses_.size();
    return !is_at_head_ || num_operands_ == 0;
  }

  // Look whether nothing is to be moved; if so, pin the operands and begin. `visit_written(note)` calls note(address)
  // for all that the op writes.
  template <class VisitWritten>
  Start start(VisitWritten&& visit_written) {
    if (!demand_.lock.take()) return Start::kError;
    const uint32_t position = state_->position.load(std::memory_order_relaxed);
    index_ = position / 2;
    const bool is_ours = demand_.log != nullptr && !self_->planned && position % 2 == 0 &&
                         index_ + 1 < demand_.most_ops && demand_.is_quiet() &&
                         demand_.find_resident(addresses_, records_);
    if (is_ours && demand_.is_compared) {
      where_ = demand_.sites.of_this_op(self_->node_of);
      node_ = demand_.sites.node_number();
    } else if (is_ours) {
      where_ = PyUnicode_New(0, 0);  // the one empty text that there is
    }
    if (where_ == nullptr) {
      demand_.lock.give_back();
      return PyErr_Occurred() ? Start::kError : Start::kPythons;
    }
    demand_.pin(records_, now_ns());
    visit_written([this](uint64_t address) { return note(address, num_operands_); });
    state_->position.store(2 * index_ + 1, std::memory_order_release);
    cold_ns_ = state_->cold_ns.load(std::memory_order_relaxed);
    const bool is_behind = self_->stream.keep_up();
    if (!demand_.lock.give_back() || !is_behind) return Start::kFails;  // the op does not run: it writes nothing
    num_noted_ = addresses_.size();
    first_ = self_->stream.begin_op();
    return Start::kRuns;
  }

  // Whether the op was refused memory, and went on without.
  bool is_refused() const { return PyList_GET_SIZE(demand_.refused) != 0; }

  // The op has returned, `duration_ns` after it began. `visit_results(note)` calls note(address) for all that it has
  // returned. False: with an error, and operands that are pinned.
  template <class VisitResults>
  bool lock_and_stop(int64_t duration_ns, VisitResults&& visit_results) {
    last_ = self_->stream.end_op(first_);
    if (!demand_.lock.take()) return false;
    demand_.unpin(records_);
    visit_results([this](uint64_t address) { return note(address, num_noted_); });
    const uint64_t* addresses = addresses_.data();
    demand_.note_results(addresses + num_noted_, addresses + addresses_.size());
    demand_.note_written(addresses + num_operands_, addresses + num_noted_);
    if (demand_.log == nullptr) return true;
    if (is_at_head_ && addresses_.size() > num_noted_) {  // it has made a variable: that is a beginning, too
      self_->head = ooc::Head::kNone;
      demand_.log->has_begun = true;
    }
    const auto base = static_cast<uint32_t>(demand_.log->addresses->size());
    const auto at = [&](size_t number) { return base + static_cast<uint32_t>(number); };
    demand_.log->addresses->insert(demand_.log->addresses->end(), addresses_.begin(), addresses_.end());
    const auto more_cold_ns = static_cast<int64_t>(state_->cold_ns.load(std::memory_order_relaxed) - cold_ns_);
    demand_.log->ops->push_back({Py_NewRef(func_), std::exchange(where_, nullptr), base, at(num_operands_),
                                 at(num_noted_), at(addresses_.size()),
                                 std::max(duration_ns - more_cold_ns, int64_t{0}), replayable_, node_});
    if (last_ != nullptr) {
      demand_.log->note_time(self_->stream.stamps, std::exchange(first_, nullptr), std::exchange(last_, nullptr));
    }
    state_->position.store(2 * index_ + 2, std::memory_order_release);
    return true;
  }

  // For `tell_failed`; null with an error.
  PyObject* details(bool has_raised) const {
    PyObject* pinned = PyList_New(0);
    PyObject* written = PyList_New(0);
    for (PyObject* record : records_) {
      if (pinned != nullptr) PyList_Append(pinned, record);
    }
    for (size_t i = num_operands_; i < num_noted_ && written != nullptr; ++i) {
      PyObject* number = PyLong_FromUnsignedLongLong(addresses_[i]);
      if (number != nullptr) PyList_Append(written, number);
      Py_XDECREF(number);
    }
    PyObject* found = nullptr;
    if (pinned != nullptr && written != nullptr) {
      found = PyTuple_Pack(3, pinned, written, has_raised ? Py_True : Py_False);
    }
    Py_XDECREF(pinned);
    Py_XDECREF(written);
    return found;
  }

 private:
  // Whether a plan may begin with this function.
  bool is_a_head(PyObject* func) const {
    if (self_->heads == nullptr) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self_->heads); ++i) {
      if (PyTuple_GET_ITEM(self_->heads, i) == func) return true;
    }
    return false;
  }

  // Each address once among those from `start` on.
  bool note(uint64_t address, size_t start) {
    const auto first = addresses_.begin() + static_cast<ptrdiff_t>(start);
    if (std::find(first, addresses_.end(), address) == addresses_.end()) addresses_.push_back(address);
    return true;
  }

  Dispatcher* self_;
  ooc::Demand& demand_;
  vmm::State* state_;
  PyObject* func_ = nullptr;   // borrowed: `Demand` has it
  PyObject* where_ = nullptr;  // owned
  std::vector<PyObject*> records_;  // owned
  std::vector<uint64_t> addresses_;  // of operands, of what is written, of results
  size_t num_operands_ = 0, num_noted_ = 0;
  void *first_ = nullptr, *last_ = nullptr;  // owned: events before and after the op
  uint64_t cold_ns_ = 0;
  long long node_ = 0;
  uint32_t index_ = 0;
  bool is_at_head_ = false;
  bool replayable_ = false;
};

}  // namespace
