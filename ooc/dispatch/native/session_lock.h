// The session's lock: a reentrant one, as threading.RLock is, which native code takes and gives back in place.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pythread.h>

#include "set_aside.h"

namespace ooc {

// Who holds it, and how often, is read and written with the GIL held.
struct SessionLock {
  PyObject_HEAD
  PyThread_type_lock lock;
  unsigned long owner;
  unsigned long depth;

  bool is_mine() const { return depth > 0 && owner == PyThread_get_thread_ident(); }

  // Waits without the GIL for another thread to give it back. Sets no error.
  void take() {
    if (is_mine()) {
      ++depth;
      return;
    }
    if (PyThread_acquire_lock(lock, NOWAIT_LOCK) == 0) {
      PyThreadState* thread = PyEval_SaveThread();
      PyThread_acquire_lock(lock, WAIT_LOCK);
      PyEval_RestoreThread(thread);
    }
    owner = PyThread_get_thread_ident();
    depth = 1;
  }

  // Once for each `take`, by the thread that has taken it.
  void give_back() {
    if (--depth == 0) PyThread_release_lock(lock);
  }
};

// acquire() -> True, once this thread has the lock.
inline PyObject* session_lock_acquire(PyObject* object, PyObject*) {
  reinterpret_cast<SessionLock*>(object)->take();
  Py_RETURN_TRUE;
}

// release(): raises RuntimeError where this thread does not have it.
inline PyObject* session_lock_release(PyObject* object, PyObject*) {
  auto* lock = reinterpret_cast<SessionLock*>(object);
  if (!lock->is_mine()) {
    PyErr_SetString(PyExc_RuntimeError, "cannot release un-acquired lock");
    return nullptr;
  }
  lock->give_back();
  Py_RETURN_NONE;
}

inline PyObject* session_lock_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* made = reinterpret_cast<SessionLock*>(type->tp_alloc(type, 0));
  if (made == nullptr) return nullptr;
  made->lock = PyThread_allocate_lock();
  if (made->lock != nullptr) return reinterpret_cast<PyObject*>(made);
  Py_DECREF(made);
  return PyErr_NoMemory();
}

inline void session_lock_dealloc(PyObject* object) {
  auto* own = reinterpret_cast<SessionLock*>(object);
  if (own->lock != nullptr) {
    if (own->depth > 0) PyThread_release_lock(own->lock);
    PyThread_free_lock(own->lock);
  }
  Py_TYPE(object)->tp_free(object);
}

inline PyMethodDef session_lock_methods[] = {
    {"acquire", session_lock_acquire, METH_NOARGS, "Take it, once more if this thread has it."},
    {"release", session_lock_release, METH_NOARGS, "Give it back once."},
    {nullptr, nullptr, 0, nullptr}};

inline PyTypeObject session_lock_type = [] {
  PyTypeObject t = {PyVarObject_HEAD_INIT(nullptr, 0)};
  t.tp_name = "ooc._dispatch.SessionLock";
  t.tp_basicsize = sizeof(SessionLock);
  t.tp_flags = Py_TPFLAGS_DEFAULT;
  t.tp_new = session_lock_new;
  t.tp_dealloc = session_lock_dealloc;
  t.tp_methods = session_lock_methods;
  t.tp_doc = "A reentrant lock; see ooc/dispatch/native/session_lock.h.";
  return t;
}();

// How native code takes and gives back the lock that Python's two callables are of: in place where they are a
// SessionLock's own, else by calling them. Both are owned by whoever has this.
class LockCalls {
 public:
  PyObject *acquire = nullptr, *release = nullptr;

  // Once both are there. Called where the type is made: another library has its own.
  void look() {
    const auto is_method = [](PyObject* call, PyCFunction function) {
      return PyCFunction_Check(call) && PyCFunction_GET_FUNCTION(call) == function;
    };
    if (!is_method(acquire, session_lock_acquire) || !is_method(release, session_lock_release)) return;
    PyObject* owner = PyCFunction_GET_SELF(acquire);
    if (owner == PyCFunction_GET_SELF(release)) own_ = reinterpret_cast<SessionLock*>(owner);
  }

  // False with an error: it is not taken.
  bool take() const {
    if (own_ != nullptr) {
      own_->take();
      return true;
    }
    PyObject* taken = PyObject_CallNoArgs(acquire);
    Py_XDECREF(taken);
    return taken != nullptr;
  }
  // Whether that went well; an error that is there already stays, unless there is one of this.
  bool give_back() const {
    if (own_ != nullptr && own_->is_mine()) {
      own_->give_back();
      return true;
    }
    SetAside error;
    PyObject* given = PyObject_CallNoArgs(release);
    const bool is_given = given != nullptr;
    error.pass_on(given, nullptr);
    return is_given;
  }

 private:
  SessionLock* own_ = nullptr;
};

}  // namespace ooc
