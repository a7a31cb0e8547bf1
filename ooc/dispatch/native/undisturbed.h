// What a critical section keeps out, beside signal handlers: the recursion limit and the garbage collector.
//
// - A program near its recursion limit would get a `RecursionError` within the residency manager or the executor, between
//   two changes that belong together. So a section has frames of its own; the program's limit holds again when it ends.
//   What an op runs in Python (a custom op's kernel) may use them, too.
// - The collector runs whenever Python code makes an object, ours too, and calls what it finds: `__del__`, weakref
//   callbacks, `gc.callbacks`. These may use tensors, and there our mode is off, and the session half way through a change.
//   So it waits for the end of the section. The switch is the process's: another thread that asks `gc.isenabled()`
//   meanwhile hears no, and what it switches off meanwhile is on again afterwards.
//
// While the collector runs signal handlers wait, too (`collection_begins`, `collection_ends`): Python swallows what a
// handler raises within a finalizer, and all garbage of a section, in which handlers waited, is collected at its end.
//
// Both are counted by the session whose sections they are, not by thread: a forked child, where other threads are no
// more, begins anew.
#pragma once

#include <Python.h>

#include <cstdint>

namespace ooc {

// The collector's switch while sections of one session are open, on its own thread or on one that holds its lock.
// Whoever calls holds the GIL.
class Collector {
 public:
  void wait() {
    if (num_waiting_++ == 0) collects_afterwards_ = PyGC_Disable() != 0;
  }
  // One too many is none, as of a lock that was taken before the session counted.
  void go_on() {
    if (num_waiting_ > 0) leave(num_waiting_ - 1);
  }
  // So many sections remain.
  void leave(uint32_t num_waiting) {
    const bool was_waiting = num_waiting_ > 0;
    num_waiting_ = num_waiting;
    if (was_waiting && num_waiting == 0 && collects_afterwards_) PyGC_Enable();
  }

 private:
  uint32_t num_waiting_ = 0;
  bool collects_afterwards_ = false;
};

// An allocation that evicts takes about 20 frames and calls into C; making a plan inline, at a border, about 100.
constexpr int kOwnFrames = 400;

// Frames beyond the calling thread's limit. One op within another has none of its own: one that calls itself through
// Python without end still comes to the limit.
inline void add_frames(int number) {
  PyThreadState* thread = PyThreadState_Get();
#if PY_VERSION_HEX >= 0x030C0000
  thread->py_recursion_remaining += number;
#else
  thread->recursion_remaining += number;
#endif
}

}  // namespace ooc
