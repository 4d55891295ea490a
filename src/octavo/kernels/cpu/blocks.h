// Weights as whole numbers in blocks of 32 along the inner dimension, each with a scale and a minimum.
#pragma once

#include "vector.h"

namespace octavo {

constexpr long BLOCK = 32;        // weights of one column that share a scale
constexpr long BLOCK_HEAD = 64;   // bytes of sixteen scales and sixteen minima in half precision
constexpr long FEW_ROWS = 37;     // below, whole numbers are multiplied, and scaled once a block

// Bytes of one block of sixteen columns. After its head lie the numbers, pairs of inner neighbours together:
// 8 bits: [pair][16][2] signed bytes; 4 bits: [4][16][2] words, each with the numbers of pairs 4q to 4q + 3.
inline long block_bytes(long bits) { return BLOCK_HEAD + BLOCK * LANES * bits / 8; }

inline Floats from_half(const uint8_t* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps((__m256i)load<Halves>(from));
#else
  const Words half = __builtin_convertvector(load<Halves>(from), Words);
  const Words sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
  // A half's exponent is 112 less than a float's; the product scales numbers without a leading 1, too.
  return (Floats)((Words)((Floats)(rest << 13) * 0x1p112f) | sign);
#endif
}

template <long BITS>
inline Words pair_of(const uint8_t* numbers, long pair);  // sixteen pairs of signed 16-bit numbers

template <>
inline Words pair_of<8>(const uint8_t* numbers, long pair) {
  typedef int8_t Bytes __attribute__((vector_size(32)));
  typedef int16_t Shorts __attribute__((vector_size(64)));
  return (Words)__builtin_convertvector(load<Bytes>(numbers + pair * 2 * LANES), Shorts);
}

template <>
inline Words pair_of<4>(const uint8_t* numbers, long pair) {
  return (load<Words>(numbers + pair / 4 * 64) >> uint32_t(pair % 4 * 4)) & 0x000f000fu;
}

inline Floats low_half(Words pair) { return __builtin_convertvector((Ints)(pair << 16) >> 16, Floats); }
inline Floats high_half(Words pair) { return __builtin_convertvector((Ints)pair >> 16, Floats); }

// One block's whole numbers in the order of a group of E; they are exact in bfloat16.
template <class E, long BITS>
inline void unpack(const uint8_t* numbers, typename E::T* to) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
  if constexpr (BITS == 4 && E::STEP == 2) {
    typedef uint16_t Table __attribute__((vector_size(64)));
    // Looked up by five bits, so that the neighbour's lowest does not matter.
    const Table table = {0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
                         0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
                         0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
#pragma GCC unroll 4
    for (long quad = 0; quad < 4; quad++) {
      const __m512i words = load<__m512i>(numbers + quad * 64);
      typename E::T* at = to + quad * 4 * 2 * LANES;
      store(at, _mm512_permutexvar_epi16(words, (__m512i)table));
      store(at + 2 * LANES, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), (__m512i)table));
      store(at + 4 * LANES, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), (__m512i)table));
      store(at + 6 * LANES, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), (__m512i)table));
    }
    return;
  }
#endif
  for (long pair = 0; pair < BLOCK / 2; pair++) {
    const Words both = pair_of<BITS>(numbers, pair);
    typename E::T* at = to + pair * 2 * LANES;
    if constexpr (E::STEP == 2) {
      store(at, ((Words)low_half(both) >> 16) | (Words)high_half(both));
    } else {
      store(at, low_half(both));
      store(at + LANES, high_half(both));
    }
  }
}

// One block's weights, rounded to E's type, in the order of a group.
template <class E, long BITS>
inline void widen(const uint8_t* block, typename E::T* to) {
  const Floats scale = from_half(block), minimum = from_half(block + BLOCK_HEAD / 2);
  for (long pair = 0; pair < BLOCK / 2; pair++) {
    const Words both = pair_of<BITS>(block + BLOCK_HEAD, pair);
    const Floats low = low_half(both) * scale + minimum, high = high_half(both) * scale + minimum;
    typename E::T* at = to + pair * 2 * LANES;
    if constexpr (E::STEP == 2) {
      Halves parts[2];
      E::narrow((typename E::T*)&parts[0], low);
      E::narrow((typename E::T*)&parts[1], high);
      store(at, __builtin_convertvector(parts[0], Words) | __builtin_convertvector(parts[1], Words) << 16);
    } else {
      store(at, low);
      store(at + LANES, high);
    }
  }
}

// A group of sixteen columns, `blocks` long: whole numbers to `to`, scales and minima to `factors` [blocks][2]; or
// weights to `to` where `factors` is null.
template <class E, long BITS>
inline void open_group(const uint8_t* group, long blocks, typename E::T* to, Floats* factors) {
  const long bytes = BLOCK_HEAD + BLOCK * LANES * BITS / 8;
  for (long b = 0; b < blocks; b++, group += bytes, to += BLOCK * LANES) {
    for (long line = 0; line < bytes; line += 64) __builtin_prefetch(group + 2048 + line);
    if (!factors) {
      widen<E, BITS>(group, to);
      continue;
    }
    factors[2 * b] = from_half(group);
    factors[2 * b + 1] = from_half(group + BLOCK_HEAD / 2);
    unpack<E, BITS>(group + BLOCK_HEAD, to);
  }
}

// M rows times an opened group; sums [rows][blocks] are those of the rows' own numbers.
template <class E, int M>
inline __attribute__((always_inline)) void multiply_blocks(const typename E::T* rows, long lda, const float* sums,
                                                           const typename E::T* group, const Floats* factors,
                                                           long blocks, Floats (&total)[M]) {
  constexpr int CHAINS = M == 1 ? 4 : M < 5 ? 2 : 1;  // sums at once, as one waits for its last addition
#pragma GCC unroll 16
  for (int m = 0; m < M; m++) total[m] = Floats{};
  for (long b = 0; b < blocks; b++) {
    Floats found[M][CHAINS];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
      for (int c = 0; c < CHAINS; c++) found[m][c] = Floats{};
    for (long k = 0; k < BLOCK; k += CHAINS * E::STEP)
#pragma GCC unroll 4
      for (int c = 0; c < CHAINS; c++)
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
          const long at = b * BLOCK + k + c * E::STEP;
          found[m][c] = E::dot(found[m][c], group + at * LANES, rows + m * lda + at);
        }
    const Floats scale = factors[2 * b], minimum = factors[2 * b + 1];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      Floats all = found[m][0];
      for (int c = 1; c < CHAINS; c++) all += found[m][c];
      total[m] = total[m] + all * scale + minimum * sums[m * blocks + b];
    }
  }
}

// Sums of each block of 32 numbers of some rows.
template <class E>
inline void sum_blocks(const typename E::T* rows, long lda, long count, long blocks, float* sums) {
  for (long r = 0; r < count; r++)
    for (long b = 0; b < blocks; b++) {
      const typename E::T* at = rows + r * lda + b * BLOCK;
      sums[r * blocks + b] = sum(E::widen(at) + E::widen(at + LANES));
    }
}

}  // namespace octavo
