# Two commands do all on a fresh machine: `make train` and `make test`. Each makes .venv if need be.
.DEFAULT_GOAL := help
.PHONY: help install train test lint format long bench clean

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Further arguments for pip, such as an index that serves CPU builds of torch.
PIP_FLAGS ?=
# Hydra overrides for `make train`, such as ARGS="trainer.max_steps=50 strategy@trainer.strategy=chimera_gpipe".
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_FLAGS) -c constraints/tested.txt
TESTS := $(wildcard tests/unit tests/distributed tests/recipes tests/docs tests/cluster)
# One thread per process: the tests start several ranks on few cores. Nothing may reach for the network.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.installed ## make .venv and install the package with its tools, editable

# The stamp makes a second call install nothing. torch first: it decides which build everything else sees.
$(VENV)/.installed: pyproject.toml constraints/tested.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) "$$(grep '^torch==' constraints/tested.txt)"
	$(PIP_INSTALL) -e '.[dev]'
	touch $@

train: install ## train a small GPT-2 as a Chimera pipeline of 2 ranks on real text (minutes on 2 cores)
	$(BIN)/lightning-chimera-train --config-name gpt2_tiny $(ARGS)

lint: install ## style, types, import rules, unused dependencies
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/deptry .

format: install ## rewrite the code in the house style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

test: lint ## lint, and all tests of the CI budget
	$(TEST_ENV) $(BIN)/python -m pytest $(TESTS)

long: install ## what is too long for CI
	$(TEST_ENV) $(BIN)/python -m pytest -m long $(TESTS)

bench: install ## measure what docs/performance.md shows, on a machine with nothing else to do
	$(TEST_ENV) $(BIN)/python docs/make_performance.py measure

clean: ## remove .venv and what tools left behind, not the runs
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
