// Small transfers that the kernel makes by itself: Linux's asynchronous I/O (io_submit), with O_DIRECT.
//
// A thread that makes a blocking call must be woken for it, which costs as much as a quarter of a megabyte takes to
// move. Here the call itself begins the transfer and comes back; one thread sleeps until something is over. (io_uring
// would have its completions run by the thread that submitted, and wake that out of whatever call it sleeps in.)
// RWF_NOWAIT: what would have to wait for a lock or for room in the device's queue fails with EAGAIN instead.
//
// Included by transfers.cpp alone. Not thread-safe but for `take`: its owner holds a lock.
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/fs.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

namespace {

class KernelQueue {
 public:
  static constexpr int kDepth = 32;  // more are under way only in threads

  struct Done {
    int64_t ticket;
    int64_t moved;  // bytes, or a negative errno
  };

  // Whether there is one: a sandbox may forbid the calls, the system may have run out of contexts.
  bool open() { return syscall(SYS_io_setup, kDepth, &context_) == 0; }
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
  int take(Done done[kDepth]) const {
    io_event events[kDepth];
    for (;;) {
      long n = syscall(SYS_io_getevents, context_, 1, kDepth, events, nullptr);
      if (n < 0 && errno == EINTR) continue;
      for (long i = 0; i < n; ++i) done[i] = {int64_t(events[i].data), int64_t(events[i].res)};
      return n > 0 ? int(n) : -1;
    }
  }

  void forget_one() { --num_under_way_; }
  bool is_idle() const { return num_under_way_ == 0; }

  // Ends a `take` that sleeps. Nothing may be under way.
  void close() { syscall(SYS_io_destroy, context_); }

 private:
  aio_context_t context_ = 0;
  int num_under_way_ = 0;
};

}  // namespace
