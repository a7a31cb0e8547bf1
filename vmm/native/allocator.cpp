// torch's CPU allocator, as a table (table.h): large allocations of a session come from planned
// reservations or from the cold path; all else goes to the allocator that was there before.
// The context pointer equals the data pointer, since oneDNN uses raw_allocate.

#include "table.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

namespace vmm {
namespace {

c10::Allocator* g_previous = nullptr;

// Its bytes are ordinary memory at the old address: unmap them.
void give_back_detached(void* pointer, uint64_t nbytes) {
  mmap(pointer, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

void prepare_cold() {}

void release(void* pointer) {
  const auto address = reinterpret_cast<uint64_t>(pointer);
  if (in_arena(address)) {
    release_in_arena(address);
  } else {
    g_previous->raw_deleter()(pointer);
  }
}

class TableAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    const int32_t mode = g_state.mode.load(std::memory_order_acquire);
    if (mode == kOff) return g_previous->allocate(nbytes);
    const uint16_t ordinal = count_allocation();
    if (nbytes < g_state.threshold.load(std::memory_order_relaxed)) return g_previous->allocate(nbytes);
    const uint64_t address = serve(nbytes, mode, ordinal);
    if (address == kServedApart) return g_previous->allocate(nbytes);
    void* pointer = reinterpret_cast<void*>(address);
    return {pointer, pointer, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* destination, const void* source, std::size_t count) const override {
    default_copy_data(destination, source, count);
  }
};

TableAllocator g_allocator;

}  // namespace
}  // namespace vmm

extern "C" {

// Install over the present CPU allocator, for an arena that lives as long as the process.
// Returns 0, or -1 when the side tables cannot be made.
VMM_EXPORT int vmm_allocator_install(uint64_t arena_start, uint64_t arena_stop) {
  using namespace vmm;
  if (g_previous != nullptr) return g_state.arena_start == arena_start && g_state.arena_stop == arena_stop ? 0 : -2;
  if (!make_tables(arena_start, arena_stop)) return -1;
  g_previous = c10::GetCPUAllocator();
  if (pthread_atfork(&before_fork, &after_fork_in_parent, &after_fork_in_child) != 0) return -1;
  c10::SetCPUAllocator(&g_allocator, 0);
  return c10::GetCPUAllocator() == &g_allocator ? 0 : -3;
}

}  // extern "C"
