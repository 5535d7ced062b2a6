// Python's names of the weight types and KV cache types.
#pragma once

#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>

#include "kernels.h"

namespace nanoinfer {

// Throws std::invalid_argument with a list of the known names if `name` is not one of them.
template <class T>
T by_name(const std::string& what, const std::string& name, std::initializer_list<std::pair<const char*, T>> table) {
  std::string known;
  for (const auto& [key, value] : table) {
    if (name == key) return value;
    known += (known.empty() ? "" : ", ") + std::string(key);
  }
  throw std::invalid_argument(what + " '" + name + "' is unknown: use one of " + known);
}

inline WeightType weight_type(const std::string& name) {
  return by_name<WeightType>("weights", name,
#define NI_NAMED(name) , {#name, WeightType::name}
                             {{"float32", WeightType::f32},
                              {"float16", WeightType::f16},
                              {"bfloat16", WeightType::bf16},
                              {"int8", WeightType::i8} NI_BLOCK_FORMATS(NI_NAMED)});
#undef NI_NAMED
}

inline CacheType cache_type(const std::string& name) {
  return by_name<CacheType>("cache", name,
                            {{"float32", CacheType::f32}, {"bfloat16", CacheType::bf16}, {"int8", CacheType::i8}, {"int4", CacheType::i4}});
}

}  // namespace nanoinfer
