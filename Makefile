# Everything that people and CI run. `make help` lists the targets; ARGS passes overrides to train and eval.
SHELL := bash
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=
QUICKSTART := examples/quickstart.yaml
# One compute thread per process: processes share the cores, and threads of several processes would fight for them.
export OMP_NUM_THREADS ?= 1
# The environment of the shell must not leak into the project's.
unexport PYTHONPATH VIRTUAL_ENV PYTHONDONTWRITEBYTECODE

# Minutes that each part of the test suite may take.
PYTEST = timeout --kill-after=30 $(1) $(BIN)/python -m pytest -m "($(2)) and not ray and not vllm and not gpu" $(3)

.DEFAULT_GOAL := help
.PHONY: help setup train eval test check format bench nightly integration e2e crash crash-matrix examples docs clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: .venv/.setup-stamp  ## Make .venv with the locked dependencies; does nothing when it is up to date
	@:

.venv/.setup-stamp: pyproject.toml uv.lock scripts/setup.sh
	@bash scripts/setup.sh "$(PYTHON)"
	@touch $@

train: setup  ## Train the quick start team (half a minute on two cores); ARGS="run.seed=1" overrides values
	@$(BIN)/flexmarl train $(QUICKSTART) $(ARGS)

eval: setup  ## Measure the quick start team before training
	@$(BIN)/flexmarl eval $(QUICKSTART) $(ARGS)

test: setup  ## Unit and property tests (at most 8 minutes)
	@$(call PYTEST,8m,unit or property)

integration: setup  ## Parts together, real processes (at most 8 minutes)
	@$(call PYTEST,8m,integration)

e2e: setup  ## The command line trains a small model (at most 6 minutes)
	@$(call PYTEST,6m,e2e)

crash: setup  ## Processes are killed (at most 8 minutes)
	@$(call PYTEST,8m,crash)

crash-matrix: setup  ## Kill every process at every moment and print the table (20 minutes); ARGS="orchestrator" takes a part
	@$(BIN)/python -m flexmarl.testing.crash_matrix $(ARGS)

examples: setup  ## Run every example (at most 5 minutes)
	@$(call PYTEST,5m,examples)

docs: setup  ## Check links, code blocks and generated pages (at most 3 minutes)
	@$(call PYTEST,3m,docs)

check: setup  ## Format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup  ## Format the sources and write the generated documentation
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python scripts/config_reference.py
	$(BIN)/python scripts/promise_tests.py

bench: setup  ## Run every benchmark, quickly; ARGS="" measures in full
	@bash scripts/bench.sh $(if $(filter undefined file,$(origin ARGS)),--quick,$(ARGS))

nightly: setup  ## All tests, with many more random cases, and all benchmarks
	HYPOTHESIS_PROFILE=nightly timeout --kill-after=30 3h $(BIN)/python -m pytest --timeout=1800 -o faulthandler_timeout=2400 -m "not ray and not vllm and not gpu"
	@bash scripts/bench.sh

clean:  ## Remove caches and build outputs, keep .venv and runs
	rm -rf build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests benchmarks examples scripts -name __pycache__ -type d -prune -exec rm -rf {} +
