// An error that waits while Python is called.
#pragma once

#include <Python.h>

namespace ooc {

// Takes the error that is there, if there is one. Whoever calls holds the GIL.
class SetAside {
 public:
  SetAside() { PyErr_Fetch(&type_, &value_, &traceback_); }
  SetAside(const SetAside&) = delete;
  SetAside& operator=(const SetAside&) = delete;
  ~SetAside() {
    Py_XDECREF(type_);
    Py_XDECREF(value_);
    Py_XDECREF(traceback_);
  }

  // Pass on what was there, after a call that returned `done`: the result (owned; null where there was an error), with
  // the error that was set aside. Where the call failed, its own error stands, and the result is dropped.
  PyObject* pass_on(PyObject* done, PyObject* result) {
    if (done == nullptr) {
      Py_XDECREF(result);
      return nullptr;
    }
    Py_DECREF(done);
    PyErr_Restore(type_, value_, traceback_);
    type_ = value_ = traceback_ = nullptr;
    return result;
  }

 private:
  PyObject *type_, *value_, *traceback_;
};

}  // namespace ooc
