// Call sites of ops, as ooc/tracing/call_sites.py finds them, but for what it was asked before: a walk up
// the Python stack that ends at the innermost line of user code and the innermost module's call.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/SequenceNumber.h>

#include <cstdint>
#include <unordered_map>

namespace ooc {

class CallSites {
 public:
  enum Kind : long { kOther = 0, kUsers = 1, kCall = 2, kBackward = 3 };

  // Borrowed from the Python object, which outlives this one: `find() -> str` walks the whole stack, `kind(code) -> int`
  // is one of Kind, `forward` maps an autograd node's number to the text of the op that made it.
  PyObject *find = nullptr, *kind = nullptr, *forward = nullptr;
  PyObject* current_node = nullptr;  // torch's function

  // Whether an autograd node runs on this thread, and its number; -1: one that accumulates a gradient.
  using NodeOf = bool (*)(long long* number);

  // Of the op that was asked about last: `OpRecord.node`.
  long long node_number() const { return node_number_; }

  ~CallSites() { clear(); }

  void clear() {
    for (auto& [code, value] : kinds_) Py_DECREF(code);
    kinds_.clear();
    for (auto& [key, site] : sites_) {
      Py_DECREF(site.text);
      Py_XDECREF(site.module);
    }
    sites_.clear();
    for (auto& [text, backward] : backwards_) {
      Py_DECREF(text);
      Py_DECREF(backward);
    }
    backwards_.clear();
  }

  // The text for the op that is being dispatched; a new reference, or null with an error. Where `node_of` is null, Python
  // is asked for the node.
  PyObject* of_this_op(NodeOf node_of) {
    Node node;
    if (node_of != nullptr) {
      node.runs = node_of(&node.number);
    } else if (!ask_for_node(node)) {
      return nullptr;
    }
    return of_this_op(node);
  }

 private:
  struct Key {
    PyObject* code;
    int lasti;
    PyObject* module;
    bool is_backward;
    bool operator==(const Key&) const = default;
  };
  struct Hash {
    size_t operator()(const Key& key) const {
      return (reinterpret_cast<size_t>(key.code) >> 4) * 31 + static_cast<size_t>(key.lasti) * 7919 +
             (reinterpret_cast<size_t>(key.module) >> 4) * 127 + key.is_backward;
    }
  };
  struct Site {
    PyObject* text;
    PyObject* module;  // a weak reference: another module may come to lie at the same address
  };

  struct Node {
    bool runs = false;
    long long number = 0;
  };

  static constexpr size_t kMost = 10000;  // programs that make new code all the time have more

  PyObject* of_this_op(const Node& node) {
    node_number_ = 0;
    if (kinds_.size() > kMost || sites_.size() > kMost) clear();
    Key key{nullptr, 0, nullptr, false};
    PyObject* module = nullptr;  // owned
    static PyObject* self_name = PyUnicode_InternFromString("self");
    PyFrameObject* frame = PyEval_GetFrame();
    Py_XINCREF(frame);
    while (frame != nullptr && (key.code == nullptr || module == nullptr)) {
      PyCodeObject* code = PyFrame_GetCode(frame);
      const long kind = kind_of(reinterpret_cast<PyObject*>(code));
      Py_DECREF(code);  // the frame has it
      if (kind < 0) break;
      if (kind == kUsers && key.code == nullptr) {
        key.code = reinterpret_cast<PyObject*>(code);
        key.lasti = PyFrame_GetLasti(frame);
      } else if (kind == kCall && module == nullptr) {
        PyObject* locals = PyFrame_GetLocals(frame);
        module = locals != nullptr ? PyObject_GetItem(locals, self_name) : nullptr;
        Py_XDECREF(locals);
        if (module == nullptr) break;
      } else if (kind == kBackward && key.code == nullptr && module == nullptr) {
        key.is_backward = true;
        PyObject* known = node.runs ? backward_of(node.number) : nullptr;
        if (known != nullptr || PyErr_Occurred()) {
          Py_DECREF(frame);
          return known;
        }
      }
      PyFrameObject* back = PyFrame_GetBack(frame);
      Py_DECREF(frame);
      frame = back;
    }
    Py_XDECREF(frame);
    if (PyErr_Occurred()) {
      Py_XDECREF(module);
      return nullptr;
    }
    key.module = module;
    PyObject* text = at(key);
    Py_XDECREF(module);
    if (text != nullptr && !node.runs && !note_node(text)) Py_CLEAR(text);
    return text;
  }

  // The text of a site, asked of Python once.
  PyObject* at(const Key& key) {
    const auto found = sites_.find(key);
    if (found != sites_.end()) {
      PyObject* referent = nullptr;
      const bool is_same = found->second.module == nullptr ||
                           (referent = PyObject_CallNoArgs(found->second.module)) == key.module;
      Py_XDECREF(referent);
      if (is_same) return Py_NewRef(found->second.text);
      if (PyErr_Occurred()) return nullptr;
    }
    PyObject* text = PyObject_CallNoArgs(find);
    if (text == nullptr) return nullptr;
    PyObject* weak = nullptr;
    if (key.module != nullptr && (weak = PyWeakref_NewRef(key.module, nullptr)) == nullptr) {
      PyErr_Clear();  // a module that cannot be referred to weakly: not remembered
      return text;
    }
    Site& site = sites_[key];
    Py_XSETREF(site.text, Py_NewRef(text));
    Py_XSETREF(site.module, weak);
    return text;
  }

  long kind_of(PyObject* code) {
    const auto found = kinds_.find(code);
    if (found != kinds_.end()) return found->second;
    PyObject* number = PyObject_CallOneArg(kind, code);
    if (number == nullptr) return -1;
    const long value = PyLong_AsLong(number);
    Py_DECREF(number);
    if (value < 0) return -1;
    kinds_.emplace(Py_NewRef(code), value);
    return value;
  }

  // False with an error.
  bool ask_for_node(Node& node) const {
    static PyObject* name = PyUnicode_InternFromString("_sequence_nr");
    PyObject* object = PyObject_CallNoArgs(current_node);
    PyObject* number = object != nullptr && object != Py_None ? PyObject_CallMethodNoArgs(object, name) : nullptr;
    Py_XDECREF(object);
    if (number == nullptr) return PyErr_Occurred() == nullptr;
    node.runs = true;
    node.number = PyLong_AsLongLong(number);
    PyErr_Clear();  // what accumulates a gradient has the largest number there is, and no op has made it
    Py_DECREF(number);
    return true;
  }

  // "backward of ..." for an autograd node whose forward op is known; null, without an error, if it is not.
  PyObject* backward_of(long long value) {
    if (value < 0) return nullptr;
    node_number_ = -1 - value;
    PyObject* number = PyLong_FromLongLong(value);
    if (number == nullptr) return nullptr;
    PyObject* text = PyDict_GetItemWithError(forward, number);
    Py_DECREF(number);
    if (text == nullptr || PyUnicode_GetLength(text) == 0) return nullptr;
    const auto found = backwards_.find(text);
    if (found != backwards_.end()) return Py_NewRef(found->second);
    PyObject* backward = PyUnicode_FromFormat("backward of %U", text);
    if (backward != nullptr) backwards_.emplace(Py_NewRef(text), Py_NewRef(backward));
    return backward;
  }

  // The op's own node, if it has one, is the youngest; the first op to come by made it.
  bool note_node(PyObject* text) {
    node_number_ = static_cast<long long>(at::sequence_number::peek());
    PyObject* number = PyLong_FromLongLong(node_number_ - 1);
    if (number == nullptr) return false;
    const bool is_noted = PyDict_SetDefault(forward, number, text) != nullptr;
    Py_DECREF(number);
    return is_noted;
  }

  std::unordered_map<PyObject*, long> kinds_;
  std::unordered_map<Key, Site, Hash> sites_;
  std::unordered_map<PyObject*, PyObject*> backwards_;
  long long node_number_ = 0;
};

}  // namespace ooc
