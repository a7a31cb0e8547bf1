// Python frames of the session's own do not count towards the program's recursion limit.
//
// Where a program is near its limit, a `RecursionError` would otherwise arise within the residency manager or the
// executor, between two changes that belong together. So a critical section has frames of its own: the program's limit
// holds again when it ends. What an op runs in Python (a custom op's kernel) may use them, too.
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
inline thread_local unsigned num_sections = 0;

// The calling thread holds the GIL.
inline void enter_own_frames() {
  if (num_sections++ == 0) frames_left(PyThreadState_Get()) += kOwnFrames;
}

// One too many, as of a lock that was taken before a session began, is none.
inline void exit_own_frames() {
  if (num_sections > 0 && --num_sections == 0) frames_left(PyThreadState_Get()) -= kOwnFrames;
}

}  // namespace
