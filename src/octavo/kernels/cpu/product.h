// Products of rows with groups of sixteen columns: a few kept in registers, many on the tile unit.
#pragma once

#include "tiles.h"
#include "vector.h"

namespace octavo {

constexpr int MOST_ROWS = 12;  // of sums in registers

// Rows that are multiplied at once; work is cut at multiples of it.
template <class E>
constexpr long AT_ONCE = TILES && E::STEP == 2 ? 2 * TILE : MOST_ROWS;

// M rows (lda apart) times N groups of sixteen columns; a group's numbers lie [inner / STEP][16][STEP], `ldb`
// elements from one inner step to the next.
template <class E, int M, int N>
inline __attribute__((always_inline)) void multiply(const typename E::T* rows, long lda,
                                                    const typename E::T* const* groups, long ldb, long inner,
                                                    Floats (&total)[M][N]) {
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) total[m][n] = Floats{};
  const typename E::T* group[N];
#pragma GCC unroll 4
  for (int n = 0; n < N; n++) group[n] = groups[n];
  for (long k = 0, at = 0; k < inner; k += E::STEP, at += ldb) {
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) __builtin_prefetch(group[n] + at + 1024 / sizeof(typename E::T));
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) total[m][n] = E::dot(total[m][n], group[n] + at, rows + m * lda + k);
  }
}

// Call `some(number of rows as a constant, first row)` for `count` rows, MOST_ROWS or fewer at a time.
template <class F>
inline void by_rows(long count, const F& some) {
  long first = 0;
  for (; first + MOST_ROWS <= count; first += MOST_ROWS) some(std::integral_constant<int, MOST_ROWS>(), first);
  switch (count - first) {
    case 1: return some(std::integral_constant<int, 1>(), first);
    case 2: return some(std::integral_constant<int, 2>(), first);
    case 3: return some(std::integral_constant<int, 3>(), first);
    case 4: return some(std::integral_constant<int, 4>(), first);
    case 5: return some(std::integral_constant<int, 5>(), first);
    case 6: return some(std::integral_constant<int, 6>(), first);
    case 7: return some(std::integral_constant<int, 7>(), first);
    case 8: return some(std::integral_constant<int, 8>(), first);
    case 9: return some(std::integral_constant<int, 9>(), first);
    case 10: return some(std::integral_constant<int, 10>(), first);
    case 11: return some(std::integral_constant<int, 11>(), first);
    default: return;
  }
}

// Call `use(first row, sums of some rows)` until all `count` rows were had. `use` goes through the sums by a range-for.
template <class E, int N, class F>
inline void each_rows(const typename E::T* rows, long lda, long count, const typename E::T* const* groups, long ldb,
                      long inner, const F& use) {
  long done = 0;
  if constexpr (E::STEP == 2) done = each_tile<N>(rows, lda, count, groups, ldb, inner, use);
  by_rows(count - done, [&](auto number, long first) {
    Floats total[decltype(number)::value][N];
    multiply<E, decltype(number)::value, N>(rows + (done + first) * lda, lda, groups, ldb, inner, total);
    use(done + first, total);
  });
}

}  // namespace octavo
