// What Python calls: plain functions over addresses (library.py has their Python side).
#include "decoder.h"
#include "pack.h"

using namespace octavo;

namespace {

template <class E>
void paged_attention(const Rows& step, const Heads& heads, void* key_cache, void* value_cache, const void* query,
                     long query_stride, const void* key, long key_stride, const void* value, long value_stride,
                     void* out) {
  using T = typename E::T;
  const Cache<E> cache{static_cast<T*>(key_cache), static_cast<T*>(value_cache)};
  Attention<E> attention(step.sequences, heads, step.threads);
  with_team(step.threads, 3, [&](Worker& worker) {
    const long each = (step.count + 4 * step.threads - 1) / (4 * step.threads);
    worker.run((step.count + each - 1) / each, [&](long item) {
      for (long row = item * each; row < std::min(step.count, (item + 1) * each); row++)
        for (long head = 0; head < heads.kv_heads; head++)
          cache.write(heads, step.slots[row], head, static_cast<const T*>(key) + row * key_stride + head * heads.dim,
                      static_cast<const T*>(value) + row * value_stride + head * heads.dim);
    });
    worker.run(attention.num_items(), [&](long item) {
      attention.attend(item, cache, static_cast<const T*>(query), query_stride, static_cast<T*>(out));
    });
    if (attention.num_split())
      worker.run(attention.num_split(), [&](long item) { attention.combine(item, static_cast<T*>(out)); });
  });
}

// x [rows, inner] -> out [rows, columns], in the model's type or in float32.
template <class E, class Out>
void linear(const Matrix& matrix, long threads, const void* x, long rows, void* out) {
  auto* to = static_cast<typename Out::T*>(out);
  with_team(threads, 1, [&](Worker& worker) {
    project<E>(worker, threads, matrix, static_cast<const typename E::T*>(x), matrix.inner, rows,
               [&](long row, long column, Floats found) {
                 typename Out::T* at = to + row * matrix.columns + column;
                 if (column + LANES <= matrix.columns) return Out::narrow(at, found);
                 for (long i = 0; column + i < matrix.columns; i++) at[i] = Out::narrow1(found[i]);
               });
  });
}

template <class E>
void decode(const Network& network, const Rows& rows, float* residual, void* out) {
  Decoder<E> decoder(network, rows, residual, static_cast<typename E::T*>(out));
  with_team(rows.threads, decoder.num_stages(), [&](Worker& worker) { decoder.run(worker); });
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// From the next call on, thread n of a team runs on the n-th of these CPUs alone, or on any of them.
void octavo_bind(const int* cpus, long count, int one_each) {
  const std::lock_guard<std::mutex> hold(places.lock);
  places.cpus.assign(cpus, cpus + count);
  places.one_each = one_each;
  places.version++;
}

void octavo_attention(int bfloat16, const Rows* step, const Heads* heads, void* key_cache, void* value_cache,
                      const void* query, long query_stride, const void* key, long key_stride, const void* value,
                      long value_stride, void* out) {
  (bfloat16 ? paged_attention<BFloat16> : paged_attention<Float32>)(
      *step, *heads, key_cache, value_cache, query, query_stride, key, key_stride, value, value_stride, out);
}

void octavo_linear(int bfloat16, int wide, const Matrix* matrix, long threads, const void* x, long rows, void* out) {
  (!bfloat16 ? linear<Float32, Float32> : wide ? linear<BFloat16, Float32> : linear<BFloat16, BFloat16>)(
      *matrix, threads, x, rows, out);
}

// Blocks of a file [columns, inner / 32, 36] -> groups; returns whether all scales and minima are finite.
int octavo_pack(long bits, const uint8_t* from, long columns, long inner, long threads, uint8_t* to) {
  const long blocks = inner / BLOCK, groups = columns / LANES;
  std::atomic<int> finite{1};
  with_team(threads, 1, [&](Worker& worker) {
    worker.run(groups, [&](long group) {
      const uint8_t* at = from + group * LANES * blocks * FILE_BLOCK;
      uint8_t* out = to + group * blocks * block_bytes(bits);
      if (!(bits == 4 ? pack_group<4> : pack_group<8>)(at, blocks, out)) finite = 0;
    });
  });
  return finite;
}

// Weights [columns, inner] -> groups of 8 bits.
void octavo_quantize(int bfloat16, const void* from, long columns, long inner, long threads, uint8_t* to) {
  const long blocks = inner / BLOCK, size = LANES * inner;
  with_team(threads, 1, [&](Worker& worker) {
    worker.run(columns / LANES, [&](long group) {
      uint8_t* out = to + group * blocks * block_bytes(8);
      if (bfloat16) quantize_group<BFloat16>(static_cast<const uint16_t*>(from) + group * size, blocks, out);
      else quantize_group<Float32>(static_cast<const float*>(from) + group * size, blocks, out);
    });
  });
}

// residual [rows, hidden] float32: the embeddings, overwritten; out: final hidden states in the model's type.
void octavo_decode(int bfloat16, const Network* network, const Rows* rows, float* residual, void* out) {
  (bfloat16 ? decode<BFloat16> : decode<Float32>)(*network, *rows, residual, out);
}

}  // extern "C"
