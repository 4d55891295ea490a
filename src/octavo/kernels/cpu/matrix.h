// Weight matrices in groups of sixteen output columns, and their products with rows.
#pragma once

#include <algorithm>
#include <type_traits>

#include "blocks.h"
#include "product.h"
#include "team.h"

namespace octavo {

// y = x W^T + b. Columns are padded with zeros to a whole group of sixteen. `data` lies, where `bits` is 0,
// [columns / 16][inner / STEP][16][STEP]; else it is [columns / 16][inner / 32] blocks (blocks.h) of 4 or 8 bits.
struct Matrix {
  const void* data;
  const float* bias;  // or null
  long columns, inner, bits;
  long groups() const { return (columns + LANES - 1) / LANES; }
};

// Call `use(row, pair, first, second)` for every row and pair of groups, sums of sixteen columns each, without bias.
// Pair p is of the groups 2p and 2p + 1, or of p and p + groups / 2 where `halves`.
template <class E, class F>
void product(Worker& worker, long threads, const Matrix& matrix, bool halves, const typename E::T* x, long stride,
             long rows, const F& use) {
  using T = typename E::T;
  const long groups = matrix.groups(), pairs = (groups + 1) / 2, size = matrix.inner * LANES;
  const long blocks = matrix.inner / BLOCK, bits = matrix.bits;
  const bool tiles = TILES && E::STEP == 2 && tiles_allowed();
  const bool scaled = bits && rows < (tiles ? FEWEST_ROWS : FEW_ROWS);  // whole numbers are multiplied, not weights
  const long each = std::max(1L, pairs / (32 * threads));
  const long batches = (pairs + each - 1) / each;
  constexpr long few = AT_ONCE<E>;
  const long slices = scaled ? 1 : std::min((rows + 4 * few - 1) / (4 * few), 1 + 4 * threads / batches);
  const long slice = ((rows + slices - 1) / slices + few - 1) / few * few;
  T* opened = bits ? scratch<T, 30>(2 * size + 32) : nullptr;
  while (reinterpret_cast<uintptr_t>(opened) % 64) opened++;
  Floats* factors = scaled ? scratch<Floats, 32>(4 * blocks) : nullptr;
  float* sums = scaled ? scratch<float, 31>(rows * blocks) : nullptr;
  bool summed = false;  // by this thread
  auto open = [&](long number, int place) {
    const auto* from = static_cast<const uint8_t*>(matrix.data) + number * blocks * block_bytes(bits);
    Floats* to = scaled ? factors + 2 * blocks * place : nullptr;
    if (bits == 4) open_group<E, 4>(from, blocks, opened + place * size, to);
    else open_group<E, 8>(from, blocks, opened + place * size, to);
    return opened + place * size;
  };
  worker.run(batches * slices, [&](long item) {
    const long begin = item % slices * slice, count = std::min(slice, rows - begin);
    const T* from = x + begin * stride;
    if (scaled && !summed) sum_blocks<E>(x, stride, rows, blocks, sums);
    summed = true;
    for (long pair = item / slices * each; pair < std::min(pairs, (item / slices + 1) * each); pair++) {
      const long numbers[2] = {halves ? pair : 2 * pair, halves ? pair + groups / 2 : 2 * pair + 1};
      const bool two = numbers[1] < groups;
      const T* both[2] = {nullptr, nullptr};
      for (int n = 0; n < 1 + two; n++)
        both[n] = bits ? open(numbers[n], n) : static_cast<const T*>(matrix.data) + numbers[n] * size;
      if (scaled) {
        by_rows(count, [&](auto number, long first) {
          constexpr int M = decltype(number)::value;
          Floats total[2][M];
          for (int n = 0; n < 1 + two; n++)
            multiply_blocks<E, M>(from + first * stride, stride, sums + first * blocks, both[n],
                                  factors + 2 * blocks * n, blocks, total[n]);
          for (int m = 0; m < M; m++) use(begin + first + m, pair, total[0][m], total[two][m]);
        });
        continue;
      }
      auto hand = [&](long first, auto& total) {
        for (auto& row : total) {
          use(begin + first, pair, row[0], row[sizeof(row) / sizeof(row[0]) - 1]);
          first++;
        }
      };
      if (two) each_rows<E, 2>(from, stride, count, both, LANES * E::STEP, matrix.inner, hand);
      else each_rows<E, 1>(from, stride, count, both, LANES * E::STEP, matrix.inner, hand);
    }
  });
}

// As `product`, by single groups: use(row, first column, sums with bias).
template <class E, class F>
void project(Worker& worker, long threads, const Matrix& matrix, const typename E::T* x, long stride, long rows,
             const F& use) {
  const long groups = matrix.groups();
  product<E>(worker, threads, matrix, false, x, stride, rows, [&](long row, long pair, Floats first, Floats second) {
    const long column = 2 * pair * LANES;
    if (matrix.bias) first += load<Floats>(matrix.bias + column);
    use(row, column, first);
    if (2 * pair + 1 >= groups) return;
    if (matrix.bias) second += load<Floats>(matrix.bias + column + LANES);
    use(row, column + LANES, second);
  });
}

}  // namespace octavo
