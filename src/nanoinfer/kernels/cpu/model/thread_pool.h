// A pool of threads that process the phases of a step together.
//
// A step of the decoder is about a hundred operations of a few microseconds. Starting and joining threads for each
// operation (fork-join) would take longer than many of the operations. Here, threads are created once, and the caller
// gives them all operations of a step, each a phase of items that any thread may process. A phase ends with its last
// item, and the thread that completed that item begins the next phase. So nobody waits for a thread that has no core, or
// that comes late, unless it holds items. The calling thread is thread 0. Idle threads spin briefly, because the next
// phase usually follows, and then sleep.
//
// Decoders share a pool. With separate pools, idle threads of one decoder (a draft model) would spin on the cores that
// the other's threads (the target model) need, until the operating system preempts them milliseconds later.
//
// A pool belongs to the process that created it. A forked child creates another one (`current`); it neither uses nor
// destroys its parent's pool, whose threads do not exist in the child.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
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

// An operation on items [0, count), count > 0, that may be processed in any order and by any thread.
struct Phase {
  std::int64_t count;
  std::function<void(int rank, Range part)> body;  // must not throw; 0 <= rank < size: no two threads have the same
  std::int64_t most = INT64_MAX;                   // items of a part
  // Called by one thread, after the last item and before the next phase. May change the items of the phases that follow.
  std::function<void()> ended = {};
};

class ThreadPool {
 public:
  // Throws std::runtime_error if the threads cannot be created.
  explicit ThreadPool(int size) : size_(size), generation_of_process_(process_generation()), taken_(size) {
    workers_.reserve(size - 1);
    try {
      for (int rank = 1; rank < size; ++rank) workers_.emplace_back([this, rank] { work(rank, UINT64_MAX); });
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

  // Process phases one after another; return when the last has ended. Concurrent calls run one after another. The pool
  // must belong to this process. Throws std::length_error if a phase has more items than a pool can count (2^24 - 1).
  void run(const std::vector<Phase>& phases) {
    const std::lock_guard turn(turn_);
    run_in_turn(phases.data(), phases.size());
  }
  void run(const Phase& phase) {
    const std::lock_guard turn(turn_);
    run_in_turn(&phase, 1);
  }

  // As `run`, but return false at once if another call is running.
  bool try_run(const Phase& phase) {
    const std::unique_lock turn(turn_, std::try_to_lock);
    if (turn.owns_lock()) run_in_turn(&phase, 1);
    return turn.owns_lock();
  }

 private:
  // Phases are numbered through all calls; between two calls is a phase without items. `Taken` has 40 bits for the number,
  // so a thread would have to stop between reading and replacing it for the time of 2^40 phases (120 days, at ten
  // microseconds each) to mistake a phase for another.
  static constexpr int kCountBits = 24;
  static constexpr std::uint64_t kCountMask = (std::uint64_t{1} << kCountBits) - 1;
  static constexpr int kSpins = 2000;  // of a waiting thread before it yields its core: some ten microseconds
  static constexpr int kYields = 400;  // before it sleeps: some hundred microseconds. Another thread that waits for a core
                                       // then gets this one: the scheduler moves it to an idle core, not to a spinning one.
  using Clock = std::chrono::steady_clock;
  // A thread that shares its core gives it up before its time slice ends (some milliseconds), when it holds no items.
  static constexpr Clock::duration kTurn = std::chrono::milliseconds(1);

  // The caller holds `turn_`.
  void run_in_turn(const Phase* phases, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i)
      if (phases[i].count < 1 || phases[i].count > static_cast<std::int64_t>(kCountMask))
        throw std::length_error("a phase has " + std::to_string(phases[i].count) + " items, must have from 1 to " +
                                std::to_string(kCountMask));
    if (count == 0) return;
    last_ = phases + count - 1;
    const std::uint64_t first = phase_.load(std::memory_order_relaxed) + 1;
    begin(first, phases);
    work(0, first + count);
  }

  // Describe a phase, and let it begin. One thread may: that which ended the phase before, or after a phase without items
  // that of `run`.
  void begin(std::uint64_t phase, const Phase* items) {
    Described& described = described_[phase % 2];
    described.items.store(items, std::memory_order_release);
    described.count.store(items ? items->count : 0, std::memory_order_release);
    described.most.store(items ? items->most : 0, std::memory_order_release);
    phase_.store(phase, std::memory_order_seq_cst);  // before notify_all reads whether threads sleep
    phase_.notify_all();
  }

  // Process items until phase `end` begins or the pool stops.
  void work(int rank, std::uint64_t end) {
    Clock::time_point turn = Clock::now();  // when this thread last gave its core up
    while (true) {
      const std::uint64_t phase = phase_.load(std::memory_order_acquire);
      if (phase >= end || stop_.load(std::memory_order_relaxed)) return;
      process(phase, rank, turn);
      for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
        if (spins < kSpins) pause();
        else if (spins < kSpins + kYields) std::this_thread::yield();  // with more threads than cores, let others run
        else phase_.wait(phase, std::memory_order_acquire);
      }
    }
  }

  // Process items of a phase until none is left. The phase may be over at any time, except while this thread has items
  // that are not completed: only then may it use `*items`, which is the caller's.
  //
  // What is read from described_[phase % 2] belongs to `phase` if that is the current phase afterwards: before phase + 2
  // is described there, phase_ is phase + 1.
  void process(std::uint64_t phase, int rank, Clock::time_point& turn) {
    const Described& described = described_[phase % 2];
    const Phase* items = described.items.load(std::memory_order_acquire);
    const std::int64_t count = described.count.load(std::memory_order_acquire);
    const std::int64_t most = described.most.load(std::memory_order_acquire);
    if (phase_.load(std::memory_order_relaxed) != phase) return;
    std::int64_t done = 0;
    const auto complete = [&] {
      if (done && completed_.fetch_add(done, std::memory_order_acq_rel) + done == count) end(phase, items);
      done = 0;
    };
    for (Range part; !(part = take(phase, count, most, rank)).empty();) {
      items->body(rank, part);
      done += part.end - part.begin;
      if (Clock::now() - turn < kTurn) continue;
      complete();
      std::this_thread::yield();
      turn = Clock::now();
    }
    complete();
  }

  // Called by the thread that completed the last item.
  void end(std::uint64_t phase, const Phase* items) {
    if (items->ended) items->ended();
    completed_.store(0, std::memory_order_relaxed);
    begin(phase + 1, items == last_ ? nullptr : items + 1);
  }

  // Take some of the items [0, count) of a phase, at most `most`; none if none is left or the phase is over.
  //
  // A thread takes parts of its own range (`range_of`) first, which may still be in its core's caches, and then of what
  // the others have left: a core may be slower than the others, or run other programs too. A part is half of what is
  // left of a range, so the last ones are small (guided self-scheduling, Polychronopoulos and Kuck 1987).
  //
  // `Taken` only grows. When a phase is over, every range that has items in it is taken to its end, or has been taken from
  // in a later phase; so a thread that still takes from this phase finds none.
  Range take(std::uint64_t phase, std::int64_t count, std::int64_t most, int rank) {
    for (int i = 0; i < size_; ++i) {
      const int owner = (rank + i) % size_;
      const Range range = range_of(count, owner, size_);
      std::atomic<std::uint64_t>& taken = taken_[owner].phase_and_count;
      std::uint64_t seen = taken.load(std::memory_order_relaxed);
      while (seen >> kCountBits <= phase) {
        const std::int64_t begin = range.begin + (seen >> kCountBits == phase ? seen & kCountMask : 0);
        if (begin >= range.end) break;
        const std::int64_t end = begin + std::min(most, (range.end - begin + 1) / 2);
        if (taken.compare_exchange_weak(seen, phase << kCountBits | (end - range.begin), std::memory_order_relaxed))
          return {begin, end};
      }
    }
    return {count, count};
  }

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

  // How many items of a thread's range were taken, in the low bits. It is of the phase in the high bits: if the current
  // one is later, none was taken. So nothing resets it between phases.
  struct alignas(64) Taken {
    std::atomic<std::uint64_t> phase_and_count{0};
  };

  struct Described {  // a phase; without items: nullptr, 0
    std::atomic<const Phase*> items{nullptr};
    std::atomic<std::int64_t> count{0}, most{0};
  };

  bool is_inherited() const { return generation_of_process_ != process_generation(); }

  void stop() {
    stop_.store(true);
    begin(phase_.load() + 1, nullptr);
    for (std::thread& t : workers_) t.join();
  }

  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  const int size_;
  const std::uint32_t generation_of_process_;
  std::mutex turn_;
  const Phase* last_ = nullptr;  // of a call
  std::atomic<bool> stop_{false};
  // On a cache line of their own: threads that spin on the number have the description with it.
  alignas(64) std::atomic<std::uint64_t> phase_{0};         // the current one
  Described described_[2];                                  // phases with even and odd numbers
  alignas(64) std::atomic<std::int64_t> completed_{0};      // items of the current phase
  std::vector<Taken> taken_;                                // (size)
  std::vector<std::thread> workers_;
};

}  // namespace nanoinfer
