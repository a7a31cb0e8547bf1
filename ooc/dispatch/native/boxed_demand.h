// Ops on demand without Python: what `run_on_demand` (run_on_demand.h) does for an op that came from Python, for one that
// lies on torch's stack of values. Whatever is not plain goes on to torch's own dispatch, with the stack as it was.
// Included by boxed.cpp alone.
#pragma once

#include <exception>
#include <unordered_map>
#include <utility>
#include <vector>

#include "boxed_kinds.h"
#include "boxed_stack.h"
#include "demand_op.h"

namespace {

// What is known of an op of torch's: its Python object, which the log needs, and its schema.
struct BoxedOp {
  PyObject* func = nullptr;  // owned
  PyObject* call = nullptr;  // owned: what calling `func` calls; null: not this op
  std::vector<Parameter> parameters;
};

// The Python object that torch has for an op, borrowed; null until the op has gone through Python once.
template <class Op>
PyObject* python_op(const Op& op) {
  struct NotYet {};
  const auto not_yet = []() -> PyObject* { throw NotYet{}; };
  try {
    if constexpr (requires { op.getPythonOp(not_yet); }) {
      return op.getPythonOp(not_yet);
    } else {
      return op.getPythonOp(getPyInterpreter(), not_yet);
    }
  } catch (const NotYet&) {
    return nullptr;
  }
}

// Null: this op is Python's.
inline const BoxedOp* boxed_op(const c10::OperatorHandle& op) {
  static auto* const all = new std::unordered_map<const c10::FunctionSchema*, BoxedOp>();
  PyObject* func = python_op(op);
  if (func == nullptr) return nullptr;
  const c10::FunctionSchema& schema = op.schema();
  BoxedOp& found = (*all)[&schema];
  if (found.func != func) {  // the first time, or another op has come to lie there
    for (Parameter& parameter : found.parameters) Py_CLEAR(parameter.name);
    found.parameters.clear();
    Py_XSETREF(found.func, Py_NewRef(func));
    const Known what = known(func);
    Py_XSETREF(found.call, what.call);
    if (what.schema != &schema) Py_CLEAR(found.call);
    for (const c10::Argument& argument : schema.arguments()) found.parameters.push_back(parameter_of(argument));
  }
  return found.call != nullptr && found.parameters.size() == schema.arguments().size() ? &found : nullptr;
}

// Whether the arguments that the op writes are where Python's `written_arguments` says.
inline bool agrees(const BoxedOp& boxed, const ooc::OpInfo& info) {
  for (const auto& [position, name] : info.written) {
    if (static_cast<size_t>(position) >= boxed.parameters.size()) return false;
    if (PyUnicode_Compare(boxed.parameters[static_cast<size_t>(position)].name, name) != 0) return false;
  }
  return true;
}

// The error that is there, kept in `rare` to be raised.
inline void keep_error(Rare& rare) { PyErr_Fetch(&rare.type, &rare.value, &rare.traceback); }

class BoxedDemand {
 public:
  // Whether the op is done; else it is Python's, and its stack is as it was. Throws what it raises.
  static bool run(const Vtable& torchs, Dispatcher* self, const c10::OperatorHandle& op, Stack* stack) {
    BoxedDemand boxed(self, op, stack);
    if (!boxed.op_.may_come()) return false;
    const Section section(self);
    switch (boxed.play()) {
      case Outcome::kPythons:
        return false;
      case Outcome::kDone:
        ++self->num_boxed_demand;
        return true;
      case Outcome::kRare:
        break;
    }
    tell_python(torchs, self, op, boxed.arguments_, boxed.rare_);
    if (boxed.rare_.is_done) {
      stack->resize(boxed.num_below_);
      stack->insert(stack->end(), boxed.arguments_.begin(), boxed.arguments_.end());
      return true;
    }
    if (boxed.error_) std::rethrow_exception(boxed.error_);
    return true;
  }

 private:
  enum class Outcome { kPythons, kDone, kRare };

  BoxedDemand(Dispatcher* self, const c10::OperatorHandle& op, Stack* stack)
      : self_(self),
        handle_(op),
        stack_(stack),
        num_below_(stack->size() - op.schema().arguments().size()),
        op_(self),
        rare_(Rare::kRaise, 0) {}

  Outcome play() {
    const ModeOff off;
    const BoxedOp* boxed = boxed_op(handle_);
    if (boxed == nullptr) return Outcome::kPythons;
    const ooc::OpInfo* info = op_.info_of(boxed->func);
    if (info == nullptr) return PyErr_Occurred() ? raises() : Outcome::kPythons;
    if (info->call != boxed->call || !agrees(*boxed, *info)) return Outcome::kPythons;
    const size_t num_arguments = boxed->parameters.size();
    const c10::IValue* first = stack_->data() + (stack_->size() - num_arguments);
    const auto note = [&](const c10::TensorImpl* impl) {
      return !impl->key_set().has(c10::DispatchKey::Python) && for_each_storage(self_, impl, op_);
    };
    for (size_t i = 0; i < num_arguments; ++i) {
      if (!for_each_tensor(first[i], note)) return Outcome::kPythons;
    }
    if (op_.has_kind(*info)) {
      uint64_t kind;
      if (boxed_kind_of(self_, boxed->func, boxed->parameters, first, kind) == Mixed::kUnknown) return Outcome::kPythons;
      if (!op_.take_kind(kind)) return Outcome::kPythons;
    }
    if (!op_.has_operands()) return Outcome::kPythons;
    arguments_.assign(first, first + num_arguments);  // as Python's would live on
    switch (op_.start([&](auto&& note) { visit_written(*info, note); })) {
      case DemandOp::Start::kPythons:
        return Outcome::kPythons;
      case DemandOp::Start::kError:
        return raises();
      case DemandOp::Start::kFails:
        return fails(true);
      case DemandOp::Start::kRuns:
        break;
    }
    count_wrapped_numbers(self_, arguments_);
    const int64_t started = now_ns();
    call();
    const int64_t stopped = now_ns();
    if (error_ || op_.is_refused()) return fails(static_cast<bool>(error_));
    if (!op_.lock_and_stop(stopped - started, [&](auto&& note) { visit_results(note); })) return fails(true);
    return self_->demand->lock.give_back() ? Outcome::kDone : raises();
  }

  void call() {
    const WithoutGil released;
    try {
      handle_.callBoxed(stack_);
    } catch (...) {
      error_ = std::current_exception();
    }
  }

  Outcome raises() {
    keep_error(rare_);
    return Outcome::kRare;
  }

  // It raised, or was refused memory: Python unpins its operands. Then the op's own error stands, or its result, or
  // what there is of Python's.
  Outcome fails(bool has_raised) {
    rare_.kind = Rare::kFailedOnDemand;
    if (!error_) keep_error(rare_);
    rare_.result = op_.details(has_raised);
    return Outcome::kRare;
  }

  template <class Note>
  void visit_written(const ooc::OpInfo& info, Note&& note) const {
    const auto visit = [&](const c10::TensorImpl* impl) { return for_each_storage(self_, impl, note); };
    if (info.writes_all) {
      for (const c10::IValue& value : arguments_) for_each_tensor(value, visit);
      return;
    }
    for (const auto& [position, name] : info.written) {
      for_each_tensor(arguments_[static_cast<size_t>(position)], visit);
    }
  }

  template <class Note>
  void visit_results(Note&& note) const {
    const auto visit = [&](const c10::TensorImpl* impl) { return for_each_storage(self_, impl, note); };
    for (size_t i = stack_->size() - handle_.schema().returns().size(); i < stack_->size(); ++i) {
      for_each_tensor((*stack_)[i], visit);
    }
  }

  Dispatcher* self_;
  const c10::OperatorHandle& handle_;
  Stack* stack_;
  size_t num_below_;  // what lies there is not the op's
  Stack arguments_;
  DemandOp op_;
  Rare rare_;
  std::exception_ptr error_;
};

}  // namespace
