// Products of many bfloat16 rows on the processor's tile unit (AMX), where it has one.
#pragma once

#include <algorithm>

#include "vector.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define OCTAVO_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace octavo {

constexpr long TILE = 16;        // rows of a tile, and pairs along the inner dimension
constexpr long FEWEST_ROWS = 6;  // below, registers are quicker

#ifdef OCTAVO_TILES
constexpr bool TILES = true;

// Linux hands out the unit's state (number 18) to a process that asks once.
inline bool tiles_allowed() {
  static const bool allowed = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18) == 0;
  return allowed;
}

// Rows of the first and the second block that this thread's tiles have; 0 and 0: none.
inline long (&shaped())[2] {
  static thread_local long rows[2] = {0, 0};
  return rows;
}

// Tiles 0 to 3 are sums, [two blocks of rows][two groups]; 4 and 5 hold rows, 6 and 7 groups of columns.
inline void shape_tiles(long first, long second) {
  long(&now)[2] = shaped();
  if (now[0] == first && (second == 0 || now[1] == second)) return;
  now[0] = first;
  now[1] = std::max(1L, second);
  struct alignas(64) {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } shape = {};
  shape.palette = 1;
  const long each[8] = {first, first, now[1], now[1], first, now[1], TILE, TILE};
  for (int i = 0; i < 8; i++) {
    shape.bytes[i] = 64;
    shape.rows[i] = uint8_t(each[i]);
  }
  _tile_loadconfig(&shape);
}

// At the end of a parallel region: others use the unit, too.
inline void release_tiles() {
  if (shaped()[0] == 0) return;
  shaped()[0] = 0;
  _tile_release();
}

template <int N, bool TWO>
inline void multiply_tiles(const uint16_t* rows, long lda, const uint16_t* const* groups, long ldb, long inner,
                           bool fetch, Floats (*found)[N]) {
  const uint16_t *first = groups[0], *second = groups[N - 1];
  _tile_zero(0);
  if constexpr (N == 2) _tile_zero(1);
  if constexpr (TWO) _tile_zero(2);
  if constexpr (TWO && N == 2) _tile_zero(3);
  for (long k = 0; k < inner; k += 2 * TILE, first += TILE * ldb, second += TILE * ldb) {
    _tile_loadd(6, first, 2 * ldb);
    if constexpr (N == 2) _tile_loadd(7, second, 2 * ldb);
    _tile_loadd(4, rows + k, 2 * lda);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (N == 2) _tile_dpbf16ps(1, 4, 7);
    if constexpr (TWO) {
      _tile_loadd(5, rows + TILE * lda + k, 2 * lda);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (N == 2) _tile_dpbf16ps(3, 5, 7);
    }
    if (fetch)
      for (long line = 0; line < TILE; line++) {
        __builtin_prefetch(first + (2 * TILE + line) * ldb);
        if constexpr (N == 2) __builtin_prefetch(second + (2 * TILE + line) * ldb);
      }
  }
  const long stride = sizeof(*found);
  _tile_stored(0, found, stride);
  if constexpr (N == 2) _tile_stored(1, &found[0][1], stride);
  if constexpr (TWO) _tile_stored(2, found + TILE, stride);
  if constexpr (TWO && N == 2) _tile_stored(3, &found[TILE][1], stride);
}

template <int N>
struct FoundRows {
  Floats (*first)[N];
  long count;
  Floats (*begin() const)[N] { return first; }
  Floats (*end() const)[N] { return first + count; }
};

// As `each_rows` of product.h, for as many of the rows as are worth it here; returns how many.
template <int N, class F>
inline long each_tile(const uint16_t* rows, long lda, long count, const uint16_t* const* groups, long ldb, long inner,
                      const F& use) {
  if (count < FEWEST_ROWS || inner % (2 * TILE) || !tiles_allowed()) return 0;
  Floats found[2 * TILE][N];
  long done = 0;
  while (count - done >= FEWEST_ROWS) {
    const long now = std::min(2 * TILE, count - done);
    shape_tiles(std::min(now, TILE), std::max(0L, now - TILE));
    const uint16_t* from = rows + done * lda;
    if (now > TILE) multiply_tiles<N, true>(from, lda, groups, ldb, inner, done == 0, found);
    else multiply_tiles<N, false>(from, lda, groups, ldb, inner, done == 0, found);
    FoundRows<N> total{found, now};
    use(done, total);
    done += now;
  }
  return done;
}

#else
constexpr bool TILES = false;

inline void release_tiles() {}

template <int N, class F>
inline long each_tile(const uint16_t*, long, long, const uint16_t* const*, long, long, const F&) {
  return 0;
}

#endif

}  // namespace octavo
