// Support for forked processes, which inherit memory but no other threads.
//
// A lock that another thread held at the fork is never released in the child, and the parent's std::thread objects refer
// to no thread there. Objects that own threads or a lock therefore record the process that they belong to.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>

namespace nanoinfer {

// Distinguishes a process from its ancestors: 1 in the first, 2 in its children, and so on. Unlike a process id it is
// never reused among them, and reading it needs no system call.
inline std::atomic<std::uint32_t> forks_and_one{1};
inline const int counting_forks = pthread_atfork(nullptr, nullptr, [] { forks_and_one.fetch_add(1); });
inline std::uint32_t process_generation() { return forks_and_one.load(std::memory_order_relaxed); }

// A mutex that records its holder's process. In a forked child, lock() throws where std::mutex would wait for ever.
class ProcessMutex {
 public:
  // Return whether it was free, and is now held.
  bool try_lock() {
    std::uint32_t free = 0;
    return holder_.compare_exchange_strong(free, process_generation(), std::memory_order_acquire,
                                           std::memory_order_relaxed);
  }
  // Throws std::runtime_error if a thread of the parent process held it at the fork: the protected state may be
  // inconsistent.
  void lock() {
    const std::uint32_t own = process_generation();
    std::uint32_t holder = 0;
    while (!holder_.compare_exchange_weak(holder, own, std::memory_order_acquire, std::memory_order_relaxed)) {
      if (holder == own) holder_.wait(holder, std::memory_order_relaxed);
      else if (holder != 0)
        throw std::runtime_error("this process was forked while another thread was using the engine: make the engine in"
                                 " the process that uses it");
      holder = 0;
    }
  }
  void unlock() {
    holder_.store(0, std::memory_order_release);
    holder_.notify_one();
  }

 private:
  std::atomic<std::uint32_t> holder_{0};  // generation of the process that holds it, 0: none
};

}  // namespace nanoinfer
