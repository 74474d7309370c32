# The README's two commands are `make demo` and `make test`; each sets everything up first.
PY := .venv/bin/python
.DEFAULT_GOAL := help

.PHONY: help setup demo test test-fast lint format types tables check-tables gpu-test bench lock clean

help:           ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

setup:          ## .venv with pinned dependencies (a no-op when it is up to date)
	@python3 scripts/setup.py

demo: setup     ## pack the embedded model, serve it, ask it, measure it
	@.venv/bin/moet demo

test: setup lint types check-tables   ## everything CI checks
	$(PY) -m pytest -m "not gpu"

test-fast: setup   ## the tests that boot no server
	$(PY) -m pytest -m "not gpu and not server"

gpu-test: ## the tests that need an NVIDIA GPU (writes bench/results/)
	PYTHONPATH=src python3 scripts/gpu_test.py

lint: setup     ## ruff: errors and formatting
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

format: setup   ## ruff: rewrite
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

types: setup    ## mypy, strict, on src/
	.venv/bin/mypy

tables: setup   ## render the docs' tables from bench/results/
	$(PY) -m moet.bench

check-tables: setup   ## fail if a table differs from its result file
	$(PY) -m moet.bench --check

bench: setup    ## the CPU benchmarks (writes bench/results/)
	$(PY) benchmarks/kernels_cpu.py
	$(PY) -m benchmarks.packing

lock: setup     ## rewrite requirements/cpu.lock from the present .venv
	$(PY) scripts/lock.py

clean:          ## remove .venv and caches
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
