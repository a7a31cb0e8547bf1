// A CUDA runtime and driver without a device: memory is a count of bytes and addresses that nobody may touch.
//
// Only what c10::cuda's caching allocator calls is here; everything else reports "not supported".
// FAKE_CUDA_TOTAL      bytes of the device (default 80 GiB)
// FAKE_CUDA_AVAILABLE  of these, bytes that this process can get (default: all)
// FAKE_CUDA_ADDRESSES  cudaMalloc takes the lowest addresses that fit ("low", default), new ones always ("up"),
//                      or a random free place ("random:SEED")
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

constexpr uint64_t kPage = uint64_t{2} << 20;  // what a GPU maps memory in
constexpr uint64_t kBase = uint64_t{0x700000000000};
constexpr uint64_t kReservedBase = uint64_t{0x7e0000000000};

uint64_t environment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

struct Event {
  cudaStream_t stream = nullptr;
  uint64_t time = 0;
};

struct Device {
  uint64_t total = environment("FAKE_CUDA_TOTAL", uint64_t{80} << 30);
  uint64_t available = environment("FAKE_CUDA_AVAILABLE", total);
  uint64_t used = 0;
  std::map<uint64_t, uint64_t> taken;  // cudaMalloc's, by address
  uint64_t top = kBase;
  uint64_t reserved_top = kReservedBase;
  std::unordered_map<uint64_t, uint64_t> handles;  // cuMemCreate's
  uint64_t next_handle = 1;
  std::string addresses = std::getenv("FAKE_CUDA_ADDRESSES") ? std::getenv("FAKE_CUDA_ADDRESSES") : "low";
  std::mt19937_64 random{addresses.rfind("random:", 0) == 0 ? std::strtoull(addresses.c_str() + 7, nullptr, 10) : 0};
  uint64_t now = 1;
  std::unordered_map<cudaStream_t, uint64_t> finished;  // work recorded before this time is done
  uint64_t next_stream = 0x10000;
  cudaError_t last = cudaSuccess;
  bool is_capturing = false;
};

Device& device() {
  static Device* the = new Device;
  return *the;
}

uint64_t up(uint64_t nbytes) { return (nbytes + kPage - 1) / kPage * kPage; }

uint64_t place(uint64_t length) {
  Device& d = device();
  if (d.addresses != "up") {
    std::vector<uint64_t> fitting;
    uint64_t at = kBase;
    for (const auto& [address, size] : d.taken) {
      if (address - at >= length) fitting.push_back(at);
      at = address + size;
    }
    if (!fitting.empty() && d.addresses == "low") return fitting.front();
    if (d.addresses == "low") return at;
    fitting.push_back(at);
    fitting.push_back(at + (d.random() % 64) * kPage);
    return fitting[d.random() % fitting.size()];
  }
  uint64_t found = d.top;
  d.top += length;
  return found;
}

cudaStreamCaptureStatus capture_status() {
  return device().is_capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}

cudaError_t fail(cudaError_t error) {
  device().last = error;
  return error;
}

}  // namespace

extern "C" {

// For the program that plays a stream: all work of a stream so far is done.
void fake_cuda_finish(cudaStream_t stream) { device().finished[stream] = device().now++; }
// Whether every stream is captured into a graph.
void fake_cuda_capture(bool is_capturing) { device().is_capturing = is_capturing; }

cudaError_t cudaMalloc(void** pointer, size_t nbytes) {
  Device& d = device();
  uint64_t length = up(nbytes);
  if (d.used + length > d.available) return fail(cudaErrorMemoryAllocation);
  uint64_t address = place(length);
  d.taken[address] = length;
  d.used += length;
  *pointer = reinterpret_cast<void*>(address);
  return cudaSuccess;
}

cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  Device& d = device();
  auto found = d.taken.find(reinterpret_cast<uint64_t>(pointer));
  if (found == d.taken.end()) return fail(cudaErrorInvalidValue);
  d.used -= found->second;
  d.taken.erase(found);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = device().available - device().used;
  *total = device().total;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::memset(properties, 0, sizeof *properties);
  std::strcpy(properties->name, "no device");
  properties->totalGlobalMem = device().total;
  properties->major = 9;
  properties->multiProcessorCount = 1;
  properties->warpSize = 32;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* index) { return *index = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = 0, cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
cudaError_t cudaGetLastError() {
  cudaError_t error = device().last;
  device().last = cudaSuccess;
  return error;
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : "an error of the fake CUDA runtime";
}
const char* cudaGetErrorName(cudaError_t) { return "fake"; }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = reinterpret_cast<cudaStream_t>(device().next_stream);
  device().next_stream += 0x100;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return fake_cuda_finish(stream), cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = capture_status(), cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long*, cudaGraph_t*, const cudaGraphNode_t**,
    const cudaGraphEdgeData**, size_t*) {
  return *status = capture_status(), cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  *reinterpret_cast<Event*>(event) = {stream, device().now++};
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const auto& e = *reinterpret_cast<Event*>(event);
  return e.time <= device().finished[e.stream] ? cudaSuccess : fail(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return fake_cuda_finish(reinterpret_cast<Event*>(event)->stream), cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  return *milliseconds = 0, cudaSuccess;
}

#define NOT_SUPPORTED(NAME, ...) \
  cudaError_t NAME(__VA_ARGS__) { return fail(cudaErrorNotSupported); }
NOT_SUPPORTED(cudaGraphNodeGetDependencies, cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t*)
NOT_SUPPORTED(cudaMemPoolTrimTo, cudaMemPool_t, size_t)
NOT_SUPPORTED(cudaMemPoolGetAttribute, cudaMemPool_t, cudaMemPoolAttr, void*)
NOT_SUPPORTED(cudaMemPoolSetAttribute, cudaMemPool_t, cudaMemPoolAttr, void*)
NOT_SUPPORTED(cudaMemPoolSetAccess, cudaMemPool_t, const cudaMemAccessDesc*, size_t)
NOT_SUPPORTED(cudaIpcGetMemHandle, cudaIpcMemHandle_t*, void*)
NOT_SUPPORTED(cudaIpcOpenMemHandle, void**, cudaIpcMemHandle_t, unsigned)
NOT_SUPPORTED(cudaIpcCloseMemHandle, void*)
NOT_SUPPORTED(cudaMemcpy, void*, const void*, size_t, cudaMemcpyKind)
NOT_SUPPORTED(cudaMemcpyAsync, void*, const void*, size_t, cudaMemcpyKind, cudaStream_t)
NOT_SUPPORTED(cudaMemcpyPeerAsync, void*, int, const void*, int, size_t, cudaStream_t)
NOT_SUPPORTED(cudaDeviceGetDefaultMemPool, cudaMemPool_t*, int)
NOT_SUPPORTED(cudaFreeAsync, void*, cudaStream_t)
NOT_SUPPORTED(cudaMallocAsync, void**, size_t, cudaStream_t)
NOT_SUPPORTED(cudaDeviceEnablePeerAccess, int, unsigned)

// -- the driver, for expandable segments -----------------------------------------------------------

static CUresult unknown() { return CUDA_ERROR_NOT_SUPPORTED; }
static CUresult get_error_string(CUresult, const char** text) { return *text = "fake driver", CUDA_SUCCESS; }
static CUresult device_get(CUdevice* found, int) { return *found = 0, CUDA_SUCCESS; }
static CUresult device_attribute(int* value, CUdevice_attribute, CUdevice) { return *value = 0, CUDA_SUCCESS; }
static CUresult address_reserve(CUdeviceptr* found, size_t nbytes, size_t, CUdeviceptr, unsigned long long) {
  *found = device().reserved_top;
  device().reserved_top += up(nbytes) + (uint64_t{1} << 30);
  return CUDA_SUCCESS;
}
static CUresult address_free(CUdeviceptr, size_t) { return CUDA_SUCCESS; }
static CUresult create(CUmemGenericAllocationHandle* handle, size_t nbytes, const CUmemAllocationProp*, unsigned long long) {
  Device& d = device();
  if (d.used + nbytes > d.available) return CUDA_ERROR_OUT_OF_MEMORY;
  d.used += nbytes;
  d.handles[d.next_handle] = nbytes;
  *handle = d.next_handle++;
  return CUDA_SUCCESS;
}
static CUresult release(CUmemGenericAllocationHandle handle) {
  Device& d = device();
  d.used -= d.handles.at(handle);
  d.handles.erase(handle);
  return CUDA_SUCCESS;
}
static CUresult map(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) {
  return CUDA_SUCCESS;
}
static CUresult unmap(CUdeviceptr, size_t) { return CUDA_SUCCESS; }
static CUresult set_access(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
static CUresult granularity(size_t* nbytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  return *nbytes = kPage, CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  static const std::unordered_map<std::string, void*> known{
      {"cuGetErrorString", reinterpret_cast<void*>(&get_error_string)},
      {"cuDeviceGet", reinterpret_cast<void*>(&device_get)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(&device_attribute)},
      {"cuMemAddressReserve", reinterpret_cast<void*>(&address_reserve)},
      {"cuMemAddressFree", reinterpret_cast<void*>(&address_free)},
      {"cuMemCreate", reinterpret_cast<void*>(&create)},
      {"cuMemRelease", reinterpret_cast<void*>(&release)},
      {"cuMemMap", reinterpret_cast<void*>(&map)},
      {"cuMemUnmap", reinterpret_cast<void*>(&unmap)},
      {"cuMemSetAccess", reinterpret_cast<void*>(&set_access)},
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(&granularity)}};
  auto found = known.find(name);
  *function = found == known.end() ? reinterpret_cast<void*>(&unknown) : found->second;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

}  // extern "C"
