// Python bindings of the native sampler. All values are checked here, because the sampler itself does not check them; a
// value out of range is a ValueError that names it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gil.h"
#include "sampler.h"
#include "thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace nanoinfer {
namespace {

constexpr std::int64_t kLogitsForThreads = 1 << 17;  // of a call: on one thread they take some 10 us

using Logits = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;

std::string show(double value) { return nb::repr(nb::float_(value)).c_str(); }

[[noreturn]] void value_error(const std::string& message) { throw nb::value_error(message.c_str()); }

void require(bool ok, const char* name, double value, const char* limit) {
  if (!ok) value_error(std::string(name) + "=" + show(value) + " is not " + limit);
}

// Call `take` on each item of a sequence; lists and tuples are not copied. `take` must not run Python code, which could
// change the list during the iteration.
template <typename Take>
void for_each(nb::handle items, const char* name, Take take) {
  PyObject* fast = PySequence_Fast(items.ptr(), (std::string(name) + " is not a sequence").c_str());
  if (fast == nullptr) throw nb::python_error();
  const auto owner = nb::steal<nb::object>(fast);
  const bool is_list = PyList_Check(fast);  // functions of the stable ABI: PySequence_Fast_GET_ITEM is not in it
  const Py_ssize_t size = is_list ? PyList_Size(fast) : PyTuple_Size(fast);
  for (Py_ssize_t i = 0; i < size; ++i) take(is_list ? PyList_GetItem(fast, i) : PyTuple_GetItem(fast, i));
}

std::vector<std::int32_t> to_ids(nb::handle items, const char* name) {
  std::vector<std::int32_t> ids;
  for_each(items, name, [&](PyObject* item) {
    if (!PyLong_Check(item)) throw nb::type_error((std::string(name) + " contains a value that is not an integer").c_str());
    int overflow = 0;
    const long long id = PyLong_AsLongLongAndOverflow(item, &overflow);
    if (overflow != 0 || id < 0 || id > std::numeric_limits<std::int32_t>::max()) {
      value_error(std::string(name) + " contains a token id that is not in [0, 2**31)");
    }
    ids.push_back(static_cast<std::int32_t>(id));
  });
  return ids;
}

std::vector<double> to_doubles(nb::handle items, const char* name) {
  std::vector<double> values;
  for_each(items, name, [&](PyObject* item) {
    if (!PyFloat_Check(item) && !PyLong_Check(item)) {
      throw nb::type_error((std::string(name) + " contains a value that is not a number").c_str());
    }
    const double value = PyFloat_Check(item) ? PyFloat_AsDouble(item) : PyLong_AsDouble(item);
    if (PyErr_Occurred()) throw nb::python_error();
    require(std::isfinite(value), name, value, "a finite number");
    values.push_back(value);
  });
  return values;
}

void init_options(SampleOptions* self, double uniform, double temperature, std::int64_t top_k, double top_p, double min_p,
                           double repetition_penalty, double presence_penalty, double frequency_penalty,
                           nb::handle prompt_ids, nb::handle output_ids, nb::handle bias_ids,
                           nb::handle bias_values, nb::handle excluded_ids) {
  // The comparisons are false for NaN.
  require(uniform >= 0 && uniform < 1, "uniform", uniform, "in [0, 1)");
  require(temperature >= 0 && std::isfinite(temperature), "temperature", temperature, "finite and >= 0");
  require(top_k >= 0, "top_k", static_cast<double>(top_k), ">= 0");
  require(top_p > 0 && top_p <= 1, "top_p", top_p, "in (0, 1]");
  require(min_p >= 0 && min_p <= 1, "min_p", min_p, "in [0, 1]");
  require(repetition_penalty > 0 && std::isfinite(repetition_penalty), "repetition_penalty",
          repetition_penalty, "finite and > 0");
  require(std::isfinite(presence_penalty), "presence_penalty", presence_penalty, "a finite number");
  require(std::isfinite(frequency_penalty), "frequency_penalty", frequency_penalty, "a finite number");
  SampleOptions options{uniform, temperature, top_k, top_p, min_p,
                        repetition_penalty, presence_penalty, frequency_penalty,
                        to_ids(prompt_ids, "prompt_ids"), to_ids(output_ids, "output_ids"),
                        to_ids(bias_ids, "bias_ids"), to_doubles(bias_values, "bias_values"),
                        to_ids(excluded_ids, "excluded_ids")};
  if (options.bias_ids.size() != options.bias_values.size()) {
    value_error("bias_ids has " + std::to_string(options.bias_ids.size()) + " entries, bias_values " +
                std::to_string(options.bias_values.size()) + ": pass one value for each id");
  }
  new (self) SampleOptions(std::move(options));
}

void require_below(const std::vector<std::int32_t>& ids, std::int32_t V, const char* name, std::size_t row) {
  for (const std::int32_t id : ids) {
    if (id >= V) {
      value_error("row " + std::to_string(row) + ": " + name + " holds " + std::to_string(id) +
                  ", which is not below the vocabulary's " + std::to_string(V));
    }
  }
}

// Call sample_range(range) with parts of the rows on the threads of a decoder; return whether there are idle ones, and
// enough logits to use them. Throws std::bad_alloc.
template <typename SampleRange>
bool sample_on_pool(std::int64_t num_rows, std::int32_t V, const SampleRange& sample_range) {
  if (num_rows < 2 || num_rows * V < kLogitsForThreads) return false;
  const std::shared_ptr<ThreadPool> pool = ThreadPool::largest();
  if (pool == nullptr) return false;
  std::atomic<bool> allocated{true};
  const bool ran = pool->try_run({num_rows, [&](int, Range part) {
    try {
      sample_range(part);
    } catch (const std::bad_alloc&) {
      allocated = false;
    }
  }});
  if (!allocated) throw std::bad_alloc();
  return ran;
}

nb::list sample_rows(const Logits& logits, const nb::list& rows) {
  const std::size_t B = logits.shape(0);
  if (rows.size() != B) {
    value_error("logits have " + std::to_string(B) + " rows, but there are options for " +
                std::to_string(rows.size()));
  }
  if (B == 0) return nb::list();
  if (logits.shape(1) == 0 || logits.shape(1) > std::numeric_limits<std::int32_t>::max() / 2) {
    value_error("logits have " + std::to_string(logits.shape(1)) + " columns: not in [1, 2**30)");
  }
  const auto V = static_cast<std::int32_t>(logits.shape(1));
  if (V > 1 && logits.stride(1) != 1) {
    value_error("the logits of a row are " + std::to_string(logits.stride(1)) +
                " elements apart: rows must be contiguous (call contiguous())");
  }
  // Keep references: another thread may change the list while the interpreter lock is released.
  std::vector<nb::object> owners;
  std::vector<const SampleOptions*> options(B, nullptr);
  for (std::size_t i = 0; i < B; ++i) {
    nb::object row = rows[i];
    if (row.is_none()) continue;
    if (!nb::try_cast(row, options[i]) || options[i] == nullptr) {
      throw nb::type_error(("row " + std::to_string(i) + " is neither SampleOptions nor None").c_str());
    }
    require_below(options[i]->bias_ids, V, "bias_ids", i);
    require_below(options[i]->excluded_ids, V, "excluded_ids", i);
    owners.push_back(std::move(row));
  }

  std::vector<std::int32_t> tokens(B);
  {
    const ReleasedGil nogil;
    const auto sample_range = [&](const Range& range) {
      thread_local SamplerScratch scratch;  // reused between calls, so that sampling does not allocate
      for (std::int64_t i = range.begin; i < range.end; ++i) {
        const float* row = logits.data() + i * logits.stride(0);
        tokens[i] = options[i] ? sample_row(row, V, *options[i], scratch) : argmax_row(row, V, scratch);
      }
    };
    if (!sample_on_pool(static_cast<std::int64_t>(B), V, sample_range)) sample_range({0, static_cast<std::int64_t>(B)});
  }
  nb::list list;
  for (const std::int32_t token : tokens) list.append(token);
  return list;
}

}  // namespace

void bind_sampler(nb::module_& m) {
  nb::class_<SampleOptions>(
      m, "SampleOptions",
      "Sampling options of one row, with SamplingParams' names. Immutable.\n\n"
      "uniform: the random number, in [0, 1). prompt_ids, output_ids: tokens that the penalties apply to; ids past\n"
      "the vocabulary are ignored. bias_ids, bias_values: values to add to these logits. excluded_ids: never sampled.\n"
      "Raises: ValueError for a number out of range, TypeError for a value that is not a number.")
      .def("__init__", &init_options, nb::kw_only(), "uniform"_a, "temperature"_a = 1.0, "top_k"_a = 0, "top_p"_a = 1.0,
           "min_p"_a = 0.0, "repetition_penalty"_a = 1.0, "presence_penalty"_a = 0.0, "frequency_penalty"_a = 0.0,
           "prompt_ids"_a = nb::tuple(), "output_ids"_a = nb::tuple(), "bias_ids"_a = nb::tuple(),
           "bias_values"_a = nb::tuple(), "excluded_ids"_a = nb::tuple());
  m.def("sample_rows", &sample_rows, nb::kw_only(), "logits"_a.noconvert(), "rows"_a,
        "Sample the next token of each row, as nanoinfer.sampling.sampler.sample does, without a sort.\n\n"
        "The interpreter lock is released during the call. Rows are divided among the threads of a decoder, if one is\n"
        "open and idle.\n\n"
        "Args:\n"
        "    logits: (B, V) float32 on the CPU, rows contiguous, with any stride between rows. Not copied or changed.\n"
        "    rows: a list of B SampleOptions; None selects the first largest raw logit.\n\n"
        "Returns: a list of B token ids; -1 for each row whose largest logit is infinite or that contains a NaN.\n"
        "Raises: ValueError for invalid ids, lengths or strides; TypeError for other arrays.");
}

}  // namespace nanoinfer
