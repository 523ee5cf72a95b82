# Everything works from a clean clone with Python >= 3.11, pip and make. Each target says what it does.
#
#   make run            set up .venv, train on built-in data        make run ARGS="--run.steps 50 --train.lr 1e-3"
#   make run-rl         a policy learns to sort digits from rewards alone        ARGS="--run.steps 40"
#   make test           set up .venv with the tools, run the tests
#   make test-faults    the long fault sweeps: kills, full disks, flipped bits; properties with random examples    FAULTS=short for a minute
#   make test-rl-real   RL with what is installed of reasoning-gym, verifiers and vLLM
#   make test-bounds    the property tests of compiled loops, with every index checked
#   make test-failed    those that failed the last time, once more and alone
#   make fuzz           changed files for every reader, in children with limits    ARGS="--inputs 200000 --seed 3"
#   make check          ruff, ty, import-linter
#   make bench          benchmarks, as ratios                       make bench ROOM=loader
#   make bench-mixing   stream mixing: picks, metrics, batches, ranks
#   make bench-spool    batches out of the spool, beside a memcpy and beside torch.load
#   make bench-ledger   recurrent state by group, beside a dict of tensors
#   make bench-rollouts  a step of rollouts beside plain code    ARGS="--scale 1" for the whole
#   make bench-rl       the RL orchestrator beside bare asyncio; examples/rl/sort.toml to its accuracy, seeds 0, 1, 2
#   make bench-text     headrace beside the loaders people use, each in an environment of its own    ARGS="--make-envs"
#   make bench-reduce   Gram matrices beside numpy, scipy and sklearn                 ARGS=kernel-1 for one part
#   make bench-ui       the live page: a million lines, and the run beside it
#   make screenshots    pictures of the live page for the documents (needs chromium)
#   make docs           build the documentation site into site/, offline
#   make docs-serve     serve it at http://127.0.0.1:8000 and rebuild when a page changes
#   make docs-test      run every snippet of the documents, check links and names
#   make release        build wheel and sdist into dist/, install the wheel into an empty venv, smoke-test it

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
ARGS   ?=
FAULTS ?= long
ROOM   ?=
BOUNDS := $(addprefix tests/property/test_,text_laws.py prepared_laws.py ledger_laws.py ledger_slots.py reduce_laws.py loader_laws.py)
RUN    := examples/quickstart.toml
PIP    := $(BIN)/python -m pip --disable-pip-version-check -qq

.PHONY: run run-rl test fuzz test-rl-real test-bounds test-failed test-faults check bench bench-mixing bench-spool bench-ledger bench-rollouts bench-rl bench-text bench-reduce bench-ui screenshots docs docs-serve docs-test release clean
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

run-rl: $(VENV)/.run
	@echo "==> headrace run examples/rl/sort.toml $(ARGS)"
	@case " $(ARGS) " in *" --run.dir"*) ;; *) rm -rf runs/sort ;; esac; $(BIN)/headrace run examples/rl/sort.toml $(ARGS)

test: $(VENV)/.dev
	@echo "==> tests (unit, property, integration)"
	@$(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

test-bounds: $(VENV)/.dev
	@echo "==> property tests of compiled loops, every index checked"
	@HEADRACE_BOUNDS_CHECKS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist loadfile $(BOUNDS)

test-faults: $(VENV)/.dev
	@echo "==> fault sweeps ($(FAULTS))"
	@HEADRACE_FAULTS=$(FAULTS) $(BIN)/python -m pytest -q $(if $(filter short,$(FAULTS)),-n 2 --dist loadfile) tests/faults
	@test $(FAULTS) != long || { echo "==> property tests with new random examples"; HEADRACE_HYPOTHESIS=long $(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist loadfile tests/property; }

test-rl-real: $(VENV)/.dev
	@echo "==> RL with real environments and engines, where they are installed"
	@$(BIN)/python -m pytest -v -ra tests/integration/test_rl_real.py

test-failed: $(VENV)/.dev
	@echo "==> the tests that failed the last time, once more and alone"
	@HEADRACE_FAULTS=$(FAULTS) $(BIN)/python -m pytest -v --lf --lfnf=none tests

fuzz: $(VENV)/.dev
	@echo "==> fuzzing every reader"
	@$(BIN)/python tests/fuzz/run.py $(ARGS)

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

bench-rl: $(VENV)/.dev
	@echo "==> RL: orchestrator with 4,000 fake environments, and sort.toml to its accuracy"
	@$(BIN)/python benchmarks/rl.py $(ARGS)

bench-text: $(VENV)/.dev
	@echo "==> text pipelines side by side (peers without an environment are skipped: ARGS=--make-envs makes them)"
	@$(BIN)/python benchmarks/bench_text.py $(ARGS)

bench-reduce: $(VENV)/.dev
	@echo "==> Gram matrices: kernel, fold, workers, PCA, errors"
	@$(BIN)/python benchmarks/reduce.py $(ARGS)

bench-ui: $(VENV)/.dev
	@echo "==> the live page: first paint of a million lines, memory, step time of the run beside it"
	@$(BIN)/python benchmarks/ui.py $(ARGS)

screenshots: $(VENV)/.dev
	@echo "==> screenshots of the live page, from runs that happen now"
	@$(BIN)/python docs/screenshots.py $(ARGS)

$(VENV)/.docs: $(VENV)/.run
	@echo "==> installing the documentation tools"
	@$(PIP) install -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(VENV)/.docs
	@echo "==> building the site into site/"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site

docs-serve: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --watch src

docs-test: $(VENV)/.dev
	@echo "==> documents: snippets are run, links and names are checked"
	@$(BIN)/python -m pytest -q tests/integration/test_documents.py tests/integration/test_site.py

# The smoke test runs in a venv that has torch, the wheel and nothing of this checkout.
release: $(VENV)/.dev
	@echo "==> building wheel and sdist"
	@rm -rf dist build/release && $(PIP) install -c constraints.txt build && $(BIN)/python -m build --outdir dist .
	@echo "==> installing the wheel into an empty venv"
	@$(PYTHON) -m venv build/release && build/release/bin/python -m pip --disable-pip-version-check -qq install $$(grep '^torch==' constraints.txt)
	@build/release/bin/python -m pip --disable-pip-version-check -qq install -c constraints.txt dist/*.whl
	@echo "==> smoke test"
	@cp docs/smoke.py build/release/ && cd build/release && bin/python smoke.py
	@ls -l dist

clean:
	rm -rf $(VENV) build dist site runs .pytest_cache .ruff_cache .hypothesis
