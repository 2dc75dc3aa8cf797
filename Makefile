# Every target sets itself up: a virtual environment with torch and the build tools, and system packages by apt-get.
#   make test TORCH=2.11.0          the same with another torch, in an environment and a build folder of its own
#   make test PYTHON=python3.13     the same with another Python
DEFAULT_TORCH := 2.15.0
OLDEST_TORCH := 2.11.0
TORCH ?= $(DEFAULT_TORCH)
PYTHON ?= python3
JOBS ?= $(shell nproc)

VENV := .venv$(if $(filter-out $(DEFAULT_TORCH),$(TORCH)),-$(TORCH))$(if $(filter-out python3,$(PYTHON)),-$(notdir $(PYTHON)))
BIN := $(CURDIR)/$(VENV)/bin
# One build folder for each torch minor and Python; setup.py uses the same.
BUILD = build/torch-$(basename $(TORCH))-$(shell $(BIN)/python -c 'import sys; print(sys.implementation.cache_tag)')
# torch may have moved since the build folder was made.
CONFIGURE = '-UBRIMFUL_TORCH_*' -DPython_EXECUTABLE=$(BIN)/python -DCMAKE_MAKE_PROGRAM=$(BIN)/ninja \
  $(if $(BRIMFUL_CUDA),-DBRIMFUL_CUDA=$(BRIMFUL_CUDA))
CPP = $(shell git ls-files -co --exclude-standard '*.h' '*.cpp')

export PYTHON
# Tests run beside each other: OpenMP's threads shall not spin for work that is not there. torch asks for the name of each
# peer of a store: a name server that drops one question in thirty would cost five seconds each time.
test-python test-cuda-sim test-slow smoke soak: export OMP_WAIT_POLICY = passive
test-python test-cuda-sim test-slow smoke soak: export RES_OPTIONS = timeout:1 attempts:1
# Many containers set it. Tests start hundreds of interpreters, each of which would compile what it imports again.
unexport PYTHONDONTWRITEBYTECODE
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-cpp test-consumer test-layers test-python test-cuda-sim test-slow test-oldest smoke wheel sdist soak gpu build \
  package configure lint lint-static stubtest tidy format bench docs pictures asan tsan setup setup-clang \
  setup-browser setup-integrations setup-oldest clean distclean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: package ## Train a small CNN on Fashion-MNIST with two ranks and too little memory
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 examples/train_fashion_mnist.py

test: test-cpp test-consumer test-layers test-python test-cuda-sim ## Run all tests: C++, consumer project, layers, Python, simulated device; it prints the time of each

SIDE_BY_SIDE = --numprocesses $(JOBS) --maxprocesses 4 --dist worksteal
# What a part of `make test` begins with.
TIMED = @tools/timed.sh "make $@"

test-cpp: build
	$(TIMED) $(BIN)/ctest --test-dir $(BUILD) --parallel $(JOBS) --output-on-failure --no-tests=error

# Installed as it was built: without CUDA where its headers are missing.
test-consumer: export BRIMFUL_CUDA ?= AUTO
test-consumer: build
	$(TIMED) $(BIN)/python tests/consumer/run.py $(BUILD)/consumer

test-layers: setup
	$(TIMED) $(BIN)/python tools/check_layers.py

test-python: build
	$(TIMED) $(BIN)/python -m pytest $(SIDE_BY_SIDE)

# The simulated device has to be loaded before torch, so these are processes of their own (csrc/cuda_sim).
SIMULATE = SIM_CUDA_MEMORY_MB=6144 $(BIN)/python csrc/cuda_sim/run.py --libraries
SIMULATED = $(SIMULATE) $(BUILD)/python/brimful/cuda_sim -- $(BIN)/python -m pytest $(SIDE_BY_SIDE)

test-cuda-sim: build ## Run the tests marked gpu on the simulated CUDA device, and that device's own
	$(TIMED) $(SIMULATED) -m "gpu and not real_gpu and not slow" tests/python tests/cuda_sim

# Needs no network and no environment of ours: the Python that is named has the torch for that GPU.
gpu: ## Five minutes on a machine with a GPU; GPU='--list', '--resume --minutes 8', '--part oom' (PYTHON: one with torch)
	@$(PYTHON) -m tools.gpu $(GPU)

soak: build ## Thousands of random faults in random steps of random models (minutes)
	@$(BIN)/python -m pytest -m slow tests/python/faults/test_soak.py

test-slow: build setup-integrations ## Run the tests with trainers, Ray and Optuna, in their environment, and all of torch's operators
	@$(VENV)-integrations/bin/python -m pytest --numprocesses $(JOBS) --maxprocesses 4 --dist loadfile \
	  -m "slow or not slow" tests/integrations tests/python/project/test_migration.py
	@$(SIMULATED) -m "gpu and slow" tests/cuda_sim

# Without optimisation, and by clang++, so that both compilers see the library and its tests.
test-oldest: setup-oldest ## Build and install against the oldest torch that is supported, compile the C++ tests, and run the smoke tests
	@BRIMFUL_BUILD=build/oldest-$(notdir $(PYTHON)) CMAKE_ARGS='-DCMAKE_BUILD_TYPE=Quick -DCMAKE_CXX_COMPILER=clang++' \
	  $(MAKE) smoke TORCH=$(OLDEST_TORCH)

SMOKE_BUILD = $(or $(BRIMFUL_BUILD),$(BUILD))
SMOKE_SIM = $(SMOKE_BUILD)/python/brimful/cuda_sim

# A real installation beside torch, not the build folder; the C++ tests, of the library's objects; and the tests of what
# releases of torch differ in most, on CUDA too.
smoke: setup
	@rm -f $(VENV)/lib/python3*/site-packages/brimful-dev.pth
	@CMAKE_ARGS="$$CMAKE_ARGS -DBRIMFUL_TESTS=ON" \
	  $(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --force-reinstall .
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "smoke and not gpu"
	@$(BIN)/cmake --build $(SMOKE_BUILD) --parallel $(JOBS)
	@$(BIN)/ctest --test-dir $(SMOKE_BUILD) --label-regex '^(gpu|torch)$$' --parallel $(JOBS) --output-on-failure --no-tests=error
	@$(SIMULATE) $(SMOKE_SIM) -- $(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "smoke and gpu" tests/python
	@$(SIMULATE) $(SMOKE_SIM) -- $(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "gpu and not slow" -k "not opinfo" tests/cuda_sim

# torch's and CUDA's libraries stay where pip puts them, and those of the simulated device beside each other.
EXCLUDE := $(foreach lib,libtorch libc10 libcudart libnccl libcuda. libcupti libnvidia-ml,--exclude '$(lib)*')

wheel: setup ## Build a manylinux wheel for this torch and Python, check it in an environment of its own, put it in dist/
	@rm -rf build/wheel
	@$(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheel .
	@PATH="$(BIN):$$PATH" $(BIN)/auditwheel repair $(EXCLUDE) --wheel-dir build/wheel/audited build/wheel/*.whl
	@$(BIN)/python tools/check_wheel.py build/wheel/audited/*.whl build/wheel
	@mkdir -p dist && mv build/wheel/audited/*.whl dist/

sdist: setup ## Put a source distribution in dist/
	@$(BIN)/python -c 'from setuptools import build_meta; build_meta.build_sdist("dist")' >/dev/null

build: package ## Build library, Python module and C++ tests; .venv then imports brimful from the build folder
	@$(BIN)/cmake --build $(BUILD) --parallel $(JOBS)

package: configure
	@$(BIN)/cmake --build $(BUILD) --parallel $(JOBS) --target _C
	@echo "import sys; sys.path.insert(0, '$(CURDIR)/$(BUILD)/python')" \
	  > $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/brimful-dev.pth

configure: setup
	@$(BIN)/cmake --preset dev -B $(BUILD) $(CONFIGURE) --log-level=WARNING

STUBTEST = MYPYPATH=$(BUILD)/python $(BIN)/python -m mypy.stubtest brimful._C --mypy-config-file pyproject.toml \
  --allowlist tools/stubtest.allow
TIDY = $(BIN)/python tools/tidy.py $(BUILD) --jobs $(JOBS)

# mypy uses one processor.
lint: lint-static build ## Check format, style, layers, types; builds, to check the stubs against the module
	@{ $(BIN)/python -m mypy && $(STUBTEST); } & types=$$!; $(TIDY); tidy=$$?; wait $$types && exit $$tidy

lint-static: setup
	@$(BIN)/clang-format --dry-run -Werror $(CPP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python tools/check_layers.py

stubtest: build
	@$(STUBTEST)

# It needs the flags of a build folder, not what is built in it.
tidy: configure
	@$(TIDY)

format: setup ## Rewrite the sources in the project's format
	@$(BIN)/clang-format -i $(CPP)
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

bench: build ## Run all benchmarks; the figures go to build/bench.json
	@$(BIN)/python benchmarks/run.py --json build/bench.json

# Warnings are errors: links between pages, names in the code, headers that doxygen does not understand.
docs: package ## Write the documentation as a site, build/docs/index.html
	@tools/setup.sh $(VENV) $(TORCH) docs
	@PYTHONPATH=$(CURDIR)/$(VENV)/docs $(BIN)/python -m sphinx -W --keep-going -q -j auto docs build/docs

pictures: package ## Draw the documentation's pictures again, from runs on this machine
	@$(BIN)/python tools/pictures/draw.py

asan tsan: setup ## Build the C++ tests under a sanitizer and run them; FOLDERS='base;memory' for these alone
	@$(BIN)/cmake --preset $@ $(CONFIGURE) '-DBRIMFUL_FOLDERS=$(FOLDERS)' --log-level=WARNING
	@$(BIN)/cmake --build build/$@ --parallel $(JOBS)
	@setarch -R $(BIN)/ctest --test-dir build/$@ --parallel $(JOBS) --output-on-failure --no-tests=error

setup: ## Make the environment and install what is missing (the others do it by themselves)
	@tools/setup.sh $(VENV) $(TORCH)

setup-clang setup-browser:
	@tools/setup.sh $(VENV) $(TORCH) $(@:setup-%=%)

setup-integrations: setup
	@tools/setup_integrations.sh $(VENV)

# The environment of test-oldest.
setup-oldest:
	@$(MAKE) setup-clang TORCH=$(OLDEST_TORCH)

clean: ## Remove what was built
	rm -rf build dist python/*.egg-info

distclean: clean ## Remove the environments too
	rm -rf .venv .venv-*
