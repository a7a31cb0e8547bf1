// The allocators' state, tables and log, shared with the dispatcher that replays plans (against c10 only).
//
// One process-wide table. Python reads and writes it through ctypes, so the layout is plain C.
#pragma once

#include <atomic>
#include <cstdint>

namespace vmm {

// Arena addresses are looked up per granule, whatever the chunk size of the session.
constexpr uint32_t kGranuleShift = 16;  // 64 KiB: the smallest chunk
constexpr uint64_t kGranule = uint64_t{1} << kGranuleShift;

enum Mode : int32_t {
  kOff = 0,      // no session: every allocation goes to the allocator that was there before
  kDemand = 1,   // a session: large allocations go to the cold path
  kPlanned = 2,  // a session replays a plan: inside an op the plan's table serves
  kRerun = 3,    // an op is run again: on the owner thread its own list of addresses serves, and nothing else
};

// One planned allocation of one op, in the order in which the op makes them.
struct PlannedAlloc {
  uint64_t capacity;   // bytes the plan holds for it
  uint32_t variable;   // its index in the plan
  uint32_t dead_start; // [dead_start, dead_stop) in Plan::must_be_dead
  uint32_t dead_stop;
  uint32_t ordinal;    // which of the op's allocations it was when the op was recorded (Event::ordinal)
};

// Tables of the plan being replayed; owned by Python, which keeps them alive while installed.
struct PlanTables {
  const PlannedAlloc* allocs;
  const uint32_t* must_be_dead;      // plan variables whose chunks an allocation takes over
  const uint64_t* variable_address;  // where each plan variable lives in this step
  uint8_t* variable_alive;           // 1 from its allocation to its free
  uint64_t* variable_nbytes;         // bytes of the allocation that it was last served for
  uint32_t num_variables;
  uint32_t is_elastic;               // sizes differ from step to step: a capacity tells nothing of which entry is meant
};

// One large allocation of an op that is run again, in the order in which the op makes them. What is served here is
// nobody's: when its storage is freed, nothing happens.
struct RerunAlloc {
  uint64_t capacity;  // bytes there
  uint64_t address;
  uint64_t served;    // bytes that were asked for; 0: not served yet
};

enum EventKind : uint32_t { kAlloc = 0, kFree = 1 };

// The common log: allocations and frees of large storages, by position.
struct Event {
  uint64_t address;
  uint64_t nbytes;   // of the allocation; for a free: 0, or a detached one's whole granules
  uint16_t kind;
  uint16_t ordinal;  // of an allocation on the session's thread: which one at this position, small ones counted; or 0
  uint32_t position; // State::position when it happened
};

// What a cold path returns for an allocation that is not the session's: it goes to the allocator that was there before.
constexpr uint64_t kServedApart = 1;

// Called without any lock held when the table cannot serve. Returns an address, kServedApart, or 0: no memory.
using ColdAllocate = uint64_t (*)(uint64_t nbytes);

struct State {
  // Written by Python between ops, read by the allocator.
  std::atomic<uint64_t> arena_start;
  std::atomic<uint64_t> arena_stop;
  std::atomic<uint64_t> threshold;
  std::atomic<int32_t> mode;
  std::atomic<int32_t> session_open;
  std::atomic<ColdAllocate> cold_allocate;
  std::atomic<const PlanTables*> plan;
  // The op being executed by the owner thread: its window of planned allocations.
  std::atomic<uint64_t> owner_thread;
  // Where in the step we are: 2i + 1 inside op i, 2i between op i - 1 and op i.
  std::atomic<uint32_t> position;
  uint32_t window_next;
  uint32_t window_stop;
  uint32_t reserved;
  // Statistics, only ever growing.
  std::atomic<uint64_t> num_planned;
  std::atomic<uint64_t> num_cold;
  std::atomic<uint64_t> cold_ns;
  std::atomic<uint64_t> num_late_frees;
  std::atomic<uint64_t> num_events;  // events in the log now
  // The op that is being run again (kRerun): its allocations, and how many of those served are not freed yet.
  RerunAlloc* rerun_allocs;
  uint32_t rerun_next;
  uint32_t rerun_stop;
  std::atomic<uint64_t> num_rerun_alive;
  // Allocations of any size that the owner thread has made at the present position.
  uint32_t counted_position;
  uint32_t num_counted;
  // By granule, other than 0 where a variable begins that outlived its session: ordinary memory, though in the arena.
  std::atomic<const uint32_t*> detached;
  std::atomic<uint64_t> num_detached;
  // Asked before `cold_allocate`, on the owner's thread: an address, or 0 where that is to serve. Null: nobody.
  std::atomic<ColdAllocate> quick_allocate;
  // Bytes, as requested, of the large storages that are alive, wherever their contents are; and the most at once.
  std::atomic<uint64_t> live_nbytes;
  std::atomic<uint64_t> peak_live_nbytes;
};

}  // namespace vmm
