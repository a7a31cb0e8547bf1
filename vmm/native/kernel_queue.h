// Small transfers that the kernel makes by itself: Linux's asynchronous I/O (io_submit), with O_DIRECT.
//
// A thread that makes a blocking call must be woken for it, which costs as much as a quarter of a megabyte takes to
// move. Here the call itself begins the transfer and comes back; one thread sleeps until something is over. (io_uring
// would have its completions run by the thread that submitted, and wake that out of whatever call it sleeps in.)
// RWF_NOWAIT: what would have to wait for a lock or for room in the device's queue fails with EAGAIN instead.
//
// The kernel takes 30 to 40 ms to destroy a context, so that of a queue that was closed is kept for the next one.
//
// Included by transfers.cpp alone. Not thread-safe but for `take`: its owner holds a lock.
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/fs.h>
#include <poll.h>
#include <stdint.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>

namespace {

// A context that nobody uses and nothing is under way in, of this process: a forked child has none of its parent's.
std::atomic<aio_context_t> g_spare_context{0};
std::atomic<pid_t> g_spare_pid{0};

class KernelQueue {
 public:
  static constexpr int kDepth = 32;  // more are under way only in threads

  struct Done {
    int64_t ticket;
    int64_t moved;  // bytes, or a negative errno
  };

  // Whether there is one: a sandbox may forbid the calls, the system may have run out of contexts.
  bool open() {
    if (g_spare_pid == getpid()) context_ = g_spare_context.exchange(0);
    return is_open() || syscall(SYS_io_setup, kDepth, &context_) == 0;
  }
  bool is_open() const { return context_ != 0; }

  // Begins one transfer. False: nothing was begun. The segments must stay until it is over.
  bool submit(bool writes, int fd, const iovec* segments, int num_segments, int64_t offset, int64_t ticket) {
    if (num_under_way_ == kDepth) return false;
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || !(flags & O_DIRECT)) return false;  // through the page cache, io_submit would block and copy
    iocb request{};
    request.aio_data = uint64_t(ticket);
    request.aio_lio_opcode = writes ? IOCB_CMD_PWRITEV : IOCB_CMD_PREADV;
    request.aio_fildes = uint32_t(fd);
    request.aio_rw_flags = RWF_NOWAIT;
    request.aio_buf = uint64_t(segments);
    request.aio_nbytes = uint64_t(num_segments);
    request.aio_offset = offset;
    iocb* list[] = {&request};
    if (syscall(SYS_io_submit, context_, 1, list) != 1) return false;
    ++num_under_way_;
    return true;
  }

  // Blocks until something is over. Returns how many there are in `done`; negative: the queue was closed.
  int take(Done done[kDepth]) {
    io_event events[kDepth];
    for (;;) {
      long n = syscall(SYS_io_getevents, context_, 1, kDepth, events, nullptr);
      if (n < 0 && errno == EINTR) continue;
      has_ended_ = n == 1 && events[0].data == kEnd;  // nothing else was under way
      for (long i = 0; i < n; ++i) done[i] = {int64_t(events[i].data), int64_t(events[i].res)};
      return n > 0 && !has_ended_ ? int(n) : -1;
    }
  }

  void forget_one() { --num_under_way_; }
  bool is_idle() const { return num_under_way_ == 0; }

  // Ends a `take` that sleeps. Nothing may be under way, and nothing may be begun any more.
  void close() {
    if (submit_end()) return;
    destroy();
    is_destroyed_ = true;
  }

  // After `close`, when no `take` sleeps any more.
  void give_back() {
    if (event_ >= 0) ::close(event_);
    if (is_destroyed_) return;
    aio_context_t none = 0;
    if (g_spare_pid.exchange(getpid()) != getpid()) g_spare_context = 0;
    if (!has_ended_ || !g_spare_context.compare_exchange_strong(none, context_)) destroy();
  }

 private:
  static constexpr uint64_t kEnd = 0;  // tickets begin at 1

  // Begins to wait for an event that is there already.
  bool submit_end() {
    event_ = eventfd(1, EFD_CLOEXEC);
    iocb request{};
    request.aio_data = kEnd;
    request.aio_lio_opcode = IOCB_CMD_POLL;
    request.aio_fildes = uint32_t(event_);
    request.aio_buf = POLLIN;
    iocb* list[] = {&request};
    return event_ >= 0 && syscall(SYS_io_submit, context_, 1, list) == 1;
  }

  void destroy() { syscall(SYS_io_destroy, context_); }

  aio_context_t context_ = 0;
  int event_ = -1;
  int num_under_way_ = 0;
  bool has_ended_ = false;  // whether a `take` was ended, so that nothing is left in the context
  bool is_destroyed_ = false;
};

}  // namespace
