// The KV cache: fixed-size blocks of one pool, shared between forks by reference.
//
// A block holds kBlock positions of every layer and head of keys and values, so a sequence is a list of blocks and a length. Forks share
// blocks; appending to a shared block copies it first. Truncating returns whole blocks to the pool. Paged keys and
// values are the idea of PagedAttention (Kwon et al. 2023).
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels.h"
#include "memory.h"

namespace nanoinfer {

struct CacheShape {  // of layers of equal sizes
  CacheType type;
  std::int64_t n_layer, n_head, head_dim;  // n_head: heads of keys and values

  std::size_t part_bytes() const;                                       // one head of one layer in a block
  std::size_t block_bytes() const { return n_layer * n_head * part_bytes(); }
  std::size_t offset(std::int64_t layer, std::int64_t head) const { return (layer * n_head + head) * part_bytes(); }
};

struct LayerHeads {
  std::int64_t n_head, head_dim;  // of keys and values
  std::int64_t kv_layer;          // the layer whose keys and values it has: its own index, or a lower one
};

class Cache {
 public:
  // A pool of num_blocks blocks; memory is allocated when blocks are first written. Throws std::bad_alloc.
  Cache(CacheType type, const std::vector<LayerHeads>& layers, std::int64_t num_blocks);

  std::int64_t open();
  // These throw std::out_of_range for an unknown handle; truncate also for a length that the sequence does not have.
  std::int64_t fork(std::int64_t handle);
  void truncate(std::int64_t handle, std::int64_t length);
  void close(std::int64_t handle);
  std::int64_t length(std::int64_t handle) const;
  void clear();  // close all sequences

  // Number of blocks that appending `count` positions to a sequence takes from the pool. Of several sequences that share
  // a partly filled last block and are appended to, each counts a copy, although the last one keeps the block.
  std::int64_t blocks_needed(std::int64_t handle, std::int64_t count) const;
  std::int64_t blocks_free() const { return static_cast<std::int64_t>(free_.size()); }
  std::int64_t blocks_total() const { return static_cast<std::int64_t>(references_.size()); }
  // Extend a sequence by `count` positions, taking blocks from the pool, which must have enough free ones.
  void append(std::int64_t handle, std::int64_t count);
  // The same with the contents of the blocks from that of the first new position on, one after the other.
  void append(std::int64_t handle, std::int64_t count, const std::uint8_t* blocks);
  // Copy `count` blocks of a sequence. Throws std::out_of_range if it has fewer.
  void read(std::int64_t handle, std::int64_t first, std::int64_t count, std::uint8_t* to) const;

  // Numbers of a sequence's blocks in the pool.
  const std::vector<std::int32_t>& table(std::int64_t handle) const { return at(handle).block; }
  // Addresses of a sequence's blocks, valid until it is appended to, truncated or closed.
  const std::vector<const std::uint8_t*>& blocks(std::int64_t handle) const { return at(handle).address; }
  std::uint8_t* block(std::int64_t handle, std::int64_t position) const;
  CacheType type() const { return type_; }
  // Whether keys and values are multiplied by Hadamard matrices, as queries and the results of attention are (Kernels::hadamard): large
  // numbers of few dimensions would make steps of integers large for all (QuaRot, Ashkboos et al. 2024).
  bool is_rotated() const { return has_integers(type_); }
  std::size_t block_bytes() const { return block_bytes_; }
  // Where a head of a layer begins in a block.
  std::size_t offset(std::int64_t layer, std::int64_t head) const { return place_[layer].begin + head * place_[layer].part; }

 private:
  struct Place {
    std::size_t begin, part;  // of a layer, and the bytes of one of its heads
  };
  struct Sequence {
    std::int64_t length = 0;
    std::vector<std::int32_t> block;
    std::vector<const std::uint8_t*> address;
  };
  const Sequence& at(std::int64_t handle) const;
  Sequence& at(std::int64_t handle) { return const_cast<Sequence&>(std::as_const(*this).at(handle)); }
  std::int32_t take();
  void drop(Sequence& s, std::size_t keep);
  std::uint8_t* address(std::int32_t block) const { return memory_.data() + block * block_bytes_; }

  const CacheType type_;
  std::vector<Place> place_;
  const std::size_t block_bytes_;  // sums up the layers in place_
  Buffer memory_;
  std::vector<std::int32_t> references_, free_;
  std::unordered_map<std::int64_t, Sequence> sequences_;
  std::int64_t next_ = 0;
};

}  // namespace nanoinfer
