# make run    set up, then run the embedded default        make lint   format, lint, types
# make test   set up, then run the tests                   make clean  remove results and caches
# make bench  set up, then measure speed beside other tools (docs/performance.md is made anew)
# make test-slow   run the tests that take many minutes
# make slurm-up    start a private Slurm in .slurm     make slurm-down  end it

PYTHON ?=
VENV   ?= .venv
BIN     = $(VENV)/bin

# Where home is small: PHAROS_HOME=/scratch/me make setup puts the environment and every cache
# there; the environment remembers it.
PHAROS_HOME ?= $(shell cat $(VENV)/pharos-home 2>/dev/null)
export PHAROS_HOME
ifneq ($(PHAROS_HOME),)
export PIP_CACHE_DIR = $(PHAROS_HOME)/cache/pip
endif

# A stamp is named after the content of what it was made from: touching a file rebuilds nothing.
inputs := $(shell cat pyproject.toml constraints.txt Makefile | (sha256sum 2>/dev/null || shasum -a 256) | cut -c1-16)
RUN_STAMP = $(VENV)/.run-$(inputs)
DEV_STAMP = $(VENV)/.dev-$(inputs)
BENCH_STAMP = $(VENV)/.bench-$(inputs)
PIP = $(BIN)/python -m pip --disable-pip-version-check

.PHONY: setup environment dev setup-bench run test test-slow lint format bench clean slurm-up slurm-down

setup: $(RUN_STAMP)

# Also what `make lint`, `make test` and the target verify run.
dev: $(DEV_STAMP)

run: $(RUN_STAMP)
	$(BIN)/snakemake --profile profiles/local $(SNAKEMAKE_ARGS)
	@echo "Report: results/report/index.html"

test: $(DEV_STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# With the tools that the benches compare with: one of these tests runs them.
test-slow: $(DEV_STAMP) $(BENCH_STAMP)
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

lint: $(DEV_STAMP)
	$(BIN)/ruff format --check src tests benchmarks workflow/scripts
	$(BIN)/ruff check src tests benchmarks workflow/scripts
	$(BIN)/mypy
	$(BIN)/snakefmt --check Snakefile workflow/rules
	$(BIN)/snakemake --lint

format: $(DEV_STAMP)
	$(BIN)/ruff format src tests benchmarks workflow/scripts
	$(BIN)/ruff check --fix src tests benchmarks workflow/scripts
	$(BIN)/snakefmt Snakefile workflow/rules
	$(BIN)/python -m pharos.config_manual workflow/schemas/config.schema.yaml > config/README.md

setup-bench: $(BENCH_STAMP)

# One of the benches asks with the adapter of `make run`, where there is one.
TRAINED = $(wildcard results/finetune/smollm2-135m-instruct/watch/seed1/lora-r16)

bench: $(BENCH_STAMP)
	$(BIN)/python benchmarks/gate_speed.py --output .cache/bench/gate.json
	$(BIN)/python benchmarks/evaluation_speed.py --output .cache/bench/evaluation.json
	$(BIN)/python benchmarks/training_speed.py --output .cache/bench/training.json
	$(BIN)/python benchmarks/precision.py $(addprefix --adapter ,$(TRAINED)) \
		--output .cache/bench/precision.json
	$(BIN)/python benchmarks/performance.py --gather .cache/bench
	$(BIN)/python benchmarks/thread_binding.py
	$(BIN)/python benchmarks/dry_run.py

slurm-up:
	@$(or $(PYTHON),python3) tests/slurm/cluster.py up .slurm $(SLURM_ARGS)
	@echo 'Now: eval "$$($(or $(PYTHON),python3) tests/slurm/cluster.py env .slurm)"; snakemake --profile profiles/slurm'

slurm-down:
	@$(or $(PYTHON),python3) tests/slurm/cluster.py down .slurm

clean:
	rm -rf results .snakemake .cache .mypy_cache .ruff_cache .pytest_cache

environment:
	@tools/make-environment "$(VENV)" "$(PYTHON)"

$(RUN_STAMP): | environment
	$(PIP) install --quiet --constraint constraints.txt --editable .
	rm -f $(VENV)/.run-*
	touch $@

$(DEV_STAMP): $(RUN_STAMP)
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	rm -f $(VENV)/.dev-*
	touch $@

$(BENCH_STAMP): $(RUN_STAMP)
	$(PIP) install --quiet --constraint constraints.txt --editable '.[bench]'
	rm -f $(VENV)/.bench-*
	touch $@
