// Python bindings of the decoder and of packing. nanobind checks the argument types in the signatures; the classes check
// the values.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unordered_map.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "arrays.h"
#include "decoder.h"
#include "gil.h"
#include "isa.h"
#include "names.h"
#include "packing.h"
#include "process.h"
#include "thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace nanoinfer {
namespace {

using Writable = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// The options as Python sets them, one attribute each, with names for the enumerations. Decoder checks the values.
struct Settings : DecoderShape, DecoderOptions {
  std::string activation = "gelu_new", norm_name = "layer", norm_weight_name = "plain", norm_placement = "before";
  std::string qk_norm = "none", rule = "none", weights_name, cache_name;
  std::unordered_map<std::string, std::vector<std::pair<std::string, std::int64_t>>> format_names;
};

// Set the fields of a shape whose values have names in nanoinfer.config.ModelConfig.
void read_names(const Settings& given, DecoderShape& shape) {
  using enum Epilogue;
  shape.activation = by_name<Epilogue>("activation", given.activation,
                                       {{"gelu_new", gelu_tanh}, {"gelu", gelu_erf}, {"silu", silu}, {"relu", relu},
                                        {"relu2", relu2}, {"clamped_silu", clamped_silu}});
  shape.norm = by_name<Norm>("norm", given.norm_name, {{"layer", Norm::layer}, {"rms", Norm::rms}});
  const int weight = by_name<int>("norm_weight", given.norm_weight_name, {{"plain", 0}, {"one_plus", 1}, {"none", 2}});
  shape.norm_weight = weight != 2;
  shape.norm_offset = weight == 1 ? 1.0f : 0.0f;
  const int place = by_name<int>("norm_placement", given.norm_placement,
                                 {{"before", 0}, {"after", 1}, {"both", 2}, {"shared", 3}});
  shape.norm_before = place != 1;
  shape.norm_after = place == 1 || place == 2;
  shape.shared_norm = place == 3;
  using enum QueryKeyNorm;
  shape.qk_norm = by_name<QueryKeyNorm>("qk_norm", given.qk_norm,
                                        {{"none", none}, {"head", head}, {"heads", heads}, {"whole", whole}});
  shape.recurrence.rule = by_name<Rule>("rule", given.rule, {{"none", Rule::none}, {"conv", Rule::conv},
                                                             {"delta", Rule::delta}, {"mamba2", Rule::mamba2}});
}

// A decoder with a lock: Python threads may call it concurrently. A thread that has to wait, for the lock or for what
// is computed, has released the interpreter lock, so that the others go on. So the calls `f` use no Python object.
class Guarded {
 public:
  Guarded(const DecoderShape& shape, const DecoderOptions& options, Guarded* owner)
      : decoder_(std::in_place, shape, options, owner ? &*owner->decoder_ : nullptr),
        mutex_(shape.backbone ? owner->mutex_ : own_mutex_) {}  // of the cache that both read
  ~Guarded() {
    const ReleasedGil nogil;  // returning gigabytes to the system takes some 100 ms if they are on small pages
    decoder_.reset();
  }

  // Return f(decoder), which computes nothing. The interpreter lock is kept if the decoder is free: a step makes many
  // such calls, and each time another thread could take the interpreter lock for milliseconds.
  template <class F>
  auto locked(F&& f) {
    if (const std::unique_lock lock(mutex_, std::try_to_lock); lock.owns_lock()) return f(*decoder_);
    return computed(f);
  }
  // Return f(decoder), which may take long.
  template <class F>
  auto computed(F&& f) {
    const ReleasedGil nogil;
    const std::lock_guard lock(mutex_);  // released before the interpreter lock is requested, which may end this thread
    return f(*decoder_);
  }
  void load_packed(const std::string& name, Bytes1 panels, const Floats1& scales) {
    locked([&](Decoder& x) {
      x.load_packed(name, panels.data(), panels.size(), scales.data(), scales.size());
      std::swap(kept_[name], panels);  // changes no reference count
    });
  }  // the panels that were kept before are freed here, with the interpreter lock

 private:
  std::unordered_map<std::string, Bytes1> kept_;  // panels that the decoder refers to
  std::optional<Decoder> decoder_;
  ProcessMutex own_mutex_;
  ProcessMutex& mutex_;
};

constexpr std::pair<double PartSeconds::*, const char*> kParts[] = {{&PartSeconds::products, "matrix products"},
                                                                    {&PartSeconds::attention, "attention"},
                                                                    {&PartSeconds::head, "output head"},
                                                                    {&PartSeconds::others, "everything else"}};

void extend(Decoder& decoder, const Step& step, Writable& logits) {
  const std::int64_t wanted = decoder.check(step), rows = static_cast<std::int64_t>(logits.shape(0));
  if ((rows != wanted && rows != 0) || static_cast<std::int64_t>(logits.shape(1)) != decoder.logits_stride())
    throw std::invalid_argument("logits must be (" + std::to_string(wanted) + ", " +
                                std::to_string(decoder.logits_stride()) + "), or have no row");
  decoder.extend(step, rows ? logits.data() : nullptr);
}

using WritableBytes = nb::ndarray<std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void check_block_bytes(const Cache& cache, std::size_t bytes) {
  if (bytes != cache.block_bytes())
    throw std::invalid_argument("blocks have " + std::to_string(cache.block_bytes()) + " bytes, not " + std::to_string(bytes));
}

void append_blocks(Decoder& decoder, std::int64_t handle, std::int64_t count, const Bytes2& blocks) {
  Cache& cache = decoder.cache();
  check_block_bytes(cache, blocks.shape(1));
  const std::int64_t length = cache.length(handle);
  if (count < 1 || count > decoder.shape().block_size - length || cache.blocks_needed(handle, count) > cache.blocks_free())
    throw std::out_of_range(std::to_string(count) + " positions do not fit behind the " + std::to_string(length) +
                            " of sequence " + std::to_string(handle));
  if (const std::int64_t first = length / kBlock, end = (length + count + kBlock - 1) / kBlock;
      static_cast<std::int64_t>(blocks.shape(0)) != end - first)
    throw std::invalid_argument(std::to_string(blocks.shape(0)) + " blocks, must be " + std::to_string(end - first));
  cache.append(handle, count, blocks.data());
}

void copy_hidden(const Decoder& decoder, Writable& out) {
  const std::vector<float>& from = decoder.final_hidden();
  const std::size_t columns = decoder.shape().n_embd;
  if (out.shape(1) != columns || out.shape(0) != from.size() / columns)
    throw std::invalid_argument("out must be (" + std::to_string(from.size() / columns) + ", " +
                                std::to_string(columns) + ")");
  std::copy(from.begin(), from.end(), out.data());
}

using Pairs = std::vector<std::pair<std::int64_t, std::int64_t>>;
using Places = nb::ndarray<const std::int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// The panels of a matrix (out, in), padded to 64 bytes, and for int8 a scale for each output of a panel.
using PackedSize = std::pair<std::size_t, std::size_t>;
PackedSize packed_size(const std::string& format, std::int64_t out, std::int64_t in) {
  constexpr std::int64_t kMost = std::int64_t{1} << 26;  // the decoder's sizes are smaller
  if (out < 1 || in < 1 || out > kMost || in > kMost)
    throw std::invalid_argument("a matrix must have 1 to 2**26 outputs and inputs, not (" + std::to_string(out) + ", " +
                                std::to_string(in) + ")");
  const WeightType type = weight_type(format);
  const std::size_t panels = (out + kPanel - 1) / kPanel;
  return {(panels * panel_bytes(type, in) + 63) / 64 * 64, type == WeightType::i8 ? panels * kPanel : 0};
}

void check_threads(int num_threads) {
  if (num_threads < 1 || num_threads > 1024) throw std::invalid_argument("threads must be from 1 to 1024");
}

// Return new panels and scales of this size, which `fill` has written on a pool of threads.
template <class F>
nb::tuple packed(PackedSize size, int num_threads, F&& fill) {
  check_threads(num_threads);
  std::unique_ptr<std::uint8_t[]> data;
  std::unique_ptr<float[]> scales;
  {
    const ReleasedGil nogil;
    data = std::make_unique<std::uint8_t[]>(size.first);
    scales = std::make_unique<float[]>(size.second);
    fill(*ThreadPool::shared(num_threads), data.get(), scales.get());
  }
  return nb::make_tuple(owned(std::move(data), {size.first}), owned(std::move(scales), {size.second}));
}

nb::tuple pack_matrix(const Tensor& values, const std::string& dtype, const std::string& format, int num_threads) {
  const Stored matrix = stored(values, dtype);
  const WeightType type = weight_type(format);
  if (!packs_floats(type, matrix.columns))
    throw std::invalid_argument("format '" + format + "' of " + std::to_string(matrix.columns) +
                                " columns is packed from blocks: use pack_blocks");
  return packed(packed_size(format, matrix.rows, matrix.columns), num_threads,
                [&](ThreadPool& threads, std::uint8_t* data, float* scales) {
                  pack(threads, type, matrix, data, scales);
                });
}

auto quantized(const Tensor& values, const std::string& dtype, const std::string& format, int num_threads) {
  const Stored matrix = stored(values, dtype);
  const WeightType type = weight_type(format);
  if (type < WeightType::q8_0 || !packs_floats(type, matrix.columns) || padded_depth(type, matrix.columns) != matrix.columns)
    throw std::invalid_argument("rows of " + std::to_string(matrix.columns) + " values are no whole blocks of '" + format +
                                "', or it is not one of q8_0, q5_0, q4_k, q6_k");
  const std::size_t rows = matrix.rows, bytes = row_bytes(type, matrix.columns);
  check_threads(num_threads);
  std::unique_ptr<std::uint8_t[]> blocks;
  {
    const ReleasedGil nogil;
    blocks.reset(new std::uint8_t[rows * bytes]);
    quantize(*ThreadPool::shared(num_threads), type, matrix, blocks.get());
  }
  return owned(std::move(blocks), {rows, bytes});
}

nb::tuple pack_rows(const Bytes2& blocks, const std::string& format, int num_threads) {
  const WeightType type = weight_type(format);
  if (!has_blocks(type)) throw std::invalid_argument("format '" + format + "' has no blocks: use pack");
  const std::int64_t rows = blocks.shape(0), bytes = blocks.shape(1), inputs = padded_depth(type, 1);
  const std::int64_t block = row_bytes(type, inputs);
  if (bytes % block)
    throw std::invalid_argument("rows have " + std::to_string(bytes) + " bytes, must have whole blocks of " +
                                std::to_string(block));
  const std::int64_t in = bytes / block * inputs;
  return packed(packed_size(format, rows, in), num_threads, [&](ThreadPool& threads, std::uint8_t* data, float*) {
    pack_blocks(threads, type, blocks.data(), rows, in, data);
  });
}

}  // namespace

void bind_decoder(nb::module_& m) {
  m.def("fastest_isa", &fastest_isa, "Return the fastest instruction set of this CPU, whether this build has it or not.");
  m.def(
      "instruction_sets",
      [] {
        nb::list all;
        for (const IsaInfo& isa : instruction_sets()) all.append(nb::make_tuple(isa.name, isa.missing));
        return all;
      },
      "Instruction sets of this build, slowest first: (name, CPU features that are missing; empty if supported).");

  nb::class_<LayerShape>(m, "LayerShape", "The sizes of a layer. kv_layer: whose keys and values it has, -1: its own.")
      .def(nb::init<>())
#define NI_FIELD(name) .def_rw(#name, &LayerShape::name)
      NI_FIELD(n_head) NI_FIELD(n_kv_head) NI_FIELD(head_dim) NI_FIELD(mlp_dim) NI_FIELD(kv_layer)
      NI_FIELD(num_projections) NI_FIELD(value_norm) NI_FIELD(scaled) NI_FIELD(recurrent) NI_FIELD(beside) NI_FIELD(mlp);
#undef NI_FIELD
  nb::class_<StateShape>(m, "StateShape", "The states of recurrent layers: nanoinfer.recurrence.Recurrence without its rule.")
      .def(nb::init<>())
#define NI_FIELD(name) .def_rw(#name, &StateShape::name)
      NI_FIELD(taps) NI_FIELD(num_heads) NI_FIELD(value_dim) NI_FIELD(num_key_heads) NI_FIELD(key_dim) NI_FIELD(norm_groups)
      NI_FIELD(tiled) NI_FIELD(num_pending);
#undef NI_FIELD
  nb::class_<Settings>(m, "DecoderOptions", "The shape of a model, its formats and limits. Decoder checks the values.")
      .def(nb::init<>())
#define NI_FIELD(name) .def_rw(#name, &Settings::name)
      NI_FIELD(vocab_size) NI_FIELD(block_size) NI_FIELD(n_layer) NI_FIELD(n_head) NI_FIELD(n_kv_head)
      NI_FIELD(head_dim) NI_FIELD(n_embd) NI_FIELD(mlp_dim) NI_FIELD(activation) NI_FIELD(norm_placement)
      NI_FIELD(qk_norm) NI_FIELD(embedding_norm) NI_FIELD(embedding_scale) NI_FIELD(residual_scale)
      NI_FIELD(final_scale) NI_FIELD(query_growth) NI_FIELD(query_context) NI_FIELD(learned_positions)
      NI_FIELD(parallel_residual) NI_FIELD(gated_mlp) NI_FIELD(sub_norms) NI_FIELD(rounded_inputs)
      NI_FIELD(num_experts) NI_FIELD(experts_per_token) NI_FIELD(expert_dim) NI_FIELD(normalize_experts)
      NI_FIELD(expert_scale) NI_FIELD(shared_dim) NI_FIELD(shared_gate) NI_FIELD(sigmoid_experts)
      NI_FIELD(experts_beside) NI_FIELD(corrected_experts) NI_FIELD(expert_groups) NI_FIELD(groups_per_token)
      NI_FIELD(group_top) NI_FIELD(sparse) NI_FIELD(layers) NI_FIELD(per_layer_dim) NI_FIELD(latent_rank)
      NI_FIELD(latent_turned) NI_FIELD(latent_plain) NI_FIELD(latent_value) NI_FIELD(latent_query_rank)
      NI_FIELD(latent_epsilon) NI_FIELD(attention_scale) NI_FIELD(attention_gate) NI_FIELD(sinks) NI_FIELD(attention_softcap)
      NI_FIELD(logits_softcap) NI_FIELD(windows) NI_FIELD(rotary) NI_FIELD(frequencies) NI_FIELD(rotary_factors)
      NI_FIELD(recurrence) NI_FIELD(head_rows) NI_FIELD(mtp) NI_FIELD(backbone) NI_FIELD(rule) NI_FIELD(num_states) NI_FIELD(max_num_cached_tokens) NI_FIELD(threads) NI_FIELD(isa) NI_FIELD(packed)
#undef NI_FIELD
      .def_rw("tie_word_embeddings", &Settings::tied)
      .def_rw("norm", &Settings::norm_name)
      .def_rw("norm_weight", &Settings::norm_weight_name)
      .def_rw("norm_epsilon", &Settings::epsilon)
      .def_rw("weights", &Settings::weights_name)
      .def_rw("formats", &Settings::format_names)
      .def_rw("cache", &Settings::cache_name);

  m.def("packed_size", &packed_size, nb::kw_only(), "format"_a, "rows"_a, "columns"_a, "Bytes of the panels of a matrix, and the number of its scales.");
  m.def("pack", &pack_matrix, nb::kw_only(), "values"_a, "dtype"_a, "format"_a, "threads"_a,
        "Pack a matrix (out, in) on all threads; return its panels and scales for Decoder.load_packed. The values are"
        " as in Decoder.load.");
  m.def("quantize", &quantized, nb::kw_only(), "values"_a, "dtype"_a, "format"_a, "threads"_a,
        "Round a matrix to rows of blocks of a GGUF file, (out, bytes of a row), on all threads.");
  m.def("pack_blocks", &pack_rows, nb::kw_only(), "blocks"_a.noconvert(), "format"_a, "threads"_a,
        "The same for the rows of blocks of a GGUF file, (out, bytes of a row), in their format.");

  nb::class_<Guarded>(m, "Decoder",
                      "A model on the CPU. Load every tensor, then open, extend, truncate, fork and close sequences.\n\n"
                      "Raises ValueError or IndexError for invalid arguments; the decoder is then unchanged.")
      .def(
          "__init__",
          [](Guarded* self, const Settings& given, Guarded* owner) {
            DecoderShape shape = given;
            DecoderOptions options = given;
            read_names(given, shape);
            options.weights = weight_type(given.weights_name);
            options.cache = cache_type(given.cache_name);
            for (const auto& [name, parts] : given.format_names)
              for (const auto& [format, rows] : parts)
                options.formats[name].emplace_back(weight_type(format), rows);
            const ReleasedGil nogil;
            new (self) Guarded(shape, options, owner);
          },
          "options"_a, "owner"_a = nb::none(), nb::keep_alive<1, 3>(),
          "owner: a loaded decoder whose embedding and output head this one has, too; with a backbone, its embedding and cache.")
      .def(
          "load",
          [](Guarded& d, const std::string& name, const Tensor& values, const std::string& dtype) {
            d.computed([&name, from = stored(values, dtype)](Decoder& x) { x.load(name, from); });
          },
          "name"_a, "values"_a, "dtype"_a = "float32",
          "Load and pack a tensor by its name in the checkpoint. A matrix is (out, in), with any strides. dtype is"
          " float32, float16, or bfloat16, whose values are given as uint16.")
      .def("load_blocks",
           [](Guarded& d, const std::string& name, const Places& places, std::size_t row_bytes) {
             static_assert(sizeof(RowPlace) == 2 * sizeof(std::int64_t));
             if (places.shape(1) != 2) throw std::invalid_argument("places must be (out, 2)");
             const auto* const rows = reinterpret_cast<const RowPlace*>(places.data());
             d.computed([&](Decoder& x) { x.load_blocks(name, rows, places.shape(0), row_bytes); });
           },
           "name"_a, "places"_a.noconvert(), "row_bytes"_a,
           "Load a matrix from rows of blocks in GGUF files. places: (out, 2), the descriptor of the file that has the row"
           " and the row's offset in bytes. Raises RuntimeError if a row cannot be read; the tensor then counts as not"
           " loaded.")
      .def("load_blocks",
           [](Guarded& d, const std::string& name, const Bytes2& blocks) {
             d.computed([&](Decoder& x) { x.load_blocks(name, blocks.data(), blocks.shape(0), blocks.shape(1)); });
           },
           "name"_a, "blocks"_a.noconvert(), "Load a matrix from rows of blocks in memory: (out, bytes of a row).")
      .def("load_packed", &Guarded::load_packed, "name"_a, "panels"_a.noconvert(), "scales"_a.noconvert(),
           "Use a matrix that `pack` has packed. The panels are kept and not copied. Needs DecoderOptions.packed.")
      .def("load_adapter",
           [](Guarded& d, std::int64_t adapter, const std::string& name, std::int64_t first, const Floats2& a,
              const Floats2& b) {
             if (a.shape(0) != b.shape(1)) throw std::invalid_argument("a must be (rank, in), and b (rows, rank)");
             const auto size = [](std::size_t n) { return static_cast<std::int64_t>(n); };
             const Factors given{a.data(), b.data(), size(a.shape(0)), size(a.shape(1)), size(b.shape(0)), first};
             d.computed([&](Decoder& x) { x.load_adapter(adapter, name, given); });
           },
           nb::kw_only(), "adapter"_a, "name"_a, "first"_a, "a"_a, "b"_a,
           "Add b a x to the outputs of a matrix from `first` on, in sequences of an adapter, from 1 on. a: (rank, in), b:"
           " (rows, rank), which are copied.")
      .def("unload_adapter",
           [](Guarded& d, std::int64_t adapter) { d.locked([=](Decoder& x) { x.unload_adapter(adapter); }); }, "adapter"_a)
      .def("check_loaded", [](Guarded& d) { d.locked([](Decoder& x) { x.check_loaded(); }); },
           "Raise ValueError if a tensor was not loaded.")
      .def("open", [](Guarded& d) { return d.locked([](Decoder& x) { return x.cache().open(); }); })
      .def("fork", [](Guarded& d, std::int64_t h) { return d.locked([h](Decoder& x) { return x.cache().fork(h); }); },
           "handle"_a)
      .def("truncate",
           [](Guarded& d, std::int64_t h, std::int64_t n) { d.locked([=](Decoder& x) { x.cache().truncate(h, n); }); },
           "handle"_a, "length"_a)
      .def("read_blocks",
           [](Guarded& d, std::int64_t h, std::int64_t first, WritableBytes& out) {
             d.computed([&](Decoder& x) {
               check_block_bytes(x.cache(), out.shape(1));
               x.cache().read(h, first, static_cast<std::int64_t>(out.shape(0)), out.data());
             });
           },
           "handle"_a, "first"_a, "out"_a.noconvert(), "Copy blocks of a sequence from `first` on to out, (n, block_bytes).")
      .def("append_blocks",
           [](Guarded& d, std::int64_t h, std::int64_t count, const Bytes2& blocks) {
             d.computed([&](Decoder& x) { append_blocks(x, h, count, blocks); });
           },
           "handle"_a, "count"_a, "blocks"_a.noconvert(),
           "Extend a sequence by `count` positions: (n, block_bytes), its blocks from that of the first new position on.")
      .def("close", [](Guarded& d, std::int64_t h) { d.locked([h](Decoder& x) { x.cache().close(h); }); }, "handle"_a)
      .def("clear", [](Guarded& d) { d.locked([](Decoder& x) { x.cache().clear(); }); }, "Close all sequences.")
      .def("length",
           [](Guarded& d, std::int64_t h) { return d.locked([h](Decoder& x) { return x.cache().length(h); }); },
           "handle"_a)
      .def("blocks_needed",
           [](Guarded& d, std::int64_t h, std::int64_t n) {
             if (n < 0 || n > (std::int64_t{1} << 32)) throw std::out_of_range("count is out of range: " + std::to_string(n));
             return d.locked([=](Decoder& x) { return x.cache().blocks_needed(h, n); });
           },
           "handle"_a, "count"_a, "Return how many blocks extending a sequence by `count` tokens takes from the pool.")
      .def("block_table",
           [](Guarded& d, std::int64_t h) {
             return d.locked([h](Decoder& x) { return std::vector<std::int32_t>(x.cache().table(h)); });
           },
           "handle"_a, "Return the numbers of a sequence's blocks in the pool.")
      .def(
          "extend",
          [](Guarded& d, std::vector<std::int64_t> handles, std::vector<std::int64_t> token_ids,
             std::vector<std::int64_t> num_new, std::vector<std::int64_t> num_logits, Writable logits,
             std::vector<std::int64_t> adapters, Pairs copies, Pairs states, bool all_hidden,
             std::optional<Floats2> previous) {
            const Step step{std::move(handles), std::move(token_ids), std::move(num_new), std::move(num_logits),
                            std::move(adapters), std::move(copies), std::move(states),
                            previous ? previous->data() : nullptr, all_hidden};
            d.computed([&, rows = previous ? previous->shape(0) : 0, columns = previous ? previous->shape(1) : 0](Decoder& x) {
              const bool fits = rows == step.token_ids.size() && columns == static_cast<std::size_t>(x.shape().source_dim());
              if (previous ? !(x.shape().mtp && fits) : x.shape().mtp)
                throw std::invalid_argument("previous must be (tokens, n_embd or backbone) of a model with mtp, and None of another");
              extend(x, step, logits);
            });
          },
          nb::kw_only(), "handles"_a, "token_ids"_a, "num_new"_a, "num_logits"_a,
          "logits"_a.noconvert(),  // a converted copy would be written and discarded
          "adapters"_a = std::vector<std::int64_t>(), "copies"_a = Pairs(), "states"_a = Pairs(),
          "all_hidden"_a = false, "previous"_a = nb::none(),
          "Append tokens to sequences; write logits, (sum(num_logits), logits_stride) float32; none if it has 0 rows."
          " adapters: that of each sequence, 0: none. copies, states: what nanoinfer.kv.states.StatePool.step returns."
          " all_hidden: whether `hidden` has a row for each token, not only for those with logits. previous:"
          " of a model with mtp, the hidden state before each token, (tokens, n_embd or backbone) float32.")
      .def("hidden", [](Guarded& d, Writable out) { d.locked([&](Decoder& x) { copy_hidden(x, out); }); },
           nb::kw_only(), "out"_a.noconvert(),
           "Write the final hidden states of the last step's logits, (sum(num_logits), n_embd); with all_hidden, of its tokens.")
      .def("read_experts_ahead", [](Guarded& d) { d.locked([](Decoder& x) { x.read_experts_ahead(); }); },
           "From here on, ask the system to read the experts of a step from their mapped file before they are multiplied.")
      .def(
          "part_seconds",
          [](Guarded& d) {
            const PartSeconds s = d.locked([](Decoder& x) { return x.part_seconds(); });
            nb::dict all;
            for (const auto& [part, name] : kParts) all[name] = s.*part;
            return all;
          },
          "Return the seconds spent in each part of extend so far.")
      .def(
          "phase_items",
          [](Guarded& d) {
            nb::list all;
            for (const auto& [part, items] : d.locked([](Decoder& x) { return x.phase_items(); })) {
              const auto named = std::find_if(std::begin(kParts), std::end(kParts), [part](auto& p) { return p.first == part; });
              all.append(nb::make_tuple(named == std::end(kParts) ? "rows" : named->second, items));
            }
            return all;
          },
          "Return the phases of the last step, between which all threads wait: (part, number of items).")
      .def_prop_ro("logits_stride", [](Guarded& d) { return d.locked([](Decoder& x) { return x.logits_stride(); }); })
      .def_prop_ro("isa", [](Guarded& d) { return d.locked([](Decoder& x) { return std::string(x.isa()); }); })
      .def_prop_ro("threads", [](Guarded& d) { return d.locked([](Decoder& x) { return x.threads(); }); })
      .def_prop_ro("blocks_free", [](Guarded& d) { return d.locked([](Decoder& x) { return x.cache().blocks_free(); }); })
      .def_prop_ro("blocks_total",
                   [](Guarded& d) { return d.locked([](Decoder& x) { return x.cache().blocks_total(); }); })
      .def_prop_ro("block_bytes", [](Guarded& d) { return d.locked([](Decoder& x) { return x.cache().block_bytes(); }); })
      .def_prop_ro("cache_bytes",
                   [](Guarded& d) {
                     return d.locked([](Decoder& x) { return x.cache().blocks_total() * x.cache().block_bytes(); });
                   })
      .def_prop_ro("state_bytes", [](Guarded& d) { return d.locked([](Decoder& x) { return x.state_bytes(); }); })
      .def_prop_ro("weight_bytes", [](Guarded& d) { return d.locked([](Decoder& x) { return x.weight_bytes(); }); });
}

}  // namespace nanoinfer
