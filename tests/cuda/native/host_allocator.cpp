// For tests: torch's CPU allocator asks the functions that torch's CUDAPluggableAllocator would ask, so that
// whole training runs go through the CUDA table where there is no GPU.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <sys/types.h>

#include <cstdint>
#include <cstdlib>

namespace {

void* (*g_allocate)(ssize_t, int, void*);
void (*g_free)(void*, ssize_t, int, void*);

void release(void* pointer) { g_free(pointer, 0, 0, nullptr); }

class HostAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    void* pointer = g_allocate(static_cast<ssize_t>(nbytes), 0, nullptr);
    return {pointer, pointer, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* destination, const void* source, std::size_t count) const override {
    default_copy_data(destination, source, count);
  }
};

HostAllocator g_allocator;

}  // namespace

#define EXPORT __attribute__((visibility("default")))

extern "C" {

EXPORT void host_install(uint64_t allocate, uint64_t free_) {
  g_allocate = reinterpret_cast<decltype(g_allocate)>(allocate);
  g_free = reinterpret_cast<decltype(g_free)>(free_);
  c10::SetCPUAllocator(&g_allocator, 1);
}

// In place of cuMemAlloc and cuMemFree.
EXPORT int host_memory_allocate(uint64_t* address, size_t nbytes) {
  void* pointer = nullptr;
  if (posix_memalign(&pointer, 512, nbytes) != 0) return 2;
  *address = reinterpret_cast<uint64_t>(pointer);
  return 0;
}
EXPORT int host_memory_free(uint64_t address) {
  free(reinterpret_cast<void*>(address));
  return 0;
}

}  // extern "C"
