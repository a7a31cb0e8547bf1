// What torch's CUDAPluggableAllocator calls, as a table (table.h). Large allocations of a session come
// from planned reservations or from the cold path; small ones from a heap in a part of the pool that is
// always mapped, so that they, too, are within the budget; without a session, from the driver.
//
// No CUDA header is needed: the driver calls come as pointers (vmm_cuda_install), so that all of
// this runs where there is no GPU. A stream is a pointer that nobody looks into: the session keeps all
// compute work in one chain, so memory that is freed and handed out again is in order by itself.
//
// Blocks that outlive their session stay mapped where they are, and are unmapped when they are freed.

#include "table.h"

#include <sys/types.h>

#include <iterator>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

namespace vmm {
namespace {

struct DriverCalls {
  int (*allocate)(uint64_t* address, size_t nbytes);  // cuMemAlloc_v2
  int (*free)(uint64_t address);                      // cuMemFree_v2
  int (*synchronize)();                               // cuCtxSynchronize
  int (*unmap)(uint64_t address, size_t nbytes);      // cuMemUnmap
  int (*get_context)(uint64_t* context);              // cuCtxGetCurrent
  int (*set_context)(uint64_t context);               // cuCtxSetCurrent
};

DriverCalls g_driver;
bool g_is_installed = false;
std::atomic<int> g_device{-1};  // of the open session
std::atomic<uint64_t> g_context{0};  // of the last session's device, for threads that have none; 0: no session yet
std::atomic<uint64_t> g_ended_stop{0};  // where the arena of a session that is ending stopped; 0: none is ending

// Make the session's context current on a thread that has none, as autograd's own thread for a device has (torch
// does not set a device that it takes to be set). Before any driver call. It stays: torch would set the same one.
void ensure_context() {
  uint64_t context = 0;
  if (g_driver.get_context(&context) != 0 || context != 0) return;  // what is wrong shows in the call that follows
  context = g_context.load(std::memory_order_acquire);
  if (context != 0) g_driver.set_context(context);
}

// The cold path is Python that makes driver calls.
void prepare_cold() { ensure_context(); }

constexpr uint64_t kBlock = 512;  // torch's caching allocator aligns so, and kernels rely on some of it

// Best fit, neighbours joined; of equals the lowest address, so that equal programs get equal addresses.
class Heap {
 public:
  Heap(uint64_t start, uint64_t stop) : start_(start), stop_(stop) { insert(start, stop - start); }

  bool holds(uint64_t address) const { return address >= start_ && address < stop_; }
  uint64_t start() const { return start_; }
  uint64_t nbytes() const { return stop_ - start_; }
  bool is_empty() const { return live_.empty(); }
  bool is_closed = false;  // to allocations, while its memory is elsewhere

  // Where the last live block ends.
  uint64_t used_stop() const {
    if (by_address_.empty()) return stop_;
    const auto last = std::prev(by_address_.end());
    return last->first + last->second == stop_ ? last->first : stop_;
  }

  // End it at `stop`, or behind its last live block where that is further. Where it ends now.
  uint64_t resize(uint64_t stop) {
    const uint64_t used = used_stop();
    if (stop < used) stop = used;
    if (used < stop_) erase(used, stop_ - used);
    stop_ = stop;
    if (used < stop_) insert(used, stop_ - used);
    return stop_;
  }

  // 0 where there is no room.
  uint64_t take(uint64_t nbytes) {
    if (is_closed) return 0;
    nbytes = (nbytes + kBlock - 1) / kBlock * kBlock;
    const auto found = by_size_.lower_bound({nbytes, 0});
    if (found == by_size_.end()) return 0;
    const auto [length, address] = *found;
    erase(address, length);
    if (length > nbytes) insert(address + nbytes, length - nbytes);
    live_[address] = nbytes;
    return address;
  }

  // False: nothing is alive there.
  bool give(uint64_t address) {
    const auto found = live_.find(address);
    if (found == live_.end()) return false;
    uint64_t length = found->second;
    live_.erase(found);
    const auto after = by_address_.find(address + length);
    if (after != by_address_.end()) {
      const uint64_t more = after->second;
      erase(address + length, more);
      length += more;
    }
    auto before = by_address_.lower_bound(address);
    if (before != by_address_.begin() && (--before)->first + before->second == address) {
      const auto [first, more] = *before;
      erase(first, more);
      address = first;
      length += more;
    }
    insert(address, length);
    return true;
  }

 private:
  void insert(uint64_t address, uint64_t length) {
    by_address_[address] = length;
    by_size_.insert({length, address});
  }
  void erase(uint64_t address, uint64_t length) {
    by_address_.erase(address);
    by_size_.erase({length, address});
  }

  uint64_t start_, stop_;
  std::map<uint64_t, uint64_t> by_address_;
  std::set<std::pair<uint64_t, uint64_t>> by_size_;
  std::unordered_map<uint64_t, uint64_t> live_;
};

std::mutex g_mutex;  // of all below
Heap* g_heap = nullptr;  // of the open session
std::vector<Heap*>& closed_heaps() {
  static auto* heaps = new std::vector<Heap*>();
  return *heaps;
}
// Large variables of closed sessions that are still alive: address and bytes to unmap.
std::unordered_map<uint64_t, uint64_t>& outliving() {
  static auto* found = new std::unordered_map<uint64_t, uint64_t>();
  return *found;
}

// What torch.cuda.memory_stats tells. Laid out for ctypes.
struct Count {
  uint64_t current, peak, allocated, freed;
  void add(uint64_t n) {
    current += n;
    allocated += n;
    if (current > peak) peak = current;
  }
  void remove(uint64_t n) {
    current -= n;
    freed += n;
  }
};
struct Pool {
  Count num_blocks, nbytes;
};
struct Numbers {
  Pool large, small, unmanaged;
  uint64_t num_refused;
};
Numbers g_numbers;
std::unordered_map<uint64_t, std::pair<uint64_t, Pool*>>& blocks() {
  static auto* found = new std::unordered_map<uint64_t, std::pair<uint64_t, Pool*>>();
  return *found;
}

void note_taken(uint64_t address, uint64_t nbytes, Pool* pool) {
  std::lock_guard<std::mutex> lock(g_mutex);
  blocks()[address] = {nbytes, pool};
  pool->num_blocks.add(1);
  pool->nbytes.add(nbytes);
}

void note_given(uint64_t address) {
  std::lock_guard<std::mutex> lock(g_mutex);
  const auto found = blocks().find(address);
  if (found == blocks().end()) return;
  const auto [nbytes, pool] = found->second;
  pool->num_blocks.remove(1);
  pool->nbytes.remove(nbytes);
  blocks().erase(found);
}

// Between a session's end and its memory's close: frees there still clear the mark that `outlives` looks at.
bool in_ended_arena(uint64_t address) { return address >= g_state.arena_start && address < g_ended_stop; }

void give_back_detached(void*, uint64_t) {}  // `outliving` has them: their arena may be gone

uint64_t take_small(uint64_t nbytes) {
  std::lock_guard<std::mutex> lock(g_mutex);
  return g_heap != nullptr ? g_heap->take(nbytes) : 0;
}

// Unmap what nothing uses any more. The host must have seen the end of its last use.
void unmap(uint64_t address, uint64_t nbytes) {
  ensure_context();
  if (g_driver.synchronize() == 0) g_driver.unmap(address, nbytes);  // a lost context has no mappings either
}

// Whether a small block, or a variable of a closed session, was at this address; it is no more.
bool give_to_heaps(uint64_t address) {
  std::lock_guard<std::mutex> lock(g_mutex);
  if (g_heap != nullptr && g_heap->holds(address)) return g_heap->give(address);
  auto& heaps = closed_heaps();
  for (size_t i = 0; i < heaps.size(); ++i) {
    if (!heaps[i]->holds(address)) continue;
    heaps[i]->give(address);
    if (heaps[i]->is_empty()) {
      unmap(heaps[i]->start(), heaps[i]->nbytes());
      delete heaps[i];
      heaps.erase(heaps.begin() + i);
    }
    return true;
  }
  const auto found = outliving().find(address);
  if (found == outliving().end()) return false;
  if (found->second != 0) unmap(address, found->second);
  outliving().erase(found);
  return true;
}

uint64_t take_unmanaged(uint64_t nbytes, int device) {
  if (device == g_device) ensure_context();  // another device's memory must not come from the session's context
  uint64_t address = 0;
  const int result = g_driver.allocate(&address, nbytes);
  if (result != 0) {
    std::lock_guard<std::mutex> lock(g_mutex);
    ++g_numbers.num_refused;
  }
  TORCH_CHECK_WITH(
      OutOfMemoryError, result == 0,
      "ooc: the driver cannot allocate ", nbytes, " bytes outside of a session (CUDA result ", result, ")");
  return address;
}

// A fork: neither mutex may be left locked in the child, which frees what it inherits (DataLoader workers do). No
// function takes one of them while it holds the other.
void lock_for_fork() {
  g_mutex.lock();
  before_fork();
}
void unlock_in_parent() {
  after_fork_in_parent();
  g_mutex.unlock();
}
void unlock_in_child() {
  after_fork_in_child();
  g_mutex.unlock();
}

}  // namespace
}  // namespace vmm

extern "C" {

// The driver calls. Once, before torch gets the functions below.
VMM_EXPORT int vmm_cuda_install(vmm::DriverCalls calls) {
  using namespace vmm;
  g_driver = calls;
  if (g_is_installed) return 0;
  g_is_installed = true;
  return pthread_atfork(&lock_for_fork, &unlock_in_parent, &unlock_in_child);
}

// A session begins: its arena, and the part of its pool for small blocks (always mapped, outside the arena).
// What the last session left alive was handed over by vmm_cuda_end. The calling thread's context is the session's.
VMM_EXPORT int vmm_cuda_begin(uint64_t arena_start, uint64_t arena_stop, uint64_t small_start, uint64_t small_stop,
                              int device) {
  using namespace vmm;
  {
    std::lock_guard<std::mutex> lock(g_log_mutex);
    drop_tables();
    g_ended_stop = 0;
    g_state.arena_start = g_state.arena_stop = 0;
    if (!make_tables(arena_start, arena_stop)) return -1;
  }
  std::lock_guard<std::mutex> lock(g_mutex);
  g_device = device;
  uint64_t context = 0;
  if (g_is_installed && g_driver.get_context(&context) == 0 && context != 0) g_context = context;
  g_heap = small_stop > small_start ? new Heap(small_start, small_stop) : nullptr;
  return 0;
}

// The session ends. What vmm_cuda_outlives names, and its small blocks, live on; the arena is nobody's.
// Returns whether small blocks are alive: their part of the pool must stay mapped. Called again before the
// arena's addresses are given back.
VMM_EXPORT int vmm_cuda_end() {
  using namespace vmm;
  const uint64_t stop = g_state.arena_stop;
  g_ended_stop = stop > g_state.arena_start ? stop : 0;
  g_state.arena_stop.store(g_state.arena_start.load());
  std::lock_guard<std::mutex> lock(g_mutex);
  if (g_heap == nullptr) return 0;
  const bool is_used = !g_heap->is_empty();
  if (is_used) {
    closed_heaps().push_back(g_heap);
  } else {
    delete g_heap;
  }
  g_heap = nullptr;
  return is_used;
}

// A large variable outlives its session: `nbytes` are to be unmapped at its address when it is freed. Returns 0
// where it was freed a moment ago, before this was known, so that nobody will.
VMM_EXPORT int vmm_cuda_outlives(uint64_t address, uint64_t nbytes) {
  using namespace vmm;
  {
    std::lock_guard<std::mutex> lock(g_mutex);
    outliving()[address] = nbytes;
  }
  // Noted first and looked at then, while a free marks first and looks at what is noted then: one sees the other.
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  if (__atomic_load_n(&g_alive[granule_of(address)], __ATOMIC_ACQUIRE)) return 1;
  std::lock_guard<std::mutex> lock(g_mutex);
  return outliving().erase(address) == 0;  // else who freed it has seen the note and unmapped it
}

// Note of whatever else is alive in the arena that nothing is to be unmapped when it is freed: the session is done with
// it. Returns how many there are; their addresses must stay nobody's.
VMM_EXPORT uint64_t vmm_cuda_abandon() {
  using namespace vmm;
  std::vector<uint64_t> found;
  {
    std::lock_guard<std::mutex> lock(g_log_mutex);
    for (uint64_t granule = 0; granule < g_used_granules; ++granule) {
      if (g_alive[granule] == 0 && g_rerun[granule] == 0) continue;
      found.push_back(g_state.arena_start.load() + (granule << kGranuleShift));
    }
  }
  std::lock_guard<std::mutex> lock(g_mutex);
  for (const uint64_t address : found) outliving().emplace(address, 0);
  return found.size();
}

// End the part for small blocks at `stop`, or behind its last live block where that is further. Returns where it ends.
VMM_EXPORT uint64_t vmm_cuda_resize_small(uint64_t stop) {
  std::lock_guard<std::mutex> lock(vmm::g_mutex);
  return vmm::g_heap != nullptr ? vmm::g_heap->resize(stop) : 0;
}

// Where the last live small block ends.
VMM_EXPORT uint64_t vmm_cuda_small_used() {
  std::lock_guard<std::mutex> lock(vmm::g_mutex);
  return vmm::g_heap != nullptr ? vmm::g_heap->used_stop() : 0;
}

// Whether small blocks may be allocated.
VMM_EXPORT void vmm_cuda_close_small(int is_closed) {
  std::lock_guard<std::mutex> lock(vmm::g_mutex);
  if (vmm::g_heap != nullptr) vmm::g_heap->is_closed = is_closed != 0;
}

VMM_EXPORT vmm::Numbers* vmm_cuda_numbers() { return &vmm::g_numbers; }

VMM_EXPORT void vmm_cuda_reset_peaks() {
  std::lock_guard<std::mutex> lock(vmm::g_mutex);
  for (vmm::Pool* pool : {&vmm::g_numbers.large, &vmm::g_numbers.small, &vmm::g_numbers.unmanaged}) {
    pool->num_blocks.peak = pool->num_blocks.current;
    pool->nbytes.peak = pool->nbytes.current;
  }
}

VMM_EXPORT void* vmm_cuda_allocate(ssize_t size, int device, void*) {
  using namespace vmm;
  if (size <= 0) return nullptr;
  const auto nbytes = static_cast<uint64_t>(size);
  const int32_t mode = g_state.mode.load(std::memory_order_acquire);
  uint64_t address = 0;
  Pool* pool = &g_numbers.unmanaged;
  TORCH_CHECK(
      mode == kOff || device == g_device, "ooc: the open session is on CUDA device ", g_device.load(),
      "; an allocation of ", size, " bytes on device ", device, " is outside of its budget. Options: "
      "torch.cuda.set_device(", g_device.load(), "); CUDA_VISIBLE_DEVICES");
  if (mode == kOff) {
    address = take_unmanaged(nbytes, device);
  } else {
    const uint16_t ordinal = count_allocation();
    const bool is_small = nbytes < g_state.threshold.load(std::memory_order_relaxed);
    if (is_small) address = take_small(nbytes);
    // What an op that is run again gets for its variables must not go to a small block.
    TORCH_CHECK_WITH(
        OutOfMemoryError, address != 0 || !is_small || !is_run_again(mode),
        "ooc: an op that is run again allocates ", nbytes, " bytes, for which the part for small blocks has no room");
    pool = address != 0 ? &g_numbers.small : is_run_again(mode) ? nullptr : &g_numbers.large;
    if (address == 0) {  // also a small one for which the heap has no room: whole chunks, but within the budget
      try {
        address = serve(nbytes, mode, ordinal);
      } catch (const c10::OutOfMemoryError&) {
        std::lock_guard<std::mutex> lock(g_mutex);
        ++g_numbers.num_refused;
        throw;
      }
    }
  }
  if (pool != nullptr) note_taken(address, nbytes, pool);  // else the bytes are a variable's, which is counted
  return reinterpret_cast<void*>(address);
}

// A block of the heap, whatever its size, for another library; 0 where there is no room. Freed as any other.
VMM_EXPORT uint64_t vmm_cuda_take(uint64_t nbytes) {
  const uint64_t address = vmm::take_small(nbytes);
  if (address != 0) vmm::note_taken(address, nbytes, &vmm::g_numbers.small);
  return address;
}

VMM_EXPORT void vmm_cuda_free(void* pointer, ssize_t, int, void*) {
  using namespace vmm;
  if (pointer == nullptr) return;
  const auto address = reinterpret_cast<uint64_t>(pointer);
  note_given(address);
  if (give_to_heaps(address)) return;
  if (in_arena(address) || in_ended_arena(address)) {
    release_in_arena(address);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    give_to_heaps(address);  // if it was named as outliving its session meanwhile
  } else {
    ensure_context();
    g_driver.free(address);
  }
}

}  // extern "C"
