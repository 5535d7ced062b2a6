// ThreadPool: every item is processed once, in its phase; and no phase waits for a thread that holds no items.
#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "check.h"
#include "thread_pool.h"

using namespace nanoinfer;
using namespace nanoinfer::test;

namespace {

// Phases that count how often each of their items is processed, and that check their order.
class Counted {
 public:
  explicit Counted(std::int64_t most) {
    const std::int64_t counts[] = {1, 2, 7, 64, 300, 1, 1, 3};
    for (const std::int64_t count : counts) done_.emplace_back(count);
    for (std::size_t i = 0; i < done_.size(); ++i) {
      const auto body = [this, i, most](int, Range part) {
        if (ended_ != i || part.empty() || part.end - part.begin > most) wrong_ = true;
        for (std::int64_t item = part.begin; item < part.end; ++item) ++done_[i][item];
      };
      const auto ended = [this, i] {
        for (const std::atomic<int>& item : done_[i]) wrong_ = wrong_ || item != 1;
        if (ended_++ != i) wrong_ = true;
      };
      phases.push_back({counts[i], body, most, ended});
    }
  }
  bool right() const {
    for (const auto& items : done_)
      for (const std::atomic<int>& item : items)
        if (item != 1) return false;
    return !wrong_ && ended_ == phases.size();
  }

  std::vector<Phase> phases;

 private:
  std::vector<std::vector<std::atomic<int>>> done_;
  std::size_t ended_ = 0;  // phases; written by the thread that ends one, and read in the next ones
  std::atomic<bool> wrong_{false};
};

void every_item_is_processed_once(Test& test, int size) {
  ThreadPool pool(size);
  for (int call = 0; call < 50; ++call)
    for (const std::int64_t most : {std::int64_t{1}, std::int64_t{3}, INT64_MAX}) {
      Counted counted(most);
      pool.run(counted.phases);
      test.check(counted.right(), "%d threads, parts of %lld: items were not processed once, in their phases", size,
                 static_cast<long long>(most));
    }
}

void a_slow_thread_leaves_its_items(Test& test, int size) {
  ThreadPool pool(size);
  constexpr std::int64_t kCount = 96;
  std::atomic<std::int64_t> done{0}, of_slow{0};
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  const auto wait_for = [until](auto condition) {
    while (!condition() && std::chrono::steady_clock::now() < until) std::this_thread::yield();
  };
  // The first phase ends when every thread has come.
  const Phase arrive{size, [&](int, Range) { ++done; wait_for([&] { return done == size; }); }, /*most=*/1, [&] { done = 0; }};
  const Phase work{kCount, [&](int rank, Range part) {
    if (rank == 0) {
      of_slow += part.end - part.begin;
      wait_for([&] { return done == kCount - of_slow; });
    } else if (of_slow == 0) {
      wait_for([&] { return of_slow > 0; });
    }
    done += part.end - part.begin;
  }};
  pool.run({arrive, work});
  const std::int64_t expected = (range_of(kCount, 0, size).end + 1) / 2;  // its first part
  test.check(done == kCount && of_slow == expected, "%d threads: the slow one processed %lld items of %lld, not %lld",
             size, static_cast<long long>(of_slow), static_cast<long long>(done), static_cast<long long>(expected));
}

void own_items_come_first(Test& test) {
  ThreadPool pool(2);
  std::atomic<int> begun{0};
  std::atomic<bool> others{false};
  pool.run({40, [&](int rank, Range part) {
    const Range own = range_of(40, rank, 2);
    if (begun++ < 2 && (part.begin != own.begin || part.end != own.begin + 10)) others = true;
    while (begun < 2) std::this_thread::yield();  // for the other thread's first part
  }});
  test.check(!others, "a thread's first part is not the first half of its range");
}

void too_many_items_are_refused(Test& test) {
  ThreadPool pool(2);
  int refused = 0;
  for (const std::int64_t count : {std::int64_t{-1}, std::int64_t{0}, std::int64_t{1} << 24, INT64_MAX}) {
    try {
      pool.run({count, [](int, Range) {}});
    } catch (const std::length_error&) {
      ++refused;
    }
  }
  Counted counted(INT64_MAX);
  pool.run(counted.phases);
  test.check(refused == 4 && counted.right(), "%d of 4 numbers of items were refused", refused);
}

// A thread without a core: a signal's handler that returns when the test says so. ThreadSanitizer delays signals.
#if !defined(__SANITIZE_THREAD__)

std::atomic<bool> stopped{false}, go_on{false};

void stop_here(int) {
  stopped = true;
  while (!go_on) sched_yield();
  stopped = false;
}

class Stopping {  // stops the second thread of a pool of two
 public:
  explicit Stopping(ThreadPool& pool) {
    struct sigaction action = {};
    action.sa_handler = stop_here;
    sigaction(SIGUSR1, &action, nullptr);
    std::atomic<bool> found{false};
    pool.run({2, [&](int rank, Range) {  // one item each: neither thread ends its own before the other has begun
      if (rank == 1) thread_ = pthread_self(), found = true;
      while (!found) std::this_thread::yield();
    }});
  }
  void stop() {
    go_on = false;
    pthread_kill(thread_, SIGUSR1);
    while (!stopped) std::this_thread::yield();
  }
  void release() {
    go_on = true;
    while (stopped) std::this_thread::yield();
  }

 private:
  pthread_t thread_;
};

void a_thread_that_holds_no_items_is_not_waited_for(Test& test) {
  ThreadPool pool(2);
  Stopping second(pool);
  second.stop();
  std::atomic<bool> ended{false};
  std::thread limit([&] {  // a pool that waits goes on after a while, and fails
    for (int i = 0; i < 3000 && !ended; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    go_on = true;
  });
  Counted counted(INT64_MAX);
  pool.run(counted.phases);
  test.check(!go_on && counted.right(), "a step waited for a thread that did not come");
  ended = true;
  limit.join();
  second.release();
  Counted again(1);  // now with the thread that found the step over
  pool.run(again.phases);
  test.check(again.right(), "a thread that came after a step disturbed the next one");
}

// Wherever a thread stops: while it takes or completes items, or between phases and calls, whose phases exist no more.
// Of the places, those between two instructions are met rarely, so there are many stops.
void a_thread_may_stop_anywhere(Test& test) {
  constexpr int kStops = 5000;
  ThreadPool pool(2);
  Stopping second(pool);
  std::atomic<bool> ended{false};
  std::thread stops([&] {
    for (int i = 0; i < kStops; ++i) {
      second.stop();
      std::this_thread::yield();
      second.release();
    }
    ended = true;
  });
  int calls = 0, wrong = 0;
  for (; !ended; ++calls) {
    Counted counted(calls % 2 ? 3 : INT64_MAX);
    pool.run(counted.phases);
    wrong += !counted.right();
  }
  stops.join();
  test.check(wrong == 0, "%d calls of %d were disturbed by a thread that stops now and then", wrong, calls);
}

#endif

}  // namespace

int main(int argc, char** argv) {
  Test test("threads", argc, argv);
  for (const int size : {1, 2, 3, 5}) {
    every_item_is_processed_once(test, size);
    if (size > 1) a_slow_thread_leaves_its_items(test, size);
  }
  own_items_come_first(test);
  too_many_items_are_refused(test);
#if !defined(__SANITIZE_THREAD__)
  a_thread_that_holds_no_items_is_not_waited_for(test);
  a_thread_may_stop_anywhere(test);
#endif
  return test.result();
}
