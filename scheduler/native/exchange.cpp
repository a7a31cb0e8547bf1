// Exchanges in a finished colouring, as scheduler/colouring/exchange.py: the same chunks for the same holders. Names are
// that file's, where each is explained; what is said here is how.
#include <algorithm>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

#include "export.h"

namespace {

using Tick = int64_t;
using Unit = int64_t;

struct Limits {
  int64_t rounds, most_idle, most_units, most_trials;
};

struct Piece {
  Tick start, stop;
  Unit unit;
  bool operator<(const Piece& other) const {
    if (start != other.start) return start < other.start;
    return stop != other.stop ? stop < other.stop : unit < other.unit;
  }
};

// A bit for each tick.
class Ticks {
 public:
  explicit Ticks(Tick num_ticks) : words_(static_cast<size_t>(num_ticks) / 64 + 1, 0) {}

  void set(Tick first, Tick stop) {
    for (Tick tick = first; tick < stop;) {
      const Tick next = std::min(stop, (tick / 64 + 1) * 64);
      words_[tick / 64] |= mask(tick, next);
      tick = next;
    }
  }

  // Where both are 0, nothing holds either row over the tick: the latest such tick up to `tick`, or the first from it
  // on. There are always some: 0, and the step's last.
  static Tick latest_cut(const Ticks& one, const Ticks& two, Tick tick) {
    size_t word = tick / 64;
    uint64_t cuts = ~(one.words_[word] | two.words_[word]) & (~uint64_t{0} >> (63 - tick % 64));
    while (cuts == 0) {
      --word;
      cuts = ~(one.words_[word] | two.words_[word]);
    }
    return static_cast<Tick>(word) * 64 + 63 - __builtin_clzll(cuts);
  }

  static Tick first_cut(const Ticks& one, const Ticks& two, Tick tick) {
    size_t word = tick / 64;
    uint64_t cuts = ~(one.words_[word] | two.words_[word]) & (~uint64_t{0} << (tick % 64));
    while (cuts == 0) {
      ++word;
      cuts = ~(one.words_[word] | two.words_[word]);
    }
    return static_cast<Tick>(word) * 64 + __builtin_ctzll(cuts);
  }

  static void exchange(Ticks& one, Ticks& two, Tick first, Tick stop) {
    for (Tick tick = first; tick < stop;) {
      const Tick next = std::min(stop, (tick / 64 + 1) * 64);
      const uint64_t differ = (one.words_[tick / 64] ^ two.words_[tick / 64]) & mask(tick, next);
      one.words_[tick / 64] ^= differ;
      two.words_[tick / 64] ^= differ;
      tick = next;
    }
  }

 private:
  // The bits of [first, stop), which lie in one word.
  static uint64_t mask(Tick first, Tick stop) {
    const uint64_t below = stop % 64 == 0 ? ~uint64_t{0} : (uint64_t{1} << (stop % 64)) - 1;
    return below & (~uint64_t{0} << (first % 64));
  }

  std::vector<uint64_t> words_;
};

struct Cluster {
  std::vector<Unit> units;
  std::vector<std::pair<Tick, Tick>> spans;
};

struct InVain {
  bool is_known = false;
  int64_t row[2], num_changes[2];
  bool has_gain = false;
  int64_t gain = 0;
};

class Table {
 public:
  Table(int64_t num_holders, const int64_t* starts, const int64_t* stops, const int64_t* families,
        const int64_t* sizes, const int64_t* chunks, Tick num_ticks, bool cyclic, const Limits& limits)
      : num_ticks_(num_ticks), limits_(limits) {
    int64_t num_rows = 0, num_families = 0;
    first_unit_.push_back(0);
    for (int64_t holder = 0; holder < num_holders; ++holder) {
      first_unit_.push_back(first_unit_.back() + sizes[holder]);
      num_families = std::max(num_families, families[holder] + 1);
      for (int64_t place = 0; place < sizes[holder]; ++place) {
        row_.push_back(*chunks++);
        start_.push_back(starts[holder]);
        stop_.push_back(stops[holder]);
        num_rows = std::max(num_rows, row_.back() + 1);
      }
    }
    const Unit num_units = static_cast<Unit>(row_.size());
    std::vector<Unit> order(num_units);
    for (Unit unit = 0; unit < num_units; ++unit) order[unit] = unit;
    std::stable_sort(order.begin(), order.end(), [this](Unit a, Unit b) { return start_[a] < start_[b]; });
    std::vector<std::vector<Unit>> units(num_rows);
    for (const Unit unit : order) units[row_[unit]].push_back(unit);
    for (const auto& own : units) {
      part(own);
      std::vector<Piece> pieces;
      for (const Unit unit : own) add_pieces(unit, pieces);
      std::sort(pieces.begin(), pieces.end());
      Ticks uncut(num_ticks);
      for (const Piece& piece : pieces) uncut.set(piece.start + 1, piece.stop);
      rows_.push_back(std::move(pieces));
      uncut_.push_back(std::move(uncut));
    }
    num_changes_.assign(num_rows, 0);
    in_vain_.resize(num_units);
    cluster_of_.assign(num_units, 0);
    link(num_holders, num_families, starts, families, sizes, cyclic);
  }

  void improve() {
    int64_t num_trials = 0, num_idle = 0;
    std::vector<Unit> found = broken();
    for (int64_t round = 0; round < limits_.rounds; ++round) {
      for (const Unit unit : found) {
        if (row_[unit] == row_[after_[unit]]) continue;
        ++num_trials;
        try_exchange(unit, after_[unit], round % 2 == 1);
      }
      const size_t before = found.size();
      found = broken();
      num_idle = found.size() < before ? 0 : num_idle + 1;
      if (found.empty() || num_idle == limits_.most_idle || num_trials > limits_.most_trials) return;
    }
  }

  const std::vector<int64_t>& rows() const { return row_; }

 private:
  void part(const std::vector<Unit>& units) {
    for (size_t i = 0; i + 1 < units.size(); ++i) stop_[units[i]] = std::min(stop_[units[i]], start_[units[i + 1]]);
    if (!units.empty()) stop_[units.back()] = std::min(stop_[units.back()], start_[units.front()] + num_ticks_);
  }

  void add_pieces(Unit unit, std::vector<Piece>& pieces) const {
    pieces.push_back({start_[unit], std::min(stop_[unit], num_ticks_), unit});
    if (stop_[unit] > num_ticks_) pieces.push_back({0, stop_[unit] - num_ticks_, unit});
  }

  void link(int64_t num_holders, int64_t num_families, const int64_t* starts, const int64_t* families,
            const int64_t* sizes, bool cyclic) {
    before_.assign(row_.size(), -1);
    after_.assign(row_.size(), -1);
    std::vector<std::vector<int64_t>> members(num_families);
    for (int64_t holder = 0; holder < num_holders; ++holder) members[families[holder]].push_back(holder);
    for (auto& own : members) {
      std::stable_sort(own.begin(), own.end(), [starts](int64_t a, int64_t b) { return starts[a] < starts[b]; });
      const size_t num_pairs = cyclic && own.size() > 1 ? own.size() : own.size() - (own.empty() ? 0 : 1);
      for (size_t i = 0; i < num_pairs; ++i) {
        const int64_t one = own[i], other = own[(i + 1) % own.size()];
        for (int64_t place = 0; place < sizes[one]; ++place) {
          const Unit first = first_unit_[one] + place, second = first_unit_[other] + place;
          after_[first] = second;
          before_[second] = first;
        }
      }
    }
  }

  std::vector<Unit> broken() const {
    std::vector<Unit> found;
    for (Unit unit = 0; unit < static_cast<Unit>(row_.size()); ++unit) {
      if (after_[unit] >= 0 && row_[unit] != row_[after_[unit]]) found.push_back(unit);
    }
    return found;
  }

  void try_exchange(Unit unit, Unit other, bool allows_even) {
    const int64_t rows[2] = {row_[unit], row_[other]};
    InVain& tried = in_vain_[unit];
    if (tried.is_known && tried.row[0] == rows[0] && tried.row[1] == rows[1] &&
        tried.num_changes[0] == num_changes_[rows[0]] && tried.num_changes[1] == num_changes_[rows[1]] &&
        (!tried.has_gain || tried.gain < 0 || !allows_even)) {
      return;
    }
    bool has_best = false;
    int64_t best_gain = 0;
    Cluster best, cluster;
    for (const auto& [moved, stays] : {std::pair{other, unit}, std::pair{unit, other}}) {
      if (!find_cluster(rows, moved, stays, cluster)) continue;
      const int64_t gain = gain_of(cluster, rows);
      if (!has_best || gain > best_gain) {
        has_best = true;
        best_gain = gain;
        std::swap(best, cluster);
      }
    }
    if (has_best && best_gain >= (allows_even ? 0 : 1)) {
      exchange(best, rows);
      return;
    }
    tried = {true, {rows[0], rows[1]}, {num_changes_[rows[0]], num_changes_[rows[1]]}, has_best, best_gain};
  }

  // Whether there is one. Its units are those whose `cluster_of_` is `num_clusters_`.
  bool find_cluster(const int64_t* rows, Unit unit, Unit stays, Cluster& cluster) {
    const Ticks &one = uncut_[rows[0]], &two = uncut_[rows[1]];
    ++num_clusters_;
    cluster.units.assign(1, unit);
    cluster.spans.clear();
    cluster_of_[unit] = num_clusters_;
    todo_.clear();
    add_pieces(unit, todo_);
    while (!todo_.empty()) {
      const Piece piece = todo_.back();
      todo_.pop_back();
      const bool is_known = std::any_of(cluster.spans.begin(), cluster.spans.end(), [&](const auto& span) {
        return span.first <= piece.start && piece.stop <= span.second;
      });
      if (is_known) continue;
      const Tick low = Ticks::latest_cut(one, two, piece.start), high = Ticks::first_cut(one, two, piece.stop);
      if (low <= start_[stays] && start_[stays] < high) return false;
      cluster.spans.emplace_back(low, high);
      int64_t num_found = 0;
      for (const int64_t row : {rows[0], rows[1]}) {
        const auto& pieces = rows_[row];
        for (auto at = from(pieces, low); at != pieces.end() && at->start < high; ++at) {
          ++num_found;
          if (cluster_of_[at->unit] == num_clusters_) continue;
          cluster_of_[at->unit] = num_clusters_;
          cluster.units.push_back(at->unit);
          if (stop_[at->unit] > num_ticks_) add_pieces(at->unit, todo_);
        }
      }
      // More pieces than twice the most units belong to more units than that.
      if (num_found > 2 * limits_.most_units) return false;
      if (static_cast<int64_t>(cluster.units.size()) > limits_.most_units) return false;
    }
    return cluster_of_[stays] != num_clusters_;
  }

  static std::vector<Piece>::const_iterator from(const std::vector<Piece>& pieces, Tick low) {
    return std::lower_bound(pieces.begin(), pieces.end(), low,
                            [](const Piece& piece, Tick tick) { return piece.start < tick; });
  }

  int64_t gain_of(const Cluster& cluster, const int64_t* rows) const {
    int64_t gain = 0;
    for (const Unit unit : cluster.units) {
      const int64_t here = row_[unit], there = here == rows[0] ? rows[1] : rows[0];
      for (const Unit other : {before_[unit], after_[unit]}) {
        if (other < 0 || cluster_of_[other] == num_clusters_) continue;
        gain += (row_[other] == there) - (row_[other] == here);
      }
    }
    return gain;
  }

  void exchange(const Cluster& cluster, const int64_t* rows) {
    ++num_clusters_;
    for (const Unit unit : cluster.units) cluster_of_[unit] = num_clusters_;
    const auto moves = [this](const Piece& piece) { return cluster_of_[piece.unit] == num_clusters_; };
    std::vector<Piece> made[2];
    for (const int side : {0, 1}) {
      ++num_changes_[rows[side]];
      for (const Piece& piece : rows_[rows[side]]) made[moves(piece) ? 1 - side : side].push_back(piece);
    }
    for (const int side : {0, 1}) {
      std::sort(made[side].begin(), made[side].end());
      rows_[rows[side]] = std::move(made[side]);
    }
    for (const auto& [low, high] : cluster.spans) Ticks::exchange(uncut_[rows[0]], uncut_[rows[1]], low, high);
    for (const Unit unit : cluster.units) row_[unit] = row_[unit] == rows[0] ? rows[1] : rows[0];
  }

  const Tick num_ticks_;
  const Limits limits_;
  std::vector<int64_t> first_unit_, row_;
  std::vector<Tick> start_, stop_;
  std::vector<Unit> before_, after_;
  std::vector<std::vector<Piece>> rows_;
  std::vector<Ticks> uncut_;
  std::vector<int64_t> num_changes_;
  std::vector<InVain> in_vain_;
  std::vector<int64_t> cluster_of_;  // of each unit, the number of the latest cluster that it is in
  int64_t num_clusters_ = 0;
  std::vector<Piece> todo_;
};

}  // namespace

// Families count from 0; `chunks` are all holders', one after another, and are changed. 0, or -1: memory.
OOC_EXPORT int64_t scheduler_exchange(int64_t num_holders, const int64_t* starts, const int64_t* stops,
                                      const int64_t* families, const int64_t* sizes, int64_t* chunks,
                                      int64_t num_ticks, bool cyclic, int64_t rounds, int64_t most_idle,
                                      int64_t most_units, int64_t most_trials) {
  try {
    Table table(num_holders, starts, stops, families, sizes, chunks, num_ticks, cyclic,
                Limits{rounds, most_idle, most_units, most_trials});
    table.improve();
    std::copy(table.rows().begin(), table.rows().end(), chunks);
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}
