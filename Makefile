# Everything a person types, on a machine with Python 3.11 or newer, g++ and pip.
#
#   make ready   set up
#   make demo    set up, then train in core and out of core, and compare
#   make test    set up, then run the tests
#   make test-frameworks   install Hugging Face's libraries, Lightning and timm, and train with them
#   make check   format, lint, types, layers
#   make bench   one interleaved benchmark run: JSON rows and a table
#   make bench-throttled   the same with the disk held to a card's rate (needs root)
#   make gpu-gate [SHARD=1]   on a machine with a GPU, with the Python at hand: correctness, then figures

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Compiled modules are kept, whatever the environment says: the tests start a few hundred interpreters.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: ready demo test test-frameworks check bench bench-throttled gpu-gate format clean
.DELETE_ON_ERROR:

ready: $(READY)

demo: $(READY)
	$(BIN)/ooc demo $(ARGS)

# A worker takes over what another has not come to yet, so neighbours stay together and share what they have made.
test: $(READY)
	@echo "The whole suite takes 20 to 40 minutes on two cores; ARGS='tests/vmm' runs a part of it."
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q -n 2 --dist worksteal $(ARGS)

# Constrained to the torch that is there, so that nothing brings another build of it.
test-frameworks: $(READY)
	@echo 'transformers, accelerate, peft, lightning, timm and what they need: about 60 MB. Nothing comes from a hub.'
	$(PIP) -c constraints.txt -e '.[dev,frameworks]'
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q -m frameworks tests/frameworks $(ARGS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: $(READY)
	$(BIN)/python -m benchmarks.cpu $(ARGS)

bench-throttled: $(READY)
	$(BIN)/python -m benchmarks.throttled $(ARGS)

# Nothing is installed: the image brings torch, cuda-bindings, numpy and pytest.
gpu-gate:
	$(PYTHON) -m benchmarks.gpu.gate $(if $(SHARD),--shard $(SHARD)) $(ARGS)

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# torch first, by its exact version: a build with a local version (+cpu) that is installed or offered
# nearby then counts as that version, instead of being replaced while the rest is resolved.
# Each phase says beforehand what it does; pip's own lines follow, unbuffered, with bars on a terminal.
# Modules are compiled when they are first imported: of torch's thousands most never are, and pip does it on one core.
PIP := PYTHONUNBUFFERED=1 $(BIN)/python -m pip install --disable-pip-version-check --no-compile
TORCH := $(shell grep '^torch==' constraints.txt)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("ooc needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Options: make PYTHON=python3.12 ...")'
	@echo 'Setting up $(VENV), once. What pip has not cached is downloaded:'
	@echo '  $(TORCH): by far the largest. About 200 MB as a build for the CPU; several GB where pip takes'
	@echo '    a build for CUDA with its libraries. For the CPU build, stop here and install it yourself first'
	@echo '    (CONTRIBUTING.md, "Set up").'
	@echo '  numpy, scipy, matplotlib and the tools for tests and checks: about 120 MB.'
	@echo 'With the CPU build and a fast line this takes one to three minutes.'
	@echo '1 of 3: a virtual environment in $(VENV)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo '2 of 3: $(TORCH), the long one'
	@$(PIP) "$(TORCH)"
	@echo '3 of 3: everything else, and this package itself'
	@$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@
	@echo 'Set up. The first run also compiles the C++ parts with g++, and keeps them.'

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
