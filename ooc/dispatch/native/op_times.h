// How long ops on demand take on a device: an event with a time stamp before and after each. The host waits for none of
// them until somebody asks. They are torch's own events, so that nothing here knows the device's driver.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdint>
#include <exception>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ooc {

// A device, and events of its own that nobody uses.
class Stamps {
 public:
  // Of one device, the same for all who ask in this library, and for as long as the process lives: at its end the driver
  // may be gone.
  static Stamps* of(c10::Device device) {
    static auto* const all = new std::unordered_map<c10::Device, Stamps>();
    return &all->try_emplace(device, device).first->second;
  }

  explicit Stamps(c10::Device device) : device_(device) {}

  // An event behind all that was issued on torch's current stream: `event`, or one that nobody uses, to be given back.
  // Null if the device refuses; then `event`, if any, stands for what it stood for.
  void* stamp(void* event = nullptr) noexcept {
    void* taken = event;
    try {
      if (taken == nullptr && !spare_.empty()) {
        taken = spare_.back();
        spare_.pop_back();
      }
      guard()->record(&taken, guard()->getStream(device_), device_.index(), c10::EventFlag::BACKEND_DEFAULT);
      return taken;
    } catch (const std::exception&) {
      if (event == nullptr) give_back(taken);
      return nullptr;
    }
  }

  void give_back(void* event) {
    if (event != nullptr) spare_.push_back(event);
  }

  int64_t elapsed_ns(void* first, void* last) const {
    return static_cast<int64_t>(guard()->elapsedTime(first, last, device_.index()) * 1e6);
  }

  // Without the GIL.
  void wait(void* event) const {
    std::exception_ptr error;
    Py_BEGIN_ALLOW_THREADS;
    try {
      guard()->synchronizeEvent(event);
    } catch (...) {
      error = std::current_exception();
    }
    Py_END_ALLOW_THREADS;
    if (error) std::rethrow_exception(error);
  }

 private:
  const c10::impl::DeviceGuardImplInterface* guard() const { return c10::impl::getDeviceGuardImpl(device_.type()); }

  c10::Device device_;
  std::vector<void*> spare_;
};

// The times of a log's ops that nobody has asked for yet.
class OpTimes {
 public:
  explicit OpTimes(Stamps* stamps) : stamps_(stamps) {}
  OpTimes(const OpTimes&) = delete;
  OpTimes& operator=(const OpTimes&) = delete;
  ~OpTimes() { give_back(pending_); }

  // Op number `op` of the log is between these events, which are ours from now on. Whether to ask soon.
  bool note(uint32_t op, void* first, void* last) {
    pending_.push_back({op, first, last});
    return pending_.size() >= kMostPending;
  }

  // Wait for the last op, and call tell(op, nanoseconds) for each that the device tells of.
  template <class Tell>
  void settle(Tell&& tell) {
    const std::vector<Pending> asked = std::exchange(pending_, {});
    if (asked.empty()) return;
    try {
      stamps_->wait(asked.back().last);
      for (const auto& [op, first, last] : asked) tell(op, stamps_->elapsed_ns(first, last));
    } catch (const std::exception&) {  // the host's times stand; what ails the device shows where it is used next
    }
    give_back(asked);
  }

 private:
  static constexpr size_t kMostPending = 4096;
  struct Pending {
    uint32_t op;
    void *first, *last;
  };

  void give_back(const std::vector<Pending>& done) {
    for (const auto& [op, first, last] : done) {
      stamps_->give_back(first);
      stamps_->give_back(last);
    }
  }

  Stamps* stamps_;
  std::vector<Pending> pending_;
};

}  // namespace ooc
