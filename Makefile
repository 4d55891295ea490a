# Octavo's commands. `make demo` shows it, `make test` proves it.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test check bench clients format clean python soak

help:  ## What there is to type
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

python:
	@command -v $(PYTHON) >/dev/null || { echo "No $(PYTHON) here. On Debian: sudo apt-get install python3 python3-venv"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Octavo needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "Python's venv module is missing. On Debian: sudo apt-get install python3-venv"; exit 1; }

# torch first, by its own requirement: a plain range could bring a CUDA build of several gigabytes. One that is there
# stays, unless pyproject.toml's range refuses it.
$(BIN)/octavo: pyproject.toml | python
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing Octavo into $(VENV) (PyTorch is the large part) ..."
	@$(BIN)/python -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null || $(PIP) install --quiet '$(TORCH)'
	@$(PIP) install --quiet -e .
	@touch $@

$(VENV)/dev: pyproject.toml constraints.txt $(BIN)/octavo
	@echo "Installing what the tests need ..."
	@$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	@$(PIP) check
	@touch $@

demo: $(BIN)/octavo  ## A real model answers, then 32 prompts at once
	@$(BIN)/octavo pull smollm2
	@$(BIN)/octavo demo

test: $(VENV)/dev  ## The whole test suite
	@$(BIN)/octavo pull smollm2
	@$(BIN)/octavo pull gemma3-270m
	$(BIN)/pytest -n 2

check: $(VENV)/dev  ## All static checks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/dev  ## Benchmarks on this machine, side by side with transformers and the peers in .peers
	$(BIN)/python benchmarks/cpu.py --quick
	$(BIN)/python benchmarks/host_cost.py
	$(BIN)/python benchmarks/memory.py

soak: $(VENV)/dev  ## Twenty minutes of mixed load on a server: nothing leaks, nobody gets an error unasked
	@$(BIN)/octavo pull smollm2
	$(BIN)/python benchmarks/soak.py

clients: $(BIN)/octavo  ## Other people's clients against the server, each in its own environment
	@$(BIN)/octavo pull smollm2
	PYTHON=$(BIN)/python TORCH='$(TORCH)' scripts/clients.sh

format: $(VENV)/dev  ## Let ruff format and mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove the environment and build products
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache
