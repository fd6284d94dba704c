# dtkernels. `make` alone shows the menu.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.PHONY: help env demo test fuzz oldest stack lint clean report

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.dtkernels-installed
# The oldest Triton that is supported, beside the newest in .venv. Its interpreter needs numpy < 2.4.
OLDEST ?= triton==3.6.0
OLD := $(VENV)-oldest
# The versions that the figures were measured with. PyPI's torch 2.11 brings CUDA: a download of 3 GB, so that make test leaves it out.
MEASURED ?= torch==2.11.0 triton==3.6.0 transformers==5.17.0 numpy<2.4
STACK := $(VENV)-stack
# Where there is no GPU: one version, so that a CPU build of it that pip is set up to find is the one taken.
TORCH_CPU ?= torch==2.13.0
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
# What make fuzz runs.
DEVICE ?= interpreter
SEED ?= 0
SECONDS ?= 600
# Files of tests over the cores, each in one process, in the order that conftest.py gives them. Not where pytest-xdist could not be installed.
JOBS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 8 ? n : 8)))
SPREAD = $(shell $(BIN)/python -c 'import xdist' 2>/dev/null && echo "-n $(JOBS) --dist loadfile --no-loadscope-reorder")

help: ## show this menu
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/'

env: $(STAMP) ## make .venv and install dtkernels in it, with what its demo and tests need

demo: $(STAMP) ## a real encoder and a small OPT before and after apply_to, and a generated kernel
	@$(BIN)/python tools/demo.py $(DEMO_ARGS)

# The interpreter is chosen when Triton is imported, so tests/cpu has processes of its own. All tiers run even if one fails.
test: $(STAMP) ## run every test; those for a GPU skip themselves where there is none
	@failed=
	export OMP_NUM_THREADS=1
	tier() { echo "--- $$*"; env "$$@" || failed="$$failed [$$*]"; }
	tier $(BIN)/python -m pytest $(SPREAD) tests/unit tests/compile
	tier TRITON_INTERPRET=1 $(BIN)/python -m pytest $(SPREAD) tests/cpu
	tier $(BIN)/python -m pytest tests/gpu
	tier $(MAKE) --no-print-directory oldest
	if [ -n "$$failed" ]; then echo "FAILED:$$failed"; exit 1; fi
	echo "all tiers passed"

oldest: $(STAMP) ## the tests of generated kernels again, and the tables' kernels, on the oldest Triton supported
	@if [ ! -e $(OLD)/.installed ]; then
	    $(BIN)/python -m venv $(OLD)
	    $(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > "$$($(OLD)/bin/python -c 'import site; print(site.getsitepackages()[0])')/outer.pth"
	    PIP_COMPILE=0 $(OLD)/bin/python -m pip install -q --disable-pip-version-check --no-deps "$(OLDEST)" "numpy<2.4" || { echo "SKIPPED: $(OLDEST) could not be installed here"; exec $(BIN)/python tools/check_tables.py; }
	    touch $(OLD)/.installed
	fi
	$(OLD)/bin/python -c 'import triton; print("Triton", triton.__version__)'
	TRITON_INTERPRET=1 PYTHONPATH=$(CURDIR) $(OLD)/bin/python -m pytest -q $(SPREAD) tests/cpu/ops/test_ops.py tests/cpu/language/test_published.py tests/cpu/language/test_language_features.py tests/cpu/language/test_language_values.py tests/cpu/language/test_language_programs.py
	PYTHONPATH=$(CURDIR) $(OLD)/bin/python -m pytest -q $(SPREAD) tests/compile/test_targets.py tests/compile/test_triton_workarounds.py tests/compile/test_lane_order.py tests/compile/test_register_spills.py
	PYTHONPATH=$(CURDIR) $(OLD)/bin/python tools/check_tables.py  # shipped kernels are built by this Triton: some are built anew and compared

stack: ## the tests of models, torch.compile and fuse with the versions that figures are measured with: downloads 3 GB
	@if [ ! -e $(STACK)/.installed ]; then
	    $(PYTHON) -m venv $(STACK)
	    $(STACK)/bin/python -m pip install -q --disable-pip-version-check $(foreach p,$(MEASURED),'$(p)') pyyaml safetensors pytest pytest-xdist hypothesis peft accelerate
	    touch $(STACK)/.installed
	fi
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR) $(STACK)/bin/python -m pytest -q -n $(JOBS) -p no:cacheprovider tests/cpu/huggingface tests/cpu/torch_compile tests/cpu/training tests/cpu/fuse tests/cpu/runtime

fuzz: $(STAMP) ## random programs against float64 for SECONDS on DEVICE (interpreter or cuda), cases of SEED
	@$(BIN)/python tests/fuzz.py --device $(DEVICE) --seed $(SEED) --seconds $(SECONDS)

tables: $(STAMP) ## build the kernels of every schedule table; needs no GPU
	@$(BIN)/python tools/build.py
	@$(BIN)/python tools/write_manifests.py

lint: $(STAMP) ## ruff, types, and that tables of the benchmarks page are those of their files
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m mypy
	@$(BIN)/python tools/embed_benchmark_tables.py docs/benchmarks.md --check

report: $(STAMP) ## draw every table's measurements: HTML and PNGs under docs/report
	@$(BIN)/python tools/report.py

clean: ## remove the environment, caches and build outputs
	rm -rf $(VENV) $(OLD) $(STACK) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find dtkernels integrations schedule_tables tools tests -name __pycache__ -prune -exec rm -rf {} +

# Three cases: no GPU; a GPU whose python3 already has torch (kept, also without a network); a GPU and a bare python3.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "dtkernels needs Python 3.10 or newer; set PYTHON="; exit 1; }
	$(PYTHON) -m venv $(VENV)
	export PIP_COMPILE=0  # most modules of the dependencies are never imported
	pip() { $(BIN)/python -m pip --disable-pip-version-check "$$@"; }
	if ! nvidia-smi -L >/dev/null 2>&1; then
	    echo "--- no NVIDIA GPU: installing the CPU build of torch"
	    local_build() { pip install "$(TORCH_CPU)+cpu" 2>/dev/null; }
	    torch_index() { pip install --retries 1 --timeout 20 --index-url $(TORCH_CPU_INDEX) "$(TORCH_CPU)+cpu" 2>/dev/null; }
	    local_build || torch_index || pip install "$(TORCH_CPU)"
	    pip install -e '.[test,demo]'
	elif $(PYTHON) -c 'import torch' 2>/dev/null; then
	    echo "--- NVIDIA GPU, and $(PYTHON) has torch: the environment sees its packages"
	    $(PYTHON) -c 'import site; print(*site.getsitepackages(), sep="\n")' > "$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')/outer.pth"
	    pip uninstall -qy setuptools 2>/dev/null  # an old one that venv brings would hide the outer one
	    PIP_RETRIES=1 PIP_DEFAULT_TIMEOUT=10 pip install -e '.[test,demo]' || {
	        echo "--- no network: installing dtkernels alone, on the packages that are there"
	        pip install --no-deps --no-build-isolation -e .
	    }
	else
	    echo "--- NVIDIA GPU: installing torch with CUDA"
	    pip install -e '.[test,demo]'
	fi
	touch $@
