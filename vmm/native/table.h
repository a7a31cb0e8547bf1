// The table of a session's large allocations: from planned reservations, or from the cold path
// (Python). Included by exactly one file of each library: allocator.cpp (torch's CPU allocator) and
// cuda_allocator.cpp (behind torch's CUDAPluggableAllocator). Against c10's headers only.
//
// Rules that hold here:
//  * The hot path (serve a planned allocation, note a free) takes no GIL and calls no Python.
//  * A free arrives on any thread, possibly long after its session has ended (oneDNN keeps
//    buffers): it is routed by address for ever, so an allocator is never uninstalled.
//  * null is never returned to torch: c10::OutOfMemoryError is thrown.
#pragma once

#include "allocator.h"

#include <c10/util/Exception.h>

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <vector>

#define VMM_EXPORT __attribute__((visibility("default")))

namespace vmm {
namespace {

State g_state;

// Per granule of the arena, at the first granule of each live variable.
uint8_t* g_alive = nullptr;
uint32_t* g_variable = nullptr;  // its index in the plan, plus 1; or 0
uint32_t* g_detached = nullptr;  // granules of a variable that outlived its session, or 0
uint8_t* g_rerun = nullptr;      // storages that re-runs have here, beside the variable's own
uint64_t* g_nbytes = nullptr;    // of a session's live variable, as requested
uint64_t g_num_granules = 0;     // of the tables above
uint64_t g_used_granules = 0;    // none behind these has had a storage yet

std::mutex g_log_mutex;
std::vector<Event>& log_events() {
  static auto* events = new std::vector<Event>();  // leaked: frees outlive static destruction
  return *events;
}

uint64_t this_thread() {
  static thread_local char marker;
  return reinterpret_cast<uint64_t>(&marker);
}

bool in_arena(uint64_t address) {
  return address >= g_state.arena_start.load(std::memory_order_relaxed) &&
         address < g_state.arena_stop.load(std::memory_order_relaxed);
}

uint64_t granule_of(uint64_t address) {
  return (address - g_state.arena_start.load(std::memory_order_relaxed)) >> kGranuleShift;
}

// Append to the log; the caller holds g_log_mutex, under which it also changes g_alive: the log's
// order is then the order in which addresses really changed hands.
void append(EventKind kind, uint64_t address, uint64_t nbytes, uint16_t ordinal = 0) {
  const uint32_t position = g_state.position.load(std::memory_order_relaxed);
  log_events().push_back(Event{address, nbytes, kind, ordinal, position});
  g_state.num_events.store(log_events().size(), std::memory_order_relaxed);
}

// Under g_log_mutex.
uint64_t copy_events(Event* out, uint64_t capacity) {
  const auto& events = log_events();
  const uint64_t count = events.size() < capacity ? events.size() : capacity;
  std::memcpy(static_cast<void*>(out), events.data(), count * sizeof(Event));
  return count;
}

// Under g_log_mutex: a storage begins at this granule.
void note_used(uint64_t granule) {
  if (granule >= g_used_granules) g_used_granules = granule + 1;
}

// Under g_log_mutex: a variable of the session begins at this granule.
void count_live(uint64_t granule, uint64_t nbytes) {
  g_nbytes[granule] = nbytes;
  const uint64_t live = g_state.live_nbytes.load(std::memory_order_relaxed) + nbytes;
  g_state.live_nbytes.store(live, std::memory_order_relaxed);
  if (live > g_state.peak_live_nbytes.load(std::memory_order_relaxed)) {
    g_state.peak_live_nbytes.store(live, std::memory_order_relaxed);
  }
}

// Under g_log_mutex: it has ended, or is its session's no more.
void uncount_live(uint64_t granule) {
  g_state.live_nbytes.fetch_sub(g_nbytes[granule], std::memory_order_relaxed);
  g_nbytes[granule] = 0;
}

// The front's: the variable at this address outlived its session and has been freed. Under g_log_mutex.
void give_back_detached(void* pointer, uint64_t nbytes);

// A free at an address of the arena. It may have been one when the caller looked, and be another session's table now.
void release_in_arena(uint64_t address) {
  std::lock_guard<std::mutex> lock(g_log_mutex);
  const uint64_t granule = granule_of(address);
  if (granule >= g_num_granules) return;
  if (g_rerun[granule] != 0) {
    --g_rerun[granule];
    g_state.num_rerun_alive.fetch_sub(1, std::memory_order_relaxed);
    return;
  }
  if (g_detached[granule] != 0) {
    const uint64_t nbytes = g_detached[granule] * kGranule;
    __atomic_store_n(&g_detached[granule], 0u, __ATOMIC_RELAXED);
    g_state.num_detached.fetch_sub(1, std::memory_order_relaxed);
    __atomic_store_n(&g_alive[granule], uint8_t{0}, __ATOMIC_RELEASE);
    give_back_detached(reinterpret_cast<void*>(address), nbytes);
    append(kFree, address, nbytes);
    return;
  }
  const uint32_t variable = g_variable[granule];
  g_variable[granule] = 0;
  if (variable != 0) {
    const PlanTables* plan = g_state.plan.load(std::memory_order_acquire);
    if (plan != nullptr && variable - 1 < plan->num_variables) {
      __atomic_store_n(&plan->variable_alive[variable - 1], uint8_t{0}, __ATOMIC_RELEASE);
    }
  }
  __atomic_store_n(&g_alive[granule], uint8_t{0}, __ATOMIC_RELEASE);
  uncount_live(granule);
  append(kFree, address, 0);
}

// Which allocation this is at the present position of the step, from 1 on; 0 on other threads than the session's.
// Called for each allocation of a session, small ones too, so that sizes near the threshold do not shift the count.
uint16_t count_allocation() {
  if (g_state.owner_thread.load(std::memory_order_relaxed) != this_thread()) return 0;
  const uint32_t position = g_state.position.load(std::memory_order_relaxed);
  if (position != g_state.counted_position) {
    g_state.counted_position = position;
    g_state.num_counted = 0;
  }
  if (g_state.num_counted < UINT16_MAX) ++g_state.num_counted;
  return static_cast<uint16_t>(g_state.num_counted);
}

// The entry of the op's window that is meant by its allocation number `ordinal`, of nbytes; `window_stop`: none. Where
// sizes do not differ from step to step, they and the order tell more than the number, which small allocations shift.
uint32_t find_planned(const PlanTables* plan, uint64_t nbytes, uint16_t ordinal) {
  if (ordinal != 0 && plan->is_elastic) {
    for (uint32_t i = g_state.window_next; i < g_state.window_stop; ++i) {
      if (plan->allocs[i].ordinal != ordinal) continue;
      return plan->allocs[i].capacity >= nbytes ? i : g_state.window_stop;  // larger than the plan's envelope
    }
  }
  for (uint32_t i = g_state.window_next; i < g_state.window_stop; ++i) {
    if (plan->allocs[i].capacity == nbytes) return i;
  }
  if (plan->is_elastic) {  // the op's only one may have another number, where the op allocates for itself
    const bool is_only = g_state.window_stop - g_state.window_next == 1;
    return is_only && plan->allocs[g_state.window_next].capacity >= nbytes ? g_state.window_next : g_state.window_stop;
  }
  // Another size than planned (data-dependent): the next entry that is large enough will do.
  for (uint32_t i = g_state.window_next; i < g_state.window_stop; ++i) {
    if (plan->allocs[i].capacity >= nbytes) return i;
  }
  return g_state.window_stop;
}

// The planned reservation for an allocation of nbytes inside the current op, or 0.
uint64_t serve_planned(uint64_t nbytes, uint16_t ordinal) {
  const PlanTables* plan = g_state.plan.load(std::memory_order_acquire);
  const uint32_t pick = find_planned(plan, nbytes, ordinal);
  if (pick == g_state.window_stop) return 0;
  const PlannedAlloc& entry = plan->allocs[pick];
  for (uint32_t i = entry.dead_start; i < entry.dead_stop; ++i) {
    if (__atomic_load_n(&plan->variable_alive[plan->must_be_dead[i]], __ATOMIC_ACQUIRE)) {
      g_state.num_late_frees.fetch_add(1, std::memory_order_relaxed);
      return 0;
    }
  }
  const uint64_t address = plan->variable_address[entry.variable];
  const uint64_t granule = granule_of(address);
  if (address == 0 || g_alive[granule]) return 0;
  g_state.window_next = pick + 1;
  g_variable[granule] = entry.variable + 1;
  plan->variable_nbytes[entry.variable] = nbytes;
  __atomic_store_n(&plan->variable_alive[entry.variable], uint8_t{1}, __ATOMIC_RELEASE);
  return address;
}

// The address for an allocation of an op that is run again, or 0. It owns nothing.
uint64_t serve_rerun(uint64_t nbytes) {
  uint32_t pick = g_state.rerun_stop;
  for (int exact = 1; exact >= 0 && pick == g_state.rerun_stop; --exact) {
    for (uint32_t i = g_state.rerun_next; i < g_state.rerun_stop; ++i) {
      const uint64_t capacity = g_state.rerun_allocs[i].capacity;
      if (exact != 0 ? capacity == nbytes : capacity >= nbytes) {
        pick = i;
        break;
      }
    }
  }
  if (pick == g_state.rerun_stop) return 0;
  RerunAlloc& entry = g_state.rerun_allocs[pick];
  entry.served = nbytes;
  g_state.rerun_next = pick + 1;
  std::lock_guard<std::mutex> lock(g_log_mutex);
  const uint64_t granule = granule_of(entry.address);
  ++g_rerun[granule];
  note_used(granule);
  g_state.num_rerun_alive.fetch_add(1, std::memory_order_relaxed);
  return entry.address;
}

// The front's: what the calling thread needs before the cold path runs on it.
void prepare_cold();

uint64_t serve_cold(uint64_t nbytes) {
  const ColdAllocate cold = g_state.cold_allocate.load(std::memory_order_acquire);
  if (cold == nullptr) return 0;
  prepare_cold();
  const auto start = std::chrono::steady_clock::now();
  const ColdAllocate quick = g_state.quick_allocate.load(std::memory_order_acquire);
  const bool is_owner = g_state.owner_thread.load(std::memory_order_relaxed) == this_thread();
  uint64_t address = quick != nullptr && is_owner ? quick(nbytes) : 0;
  if (address == 0) address = cold(nbytes);
  const auto spent = std::chrono::steady_clock::now() - start;
  g_state.cold_ns.fetch_add(std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count());
  g_state.num_cold.fetch_add(1, std::memory_order_relaxed);
  return address;
}

// Whether the calling thread runs an op again in this mode.
bool is_run_again(int32_t mode) {
  return mode == kRerun && g_state.owner_thread.load(std::memory_order_relaxed) == this_thread();
}

// A large allocation, from the plan or from the cold path, noted in the log; or kServedApart. Throws where there is
// no room.
uint64_t serve(uint64_t nbytes, int32_t mode, uint16_t ordinal) {
  uint64_t address = 0;
  if (is_run_again(mode)) {
    address = serve_rerun(nbytes);
    TORCH_CHECK_WITH(
        OutOfMemoryError, address != 0,
        "ooc: an op that is run again allocates ", nbytes, " bytes, which it did not when it ran first");
    return address;
  }
  if (mode == kPlanned && (g_state.position.load(std::memory_order_relaxed) & 1) != 0 &&
      g_state.owner_thread.load(std::memory_order_relaxed) == this_thread()) {
    address = serve_planned(nbytes, ordinal);
    if (address != 0) g_state.num_planned.fetch_add(1, std::memory_order_relaxed);
  }
  if (address == 0) address = serve_cold(nbytes);
  if (address == kServedApart) return address;
  TORCH_CHECK_WITH(
      OutOfMemoryError, address != 0,
      "ooc: cannot allocate ", nbytes, " bytes within the session's budget");
  std::lock_guard<std::mutex> lock(g_log_mutex);
  const uint64_t granule = granule_of(address);
  __atomic_store_n(&g_alive[granule], uint8_t{1}, __ATOMIC_RELEASE);
  note_used(granule);
  count_live(granule, nbytes);
  append(kAlloc, address, nbytes, ordinal);
  return address;
}

// A fork: the log's mutex must not be left locked in the child, where no session is open.
void before_fork() { g_log_mutex.lock(); }
void after_fork_in_parent() { g_log_mutex.unlock(); }
void after_fork_in_child() {
  g_log_mutex.unlock();
  g_state.mode = kOff;
  g_state.plan = nullptr;
  g_state.session_open = 0;
  g_state.cold_allocate = nullptr;
  g_state.quick_allocate = nullptr;
}

void* zeroed(uint64_t nbytes) {
  void* p = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : p;
}

// Under g_log_mutex: the variable that begins at this granule, and takes so many, has outlived its session.
void note_detached(uint64_t granule, uint32_t num_granules) {
  if (g_detached[granule] == 0) g_state.num_detached.fetch_add(1, std::memory_order_relaxed);
  g_variable[granule] = 0;
  uncount_live(granule);
  __atomic_store_n(&g_detached[granule], num_granules, __ATOMIC_RELAXED);
}

// Side tables for an arena, under g_log_mutex where frees may come. False: no address space for them.
bool make_tables(uint64_t arena_start, uint64_t arena_stop) {
  const uint64_t granules = (arena_stop - arena_start) >> kGranuleShift;
  g_alive = static_cast<uint8_t*>(zeroed(granules));
  g_variable = static_cast<uint32_t*>(zeroed(granules * sizeof(uint32_t)));
  g_detached = static_cast<uint32_t*>(zeroed(granules * sizeof(uint32_t)));
  g_rerun = static_cast<uint8_t*>(zeroed(granules));
  g_nbytes = static_cast<uint64_t*>(zeroed(granules * sizeof(uint64_t)));
  g_num_granules = granules;
  if (!g_alive || !g_variable || !g_detached || !g_rerun || !g_nbytes) return false;
  g_state.arena_start = arena_start;
  g_state.arena_stop = arena_stop;
  g_state.detached.store(g_detached, std::memory_order_relaxed);
  g_state.num_detached = 0;
  g_state.live_nbytes = 0;
  g_used_granules = 0;
  return true;
}

// Give them back, those that were made of them. Under g_log_mutex.
void drop_tables() {
  if (g_alive != nullptr) munmap(g_alive, g_num_granules);
  if (g_variable != nullptr) munmap(g_variable, g_num_granules * sizeof(uint32_t));
  if (g_detached != nullptr) munmap(g_detached, g_num_granules * sizeof(uint32_t));
  if (g_rerun != nullptr) munmap(g_rerun, g_num_granules);
  if (g_nbytes != nullptr) munmap(g_nbytes, g_num_granules * sizeof(uint64_t));
  g_alive = g_rerun = nullptr;
  g_variable = g_detached = nullptr;
  g_nbytes = nullptr;
  g_num_granules = 0;
}

}  // namespace
}  // namespace vmm

extern "C" {

VMM_EXPORT vmm::State* vmm_allocator_state() { return &vmm::g_state; }

// Copy up to `capacity` of the oldest events to `out`; returns how many. They stay in the log.
VMM_EXPORT uint64_t vmm_allocator_peek(vmm::Event* out, uint64_t capacity) {
  std::lock_guard<std::mutex> lock(vmm::g_log_mutex);
  return vmm::copy_events(out, capacity);
}

// Move up to `capacity` of the oldest events into `out`; returns how many.
VMM_EXPORT uint64_t vmm_allocator_drain(vmm::Event* out, uint64_t capacity) {
  using namespace vmm;
  std::lock_guard<std::mutex> lock(g_log_mutex);
  auto& events = log_events();
  const uint64_t count = copy_events(out, capacity);
  events.erase(events.begin(), events.begin() + count);
  g_state.num_events.store(events.size(), std::memory_order_relaxed);
  return count;
}

// Whether the storage that starts at this arena address is alive.
VMM_EXPORT int vmm_allocator_is_alive(uint64_t address) {
  return vmm::in_arena(address) ? __atomic_load_n(&vmm::g_alive[vmm::granule_of(address)], __ATOMIC_ACQUIRE) : 0;
}

// Binds the live variable at this address to a variable of the plan (-1: to none), so that its free is noted.
// Returns 0, and notes nothing, if it was freed already: whoever is given these addresses next is not bound.
// With `is_born` it is only about to be allocated there.
VMM_EXPORT int vmm_allocator_bind(uint64_t address, int64_t variable, int is_born) {
  using namespace vmm;
  const uint64_t granule = granule_of(address);
  std::lock_guard<std::mutex> lock(g_log_mutex);
  if (!g_alive[granule] && !is_born) return 0;
  g_variable[granule] = static_cast<uint32_t>(variable + 1);
  return 1;
}

// Detaches the live variable at this address from its session: it is ordinary memory of `nbytes` (whole
// granules) from now on, unmapped when it is freed. Returns 0, and notes nothing, if it was freed already.
VMM_EXPORT int vmm_allocator_detach(uint64_t address, uint64_t nbytes) {
  using namespace vmm;
  const uint64_t granule = granule_of(address);
  std::lock_guard<std::mutex> lock(g_log_mutex);
  if (!g_alive[granule]) return 0;
  note_detached(granule, static_cast<uint32_t>((nbytes + kGranule - 1) / kGranule));
  return 1;
}

// Detaches whatever is still alive and was not detached, storages of re-runs among them, so that its free is nobody
// else's: one granule each. Writes the first `capacity` addresses to `out`; returns how many there were to write.
VMM_EXPORT uint64_t vmm_allocator_detach_rest(uint64_t* out, uint64_t capacity) {
  using namespace vmm;
  std::lock_guard<std::mutex> lock(g_log_mutex);
  uint64_t count = 0;
  for (uint64_t granule = 0; granule < g_used_granules && count < capacity; ++granule) {
    if (g_detached[granule] != 0 || (g_alive[granule] == 0 && g_rerun[granule] == 0)) continue;
    if (g_alive[granule] == 0) {  // of the re-runs' storages here the last to be freed is the one that is detached
      --g_rerun[granule];
      g_state.num_rerun_alive.fetch_sub(1, std::memory_order_relaxed);
      __atomic_store_n(&g_alive[granule], uint8_t{1}, __ATOMIC_RELEASE);
    }
    note_detached(granule, 1);
    out[count++] = g_state.arena_start.load(std::memory_order_relaxed) + (granule << kGranuleShift);
  }
  return count;
}

// The storage that a re-run was given at this address, and that is still there, is a variable like any other from now
// on: its birth is logged here, its free when it comes. Returns 0, and notes nothing, if there is none.
VMM_EXPORT int vmm_allocator_adopt(uint64_t address, uint64_t nbytes) {
  using namespace vmm;
  if (!in_arena(address)) return 0;
  const uint64_t granule = granule_of(address);
  std::lock_guard<std::mutex> lock(g_log_mutex);
  if (g_rerun[granule] != 1 || g_alive[granule]) return 0;
  g_rerun[granule] = 0;
  g_state.num_rerun_alive.fetch_sub(1, std::memory_order_relaxed);
  __atomic_store_n(&g_alive[granule], uint8_t{1}, __ATOMIC_RELEASE);
  count_live(granule, nbytes);
  append(kAlloc, address, nbytes);
  return 1;
}

// A session opens: what is alive in the arena is none of its storages, and its free will take nothing off the count.
VMM_EXPORT void vmm_allocator_begin_count() {
  using namespace vmm;
  std::lock_guard<std::mutex> lock(g_log_mutex);
  if (g_state.live_nbytes != 0 && g_nbytes != nullptr) std::fill_n(g_nbytes, g_used_granules, uint64_t{0});
  g_state.live_nbytes = 0;
  g_state.peak_live_nbytes = 0;
}

VMM_EXPORT uint64_t vmm_allocator_this_thread() { return vmm::this_thread(); }

}  // extern "C"
