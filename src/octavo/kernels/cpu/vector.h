// Sixteen numbers at a time: what the compiler turns into one AVX-512 register, or into several narrower ones.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace octavo {

constexpr long LANES = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

template <class V, class T>
inline V load(const T* from) {
  V found;
  std::memcpy(&found, from, sizeof(V));
  return found;
}

template <class V, class T>
inline void store(T* to, V value) {
  std::memcpy(to, &value, sizeof(V));
}

inline Floats spread(float x) { return Floats{} + x; }
inline Ints spread(int32_t x) { return Ints{} + x; }

inline float sum(Floats x) {
  float total = 0;
  for (int i = 0; i < LANES; i++) total += x[i];
  return total;
}

// e^x to about 1e-7 of its value; NaN stays NaN.
inline Floats exponential(Floats x) {
  const Floats low = spread(-86.0f), high = spread(88.0f);
  x = x < low ? low : x;
  x = x > high ? high : x;
  const Floats magic = spread(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Floats turns = x * 1.44269504f + magic;
  const Ints power = (Ints)turns << 23;
  turns -= magic;
  const Floats r = x - turns * 0.693359375f + turns * 2.12194440e-4f;
  Floats p = spread(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return (Floats)((Ints)p + power);
}

inline Floats hyperbolic_tangent(Floats x) {
  const Floats size = x < 0.0f ? -x : x;
  const Floats e = exponential(size * -2.0f);
  Floats found = (1.0f - e) / (1.0f + e);
  const Floats small = x * (1.0f - x * x * (1.0f / 3.0f));  // where the difference above loses digits
  found = x < 0.0f ? -found : found;
  return size < 0.02f ? small : found;
}

// How a model's numbers are stored and multiplied: STEP neighbours along the inner dimension lie together, so
// that one instruction multiplies sixteen columns of them by the same STEP numbers of a row.
struct Float32 {
  using T = float;
  static constexpr long STEP = 1;
  static inline Floats widen(const T* from) { return load<Floats>(from); }
  static inline void narrow(T* to, Floats x) { store(to, x); }
  static inline float widen1(T x) { return x; }
  static inline T narrow1(float x) { return x; }
  static inline Floats dot(Floats total, const T* columns, const T* row) {
    return total + load<Floats>(columns) * *row;
  }
};

struct BFloat16 {
  using T = uint16_t;
  static constexpr long STEP = 2;
  static inline Floats widen(const T* from) {
    return (Floats)(__builtin_convertvector(load<Halves>(from), Words) << 16);
  }
  static inline float widen1(T x) {
    const uint32_t bits = uint32_t(x) << 16;
    float found;
    std::memcpy(&found, &bits, 4);
    return found;
  }
  static inline T narrow1(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return 0x7fc0;
    return T((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
  static inline void narrow(T* to, Floats x) {
#if defined(__AVX512BF16__)
    store(to, _mm512_cvtneps_pbh((__m512)x));
#else
    Words bits = (Words)x;
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    store(to, __builtin_convertvector(x == x ? bits : Words{} + 0x7fc0, Halves));
#endif
  }
  static inline Floats dot(Floats total, const T* columns, const T* row) {
    int32_t pair;
    std::memcpy(&pair, row, 4);
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)load<__m512i>(columns), (__m512bh)_mm512_set1_epi32(pair));
#else
    const Words both = load<Words>(columns);
    total += (Floats)(both << 16) * widen1(row[0]);
    return total + (Floats)(both & 0xffff0000u) * widen1(row[1]);
#endif
  }
};

}  // namespace octavo
