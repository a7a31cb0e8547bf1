// Births on demand into memory that lies ready (ooc/memory/births.py), and the frees that come before them, without
// Python: what `OpRunner.cold_allocate` does where nothing is to be moved, mapped, or taken from the pool. It reads and
// writes Python's own books and the records' slots in place, so there is one truth, whoever looks. It looks at everything
// first; where anything is not plain it changes nothing, and the allocation is Python's.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <array>
#include <cstdint>
#include <vector>

#include "../../../vmm/native/allocator.h"
#include "demand.h"
#include "set_aside.h"

namespace ooc {

// Copy, or take, the log's oldest events (vmm/native/table.h): how many.
using TakeEvents = uint64_t (*)(vmm::Event* out, uint64_t capacity);

// In the order of `_BIRTH_SLOTS` in ooc/dispatch/native_births.py.
enum BirthSlot : int {
  kItsState, kItsRuns, kItsExports, kItsGuard, kItsSlot, kItsReservation, kItsAddress, kItsNbytes, kItsSerial, kItsUsed,
  kIsWorkspace,                                                               // VariableRecord
  kPlaceAddress, kPlaceNbytes, kPlaceChunks, kPlaceGiven, kPlaceIsProtected, kPlaceIsFile,  // Reservation
  kNumBirthSlots
};

class Births {
 public:
  // All of these are owned. A ResidencyManager, its Births, a PartMemory; dicts of the first, the second, the allocator's.
  PyObject *manager = nullptr, *births = nullptr, *parts = nullptr, *resident = nullptr, *ready = nullptr;
  PyObject* detached = nullptr;
  PyObject* prototype = nullptr;  // a record as it is born, but for its place, size, serial and times
  long long chunk_nbytes = 0;
  long long ready_fraction = 0, loop_births = 0;  // `READY_FRACTION` and `LOOP_BIRTHS` of ooc/memory/births.py
  long no_guard = 0;
  TakeEvents peek = nullptr, drain = nullptr;
  std::array<Py_ssize_t, kNumBirthSlots> slots{};
  std::vector<Py_ssize_t> record_slots;  // all that a record has
  uint64_t num_served = 0;

  Births() = default;
  Births(const Births&) = delete;
  Births& operator=(const Births&) = delete;
  ~Births() {
    for (PyObject* object : objects()) Py_XDECREF(object);
  }
  std::array<PyObject*, 7> objects() const { return {manager, births, parts, resident, ready, detached, prototype}; }
  // What was parsed is borrowed until `own`; `disown` forgets it.
  void own() const {
    for (PyObject* object : objects()) Py_INCREF(object);
  }
  void disown() { manager = births = parts = resident = ready = detached = prototype = nullptr; }

  // An address for an allocation of the session's thread, which holds its lock, on demand; 0: it is Python's. Sets no
  // error.
  uint64_t serve(const Demand& demand, const vmm::State& table, uint64_t nbytes, int64_t now_ns) {
    uint64_t address = 0;
    if (is_plain() && count() && absorb(demand, table)) address = bear(demand, table, nbytes, now_ns);
    PyErr_Clear();
    return address;
  }

 private:
  static constexpr uint64_t kMostEvents = 64;  // where more wait, it is Python's

  PyObject* at(PyObject* object, BirthSlot slot) const { return Demand::get(object, slots[slot]); }
  void set(PyObject* object, BirthSlot slot, PyObject* value) const {
    Demand::set(object, slots[slot], Py_NewRef(value));
  }
  long long number(PyObject* object, BirthSlot slot) const { return PyLong_AsLongLong(at(object, slot)); }

  // Attributes of the objects above. They live as long as the process.
  struct Names {
    PyObject* pool = PyUnicode_InternFromString("_pool");  // a ResidencyManager's ChunkPool
    PyObject* num_in_pool = PyUnicode_InternFromString("_num_chunks");
    PyObject* free = PyUnicode_InternFromString("_free");  // its FreeRanges
    PyObject* total = PyUnicode_InternFromString("_total");
    PyObject* num_ready = PyUnicode_InternFromString("num_ready");
    PyObject* num_serials = PyUnicode_InternFromString("num_serials");
    PyObject* peak_chunks = PyUnicode_InternFromString("peak_chunks");
    PyObject* takes_away = PyUnicode_InternFromString("takes_away");
    PyObject* lent = PyUnicode_InternFromString("lent");
  };
  static const Names& names() {
    static const Names all;
    return all;
  }

  // -1 with an error.
  static long long number(PyObject* object, PyObject* name) {
    PyObject* value = PyObject_GetAttr(object, name);
    const long long found = value != nullptr ? PyLong_AsLongLong(value) : -1;
    Py_XDECREF(value);
    return found;
  }
  static bool set_number(PyObject* object, PyObject* name, long long value) {
    PyObject* number = PyLong_FromLongLong(value);
    const bool is_set = number != nullptr && PyObject_SetAttr(object, name, number) == 0;
    Py_XDECREF(number);
    return is_set;
  }
  static bool is(PyObject* object, PyObject* name, PyObject* wanted) {
    PyObject* value = PyObject_GetAttr(object, name);
    Py_XDECREF(value);
    return value == wanted;
  }

  // No op runs in parts, whose memory is counted otherwise.
  bool is_plain() const { return is(parts, names().takes_away, Py_False) && is(parts, names().lent, Py_None); }

  // Whether what was freed there had outlived another session; maybe with an error.
  bool is_detached(uint64_t address) const {
    if (PyDict_GET_SIZE(detached) == 0) return false;
    PyObject* number = PyLong_FromUnsignedLongLong(address);
    const bool is_in = number == nullptr || PyDict_Contains(detached, number) != 0;
    Py_XDECREF(number);
    return is_in;
  }

  // What is free in the pool, which nothing here changes, what is ready, and how many storages there have been. False
  // with an error.
  bool count() {
    num_serials_ = number(manager, names().num_serials);
    num_ready_ = number(births, names().num_ready);
    // What `num_chunks` and `num_free` of the manager say, which each call two functions of Python's.
    PyObject* pool = PyObject_GetAttr(manager, names().pool);
    PyObject* free = pool != nullptr ? PyObject_GetAttr(pool, names().free) : nullptr;
    if (free != nullptr) {
      num_chunks_ = number(pool, names().num_in_pool);
      num_in_pool_ = number(free, names().total);
    }
    Py_XDECREF(free);
    Py_XDECREF(pool);
    return !PyErr_Occurred();
  }
  bool set_ready(long long num_chunks) {
    if (!set_number(births, names().num_ready, num_chunks)) return false;
    num_ready_ = num_chunks;
    return true;
  }

  // Whether the chunks and addresses of a freed variable may lie ready just as they are.
  bool may_lie_ready(const Demand& demand, PyObject* record) const {
    const bool is_wanted = num_serials_ - number(record, kItsSerial) <= loop_births ||
                           num_in_pool_ * ready_fraction >= num_chunks_;  // as `Births.keep_ready` asks
    return is_wanted && at(record, kItsState) == demand.resident && number(record, kItsGuard) == no_guard &&
           number(record, kItsExports) == 0 && at(record, kItsSlot) == Py_None &&
           at(at(record, kItsReservation), kPlaceIsFile) == Py_False;
  }

  // Note what was allocated and freed since somebody last looked. False: Python is to do that.
  bool absorb(const Demand& demand, const vmm::State& table) {
    if (table.num_events.load(std::memory_order_relaxed) == 0) return true;
    std::array<vmm::Event, kMostEvents + 1> events;
    const uint64_t count = peek(events.data(), events.size());
    if (count > kMostEvents) return false;
    std::array<PyObject*, kMostEvents> freed;  // borrowed
    size_t num_freed = 0;
    for (uint64_t i = 0; i < count; ++i) {
      if (events[i].kind != vmm::kFree) continue;
      PyObject* record = demand.at(events[i].address);
      if (record == nullptr ? is_detached(events[i].address) : !may_lie_ready(demand, record)) return false;
      if (PyErr_Occurred()) return false;
      if (record != nullptr) freed[num_freed++] = record;
    }
    for (size_t i = 0; i < num_freed; ++i) {
      if (!lay_ready(demand, freed[i])) return false;  // Python finds no record any more of those before it
    }
    drain(events.data(), count);
    demand.log->events->insert(demand.log->events->end(), events.data(), events.data() + count);
    return true;
  }

  // What `ResidencyManager.free` does. False with an error: nothing has changed.
  bool lay_ready(const Demand& demand, PyObject* record) {
    PyObject *place = at(record, kItsReservation), *size = at(place, kPlaceChunks);
    PyObject* some = ready_of(size);
    PyObject* now = some != nullptr ? PyLong_FromLongLong(num_serials_) : nullptr;
    PyObject* entry = now != nullptr ? PyTuple_Pack(3, place, at(record, kItsRuns), now) : nullptr;
    const bool is_in = entry != nullptr && PyList_Append(some, entry) == 0;
    Py_XDECREF(now);
    Py_XDECREF(entry);
    if (!is_in) return false;
    if (!set_ready(num_ready_ + PyLong_AsLongLong(size))) return drop_last(some) && false;
    PyObject* address = Py_NewRef(at(record, kItsAddress));
    if (PyDict_DelItem(resident, address) < 0) PyErr_Clear();
    if (PyDict_DelItem(demand.records, address) < 0) PyErr_Clear();  // it was there: nothing else can go wrong
    Py_DECREF(address);
    return true;
  }

  // The list of what is ready of a size, borrowed; null with an error.
  PyObject* ready_of(PyObject* size) const {
    PyObject* some = PyDict_GetItemWithError(ready, size);
    if (some != nullptr || PyErr_Occurred()) return some;
    PyObject* list = PyList_New(0);
    if (list != nullptr && PyDict_SetItem(ready, size, list) == 0) some = list;
    Py_XDECREF(list);  // the dict has it
    return some;
  }
  static bool drop_last(PyObject* list) {
    SetAside error;  // may there be one or not
    const Py_ssize_t size = PyList_GET_SIZE(list);
    const bool is_done = PyList_SetSlice(list, size - 1, size, nullptr) == 0;
    error.pass_on(Py_NewRef(Py_None), nullptr);
    return is_done;
  }

  // Give the newest of what is ready of this size to a new variable.
  uint64_t bear(const Demand& demand, const vmm::State& table, uint64_t nbytes, int64_t now_ns) {
    const long long num_chunks = (static_cast<long long>(nbytes) + chunk_nbytes - 1) / chunk_nbytes;
    PyObject* size = PyLong_FromLongLong(num_chunks);
    PyObject* some = size != nullptr ? PyDict_GetItemWithError(ready, size) : nullptr;
    Py_XDECREF(size);
    if (some == nullptr || PyList_GET_SIZE(some) == 0) return 0;
    PyObject* entry = PyList_GET_ITEM(some, PyList_GET_SIZE(some) - 1);
    PyObject *place = PyTuple_GET_ITEM(entry, 0), *runs = PyTuple_GET_ITEM(entry, 1);
    if (at(place, kPlaceGiven) != runs || at(place, kPlaceIsProtected) != Py_False) return 0;
    const bool is_workspace = (table.position.load(std::memory_order_relaxed) & 1) != 0;  // it is of an op that runs
    PyObject* record = newborn(place, runs, nbytes, now_ns, is_workspace);
    const bool is_born = record != nullptr && enter(demand, record) && drop_last(some);
    if (is_born) note(place, record, num_chunks);
    Py_XDECREF(record);
    return is_born ? PyLong_AsUnsignedLongLong(at(place, kPlaceAddress)) : 0;
  }

  // A new record, as `VariableRecord(...)` and `born` make it; null with an error.
  PyObject* newborn(PyObject* place, PyObject* runs, uint64_t nbytes, int64_t now_ns, bool is_workspace) const {
    PyObject* size = PyLong_FromUnsignedLongLong(nbytes);
    PyObject* time = PyLong_FromLongLong(now_ns);
    PyObject* serial = PyObject_GetAttr(manager, names().num_serials);
    PyTypeObject* type = Py_TYPE(prototype);
    PyObject* record = size != nullptr && time != nullptr && serial != nullptr ? type->tp_alloc(type, 0) : nullptr;
    if (record != nullptr) {
      for (const Py_ssize_t slot : record_slots) Demand::set(record, slot, Py_XNewRef(Demand::get(prototype, slot)));
      set(record, kItsAddress, at(place, kPlaceAddress));
      set(record, kItsReservation, place);
      set(record, kItsRuns, runs);
      set(record, kItsNbytes, size);
      set(record, kItsSerial, serial);
      set(record, kItsUsed, time);
      set(record, kIsWorkspace, is_workspace ? Py_True : Py_False);
    }
    Py_XDECREF(size);
    Py_XDECREF(time);
    Py_XDECREF(serial);
    return record;
  }

  // Manage a record from now on; false with an error: it is not.
  bool enter(const Demand& demand, PyObject* record) const {
    PyObject* address = at(record, kItsAddress);
    if (PyDict_SetItem(demand.records, address, record) < 0) return false;
    if (PyDict_SetItem(resident, address, record) == 0) return true;
    PyDict_DelItem(demand.records, address);
    return false;
  }

  // What is counted of a variable that was born.
  void note(PyObject* place, PyObject* record, long long num_chunks) {
    set(place, kPlaceNbytes, at(record, kItsNbytes));
    set_ready(num_ready_ - num_chunks);
    set_number(manager, names().num_serials, number(record, kItsSerial) + 1);
    const long long num_used = num_chunks_ - num_in_pool_ - num_ready_;
    if (num_used > number(manager, names().peak_chunks)) set_number(manager, names().peak_chunks, num_used);
    ++num_served;
  }

  long long num_chunks_ = 0, num_in_pool_ = 0, num_ready_ = 0;  // in the pool, free there, and ready, in this call
  long long num_serials_ = 0;  // before it
};

}  // namespace ooc
