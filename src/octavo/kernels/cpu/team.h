// The threads of one parallel region, which pass through stages of work without waiting for each other's arrival.
#pragma once

#include <omp.h>
#include <sched.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "tiles.h"

namespace octavo {

// Where threads run: each on its own of some CPUs, or on all of them. See octavo_bind.
struct Places {
  std::atomic<long> version{0};
  std::mutex lock;
  std::vector<int> cpus;
  bool one_each = false;
};
inline Places places;

// A thread goes where `places` says, once. The caller's (number 0) stays free: what it starts would inherit its place.
inline void take_place(size_t number) {
#if defined(__linux__)
  static thread_local long seen = 0;
  if (number == 0 || seen == places.version.load(std::memory_order_acquire)) return;
  const std::lock_guard<std::mutex> hold(places.lock);
  seen = places.version;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (size_t i = 0; i < places.cpus.size(); i++)
    if (!places.one_each || i == number % places.cpus.size()) CPU_SET(places.cpus[i], &set);
  sched_setaffinity(0, sizeof(set), &set);
#endif
}

// A stage's items are handed out one by one. It is over when all are done, whoever did them: a thread that the
// system has put aside delays the others only by the item that it holds.
struct alignas(64) Stage {
  std::atomic<long> next{0};
  alignas(64) std::atomic<long> done{0};
};

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

class Worker {
 public:
  Worker(Stage* stages, bool alone) : stage(stages), alone(alone) {}

  template <class F>
  void run(long items, const F& work) {
    Stage& own = *stage++;
    if (alone) {
      for (long i = 0; i < items; i++) work(i);
      return;
    }
    for (long i; (i = own.next.fetch_add(1, std::memory_order_relaxed)) < items;) {
      work(i);
      own.done.fetch_add(1, std::memory_order_release);
    }
    for (long spins = 0; own.done.load(std::memory_order_acquire) < items; spins++) {
      if (spins < 4000) pause();
      else sched_yield();
    }
  }

 private:
  Stage* stage;
  bool alone;
};

// Call `work(Worker&)` on every thread; at most `num_stages` stages.
template <class F>
void with_team(long threads, long num_stages, const F& work) {
  static thread_local std::unique_ptr<Stage[]> stages;
  static thread_local long size = 0;
  if (size < num_stages) stages.reset(new Stage[size = num_stages]);
  for (long i = 0; i < num_stages; i++) {
    stages[i].next.store(0, std::memory_order_relaxed);
    stages[i].done.store(0, std::memory_order_relaxed);
  }
  Stage* const first = stages.get();
  if (threads == 1) {
    Worker worker(first, true);
    work(worker);
    release_tiles();
    return;
  }
#pragma omp parallel num_threads(int(threads))
  {
    take_place(size_t(omp_get_thread_num()));
    Worker worker(first, omp_get_num_threads() == 1);
    work(worker);
    release_tiles();
  }
}

// Room that a thread keeps from call to call.
template <class T, int PURPOSE>
T* scratch(long count) {
  static thread_local std::unique_ptr<T[]> room;
  static thread_local long size = 0;
  if (size < count) room.reset(new T[size = count]);
  return room.get();
}

}  // namespace octavo
