// What is known of kinds of op (kinds.h): whether one that is run again gives the same bits.
#pragma once

#include <cstdint>
#include <unordered_map>

namespace ooc {

enum class Trial : int { kNew = -1, kSeen, kDiffers, kRepeats };

class Trials {
 public:
  uint64_t environment = 0;  // what kinds depend on beside the op and its arguments: threads, settings

  Trial of(uint64_t kind) const {
    if (kind == 0) return Trial::kDiffers;
    const auto found = known_.find(kind);
    return found == known_.end() ? Trial::kNew : found->second;
  }
  void set(uint64_t kind, Trial trial) {
    if (known_.size() < kMost) known_.insert_or_assign(kind, trial);
  }

 private:
  static constexpr size_t kMost = 1 << 20;  // of 40 bytes or so
  std::unordered_map<uint64_t, Trial> known_;
};

}  // namespace ooc
