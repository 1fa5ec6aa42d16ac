# `make study`, `make test`: the two commands of the README. Both create .venv on first use.

PYTHON ?= python3
BIN := .venv/bin
export TF_CPP_MIN_LOG_LEVEL ?= 2

.PHONY: study test lint clean

study: .venv/ready
	$(BIN)/halfstep study --out study

test: .venv/ready
	$(BIN)/pytest

lint: .venv/ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch .venv/ready

clean:
	rm -rf .venv study
