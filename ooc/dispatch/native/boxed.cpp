// Ops without Python: torch hands each op that reaches a dispatch mode to its Python interpreter object, as a
// stack of boxed values. We stand before that object. An op that the plan expects next, under the session's mode, is
// played from the stack: nothing is made into Python objects and taken apart again. So is one on demand that finds all
// it needs in memory (boxed_demand.h). Every other op, and whatever goes wrong with one of ours, goes on to torch's own
// object, and so to `Dispatcher.__call__`.
//
// A library of its own: it needs ATen's headers, which a small board may not have the memory to compile. Without it all
// ops go through Python. Autograd's headers take as much again: with them (OOC_SEES_NODES) the node of an op in a backward
// pass is known without making a Python object of it.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#ifdef OOC_SEES_NODES
#include <torch/csrc/autograd/function.h>
#endif

#include <atomic>
#include <exception>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "boxed_demand.h"
#include "boxed_stack.h"
#include "play.h"

namespace {

std::atomic<Dispatcher*> attached{nullptr};
std::atomic<uint64_t> attached_thread{0};

// Whether the plan's next op, with these arguments, changes what is in the arena, or may.
bool changes_large(const Dispatcher* self, const Stack& stack, size_t num_arguments) {
  const ooc::OpInfo* info = known_changes(self);
  if (info == nullptr) return true;
  const auto is_small = [&](const c10::TensorImpl* impl) {
    return for_each_storage(self, impl, [](uint64_t) { return false; });
  };
  for (const auto& [position, name] : info->written) {
    if (!for_each_tensor(stack[stack.size() - num_arguments + static_cast<size_t>(position)], is_small)) return true;
  }
  return false;
}

// Whether the plan's next op is this one, with these operands, none of a class that dispatches for itself.
bool expects(const Dispatcher* self, const c10::OperatorHandle& op, const Stack& stack, size_t num_arguments) {
  if (self->schemas == nullptr || !is_replaying(self) || self->schemas[self->cursor] == nullptr) return false;
  if (self->schemas[self->cursor] != &op.schema()) return false;
  const PlanOp& planned = self->ops[self->cursor];
  if (!is_native(planned)) return false;
  Expected expected(self, planned);
  const auto matches = [&](const c10::TensorImpl* impl) {
    return !impl->key_set().has(c10::DispatchKey::Python) && for_each_storage(self, impl, expected);
  };
  for (size_t i = stack.size() - num_arguments; i < stack.size(); ++i) {
    if (!for_each_tensor(stack[i], matches)) return false;
  }
  return expected.is_met([&] { return changes_large(self, stack, num_arguments); });
}

// What is between the two of torch's hands: the op, and what goes before and after it.
struct Played {
  Start start = Start::kRuns;
  bool stays = true;     // on the plan, after the op
  bool is_done = false;  // what goes after it, too
  std::exception_ptr error;
};

Played run_planned(Dispatcher* self, uint32_t index, const c10::OperatorHandle& op, const Stack& arguments,
                   Stack* stack) {
  Played played;
  const ModeOff off;
  const uint32_t flags = self->ops[index].flags;
  played.start = start_planned(self, index);
  if (played.start != Start::kRuns) return played;
  count_wrapped_numbers(self, arguments);
  {
    const WithoutGil released;
    try {
      op.callBoxed(stack);
    } catch (...) {
      played.error = std::current_exception();
    }
  }
  played.stays = stop_planned(self, index);
  if (!played.error && played.stays) played.is_done = finish_planned(self, index, flags);
  return played;
}

// Play the op if the plan expects it, or run it on demand where all is plain. False: it is Python's, and its stack is as
// it was.
bool play_boxed(const Vtable& torchs, const c10::OperatorHandle& op, Stack* stack) {
  Dispatcher* self = attached.load(std::memory_order_relaxed);
  if (self == nullptr || attached_thread.load(std::memory_order_relaxed) != self->this_thread()) return false;
  if (!self->planned && (self->demand == nullptr || self->demand->log == nullptr)) return false;
  const int64_t num_modes = TorchDispatchModeTLS::stack_len();
  if (num_modes == 0) return false;
  const Gil gil;
  if (self != attached.load(std::memory_order_relaxed) || self->owner == nullptr) return false;
  if (TorchDispatchModeTLS::get_stack_at(num_modes - 1)->ptr(getPyInterpreter()) != self->owner) return false;
  if (!self->planned) {
    return self->demand != nullptr && self->demand->log != nullptr && BoxedDemand::run(torchs, self, op, stack);
  }
  const size_t num_arguments = op.schema().arguments().size();
  if (!expects(self, op, *stack, num_arguments)) return false;
  Stack arguments(stack->end() - static_cast<ptrdiff_t>(num_arguments), stack->end());  // as Python's would live on
  const Section section(self);
  const uint32_t index = self->cursor;
  const Played played = run_planned(self, index, op, arguments, stack);
  if (played.start == Start::kLeft) return false;
  ++self->num_boxed;
  if (played.is_done) return true;
  Rare rare{played.error ? Rare::kFailed : Rare::kRaise, index};
  if (!played.error && !played.stays) {
    rare.result = wrapped(*stack, stack->size() - op.schema().returns().size());
    if (rare.result != nullptr) rare.kind = Rare::kFinish;
  }
  if (rare.kind == Rare::kRaise) PyErr_Fetch(&rare.type, &rare.value, &rare.traceback);
  tell_python(torchs, self, op, arguments, rare);
  if (played.error) std::rethrow_exception(played.error);
  return true;
}

// An op on its way to Python. Torch takes our mode off the stack and runs Python of its own before it calls the mode.
// What a signal or the collector calls there would use tensors unseen. So the op's critical section begins here; the
// mode's own takes over from it (`dispatcher_call`), or it ends here, where the op has not arrived.
class Underway {
 public:
  Underway() {
    Dispatcher* self = attached.load(std::memory_order_relaxed);
    if (self == nullptr || attached_thread.load(std::memory_order_relaxed) != self->this_thread()) return;
    const int64_t num_modes = TorchDispatchModeTLS::stack_len();
    if (num_modes == 0) return;
    gil_.emplace();
    if (self != attached.load(std::memory_order_relaxed) || self->owner == nullptr || self->is_underway) return;
    if (TorchDispatchModeTLS::get_stack_at(num_modes - 1)->ptr(getPyInterpreter()) != self->owner) return;
    owner_ = Py_NewRef(self->owner);  // the mode owns the dispatcher
    self_ = self;
    self->is_underway = true;
    Section::enter(self);
  }
  ~Underway() {
    if (self_ == nullptr) return;
    if (std::exchange(self_->is_underway, false)) Section::exit(self_);
    Py_DECREF(owner_);
  }
  Underway(const Underway&) = delete;
  Underway& operator=(const Underway&) = delete;

 private:
  std::optional<Gil> gil_;  // to the end
  Dispatcher* self_ = nullptr;
  PyObject* owner_ = nullptr;
};

// Which keys the tensors among an op's arguments have; none where one of them dispatches for itself, or may.
c10::DispatchKeySet keys_of(const c10::OperatorHandle& op, const Stack& stack) {
  c10::DispatchKeySet keys;
  const auto add = [&](const c10::TensorImpl* impl) {
    keys = keys | impl->key_set();
    return !impl->key_set().has(c10::DispatchKey::Python);
  };
  for (size_t i = stack.size() - op.schema().arguments().size(); i < stack.size(); ++i) {
    if (!for_each_tensor(stack[i], add)) return {};
  }
  return keys;
}

// Whether an op is made of others alone, on these tensors. Torch takes it apart before it comes to a mode, but in inference
// mode: there it is one op, which would run with all that it makes in memory, and be another one than without inference.
bool is_composite(const c10::OperatorHandle& op, const Stack& stack) {
  using Key = c10::DispatchKey;
  if (!op.hasKernelForDispatchKey(Key::CompositeImplicitAutograd) ||
      op.hasKernelForDispatchKey(Key::CompositeExplicitAutograd) ||
      op.hasKernelForDispatchKey(Key::CompositeExplicitAutogradNonFunctional)) {
    return false;
  }
  const c10::DispatchKeySet keys = keys_of(op, stack);
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, Key::Python);
  return !below.empty() && !below.has_any(c10::DispatchKeySet(Key::NestedTensor)) &&
         !op.hasKernelForAnyDispatchKey(below);
}

// Under one of our modes, on any thread: torch goes on as without. Takes apart a composite op in inference mode: true then.
bool go_on_as_outside(const c10::OperatorHandle& op, Stack* stack, ooc::AsOutside& keys) {
  Dispatcher* self = attached.load(std::memory_order_relaxed);
  const int64_t num_modes = TorchDispatchModeTLS::stack_len();
  if (self == nullptr || num_modes == 0) return false;
  const ooc::Outside* outside = self->outside;  // it lives on
  if (!outside->is_ours(*TorchDispatchModeTLS::get_stack_at(num_modes - 1))) return false;
  using c10::impl::tls_is_dispatch_key_included;
  if (c10::InferenceMode::is_enabled() && outside->is_known() && is_composite(op, *stack) &&
      !tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) {
    const c10::impl::ForceDispatchKeyGuard before(c10::impl::tls_local_dispatch_key_set().included_,
                                                  outside->excluded_keys());
    op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
    return true;
  }
  keys.begin(*outside);
  return false;
}

// What is saved for a backward pass is detached, and torch tells a mode so by a call of its own. Null: it is Python's.
c10::intrusive_ptr<c10::TensorImpl> detach_boxed(const Vtable& torchs, const c10::TensorImpl* tensor) {
  if (attached.load(std::memory_order_relaxed) == nullptr || tensor->is_wrapped_number()) return {};
  static const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::detach", "");
  auto* own = const_cast<c10::TensorImpl*>(tensor);
  Stack stack{at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(own))};
  if (!play_boxed(torchs, op, &stack)) return {};
  return stack.back().toTensor().getIntrusivePtr();
}

// Torch's own interpreter object in all but `dispatch`, and that critical sections begin where ops leave for Python.
class Interpreter final : public Vtable {
 public:
  explicit Interpreter(const Vtable* torchs) : torchs_(*torchs) {}
  const Vtable* torchs() const { return &torchs_; }

  void dispatch(const c10::OperatorHandle& op, Stack* stack) const override {
    ooc::AsOutside keys;
    if (go_on_as_outside(op, stack, keys)) return;
    if (play_boxed(torchs_, op, stack)) return;
    const Underway way;
    torchs_.dispatch(op, stack);
  }

  std::string name() const override { return torchs_.name(); }
  void incref(PyObject* object) const override { torchs_.incref(object); }
  void decref(PyObject* object) const override { torchs_.decref(object); }
  bool try_incref(const c10::impl::PyObjectSlot& slot) const override { return torchs_.try_incref(slot); }
  size_t refcnt(PyObject* object) const override { return torchs_.refcnt(object); }
  c10::intrusive_ptr<c10::TensorImpl> detach(const c10::TensorImpl* tensor) const override {
    if (auto detached = detach_boxed(torchs_, tensor)) return detached;
    const Underway way;
    return torchs_.detach(tensor);
  }
  void reportErrorCallback(PyObject* callback, c10::DispatchKey key) const override {
    torchs_.reportErrorCallback(callback, key);
  }
  void python_op_registration_trampoline(const c10::OperatorHandle& op, c10::DispatchKey key, c10::DispatchKeySet keys,
                                         Stack* stack, bool with_keyset, bool with_op) const override {
    torchs_.python_op_registration_trampoline(op, key, keys, stack, with_keyset, with_op);
  }
  void throw_abstract_impl_not_imported_error(std::string op, const char* module, const char* context) const override {
    torchs_.throw_abstract_impl_not_imported_error(std::move(op), module, context);
  }
  void python_dispatcher(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const override {
    torchs_.python_dispatcher(op, keys, stack);
  }
  bool is_contiguous(const c10::TensorImpl* tensor, at::MemoryFormat format) const override {
    return torchs_.is_contiguous(tensor, format);
  }
  c10::SymBool sym_is_contiguous(const c10::TensorImpl* tensor, at::MemoryFormat format) const override {
    return torchs_.sym_is_contiguous(tensor, format);
  }
  bool is_strides_like(const c10::TensorImpl* tensor, at::MemoryFormat format) const override {
    return torchs_.is_strides_like(tensor, format);
  }
  bool is_non_overlapping_and_dense(const c10::TensorImpl* tensor) const override {
    return torchs_.is_non_overlapping_and_dense(tensor);
  }
  c10::Device device(const c10::TensorImpl* tensor) const override { return torchs_.device(tensor); }
  int64_t dim(const c10::TensorImpl* tensor) const override { return torchs_.dim(tensor); }
  c10::IntArrayRef strides(const c10::TensorImpl* tensor) const override { return torchs_.strides(tensor); }
  c10::IntArrayRef sizes(const c10::TensorImpl* tensor) const override { return torchs_.sizes(tensor); }
  c10::SymIntArrayRef sym_sizes(const c10::TensorImpl* tensor) const override { return torchs_.sym_sizes(tensor); }
  c10::Layout layout(const c10::TensorImpl* tensor) const override { return torchs_.layout(tensor); }
  int64_t numel(const c10::TensorImpl* tensor) const override { return torchs_.numel(tensor); }
  c10::SymInt sym_numel(const c10::TensorImpl* tensor) const override { return torchs_.sym_numel(tensor); }
  c10::SymIntArrayRef sym_strides(const c10::TensorImpl* tensor) const override { return torchs_.sym_strides(tensor); }
  c10::SymInt sym_storage_offset(const c10::TensorImpl* tensor) const override {
    return torchs_.sym_storage_offset(tensor);
  }
  void trace_gpu_event_creation(c10::DeviceType device, uintptr_t event) const override {
    torchs_.trace_gpu_event_creation(device, event);
  }
  void trace_gpu_event_deletion(c10::DeviceType device, uintptr_t event) const override {
    torchs_.trace_gpu_event_deletion(device, event);
  }
  void trace_gpu_event_record(c10::DeviceType device, uintptr_t event, uintptr_t stream) const override {
    torchs_.trace_gpu_event_record(device, event, stream);
  }
  void trace_gpu_event_wait(c10::DeviceType device, uintptr_t event, uintptr_t stream) const override {
    torchs_.trace_gpu_event_wait(device, event, stream);
  }
  void trace_gpu_memory_allocation(c10::DeviceType device, uintptr_t address) const override {
    torchs_.trace_gpu_memory_allocation(device, address);
  }
  void trace_gpu_memory_deallocation(c10::DeviceType device, uintptr_t address) const override {
    torchs_.trace_gpu_memory_deallocation(device, address);
  }
  void trace_gpu_stream_creation(c10::DeviceType device, uintptr_t stream) const override {
    torchs_.trace_gpu_stream_creation(device, stream);
  }
  void trace_gpu_device_synchronization(c10::DeviceType device) const override {
    torchs_.trace_gpu_device_synchronization(device);
  }
  void trace_gpu_stream_synchronization(c10::DeviceType device, uintptr_t stream) const override {
    torchs_.trace_gpu_stream_synchronization(device, stream);
  }
  void trace_gpu_event_synchronization(c10::DeviceType device, uintptr_t event) const override {
    torchs_.trace_gpu_event_synchronization(device, event);
  }
  void reset_backward_hooks(const c10::TensorImpl* tensor) const override { torchs_.reset_backward_hooks(tensor); }

 private:
  const Vtable& torchs_;
};

// For each planned op the address of its schema, or 0 where another function is called than torch's own for it: bytes.
PyObject* schemas_of(PyObject* funcs, PyObject* calls) {
  static auto* const all = new std::unordered_map<PyObject*, Known>();  // torch's ops live as long as torch
  const Py_ssize_t n = PyList_GET_SIZE(funcs);
  std::vector<const c10::FunctionSchema*> found(static_cast<size_t>(n));
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* func = PyList_GET_ITEM(funcs, i);
    auto entry = all->find(func);
    if (entry == all->end()) entry = all->emplace(Py_NewRef(func), known(func)).first;
    if (entry->second.call == PyList_GET_ITEM(calls, i)) found[static_cast<size_t>(i)] = entry->second.schema;
  }
  const auto nbytes = n * static_cast<Py_ssize_t>(sizeof(found[0]));
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(found.data()), nbytes);
}

#ifdef OOC_SEES_NODES
// `CallSites::NodeOf`.
bool node_of(long long* number) {
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr) return false;
  *number = static_cast<long long>(node->sequence_nr());
  return true;
}
#else
constexpr ooc::CallSites::NodeOf node_of = nullptr;
#endif

void forget(Dispatcher* self) {
  self->detach = nullptr;
  self->node_of = nullptr;
  self->schemas_of = nullptr;
  self->schemas = nullptr;
}

// attach(dispatcher): ops that its plan expects are played from here, until `detach` or its end. One at a time.
PyObject* attach(PyObject*, PyObject* object) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  c10::impl::PyInterpreter* torchs = getPyInterpreter();
  // Stays for good, in torch's place only while something is attached: another thread may be about to call it.
  static const Interpreter* const ours = new Interpreter(torchs->vtable_);
  if (torchs->vtable_ != ours && torchs->vtable_ != ours->torchs()) {
    PyErr_SetString(PyExc_RuntimeError, "attach: somebody else stands before torch's interpreter");
    return nullptr;
  }
  if (Dispatcher* other = attached.exchange(self); other != nullptr && other != self) forget(other);
  attached_thread.store(self->session_thread);
  self->detach = [](Dispatcher* leaving) {
    forget(leaving);
    Dispatcher* expected = leaving;
    if (!attached.compare_exchange_strong(expected, nullptr)) return;
    c10::impl::PyInterpreter* interpreter = getPyInterpreter();
    if (interpreter->vtable_ == ours) interpreter->vtable_ = ours->torchs();
  };
  self->schemas_of = schemas_of;
  self->node_of = node_of;
  torchs->vtable_ = ours;
  Py_RETURN_NONE;
}

// detach(dispatcher): all ops go to Python again.
PyObject* detach(PyObject*, PyObject* object) {
  auto* self = reinterpret_cast<Dispatcher*>(object);
  if (auto* leave = self->detach) leave(self);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"attach", attach, METH_O, "Play the planned ops of a dispatcher without Python from now on."},
    {"detach", detach, METH_O, "Leave all of its ops to Python again."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module_def = {PyModuleDef_HEAD_INIT, "_boxed", "Planned ops without Python.", -1, methods,
                          nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__boxed(void) { return PyModule_Create(&module_def); }
