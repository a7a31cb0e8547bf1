// Serves a stray touch of a variable that is away: a SIGSEGV handler over a table of guarded ranges.
//
// A variable that is away is always in the store's file. A guarded range shows nothing (PROT_NONE);
// the first touch maps the variable's part of the file over it, shared and writable, and the touch
// is tried again: from then on the kernel serves it from the page cache. Nothing is copied here, no
// memory of the pool is needed, and no lock, no GIL and no allocation.
//
// Rules:
//  * The handler calls only mmap, madvise, nanosleep, sched_yield, write, getpid, sigaction, raise:
//    all safe in a handler. It reads and changes the table by atomic operations alone.
//  * Python, one thread at a time, fills entries and takes them out; any thread may fault meanwhile.
//  * A fault for which there is no entry may have lost a race with Python, which just made the range
//    accessible. It is tried again once for each state of the table; then it is genuine.
//  * Everything else goes to the handler that was there before (faulthandler's, or the default).
//
// Memory that was given out may be written by any thread at any time, also while it is moved to or from the file. So
// it is moved still (`vmm_faults_move`): meanwhile a write waits in the handler, and is made again when it is over.
//
// Spoken to from vmm/faults.py through ctypes; knows neither Python nor torch.

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <atomic>

#define OOC_API extern "C" __attribute__((visibility("default")))

namespace {

enum State : uint32_t {
  kFree = 0,
  kPreparing = 1,  // Python is about to protect the range, or to make it accessible again
  kGuarded = 2,    // a touch is served
  kServing = 3,    // a handler is mapping the file
  kServed = 4,     // the range shows the file
  kMoving = 5,     // it may be read and not written, until it shows something else
};

struct Entry {
  std::atomic<uint32_t> state;
  std::atomic<uint64_t> address, nbytes;  // of the variable, whole pages
  std::atomic<uint64_t> span_nbytes;      // of the whole reservation
  std::atomic<uint64_t> offset;           // in the file
  std::atomic<int64_t> ticket;            // of a write to the file that must be over first; 0: none
};

// The layouts are repeated in vmm/faults.py.
struct Move {
  int64_t (*submit)(void*, int, int, int64_t, int, const uint64_t*, int, const int64_t*, int);
  int64_t (*wait)(void*, int64_t, int64_t);
  void* engine;
  const uint64_t* segments;
  int64_t offset;
  int32_t num_segments, kind, descriptor, flags;
};

struct Shown {  // by one call of mmap
  int64_t address, nbytes, prot, flags, descriptor, offset;
};

constexpr uint32_t kCapacity = 1 << 16;
constexpr int64_t kWaitNs = 1000000000;
constexpr int64_t kNapNs = 20000;

Entry g_entries[kCapacity];
std::atomic<uint32_t> g_num_used{0};  // entries from here on were never used
std::atomic<uint64_t> g_version{0};   // changes whenever a range may have become accessible
std::atomic<uint64_t> g_arena_start{0}, g_arena_stop{0};
std::atomic<int> g_descriptor{-1};
std::atomic<int> g_is_serving{0};
std::atomic<pid_t> g_owner{0};
std::atomic<const std::atomic<int64_t>*> g_finished{nullptr};  // see ooc_transfers_finished
std::atomic<uint64_t> g_finished_mask{0};
std::atomic<uint64_t> g_num_served{0};

struct sigaction g_previous;
std::atomic<int> g_is_installed{0};

// Initial-exec: a lazily allocated thread-local would call malloc inside the handler.
__attribute__((tls_model("initial-exec"))) thread_local uint64_t t_last_address = 0;
__attribute__((tls_model("initial-exec"))) thread_local uint64_t t_last_version = ~uint64_t{0};
__attribute__((tls_model("initial-exec"))) thread_local int t_is_chaining = 0;

void nap() {
  timespec t{0, kNapNs};
  nanosleep(&t, nullptr);
}

void say(const char* text) {
  ssize_t ignored = write(2, text, strlen(text));
  (void)ignored;
}

void say_hex(uint64_t value) {
  char digits[19] = "0x";
  int n = 2;
  bool begun = false;
  for (int shift = 60; shift >= 0; shift -= 4) {
    const int digit = (value >> shift) & 15;
    begun = begun || digit || shift == 0;
    if (begun) digits[n++] = "0123456789abcdef"[digit];
  }
  digits[n] = 0;
  say(digits);
}

// 1: over, well; 0: not yet; -1: failed, the file does not hold the bytes.
int write_is_over(int64_t ticket) {
  if (ticket == 0) return 1;
  const auto* finished = g_finished.load(std::memory_order_acquire);
  if (finished == nullptr) return -1;
  const int64_t last = finished[uint64_t(ticket) & g_finished_mask.load(std::memory_order_relaxed)].load(
      std::memory_order_acquire);
  if (last == -ticket) return -1;
  return last >= ticket || last < -ticket ? 1 : 0;
}

enum class Outcome { kTryAgain, kNotOurs };

Outcome serve_entry(Entry& entry, uint64_t address) {
  switch (entry.state.load(std::memory_order_acquire)) {
    case kGuarded:
      break;
    case kPreparing:
    case kServing:
      sched_yield();
      return Outcome::kTryAgain;
    case kServed:
      return Outcome::kTryAgain;
    case kMoving:
      nap();
      return Outcome::kTryAgain;
    default:
      return Outcome::kTryAgain;  // just taken out
  }
  if (!g_is_serving.load(std::memory_order_acquire)) return Outcome::kNotOurs;
  const int over = write_is_over(entry.ticket.load(std::memory_order_relaxed));
  if (over < 0) return Outcome::kNotOurs;
  if (over == 0) {
    nap();
    return Outcome::kTryAgain;
  }
  uint32_t expected = kGuarded;
  if (!entry.state.compare_exchange_strong(expected, kServing, std::memory_order_acq_rel)) return Outcome::kTryAgain;
  // The entry is ours now; it may have become another variable's since it was looked at.
  const uint64_t start = entry.address.load(std::memory_order_relaxed);
  const uint64_t nbytes = entry.nbytes.load(std::memory_order_relaxed);
  const bool is_it = address >= start && address < start + nbytes &&
                     write_is_over(entry.ticket.load(std::memory_order_relaxed)) == 1;
  if (!is_it) {
    entry.state.store(kGuarded, std::memory_order_release);
    return Outcome::kTryAgain;
  }
  void* place = reinterpret_cast<void*>(start);
  void* mapped = mmap(place, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                      g_descriptor.load(std::memory_order_relaxed), off_t(entry.offset.load(std::memory_order_relaxed)));
  if (mapped == MAP_FAILED) {
    entry.state.store(kGuarded, std::memory_order_release);
    say("ooc: cannot map the store's file over a variable that is away (vm.max_map_count?)\n");
    return Outcome::kNotOurs;
  }
  madvise(place, nbytes, MADV_DONTFORK);
  g_num_served.fetch_add(1, std::memory_order_relaxed);
  entry.state.store(kServed, std::memory_order_release);
  return Outcome::kTryAgain;
}

Outcome serve(uint64_t address) {
  if (g_owner.load(std::memory_order_relaxed) != getpid()) return Outcome::kNotOurs;
  const uint64_t version = g_version.load(std::memory_order_acquire);
  const uint32_t used = g_num_used.load(std::memory_order_acquire);
  for (uint32_t i = 0; i < used; ++i) {
    Entry& entry = g_entries[i];
    if (entry.state.load(std::memory_order_acquire) == kFree) continue;
    const uint64_t start = entry.address.load(std::memory_order_relaxed);
    if (address < start || address - start >= entry.nbytes.load(std::memory_order_relaxed)) continue;
    const Outcome outcome = serve_entry(entry, address);
    if (outcome == Outcome::kTryAgain) return outcome;
    break;
  }
  if (t_last_address != address || t_last_version != version) {
    t_last_address = address;
    t_last_version = version;
    return Outcome::kTryAgain;
  }
  return Outcome::kNotOurs;
}

void chain(int number, siginfo_t* info, void* context) {
  // A handler that we pass on to may restore what it found, us, and raise again: then it is over.
  if (t_is_chaining || (!(g_previous.sa_flags & SA_SIGINFO) && g_previous.sa_handler == SIG_DFL)) {
    struct sigaction fatal;
    memset(&fatal, 0, sizeof fatal);
    fatal.sa_handler = SIG_DFL;
    sigaction(number, &fatal, nullptr);
    if (info == nullptr || info->si_code <= 0) raise(number);  // sent by somebody: it does not come again by itself
    return;
  }
  t_is_chaining = 1;
  if (g_previous.sa_flags & SA_SIGINFO) {
    g_previous.sa_sigaction(number, info, context);
  } else if (g_previous.sa_handler != SIG_IGN) {
    g_previous.sa_handler(number);
  }
  t_is_chaining = 0;
}

void handle(int number, siginfo_t* info, void* context) {
  const int error = errno;
  // Positive codes come from the kernel, with an address; others were sent by raise or kill.
  if (info != nullptr && info->si_code > 0 && !t_is_chaining) {
    const auto address = reinterpret_cast<uint64_t>(info->si_addr);
    if (address >= g_arena_start.load(std::memory_order_relaxed) &&
        address < g_arena_stop.load(std::memory_order_relaxed)) {
      if (serve(address) == Outcome::kTryAgain) {
        errno = error;
        return;
      }
      say("ooc: a touch of ");
      say_hex(address);
      say(": a variable was used that was freed, or evicted and not declared as an operand, or that a forked "
          "process did not inherit\n");
    }
  }
  errno = error;
  chain(number, info, context);
}

bool is_on_top() {
  struct sigaction present;
  return sigaction(SIGSEGV, nullptr, &present) == 0 && (present.sa_flags & SA_SIGINFO) &&
         present.sa_sigaction == &handle;
}

}  // namespace

// Put the handler in front of the present one; nothing if it is there. 0, or an errno.
OOC_API int vmm_faults_install() {
  if (is_on_top()) return 0;
  struct sigaction ours, before;
  memset(&ours, 0, sizeof ours);
  ours.sa_sigaction = &handle;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigemptyset(&ours.sa_mask);
  if (sigaction(SIGSEGV, nullptr, &before)) return errno;
  g_previous = before;
  if (sigaction(SIGSEGV, &ours, nullptr)) return errno;
  g_is_installed.store(1);
  return 0;
}

// Put back what was there, if nobody has put another handler in front since.
OOC_API void vmm_faults_uninstall() {
  if (!is_on_top()) return;
  sigaction(SIGSEGV, &g_previous, nullptr);
  g_is_installed.store(0);
}

// Serve an arena from a file. `finished` is a ring of `num_finished` tickets (a power of two).
OOC_API void vmm_faults_open(uint64_t arena_start, uint64_t arena_stop, int descriptor,
                             const std::atomic<int64_t>* finished, uint64_t num_finished) {
  g_owner.store(getpid());
  g_descriptor.store(descriptor);
  g_finished_mask.store(num_finished - 1);
  g_finished.store(finished);
  g_is_serving.store(1);
  g_arena_start.store(arena_start);
  g_arena_stop.store(arena_stop);
}

OOC_API void vmm_faults_close() {
  g_is_serving.store(0);
  const uint32_t used = g_num_used.load();
  for (uint32_t i = 0; i < used; ++i) g_entries[i].state.store(kFree, std::memory_order_release);
  g_version.fetch_add(1);
  g_arena_stop.store(0);
  g_arena_start.store(0);
  g_descriptor.store(-1);
  g_finished.store(nullptr);
}

OOC_API void vmm_faults_set_serving(int is_serving) {
  g_is_serving.store(is_serving, std::memory_order_release);
  g_version.fetch_add(1, std::memory_order_acq_rel);
}

OOC_API uint64_t vmm_faults_num_served() { return g_num_served.load(std::memory_order_relaxed); }

// Guard ranges; rows of (index, address, nbytes, span_nbytes, offset, ticket, protects), sorted by
// address; indexes are the caller's to hand out. Neighbouring spans are protected by one call.
// Returns the number of calls, or -errno, with nothing guarded by this call.
OOC_API int64_t vmm_faults_guard(const int64_t* rows, int64_t num_rows) {
  constexpr int kFields = 7;
  int64_t num_calls = 0;
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t* row = rows + i * kFields;
    if (row[0] < 0 || row[0] >= kCapacity) return -ENOSPC;
    Entry& entry = g_entries[row[0]];
    entry.address.store(uint64_t(row[1]), std::memory_order_relaxed);
    entry.nbytes.store(uint64_t(row[2]), std::memory_order_relaxed);
    entry.span_nbytes.store(uint64_t(row[3]), std::memory_order_relaxed);
    entry.offset.store(uint64_t(row[4]), std::memory_order_relaxed);
    entry.ticket.store(row[5], std::memory_order_relaxed);
    entry.state.store(kPreparing, std::memory_order_release);
    uint32_t used = g_num_used.load(std::memory_order_relaxed);
    if (uint32_t(row[0]) >= used) g_num_used.store(uint32_t(row[0]) + 1, std::memory_order_release);
  }
  int error = 0;
  for (int64_t i = 0; i < num_rows && !error;) {
    const int64_t* row = rows + i * kFields;
    int64_t stop = row[1] + row[3];
    int64_t j = i + 1;
    while (j < num_rows && rows[j * kFields + 6] == row[6] && rows[j * kFields + 1] == stop) {
      stop += rows[j * kFields + 3];
      ++j;
    }
    if (row[6]) {
      if (mprotect(reinterpret_cast<void*>(row[1]), size_t(stop - row[1]), PROT_NONE)) error = errno;
      ++num_calls;
    }
    i = j;
  }
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t* row = rows + i * kFields;
    if (error && row[6]) mprotect(reinterpret_cast<void*>(row[1]), size_t(row[3]), PROT_READ | PROT_WRITE);
    g_entries[row[0]].state.store(error ? kFree : kGuarded, std::memory_order_release);
  }
  g_version.fetch_add(1, std::memory_order_acq_rel);
  return error ? -int64_t(error) : num_calls;
}

// Take an entry out. With `unprotects` the range is accessible again, unless it shows the file.
// 1: it was guarded; 2: it was served, and the range shows the file; 0: there was none; or -errno.
OOC_API int64_t vmm_faults_lift(int64_t index, int unprotects) {
  if (index < 0 || index >= kCapacity) return -EINVAL;
  Entry& entry = g_entries[index];
  for (;;) {
    uint32_t state = entry.state.load(std::memory_order_acquire);
    if (state == kFree) return 0;
    if (state == kServing) {
      sched_yield();
      continue;
    }
    if (!entry.state.compare_exchange_strong(state, kPreparing, std::memory_order_acq_rel)) continue;
    int error = 0;
    if (state != kServed && unprotects &&
        mprotect(reinterpret_cast<void*>(entry.address.load()), size_t(entry.span_nbytes.load()), PROT_READ | PROT_WRITE)) {
      error = errno;
    }
    g_version.fetch_add(1, std::memory_order_acq_rel);
    entry.state.store(kFree, std::memory_order_release);
    return error ? -int64_t(error) : state == kServed ? 2 : 1;
  }
}

// Move a range's bytes while nobody can write to it, and let it show them where they are then.
//
// The caller keeps the GIL throughout: a thread that has it must not wait in the handler for one that wants it.
// `submit` and `wait` are the transfer engine's; what they do, its own threads do. `index` is an unused entry, `shown`
// are calls of mmap, in order. What the range shows before can be read and written.
// 0; or what failed: 1, the transfer, whose ticket is in `ticket` (or a negative errno: it was not begun), and all is as
// before; or -errno of a call, and what the range shows is the caller's to put back.
OOC_API int64_t vmm_faults_move(int64_t index, uint64_t address, uint64_t nbytes, const Move* move, const Shown* shown,
                                int64_t num_shown, int64_t* ticket) {
  if (index < 0 || index >= kCapacity) return -EINVAL;
  Entry& entry = g_entries[index];
  entry.address.store(address, std::memory_order_relaxed);
  entry.nbytes.store(nbytes, std::memory_order_relaxed);
  entry.state.store(kMoving, std::memory_order_release);
  if (uint32_t(index) >= g_num_used.load(std::memory_order_relaxed))
    g_num_used.store(uint32_t(index) + 1, std::memory_order_release);
  void* const place = reinterpret_cast<void*>(address);
  int64_t result = mprotect(place, nbytes, PROT_READ) ? -int64_t(errno) : 0;
  if (result == 0) {
    *ticket = move->submit(move->engine, move->kind, move->descriptor, move->offset, move->flags, move->segments,
                           move->num_segments, nullptr, 0);
    int64_t state = *ticket < 0 ? 2 : 0;
    while (state == 0) state = move->wait(move->engine, *ticket, kWaitNs);
    if (state != 1) result = 1;
  }
  for (int64_t i = 0; i < num_shown && result == 0; ++i) {
    const Shown& call = shown[i];
    if (mmap(reinterpret_cast<void*>(call.address), size_t(call.nbytes), int(call.prot), int(call.flags),
             int(call.descriptor), off_t(call.offset)) == MAP_FAILED)
      result = -int64_t(errno);
  }
  if (result != 0) mprotect(place, nbytes, PROT_READ | PROT_WRITE);
  g_version.fetch_add(1, std::memory_order_acq_rel);
  entry.state.store(kFree, std::memory_order_release);
  return result;
}

// 1: guarded; 2: served; 0: neither.
OOC_API int64_t vmm_faults_state(int64_t index) {
  if (index < 0 || index >= kCapacity) return 0;
  const uint32_t state = g_entries[index].state.load(std::memory_order_acquire);
  return state == kServed ? 2 : state == kFree ? 0 : 1;
}
