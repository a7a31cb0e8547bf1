// The transfer engine: threads that move memory to and from files, without the GIL.
//
// A job copies a list of memory segments to or from one contiguous range of a file. Its ticket is a
// number; it may wait for earlier tickets before it starts. Jobs that wait sit in no queue, so a
// blocked read holds up no read behind it; and since a job can only wait for tickets given out
// before its own, waiting cannot go in a circle. Ready jobs are served in ticket order, each cut
// into pieces so that all threads of its direction share one large transfer.
//
// A small job that waits for nothing goes to the kernel's own queue where there is one (kernel_queue.h), begun by
// whoever submits it; one thread waits for the ends. What does not end there with all of its bytes moved is done
// again by the threads, who know about errors, parts and pauses.
//
// One mutex guards all books. No blocking I/O, no sleep and no call into Python happens under it.
// Knows neither Python nor torch. Included by transfers.cpp alone.

#pragma once

#include "kernel_queue.h"
#include "transfer_jobs.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <new>
#include <set>
#include <unordered_map>
#include <vector>

namespace {

constexpr int kMostRefusals = 40;          // EAGAIN in a row before a transfer gives up: about four seconds
constexpr int64_t kFirstPauseNs = 1000000, kLongestPauseNs = 128000000;  // between them, doubled each time
constexpr int64_t kLongestNapNs = 1000000;  // of a delay that a test asked for
constexpr int64_t kQueuedNbytes = 512 << 10;  // of a larger job, pinning its pages would hold up who submits it
constexpr int64_t kQueuedAtOnceNbytes = 1 << 20;  // each way: what becomes ready later may be needed first
constexpr size_t kNumFailuresKept = 4096;  // failed tickets that can still be asked about
constexpr size_t kNumFinished = 8192;      // tickets in the ring of finished ones; more are never under way
constexpr size_t kNumRecordsKept = 16384;  // finished tickets in the timeline, oldest dropped first

class Engine {
 public:
  Engine(int64_t piece_nbytes, bool queues) : pid_(getpid()), piece_nbytes_(piece_nbytes) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    for (auto& condition : has_work_) pthread_cond_init(&condition, &attributes);
    pthread_cond_init(&finished_, &attributes);
    pthread_condattr_destroy(&attributes);
    if (queues) queue_.open();
  }

  // Starts the threads. An errno, with those that did start stopped again, if one cannot be made.
  int start(const int num_threads[kNumKinds]) {
    // Signals belong to Python's main thread.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = 0;
    for (int i = 0; i < num_threads[kWrite] && !error; ++i) error = start_one(&run_writer, "ooc-write");
    for (int i = 0; i < num_threads[kRead] && !error; ++i) error = start_one(&run_reader, "ooc-read");
    if (queue_.is_open() && !error) error = start_one(&run_queue, "ooc-queue");
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (error) close();
    return error;
  }

  bool is_inherited() const { return getpid() != pid_; }

  int64_t submit(Kind kind, int fd, int64_t offset, int flags, const uint64_t* segments, int num_segments,
                 const int64_t* after, int num_after) {
    int64_t nbytes = 0;
    for (int i = 0; i < num_segments; ++i) nbytes += int64_t(segments[2 * i + 1]);
    if (nbytes <= 0 || offset < 0) return -EINVAL;
    bool is_ready = false;
    int64_t ticket;
    {
      Lock lock(mutex_);
      if (is_closing_) return -ESHUTDOWN;
      for (int i = 0; i < num_after; ++i)
        if (after[i] <= 0 || after[i] >= next_ticket_) return -ENOENT;
      std::unique_ptr<Job> job = spare_job();
      ticket = next_ticket_++;
      job->ticket = ticket;
      job->kind = kind;
      job->fd = fd;
      job->flags = flags;
      job->offset = offset;
      job->segments.resize(num_segments);
      for (int i = 0; i < num_segments; ++i)
        job->segments[i] = {reinterpret_cast<void*>(segments[2 * i]), size_t(segments[2 * i + 1])};
      job->left_nbytes = job->nbytes = nbytes;
      job->submit_ns = now_ns();
      for (int i = 0; i < num_after && !job->failure.error; ++i) {
        auto found = jobs_.find(after[i]);
        if (found != jobs_.end()) {
          found->second->dependents.push_back(ticket);
          ++job->num_waiting;
        } else {
          auto failed = failures_.find(after[i]);
          if (failed != failures_.end()) job->failure = failed->second;
        }
      }
      Job& entered = *job;
      jobs_.emplace(ticket, std::move(job));
      if (entered.failure.error) {
        finish(entered);
      } else if (entered.num_waiting == 0 && !queue_one(entered)) {
        ready_[kind].insert(ticket);
        is_ready = true;
      }
    }
    if (is_ready) wake(kind, nbytes);
    return ticket;
  }

  // 0: not finished; 1: finished well; 2: failed; -ENOENT: never given out.
  int state(int64_t ticket) {
    Lock lock(mutex_);
    return state_locked(ticket);
  }

  // As `state`, after waiting up to `timeout_ns` for it to be other than 0.
  int wait(int64_t ticket, int64_t timeout_ns) {
    timespec deadline = deadline_after(timeout_ns);
    Lock lock(mutex_);
    int state;
    while ((state = state_locked(ticket)) == 0)
      if (pthread_cond_timedwait(&finished_, &mutex_, &deadline) == ETIMEDOUT) return state_locked(ticket);
    return state;
  }

  // 1 when nothing is pending, 0 after the timeout.
  int wait_idle(int64_t timeout_ns) {
    timespec deadline = deadline_after(timeout_ns);
    Lock lock(mutex_);
    while (!jobs_.empty())
      if (pthread_cond_timedwait(&finished_, &mutex_, &deadline) == ETIMEDOUT) return jobs_.empty();
    return 1;
  }

  int failure(int64_t ticket, Failure* out) {
    Lock lock(mutex_);
    auto found = failures_.find(ticket);
    if (found == failures_.end()) return -ENOENT;
    *out = found->second;
    return 0;
  }

  void statistics(Statistics* out) {
    Lock lock(mutex_);
    *out = meter_.totals();
    out->num_pending = int64_t(jobs_.size());
  }

  int64_t take_records(Record* out, int64_t capacity) {
    Lock lock(mutex_);
    int64_t n = std::min<int64_t>(capacity, int64_t(records_.size()));
    std::copy(records_.begin(), records_.begin() + n, out);
    records_.erase(records_.begin(), records_.begin() + n);
    return n;
  }

  // For signal handlers, which may take no lock: at `ticket` modulo the length, the last ticket that
  // was finished; negative if it failed.
  const std::atomic<int64_t>* finished_ring() const { return finished_ring_; }

  void set_faults(const Faults& faults) {
    Lock lock(mutex_);
    faults_ = faults;
  }

  // Jobs of which something has not begun fail with ECANCELED; what is under way is finished; threads are joined.
  void close() {
    {
      Lock lock(mutex_);
      is_closing_ = true;
      std::vector<int64_t> tickets;
      for (auto& entry : jobs_) tickets.push_back(entry.first);
      for (int64_t ticket : tickets) {
        auto found = jobs_.find(ticket);
        if (found == jobs_.end()) continue;
        Job& job = *found->second;
        if (job.left_nbytes == 0) continue;  // all of it is under way: the threads will finish it
        if (!job.failure.error) job.failure = {ECANCELED, job.kind, ticket, job.offset, job.left_nbytes};
        ready_[job.kind].erase(ticket);
        job.left_nbytes = 0;
        if (job.num_pieces == 0) finish(job);
      }
    }
    for (auto& condition : has_work_) pthread_cond_broadcast(&condition);
    std::vector<pthread_t> threads;
    bool closes_queue;
    {
      Lock lock(mutex_);
      threads.swap(threads_);  // so that of two that close at once, one joins
      while (!queue_.is_idle()) pthread_cond_wait(&finished_, &mutex_);
      closes_queue = queue_.is_open() && !is_queue_closed_;
      if (closes_queue) queue_.close();
      is_queue_closed_ = true;
    }
    for (pthread_t thread : threads) pthread_join(thread, nullptr);
    if (closes_queue) queue_.give_back();
    pthread_cond_broadcast(&finished_);
  }

 private:
  static void* run_writer(void* engine) { return static_cast<Engine*>(engine)->work(kWrite); }
  static void* run_reader(void* engine) { return static_cast<Engine*>(engine)->work(kRead); }
  static void* run_queue(void* engine) { return static_cast<Engine*>(engine)->take_queued(); }

  int start_one(void* (*run)(void*), const char* name) {
    pthread_t thread;
    int error = pthread_create(&thread, nullptr, run, this);
    if (error) return error;
    pthread_setname_np(thread, name);
    threads_.push_back(thread);
    return 0;
  }

  // Under the lock: hands a job that is ready to the kernel's queue, if it is one for that. Faults of tests are known
  // to the threads alone.
  bool queue_one(Job& job) {
    if (!queue_.is_open() || is_closing_ || job.nbytes > std::min(kQueuedNbytes, piece_nbytes_)) return false;
    if (queued_nbytes_[job.kind] + job.nbytes > kQueuedAtOnceNbytes) return false;
    if (job.flags || faults_.is_set() || job.segments.size() > IOV_MAX || !ready_[job.kind].empty()) return false;
    int64_t start_ns = now_ns();
    if (!queue_.submit(job.kind == kWrite, job.fd, job.segments.data(), int(job.segments.size()), job.offset,
                       job.ticket))
      return false;
    job.start_ns = start_ns;
    job.left_nbytes = 0;
    job.num_pieces = 1;
    queued_nbytes_[job.kind] += job.nbytes;
    meter_.begin(job.kind, start_ns);
    return true;
  }

  // The thread that waits for what the kernel's queue has done.
  void* take_queued() {
    KernelQueue::Done done[KernelQueue::kDepth];
    for (;;) {
      int n = queue_.take(done);
      if (n < 0) return nullptr;
      Lock lock(mutex_);
      for (int i = 0; i < n; ++i) end_queued(*jobs_.at(done[i].ticket), done[i].moved);
    }
  }

  void end_queued(Job& job, int64_t moved) {
    queue_.forget_one();
    queued_nbytes_[job.kind] -= job.nbytes;
    meter_.end(job.kind, job.start_ns, moved);
    job.num_pieces = 0;
    if (moved == job.nbytes) {
      ++meter_.counts.num_queued[job.kind];
    } else if (is_closing_) {  // the threads may be gone
      job.failure = {moved < 0 ? int32_t(-moved) : EIO, job.kind, job.ticket, job.offset, job.nbytes};
    } else {
      job.left_nbytes = job.nbytes;
      ready_[job.kind].insert(job.ticket);
      pthread_cond_signal(&has_work_[job.kind]);
      return;
    }
    finish(job);
  }

  void* work(Kind kind) {
    Piece piece;
    piece.segments.reserve(IOV_MAX);
    for (;;) {
      Job* job;
      int fd, flags;
      {
        Lock lock(mutex_);
        while (ready_[kind].empty() && !is_closing_) pthread_cond_wait(&has_work_[kind], &mutex_);
        if (ready_[kind].empty()) return nullptr;
        job = jobs_.at(*ready_[kind].begin()).get();
        cut_piece(*job, piece, piece_nbytes_);
        fd = job->fd;
        flags = job->flags;
        if (job->left_nbytes == 0) ready_[kind].erase(job->ticket);
      }
      Failure failure = transfer(kind, fd, flags, piece);
      {
        Lock lock(mutex_);
        --job->num_pieces;
        if (failure.error && !job->failure.error) {
          failure.ticket = job->ticket;
          job->failure = failure;
          job->left_nbytes = 0;  // the rest of it need not start
          ready_[kind].erase(job->ticket);
        }
        if (job->num_pieces == 0 && job->left_nbytes == 0) finish(*job);
      }
    }
  }

  // Does the I/O of one piece, in as many calls as it takes. A call that a signal cut short, or that the device
  // has no room for just now, is made again; the latter after a pause, and not for ever.
  Failure transfer(Kind kind, int fd, int flags, Piece& piece) {
    iovec* next = piece.segments.data();
    int count = int(piece.segments.size());
    int64_t offset = piece.offset;
    size_t left = piece.nbytes;
    int num_refusals = 0;
    while (left > 0) {
      ssize_t moved = call(kind, fd, next, count, offset);
      if (moved < 0 && errno == EINTR) continue;
      if (moved < 0 && errno == EAGAIN && num_refusals < kMostRefusals && !is_closing()) {
        sleep_ns(std::min(kFirstPauseNs << std::min(num_refusals, 20), kLongestPauseNs));
        ++num_refusals;
        continue;
      }
      num_refusals = 0;
      if (moved == 0) errno = EIO;  // a read past the end of the file, or a device that takes nothing
      if (moved <= 0) return {errno, kind, 0, offset, int64_t(left)};
      offset += moved;
      left -= size_t(moved);
      for (size_t rest = size_t(moved); rest > 0;) {
        size_t step = std::min(rest, next->iov_len);
        next->iov_base = static_cast<char*>(next->iov_base) + step;
        next->iov_len -= step;
        rest -= step;
        if (next->iov_len == 0) {
          ++next;
          --count;
        }
      }
    }
    if (flags & kDropCache) return drop_cache(kind, fd, piece);
    return {};
  }

  bool is_closing() {
    Lock lock(mutex_);
    return is_closing_;
  }

  // How much longer a call that began at `start_ns` sleeps for a test. Asked again and again, so that a test ends a
  // delay by setting other faults; closing ends it, too.
  int64_t rest_of_delay_ns(Kind kind, int64_t start_ns) {
    Lock lock(mutex_);
    if (faults_.delay_ns <= 0 || is_closing_ || !faults_.concerns(kind)) return 0;
    return std::max<int64_t>(0, start_ns + faults_.delay_ns - now_ns());
  }

  // One system call, counted and timed. errno is the caller's to read.
  ssize_t call(Kind kind, int fd, iovec* segments, int count, int64_t offset) {
    int64_t start_ns;
    iovec first{};
    {
      Lock lock(mutex_);
      bool counts = faults_.concerns(kind);
      if (counts && faults_.calls_until_failure == 1) {
        if (--faults_.num_failures <= 0) faults_.calls_until_failure = 0;
        ++meter_.counts.num_calls[kind];
        errno = faults_.error;
        return -1;
      }
      if (counts && faults_.calls_until_failure > 1) --faults_.calls_until_failure;
      if (faults_.call_nbytes > 0) {
        first = {segments->iov_base, std::min(segments->iov_len, size_t(faults_.call_nbytes))};
        segments = &first;
        count = 1;
      }
      start_ns = now_ns();
      meter_.begin(kind, start_ns);
    }
    while (int64_t ns = rest_of_delay_ns(kind, start_ns)) sleep_ns(std::min(ns, kLongestNapNs));
    ssize_t moved =
        kind == kWrite ? pwritev(fd, segments, count, offset) : preadv(fd, segments, count, offset);
    int error = errno;
    {
      Lock lock(mutex_);
      meter_.end(kind, start_ns, moved);
    }
    errno = error;
    return moved;
  }

  // Takes `job` out of the books, and lets go, or fails, what waited for it.
  void finish(Job& job) {
    std::vector<int64_t> tickets{job.ticket};  // a failure spreads to dependents of dependents
    bool wakes[kNumKinds] = {false, false};
    while (!tickets.empty()) {
      auto found = jobs_.find(tickets.back());
      tickets.pop_back();
      if (found == jobs_.end()) continue;
      std::unique_ptr<Job> done = std::move(found->second);
      jobs_.erase(found);
      note(*done);
      for (int64_t ticket : done->dependents) {
        auto dependent = jobs_.find(ticket);
        if (dependent == jobs_.end()) continue;
        Job& waiting = *dependent->second;
        --waiting.num_waiting;
        if (done->failure.error && !waiting.failure.error) {
          waiting.failure = done->failure;
          tickets.push_back(ticket);
        } else if (waiting.num_waiting == 0 && !waiting.failure.error && !queue_one(waiting)) {
          ready_[waiting.kind].insert(ticket);
          wakes[waiting.kind] = true;
        }
      }
      spare_.push_back(std::move(done));
    }
    for (int kind = 0; kind < kNumKinds; ++kind)
      if (wakes[kind]) pthread_cond_broadcast(&has_work_[kind]);
    pthread_cond_broadcast(&finished_);
  }

  void note(const Job& job) {
    finished_ring_[size_t(job.ticket) & (kNumFinished - 1)].store(job.failure.error ? -job.ticket : job.ticket,
                                                                 std::memory_order_release);
    if (job.failure.error) {
      failures_[job.ticket] = job.failure;
      failure_order_.push_back(job.ticket);
      if (failure_order_.size() > kNumFailuresKept) {
        failures_.erase(failure_order_.front());
        failure_order_.pop_front();
      }
    }
    ++meter_.counts.num_jobs[job.kind];
    if (records_.size() == kNumRecordsKept) {
      records_.pop_front();
      ++meter_.counts.num_records_lost;
    }
    int64_t stop_ns = now_ns();
    records_.push_back({job.ticket, job.kind, job.nbytes, job.submit_ns, job.start_ns ? job.start_ns : stop_ns,
                        stop_ns, job.failure.error});
  }

  int state_locked(int64_t ticket) const {
    if (ticket <= 0 || ticket >= next_ticket_) return -ENOENT;
    if (jobs_.count(ticket)) return 0;
    return failures_.count(ticket) ? 2 : 1;
  }

  void wake(Kind kind, int64_t nbytes) {
    if (nbytes > piece_nbytes_)
      pthread_cond_broadcast(&has_work_[kind]);
    else
      pthread_cond_signal(&has_work_[kind]);
  }

  std::unique_ptr<Job> spare_job() {
    if (spare_.empty()) return std::make_unique<Job>();
    std::unique_ptr<Job> job = std::move(spare_.back());
    spare_.pop_back();
    job->dependents.clear();
    job->segment = job->within = 0;
    job->num_pieces = job->num_waiting = 0;
    job->failure = {};
    job->start_ns = 0;
    return job;
  }

  const pid_t pid_;
  const int64_t piece_nbytes_;
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t has_work_[kNumKinds];
  pthread_cond_t finished_;
  std::vector<pthread_t> threads_;
  KernelQueue queue_;
  int64_t queued_nbytes_[kNumKinds] = {0, 0};  // under way in it
  bool is_queue_closed_ = false;

  bool is_closing_ = false;
  int64_t next_ticket_ = 1;
  std::unordered_map<int64_t, std::unique_ptr<Job>> jobs_;  // not finished
  std::set<int64_t> ready_[kNumKinds];                      // waiting for nothing, with bytes not yet handed out
  std::vector<std::unique_ptr<Job>> spare_;
  std::unordered_map<int64_t, Failure> failures_;
  std::deque<int64_t> failure_order_;
  std::deque<Record> records_;
  Meter meter_;
  Faults faults_{};
  std::atomic<int64_t> finished_ring_[kNumFinished] = {};
};

}  // namespace
