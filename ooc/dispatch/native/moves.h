// Planned transfers to and from the store, begun without Python: what `ResidencyActs.start_load` and `start_write` do,
// down to the transfer engine, in the same books. Any doubt (`may_load`, `may_write`), and they are Python's.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <array>
#include <cstdint>
#include <vector>

#include "slots.h"

namespace ooc {

class Moves {
 public:
  // ooc_transfers_submit of vmm/native/transfers.cpp.
  using Submit = int64_t (*)(void*, int, int, int64_t, int, const uint64_t*, int, const int64_t*, int);

  // All of these are owned.
  PyObject* engine = nullptr;    // TransferEngine
  PyObject* refusal = nullptr;   // refusal(answer, what): the exception for a negative answer of the engine's
  PyObject* note = nullptr;      // note((ticket, address, bytes)): RecordTransfers.moves.append
  PyObject* held = nullptr;      // a dict that has slots while forked processes may read them
  PyObject* counters = nullptr;  // Counters
  PyObject *writes = nullptr, *loads = nullptr;  // lists: ResidencyActs.writes, loads
  Submit submit = nullptr;
  void* handle = nullptr;
  int descriptor = -1, flags = 0;
  const uint64_t* variable_nbytes = nullptr;  // per variable of the plan, which owns it
  uint64_t num_begun = 0;

  explicit Moves(const Slots& slots) : slots_(slots) {}
  Moves(const Moves&) = delete;
  Moves& operator=(const Moves&) = delete;

  std::array<PyObject*, 7> objects() const { return {engine, refusal, note, held, counters, writes, loads}; }
  void disown() { engine = refusal = note = held = counters = writes = loads = nullptr; }

  // Whether the bytes of a resident record, which a residency has in its chunks, may be written, or need not be.
  bool may_write(PyObject* residency, PyObject* record) const {
    return PyDict_GET_SIZE(held) == 0 && may_move(residency, record, present_nbytes(residency, record)) &&
           slots_.are_equal(slots_.at(record, kRuns), slots_.at(residency, kPlannedRuns));
  }

  // Whether a record that is away may be loaded into the chunks of a residency.
  bool may_load(PyObject* residency, PyObject* record) const {
    return may_move(residency, record, slots_.number(record, kNbytes)) &&
           slots_.at(slots_.at(record, kRecordSlot), kLastWrite) != Py_None &&
           each_wait(residency, [&](PyObject* other) { return ended(other) != Ended::kUnknown; });
  }

  // Whether nothing that has used a residency's chunks before is still, or may be, on its way.
  bool is_free(PyObject* residency) const {
    return each_wait(residency, [&](PyObject* other) { return ended(other) == Ended::kWell; });
  }

  // Forgets what has used a residency's chunks before and is over.
  void forget_ended(PyObject* residency) const {
    each_wait(residency, [&](PyObject* other) {
      if (ended(other) == Ended::kWell) slots_.set(other, kTransfer, Py_None);
      return true;
    });
  }

  // ResidencyActs.start_write. False with an error.
  bool write(PyObject* residency, PyObject* record) {
    const int64_t nbytes = present_nbytes(residency, record);
    if (nbytes != slots_.number(record, kNbytes)) slots_.take(record, kNbytes, PyLong_FromLongLong(nbytes));
    if (slots_.is_true(record, kStored)) return count(kDroppedNbytes, nbytes);
    PyObject* slot = slots_.at(record, kRecordSlot);
    after_ = under_way(slots_.at(slot, kReads));
    if (slots_.at(slot, kLastWrite) != Py_None && slots_.is_under_way(slots_.number(slot, kLastWrite))) {
      after_.push_back(slots_.number(slot, kLastWrite));
    }
    PyObject* transfer = begin(kWrite, slot, fitted(residency, record, nbytes));
    if (transfer == nullptr) return false;
    slots_.set(slot, kLastWrite, slots_.at(transfer, kTicket));
    slots_.take(slot, kReads, PyList_New(0));
    slots_.set(record, kStored, Py_True);
    return enter(transfer, residency, record, writes) && count(kEvictedNbytes, nbytes);
  }

  // ResidencyActs.start_load. False with an error.
  bool load(PyObject* residency, PyObject* record, PyObject* loading) {
    after_.clear();
    forget_ended(residency);
    each_wait(residency, [&](PyObject* other) { return add_ticket(slots_.at(other, kTransfer)), true; });
    add_ticket(slots_.at(record, kRecordTransfer));
    PyObject* slot = slots_.at(record, kRecordSlot);
    after_.push_back(slots_.number(slot, kLastWrite));  // also when it is over: if it failed there is nothing to read
    const int64_t nbytes = slots_.number(record, kNbytes);
    PyObject* memory = fitted(residency, record, nbytes);
    PyObject* transfer = begin(kRead, slot, memory);
    if (transfer == nullptr) return false;
    slots_.set(record, kState, loading);
    slots_.set(record, kRuns, PyTuple_GET_ITEM(memory, 0));
    return note_read(slot, slots_.at(transfer, kTicket)) && enter(transfer, residency, record, loads) &&
           count(kLoadedNbytes, nbytes);
  }

  // Adds to a counter. False with an error.
  bool count(Slot counter, int64_t more) const {
    PyObject* sum = PyLong_FromLongLong(slots_.number(counters, counter) + more);
    if (sum == nullptr) return false;
    slots_.take(counters, counter, sum);
    return true;
  }

 private:
  using Ended = Slots::Ended;
  enum Kind : int { kWrite = 0, kRead = 1 };
  static constexpr Py_ssize_t kMostReads = 8;  // noted of a slot before those that are over are forgotten

  // What `FileStore` asks of a transfer of so many bytes; and that their memory was made ready by an earlier one.
  bool may_move(PyObject* residency, PyObject* record, int64_t nbytes) const {
    PyObject* slot = slots_.at(record, kRecordSlot);
    if (slot == Py_None || slots_.at(slot, kIsFreed) != Py_False || slots_.number(record, kExports) != 0) return false;
    PyObject* memory = fitted(residency, record, nbytes);
    if (memory == nullptr) return false;
    return slots_.number(PyTuple_GET_ITEM(memory, 1), kSegmentsNbytes) <= slots_.number(slot, kCapacity);
  }

  // The bytes that the record has now: `note_present_nbytes`.
  int64_t present_nbytes(PyObject* residency, PyObject* record) const {
    PyObject* variable = slots_.at(residency, kVariable);
    const bool is_noted = slots_.is_true(variable, kIsElastic) && slots_.is_true(variable, kIsBorn);
    if (!is_noted) return slots_.number(record, kNbytes);
    return static_cast<int64_t>(variable_nbytes[slots_.number(variable, kIndex)]);
  }

  // (chunks, Segments) for so many bytes of a record, as `fitting` has made them; borrowed, or null: it has not.
  PyObject* fitted(PyObject* residency, PyObject* record, int64_t nbytes) const {
    PyObject* size = Py_BuildValue("(LO)", static_cast<long long>(nbytes),
                                   slots_.at(slots_.at(record, kReservation), kNumChunks));
    PyObject* found = size != nullptr ? PyDict_GetItemWithError(slots_.at(residency, kFitted), size) : nullptr;
    Py_XDECREF(size);
    if (found == nullptr) PyErr_Clear();
    return found;
  }

  Ended ended(PyObject* residency) const { return slots_.ended(slots_.at(residency, kTransfer)); }

  // Visits the earlier holders of a residency's chunks until `visit` returns false, as this does then.
  template <class Visit>
  bool each_wait(PyObject* residency, Visit&& visit) const {
    PyObject* waits = slots_.at(residency, kWaits);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(waits); ++i) {
      if (!visit(PyTuple_GET_ITEM(waits, i))) return false;
    }
    return true;
  }

  std::vector<int64_t> under_way(PyObject* tickets) const {
    std::vector<int64_t> found;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tickets); ++i) {
      const int64_t ticket = PyLong_AsLongLong(PyList_GET_ITEM(tickets, i));
      if (slots_.is_under_way(ticket)) found.push_back(ticket);
    }
    return found;
  }

  void add_ticket(PyObject* transfer) {
    if (transfer != Py_None) after_.push_back(slots_.number(transfer, kTicket));
  }

  // Hands a transfer to the engine: a new `Transfer`, or null with an error.
  PyObject* begin(Kind kind, PyObject* slot, PyObject* memory) {
    PyObject* segments = PyTuple_GET_ITEM(memory, 1);
    const int64_t ticket = submit(handle, kind, descriptor, slots_.number(slot, kOffset), flags,
                                  reinterpret_cast<const uint64_t*>(slots_.number(segments, kSegmentsAddress)),
                                  static_cast<int>(slots_.number(segments, kNumSegments)), after_.data(),
                                  static_cast<int>(after_.size()));
    if (ticket < 0) {
      PyObject* error = PyObject_CallFunction(refusal, "Ls", static_cast<long long>(ticket), "a planned transfer");
      if (error != nullptr) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
      Py_XDECREF(error);
      return nullptr;
    }
    ++num_begun;
    PyObject* transfer = slots_.transfer_type->tp_alloc(slots_.transfer_type, 0);  // no Python runs for it
    if (transfer == nullptr) return nullptr;
    slots_.set(transfer, kEngine, engine);
    slots_.take(transfer, kTicket, PyLong_FromLongLong(ticket));
    slots_.set(transfer, kTransferNbytes, slots_.at(segments, kSegmentsNbytes));
    return transfer;
  }

  // Notes a read of a slot, so that its next write comes after it. False with an error.
  bool note_read(PyObject* slot, PyObject* ticket) const {
    if (PyList_GET_SIZE(slots_.at(slot, kReads)) >= kMostReads) {
      PyObject* left = PyList_New(0);
      if (left == nullptr) return false;
      for (const int64_t read : under_way(slots_.at(slot, kReads))) {
        PyObject* number = PyLong_FromLongLong(read);
        if (number != nullptr) PyList_Append(left, number);
        Py_XDECREF(number);
      }
      slots_.take(slot, kReads, left);
    }
    return PyList_Append(slots_.at(slot, kReads), ticket) == 0;
  }

  // Takes over a transfer that has begun: the record's, the residency's, and in the session's books. False with an error.
  bool enter(PyObject* transfer, PyObject* residency, PyObject* record, PyObject* list) const {
    slots_.set(record, kRecordTransfer, transfer);
    slots_.set(residency, kMoved, record);
    slots_.take(residency, kTransfer, transfer);
    PyObject* move = PyTuple_Pack(3, slots_.at(transfer, kTicket), slots_.at(record, kAddress), slots_.at(record, kNbytes));
    PyObject* noted = move != nullptr ? PyObject_CallOneArg(note, move) : nullptr;
    Py_XDECREF(move);
    Py_XDECREF(noted);
    return noted != nullptr && PyList_Append(list, residency) == 0;
  }

  const Slots& slots_;
  std::vector<int64_t> after_;  // what the next transfer waits for
};

}  // namespace ooc
