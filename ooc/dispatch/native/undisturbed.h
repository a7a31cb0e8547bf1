// What a critical section keeps out, beside signal handlers: the recursion limit and the garbage collector.
//
// - A program near its recursion limit would get a `RecursionError` within the residency manager or the executor, between
//   two changes that belong together. So a section has frames of its own; the program's limit holds again when it ends.
//   What an op runs in Python (a custom op's kernel) may use them, too.
// - The collector runs whenever Python code makes an object, ours too, and calls what it finds: `__del__`, weakref
//   callbacks, `gc.callbacks`. These may use tensors, and there our mode is off, and the session half way through a change.
//   So it waits for the end of the section. The switch is the process's: another thread that asks `gc.isenabled()`
//   meanwhile hears no, and what it switches off meanwhile is on again afterwards.
#pragma once

#include <Python.h>

namespace {

// An allocation that evicts takes about 20 frames and calls into C; making a plan inline, at a border, about 100.
constexpr int kOwnFrames = 400;

inline int& frames_left(PyThreadState* thread) {
#if PY_VERSION_HEX >= 0x030C0000
  return thread->py_recursion_remaining;
#else
  return thread->recursion_remaining;
#endif
}

// Sections of this thread, one within another: the outermost alone has frames of its own, so that an op that calls
// itself through Python without end still comes to the limit.
inline thread_local unsigned num_undisturbed = 0;
inline thread_local bool collects_afterwards = false;

// The calling thread holds the GIL.
inline void enter_undisturbed() {
  if (num_undisturbed++ > 0) return;
  frames_left(PyThreadState_Get()) += kOwnFrames;
  collects_afterwards = PyGC_Disable() != 0;
}

// One too many is none, as of a lock that was taken before.
inline void exit_undisturbed() {
  if (num_undisturbed == 0 || --num_undisturbed > 0) return;
  frames_left(PyThreadState_Get()) -= kOwnFrames;
  if (collects_afterwards) PyGC_Enable();
}

}  // namespace
