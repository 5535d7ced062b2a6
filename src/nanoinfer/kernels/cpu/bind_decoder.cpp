// Python bindings of the decoder and of what measures the machine. Thin: argument types are declared in the
// signatures, where nanobind checks them; values are checked by the classes themselves.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>

#include "arrays.h"
#include "decoder.h"
#include "gil.h"
#include "isa.h"
#include "memory.h"
#include "names.h"
#include "process.h"
#include "thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace nanoinfer {
namespace {

using Writable = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// A decoder and a lock: Python threads may call at the same time, and a step does not hold the interpreter's lock.
class Guarded {
 public:
  Guarded(const DecoderShape& shape, const DecoderOptions& options) : decoder_(shape, options) {}

  void load(const std::string& name, const float* values, std::int64_t rows, std::int64_t columns) {
    const ReleasedGil nogil;
    const std::lock_guard lock(mutex_);
    decoder_.load(name, values, rows, columns);
  }
  void extend(const Step& step, Writable logits) {
    const ReleasedGil nogil;
    const std::lock_guard lock(mutex_);
    const std::int64_t wanted = decoder_.check(step);
    if (static_cast<std::int64_t>(logits.shape(0)) != wanted ||
        static_cast<std::int64_t>(logits.shape(1)) != decoder_.logits_stride())
      throw std::invalid_argument("logits must be (" + std::to_string(wanted) + ", " +
                                  std::to_string(decoder_.logits_stride()) + ")");
    decoder_.extend(step, logits.data());
  }
  void hidden(Writable out) {
    const std::lock_guard lock(mutex_);
    const std::vector<float>& from = decoder_.final_hidden();
    const std::size_t columns = decoder_.shape().n_embd;
    if (out.shape(1) != columns || out.shape(0) != from.size() / columns)
      throw std::invalid_argument("out must be (" + std::to_string(from.size() / columns) + ", " +
                                  std::to_string(columns) + ")");
    std::copy(from.begin(), from.end(), out.data());
  }
  template <class F>
  auto locked(F&& f) {
    const std::lock_guard lock(mutex_);
    return f(decoder_);
  }

 private:
  Decoder decoder_;
  ProcessMutex mutex_;
};

// A buffer to measure reading with.
class ReadBuffer {
 public:
  ReadBuffer(std::int64_t num_bytes, int threads, const std::string& isa, bool huge_pages)
      : kernels_(kernels_for(isa)), threads_(ThreadPool::shared(checked_threads(threads))), memory_(checked_size(num_bytes), huge_pages) {
    std::memset(memory_.data(), 1, memory_.size());  // every page real
  }
  std::uint64_t read() {
    const ReleasedGil nogil;
    ThreadPool& threads = ThreadPool::current(threads_);
    std::vector<std::uint64_t> sums(threads.size());
    const std::int64_t lines = memory_.size() / 256;
    threads.run([&](int rank) {
      const Range mine = range_of(lines, rank, threads.size());
      sums[rank] = kernels_.read(memory_.data() + mine.begin * 256, (mine.end - mine.begin) * 256);
    });
    std::uint64_t total = 0;
    for (const std::uint64_t s : sums) total += s;
    return total;
  }

 private:
  static std::size_t checked_size(std::int64_t n) {
    if (n < 256 || n > (std::int64_t{1} << 40)) throw std::invalid_argument("num_bytes must be from 256 to 2**40");
    return n / 256 * 256;
  }
  static int checked_threads(int n) {
    if (n < 1 || n > 1024) throw std::invalid_argument("threads must be from 1 to 1024");
    return n;
  }
  const Kernels& kernels_;
  std::shared_ptr<ThreadPool> threads_;
  Buffer memory_;
};

}  // namespace

void bind_decoder(nb::module_& m) {
  m.def(
      "instruction_sets",
      [] {
        nb::list all;
        for (const IsaInfo& isa : instruction_sets()) all.append(nb::make_tuple(isa.name, isa.missing));
        return all;
      },
      "Instruction sets compiled in, slowest first: (name, what this CPU lacks for it, empty if nothing).");

  nb::class_<ReadBuffer>(m, "ReadBuffer", "Memory to measure read bandwidth with.")
      .def(nb::init<std::int64_t, int, const std::string&, bool>(), nb::kw_only(), "num_bytes"_a, "threads"_a,
           "isa"_a = "", "huge_pages"_a = true)
      .def("read", &ReadBuffer::read, "Read all of it once, by all threads; returns a checksum.");

  nb::class_<Guarded>(m, "Decoder",
                      "A GPT on the CPU. Load every tensor, then open, extend, truncate, fork and close sequences.\n\n"
                      "Raises ValueError or IndexError for arguments that make no sense; nothing has changed then.")
      .def(
          "__init__",
          [](Guarded* self, std::int64_t vocab_size, std::int64_t block_size, std::int64_t n_layer,
             std::int64_t n_head, std::int64_t n_embd, std::int64_t mlp_dim, const std::string& activation, bool tied,
             float epsilon, const std::string& weights, const std::string& cache, std::int64_t max_num_seqs,
             std::int64_t max_num_cached_tokens, int threads, const std::string& isa, bool huge_pages) {
            DecoderShape shape{vocab_size, block_size, n_layer, n_head, n_embd, mlp_dim};
            shape.gelu_tanh = by_name<bool>("activation", activation, {{"gelu_new", true}, {"gelu", false}});
            shape.tied = tied;
            shape.epsilon = epsilon;
            DecoderOptions options;
            options.weights = weight_type(weights);
            options.cache = cache_type(cache);
            options.max_num_seqs = max_num_seqs;
            options.max_num_cached_tokens = max_num_cached_tokens;
            options.threads = threads;
            options.isa = isa;
            options.huge_pages = huge_pages;
            new (self) Guarded(shape, options);
          },
          nb::kw_only(), "vocab_size"_a, "block_size"_a, "n_layer"_a, "n_head"_a, "n_embd"_a, "mlp_dim"_a,
          "activation"_a, "tied"_a, "epsilon"_a, "weights"_a, "cache"_a, "max_num_seqs"_a, "max_num_cached_tokens"_a,
          "threads"_a, "isa"_a = "", "huge_pages"_a = true)
      .def(
          "load",
          [](Guarded& d, const std::string& name, Floats2 values) {
            d.load(name, values.data(), values.shape(0), values.shape(1));
          },
          "name"_a, "values"_a.noconvert(), "Pack the tensor of that name in the checkpoint; a matrix is (out, in) float32.")
      .def(
          "load",
          [](Guarded& d, const std::string& name, Floats1 values) { d.load(name, values.data(), 1, values.shape(0)); },
          "name"_a, "values"_a.noconvert())
      .def("check_loaded", [](Guarded& d) { d.locked([](Decoder& x) { x.check_loaded(); }); },
           "Raise ValueError unless every tensor was given.")
      .def("open", [](Guarded& d) { return d.locked([](Decoder& x) { return x.cache().open(); }); })
      .def("fork", [](Guarded& d, std::int64_t h) { return d.locked([h](Decoder& x) { return x.cache().fork(h); }); },
           "handle"_a)
      .def("truncate",
           [](Guarded& d, std::int64_t h, std::int64_t n) { d.locked([=](Decoder& x) { x.cache().truncate(h, n); }); },
           "handle"_a, "length"_a)
      .def("close", [](Guarded& d, std::int64_t h) { d.locked([h](Decoder& x) { x.cache().close(h); }); }, "handle"_a)
      .def("clear", [](Guarded& d) { d.locked([](Decoder& x) { x.cache().clear(); }); }, "Close all sequences.")
      .def("length",
           [](Guarded& d, std::int64_t h) { return d.locked([h](Decoder& x) { return x.cache().length(h); }); },
           "handle"_a)
      .def(
          "extend",
          [](Guarded& d, std::vector<std::int64_t> handles, std::vector<std::int64_t> token_ids,
             std::vector<std::int64_t> num_new, std::vector<std::int64_t> num_logits, Writable logits) {
            d.extend({std::move(handles), std::move(token_ids), std::move(num_new), std::move(num_logits)}, logits);
          },
          nb::kw_only(), "handles"_a, "token_ids"_a, "num_new"_a, "num_logits"_a,
          "logits"_a.noconvert(),  // a converted copy would be written and thrown away
          "Append tokens to sequences; write logits, (sum(num_logits), logits_stride) float32.")
      .def("hidden", [](Guarded& d, Writable out) { d.hidden(out); }, nb::kw_only(), "out"_a.noconvert(),
           "Write the final hidden states that the last step's logits were made from, (sum(num_logits), n_embd).")
      .def(
          "part_seconds",
          [](Guarded& d) {
            const PartSeconds s = d.locked([](Decoder& x) { return x.part_seconds(); });
            nb::dict all;
            all["matrix products"] = s.products;
            all["attention"] = s.attention;
            all["output head"] = s.head;
            all["everything else"] = s.others;
            return all;
          },
          "Where the time of extend went so far, in seconds.")
      .def_prop_ro("logits_stride", [](Guarded& d) { return d.locked([](Decoder& x) { return x.logits_stride(); }); })
      .def_prop_ro("isa", [](Guarded& d) { return d.locked([](Decoder& x) { return std::string(x.isa()); }); })
      .def_prop_ro("threads", [](Guarded& d) { return d.locked([](Decoder& x) { return x.threads(); }); })
      .def_prop_ro("cache_bytes",
                   [](Guarded& d) {
                     return d.locked([](Decoder& x) { return x.cache().blocks_total() * x.cache().shape().block_bytes(); });
                   })
      .def_prop_ro("weight_bytes", [](Guarded& d) { return d.locked([](Decoder& x) { return x.weight_bytes(); }); });
}

}  // namespace nanoinfer
