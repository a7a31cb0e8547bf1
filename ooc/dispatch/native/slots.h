// The slots of Python objects that native code reads and writes in place of Python's own: residencies, variables, records,
// reservations, transfers. So there is one truth, whoever looks.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <array>
#include <atomic>
#include <cstdint>

#include "demand.h"

namespace ooc {

// In the order of `_SLOTS` in ooc/dispatch/native_acts.py.
enum Slot : int {
  kReleases, kLoads, kArrivals, kRerun, kBirths,                    // Before
  kDirties, kWrites, kDrops, kDiscards,                             // After
  kVariable, kPlannedRuns, kTransfer, kWaits, kMoved, kFitted,      // ExecutableResidency
  kRecord, kSuccessor, kIndex, kPlannedNbytes, kEvictable, kDiesWithin, kIsElastic, kIsBorn,  // PlanVariable
  kState, kRuns, kStored, kRecordTransfer, kExports, kSeen, kGuard, kNbytes, kReservation, kAddress,
  kRecordSlot,                                                      // VariableRecord
  kGiven, kIsProtected, kIsFile, kNumChunks,                        // Reservation
  kEngine, kTicket, kTransferNbytes,                                // Transfer
  kOffset, kCapacity, kLastWrite, kReads, kIsFreed,                 // Slot, of the store
  kSegmentsAddress, kNumSegments, kSegmentsNbytes,                  // Segments, of a transfer
  kLoadedNbytes, kEvictedNbytes, kDroppedNbytes, kNumCrowded,       // Counters
  kNumSlots
};

class Slots {
 public:
  std::array<Py_ssize_t, kNumSlots> slots{};
  PyTypeObject* transfer_type = nullptr;  // borrowed
  const std::atomic<int64_t>* ring = nullptr;  // TransferEngine.finished_ring
  int64_t ring_length = 0;

  enum class Ended { kWell, kNot, kUnknown };  // unknown: it failed, or that was long ago

  // A slot's object, borrowed.
  PyObject* at(PyObject* object, Slot slot) const { return Demand::get(object, slots[slot]); }
  void set(PyObject* object, Slot slot, PyObject* value) const { take(object, slot, Py_NewRef(value)); }
  // As `set`, but takes over the value.
  void take(PyObject* object, Slot slot, PyObject* value) const { Demand::set(object, slots[slot], value); }
  bool is_true(PyObject* object, Slot slot) const { return at(object, slot) == Py_True; }
  int64_t number(PyObject* object, Slot slot) const { return PyLong_AsLongLong(at(object, slot)); }
  Py_ssize_t size(PyObject* acts, Slot list) const { return PyList_GET_SIZE(at(acts, list)); }

  // Of tuples of numbers. Sets no error.
  static bool are_equal(PyObject* one, PyObject* other) {
    if (one == other) return true;
    const int found = PyObject_RichCompareBool(one, other, Py_EQ);
    if (found < 0) PyErr_Clear();
    return found == 1;
  }

  // Visits the items of a list until `visit` returns false, as this does then.
  template <class Visit>
  bool each(PyObject* acts, Slot list, Visit&& visit) const {
    for (Py_ssize_t i = 0; i < size(acts, list); ++i) {
      if (!visit(PyList_GET_ITEM(at(acts, list), i))) return false;
    }
    return true;
  }

  // How a transfer has ended, if it has; none at all has ended well.
  Ended ended(PyObject* transfer) const {
    if (transfer == Py_None) return Ended::kWell;
    if (Py_TYPE(transfer) != transfer_type) return Ended::kUnknown;
    const int64_t ticket = number(transfer, kTicket);
    if (last_at(ticket) == ticket) return Ended::kWell;
    return is_under_way(ticket) ? Ended::kNot : Ended::kUnknown;
  }
  bool is_under_way(int64_t ticket) const {
    const int64_t last = last_at(ticket);
    return (last < 0 ? -last : last) < ticket;
  }

 private:
  int64_t last_at(int64_t ticket) const { return ring[ticket % ring_length].load(std::memory_order_acquire); }
};

}  // namespace ooc
