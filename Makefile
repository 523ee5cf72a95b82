# Everything works from a clean clone with Python >= 3.11, pip and make. Each target says what it does.
#
#   make run            set up .venv, train on built-in data        make run ARGS="--run.steps 50 --train.lr 1e-3"
#   make test           set up .venv with the tools, run the tests
#   make test-faults    the long fault sweeps: kills, full disks, flipped bits    FAULTS=short for a minute of them
#   make test-bounds    the property tests of compiled loops, with every index checked
#   make test-failed    those that failed the last time, once more and alone
#   make check          ruff, ty, import-linter
#   make bench          benchmarks, as ratios                       make bench ROOM=loader
#   make bench-mixing   stream mixing: picks, metrics, batches, ranks
#   make bench-spool    batches out of the spool, beside a memcpy and beside torch.load
#   make bench-ledger   recurrent state by group, beside a dict of tensors
#   make bench-rollouts  a step of rollouts beside the boundary mode and plain code    ARGS="--scale 1" for the whole
#   make bench-text     headrace beside the loaders people use, each in an environment of its own    ARGS="--make-envs"
#   make bench-reduce   Gram matrices beside numpy, scipy and sklearn                 ARGS=kernel-1 for one part
#   make docs           check that the documents' snippets, links and figures are true

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
ARGS   ?=
FAULTS ?= long
ROOM   ?=
BOUNDS := $(addprefix tests/property/test_,text_laws.py ledger_laws.py ledger_slots.py reduce_laws.py loader_laws.py)
RUN    := examples/quickstart.toml
PIP    := $(BIN)/python -m pip --disable-pip-version-check -qq

.PHONY: run test test-bounds test-failed test-faults check bench bench-mixing bench-spool bench-ledger bench-rollouts bench-text bench-reduce docs clean
.DEFAULT_GOAL := run

# torch first and alone: a range asked for by another package could otherwise bring a CUDA build with it.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "headrace needs Python >= 3.11, this is $$($(PYTHON) --version); set PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || { echo "==> making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "==> installing torch (CPU build; a few hundred MB the first time)"
	@$(PIP) install $$(grep '^torch==' constraints.txt)
	@touch $@

$(VENV)/.run: $(VENV)/.torch pyproject.toml constraints.txt
	@echo "==> installing headrace"
	@$(BIN)/python -m pip list --format=freeze 2>/dev/null | grep -iE '^(nvidia|triton)' > $(VENV)/.cuda-before || true
	@$(PIP) install -c constraints.txt -e .
	@$(MAKE) --no-print-directory no-cuda
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "==> installing the development tools"
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@$(MAKE) --no-print-directory no-cuda
	@touch $@

.PHONY: no-cuda
no-cuda:
	@$(BIN)/python -m pip list --format=freeze 2>/dev/null | grep -iE '^(nvidia|triton)' | diff $(VENV)/.cuda-before - > /dev/null || { echo "a dependency of headrace brought CUDA packages along: that is a bug, please report it"; exit 1; }

run: $(VENV)/.run
	@echo "==> headrace run $(RUN) $(ARGS)"
	@case " $(ARGS) " in *" --run.dir"*) ;; *) rm -rf runs/quickstart ;; esac; $(BIN)/headrace run $(RUN) $(ARGS)

test: $(VENV)/.dev
	@echo "==> tests (unit, property, integration)"
	@$(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

test-bounds: $(VENV)/.dev
	@echo "==> property tests of compiled loops, every index checked"
	@HEADRACE_BOUNDS_CHECKS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist loadfile $(BOUNDS)

test-faults: $(VENV)/.dev
	@echo "==> fault sweeps ($(FAULTS))"
	@HEADRACE_FAULTS=$(FAULTS) $(BIN)/python -m pytest -q tests/faults

test-failed: $(VENV)/.dev
	@echo "==> the tests that failed the last time, once more and alone"
	@HEADRACE_FAULTS=$(FAULTS) $(BIN)/python -m pytest -v --lf --lfnf=none tests

check: $(VENV)/.dev
	@echo "==> ruff, ty, import-linter"
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/ty check && $(BIN)/lint-imports

bench: $(VENV)/.dev
	@echo "==> benchmarks: ratios to a physical limit and to what one would use instead"
	@$(BIN)/python benchmarks/run.py $(ROOM)

bench-mixing: $(VENV)/.dev
	@echo "==> stream mixing: picks and their metrics, batches beside the readers alone, ranks"
	@$(BIN)/python benchmarks/run.py mixing

bench-spool: $(VENV)/.dev
	@echo "==> the spool: a batch, a boundary between files, a rank's share, a durable file"
	@$(BIN)/python benchmarks/run.py spool

bench-ledger: $(VENV)/.dev
	@echo "==> the ledger of recurrent state beside a dict of tensors: lookup, store, eviction, memory"
	@$(BIN)/python benchmarks/run.py ledger

bench-rollouts: $(VENV)/.dev
	@echo "==> a step of rollouts: loop lag, boundary, CPU beside a plain write"
	@$(BIN)/python benchmarks/rollouts.py $(ARGS)

bench-text: $(VENV)/.dev
	@echo "==> text pipelines side by side (peers without an environment are skipped: ARGS=--make-envs makes them)"
	@$(BIN)/python benchmarks/bench_text.py $(ARGS)

bench-reduce: $(VENV)/.dev
	@echo "==> Gram matrices: kernel, fold, workers, PCA, errors"
	@$(BIN)/python benchmarks/reduce.py $(ARGS)

docs: $(VENV)/.dev
	@echo "==> documents: snippets are run, links and figures are checked"
	@$(BIN)/python -m pytest -q tests/integration/test_documents.py

clean:
	rm -rf $(VENV) build dist runs .pytest_cache .ruff_cache .hypothesis
