// For tests: torch's CPU allocator asks the functions that torch's CUDAPluggableAllocator would ask, so that
// whole training runs go through the CUDA table where there is no GPU.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <pthread.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <unordered_set>

namespace {

void* (*g_allocate)(ssize_t, int, void*);
void (*g_free)(void*, ssize_t, int, void*);

// As CUDAPluggableAllocator has it: one entry for each address, and freeing what has none is an error. That is raised
// in a destructor there, which ends the process.
std::mutex g_mutex;
std::unordered_set<void*> g_entries;

void release(void* pointer) {
  if (pointer != nullptr) {
    std::lock_guard<std::mutex> lock(g_mutex);
    if (g_entries.erase(pointer) == 0) {
      std::fprintf(stderr, "Trying to free a pointer not allocated here\n");
      std::abort();
    }
  }
  g_free(pointer, 0, 0, nullptr);
}

class HostAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    void* pointer = g_allocate(static_cast<ssize_t>(nbytes), 0, nullptr);
    if (pointer != nullptr) {
      std::lock_guard<std::mutex> lock(g_mutex);
      g_entries.insert(pointer);
    }
    return {pointer, pointer, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* destination, const void* source, std::size_t count) const override {
    default_copy_data(destination, source, count);
  }
};

HostAllocator g_allocator;

// As the driver has it: none on any thread until it is set there, and no memory without one.
thread_local uint64_t t_context = 0;
constexpr int kInvalidContext = 201;
std::atomic<uint64_t> g_num_freed{0};

std::atomic<bool> g_fork_begins{false}, g_is_waiting{false};

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
  if (t_context == 0) return kInvalidContext;
  void* pointer = nullptr;
  if (posix_memalign(&pointer, 512, nbytes) != 0) return 2;
  *address = reinterpret_cast<uint64_t>(pointer);
  return 0;
}
EXPORT int host_memory_free(uint64_t address) {
  if (t_context == 0) return kInvalidContext;
  free(reinterpret_cast<void*>(address));
  ++g_num_freed;
  return 0;
}
EXPORT uint64_t host_memory_num_freed() { return g_num_freed; }

// In place of cuCtxSynchronize: ends a moment after a fork has begun. No Python, so that the fork may hold the GIL.
EXPORT int host_wait_for_fork() {
  pthread_atfork([] { g_fork_begins = true; }, nullptr, nullptr);
  g_is_waiting = true;
  while (!g_fork_begins) usleep(1000);
  usleep(200000);
  return 0;
}
EXPORT int host_is_waiting() { return g_is_waiting; }
EXPORT int host_unmap_nothing(uint64_t, size_t) { return 0; }

// In place of cuCtxGetCurrent and cuCtxSetCurrent.
EXPORT int host_context_get(uint64_t* context) {
  *context = t_context;
  return 0;
}
EXPORT int host_context_set(uint64_t context) {
  t_context = context;
  return 0;
}

}  // extern "C"
