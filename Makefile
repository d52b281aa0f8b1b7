# make setup       .venv with everything pinned, and the build
#                  (LOCKED=1: only files with the hashes of the lock, requirements/cpu-3.*.lock)
# make quickstart  three tiny models behind one OpenAI endpoint (sets up first)
# make test        the checks and tests, beside each other (sets up first)
# make thorough    the same with every model, option, fault and example; CI runs it
# make quick       ruff and the tests of the packages without I/O, in about a minute (sets up first)
# make contract    whether a vLLM is as MuxServe needs it, by its sources (VLLM=version or path); docs/vllm.md
# make docs        the documentation as a site, in build/site
# make bench       every benchmark; results go to benchmarks/results/
# make soak        real fleets under load and faults for an hour (SOAK_ARGS); docs/reliability.md has what came of it
# make gpu-test    every test that needs a GPU, with GPU_PYTHON; says so where there is none
# make gpu-trial   fifteen minutes on a GPU, the most decisive first; TRIAL_ARGS="--list" says what (docs/gpu.md)
# make gpu-trial-stub  the same list with little work, on stand-ins of the driver: whether every step runs (STUB_ARGS)
# make wheel       dist/*.whl for machines without a compiler, with PYTHON (docs/vllm.md)
# make arm64       the C++ tests compiled for arm64 and run by QEMU
# make gpu-native  the memory manager for NATIVE_PYTHON, beside the sources: for a GPU machine that cannot build
SHELL := /bin/bash
# The first Python that fits: one of these versions, which can make virtual environments and build C++ modules. 3.11 is
# the one on which all tests run.
FITS := import ensurepip, os, sys, sysconfig, venv; \
	sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 13) \
	and os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))))
PYTHON ?= $(shell for each in python3.11 python3.12 python3.13 python3; do \
	$$each -c '$(FITS)' 2>/dev/null && command -v $$each && break; done)
VENV := .venv
BIN := $(VENV)/bin
CPP := $(shell find memory_manager -name '*.cpp' -o -name '*.hpp' 2>/dev/null)
FLEET ?= configs/quickstart.yaml
PORT ?= 8000
PYTEST_ARGS ?=
VLLM ?= 0.32.0 0.33.0
# Where vLLM's CUDA build is for the stand-ins: of the version that requirements pin, or of another one.
STUB := build/cuda-stub$(if $(filter-out 0.32.0,$(firstword $(VLLM))),-$(firstword $(VLLM)))
SOAK_ARGS ?= --minutes 60
TRIAL_ARGS ?= --minutes 14
# Looks at the machine before a download, and shows how far pip and the build are.
SETUP = $(PYTHON) tools/setup.py
PYTHON_VERSION = $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
# LOCKED=1 installs only files whose hashes the lock of this Python has (tools/lock.py).
PINNED = requirements/$(if $(LOCKED),cpu-$(PYTHON_VERSION).lock,cpu.txt)
PINS = $(if $(LOCKED),--require-hashes )-r $(PINNED)
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
NATIVE_PYTHON ?= python3.12

.PHONY: setup quickstart test thorough quick lint contract unit cpp docs bench soak gpu-test gpu-trial gpu-trial-stub gpu-native cuda-stub wheel arm64 clean
.DELETE_ON_ERROR:

setup: $(VENV)/.built

$(VENV)/.installed: requirements/cpu.txt
	@test -n "$(PYTHON)" && $(PYTHON) -c '$(FITS)' || { echo "MuxServe needs Python 3.11, 3.12 or 3.13 with venv and Python.h" \
	  "($(or $(PYTHON),none was found)); set PYTHON=/path/to/python"; exit 1; }
	@$(SETUP) check
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing pinned packages into $(VENV) (about 2 GB to download, a few minutes the first time)"
	@$(SETUP) torch $(PINNED) $(BIN)/python
	@$(SETUP) install $$(grep -c == $(PINNED)) $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --no-deps $(PINS)
	@touch $@

$(VENV)/.built: $(VENV)/.installed pyproject.toml CMakeLists.txt $(CPP)
	@echo "Building the memory manager"
	@PATH="$(abspath $(BIN)):$$PATH" $(SETUP) build $(BIN)/python -m pip install --disable-pip-version-check -v --no-build-isolation --no-deps -e .
	@printf '#!%s\nfrom muxserve.vllm.command import main\nmain()\n' "$(abspath $(BIN)/python)" > $(BIN)/vllm
	@chmod +x $(BIN)/vllm
	@touch $@
	@echo "MuxServe is installed. For the command muxserve in this shell: source $(BIN)/activate"

quickstart: setup
	@$(BIN)/muxserve deploy $(FLEET) --port $(PORT) --demo

test: setup build/triton/.installed build/ray/.installed build/plan/.installed build/shipping/.installed
	@tests/run_all.sh --all $(BIN)/python

thorough: export MUXSERVE_TESTS := thorough
thorough: test

quick: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@tests/run_all.sh --quick $(BIN)/python

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@git ls-files '*.cpp' '*.hpp' | xargs -r $(BIN)/clang-format --dry-run --Werror

contract: setup
	@status=0; for each in $(VLLM); do $(BIN)/python -m muxserve.vllm.contract $$each || status=1; done; exit $$status

cpp: setup
	@PATH="$(abspath $(BIN)):$$PATH" memory_manager/run_tests.sh

arm64:
	@memory_manager/run_tests.sh arm64

WHEEL_ENVIRONMENT = build/wheel/environment-$(PYTHON_VERSION)
wheel:
	@test -x $(WHEEL_ENVIRONMENT)/bin/python || $(PYTHON) -m venv $(WHEEL_ENVIRONMENT)
	@$(WHEEL_ENVIRONMENT)/bin/python -m pip install --disable-pip-version-check --progress-bar off --quiet --no-deps -r requirements/wheel.txt
	@rm -f build/wheel/*.whl && $(WHEEL_ENVIRONMENT)/bin/python -m pip wheel --disable-pip-version-check --quiet --no-deps -w build/wheel .
	@PATH="$(abspath $(WHEEL_ENVIRONMENT))/bin:$$PATH" auditwheel repair --wheel-dir dist build/wheel/*.whl

build/triton/.installed: requirements/kernels.txt | setup
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --quiet --no-deps --upgrade --target build/triton -r $<
	@touch $@

build/ray/.installed: requirements/ray.txt | setup
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --quiet --no-deps --upgrade --target build/ray -r $<
	@touch $@

build/plan/.installed: requirements/plan.txt | setup
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --quiet --no-deps --upgrade --target build/plan -r $< \
	  && touch $@ || echo "Tests of measured kernels are skipped: their tables could not be installed"

build/shipping/.installed: requirements/shipping.txt | setup
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --quiet --no-deps --upgrade --target build/shipping -r $< \
	  && touch $@ || echo "Tests of deploy/ are skipped: their tools could not be installed"

unit: setup build/triton/.installed build/ray/.installed build/plan/.installed build/shipping/.installed
	@tests/run_all.sh $(BIN)/python $(PYTEST_ARGS)

build/docs/.installed: requirements/docs.txt
	@test -x build/docs/bin/python || $(PYTHON) -m venv build/docs
	@build/docs/bin/python -m pip install --disable-pip-version-check --progress-bar off --quiet --no-deps -r $<
	@touch $@

docs: build/docs/.installed
	@NO_MKDOCS_2_WARNING=1 build/docs/bin/mkdocs build --strict --quiet
	@cp configs/fleet.schema.json build/site/
	@echo "Open build/site/index.html"

bench: setup
	@for b in memory_manager scheduler gateway serving_cpu; do echo "== $$b"; $(BIN)/python benchmarks/$$b.py || exit 1; done

soak: setup
	@$(BIN)/python -m tests.soak.run $(SOAK_ARGS)

# vLLM's CUDA build on stand-ins of the driver and NVML; installed beside the environment, whose vLLM is the CPU's.
$(STUB)/.installed: requirements/$(notdir $(STUB)).txt requirements/cuda-libraries.txt | setup
	@echo "Installing vLLM's CUDA build into $(@D) (3.2 GB to download, 5.6 GB on disk, a few minutes)"
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --quiet --no-deps --no-compile --upgrade --target $(@D) -r $<
	@touch $@

cuda-stub: $(STUB)/.installed
	@CUDA_STUB_WHEELS=$(STUB) $(BIN)/python -m pytest -o timeout=5000 tests/cuda_stub $(PYTEST_ARGS)

gpu-test:
	@$(GPU_PYTHON) -m tests.gpu.run $(PYTEST_ARGS)

gpu-trial:
	@$(GPU_PYTHON) -m tests.gpu.trial $(TRIAL_ARGS)

gpu-trial-stub: $(STUB)/.installed
	@CUDA_STUB_WHEELS=$(STUB) $(BIN)/python -m tests.cuda_stub.stand_ins $(BIN)/python -m tests.gpu.trial --rehearse \
	  --minutes 240 --out build/trial.json $(STUB_ARGS)

gpu-native:
	@$(NATIVE_PYTHON) -m venv build/native-venv
	@build/native-venv/bin/python -m pip install --disable-pip-version-check --quiet scikit-build-core nanobind cmake ninja
	@rm -rf build/native && PATH="$(abspath build/native-venv/bin):$$PATH" build/native-venv/bin/python -m pip install \
	  --disable-pip-version-check --quiet --no-build-isolation --no-deps --target build/native .
	@mkdir -p muxserve/memory/bin && cp build/native/muxserve/memory/_native*.so muxserve/memory/ \
	  && cp build/native/muxserve/memory/bin/* muxserve/memory/bin/
	@ls muxserve/memory/_native*.so muxserve/memory/bin/*

clean:
	rm -rf build $(VENV)
