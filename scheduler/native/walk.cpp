// The greedy walk of a colouring, as scheduler/colouring/walk.py: the same chunks for the same arcs. Names are that
// file's, where each is explained; what is said here is how.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

#include "export.h"

namespace {

using Tick = int64_t;
using Chunks = std::vector<int64_t>;
using Mask = std::vector<uint8_t>;

constexpr Tick kNever = std::numeric_limits<int64_t>::max();

template <typename T>
using LeastFirst = std::priority_queue<T, std::vector<T>, std::greater<T>>;

int64_t count(const Mask& mask) { return std::count(mask.begin(), mask.end(), uint8_t{1}); }

// `size` of the good chunks: from the shortest run that is long enough, else from the longest runs. Added to `found`.
void best_runs(const Mask& good, int64_t size, Chunks& found) {
  std::vector<std::pair<int64_t, int64_t>> runs;  // first, length
  const int64_t num_chunks = static_cast<int64_t>(good.size());
  for (int64_t chunk = 0; chunk < num_chunks;) {
    if (!good[chunk]) {
      ++chunk;
      continue;
    }
    const int64_t first = chunk;
    while (chunk < num_chunks && good[chunk]) ++chunk;
    runs.emplace_back(first, chunk - first);
  }
  const std::pair<int64_t, int64_t>* enough = nullptr;
  for (const auto& run : runs) {
    if (run.second >= size && (enough == nullptr || run.second < enough->second)) enough = &run;
  }
  if (enough != nullptr) {
    for (int64_t i = 0; i < size; ++i) found.push_back(enough->first + i);
    return;
  }
  std::stable_sort(runs.begin(), runs.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
  for (const auto& run : runs) {
    for (int64_t i = 0; i < run.second && size > 0; ++i, --size) found.push_back(run.first + i);
  }
}

class Walk {
 public:
  Walk(int64_t num_arcs, const int64_t* starts, const int64_t* stops, const int64_t* written, const int64_t* sizes,
       const int64_t* families, const uint8_t* may_be_cut, Tick num_ticks, int64_t num_chunks, int64_t late_price,
       bool best_fit)
      : starts_(starts, starts + num_arcs),
        stops_(stops, stops + num_arcs),
        written_(written, written + num_arcs),
        sizes_(sizes, sizes + num_arcs),
        families_(families, families + num_arcs),
        ordered_(starts_),
        may_be_cut_(may_be_cut, may_be_cut + num_arcs),
        num_ticks_(num_ticks),
        num_chunks_(num_chunks),
        late_price_(late_price),
        best_fit_(best_fit),
        is_coloured_(num_arcs, 0),
        claims_home_(num_arcs, 0),
        chunks_(num_arcs),
        free_at_(num_chunks, 0),
        hard_from_(num_chunks, kNever),
        written_at_(num_chunks, 0),
        first_at_(num_chunks, kNever),
        next_claim_(num_chunks, kNever),
        claims_of_(num_chunks),
        conflicts_(num_chunks, 0) {
    int64_t num_families = 0;
    Tick last_written = 0;
    for (int64_t index = 0; index < num_arcs; ++index) {
      num_families = std::max(num_families, families_[index] + 1);
      last_written = index == 0 ? written_[index] : std::max(last_written, written_[index]);
      if (stops_[index] > num_ticks) crossing_.push_back(index);
    }
    span_ = 1 + last_written + num_ticks;
    members_.resize(num_families);
    home_.resize(num_families);
    has_home_.assign(num_families, 0);
    for (int64_t index = 0; index < num_arcs; ++index) members_[families_[index]].push_back(index);
  }

  // How many chunks are missing, for `short_arc`; 0: none.
  int64_t run(bool give_way, int64_t* short_arc) {
    if (const int64_t missing = take_crossing(short_arc)) return missing;
    std::vector<uint8_t> at_home(starts_.size(), 0);
    for (const auto& own : members_) {
      for (size_t place = 1; place < own.size(); ++place) at_home[own[place]] = 1;
    }
    LeastFirst<std::tuple<Tick, bool, int64_t>> waiting;
    for (int64_t index = 0; index < static_cast<int64_t>(starts_.size()); ++index) {
      if (!is_coloured_[index]) waiting.emplace(starts_[index], !at_home[index], index);
    }
    while (!waiting.empty()) {
      const int64_t index = std::get<2>(waiting.top());
      waiting.pop();
      Chunks chunks;
      if (!choose_unclaimed(index, chunks)) {
        find_usable(index);
        int64_t missing = sizes_[index] - count(usable_);
        if (missing > 0 && give_way) {
          for (const int64_t later : make_way(index, missing)) waiting.emplace(starts_[later], false, later);
          find_usable(index);
          missing = sizes_[index] - count(usable_);
        }
        if (missing > 0) {
          *short_arc = index;
          return missing;
        }
        choose(index, chunks);
      }
      assign(index, std::move(chunks));
    }
    return 0;
  }

  const std::vector<Chunks>& chunks() const { return chunks_; }
  const std::vector<int64_t>& cut() const { return cut_; }
  int64_t num_late() const { return num_late_; }

 private:
  int64_t take_crossing(int64_t* short_arc) {
    std::vector<std::tuple<Tick, Tick, int64_t>> order;
    for (const int64_t index : crossing_) order.emplace_back(stops_[index], starts_[index], index);
    std::sort(order.begin(), order.end());
    int64_t position = 0;
    for (const auto& [stop, start, index] : order) {
      Chunks chunks;
      for (int64_t i = 0; i < sizes_[index]; ++i) chunks.push_back(position + i);
      position += sizes_[index];
      if (position > num_chunks_) {
        *short_arc = index;
        return position - num_chunks_;
      }
      assign(index, chunks);
      for (const int64_t chunk : chunks) {
        free_at_[chunk] = stop - num_ticks_;
        written_at_[chunk] = written_[index] - num_ticks_;
        hard_from_[chunk] = start;
        first_at_[chunk] = 0;
      }
    }
    return 0;
  }

  std::vector<int64_t> make_way(int64_t index, int64_t missing) {
    std::vector<std::tuple<bool, int64_t, int64_t>> found;
    for (const int64_t other : crossing_) {
      if (!may_be_cut_[other] || starts_[other] < starts_[index] || starts_[other] >= stops_[index]) continue;
      if (stops_[other] <= num_ticks_ || !is_coloured_[other]) continue;
      int64_t free = 0;
      for (const int64_t chunk : chunks_[other]) free += free_at_[chunk] <= starts_[index];
      if (free > 0) found.emplace_back(free < missing, free >= missing ? free : -free, other);
    }
    std::sort(found.begin(), found.end());
    std::vector<int64_t> later;
    for (const auto& [is_small, free, other] : found) {
      if (missing <= 0) break;
      missing -= is_small ? -free : free;
      later.push_back(cut(other));
    }
    return later;
  }

  int64_t cut(int64_t index) {
    const int64_t made = static_cast<int64_t>(starts_.size()), family = families_[index];
    cut_.push_back(index);
    for (const int64_t chunk : chunks_[index]) hard_from_[chunk] = kNever;
    starts_.push_back(starts_[index]);
    stops_.push_back(num_ticks_);
    written_.push_back(num_ticks_);
    sizes_.push_back(sizes_[index]);
    families_.push_back(family);
    is_coloured_.push_back(0);
    claims_home_.push_back(1);
    chunks_.emplace_back();
    starts_[index] = 0;
    stops_[index] -= num_ticks_;
    members_[family].push_back(made);
    claim({made}, home_[family]);
    return made;
  }

  void assign(int64_t index, Chunks chunks) {
    const int64_t family = families_[index];
    is_coloured_[index] = 1;
    for (const int64_t chunk : chunks) {
      free_at_[chunk] = stops_[index];
      written_at_[chunk] = written_[index];
      first_at_[chunk] = std::min(first_at_[chunk], starts_[index]);
    }
    if (claims_home_[index]) {
      claims_home_[index] = 0;
      forget_claims(home_[family]);
    } else if (!has_home_[family]) {
      has_home_[family] = 1;
      home_[family] = chunks;
      std::vector<int64_t> later;
      for (const int64_t other : members_[family]) {
        if (!is_coloured_[other]) later.push_back(other);
      }
      for (const int64_t other : later) claims_home_[other] = 1;
      claim(later, chunks);
    }
    chunks_[index] = std::move(chunks);
  }

  void claim(const std::vector<int64_t>& later, const Chunks& home) {
    if (later.empty()) return;
    Tick first = kNever;
    for (const int64_t index : later) first = std::min(first, starts_[index]);
    for (const int64_t chunk : home) {
      for (const int64_t index : later) claims_of_[chunk].emplace(starts_[index], index);
      next_claim_[chunk] = std::min(next_claim_[chunk], first);
    }
  }

  void forget_claims(const Chunks& home) {
    for (const int64_t chunk : home) {
      auto& known = claims_of_[chunk];
      while (!known.empty() && is_coloured_[known.top().second]) known.pop();
      next_claim_[chunk] = known.empty() ? kNever : known.top().first;
    }
  }

  bool is_usable(int64_t chunk, int64_t index) const {
    return free_at_[chunk] <= starts_[index] && hard_from_[chunk] >= stops_[index];
  }

  void find_usable(int64_t index) {
    usable_.resize(num_chunks_);
    for (int64_t chunk = 0; chunk < num_chunks_; ++chunk) usable_[chunk] = is_usable(chunk, index);
  }

  void find_what_costs_nothing(int64_t index) {
    const Tick start = starts_[index], stop = stops_[index], written = written_[index];
    const bool comes_round = written - num_ticks_ > 0 && written > stop;
    good_.resize(num_chunks_);
    for (int64_t chunk = 0; chunk < num_chunks_; ++chunk) {
      good_[chunk] = written_at_[chunk] <= start && hard_from_[chunk] >= written && next_claim_[chunk] >= stop &&
                     (!comes_round || first_at_[chunk] == kNever || first_at_[chunk] >= written - num_ticks_);
    }
  }

  bool choose_unclaimed(int64_t index, Chunks& chunks) {
    const int64_t family = families_[index];
    if (!has_home_[family]) {
      if (members_[family].size() > 1) return false;
      find_what_costs_nothing(index);
      if (count(good_) < sizes_[index]) return false;
      tightest(sizes_[index], chunks);
      std::sort(chunks.begin(), chunks.end());
      return true;
    }
    const Chunks& home = home_[family];
    std::vector<size_t> away;
    for (size_t place = 0; place < home.size(); ++place) {
      if (!is_usable(home[place], index)) away.push_back(place);
    }
    if (!away.empty()) {
      find_what_costs_nothing(index);
      for (const int64_t chunk : home) {
        if (is_usable(chunk, index)) good_[chunk] = 0;
      }
      if (count(good_) < static_cast<int64_t>(away.size())) return false;
      Chunks others;
      tightest(static_cast<int64_t>(away.size()), others);
      chunks = with_others(home, away, std::move(others));
    } else {
      chunks = home;
    }
    return true;
  }

  // Of `usable_`, which it changes.
  void choose(int64_t index, Chunks& chunks) {
    const int64_t family = families_[index];
    if (!has_home_[family]) {
      pick(sizes_[index], index, chunks);
      std::sort(chunks.begin(), chunks.end());
      return;
    }
    const Chunks& home = home_[family];
    std::vector<size_t> away;
    for (size_t place = 0; place < home.size(); ++place) {
      if (!usable_[home[place]]) away.push_back(place);
    }
    if (away.empty()) {
      chunks = home;
      return;
    }
    for (const int64_t chunk : home) usable_[chunk] = 0;  // those that are not usable stay so
    Chunks others;
    pick(static_cast<int64_t>(away.size()), index, others);
    chunks = with_others(home, away, std::move(others));
  }

  static Chunks with_others(const Chunks& home, const std::vector<size_t>& away, Chunks others) {
    std::sort(others.begin(), others.end());
    Chunks chunks = home;
    for (size_t i = 0; i < away.size(); ++i) chunks[away[i]] = others[i];
    return chunks;
  }

  // Of `usable_`.
  void pick(int64_t size, int64_t index, Chunks& found) {
    count_conflicts(index);
    const Tick start = starts_[index], stop = stops_[index], written = written_[index];
    Chunks best;
    std::vector<std::tuple<int64_t, int64_t, bool>> others;  // price, chunk, whether it is late
    for (int64_t chunk = 0; chunk < num_chunks_; ++chunk) {
      if (!usable_[chunk]) continue;
      bool late = written_at_[chunk] > start;
      if (written > stop) {
        late = late || hard_from_[chunk] < written;
        late = late || (first_at_[chunk] < kNever && first_at_[chunk] < written - num_ticks_);
      }
      const int64_t price = conflicts_[chunk] + (late ? late_price_ : 0);
      if (price > 0) {
        others.emplace_back(price * span_ + written_at_[chunk], chunk, late);
      } else {
        best.push_back(chunk);
      }
    }
    const int64_t more = size - static_cast<int64_t>(best.size());
    if (more <= 0) {
      good_.assign(num_chunks_, 0);
      for (const int64_t chunk : best) good_[chunk] = 1;
      tightest(size, found);
      return;
    }
    found = std::move(best);
    std::partial_sort(others.begin(), others.begin() + more, others.end());
    for (int64_t i = 0; i < more; ++i) {
      found.push_back(std::get<1>(others[i]));
      num_late_ += std::get<2>(others[i]);
    }
  }

  // Of `good_`, which it changes. Added to `found`.
  void tightest(int64_t size, Chunks& found) {
    if (size <= 0) return;
    std::vector<std::pair<Tick, int64_t>> wanted;  // until when it is free, chunk
    for (int64_t chunk = 0; chunk < num_chunks_; ++chunk) {
      if (!good_[chunk]) continue;
      const Tick until = best_fit_ ? std::min(hard_from_[chunk], next_claim_[chunk]) : hard_from_[chunk];
      if (until < kNever) wanted.emplace_back(until, chunk);
    }
    if (static_cast<int64_t>(wanted.size()) < size) {
      for (const auto& [until, chunk] : wanted) {
        good_[chunk] = 0;
        found.push_back(chunk);
      }
      best_runs(good_, size - static_cast<int64_t>(wanted.size()), found);
      return;
    }
    std::nth_element(wanted.begin(), wanted.begin() + (size - 1), wanted.end());
    const Tick last = wanted[size - 1].first;
    good_.assign(num_chunks_, 0);
    int64_t num_sooner = 0;
    for (const auto& [until, chunk] : wanted) {
      if (until < last) {
        found.push_back(chunk);
        ++num_sooner;
      } else if (until == last) {
        good_[chunk] = 1;
      }
    }
    best_runs(good_, size - num_sooner, found);
  }

  void count_conflicts(int64_t index) {
    std::vector<int64_t> own{index};
    if (!has_home_[families_[index]]) {
      for (const int64_t other : members_[families_[index]]) {
        if (other != index) own.push_back(other);
      }
    }
    std::fill(conflicts_.begin(), conflicts_.end(), 0);
    const Tick first = starts_[index];
    Tick stop = stops_[index];
    for (const int64_t each : own) stop = std::max(stop, stops_[each]);
    const auto at = [this](Tick tick) {
      return std::lower_bound(ordered_.begin(), ordered_.end(), tick) - ordered_.begin();
    };
    count_claims(at(first), at(stop), own);
    count_claims(static_cast<int64_t>(ordered_.size()), static_cast<int64_t>(starts_.size()), own);
    for (size_t i = 1; i < own.size(); ++i) {
      for (int64_t chunk = 0; chunk < num_chunks_; ++chunk) conflicts_[chunk] += hard_from_[chunk] < stops_[own[i]];
    }
  }

  void count_claims(int64_t low, int64_t high, const std::vector<int64_t>& own) {
    for (int64_t arc = low; arc < high; ++arc) {
      if (!claims_home_[arc]) continue;
      const bool overlaps = std::any_of(own.begin(), own.end(), [&](int64_t each) {
        return starts_[arc] < stops_[each] && stops_[arc] > starts_[each];
      });
      if (!overlaps) continue;
      for (const int64_t chunk : home_[families_[arc]]) ++conflicts_[chunk];
    }
  }

  std::vector<Tick> starts_, stops_, written_;
  std::vector<int64_t> sizes_, families_;
  const std::vector<Tick> ordered_;
  const std::vector<uint8_t> may_be_cut_;
  const Tick num_ticks_;
  const int64_t num_chunks_, late_price_;
  const bool best_fit_;
  int64_t span_ = 0, num_late_ = 0;
  std::vector<uint8_t> is_coloured_, claims_home_;
  std::vector<Chunks> chunks_;
  std::vector<int64_t> crossing_, cut_;
  std::vector<std::vector<int64_t>> members_;
  std::vector<Chunks> home_;
  std::vector<uint8_t> has_home_;
  std::vector<Tick> free_at_, hard_from_, written_at_, first_at_, next_claim_;
  std::vector<LeastFirst<std::pair<Tick, int64_t>>> claims_of_;  // by chunk: tick, arc
  std::vector<int64_t> conflicts_;
  Mask good_, usable_;
};

}  // namespace

// Families count from 0. `chunks` has room for all arcs' and once more for those that cross the boundary, `cut` for as
// many numbers as there are arcs. How many chunks are missing, for `short_arc`; 0: none; -1: memory.
OOC_EXPORT int64_t scheduler_walk(int64_t num_arcs, const int64_t* starts, const int64_t* stops, const int64_t* written,
                                  const int64_t* sizes, const int64_t* families, const uint8_t* may_be_cut,
                                  int64_t num_ticks, int64_t num_chunks, int64_t late_price, bool give_way,
                                  bool best_fit, int64_t* chunks, int64_t* cut, int64_t* num_cut, int64_t* num_late,
                                  int64_t* short_arc) {
  try {
    Walk walk(num_arcs, starts, stops, written, sizes, families, may_be_cut, num_ticks, num_chunks, late_price,
              best_fit);
    const int64_t missing = walk.run(give_way, short_arc);
    std::copy(walk.cut().begin(), walk.cut().end(), cut);
    *num_cut = static_cast<int64_t>(walk.cut().size());
    *num_late = walk.num_late();
    if (missing == 0) {
      for (const auto& own : walk.chunks()) chunks = std::copy(own.begin(), own.end(), chunks);
    }
    return missing;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}
