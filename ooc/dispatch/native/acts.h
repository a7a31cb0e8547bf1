// What goes before a planned op where nothing is to be moved or waited for: variables that should be dead are, what is
// released is in the store, what was loaded has arrived, and what is born finds its chunks mapped. What
// `Executor.before` does for such an op, under the session's lock like there. Any doubt, and all of it is Python's:
// nothing is changed before everything has been looked at. Guards are Python's, too; it is called for each.
//
// Residencies, variables, records, reservations and transfers are Python objects with slots, read and written in
// place. So there is one truth, whoever looks.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <array>
#include <atomic>
#include <cstdint>

#include "demand.h"
#include "set_aside.h"

namespace ooc {

// The slots that are used, in the order of `_SLOTS` in ooc/dispatch/native_acts.py.
enum Slot : int {
  kReleases, kLoads, kArrivals, kRerun, kBirths,                    // Before
  kVariable, kPlannedRuns, kTransfer, kWaits,                       // ExecutableResidency
  kRecord, kSuccessor, kIndex, kPlannedNbytes, kEvictable, kDiesWithin,  // PlanVariable
  kState, kRuns, kStored, kRecordTransfer, kExports, kSeen, kGuard, kNbytes, kReservation,  // VariableRecord
  kGiven, kIsProtected,                                             // Reservation
  kTicket,                                                          // Transfer
  kNumSlots
};

// The tables of a plan that its acts need; the plan owns them.
struct PlanActs {
  PyObject* before = nullptr;            // owned: a list, per op a Before or None
  const uint8_t* alive = nullptr;        // per variable
  const uint32_t* deaths = nullptr;      // variables that are freed in the step, in that order
  const uint32_t* num_deaths = nullptr;  // per op: how many of them are freed before it
};

class Acts {
 public:
  enum class Outcome { kDone, kPythons, kLeft, kError };  // left: the step is off its plan

  // All of these are owned. `empty`: lists that hold something while collectives are under way.
  PyObject *acquire = nullptr, *release = nullptr, *resident = nullptr, *loading = nullptr, *away = nullptr;
  PyObject *empty = nullptr, *transfer_type = nullptr;
  PyObject *lift = nullptr, *reread = nullptr, *guard = nullptr;  // functions of Python's: see `arrive` and `play`
  PyObject* records = nullptr;    // a dict: `ResidencyManager.records`
  PyObject* strangers = nullptr;  // a dict: the record of what was allocated beside the plan in this step, by address
  PyObject* met = nullptr;        // a list: those of them that the op which comes next, or runs, uses
  const std::atomic<int64_t>* ring = nullptr;  // TransferEngine.finished_ring
  int64_t ring_length = 0;
  long no_guard = 0;
  enum Releases : int { kNone = 0, kGuarded = 1, kAll = 2 };
  Releases releases = kNone;  // kGuarded: all, and stray touches are served of what is not born and freed in the step
  std::array<Py_ssize_t, kNumSlots> slots{};
  PlanActs plan;
  uint32_t num_dead = 0;   // deaths seen in this step
  uint64_t num_done = 0;

  Acts() = default;
  Acts(const Acts&) = delete;
  Acts& operator=(const Acts&) = delete;
  ~Acts() {
    for (PyObject* object : objects()) Py_XDECREF(object);
    Py_XDECREF(plan.before);
  }

  std::array<PyObject*, 13> objects() const {
    return {acquire, release, resident, loading, away, empty, transfer_type, lift, reread, guard, records, strangers, met};
  }
  // What was parsed is borrowed until `own`; `disown` forgets it.
  void own() const {  // before there are strangers
    for (PyObject* object : objects()) Py_XINCREF(object);
  }
  void disown() {
    acquire = release = resident = loading = away = empty = transfer_type = lift = reread = guard = nullptr;
    records = strangers = met = nullptr;
  }

  // Op `cursor` comes next; with 0 a step begins.
  void start(uint32_t cursor) {
    num_dead = 0;
    if (cursor == 0) PyDict_Clear(strangers);
  }

  // Another op is looked at.
  void forget_met() const {
    if (PyList_GET_SIZE(met) > 0) PyList_SetSlice(met, 0, PyList_GET_SIZE(met), nullptr);
  }

  // Whether a planned op may use what is at this address, which the plan does not have. It counts as seen, and as
  // written: of what goes beside the plan nobody notes who writes it. Who was freed, or has become a variable of the
  // plan, is no stranger any more, and another may be at its address. Sets no Python error.
  bool meets_stranger(uint64_t address) const {
    if (PyDict_GET_SIZE(strangers) == 0) return false;
    PyObject* number = PyLong_FromUnsignedLongLong(address);
    PyObject* record = number != nullptr ? PyDict_GetItemWithError(strangers, number) : nullptr;
    const bool is_managed = record != nullptr && PyDict_GetItemWithError(records, number) == record;
    Py_XDECREF(number);
    const bool is_met = is_managed && at(record, kState) == resident && PyList_Append(met, record) == 0;
    PyErr_Clear();
    if (!is_met) return false;
    set(record, kSeen, Py_True);
    set(record, kStored, Py_False);
    return true;
  }

  // Do what goes before op `index`. `is_expected()`: whether the plan is still at this op, once the lock is held.
  template <class IsExpected>
  Outcome play(uint32_t index, IsExpected&& is_expected) {
    if (plan.before == nullptr) return Outcome::kPythons;
    PyObject* acts = PyList_GET_ITEM(plan.before, index);
    if (acts == Py_None || at(acts, kRerun) != Py_None || size(acts, kLoads) != 0) return Outcome::kPythons;
    PyObject* locked = PyObject_CallNoArgs(acquire);
    if (locked == nullptr) return Outcome::kError;
    Py_DECREF(locked);
    Outcome outcome = Outcome::kPythons;
    if (is_expected() && is_quiet() && are_dead(index) && may_play(acts)) {
      const Kept kept(acts);  // Python may be called: whatever comes of that, it stays
      outcome = carry_out(acts, is_expected);
      ++num_done;
    }
    SetAside error;  // of Python's, if it has raised
    PyObject* unlocked = PyObject_CallNoArgs(release);
    error.pass_on(unlocked, nullptr);
    if (unlocked == nullptr) return Outcome::kError;
    return outcome;
  }

 private:
  enum class Ended { kWell, kNot, kUnknown };  // unknown: it failed, or that was long ago

  PyObject* at(PyObject* object, Slot slot) const { return Demand::get(object, slots[slot]); }
  void set(PyObject* object, Slot slot, PyObject* value) const { Demand::set(object, slots[slot], Py_NewRef(value)); }
  bool is_true(PyObject* object, Slot slot) const { return at(object, slot) == Py_True; }
  bool is_zero(PyObject* object, Slot slot) const { return PyLong_AsLong(at(object, slot)) == 0; }
  Py_ssize_t size(PyObject* acts, Slot list) const { return PyList_GET_SIZE(at(acts, list)); }

  // Holds an object while Python is called.
  class Kept {
   public:
    explicit Kept(PyObject* object) : object_(Py_NewRef(object)) {}
    ~Kept() { Py_DECREF(object_); }
    Kept(const Kept&) = delete;
    Kept& operator=(const Kept&) = delete;

   private:
    PyObject* object_;
  };

  // What has been looked at is done, in the order of `Executor.before`.
  template <class IsExpected>
  Outcome carry_out(PyObject* acts, IsExpected&& is_expected) const {
    Outcome outcome = Outcome::kDone;
    PyObject* to_guard = nullptr;
    const bool is_listed =
        each(acts, kReleases, [&](PyObject* residency) { return let_go(residency, to_guard); });
    if (to_guard != nullptr) {  // what was released is guarded, in one go, or Python leaves the plan
      PyObject* stays = is_listed ? PyObject_CallOneArg(guard, to_guard) : nullptr;
      Py_DECREF(to_guard);
      if (stays != nullptr) outcome = stays == Py_True && is_expected() ? Outcome::kDone : Outcome::kLeft;
      Py_XDECREF(stays);
      if (stays == nullptr) return Outcome::kError;
    }
    if (!is_listed) return Outcome::kError;
    const bool have_arrived = outcome == Outcome::kDone && each(acts, kArrivals, [&](PyObject* residency) {
      outcome = arrive(residency, is_expected);
      return outcome == Outcome::kDone;
    });
    if (have_arrived) each(acts, kBirths, [&](PyObject* residency) { bear(residency); return true; });
    return outcome;
  }

  template <class Visit>
  bool each(PyObject* acts, Slot list, Visit&& visit) const {
    for (Py_ssize_t i = 0; i < size(acts, list); ++i) {
      if (!visit(PyList_GET_ITEM(at(acts, list), i))) return false;
    }
    return true;
  }

  bool is_quiet() const {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(empty); ++i) {
      if (PyList_GET_SIZE(PyTuple_GET_ITEM(empty, i)) != 0) return false;
    }
    return true;
  }

  // Whether all that should have been freed before the op was.
  bool are_dead(uint32_t index) {
    for (; num_dead < plan.num_deaths[index]; ++num_dead) {
      if (plan.alive[plan.deaths[num_dead]]) return false;
    }
    return true;
  }

  bool may_play(PyObject* acts) const {
    return each(acts, kReleases, [&](PyObject* residency) { return may_let_go(residency); }) &&
           each(acts, kArrivals, [&](PyObject* residency) { return may_arrive(residency); }) &&
           each(acts, kBirths, [&](PyObject* residency) { return may_bear(residency); });
  }

  // The record of a residency whose variable is alive, borrowed, or null.
  PyObject* live(PyObject* residency) const {
    PyObject* variable = at(residency, kVariable);
    PyObject* record = at(variable, kRecord);
    return record == Py_None || !is_alive(variable) ? nullptr : record;
  }
  bool is_alive(PyObject* variable) const { return plan.alive[PyLong_AsSize_t(at(variable, kIndex))] != 0; }

  // How a transfer has ended, if it has; none at all has ended well.
  Ended ended(PyObject* transfer) const {
    if (transfer == Py_None) return Ended::kWell;
    if (reinterpret_cast<PyObject*>(Py_TYPE(transfer)) != transfer_type) return Ended::kUnknown;
    const int64_t ticket = PyLong_AsLongLong(at(transfer, kTicket));
    const int64_t last = ring[ticket % ring_length].load(std::memory_order_acquire);
    if (last == ticket) return Ended::kWell;
    return (last < 0 ? -last : last) < ticket ? Ended::kNot : Ended::kUnknown;
  }

  bool is_guarded(PyObject* record) const { return PyLong_AsLong(at(record, kGuard)) != no_guard; }

  // Whether its addresses show these chunks, but for a guard.
  bool shows(PyObject* record, PyObject* runs) const {
    PyObject* reservation = at(record, kReservation);
    if (at(reservation, kIsProtected) != Py_False) return false;
    PyObject* given = at(reservation, kGiven);
    if (given == runs) return true;
    const int are_equal = PyObject_RichCompareBool(given, runs, Py_EQ);  // tuples of numbers
    if (are_equal < 0) PyErr_Clear();
    return are_equal == 1;
  }

  bool may_let_go(PyObject* residency) const {
    PyObject* record = live(residency);
    if (record == nullptr) return true;
    if (at(record, kState) != resident) return at(record, kState) != loading;
    return releases != kNone && is_zero(record, kExports) && is_true(record, kStored) &&
           (is_true(record, kSeen) || is_true(at(residency, kVariable), kEvictable)) &&
           ended(at(residency, kTransfer)) != Ended::kUnknown;
  }
  // ResidencyActs.release. What is to be guarded is appended to a list, made for the first one. False with an error.
  bool let_go(PyObject* residency, PyObject*& to_guard) const {
    PyObject* record = live(residency);
    if (record == nullptr || at(record, kState) != resident) return true;
    if (ended(at(residency, kTransfer)) == Ended::kWell) set(residency, kTransfer, Py_None);
    set(record, kState, away);
    Demand::set(record, slots[kRuns], PyTuple_New(0));  // the one empty tuple
    set(record, kRecordTransfer, at(residency, kTransfer));
    if (releases == kAll || is_true(at(residency, kVariable), kDiesWithin)) return true;
    if (to_guard == nullptr) to_guard = PyList_New(0);
    return to_guard != nullptr && PyList_Append(to_guard, record) == 0;
  }

  bool may_arrive(PyObject* residency) const {
    PyObject* record = live(residency);
    if (record == nullptr || at(record, kState) == resident) return true;
    return at(record, kState) == loading && at(record, kRecordTransfer) != Py_None &&
           ended(at(record, kRecordTransfer)) == Ended::kWell && shows(record, at(record, kRuns));
  }
  // ResidencyActs.arrive. A guard is lifted, which says whether a touch was served meanwhile: then it is read once more.
  template <class IsExpected>
  Outcome arrive(PyObject* residency, IsExpected&& is_expected) const {
    PyObject* record = live(residency);
    if (record == nullptr || at(record, kState) == resident) return Outcome::kDone;
    set(record, kState, resident);
    set(record, kRecordTransfer, Py_None);
    if (!is_guarded(record)) return Outcome::kDone;
    const Kept kept(record);
    PyObject* done = PyObject_CallOneArg(lift, record);
    if (done == Py_True) {
      Py_DECREF(done);
      done = PyObject_CallOneArg(reread, record);
    }
    if (done == nullptr) return Outcome::kError;
    Py_DECREF(done);
    return is_expected() ? Outcome::kDone : Outcome::kLeft;
  }

  bool may_bear(PyObject* residency) const {
    PyObject* variable = at(residency, kVariable);
    PyObject* record = at(variable, kRecord);
    PyObject* successor = at(variable, kSuccessor);
    if (record == Py_None) return false;
    if (successor != Py_None && is_alive(successor) && at(successor, kRecord) == record) return false;
    PyObject* own = at(residency, kTransfer);  // of the step before: however it has ended
    if (own != Py_None && ended(own) != Ended::kWell) return false;
    PyObject* waits = at(residency, kWaits);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(waits); ++i) {
      if (ended(at(PyTuple_GET_ITEM(waits, i), kTransfer)) != Ended::kWell) return false;
    }
    return !is_guarded(record) && shows(record, at(residency, kPlannedRuns));
  }
  void bear(PyObject* residency) const {  // ResidencyActs.prepare_birth
    PyObject* record = at(at(residency, kVariable), kRecord);
    PyObject* waits = at(residency, kWaits);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(waits); ++i) set(PyTuple_GET_ITEM(waits, i), kTransfer, Py_None);
    set(record, kNbytes, at(at(residency, kVariable), kPlannedNbytes));
    set(record, kState, resident);
    set(record, kRuns, at(residency, kPlannedRuns));
    set(record, kStored, Py_False);
    set(record, kRecordTransfer, Py_None);
  }
};

}  // namespace ooc
