// Plays commands through PyTorch's real CUDA caching allocator (c10::cuda, over a fake CUDA runtime), and writes
// what torch.cuda.memory._dump_snapshot would, and the allocator's statistics, as JSON.
//
// Commands, one a line, from standard input:
//   a ID NBYTES STREAM   allocate buffer ID on CUDA stream 0 (the default), 1, 2, ...
//   f ID                 free it
//   r ID STREAM          it is also used on another stream (Tensor.record_stream)
//   d STREAM             the work of a stream is done
//   e                    empty_cache
//   p POOL / q POOL / x POOL   begin and end allocating into a torch.cuda.MemPool; release it
//   P POOL / Q POOL / X POOL   begin and end the capture of a CUDA graph with its own pool; the graph is gone
//   m FRACTION           set_per_process_memory_fraction
//   h ENTRIES            record history from here on, in a ring of so many entries
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/cuda/PeerToPeerAccess.h>

#include <cstdio>
#include <iostream>
#include <sstream>
#include <unordered_map>

extern "C" void fake_cuda_finish(cudaStream_t stream);
extern "C" void fake_cuda_capture(bool is_capturing);

// What the library that c10_cuda lies in sets when it is loaded.
namespace c10::cuda::_internal {
C10_CUDA_API void setHasPrimaryContext(bool (*)(c10::DeviceIndex));
}

using namespace c10::cuda;
namespace cca = c10::cuda::CUDACachingAllocator;

namespace {

constexpr c10::DeviceIndex kDevice = 0;

const char* name_of(cca::TraceEntry::Action action) {
  using A = cca::TraceEntry;
  switch (action) {
    case A::ALLOC: return "alloc";
    case A::FREE_REQUESTED: return "free_requested";
    case A::FREE_COMPLETED: return "free_completed";
    case A::SEGMENT_ALLOC: return "segment_alloc";
    case A::SEGMENT_FREE: return "segment_free";
    case A::SEGMENT_MAP: return "segment_map";
    case A::SEGMENT_UNMAP: return "segment_unmap";
    case A::SNAPSHOT: return "snapshot";
    case A::OOM: return "oom";
  }
  return "?";
}

CUDAStream stream_of(int number) {
  static std::unordered_map<int, CUDAStream> known;
  if (number == 0) return getDefaultCUDAStream(kDevice);
  auto found = known.find(number);
  if (found == known.end()) found = known.emplace(number, getStreamFromPool(false, kDevice)).first;
  return found->second;
}

struct Total {
  int64_t reserved, allocated, active, inactive_split, requested, retries;
};

Total totals() {
  auto s = cca::getDeviceStats(kDevice);
  return {s.reserved_bytes[0].current, s.allocated_bytes[0].current, s.active_bytes[0].current,
          s.inactive_split_bytes[0].current, s.requested_bytes[0].current, s.num_alloc_retries};
}

void write_stat(const char* name, const c10::CachingAllocator::StatArray& a) {
  std::printf("\"%s\":{\"current\":%ld,\"peak\":%ld,\"allocated\":%ld,\"freed\":%ld},", name, long(a[0].current),
              long(a[0].peak), long(a[0].allocated), long(a[0].freed));
}

}  // namespace

int main(int argc, char**) {
  const bool with_totals = argc > 1;  // after every command
  ::setenv("TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC", "0", 0);  // else it asks the (absent) NVML for links to other devices
  c10::cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex) { return true; });
  c10::cuda::detail::init_p2p_access_cache(1);
  cca::init(1);
  std::unordered_map<long, c10::DataPtr> buffers;
  std::vector<long> failed;
  std::vector<Total> after;
  std::string line;
  cca::recordHistory(true, nullptr, size_t{1} << 40, cca::RecordContext::NEVER, true, {});
  long number = 0;
  while (std::getline(std::cin, line)) {
    cca::get()->setUserMetadata(std::to_string(number++));
    std::istringstream in(line);
    std::string kind;
    in >> kind;
    if (kind == "a") {
      long id = 0, nbytes = 0;
      int stream = 0;
      in >> id >> nbytes >> stream;
      setCurrentCUDAStream(stream_of(stream));
      try {
        buffers[id] = cca::get()->allocate(nbytes);
      } catch (const c10::OutOfMemoryError&) {
        failed.push_back(id);
        buffers.erase(id);
      }
    } else if (kind == "f") {
      long id = 0;
      in >> id;
      buffers.erase(id);
    } else if (kind == "r") {
      long id = 0;
      int stream = 0;
      in >> id >> stream;
      if (buffers.count(id)) cca::recordStream(buffers[id], stream_of(stream));
    } else if (kind == "d") {
      int stream = 0;
      in >> stream;
      fake_cuda_finish(stream_of(stream).stream());
    } else if (kind == "e") {
      cca::emptyCache();
    } else if (kind == "p" || kind == "q" || kind == "x" || kind == "P" || kind == "Q" || kind == "X") {
      unsigned long long pool = 0;
      in >> pool;
      const bool graph = kind[0] < 'a';
      c10::MempoolId_t id{graph ? pool : 0, graph ? 0 : pool};
      if (kind == "x" || kind == "X") {
        cca::releasePool(kDevice, id);
      } else if (kind == "p" || kind == "P") {
        cca::beginAllocateToPool(kDevice, id, [](cudaStream_t) { return true; });
        if (graph) {
          fake_cuda_capture(true);
          cca::markCaptureBegin(kDevice);
        }
      } else {
        if (graph) {
          fake_cuda_capture(false);
          cca::markCaptureEnd(kDevice);
        }
        cca::endAllocateToPool(kDevice, id);
      }
    } else if (kind == "m") {
      double fraction = 1;
      in >> fraction;
      cca::setMemoryFraction(fraction, kDevice);
    } else if (kind == "h") {
      size_t entries = 0;
      in >> entries;
      cca::recordHistory(true, nullptr, entries, cca::RecordContext::NEVER, true, {});
    } else if (!kind.empty()) {
      std::cerr << "unknown command " << line << "\n";
      return 2;
    }
    if (with_totals) after.push_back(totals());
  }
  auto stats = cca::getDeviceStats(kDevice);
  auto snap = cca::snapshot();
  std::printf("{\"segments\":[");
  bool first = true;
  for (const auto& s : snap.segments) {
    std::printf(
        "%s{\"device\":%d,\"address\":%zu,\"total_size\":%zu,\"allocated_size\":%zu,\"active_size\":%zu,"
        "\"requested_size\":%zu,\"stream\":%lu,\"segment_type\":\"%s\",\"segment_pool_id\":[%llu,%llu],"
        "\"is_expandable\":%s,\"blocks\":[",
        first ? "" : ",", int(s.device), s.address, s.total_size, s.allocated_size, s.active_size, s.requested_size,
        reinterpret_cast<unsigned long>(s.stream), s.is_large ? "large" : "small", s.owner_private_pool_id.first,
        s.owner_private_pool_id.second, s.is_expandable ? "true" : "false");
    first = false;
    bool first_block = true;
    for (const auto& b : s.blocks) {
      std::printf("%s{\"size\":%zu,\"requested_size\":%zu,\"state\":\"%s\"}", first_block ? "" : ",", b.size,
                  b.requested_size, b.allocated ? "active_allocated" : b.active ? "active_pending_free" : "inactive");
      first_block = false;
    }
    std::printf("]}");
  }
  std::printf("],\"device_trace\":[");
  first = true;
  for (const auto& e : snap.device_traces.at(0)) {
    std::printf("%s[\"%s\",%zu,%zu,%lu,%llu,%llu,%s]", first ? "" : ",", name_of(e.action_), e.addr_, e.size_,
                reinterpret_cast<unsigned long>(e.stream_), e.mempool_.first, e.mempool_.second,
                e.user_metadata_.empty() ? "-1" : e.user_metadata_.c_str());
    first = false;
  }
  const auto& c = snap.config_metadata;
  std::printf("],\"settings\":{\"conf\":\"%s\",\"max_split_size\":%ld,\"garbage_collection_threshold\":%.17g,"
              "\"expandable_segments\":%s,\"roundup\":[",
              c.last_allocator_settings.c_str(), long(c.max_split_size), c.garbage_collection_threshold,
              c.expandable_segments ? "true" : "false");
  first = true;
  for (size_t v : c.roundup_power2_divisions) std::printf("%s%zu", first ? "" : ",", v), first = false;
  std::printf("]},\"stats\":{");
  write_stat("allocation", stats.allocation);
  write_stat("segment", stats.segment);
  write_stat("active", stats.active);
  write_stat("inactive_split", stats.inactive_split);
  write_stat("allocated_bytes", stats.allocated_bytes);
  write_stat("reserved_bytes", stats.reserved_bytes);
  write_stat("active_bytes", stats.active_bytes);
  write_stat("inactive_split_bytes", stats.inactive_split_bytes);
  write_stat("requested_bytes", stats.requested_bytes);
  std::printf("\"num_alloc_retries\":%ld,\"num_ooms\":%ld,\"num_device_alloc\":%ld,\"num_device_free\":%ld},"
              "\"failed\":[",
              long(stats.num_alloc_retries), long(stats.num_ooms), long(stats.num_device_alloc),
              long(stats.num_device_free));
  first = true;
  for (long id : failed) std::printf("%s%ld", first ? "" : ",", id), first = false;
  std::printf("],\"after\":[");
  first = true;
  for (const auto& t : after) {
    std::printf("%s[%ld,%ld,%ld,%ld,%ld,%ld]", first ? "" : ",", long(t.reserved), long(t.allocated), long(t.active),
                long(t.inactive_split), long(t.requested), long(t.retries));
    first = false;
  }
  std::printf("]}\n");
  std::fflush(stdout);
  std::_Exit(0);
}
