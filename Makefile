# The two commands: `make finetune` and `make test`. Both set up .venv first; nothing outside this folder changes.
# Variables: PYTHON (the interpreter to build environments with), RECIPE and ARGS (for finetune), PYTEST_ARGS and
# DISTRIBUTED_ARGS (for the tests in one process, and for those in two), CASE (for the benchmarks: one case in place of all),
# OUT and SECONDS (for bench-gpu: where its results go, and how long it may run).

RECIPE ?= recipes/tiny_llama_lora.yaml
ARGS ?=
# A file stays in one process: its tests share models, runs and simulations.
PYTEST_ARGS ?= -n 2 --dist loadfile
DISTRIBUTED_ARGS ?=
CASE ?=

# The first Python that is new enough and can make environments.
PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11; do \
    $$name -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; \
    done)

# More than one thread makes steps as small as those of the tests and of the tiny recipes slower, not faster.
export OMP_NUM_THREADS ?= 1

# Tests start a hundred processes, each of which would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup finetune test test-all test-benchmarks test-distributed test-browser test-oldest lint types figures \
    figures-check bench bench-gpu bench-predicted bench-pages site format clean
.DEFAULT_GOAL := help

help:
	@echo 'make finetune     set up .venv, fine-tune a small model on the CPU ($(RECIPE))'
	@echo 'make test         set up .venv, then format, lint, types, and a case of every kind of test'
	@echo 'make test-all     the same with all cases: every architecture, operator, broken recipe and planted fault; in four'
	@echo '                  processes too'
	@echo 'make test-benchmarks  what the benchmarks do on a GPU, small on the CPU; when benchmarks/ changes'
	@echo 'make test-distributed  the part of `make test` that needs two processes'
	@echo 'make test-browser  the pages that commands write and serve, in an installed chromium'
	@echo 'make test-oldest  set up .venv-oldest, then the core of the tests on the oldest supported versions'
	@echo 'make figures      predict anew what the shipped recipes need: their headers, and what documents quote of them'
	@echo 'make figures-check  which of these figures the code has moved'
	@echo 'make bench        compare ways to save memory on small models, and the result with what is committed'
	@echo 'make bench-gpu    measure all that needs a GPU, what matters most first, into OUT, for SECONDS; goes on where it'
	@echo '                  stopped (CASE=llama2_7b_lora_2048 compares ways to save memory on that case only)'
	@echo 'make bench-predicted  the same without a GPU, simulated at full size'
	@echo 'make bench-pages  write the pages that are generated: evidence with its pictures, and the reference'
	@echo 'make site         set up .venv-docs, build the docs site into build/site and look at it in an installed chromium'
	@echo 'make format       format the code and mend what lint can mend'
	@echo 'make clean        remove environments and caches, not what was trained'

# --- Set-up: runs again only when the versions change. ---

setup: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	$(call install,.venv,constraints.txt,dev)

# What `make finetune` needs: no linters, no DeepSpeed, no trl. An environment that has more serves as well.
.venv/.finetune: pyproject.toml constraints.txt
	$(call install,.venv,constraints.txt,finetune)

.venv/.all: .venv/.installed
	$(call install,.venv,constraints.txt,test-all)

.venv-oldest/.installed: pyproject.toml constraints-oldest.txt
	$(call install,.venv-oldest,constraints-oldest.txt,test-core)

# What builds the site reads the sources and does not import them: neither the package nor torch is installed.
.venv-docs/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo 'No Python 3.11 or later with venv was found.'; exit 1; }
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
	    > .venv-docs/requirements.txt
	.venv-docs/bin/python -m pip install $(if $(CI),--quiet) --constraint constraints.txt --requirement .venv-docs/requirements.txt
	@touch $@

# $(call install,environment,constraints,extra)
define install
	@test -n "$(PYTHON)" || { echo 'No Python 3.11 or later with venv was found. Install one' \
	    '(Debian, Ubuntu: apt install python3 python3-venv) or name it: make PYTHON=/path/to/python3.12'; exit 1; }
	@echo 'Setting up $(1) with the versions of $(2): a few minutes, once.'
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	@# --no-compile: Python compiles what it imports, a tenth of what there is.
	$(cpu_torch) $(1)/bin/python -m pip install --no-compile $(if $(CI),--quiet) --log $(1)/pip.log --constraint $(2) \
	    --editable '.[$(3)]'
	@awk $(sum_of_downloads) $(1)/pip.log; rm $(1)/pip.log
	@# Compile, once, what most processes import: those that start together would each do it.
	@HF_HUB_OFFLINE=1 $(1)/bin/python -c 'import accelerate, datasets, peft, transformers.trainer' 2> /dev/null || true
	@du -sm $(1) | awk '{ print $$2 " takes " $$1 " MB." }'
	@touch $@
endef

# pip's log says what each file that it loads has: "Downloading numpy-2.4.6.whl (16.9 MB)". From a disk or a cache it loads none.
sum_of_downloads = 'BEGIN { mb["kB"] = 0.001; mb["MB"] = 1; mb["GB"] = 1000 } \
    / Downloading .* \([0-9.]+ [kMG]B\)$$/ { gsub(/[()]/, ""); sum += $$(NF - 1) * mb[$$NF] } \
    END { printf "Downloaded %.0f MB.\n", sum }'

# The package index serves torch for Linux with gigabytes of CUDA libraries. TORCH=default takes that one.
TORCH ?= $(if $(PIP_EXTRA_INDEX_URL)$(shell command -v nvidia-smi),default,cpu)
cpu_index = https://download.pytorch.org/whl/cpu
define cpu_torch
@if [ "$(TORCH)" = cpu ] && curl -sfIL -m 10 -o /dev/null $(cpu_index)/torch/; then \
	    echo 'No NVIDIA driver is found: taking the build of torch for CPUs (make TORCH=default takes the other).'; \
	    export PIP_EXTRA_INDEX_URL=$(cpu_index); \
	fi;
endef

# --- The main job. ---

# Every option is given, so that accelerate neither asks nor reads a configuration of the user's.
# DS_ACCELERATOR: else DeepSpeed, which accelerate imports where it is installed, tells that it found no GPU.
finetune: export DS_ACCELERATOR = cpu
finetune: $(if $(wildcard .venv/.installed),.venv/.installed,.venv/.finetune)
	.venv/bin/accelerate launch --quiet --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
	    --num_cpu_threads_per_process $(OMP_NUM_THREADS) scripts/finetune.py $(RECIPE) $(ARGS)

# --- Tests and checks. `make test test-oldest` is what .ci/run has; `make test-all` has every case. ---

test test-all test-benchmarks test-distributed test-browser test-oldest: export HF_HUB_OFFLINE = 1
test test-all test-benchmarks test-distributed test-browser test-oldest: export TOKENIZERS_PARALLELISM = false

# Pages in a real browser are looked at by `make test-browser`: what a machine's browser does is not the package's.
# The tests in two processes and mypy run next to the others: those processes wait for each other most of the time.
test test-oldest: cases = --cases 1
test-all: .venv/.all
test test-all: lint
	@{ $(call launch,2) $(cases) $(DISTRIBUTED_ARGS)$(if $(cases),, && $(call launch,4) $(DISTRIBUTED_ARGS)); } \
	    > .venv/two_processes.log 2>&1 & two=$$!; \
	.venv/bin/mypy > .venv/types.log 2>&1 & types=$$!; \
	status=0; .venv/bin/python -m pytest -m 'not browser' $(cases) $(PYTEST_ARGS) || status=$$?; \
	wait $$two || status=$$?; echo 'In several processes:'; cat .venv/two_processes.log; \
	wait $$types || status=$$?; cat .venv/types.log; exit $$status

# --standalone: on a port that is free.
launch = .venv/bin/python -m torch.distributed.run --standalone --nproc-per-node $(1) -m pytest tests/distributed

test-benchmarks: .venv/.installed
	.venv/bin/python -m pytest tests/benchmarks $(PYTEST_ARGS)

test-browser: .venv/.installed
	.venv/bin/python -m pytest -m browser

test-distributed: .venv/.installed
	$(call launch,2) $(DISTRIBUTED_ARGS)

# Only files that have such tests: to import the others takes each process as long as a hundred tests.
test-oldest: .venv-oldest/.installed
	.venv-oldest/bin/python -m pytest -m core $(cases) $(PYTEST_ARGS) $$(grep -rl 'mark\.core' tests --include='test_*.py')

lint: .venv/.installed
	.venv/bin/ruff format --check
	.venv/bin/ruff check

types: .venv/.installed
	.venv/bin/mypy

# --- Figures of the shipped recipes. ---

figures: .venv/.installed
	.venv/bin/python -m benchmarks.recipe_figures

figures-check: .venv/.installed
	.venv/bin/python -m benchmarks.recipe_figures --check

# --- Benchmarks. ---

bench: .venv/.installed
	.venv/bin/python -m benchmarks.side_by_side.suite --out runs/bench $(addprefix --case ,$(CASE))
	.venv/bin/python -m benchmarks.side_by_side.compare runs/bench

# PYTHON_GPU: an environment of your own whose torch has CUDA; .venv holds whatever torch the constraints led to.
PYTHON_GPU ?= .venv/bin/python
OUT ?= runs/gpu
SECONDS ?= 540
bench-gpu: $(if $(filter .venv/%,$(PYTHON_GPU)),.venv/.installed)
	$(PYTHON_GPU) -m benchmarks.on_gpu --all --out $(OUT) --seconds $(SECONDS) \
	    $(if $(wildcard $(OUT)/results.json),--resume $(OUT)/results.json) $(addprefix --stage side_by_side_,$(CASE))

bench-predicted: .venv/.installed
	.venv/bin/python -m benchmarks.side_by_side.predicted --case $(or $(CASE),all)

bench-pages: .venv/.installed
	.venv/bin/python scripts/benchmark_pages.py
	.venv/bin/python -m benchmarks published_page
	.venv/bin/python -m benchmarks.claims.page
	.venv/bin/python scripts/reference_pages.py

# --- The docs site. ---

site: .venv-docs/.installed
	.venv-docs/bin/python scripts/docs_site.py
	.venv-docs/bin/python -m pytest -q tests/docs/test_site.py

format: .venv/.installed
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

clean:
	rm -rf .venv .venv-oldest .venv-docs .mypy_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
