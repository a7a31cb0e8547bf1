// Managed memory for torch's CUDAPluggableAllocator: what a user tries first when a model does not fit. No CUDA header is
// needed: the driver's calls are looked up in its library.

#include <dlfcn.h>
#include <sys/types.h>

#include <cstdint>
#include <cstdio>

namespace {

using Allocate = int (*)(uint64_t* address, size_t nbytes, unsigned int flags);  // cuMemAllocManaged
using Free = int (*)(uint64_t address);                                         // cuMemFree_v2

constexpr unsigned int kAttachGlobal = 1;  // CU_MEM_ATTACH_GLOBAL

void* driver_call(const char* name) {
  static void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  return library != nullptr ? dlsym(library, name) : nullptr;
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) void* managed_allocate(ssize_t nbytes, int, void*) {
  static const auto allocate = reinterpret_cast<Allocate>(driver_call("cuMemAllocManaged"));
  uint64_t address = 0;
  if (nbytes <= 0 || allocate == nullptr || allocate(&address, static_cast<size_t>(nbytes), kAttachGlobal) != 0) {
    if (nbytes > 0) std::fprintf(stderr, "managed memory: %zd bytes refused\n", nbytes);
    return nullptr;
  }
  return reinterpret_cast<void*>(address);
}

__attribute__((visibility("default"))) void managed_free(void* pointer, ssize_t, int, void*) {
  static const auto release = reinterpret_cast<Free>(driver_call("cuMemFree_v2"));
  if (pointer != nullptr && release != nullptr) release(reinterpret_cast<uint64_t>(pointer));
}

}  // extern "C"
