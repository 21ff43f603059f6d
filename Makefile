# Every target sets up what it needs in .venv inside this folder and reuses it the next time.
PYTHON ?= python3
PIP_ARGS ?=
BIN := .venv/bin
WORKERS ?= 2
RUN ?= runs/qwen3_next-tiny

.PHONY: train test test-slow test-gpu lint format docs golden clean
.DEFAULT_GOAL := help

help:
	@echo "make train      train qwen3_next/tiny on the CPU (about three minutes); again: go on from where it stopped"
	@echo "make test       the whole CPU test suite"
	@echo "make test-slow  the long checks"
	@echo "make test-gpu   the checks on a CUDA device"
	@echo "make lint       formatting, lint, types, imports"
	@echo "make docs       write the tables of docs/gates.md anew"
	@echo "make golden     write the golden first losses of the tiny recipes anew"

.venv/.base: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e .
	@touch $@

.venv/.dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[test,dev]'
	@touch .venv/.base $@

train: .venv/.base
	$(BIN)/zoo fit --config qwen3_next/tiny --trainer.default_root_dir $(RUN) \
		$(if $(wildcard $(RUN)/checkpoints/last.ckpt),--ckpt_path last)

test: .venv/.dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "not slow and not gpu"

test-slow: .venv/.dev
	$(BIN)/python -m pytest -m slow

test-gpu: .venv/.dev
	$(BIN)/python -m pytest -m gpu -rs

lint: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: .venv/.dev
	$(BIN)/python -m zoo.catalogue docs/gates.md

golden: .venv/.dev
	$(BIN)/python -m tests.recipes.golden

clean:
	rm -rf .venv build dist
