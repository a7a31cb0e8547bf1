// What the transfer engine works on: jobs, the pieces that they are cut into, and what Python sees of them.
// Also the clock and the lock that it works with. Included by transfers.cpp alone.
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/uio.h>
#include <time.h>

#include <algorithm>
#include <vector>

namespace {

enum Kind : int { kWrite = 0, kRead = 1, kNumKinds = 2 };

constexpr int kDropCache = 1;  // flag of a job: leave nothing of it in the page cache

// What Python sees; the layouts are repeated in vmm/transfers.py.
struct Failure {
  int32_t error;  // errno; 0: none
  int32_t kind;
  int64_t ticket;  // of the job that failed first; a dependent carries its predecessor's failure
  int64_t offset;  // in the file, of the call that failed
  int64_t nbytes;  // of that call
};

struct Record {
  int64_t ticket, kind, nbytes, submit_ns, start_ns, stop_ns, error;
};

struct Statistics {
  int64_t num_jobs[kNumKinds], nbytes[kNumKinds], num_calls[kNumKinds];
  int64_t num_queued[kNumKinds];  // of the jobs, those that the kernel's queue did
  int64_t busy_ns[kNumKinds];  // at least one call was under way
  int64_t call_ns[kNumKinds];  // summed over calls
  int64_t num_pending, num_records_lost;
};

struct Faults {  // for tests
  int64_t calls_until_failure;  // 1: the next call fails; 0: none will
  int32_t error;
  int32_t kind;          // kWrite, kRead, or kNumKinds for either
  int64_t delay_ns;      // before each call of that kind
  int64_t call_nbytes;   // a call moves at most this many bytes; 0: no limit
  int64_t num_failures;  // calls in a row that fail

  bool is_set() const { return calls_until_failure > 0 || delay_ns > 0 || call_nbytes > 0; }
  bool concerns(int32_t which) const { return kind == kNumKinds || kind == which; }
};

struct Job {
  int64_t ticket = 0;
  Kind kind = kWrite;
  int fd = -1;
  int flags = 0;
  int64_t offset = 0;  // in the file, of the next piece
  std::vector<iovec> segments;
  size_t segment = 0, within = 0;  // where the next piece starts
  int64_t left_nbytes = 0;         // not yet handed out in pieces
  int64_t nbytes = 0;
  int num_pieces = 0;   // handed out and not finished
  int num_waiting = 0;  // predecessors not finished
  std::vector<int64_t> dependents;
  Failure failure{};
  int64_t submit_ns = 0, start_ns = 0;
};

struct Piece {
  int64_t offset = 0;
  size_t nbytes = 0;
  std::vector<iovec> segments;
};

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

timespec deadline_after(int64_t ns) {
  int64_t at = now_ns() + ns;
  return {time_t(at / 1000000000), long(at % 1000000000)};
}

void sleep_ns(int64_t ns) {
  timespec t{time_t(ns / 1000000000), long(ns % 1000000000)};
  while (nanosleep(&t, &t) && errno == EINTR) {
  }
}

// Counts and times calls, several of which may be under way at once.
class Meter {
 public:
  Statistics counts{};

  void begin(Kind kind, int64_t start_ns) {
    if (num_under_way_[kind]++ == 0) busy_since_ns_[kind] = start_ns;
  }

  void end(Kind kind, int64_t start_ns, int64_t moved) {
    int64_t stop_ns = now_ns();
    counts.call_ns[kind] += stop_ns - start_ns;
    if (--num_under_way_[kind] == 0) counts.busy_ns[kind] += stop_ns - busy_since_ns_[kind];
    ++counts.num_calls[kind];
    if (moved > 0) counts.nbytes[kind] += moved;
  }

  Statistics totals() const {
    Statistics totals = counts;
    for (int kind = 0; kind < kNumKinds; ++kind)
      if (num_under_way_[kind]) totals.busy_ns[kind] += now_ns() - busy_since_ns_[kind];
    return totals;
  }

 private:
  int num_under_way_[kNumKinds] = {0, 0};
  int64_t busy_since_ns_[kNumKinds] = {0, 0};
};

class Lock {
 public:
  explicit Lock(pthread_mutex_t& mutex) : mutex_(mutex) { pthread_mutex_lock(&mutex_); }
  ~Lock() { pthread_mutex_unlock(&mutex_); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  pthread_mutex_t& mutex_;
};

// Moves the start of what is left of `job`, at most `piece_nbytes`, into `piece`.
void cut_piece(Job& job, Piece& piece, int64_t piece_nbytes) {
  if (job.start_ns == 0) job.start_ns = now_ns();
  piece.offset = job.offset;
  piece.segments.clear();
  piece.nbytes = 0;
  while (job.left_nbytes > 0 && piece.nbytes < size_t(piece_nbytes) && piece.segments.size() < IOV_MAX) {
    const iovec& segment = job.segments[job.segment];
    size_t nbytes = std::min(segment.iov_len - job.within, size_t(piece_nbytes) - piece.nbytes);
    if (nbytes > 0) piece.segments.push_back({static_cast<char*>(segment.iov_base) + job.within, nbytes});
    piece.nbytes += nbytes;
    job.within += nbytes;
    job.left_nbytes -= int64_t(nbytes);
    if (job.within == segment.iov_len) {
      ++job.segment;
      job.within = 0;
    }
  }
  job.offset += int64_t(piece.nbytes);
  ++job.num_pieces;
}

// Without O_DIRECT: have the bytes on the device and their pages out of the cache.
Failure drop_cache(Kind kind, int fd, const Piece& piece) {
  int64_t nbytes = int64_t(piece.nbytes);
  if (kind == kWrite) {
    constexpr unsigned kAll = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
    while (sync_file_range(fd, piece.offset, nbytes, kAll)) {
      if (errno == EINTR) continue;
      return {errno, kind, 0, piece.offset, nbytes};
    }
  }
  posix_fadvise(fd, piece.offset, nbytes, POSIX_FADV_DONTNEED);  // advice: its failure loses nothing
  return {};
}

}  // namespace
