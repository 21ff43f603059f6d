# Every target sets up what it needs in .venv inside this folder and reuses it the next time.
PYTHON ?= python3
PIP_ARGS ?=
BIN := .venv/bin
WORKERS ?= 2
RUN ?= runs/qwen3_next-tiny
# Triton, a gigabyte, lies above .venv and not in it. The version is that whose interpreter tests/triton knows; it is not in
# constraints.txt, since a CUDA build of torch brings its own.
TRITON := .venv-triton
TRITON_VERSION := 3.9.0

JOBS ?= 2

.PHONY: train test test-slow test-triton test-gpu results lint format docs golden clean
.DEFAULT_GOAL := help

help:
	@echo "make train      train qwen3_next/tiny on the CPU (about three minutes); again: go on from where it stopped"
	@echo "make test       the whole CPU test suite"
	@echo "make test-slow  the long checks"
	@echo "make test-triton  fla's kernels on the CPU, under Triton's interpreter"
	@echo "make test-gpu   the checks on a CUDA device"
	@echo "make results    train the comparisons of docs/results.md (some hours; again: go on), and write it"
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

$(TRITON)/.base: .venv/.dev Makefile
	$(BIN)/python -m venv --clear --without-pip $(TRITON)
	$(BIN)/python -m pip --python $(TRITON)/bin/python install --quiet --disable-pip-version-check --no-deps $(PIP_ARGS) \
		triton==$(TRITON_VERSION)
	$(BIN)/python -c "from sysconfig import get_path; \
		print(f'import site; site.addsitedir({get_path(\"purelib\")!r})')" \
		> $$($(TRITON)/bin/python -c "from sysconfig import get_path; print(get_path('purelib'))")/zoo-base.pth
	@touch $@

train: .venv/.base
	$(BIN)/zoo fit --config qwen3_next/tiny --trainer.default_root_dir $(RUN) \
		$(if $(wildcard $(RUN)/checkpoints/last.ckpt),--ckpt_path last)

test: .venv/.dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "not slow and not gpu"

test-slow: .venv/.dev
	$(BIN)/python -m pytest -m slow

test-triton: $(TRITON)/.base
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(TRITON)/bin/python -m pytest tests/triton -n $(WORKERS) --dist worksteal

test-gpu: .venv/.dev
	$(BIN)/python -m pytest -m gpu -rs

results: .venv/.base
	OMP_NUM_THREADS=1 $(BIN)/python docs/results/make.py --jobs $(JOBS)

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
	rm -rf .venv $(TRITON) build dist
