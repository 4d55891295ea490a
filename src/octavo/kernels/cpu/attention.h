// Attention over the paged cache, which is read where it lies.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "product.h"
#include "team.h"

namespace octavo {

constexpr long CHUNK = 256;     // keys whose scores are held at once
constexpr long TILE_ROWS = 96;  // rows of queries that share a head of K and V, attended at once
constexpr long AHEAD = 64;      // keys that are asked for before their turn
constexpr long MANY_ROWS = 24;  // from here on it pays to reorder V
constexpr long SPLIT = 256;     // fewest keys worth a work item of their own

// The sequences of a step (see octavo/batch.py).
struct Sequences {
  long count;
  const int64_t* query_starts;  // [count + 1]
  const int64_t* context_lens;  // [count]
  const int64_t* block_table;   // [count, table_stride]
  long table_stride;
};

struct Heads {
  long heads, kv_heads, dim, block_size, window;  // window 0: all positions are seen
  float scale, softcap;                           // softcap 0: none
  long group() const { return heads / kv_heads; }
  long padded() const { return (dim + LANES - 1) / LANES * LANES; }
};

// Inside a block K lies [kv_heads][dim / STEP][block_size][STEP] and V [kv_heads][block_size][dim].
template <class E>
struct Cache {
  typename E::T *key, *value;

  void write(const Heads& h, int64_t slot, long head, const typename E::T* k, const typename E::T* v) const {
    const long size = h.block_size * h.dim, offset = slot % h.block_size;
    const long begin = (slot / h.block_size * h.kv_heads + head) * size;
    typename E::T* to = key + begin + offset * E::STEP;
    for (long d = 0; d < h.dim; d += E::STEP) std::memcpy(to + d * h.block_size, k + d, E::STEP * sizeof(*k));
    std::memcpy(value + begin + offset * h.dim, v, h.dim * sizeof(*v));
  }
};

// Some rows of one sequence and one head of K and V, over the keys [begin, end).
struct Work {
  long sequence, row, rows, head, begin, end;
  long part, parts;  // of the keys, where several items share the rows
  long partial;      // where part 0 leaves its numbers; the others follow
};

inline std::vector<Work> plan(const Sequences& s, const Heads& h, long threads, long& num_partials) {
  std::vector<Work> found;
  const long tile = std::max(1L, TILE_ROWS / h.group());
  long items = 0;
  for (long i = 0; i < s.count; i++)
    items += (s.query_starts[i + 1] - s.query_starts[i] + tile - 1) / tile * h.kv_heads;
  num_partials = 0;
  for (long i = 0; i < s.count; i++) {
    const long first = s.query_starts[i], last = s.query_starts[i + 1];
    const long shift = s.context_lens[i] - last;  // from a row's number to its position
    for (long row = first; row < last; row += tile) {
      const long rows = std::min(tile, last - row), end = row + rows + shift;
      const long begin = h.window ? std::max(0L, row + shift - h.window + 1) : 0;
      long parts = 1;
      if (threads > 1 && items < 4 * threads) parts = std::min((end - begin) / SPLIT, 4 * threads / items + 1);
      parts = std::max(1L, parts);
      const long each = ((end - begin) / parts + LANES) / LANES * LANES;
      for (long head = 0; head < h.kv_heads; head++) {
        const long partial = num_partials;
        for (long part = 0; part < parts; part++) {
          const long from = std::min(end, begin + part * each);
          const long to = part + 1 == parts ? end : std::min(end, begin + (part + 1) * each);
          found.push_back({i, row, rows, head, from, to, part, parts, partial});
        }
        if (parts > 1) num_partials += parts * rows * h.group();
      }
    }
  }
  // The longest first, so that no thread begins one when the others have finished.
  std::stable_sort(found.begin(), found.end(),
                   [](const Work& a, const Work& b) { return a.rows * (a.end - a.begin) > b.rows * (b.end - b.begin); });
  return found;
}

template <class E>
class Attention {
  using T = typename E::T;

 public:
  Attention(const Sequences& sequences, const Heads& heads, long threads) : s(sequences), h(heads) {
    work = plan(s, h, threads, num_partials);
    partials.resize(num_partials * (h.padded() + 2));
    for (const Work& w : work)
      if (w.parts > 1 && w.part == 0) split.push_back(w);
  }

  long num_items() const { return long(work.size()); }
  long num_split() const { return long(split.size()); }

  // query [T, heads, dim] with `stride` elements from row to row -> out [T, heads * dim].
  void attend(long item, const Cache<E>& cache, const T* query, long stride, T* out) {
    const Work& w = work[item];
    const long g = h.group(), dim = h.dim, padded = h.padded(), count = w.rows * g;
    T* q = scratch<T, 0>(count * dim);
    for (long t = 0; t < w.rows; t++)
      std::memcpy(q + t * g * dim, query + (w.row + t) * stride + w.head * g * dim, g * dim * sizeof(T));
    float* scores = scratch<float, 1>(count * CHUNK);
    float* total = scratch<float, 2>(count * (padded + 2));
    float *peak = total + count * padded, *mass = peak + count;
    std::fill(total, peak, 0.0f);
    std::fill(peak, mass, -INFINITY);
    std::fill(mass, mass + count, 0.0f);
    const long shift = s.context_lens[w.sequence] - s.query_starts[w.sequence + 1];
    for (long begin = w.begin / LANES * LANES; begin < w.end; begin += CHUNK) {
      const long end = std::min(begin + CHUNK, w.end), seen = std::max(begin, w.begin);
      score(w, cache, q, count, begin, end, scores);
      for (long r = 0; r < count; r++) {
        const long position = w.row + r / g + shift;
        const long from = std::max(seen, h.window ? position - h.window + 1 : 0), to = std::min(end, position + 1);
        normalize(scores + r * CHUNK, from - begin, to - begin, end - begin, total + r * padded, peak[r], mass[r]);
      }
      weigh(w, cache, scores, count, begin, seen, end, total);
    }
    if (w.parts > 1) {
      float* to = &partials[w.partial * (padded + 2)];
      std::memcpy(to + w.part * count * (padded + 2), total, count * (padded + 2) * sizeof(float));
      return;
    }
    for (long r = 0; r < count; r++) finish(w, r, total + r * padded, 1.0f / mass[r], out);
  }

  // Put together what the parts of one split item found.
  void combine(long item, T* out) {
    const Work& w = split[item];
    const long padded = h.padded(), count = w.rows * h.group(), size = count * (padded + 2);
    const float* parts = &partials[w.partial * (padded + 2)];
    float* total = scratch<float, 2>(padded);
    for (long r = 0; r < count; r++) {
      float peak = -INFINITY, mass = 0;
      for (long p = 0; p < w.parts; p++) peak = std::max(peak, parts[p * size + count * padded + r]);
      std::fill(total, total + padded, 0.0f);
      for (long p = 0; p < w.parts; p++) {
        const float own = parts[p * size + count * padded + r];
        const float share = own == -INFINITY ? 0.0f : std::exp(own - peak);
        mass += share * parts[p * size + count * (padded + 1) + r];
        for (long d = 0; d < padded; d++) total[d] += share * parts[p * size + r * padded + d];
      }
      finish(w, r, total, 1.0f / mass, out);
    }
  }

 private:
  const Sequences s;
  const Heads h;
  std::vector<Work> work, split;
  long num_partials = 0;
  std::vector<float> partials;

  void finish(const Work& w, long r, const float* total, float factor, T* out) const {
    const long g = h.group();
    T* to = out + ((w.row + r / g) * h.heads + w.head * g + r % g) * h.dim;
    long d = 0;
    for (; d + LANES <= h.dim; d += LANES) E::narrow(to + d, load<Floats>(total + d) * factor);
    for (; d < h.dim; d++) to[d] = E::narrow1(total[d] * factor);
  }

  long block_of(const Work& w, long position) const {
    return s.block_table[w.sequence * s.table_stride + position / h.block_size] * h.kv_heads + w.head;
  }

  // Scores of the keys [begin, end), begin a multiple of 16; what lies in the last group behind `end` is no number.
  void score(const Work& w, const Cache<E>& cache, const T* q, long count, long begin, long end, float* scores) const {
    const long step = LANES * E::STEP, whole = h.block_size % LANES == 0;
    T* copies = whole ? nullptr : scratch<T, 3>(2 * h.dim * LANES);
    // Blocks lie scattered, so the processor does not see what comes next.
    const bool cold = whole && count <= 2 * MOST_ROWS;
    for (long at = begin; cold && at < std::min(end, begin + AHEAD); at += LANES) fetch_keys(w, cache, at);
    for (long at = begin; at < end;) {
      for (long near = at; cold && near < std::min(end, at + 2 * LANES); near += LANES) {
        if (near + AHEAD < end) fetch_keys(w, cache, near + AHEAD);
        fetch(cache.value + (block_of(w, near) * h.block_size + near % h.block_size) * h.dim, LANES * h.dim);
      }
      const T* groups[2];
      const int pair = at + LANES < end ? 2 : 1;
      for (int n = 0; n < pair; n++)
        groups[n] = whole ? keys(w, cache, at + n * LANES) : copy(w, cache, at + n * LANES, end, copies + n * h.dim * LANES);
      const long ldb = whole ? h.block_size * E::STEP : step;
      float* to = scores + (at - begin);
      auto keep = [&](long first, auto& total) {
        for (auto& row : total) {
          for (auto& part : row) store(to + first * CHUNK + (&part - row) * LANES, part * h.scale);
          first++;
        }
      };
      if (pair == 2) each_rows<E, 2>(q, h.dim, count, groups, ldb, h.dim, keep);
      else each_rows<E, 1>(q, h.dim, count, groups, ldb, h.dim, keep);
      at += pair * LANES;
    }
  }

  static void fetch(const T* from, long count) {
    for (long i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(from + i);
  }

  void fetch_keys(const Work& w, const Cache<E>& cache, long position) const {
    const T* from = keys(w, cache, position);
    for (long d = 0; d < h.dim; d += E::STEP) __builtin_prefetch(from + d * h.block_size);
  }

  const T* keys(const Work& w, const Cache<E>& cache, long position) const {
    return cache.key + block_of(w, position) * h.block_size * h.dim + position % h.block_size * E::STEP;
  }

  // Sixteen keys of blocks that are not whole groups, in the order of a group.
  const T* copy(const Work& w, const Cache<E>& cache, long position, long end, T* to) const {
    for (long lane = 0; lane < LANES; lane++) {
      const T* from = keys(w, cache, std::min(position + lane, end - 1));
      for (long d = 0; d < h.dim; d += E::STEP)
        std::memcpy(to + d * LANES + lane * E::STEP, from + d * h.block_size, E::STEP * sizeof(T));
    }
    return to;
  }

  // Scores [from, to) of one row -> weights, all others up to `end` 0; what was found before is scaled to the new peak.
  void normalize(float* scores, long from, long to, long end, float* total, float& peak, float& mass) const {
    const long padded_end = (end + LANES - 1) / LANES * LANES;
    from = std::min(std::max(from, 0L), padded_end);
    to = std::max(to, from);
    const Floats hidden = spread(-INFINITY);
    Floats highest = hidden;
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const float cap = h.softcap;
    const long first = from / LANES * LANES;
    for (long at = first; at < to; at += LANES) {
      Floats x = load<Floats>(scores + at);
      if (cap != 0.0f) x = hyperbolic_tangent(x * (1.0f / cap)) * cap;
      const Ints number = lane + int32_t(at);
      x = ((number >= int32_t(from)) & (number < int32_t(to))) ? x : hidden;
      store(scores + at, x);
      highest = highest > x ? highest : x;
    }
    float best = peak;
    for (int i = 0; i < LANES; i++) best = std::max(best, highest[i]);
    if (to > from && best != peak) {
      const float factor = peak == -INFINITY ? 0.0f : std::exp(peak - best);
      mass *= factor;
      for (long d = 0; d < h.padded(); d += LANES) store(total + d, load<Floats>(total + d) * factor);
      peak = best;
    }
    Floats masses{};
    for (long at = 0; at < padded_end; at += LANES) {
      Floats x{};
      if (at >= first && at < to) {
        const Floats raw = load<Floats>(scores + at);
        x = raw == hidden ? Floats{} : exponential(raw - best);
        masses += x;
      }
      store(scores + at, x);
    }
    mass += sum(masses);
  }

  // total += weights x V.
  void weigh(const Work& w, const Cache<E>& cache, const float* weights, long count, long begin, long seen, long end,
             float* total) const {
    const T* rows[CHUNK];
    for (long at = seen; at < end;) {
      const long block = h.block_size - at % h.block_size;
      const T* from = cache.value + (block_of(w, at) * h.block_size + at % h.block_size) * h.dim;
      for (long n = std::min(block, end - at); n > 0; n--, at++, from += h.dim) rows[at - seen] = from;
    }
    weights += seen - begin;
    if constexpr (E::STEP == 2)
      if (count >= MANY_ROWS && h.dim % (2 * LANES) == 0) return weigh_many(rows, weights, count, end - seen, total);
    long first = 0;
    for (; first + 8 <= count; first += 8) weigh_rows<8>(rows, weights, first, end - seen, total);
    switch (count - first) {
      case 1: return weigh_rows<1>(rows, weights, first, end - seen, total);
      case 2: return weigh_rows<2>(rows, weights, first, end - seen, total);
      case 3: return weigh_rows<3>(rows, weights, first, end - seen, total);
      case 4: return weigh_rows<4>(rows, weights, first, end - seen, total);
      case 5: return weigh_rows<5>(rows, weights, first, end - seen, total);
      case 6: return weigh_rows<6>(rows, weights, first, end - seen, total);
      case 7: return weigh_rows<7>(rows, weights, first, end - seen, total);
      default: return;
    }
  }

  // The same for many rows: V is brought into the order of a matrix, and the weights are rounded, which pays from
  // MANY_ROWS on.
  void weigh_many(const T* const* rows, const float* weights, long count, long length, float* total) const {
    const long padded_length = (length + 2 * TILE - 1) / (2 * TILE) * 2 * TILE, group = CHUNK * LANES;
    T* columns = scratch<T, 4>(h.dim * CHUNK);
    for (long i = 0; i < padded_length; i += 2)
      for (long d = 0; d < h.dim; d += LANES) {
        Words both = {};
        if (i < length) both = __builtin_convertvector(load<Halves>(rows[i] + d), Words);
        if (i + 1 < length) both |= __builtin_convertvector(load<Halves>(rows[i + 1] + d), Words) << 16;
        store(columns + d / LANES * group + i * LANES, both);
      }
    T* shares = scratch<T, 5>(count * CHUNK);
    for (long r = 0; r < count; r++) {
      const float* from = weights + r * CHUNK;
      T* to = shares + r * CHUNK;
      long i = 0;
      for (; i + LANES <= length; i += LANES) E::narrow(to + i, load<Floats>(from + i));
      for (; i < length; i++) to[i] = E::narrow1(from[i]);
      std::fill(to + length, to + padded_length, T(0));
    }
    for (long d = 0; d < h.dim; d += 2 * LANES) {
      const T* groups[2] = {columns + d / LANES * group, columns + (d / LANES + 1) * group};
      each_rows<E, 2>(shares, CHUNK, count, groups, LANES * E::STEP, padded_length, [&](long first, auto& found) {
        for (auto& row : found) {
          float* to = total + first++ * h.dim + d;
          store(to, load<Floats>(to) + row[0]);
          store(to + LANES, load<Floats>(to + LANES) + row[1]);
        }
      });
    }
  }

  template <int M>
  void weigh_rows(const T* const* rows, const float* weights, long first, long length, float* total) const {
    const long padded = h.padded();
    weights += first * CHUNK;
    total += first * padded;
    long d = 0;
    for (; d + 2 * LANES <= h.dim; d += 2 * LANES) {
      Floats sums[M][2];
      for (int m = 0; m < M; m++)
        for (int n = 0; n < 2; n++) sums[m][n] = load<Floats>(total + m * padded + d + n * LANES);
      for (long i = 0; i < length; i++) {
        const Floats a = E::widen(rows[i] + d), b = E::widen(rows[i] + d + LANES);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
          sums[m][0] += a * weights[m * CHUNK + i];
          sums[m][1] += b * weights[m * CHUNK + i];
        }
      }
      for (int m = 0; m < M; m++)
        for (int n = 0; n < 2; n++) store(total + m * padded + d + n * LANES, sums[m][n]);
    }
    for (long i = 0; i < length && d < h.dim; i++)
      for (int m = 0; m < M; m++)
        for (long e = d; e < h.dim; e++) total[m * padded + e] += weights[m * CHUNK + i] * E::widen1(rows[i][e]);
  }
};

}  // namespace octavo
