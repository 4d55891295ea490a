// Weight matrices in groups of sixteen output columns, and their products with rows.
#pragma once

#include <algorithm>
#include <type_traits>

#include "product.h"
#include "team.h"

namespace octavo {

// y = x W^T + b. `data` lies [columns / 16][inner / STEP][16][STEP]; columns are padded with zeros to a whole group.
struct Matrix {
  const void* data;
  const float* bias;  // or null
  long columns, inner;
  long groups() const { return (columns + LANES - 1) / LANES; }
};

// Call `use(row, pair, first, second)` for every row and pair of groups, sums of sixteen columns each, without bias.
// Pair p is of the groups 2p and 2p + 1, or of p and p + groups / 2 where `halves`.
template <class E, class F>
void product(Worker& worker, long threads, const Matrix& matrix, bool halves, const typename E::T* x, long stride,
             long rows, const F& use) {
  using T = typename E::T;
  const long groups = matrix.groups(), pairs = (groups + 1) / 2, size = matrix.inner * LANES;
  const long each = std::max(1L, pairs / (32 * threads));
  const long batches = (pairs + each - 1) / each;
  const long slices = std::min((rows + 4 * MOST_ROWS - 1) / (4 * MOST_ROWS), 1 + 4 * threads / batches);
  const long slice = ((rows + slices - 1) / slices + MOST_ROWS - 1) / MOST_ROWS * MOST_ROWS;
  worker.run(batches * slices, [&](long item) {
    const long begin = item % slices * slice, count = std::min(slice, rows - begin);
    for (long pair = item / slices * each; pair < std::min(pairs, (item / slices + 1) * each); pair++) {
      const T* data = static_cast<const T*>(matrix.data);
      const T* both[2] = {data + (halves ? pair : 2 * pair) * size,
                          data + (halves ? pair + groups / 2 : 2 * pair + 1) * size};
      auto hand = [&](long first, auto& total) {
        for (auto& row : total) {
          use(begin + first, pair, row[0], row[sizeof(row) / sizeof(row[0]) - 1]);
          first++;
        }
      };
      const T* from = x + begin * stride;
      if (halves || 2 * pair + 1 < groups) each_rows<E, 2>(from, stride, count, both, LANES * E::STEP, matrix.inner, hand);
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
