// A persistent team of threads that runs one function together, with barriers inside it.
//
// A step of the decoder is about a hundred operations of a few microseconds. Starting and joining threads for each
// (fork-join) costs more than many of them; here threads start once, a step is handed to them once, and between
// operations they meet at a barrier that spins. The caller is thread 0. Idle threads spin for a moment, because
// the next token usually follows, and then sleep until they are called.
//
// Decoders share a team: with one each, the threads of the one that has just finished (a draft model) would spin on the
// cores that the other's (the target's) need, and be put off them by the system only milliseconds later.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <type_traits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nanoinfer {

class Team {
 public:
  explicit Team(int size) : size_(size), process_(getpid()) {
    for (int rank = 1; rank < size; ++rank) workers_.emplace_back([this, rank] { work(rank); });
  }
  ~Team() {
    if (getpid() != process_) {  // in a forked child: the threads stayed behind
      for (std::thread& t : workers_) t.detach();
      return;
    }
    stop_.store(true);
    generation_.fetch_add(1);
    generation_.notify_all();
    for (std::thread& t : workers_) t.join();
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // The process's team of this size, made by the first who asks and gone with the last. One thread alone never waits
  // for others, so teams of one are not shared.
  static std::shared_ptr<Team> shared(int size) {
    if (size == 1) return std::make_shared<Team>(1);
    static std::mutex mutex;
    static std::map<int, std::weak_ptr<Team>> teams;
    const std::lock_guard lock(mutex);
    std::shared_ptr<Team> team = teams[size].lock();
    if (team == nullptr || team->process_ != getpid()) teams[size] = team = std::make_shared<Team>(size);
    return team;
  }

  int size() const { return size_; }

  // Call body(rank) on every thread of the team, 0 <= rank < size; return when all are done. The body must not
  // throw. Callers at the same time take turns. Throws std::runtime_error in a forked child, which has none of the threads.
  template <class Body>
  void run(Body&& body) {
    if (getpid() != process_)
      throw std::runtime_error("this process was forked from the one that made the engine, and has none of its threads:"
                               " make the engine in the process that uses it");
    const std::lock_guard turn(turn_);
    if (size_ > 1) {
      call_ = [](void* b, int rank) { (*static_cast<std::remove_reference_t<Body>*>(b))(rank); };
      body_ = &body;
      running_.store(size_ - 1, std::memory_order_relaxed);
      generation_.fetch_add(1);
      generation_.notify_all();
    }
    body(0);
    for (int spins = 0; running_.load(std::memory_order_acquire) > 0; ++spins) pause(spins);
  }

  // Wait inside a body until every thread of the team is here.
  void barrier() {
    if (size_ == 1) return;
    const std::uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) pause(spins);
  }

 private:
  static constexpr int kSpins = 20000;       // of an idle thread before it sleeps: some hundred microseconds
  static constexpr int kPolite = 2000;       // of a waiting thread before it offers its core to others

  static void pause(int spins) {
    if (spins > kPolite) return std::this_thread::yield();  // more threads than cores: let the late one run
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
  const pid_t process_;
  std::mutex turn_;
  void (*call_)(void*, int) = nullptr;
  void* body_ = nullptr;
  std::atomic<bool> stop_{false};
  // Each on a cache line of its own: threads spin on one while others change another.
  alignas(64) std::atomic<std::uint32_t> generation_{0};
  alignas(64) std::atomic<int> running_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<std::uint32_t> phase_{0};
  std::vector<std::thread> workers_;
};

// The part [begin, end) of `count` things that falls to one thread, in steps of `grain`.
struct Share {
  std::int64_t begin, end;
};
inline Share share_of(std::int64_t count, int rank, int size) {
  return {count * rank / size, count * (rank + 1) / size};
}

}  // namespace nanoinfer
