// Large buffers on huge pages. With pages of 4 KiB, every 64 cache lines need another page-table entry; the CPU's TLB
// holds a few thousand entries, and 124 million weights need many more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace nanoinfer {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

// Zeroed memory, 2 MiB aligned, on huge pages if the system grants them. Pages are allocated when they are first
// written. Throws std::bad_alloc.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t size, bool huge_pages = true) : size_(size) {
    if (size == 0) return;
    const std::size_t whole = (size + kHugePage - 1) / kHugePage * kHugePage;
#if defined(__linux__)
    mapped_ = whole + kHugePage;
    void* p = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<std::uint8_t*>(p);
    const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(p);
    data_ = base_ + ((at + kHugePage - 1) / kHugePage * kHugePage - at);
    madvise(data_, whole, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);  // a hint: failure affects only speed
#else
    (void)huge_pages;
    base_ = data_ = static_cast<std::uint8_t*>(std::aligned_alloc(4096, whole));
    if (!data_) throw std::bad_alloc();
    for (std::size_t i = 0; i < whole; ++i) data_[i] = 0;
#endif
  }
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Buffer() {
#if defined(__linux__)
    if (base_) munmap(base_, mapped_);
#else
    std::free(base_);
#endif
  }

  std::uint8_t* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  void swap(Buffer& other) {
    std::swap(base_, other.base_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(mapped_, other.mapped_);
  }
  std::uint8_t *base_ = nullptr, *data_ = nullptr;
  std::size_t size_ = 0, mapped_ = 0;
};

// How a mapped file is read: a part of it soon, without waiting for it; or in a random order, so that a page is read without
// its neighbours. Hints: failure affects only speed.
enum class Access { soon, random };
inline void advise(const std::uint8_t* data, std::size_t size, Access access) {
#if defined(__linux__)
  static const std::uintptr_t page = sysconf(_SC_PAGESIZE);  // 4 to 64 KiB on Arm
  const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(data), begin = at / page * page;
  madvise(reinterpret_cast<void*>(begin), at + size - begin, access == Access::soon ? MADV_WILLNEED : MADV_RANDOM);
#else
  (void)data, (void)size, (void)access;
#endif
}

}  // namespace nanoinfer
