# `make study`, `make test`: the two commands of the README. Both create .venv on first use.

PYTHON ?= python3
BIN := .venv/bin
export TF_CPP_MIN_LOG_LEVEL ?= 2

.PHONY: study test lint clean promise bench mutants mutants-by-hand

study: .venv/ready
	$(BIN)/halfstep study --out study

test: .venv/ready
	$(BIN)/pytest

lint: .venv/ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# The promise, driven through a hundred thousand random rules.
promise: .venv/ready
	HYPOTHESIS_PROFILE=slow $(BIN)/pytest -m slow tests/properties/test_promise_machine.py

# What scaling costs, as ratios within one run: benchmarks/README.md.
bench: .venv/ready
	$(BIN)/python benchmarks/all.py

# What the tests notice: every breakage in tests/mutants, then cosmic-ray's in the pure parts.
mutants: mutants-by-hand .venv-mutants/ready
	$(BIN)/python tests/mutants/score.py $(MUTANTS)

mutants-by-hand: .venv/ready
	$(BIN)/python tests/mutants/check.py

.venv-mutants/ready:
	$(PYTHON) -m venv .venv-mutants
	.venv-mutants/bin/pip install --quiet --disable-pip-version-check cosmic-ray==8.7.0
	touch .venv-mutants/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch .venv/ready

clean:
	rm -rf .venv .venv-mutants study
