#include "cache.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace nanoinfer {

std::size_t CacheShape::part_bytes() const {
  const std::int64_t size = type == CacheType::f32 ? 4 : type == CacheType::bf16 ? 2 : 1, unit = 4 / size;
  const std::int64_t keys = (head_dim + unit - 1) / unit * unit, values = (head_dim + kLanes - 1) / kLanes * kLanes;
  const std::size_t scales = has_integers(type) ? 2 * kBlock * sizeof(float) : 0;
  if (type == CacheType::i4) return scales + ((head_dim + 15) / 16 * 12 + (head_dim + 31) / 32 * 16) * kBlock;
  return (scales + (keys + values) * size * kBlock + 63) / 64 * 64;
}

namespace {

// Write where each layer begins in a block, and return the bytes of a block.
template <class Place>
std::size_t lay_out(CacheType type, const std::vector<LayerHeads>& layers, std::vector<Place>& places) {
  std::size_t bytes = 0;
  for (const LayerHeads& layer : layers) {
    if (layer.kv_layer < static_cast<std::int64_t>(places.size())) {
      places.push_back(Place(places[layer.kv_layer]));
      continue;
    }
    const CacheShape own{type, 1, layer.n_head, layer.head_dim};
    places.push_back({bytes, own.part_bytes()});
    bytes += own.block_bytes();
  }
  return bytes;
}

}  // namespace

Cache::Cache(CacheType type, const std::vector<LayerHeads>& layers, std::int64_t num_blocks)
    : type_(type), block_bytes_(lay_out(type, layers, place_)), memory_(num_blocks * block_bytes_), references_(num_blocks) {
  clear();
}

const Cache::Sequence& Cache::at(std::int64_t handle) const {
  const auto found = sequences_.find(handle);
  if (found == sequences_.end())
    throw std::out_of_range("handle " + std::to_string(handle) + " is not an open sequence");
  return found->second;
}

std::int64_t Cache::open() {
  sequences_.emplace(next_, Sequence{});
  return next_++;
}

std::int64_t Cache::fork(std::int64_t handle) {
  Sequence copy = at(handle);
  for (const std::int32_t b : copy.block) ++references_[b];
  sequences_.emplace(next_, std::move(copy));
  return next_++;
}

void Cache::drop(Sequence& s, std::size_t keep) {
  for (; s.block.size() > keep; s.block.pop_back(), s.address.pop_back())
    if (--references_[s.block.back()] == 0) free_.push_back(s.block.back());
}

void Cache::truncate(std::int64_t handle, std::int64_t length) {
  Sequence& s = at(handle);
  if (length < 0 || length > s.length)
    throw std::out_of_range("truncate to " + std::to_string(length) + ": sequence " + std::to_string(handle) +
                            " has " + std::to_string(s.length) + " tokens");
  drop(s, (length + kBlock - 1) / kBlock);
  s.length = length;
}

void Cache::close(std::int64_t handle) {
  drop(at(handle), 0);
  sequences_.erase(handle);
}

void Cache::clear() {
  sequences_.clear();
  std::fill(references_.begin(), references_.end(), 0);
  free_.clear();
  for (std::int64_t b = blocks_total(); b-- > 0;) free_.push_back(static_cast<std::int32_t>(b));  // low ones are taken first
}

std::int64_t Cache::length(std::int64_t handle) const { return at(handle).length; }

std::int64_t Cache::blocks_needed(std::int64_t handle, std::int64_t count) const {
  const Sequence& s = at(handle);
  const bool copies = s.length % kBlock && references_[s.block.back()] > 1;
  return (s.length + count + kBlock - 1) / kBlock - static_cast<std::int64_t>(s.block.size()) + copies;
}

std::int32_t Cache::take() {
  const std::int32_t b = free_.back();
  free_.pop_back();
  references_[b] = 1;
  return b;
}

void Cache::append(std::int64_t handle, std::int64_t count) {
  Sequence& s = at(handle);
  if (s.length % kBlock && references_[s.block.back()] > 1) {  // shared with a fork: copy before writing
    const std::int32_t own = take();
    std::memcpy(address(own), address(s.block.back()), block_bytes_);
    --references_[s.block.back()];
    s.block.back() = own;
    s.address.back() = address(own);
  }
  s.length += count;
  while (static_cast<std::int64_t>(s.block.size()) * kBlock < s.length) {
    s.block.push_back(take());
    s.address.push_back(address(s.block.back()));
  }
}

void Cache::append(std::int64_t handle, std::int64_t count, const std::uint8_t* blocks) {
  const Sequence& s = at(handle);
  std::int64_t b = s.length / kBlock;
  append(handle, count);
  for (; b * kBlock < s.length; ++b, blocks += block_bytes_) std::memcpy(address(s.block[b]), blocks, block_bytes_);
}

void Cache::read(std::int64_t handle, std::int64_t first, std::int64_t count, std::uint8_t* to) const {
  const Sequence& s = at(handle);
  const std::int64_t blocks = static_cast<std::int64_t>(s.block.size());
  if (first < 0 || count < 0 || first > blocks - count)
    throw std::out_of_range("blocks from " + std::to_string(first) + " on: sequence " + std::to_string(handle) + " has " +
                            std::to_string(blocks));
  for (std::int64_t b = first; b < first + count; ++b, to += block_bytes_) std::memcpy(to, s.address[b], block_bytes_);
}

std::uint8_t* Cache::block(std::int64_t handle, std::int64_t position) const {
  return address(at(handle).block[position / kBlock]);
}

}  // namespace nanoinfer
