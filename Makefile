# `make` lists what there is. Every target sets up .venv first, if it has to.

PYTHON ?= python3.11
# Which torch: 2.13 is what all else here means; `make test TORCH=2.15` and others set up .venv-2.15.
TORCH ?= 2.13
VENV := .venv$(patsubst %,-%,$(filter-out 2.13,$(TORCH)))
RUN := $(VENV)/bin/python
IMAGE_PYTHON ?= python3
# The CUDA lock file where the machine has an NVIDIA GPU, else the CPU one; `make DEVICE=cpu` overrides.
DEVICE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
# Of torch 2.14 and 2.15 there is one build for both: CUDA's, which runs on a CPU, too.
LOCK := .ci/lock/$(if $(filter 2.13,$(TORCH)),$(DEVICE),torch-$(TORCH)).txt
READY := $(VENV)/.ready-$(DEVICE)
$(if $(wildcard $(LOCK)),,$(error TORCH=$(TORCH) has no lock; there are 2.13, 2.14 and 2.15))

# Sources are compiled once, wherever the environment says that each process should do so: tests start many.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup parity parity-full scale gpu test test-quick versions lint types bench docs dist lock clean
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## install what .ci/lock pins into .venv

$(READY): $(LOCK) pyproject.toml
	@echo "Setting up $(VENV) for $(DEVICE) from $(LOCK)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "graphpasses is locked for Python 3.11, $(PYTHON) is " + sys.version.split()[0] + "; run make PYTHON=/path/to/python3.11")'
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r $(LOCK) || { \
	  echo "Set-up failed. torch $(shell sed -n 's/^torch==\([^ ]*\).*/\1/p' $(LOCK)) must be where pip looks:"; \
	  echo "for +cpu builds set PIP_EXTRA_INDEX_URL (PyTorch's CPU wheels) or PIP_FIND_LINKS (a folder of wheels)."; \
	  exit 1; }
	@$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

parity: $(READY) ## train models of every kind, eagerly and as graphs, and compare every bit: one table, 8 minutes
	$(RUN) -m experiments.parity

parity-full: $(READY) ## the same with all models: the tables of docs/results.md, an hour
	$(RUN) -m experiments.fsdp_parity
	$(RUN) -m experiments.graph_trainer_parity
	$(RUN) -m experiments.torchrec_parity
	$(RUN) -m experiments.architectures

# 64 ranks on this machine; --ranks 64 128 256 takes an hour.
scale: $(READY) ## the same on 64 simulated ranks
	$(RUN) -m experiments.scale_parity --ranks 64

# What is locked, where pip reaches it; else what this machine has: its own Python with torch, and the source tree.
gpu: ## what only a GPU can show, on what the machine has: writes experiments/gpu/RESULTS.md
	@if PIP_RETRIES=0 PIP_DEFAULT_TIMEOUT=15 $(MAKE) --no-print-directory setup; then run=$(RUN); else \
	  echo "Not set up: taking $(IMAGE_PYTHON) and the torch that it has."; run=$(IMAGE_PYTHON); fi; \
	  export PYTHONPATH=$(CURDIR); $$run -m experiments.gpu $(GPU_OPTIONS); status=$$?; \
	  if $$run -c 'import pytest' 2>/dev/null; then $$run -m pytest -q -rs -m gpu tests/_torch/test_fake_kernels.py tests/embedding/test_arena.py tests/parity/test_hashing.py tests/proof/test_axioms.py tests/proof/test_offloading.py tests/ops/test_reduce_in_tree.py tests/capture/test_random_state.py tests/fusion || status=1; \
	  else echo "tests marked gpu: skipped, pytest is not installed"; fi; exit $$status

# Two processes, each with whole files, since what is launched once serves a file's tests. What is the same with
# every torch, lint, types and documentation, runs beside them: it is silent, unless it fails, and then so does all.
PYTEST := $(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder
beside = log=$$(mktemp); { $(MAKE) --no-print-directory --keep-going $(1) >$$log 2>&1 || { cat $$log; false; }; } & \
	$(2); status=$$?; wait $$! || { status=1; cat $$log; echo "failed beside the tests: $(1)"; }; rm $$log; exit $$status

test: $(READY) ## lint, types, documentation and tests
	@$(if $(filter 2.13,$(TORCH)),$(call beside,lint types docs,$(PYTEST)),$(PYTEST))

test-quick: $(READY) ## lint, and the tests that start no ranks and are not slow, one case of each
	@$(call beside,lint,$(PYTEST) --quick)

versions: $(READY) ## all tests and parity with one torch, entered into docs/versions.md; TORCH=2.15 takes another
	$(RUN) -m experiments.torch_versions

lint: $(READY) ## ruff, and the layers of imports
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(VENV)/bin/lint-imports --no-logo --cache-dir .ruff_cache/imports

types: $(READY) ## mypy, strict
	$(RUN) -m mypy

docs: $(READY) ## build the documentation into site/, without network
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

bench: $(READY) ## measure, side by side with the baselines
	$(RUN) -m experiments.fsdp_bench
	$(RUN) -m experiments.graph_trainer_bench
	$(RUN) -m experiments.pass_bench
	$(RUN) -m experiments.torchrec_bench
	$(RUN) -m experiments.table_updates
	$(RUN) -m experiments.hash_bench

# The empty environment gets the wheel and what it asks for, and no more; TRY_WITH=python3.12 takes another Python.
TRY_WITH ?= $(PYTHON)
dist: ## build wheel and sdist, check them, and run the quickstart from the wheel in an empty environment
	rm -rf dist build $(VENV)-dist $(VENV)-empty
	$(PYTHON) -m venv $(VENV)-dist
	$(VENV)-dist/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r .ci/lock/dist.txt
	$(VENV)-dist/bin/python -m build --no-isolation
	$(VENV)-dist/bin/twine check --strict dist/*
	$(VENV)-dist/bin/check-wheel-contents dist/*.whl
	$(TRY_WITH) -m venv $(VENV)-empty
	$(VENV)-empty/bin/python -m pip install --quiet --disable-pip-version-check "$$(ls $(CURDIR)/dist/*.whl)[titan]" pytest
	cd dist && ../$(VENV)-empty/bin/python -P -c 'import graphpasses; print("try", graphpasses.__file__)'
	$(VENV)-empty/bin/pytest -q -c /dev/null --rootdir . --import-mode importlib -p no:cacheprovider \
	  -o markers=multiprocess -k quickstart tests/docs/test_examples.py

# Pins that stand stay; UPGRADE=--upgrade renews them. Needs uv (`pip install uv`), which UV_FIND_LINKS or
# UV_EXTRA_INDEX_URL must show the CPU build of torch.
lock: ## renew .ci/lock after a change of pyproject.toml
	uv pip compile --quiet $(UPGRADE) --python-version 3.11 --generate-hashes --no-header --no-annotate \
	  --all-extras pyproject.toml .ci/lock/cpu.in --override .ci/lock/cpu.overrides -o .ci/lock/cpu.txt
	uv pip compile --quiet $(UPGRADE) --python-version 3.11 --generate-hashes --no-header --no-annotate \
	  --all-extras pyproject.toml .ci/lock/cuda.in -o .ci/lock/cuda.txt
	uv pip compile --quiet $(UPGRADE) --python-version 3.11 --generate-hashes --no-header --no-annotate \
	  --all-extras pyproject.toml .ci/lock/torch-2.14.in --override .ci/lock/cpu.overrides -o .ci/lock/torch-2.14.txt
	uv pip compile --quiet $(UPGRADE) --python-version 3.11 --generate-hashes --no-header --no-annotate \
	  --extra titan --extra dev pyproject.toml .ci/lock/torch-2.15.in -o .ci/lock/torch-2.15.txt
	uv pip compile --quiet $(UPGRADE) --python-version 3.11 --generate-hashes --no-header --no-annotate \
	  .ci/lock/dist.in -o .ci/lock/dist.txt

clean: ## delete what make made
	rm -rf .venv .venv-* $(VENV)-empty build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
