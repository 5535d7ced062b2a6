// A pool of threads that run one function together and synchronize at barriers inside it.
//
// A step of the decoder is about a hundred operations of a few microseconds. Starting and joining threads for each
// operation (fork-join) would take longer than many of the operations. Here, threads are created once, run a whole step,
// and wait between operations at a spinning barrier. The calling thread is thread 0. Idle threads spin briefly, because
// the next step usually follows, and then sleep until the next call.
//
// Decoders share a pool. With separate pools, idle threads of one decoder (a draft model) would spin on the cores that
// the other's threads (the target model) need, until the operating system preempts them milliseconds later.
//
// A pool belongs to the process that created it. A forked child creates another one (`current`); it neither uses nor
// destroys its parent's pool, whose threads do not exist in the child.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "process.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nanoinfer {

// The items [begin, end) that one thread processes.
struct Range {
  std::int64_t begin, end;
  bool empty() const { return begin == end; }
};
inline Range range_of(std::int64_t count, int rank, int size) {
  return {count * rank / size, count * (rank + 1) / size};
}

class ThreadPool {
 public:
  // Throws std::runtime_error if the threads cannot be created.
  explicit ThreadPool(int size) : size_(size), generation_of_process_(process_generation()), taken_(size) {
    workers_.reserve(size - 1);
    try {
      for (int rank = 1; rank < size; ++rank) workers_.emplace_back([this, rank] { work(rank); });
    } catch (const std::exception& error) {
      const std::size_t created = workers_.size();
      stop();
      throw std::runtime_error("threads=" + std::to_string(size) + ": only " + std::to_string(created) +
                               " threads could be created beside the caller's (" + error.what() +
                               "): use a smaller threads=N, or raise this process's limits on threads and address space");
    }
  }
  ~ThreadPool() {
    if (is_inherited()) new std::vector<std::thread>(std::move(workers_));  // leaked: no threads here
    else stop();
  }
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // The process's pool of this size, created by the first caller and destroyed with the last owner. A pool of one thread
  // never waits for others, so such pools are not shared.
  static std::shared_ptr<ThreadPool> shared(int size) {
    if (size == 1) return std::make_shared<ThreadPool>(1);
    Registry& registry = Registry::of_this_process();
    const std::lock_guard lock(registry.mutex);
    std::weak_ptr<ThreadPool>& slot = registry.pools[size];
    std::shared_ptr<ThreadPool> pool = slot.lock();
    if (pool == nullptr) slot = pool = std::make_shared<ThreadPool>(size);
    return pool;
  }

  // The largest pool of this process that has an owner; null without one.
  static std::shared_ptr<ThreadPool> largest() {
    Registry& registry = Registry::of_this_process();
    const std::lock_guard lock(registry.mutex);
    for (auto slot = registry.pools.rbegin(); slot != registry.pools.rend(); ++slot) {
      if (std::shared_ptr<ThreadPool> pool = slot->second.lock()) return pool;
    }
    return nullptr;
  }

  // Return `pool`; first replace it by a pool of this process if it was inherited in a fork.
  static ThreadPool& current(std::shared_ptr<ThreadPool>& pool) {
    if (pool->is_inherited()) pool = shared(pool->size());
    return *pool;
  }

  int size() const { return size_; }

  // Call body(rank) on every thread of the pool, 0 <= rank < size; return when all have finished. The body must not
  // throw. Concurrent calls run one after another. The pool must belong to this process.
  template <class Body>
  void run(Body&& body) {
    const std::lock_guard turn(turn_);
    run_in_turn(body);
  }

  // As `run`, but return false at once if another call is running.
  template <class Body>
  bool try_run(Body&& body) {
    const std::unique_lock turn(turn_, std::try_to_lock);
    if (turn.owns_lock()) run_in_turn(body);
    return turn.owns_lock();
  }

  // Inside a body: take some of the items [0, count), at most `most`, that no thread has taken since the last barrier;
  // none if none is left. A barrier must follow before items of something else are taken, and before the body ends.
  //
  // A thread takes parts of its own range (`range_of`) first, which may still be in its core's caches, and then of what
  // the others have left: a core may be slower than the others, or run other programs too. A part is half of what is
  // left of a range, so the last ones are small (guided self-scheduling, Polychronopoulos and Kuck 1987).
  Range take(std::int64_t count, int rank, std::int64_t most = INT64_MAX) {
    const std::uint64_t phase = phase_.load(std::memory_order_relaxed);
    for (int i = 0; i < size_; ++i) {
      const int owner = (rank + i) % size_;
      const Range range = range_of(count, owner, size_);
      std::atomic<std::uint64_t>& taken = taken_[owner].phase_and_count;
      std::uint64_t seen = taken.load(std::memory_order_relaxed);
      while (true) {
        const std::int64_t begin = range.begin + (seen >> 32 == phase ? seen & UINT32_MAX : 0);
        if (begin >= range.end) break;
        const std::int64_t end = begin + std::min(most, (range.end - begin + 1) / 2);
        if (taken.compare_exchange_weak(seen, phase << 32 | (end - range.begin), std::memory_order_relaxed))
          return {begin, end};
      }
    }
    return {count, count};
  }

  // Wait inside a body until every thread of the pool has reached the barrier. The last one to reach it calls `complete`
  // while the others still wait.
  template <class Complete>
  void barrier(Complete&& complete) {
    const std::uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      complete();
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) pause(spins);
  }
  void barrier() {
    barrier([] {});
  }

 private:
  // Call body(rank) on every thread. The caller holds `turn_`.
  template <class Body>
  void run_in_turn(Body& body) {
    if (size_ > 1) {
      call_ = [](void* b, int rank) { (*static_cast<Body*>(b))(rank); };
      body_ = &body;
      running_.store(size_ - 1, std::memory_order_relaxed);
      generation_.fetch_add(1);
      generation_.notify_all();
    }
    body(0);
    for (int spins = 0; running_.load(std::memory_order_acquire) > 0; ++spins) pause(spins);
  }

  static constexpr int kSpins = 20000;           // of an idle thread before it sleeps: some hundred microseconds
  static constexpr int kSpinsToYield = 2000;     // of a waiting thread before it yields its core

  // The shared pools of one process. Never destroyed: a thread may still run a step when the process ends.
  struct Registry {
    const std::uint32_t generation = process_generation();
    std::mutex mutex;
    std::map<int, std::weak_ptr<ThreadPool>> pools;

    // A forked child does not use its parent's registry, whose mutex may be locked for ever.
    static Registry& of_this_process() {
      static std::atomic<Registry*> current{nullptr};
      Registry* found = current.load(std::memory_order_acquire);
      while (found == nullptr || found->generation != process_generation()) {
        auto own = std::make_unique<Registry>();
        if (current.compare_exchange_strong(found, own.get(), std::memory_order_acq_rel)) found = own.release();
      }
      return *found;
    }
  };

  // How many items of a thread's range were taken, in the low half. It is of the phase in the high half: if that is not
  // the current one, none was taken. So no barrier resets it.
  struct alignas(64) Taken {
    std::atomic<std::uint64_t> phase_and_count{0};
  };

  bool is_inherited() const { return generation_of_process_ != process_generation(); }

  void stop() {
    stop_.store(true);
    generation_.fetch_add(1);
    generation_.notify_all();
    for (std::thread& t : workers_) t.join();
  }

  static void pause(int spins) {
    if (spins > kSpinsToYield) return std::this_thread::yield();  // with more threads than cores, let others run
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  void work(int rank) {
    std::uint32_t seen = 0;
    while (true) {
      int spins = 0;
      while (generation_.load(std::memory_order_acquire) == seen) {
        if (++spins < kSpins) pause(0);
        else generation_.wait(seen, std::memory_order_acquire);
      }
      ++seen;
      if (stop_.load()) return;
      call_(body_, rank);
      running_.fetch_sub(1, std::memory_order_release);
    }
  }

  const int size_;
  const std::uint32_t generation_of_process_;
  std::mutex turn_;
  void (*call_)(void*, int) = nullptr;
  void* body_ = nullptr;
  std::atomic<bool> stop_{false};
  // Each on its own cache line: some threads spin on one while others write another.
  alignas(64) std::atomic<std::uint32_t> generation_{0};  // number of calls
  alignas(64) std::atomic<int> running_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<std::uint32_t> phase_{0};       // number of barriers
  std::vector<Taken> taken_;                              // (size)
  std::vector<std::thread> workers_;
};

}  // namespace nanoinfer
