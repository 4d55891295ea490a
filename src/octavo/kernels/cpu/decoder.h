// All blocks of a decoder in one parallel region: norms, projections, rotation, attention, gated feed-forward.
#pragma once

#include "attention.h"
#include "matrix.h"

namespace octavo {

constexpr long ROWS = 256;  // of one pass through a layer: what lies between its stages stays in the cache

enum Activation : long { SILU, GELU, GELU_TANH };

// Norm weights include their offset. Null where a model has no such part.
struct Layer {
  const float *input_norm, *post_attention_norm, *pre_feedforward_norm, *post_feedforward_norm;
  const float *query_norm, *key_norm;
  Matrix qkv, out, gate_up, down;
  const float *cos, *sin;  // [positions, turned]
  long turned;             // pairs of a head's numbers that are rotated
  void *key, *value;       // its cache
  long window;
};

struct Network {
  const Layer* layers;
  long num_layers, hidden, inner, activation;
  const float* norm;
  float epsilon;
  Heads heads;
};

// The rows of a step; see octavo/batch.py.
struct Rows {
  long count, threads;
  const int64_t *positions, *slots;
  Sequences sequences;
};

inline Floats activate(long kind, Floats x) {
  if (kind == SILU) return x / (1.0f + exponential(-x));
  if (kind == GELU_TANH)
    return 0.5f * x * (1.0f + hyperbolic_tangent(0.7978845608f * (x + 0.044715f * x * x * x)));
  for (int i = 0; i < LANES; i++) x[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678f));
  return x;
}

// Call `use(at, values, weights)` for the numbers of x / rms(x), sixteen at a time and one by one at the end.
inline float inverse_rms(const float* x, long size, float epsilon) {
  Floats squares{};
  long i = 0;
  for (; i + LANES <= size; i += LANES) squares += load<Floats>(x + i) * load<Floats>(x + i);
  float total = sum(squares);
  for (; i < size; i++) total += x[i] * x[i];
  return 1.0f / std::sqrt(total / float(size) + epsilon);
}

// Rows [begin, begin + rows) of a step, as a step of their own.
struct Part {
  long begin, rows;
  std::vector<int64_t> starts, lens;
  Sequences sequences;

  Part(const Sequences& all, long begin, long rows) : begin(begin), rows(rows) {
    long first = 0;
    while (all.query_starts[first + 1] <= begin) first++;
    starts.push_back(0);
    for (long i = first; i < all.count && all.query_starts[i] < begin + rows; i++) {
      const long end = std::min<long>(all.query_starts[i + 1], begin + rows);
      starts.push_back(end - begin);
      lens.push_back(all.context_lens[i] - (all.query_starts[i + 1] - end));
    }
    sequences = {long(lens.size()), starts.data(), lens.data(), all.block_table + first * all.table_stride,
                 all.table_stride};
  }
  Part(Part&&) = default;
};

template <class E>
class Decoder {
  using T = typename E::T;

 public:
  Decoder(const Network& network, const Rows& rows, float* residual, T* out)
      : n(network), r(rows), residual(residual), out(out), heads(network.heads) {
    qkv_width = (heads.heads + 2 * heads.kv_heads) * heads.dim;
    out_width = heads.heads * heads.dim;
    for (long begin = 0; begin < r.count; begin += ROWS)
      parts.emplace_back(r.sequences, begin, std::min(ROWS, r.count - begin));
    for (long layer = 0; layer < n.num_layers; layer++)
      if (std::find(windows.begin(), windows.end(), n.layers[layer].window) == windows.end())
        windows.push_back(n.layers[layer].window);
    for (const long window : windows)
      for (const Part& part : parts) {
        heads.window = window;
        plans.emplace_back(part.sequences, heads, r.threads);
      }
    const long most = std::min(ROWS, r.count);
    normed = scratch<T, 10>(most * n.hidden);
    qkv = scratch<float, 11>(most * qkv_width);
    query = scratch<T, 12>(most * out_width);
    attended = scratch<T, 13>(most * out_width);
    gated = scratch<T, 14>(most * n.inner);
    branch = scratch<float, 15>(r.count * n.hidden);
  }

  long num_stages() const { return n.num_layers * long(parts.size()) * 10 + 1; }

  void run(Worker& worker) {
    for (long i = 0; i < n.num_layers; i++) {
      const long kind = std::find(windows.begin(), windows.end(), n.layers[i].window) - windows.begin();
      for (size_t p = 0; p < parts.size(); p++)
        block(worker, i, parts[p], plans[kind * long(parts.size()) + long(p)]);
    }
    each_row(worker, 0, r.count, [&](long row) {
      if (const float* after = n.layers[n.num_layers - 1].post_feedforward_norm) add_normed(row, after);
      norm(row, n.norm, out + row * n.hidden);
    });
  }

 private:
  const Network& n;
  const Rows& r;
  float* residual;
  T* out;
  Heads heads;
  long qkv_width, out_width;
  std::vector<Part> parts;
  std::vector<long> windows;
  std::vector<Attention<E>> plans;  // [windows][parts]
  T *normed, *query, *attended, *gated;
  float *qkv, *branch;

  void block(Worker& worker, long number, const Part& part, Attention<E>& attention) {
    const Layer& layer = n.layers[number];
    const long begin = part.begin, rows = part.rows, hidden = n.hidden, threads = r.threads;
    const float* before = number ? n.layers[number - 1].post_feedforward_norm : nullptr;
    each_row(worker, begin, rows, [&](long row) {
      if (before) add_normed(row, before);
      norm(row, layer.input_norm, normed + (row - begin) * hidden);
    });
    project<E>(worker, threads, layer.qkv, normed, hidden, rows,
               [&](long row, long column, Floats x) { store(qkv + row * qkv_width + column, x); });
    const Cache<E> cache{static_cast<T*>(layer.key), static_cast<T*>(layer.value)};
    each_row(worker, begin, rows, [&](long row) { place(layer, cache, row, row - begin); });
    worker.run(attention.num_items(),
               [&](long item) { attention.attend(item, cache, query, out_width, attended); });
    if (attention.num_split())
      worker.run(attention.num_split(), [&](long item) { attention.combine(item, attended); });
    const bool sandwich = layer.post_feedforward_norm != nullptr;
    add_product(worker, layer.out, attended, out_width, begin, rows, sandwich);
    each_row(worker, begin, rows, [&](long row) {
      if (sandwich) add_normed(row, layer.post_attention_norm);
      norm(row, sandwich ? layer.pre_feedforward_norm : layer.post_attention_norm, normed + (row - begin) * hidden);
    });
    const float* bias = layer.gate_up.bias;
    product<E>(worker, threads, layer.gate_up, true, normed, hidden, rows,
               [&](long row, long pair, Floats gate, Floats up) {
                 if (bias) {
                   gate += load<Floats>(bias + pair * LANES);
                   up += load<Floats>(bias + n.inner + pair * LANES);
                 }
                 E::narrow(gated + row * n.inner + pair * LANES, activate(n.activation, gate) * up);
               });
    add_product(worker, layer.down, gated, n.inner, begin, rows, sandwich);
  }

  template <class F>
  void each_row(Worker& worker, long begin, long rows, const F& work) {
    const long each = (rows + 4 * r.threads - 1) / (4 * r.threads);
    worker.run((rows + each - 1) / each, [&](long item) {
      for (long row = item * each; row < std::min(rows, (item + 1) * each); row++) work(begin + row);
    });
  }

  // A branch's product goes to the residual stream, or is kept for the norm that comes before that.
  void add_product(Worker& worker, const Matrix& matrix, const T* x, long width, long begin, long rows, bool keep) {
    project<E>(worker, r.threads, matrix, x, width, rows, [&](long row, long column, Floats found) {
      const long at = (begin + row) * n.hidden + column;
      if (keep) store(branch + at, found);
      else store(residual + at, load<Floats>(residual + at) + found);
    });
  }

  void norm(long row, const float* weight, T* to) const {
    const float* x = residual + row * n.hidden;
    const float factor = inverse_rms(x, n.hidden, n.epsilon);
    for (long i = 0; i < n.hidden; i += LANES)
      E::narrow(to + i, load<Floats>(x + i) * factor * load<Floats>(weight + i));
  }

  void add_normed(long row, const float* weight) const {
    const float* x = branch + row * n.hidden;
    float* to = residual + row * n.hidden;
    const float factor = inverse_rms(x, n.hidden, n.epsilon);
    for (long i = 0; i < n.hidden; i += LANES)
      store(to + i, load<Floats>(to + i) + load<Floats>(x + i) * factor * load<Floats>(weight + i));
  }

  // One row's heads: norm, rotation; queries to `query`, keys and values to the cache.
  void place(const Layer& layer, const Cache<E>& cache, long row, long local) const {
    const long dim = heads.dim, half = layer.turned;
    const float *cos = layer.cos + r.positions[row] * half, *sin = layer.sin + r.positions[row] * half;
    T* key = scratch<T, 20>(2 * dim);
    T* value = key + dim;
    for (long head = 0; head < heads.heads + heads.kv_heads; head++) {
      float* x = qkv + local * qkv_width + head * dim;
      const bool is_query = head < heads.heads;
      if (const float* weight = is_query ? layer.query_norm : layer.key_norm) {
        const float factor = inverse_rms(x, dim, n.epsilon);
        for (long d = 0; d < dim; d++) x[d] = x[d] * factor * weight[d];
      }
      T* to = is_query ? query + local * out_width + head * dim : key;
      for (long d = 0; d < half; d++) {
        const float a = x[d], b = x[d + half];
        x[d] = a * cos[d] - b * sin[d];
        x[d + half] = b * cos[d] + a * sin[d];
      }
      for (long d = 0; d < dim; d++) to[d] = E::narrow1(x[d]);
      if (is_query) continue;
      const float* v = x + heads.kv_heads * dim;
      for (long d = 0; d < dim; d++) value[d] = E::narrow1(v[d]);
      cache.write(heads, r.slots[row], head - heads.heads, key, value);
    }
  }
};

}  // namespace octavo
