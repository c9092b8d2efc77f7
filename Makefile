# make setup   .venv with every pinned dependency and hetpipe itself (editable), and the planner's loops, compiled; does nothing when up to date
# make demo    a real model on real data over an emulated mixed cluster: the plan against equal splits
# make test    the tests
# make test-all   the tests, and those that take long: every page of the documentation, every trainer of examples/, more restarts and searches
# make coverage   which part of the product's lines and branches the tests run, ranks included: a third longer than make test
# make bench   hetpipe beside other ways to train, and ratios beside those kept: an hour and a quarter on two idle cores
# make bench-quick   a part of that, in 6 minutes
# make lint    ruff, mypy and the floors of the house (import-linter)
# make rooms   the picture of the rooms in CONTRIBUTING.md, as they are
# make check   lint and test: what CI runs
# make docs    the documentation as a site, in build/site; fails where a link leads nowhere (installs the extra `docs` first)
# make pictures   the pictures of docs/: those that `hetpipe show` draws, and that of the bound
# make screenshots   those of reports in docs/, with Chromium, of what `make demo` left and of configs/bert-large, and that of TensorBoard
# make test-torch TORCH=2.8.0   the runtime's tests on another release of torch, in an environment of its own (CUDA builds take 4 GB)
# make test-matrix   test-torch on Python 3.11, 3.12 and 3.13, each with the oldest torch and the one of constraints.txt; leaves out a Python that is not there
# make clean   removes what building and running left behind, but for .venv

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
DEMO ?= $(PY) -m bench.demo.run configs/jobs/demo.yaml
# three on two cores: ranks of emulated devices mostly wait
PYTEST_ARGS ?= -n 3 --dist loadfile --no-loadscope-reorder

# data that is not in the repository (CIFAR-10, other planners' profiles): tests that need it are skipped without it
HETPIPE_DATA ?= $(abspath $(wildcard ../shared/data))
export HETPIPE_DATA
# modules are compiled once, also where the environment says that nothing is to be written
export PYTHONDONTWRITEBYTECODE :=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install -c constraints.txt
STAMP := $(VENV)/.hetpipe-setup

.PHONY: setup demo test test-all coverage test-torch test-matrix bench bench-quick lint rooms docs pictures screenshots check clean

setup: $(STAMP)

# torch first and alone: some packages want to find it when they are built.
$(STAMP): setup.py constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) $(shell grep '^torch==' constraints.txt)
	$(PIP) -e '.[test,viz,loggers,hf,lora,text,diffusion,pipes,trainers]'
	-$(PY) -c 'from hetpipe.partitioners import auto; auto.ready()'
	touch $@

demo: setup
	$(DEMO)

test: setup
	$(PY) -m pytest $(PYTEST_ARGS)

test-all: setup
	$(PY) -m pytest $(PYTEST_ARGS) -m ""

coverage: setup
	$(PIP) coverage
	rm -f .coverage*
	$(PY) -m coverage run -m pytest $(PYTEST_ARGS)
	$(PY) -m coverage combine --quiet
	$(PY) -m coverage report --skip-covered --sort=cover

# the release first, then the other packages as pinned, where they take that release
TORCH_VENV = .venv-torch-$(TORCH)
TORCH_TESTS ?= tests/test_transparency.py tests/test_executor.py tests/test_split.py tests/test_replicas.py tests/test_batch_norm.py \
	tests/test_one_process.py tests/test_own_loop.py tests/test_autowrap.py tests/test_checkpoint.py tests/test_trainer.py tests/test_uneven.py

test-torch:
	@test -n "$(TORCH)" || { echo "which release? make test-torch TORCH=2.8.0"; exit 2; }
	test -x $(TORCH_VENV)/bin/python || $(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip --disable-pip-version-check install torch==$(TORCH)
	grep -v '^torch==' constraints.txt > $(TORCH_VENV)/constraints.txt
	$(TORCH_VENV)/bin/python -m pip --disable-pip-version-check install -c $(TORCH_VENV)/constraints.txt -e '.[test,pipes,lora]'
	$(TORCH_VENV)/bin/python -m pytest $(PYTEST_ARGS) $(TORCH_TESTS)

PYTHONS ?= python3.11 python3.12 python3.13
TORCHES ?= 2.8.0 $(patsubst torch==%,%,$(shell grep '^torch==' constraints.txt))

# a shim of pyenv may be there without its Python: so it is run, not looked up
test-matrix:
	@failed=; for python in $(PYTHONS); do \
	  $$python -c '' 2> /dev/null || { echo "left out: no $$python on this machine"; continue; }; \
	  for torch in $(TORCHES); do \
	    echo "$$python, torch $$torch"; \
	    $(MAKE) test-torch PYTHON=$$python TORCH=$$torch TORCH_VENV=.venv-torch-$$torch-$$python || failed="$$failed $$python/torch-$$torch"; \
	  done; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

BENCHED = build/bench

bench: setup
	mkdir -p $(BENCHED)
	$(PY) -m bench.throughput.run --rounds 1 --readme -o $(BENCHED)/throughput.json
	$(PY) -m bench.finetune.run --rounds 1 -o $(BENCHED)/finetune.json
	$(PY) -m bench.overhead.run --rounds 7 --block-seconds 0.6 --readme --json > $(BENCHED)/overhead.json
	$(PY) -m bench.convergence.run --readme -o $(BENCHED)/convergence.json
	$(PY) -m bench.scale.run --readme -o $(BENCHED)/scale.json
	$(PY) -m bench.check $(BENCHED)/throughput.json $(BENCHED)/finetune.json $(BENCHED)/overhead.json

bench-quick: setup
	mkdir -p $(BENCHED)
	$(PY) -m bench.throughput.run --rounds 1 --models gpt --only "4×T4" -o $(BENCHED)/throughput.json
	$(PY) -m bench.finetune.run --quick
	$(PY) -m bench.overhead.run --models gpt --rounds 3 --block-seconds 0.6 --json > $(BENCHED)/overhead.json
	$(PY) -m bench.check $(BENCHED)/throughput.json $(BENCHED)/overhead.json

lint: setup
	$(PY) -m ruff check
	$(PY) -m ruff format --check --quiet
	$(PY) -m mypy
	$(VENV)/bin/lint-imports --no-cache --no-logo

rooms: setup
	$(PY) -m tests.support.rooms

docs: setup
	$(PY) -c 'import mkdocs, material, mkdocstrings' 2> /dev/null || $(PIP) -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

EXAMPLE = --profile configs/bert-large/profile.json --cluster configs/bert-large/cluster.yaml

pictures: setup
	$(PY) -m hetpipe plan $(EXAMPLE) --global-batch 64 -o configs/bert-large/plan.json
	$(PY) -m hetpipe plan $(EXAMPLE) --global-batch 64 --partitioner even -o configs/bert-large/plan-even.json
	for plan in plan plan-even; do $(PY) -m hetpipe show configs/bert-large/$$plan.json $(EXAMPLE) -o docs/pictures/$$plan.svg || exit; done
	$(PY) -m docs.bound_picture

screenshots: setup
	$(PY) docs/screenshots.py

check: lint test

clean:
	rm -rf build dist *.egg-info runs checkpoints .hetpipe .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
