// Weights brought into blocks of whole numbers in the order of blocks.h: once, at the start.
#pragma once

#include "blocks.h"

namespace octavo {

constexpr long FILE_BLOCK = 4 + BLOCK;  // bytes: scale and minimum in half precision, then signed bytes

// Number `i` (of 32) of one column goes to its place in a block of sixteen.
template <long BITS>
inline void put(uint8_t* numbers, long lane, long i, int8_t value) {
  const long pair = i / 2;
  if constexpr (BITS == 8) numbers[(pair * LANES + lane) * 2 + i % 2] = uint8_t(value);
  else {
    uint8_t* byte = numbers + pair / 4 * 64 + lane * 4 + i % 2 * 2 + pair % 4 / 2;
    *byte = uint8_t(pair % 2 ? (*byte | uint8_t(value) << 4) : (uint8_t(value) & 15));
  }
}

// Sixteen rows of `blocks` blocks each, as a file has them -> a group; tells whether scales and minima are finite.
template <long BITS>
inline bool pack_group(const uint8_t* from, long blocks, uint8_t* to) {
  bool finite = true;
  for (long b = 0; b < blocks; b++, to += block_bytes(BITS))
    for (long lane = 0; lane < LANES; lane++) {
      const uint8_t* at = from + (lane * blocks + b) * FILE_BLOCK;
      uint16_t head[2];
      std::memcpy(head, at, 4);
      finite = finite && (head[0] & 0x7c00) != 0x7c00 && (head[1] & 0x7c00) != 0x7c00;
      std::memcpy(to + 2 * lane, head, 2);
      std::memcpy(to + BLOCK_HEAD / 2 + 2 * lane, head + 1, 2);
      for (long i = 0; i < BLOCK; i++) put<BITS>(to + BLOCK_HEAD, lane, i, int8_t(at[4 + i]));
    }
  return finite;
}

// A number from 0 up, rounded to half precision.
inline uint16_t to_half(float x) {
  x *= 0x1p-112f;  // the difference of the exponents; a half without a leading 1 becomes such a float
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return uint16_t(std::min((bits + 0xfff + ((bits >> 13) & 1)) >> 13, 0x7c00u));
}

// Sixteen rows of weights -> a group of 8 bits, each block's largest weight 127, minima 0.
template <class E>
inline void quantize_group(const typename E::T* from, long blocks, uint8_t* to) {
  std::memset(to, 0, blocks * block_bytes(8));
  for (long b = 0; b < blocks; b++, to += block_bytes(8))
    for (long lane = 0; lane < LANES; lane++) {
      const typename E::T* at = from + (lane * blocks + b) * BLOCK;
      float most = 0;
      for (long i = 0; i < BLOCK; i++) most = std::max(most, std::fabs(E::widen1(at[i])));
      const uint16_t halves[LANES] = {to_half(most / 127.0f)};
      std::memcpy(to + 2 * lane, halves, 2);
      if (halves[0] == 0) continue;
      const float scale = from_half((const uint8_t*)halves)[0];
      for (long i = 0; i < BLOCK; i++) {
        const float rounded = std::nearbyint(E::widen1(at[i]) / scale);
        put<8>(to + BLOCK_HEAD, lane, i, int8_t(std::min(127.0f, std::max(-127.0f, rounded))));
      }
    }
}

}  // namespace octavo
