// ThreadPool: items that threads take are taken once each, and a thread that is slow leaves its items to the others.
#include <atomic>
#include <chrono>
#include <thread>

#include "check.h"
#include "thread_pool.h"

using namespace nanoinfer;
using namespace nanoinfer::test;

namespace {

void every_item_is_taken_once(Test& test, int size) {
  ThreadPool pool(size);
  for (int call = 0; call < 20; ++call)
    for (const std::int64_t most : {std::int64_t{1}, std::int64_t{3}, INT64_MAX}) {
      const std::int64_t counts[] = {0, 1, 2, 7, 64, 1000, 3};  // one after the other, with a barrier between
      std::vector<std::vector<std::atomic<int>>> taken;
      for (const std::int64_t count : counts) taken.emplace_back(count);
      std::atomic<bool> too_long{false};
      pool.run([&](int rank) {
        for (std::size_t i = 0; i < taken.size(); ++i) {
          for (Range part; !(part = pool.take(counts[i], rank, most)).empty();) {
            if (part.end - part.begin > most) too_long = true;
            for (std::int64_t item = part.begin; item < part.end; ++item) ++taken[i][item];
            if (rank == call % size) std::this_thread::yield();
          }
          pool.barrier();
        }
      });
      for (const auto& items : taken)
        for (std::size_t item = 0; item < items.size(); ++item)
          test.check(items[item] == 1, "%d threads, most %lld: item %zu of %zu was taken %d times", size,
                     static_cast<long long>(most), item, items.size(), items[item].load());
      test.check(!too_long, "%d threads: a part has more than %lld items", size, static_cast<long long>(most));
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
  pool.run([&](int rank) {
    if (rank != 0) wait_for([&] { return of_slow > 0; });
    for (Range part; !(part = pool.take(kCount, rank)).empty();) {
      if (rank == 0) {
        of_slow += part.end - part.begin;
        wait_for([&] { return done == kCount - of_slow; });
      }
      done += part.end - part.begin;
    }
    pool.barrier();
  });
  const std::int64_t expected = (range_of(kCount, 0, size).end + 1) / 2;  // its first part
  test.check(done == kCount && of_slow == expected, "%d threads: the slow one processed %lld items of %lld, not %lld",
             size, static_cast<long long>(of_slow), static_cast<long long>(done), static_cast<long long>(expected));
}

void own_items_come_first(Test& test) {
  ThreadPool pool(2);
  std::atomic<bool> others{false};
  pool.run([&](int rank) {
    const Range own = range_of(40, rank, 2), part = pool.take(40, rank);
    if (part.begin != own.begin || part.end != own.begin + 10) others = true;
    pool.barrier();
  });
  test.check(!others, "a thread's first part is not the first half of its range");
}

void the_last_at_a_barrier_completes_it(Test& test, int size) {
  ThreadPool pool(size);
  constexpr int kBarriers = 200;
  std::atomic<int> arrived{0};
  int completed = 0;  // no thread but the last writes it, and the others read it after the barrier
  std::atomic<bool> wrong{false};
  pool.run([&](int rank) {
    for (int i = 1; i <= kBarriers; ++i) {
      if (rank == i % size) std::this_thread::yield();
      ++arrived;
      pool.barrier([&] {
        if (arrived != i * size || completed != i - 1) wrong = true;
        completed = i;
      });
      if (completed != i) wrong = true;
      pool.barrier();
    }
  });
  test.check(!wrong && completed == kBarriers, "%d threads: a barrier was completed before all had arrived", size);
}

}  // namespace

int main(int argc, char** argv) {
  Test test("threads", argc, argv);
  for (const int size : {1, 2, 3, 5}) {
    every_item_is_taken_once(test, size);
    the_last_at_a_barrier_completes_it(test, size);
    if (size > 1) a_slow_thread_leaves_its_items(test, size);
  }
  own_items_come_first(test);
  return test.result();
}
