// What goes before and after a planned op where nothing is to be waited for: variables that should be dead are, what is
// released is in the store, what was loaded has arrived, what is born finds its chunks mapped, and transfers begin. What
// `Executor.before` and `after` do for such an op, under the session's lock like there. Any doubt, and all of it is
// Python's: nothing is changed before everything has been looked at. Guards are Python's, too; it is called for each.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <array>
#include <cstdint>

#include "moves.h"
#include "set_aside.h"
#include "slots.h"

namespace ooc {

// The tables of a plan that its acts need; the plan owns them.
struct PlanActs {
  PyObject* before = nullptr;            // owned: a list, per op a Before or None
  PyObject* after = nullptr;             // owned: the same of After
  const uint8_t* alive = nullptr;        // per variable
  const uint32_t* deaths = nullptr;      // variables that are freed in the step, in that order
  const uint32_t* num_deaths = nullptr;  // per op: how many of them are freed before it
};

class Acts : public Slots {
 public:
  enum class Outcome { kDone, kPythons, kLeft, kError };  // left: the step is off its plan

  // All of these are owned. `empty`: lists that hold something while there is more to do than is done here.
  LockCalls lock;
  PyObject *resident = nullptr, *loading = nullptr, *away = nullptr;
  PyObject* empty = nullptr;
  PyObject *lift = nullptr, *reread = nullptr, *guard = nullptr;  // functions of Python's: see `arrive` and `play`
  PyObject* records = nullptr;    // a dict: `ResidencyManager.records`
  PyObject* strangers = nullptr;  // a dict: the record of what was allocated beside the plan in this step, by address
  PyObject* met = nullptr;        // a list: those of them that the op which comes next, or runs, uses
  long no_guard = 0;
  enum Releases : int { kNone = 0, kGuarded = 1, kAll = 2 };
  Releases releases = kNone;  // kGuarded: all, and stray touches are served of what is not born and freed in the step
  PlanActs plan;
  Moves moves{*this};
  uint32_t num_dead = 0;   // deaths seen in this step
  uint64_t num_done = 0, num_followed = 0;  // ops before and after which Python had no part in it

  Acts() = default;
  Acts(const Acts&) = delete;
  Acts& operator=(const Acts&) = delete;
  ~Acts() {
    for_each_owned([](PyObject* object) { Py_XDECREF(object); });
  }

  template <class Visit>
  void for_each_owned(Visit&& visit) const {
    for (PyObject* object : {lock.acquire, lock.release, resident, loading, away, empty, lift, reread, guard, records,
                             strangers, met, reinterpret_cast<PyObject*>(transfer_type), plan.before, plan.after}) {
      visit(object);
    }
    for (PyObject* object : moves.objects()) visit(object);
  }
  // What was parsed is borrowed until `own`; `disown` forgets it.
  void own() {  // before there are strangers, and a plan
    for_each_owned([](PyObject* object) { Py_XINCREF(object); });
    lock.look();
  }
  void disown() {
    lock.acquire = lock.release = resident = loading = away = empty = lift = reread = guard = nullptr;
    records = strangers = met = nullptr;
    transfer_type = nullptr;
    moves.disown();
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
    PyObject* key = PyLong_FromUnsignedLongLong(address);
    PyObject* record = key != nullptr ? PyDict_GetItemWithError(strangers, key) : nullptr;
    const bool is_managed = record != nullptr && PyDict_GetItemWithError(records, key) == record;
    Py_XDECREF(key);
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
    PyObject* acts = plan.before != nullptr ? PyList_GET_ITEM(plan.before, index) : Py_None;
    if (acts == Py_None || at(acts, kRerun) != Py_None) return Outcome::kPythons;
    return locked([&] {
      if (!is_expected() || !is_quiet() || !are_dead(index) || !may_play(acts)) return Outcome::kPythons;
      const Kept kept(acts);  // Python may be called: whatever comes of that, it stays
      ++num_done;
      return carry_out(acts, is_expected);
    });
  }

  // Do what goes after op `index`, likewise. kLeft: there may be nothing left to do, since it is.
  template <class IsExpected>
  Outcome follow(uint32_t index, IsExpected&& is_expected) {
    PyObject* acts = plan.after != nullptr ? PyList_GET_ITEM(plan.after, index) : Py_None;
    if (acts == Py_None || size(acts, kDiscards) != 0) return Outcome::kPythons;
    return locked([&] {
      if (!is_expected() || !is_quiet() || releases == kNone || !may_follow(acts)) return Outcome::kPythons;
      const Kept kept(acts);
      ++num_followed;
      return carry_out_after(acts, is_expected);
    });
  }

 private:
  // Under the session's lock.
  template <class Do>
  Outcome locked(Do&& act) const {
    if (!lock.take()) return Outcome::kError;
    const Outcome outcome = act();
    return lock.give_back() ? outcome : Outcome::kError;
  }

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
  Outcome carry_out(PyObject* acts, IsExpected&& is_expected) {
    PyObject* to_guard = nullptr;
    const bool is_listed = each(acts, kReleases, [&](PyObject* residency) { return let_go(residency, to_guard); });
    Outcome outcome = guard_all(to_guard, is_listed, is_expected);
    if (outcome != Outcome::kDone) return outcome;
    if (!each(acts, kLoads, [&](PyObject* residency) { return load(residency); })) return Outcome::kError;
    const bool have_arrived = each(acts, kArrivals, [&](PyObject* residency) {
      outcome = arrive(residency, is_expected);
      return outcome == Outcome::kDone;
    });
    if (have_arrived) each(acts, kBirths, [&](PyObject* residency) { bear(residency); return true; });
    return outcome;
  }

  // The same of `Executor.after`.
  template <class IsExpected>
  Outcome carry_out_after(PyObject* acts, IsExpected&& is_expected) {
    each(acts, kDirties, [&](PyObject* variable) {
      if (at(variable, kRecord) != Py_None) set(at(variable, kRecord), kStored, Py_False);
      return true;
    });
    const auto write = [&](PyObject* residency) {
      PyObject* record = live(residency);
      return record == nullptr || moves.write(residency, record);
    };
    PyObject* to_guard = nullptr;
    const bool is_done = each(acts, kWrites, write) && each(acts, kDrops, [&](PyObject* residency) {
      return write(residency) && let_go(residency, to_guard);
    });
    return guard_all(to_guard, is_done, is_expected);
  }

  // What was released is guarded, in one go, or Python leaves the plan. Takes over the list, null: of nothing. Without
  // `is_well` there is an error already.
  template <class IsExpected>
  Outcome guard_all(PyObject* to_guard, bool is_well, IsExpected&& is_expected) const {
    if (to_guard == nullptr) return is_well ? Outcome::kDone : Outcome::kError;
    SetAside error;
    PyObject* stays = PyObject_CallOneArg(guard, to_guard);
    Py_DECREF(to_guard);
    if (!is_well) return error.pass_on(stays, nullptr), Outcome::kError;
    if (stays == nullptr) return Outcome::kError;
    const bool is_left = stays != Py_True || !is_expected();
    Py_DECREF(stays);
    return is_left ? Outcome::kLeft : Outcome::kDone;
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
           each(acts, kLoads, [&](PyObject* residency) { return may_load(residency); }) &&
           each(acts, kArrivals, [&](PyObject* residency) { return may_arrive(residency); }) &&
           each(acts, kBirths, [&](PyObject* residency) { return may_bear(residency); });
  }
  bool may_follow(PyObject* acts) const {
    return each(acts, kWrites, [&](PyObject* residency) { return may_write(residency); }) &&
           each(acts, kDrops, [&](PyObject* residency) { return may_write(residency) && may_be_away(residency); });
  }

  // The record of a residency whose variable is alive, borrowed, or null.
  PyObject* live(PyObject* residency) const {
    PyObject* variable = at(residency, kVariable);
    PyObject* record = at(variable, kRecord);
    return record == Py_None || !is_alive(variable) ? nullptr : record;
  }
  bool is_alive(PyObject* variable) const { return plan.alive[PyLong_AsSize_t(at(variable, kIndex))] != 0; }

  bool is_guarded(PyObject* record) const { return number(record, kGuard) != no_guard; }

  // Whether its addresses show these chunks, but for a guard.
  bool shows(PyObject* record, PyObject* runs) const {
    PyObject* reservation = at(record, kReservation);
    return at(reservation, kIsProtected) == Py_False && are_equal(at(reservation, kGiven), runs);
  }

  bool may_let_go(PyObject* residency) const {
    PyObject* record = live(residency);
    if (record == nullptr) return true;
    if (at(record, kState) != resident) return at(record, kState) != loading;
    return releases != kNone && number(record, kExports) == 0 && is_true(record, kStored) && may_be_away(residency);
  }
  bool may_be_away(PyObject* residency) const {
    PyObject* record = live(residency);
    return record == nullptr || ((is_true(record, kSeen) || is_true(at(residency, kVariable), kEvictable)) &&
                                 ended(at(residency, kTransfer)) != Ended::kUnknown);
  }
  // ResidencyActs.release. What is to be guarded is appended to a list, made for the first one. False with an error.
  bool let_go(PyObject* residency, PyObject*& to_guard) const {
    PyObject* record = live(residency);
    if (record == nullptr || at(record, kState) != resident) return true;
    if (ended(at(residency, kTransfer)) == Ended::kWell) set(residency, kTransfer, Py_None);
    set(record, kState, away);
    take(record, kRuns, PyTuple_New(0));  // the one empty tuple
    set(record, kRecordTransfer, at(residency, kTransfer));
    if (releases == kAll || is_true(at(residency, kVariable), kDiesWithin)) return true;
    if (to_guard == nullptr) to_guard = PyList_New(0);
    return to_guard != nullptr && PyList_Append(to_guard, record) == 0;
  }

  // Of what is not in memory Python has its own ways to make that known.
  bool may_write(PyObject* residency) const {
    PyObject* record = live(residency);
    return record == nullptr || (at(record, kState) == resident && moves.may_write(residency, record));
  }

  bool may_load(PyObject* residency) const {
    PyObject* record = live(residency);
    if (record == nullptr) return !is_alive(at(residency, kVariable)) && moves.is_free(residency);
    if (releases == kNone || at(record, kState) != away || !moves.may_load(residency, record)) return false;
    return releases == kAll || !is_true(at(record, kReservation), kIsFile);
  }
  // False with an error.
  bool load(PyObject* residency) {
    PyObject* record = live(residency);
    if (record == nullptr) return moves.forget_ended(residency), true;
    return moves.count(kNumCrowded, 1) && moves.load(residency, record, loading);
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
    return moves.is_free(residency) && !is_guarded(record) && shows(record, at(residency, kPlannedRuns));
  }
  void bear(PyObject* residency) const {  // ResidencyActs.prepare_birth
    PyObject* record = at(at(residency, kVariable), kRecord);
    moves.forget_ended(residency);
    set(record, kNbytes, at(at(residency, kVariable), kPlannedNbytes));
    set(record, kState, resident);
    set(record, kRuns, at(residency, kPlannedRuns));
    set(record, kStored, Py_False);
    set(record, kRecordTransfer, Py_None);
  }
};

}  // namespace ooc
