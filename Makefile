# Every target makes .venv and installs what it needs.
#   PYTHON  the interpreter that makes .venv (3.11 or newer)
#   TORCH   the torch requirement, e.g. TORCH="torch==2.13.0"; pip's own configuration chooses the index
PYTHON ?= python3
TORCH ?= torch>=2.11
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-quick lint parity bench clean

demo: .venv/installed-train ## Train a small model on this machine, through an interruption.
	$(BIN)/python examples/demo.py

test: .venv/installed-dev ## All tests.
	$(BIN)/python -m pytest tests/unit tests/contract -n auto
	$(BIN)/python -m pytest tests/train tests/e2e

test-quick: .venv/installed-dev ## What needs no training processes.
	$(BIN)/python -m pytest tests/unit tests/contract -n auto -m "not train and not slow"

lint: .venv/installed-dev ## Style, types, and which room may import which.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

parity: .venv/installed-dev ## The whole parity table: every legal layout on up to 8 ranks against one process (an hour).
	$(BIN)/python tests/train/parity_run.py --full

bench: .venv/installed-dev ## Tables of speed on this machine.
	for file in benchmarks/*.py; do $(BIN)/python $$file || exit 1; done

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "chimera_sm needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv

.venv/installed-train: pyproject.toml | .venv/bin/python
	$(PIP) "$(TORCH)" -e ".[train,data]"
	touch $@

.venv/installed-dev: pyproject.toml | .venv/bin/python
	$(PIP) "$(TORCH)" -e ".[dev]"
	touch $@ .venv/installed-train

clean:
	rm -rf .venv
