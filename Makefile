# make demo    set everything up and clean a noisy label set
# make test    set everything up and run the tests
# make docs    build the documentation into site/
# make notebooks  run its notebooks again
# make install the set-up alone

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
BENCHOPT := .venv-benchopt

.PHONY: install demo test test-slow test-gpu test-benchopt check format clean

install: $(STAMP)

# torch goes first and alone, so that no other package chooses its version.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "nhgd needs Python 3.10 or newer; this is " + sys.version.split()[0] + ". Name another one: make PYTHON=python3.12 install")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing (once; a few minutes on a slow line) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch numpy setuptools
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[cli,sweep,postgresql,tensorboard,dev,docs]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps curvlinops-for-pytorch
	@touch $(STAMP)

demo: $(STAMP)
	@$(BIN)/nhgd demo

test: $(STAMP)
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not gpu"

test-slow: $(STAMP)
	@$(BIN)/python -m pytest -n 2 -m "slow and not gpu"

test-gpu: $(STAMP)
	@$(BIN)/python -m pytest -m gpu

# JAX and benchopt are of no use to anything else here, and have an environment of their own.
$(BENCHOPT)/.installed: constraints.txt
	@$(PYTHON) -m venv $(BENCHOPT)
	@$(BENCHOPT)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch numpy setuptools
	@$(BENCHOPT)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt benchopt jax jaxlib pandas pyarrow pytest hypothesis
	@$(BENCHOPT)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation --no-deps -e .
	@touch $@

test-benchopt: $(BENCHOPT)/.installed
	@$(BENCHOPT)/bin/python -m pytest tests/test_benchmark_bilevel.py

check: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

.PHONY: docs notebooks
notebooks: $(STAMP)
	@$(BIN)/python docs/notebooks.py

docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(BENCHOPT) build site *.egg-info .pytest_cache .mypy_cache .ruff_cache runs
