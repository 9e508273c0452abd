# make run    a demonstration: conversations with the bundled model, served at once; offline, on any CPU
# make test   the test suite
# make lint   formatting, types, layers, sizes, docs  make ci     everything that CI runs for this commit
# make bench  the benchmarks of docs/performance.md   make full   all suites, recorded in docs/lab/full-runs.md
# make clean  remove what the above created           make kernels   those of kernels and steps, recorded there too
#
# The environment is made in .venv at the first command and again when pyproject.toml changes; the native kernels are
# compiled when their sources or the compiler have changed.
#   PYTHON=python3.12   the interpreter it is made with
#   VENV=path           an environment of your own; a torch in it that is in range is kept
#   CXX=clang++         the compiler of the native kernels

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# A process imports torch, and takes some 0.7 GB.
PARALLEL := --numprocesses auto --maxprocesses 4 --dist worksteal
# Where it is set, each process of the tests compiles Quire's modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test lint bench ci full kernels clean native
.PRECIOUS: $(VENV)/.quire-%

# The bundled model is too small to gain from a second thread, and on a busy machine threads wait for one another.
run: $(VENV)/.quire-core
	HF_HUB_OFFLINE=1 $(BIN)/quire generate --demo --num-threads 1

test: $(VENV)/.quire-test
	$(BIN)/python -m pytest $(PARALLEL)

lint: $(VENV)/.quire-test $(VENV)/.quire-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.check_sizes
	$(BIN)/python -m tools.check_prose
	$(BIN)/python -m tools.check_docs

bench: $(VENV)/.quire-bench
	$(BIN)/python -m benchmarks.throughput
	$(BIN)/python -m benchmarks.scheduler
	$(BIN)/python -m benchmarks.cold_start

ci:
	.ci/run

full:
	.ci/run --full

kernels:
	.ci/run --kernels

$(VENV)/.quire-%: pyproject.toml tools/setup_env.py | native
	$(PYTHON) tools/setup_env.py --venv $(VENV) --extra $*
	@touch $@

# Before the installation, which would compile them too, but out of sight. It ends at once when nothing has changed.
native:
	@$(PYTHON) hatch_build.py

clean:
	rm -rf .venv .cache .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist
	rm -rf src/quire/ops/native/libquire_*.so src/quire/ops/native/.build-*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
