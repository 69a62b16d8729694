.DEFAULT_GOAL := help
SHELL := /bin/bash

LOCK := requirements/lock-py311.txt
LOCK_LATEST := requirements/lock-py312.txt
LOCK_VLLM := requirements/lock-vllm-py311.txt
LOCK_DOCS := requirements/docs-py311.txt

# Running it is the test: a version manager's stand-in may lie on PATH without the version behind it.
find_python = $(shell for name in python$(1) python3; do \
	"$$name" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != "$(1)")' 2>/dev/null && echo "$$name" && break; done)
PYTHON ?= $(call find_python,3.11)
PYTHON_LATEST ?= $(call find_python,3.12)
VENV = $(if $(PYTHON),$(shell "$(PYTHON)" tools/environment.py path $(LOCK)))
VENV_LATEST = $(if $(PYTHON_LATEST),$(shell env -u MEGATRON_RL_VENV "$(PYTHON_LATEST)" tools/environment.py path $(LOCK_LATEST)))

# The package is found in this checkout, not in the environment, which other checkouts share.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
export OMP_NUM_THREADS ?= 1

.PHONY: help
help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

.PHONY: python
python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 not found. Install python3.11 and python3.11-venv, or set PYTHON=/path/to/python3.11"; exit 1; }

.PHONY: setup
setup: python ## install the locked dependencies into a cached environment outside the checkout
	@"$(PYTHON)" tools/environment.py install $(LOCK)

.PHONY: demo
demo: setup ## train a tiny agent on the CPU; prints its success and that of its controls
	@"$(VENV)/bin/python" examples/frozen_lake/demo.py

.PHONY: test
test: python ## everything a change must pass: setup, lint, unit, distributed, HF, demo
	@"$(PYTHON)" tools/lanes.py --python "$(VENV)/bin/python"

.PHONY: lint
lint: setup ## ruff check, ruff format --check, mypy
	@"$(PYTHON)" tools/lanes.py --python "$(VENV)/bin/python" lint

.PHONY: test-unit
test-unit: setup ## tests of one process
	@"$(PYTHON)" tools/lanes.py --python "$(VENV)/bin/python" unit

.PHONY: test-dist
test-dist: setup ## the whole layout matrix on up to 8 gloo ranks with real Megatron, as a table (make test runs a covering subset)
	@"$(PYTHON)" tools/lanes.py --python "$(VENV)/bin/python" matrix

.PHONY: test-hf
test-hf: setup ## every HF family under every layout against transformers, as a table (make test runs a covering subset)
	@"$(PYTHON)" tools/lanes.py --python "$(VENV)/bin/python" hf-matrix

.PHONY: test-slurm
test-slurm: setup ## real training on a real SLURM of four nodes on this machine: launchers, faults, requeue (make test runs the core)
	@"$(PYTHON)" tools/lanes.py --python "$(VENV)/bin/python" slurm-all

.PHONY: test-full
test-full: setup ## every test, also the slow ones, the soak and Python 3.12 (two hours and more); what the machine lacks is skipped with a reason
	@"$(PYTHON)" tools/lanes.py --python "$(VENV)/bin/python" lint full demo vllm-full soak
	@if [ -n "$(PYTHON_LATEST)" ]; then $(MAKE) --no-print-directory test-latest; else echo "skipped: Python 3.12 and the newest Megatron-Core (make test-latest says what is needed)"; fi

.PHONY: test-latest
test-latest: ## unit, distributed and HF tests on Python 3.12 and the newest Megatron-Core
	@test -n "$(PYTHON_LATEST)" || { echo "Python 3.12 not found (Megatron-Core 0.19.2 needs it). Install python3.12 and python3.12-venv, or set PYTHON_LATEST=/path/to/python3.12"; exit 1; }
	@env -u MEGATRON_RL_VENV "$(PYTHON_LATEST)" tools/environment.py install $(LOCK_LATEST)
	@"$(PYTHON_LATEST)" tools/lanes.py --python "$(VENV_LATEST)/bin/python" unit dist hf

.PHONY: setup-vllm
setup-vllm: python ## install vLLM for CPUs beside Megatron-Core, into an environment of its own (2.4 GB)
	@env -u MEGATRON_RL_VENV "$(PYTHON)" tools/environment.py install $(LOCK_VLLM)

.PHONY: test-vllm
test-vllm: python ## tests with a real vLLM: install, in-process engine, a server, weight updates, faults
	@"$(PYTHON)" tools/lanes.py --python "$(VENV)/bin/python" vllm

.PHONY: demo-vllm
demo-vllm: setup-vllm ## the demo's task learned from vLLM rollouts, asynchronously (under 10 minutes on two cores)
	@"$$("$(PYTHON)" tools/environment.py path $(LOCK_VLLM))/bin/python" examples/frozen_lake/demo_vllm.py

.PHONY: docs
docs: python ## build the pages of docs/ and of the docstrings into build/docs; broken links and missing docstrings fail
	@env -u MEGATRON_RL_VENV "$(PYTHON)" tools/environment.py install $(LOCK_DOCS)
	@"$$(env -u MEGATRON_RL_VENV "$(PYTHON)" tools/environment.py path $(LOCK_DOCS))/bin/properdocs" build

.PHONY: clean
clean: ## remove caches and build leftovers of this checkout (the cached environment stays)
	@find . -name .git -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
	@rm -rf .hypothesis .pytest_cache .ruff_cache .mypy_cache build dist megatron_rl.egg-info
