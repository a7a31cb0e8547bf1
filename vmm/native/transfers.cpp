// The transfer engine's door for vmm/transfers.py, through ctypes.

#include "transfer_engine.h"

#include <memory>
#include <new>

#define OOC_API extern "C" __attribute__((visibility("default")))

namespace {

// Runs `body` unless the engine belongs to another process, whose threads do not exist here.
template <typename Body>
int64_t guarded(void* handle, Body body) {
  Engine* engine = static_cast<Engine*>(handle);
  if (engine->is_inherited()) return -ECHILD;
  try {
    return body(*engine);
  } catch (const std::bad_alloc&) {
    return -ENOMEM;
  }
}

}  // namespace

OOC_API void* ooc_transfers_open(int num_writers, int num_readers, int64_t piece_nbytes, int queues, int* error) {
  auto engine = std::unique_ptr<Engine>(new (std::nothrow) Engine(piece_nbytes, queues != 0));
  const int num_threads[kNumKinds] = {num_writers, num_readers};
  *error = engine ? engine->start(num_threads) : ENOMEM;
  return *error ? nullptr : engine.release();
}

OOC_API int64_t ooc_transfers_submit(void* handle, int kind, int fd, int64_t offset, int flags, const uint64_t* segments,
                                     int num_segments, const int64_t* after, int num_after) {
  return guarded(handle, [&](Engine& engine) {
    return engine.submit(Kind(kind), fd, offset, flags, segments, num_segments, after, num_after);
  });
}

OOC_API int64_t ooc_transfers_state(void* handle, int64_t ticket) {
  return guarded(handle, [&](Engine& engine) { return int64_t(engine.state(ticket)); });
}

OOC_API int64_t ooc_transfers_wait(void* handle, int64_t ticket, int64_t timeout_ns) {
  return guarded(handle, [&](Engine& engine) { return int64_t(engine.wait(ticket, timeout_ns)); });
}

OOC_API int64_t ooc_transfers_wait_idle(void* handle, int64_t timeout_ns) {
  return guarded(handle, [&](Engine& engine) { return int64_t(engine.wait_idle(timeout_ns)); });
}

OOC_API int64_t ooc_transfers_failure(void* handle, int64_t ticket, Failure* out) {
  return guarded(handle, [&](Engine& engine) { return int64_t(engine.failure(ticket, out)); });
}

OOC_API const void* ooc_transfers_finished(void* handle, int64_t* length) {
  *length = kNumFinished;
  return static_cast<Engine*>(handle)->finished_ring();
}

OOC_API int64_t ooc_transfers_statistics(void* handle, Statistics* out) {
  return guarded(handle, [&](Engine& engine) { return engine.statistics(out), int64_t(0); });
}

OOC_API int64_t ooc_transfers_take_records(void* handle, Record* out, int64_t capacity) {
  return guarded(handle, [&](Engine& engine) { return engine.take_records(out, capacity); });
}

OOC_API int64_t ooc_transfers_set_faults(void* handle, const Faults* faults) {
  return guarded(handle, [&](Engine& engine) { return engine.set_faults(*faults), int64_t(0); });
}

// Joins the threads. Idempotent; calls that come later are refused, and the handle stays valid.
OOC_API int64_t ooc_transfers_close(void* handle) {
  return guarded(handle, [&](Engine& engine) { return engine.close(), int64_t(0); });
}

// Frees a closed engine that no thread can reach any more. In a forked child nothing is freed: the
// mutex may have been held at the fork.
OOC_API void ooc_transfers_free(void* handle) {
  if (!static_cast<Engine*>(handle)->is_inherited()) delete static_cast<Engine*>(handle);
}
