# make quickstart: from a fresh clone to a report.   make test: every test that CI runs.   make help: the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=
HARDWARE ?= cpu
# On two cores: with two workers these were idle for a third of the time, while a test waited for a clock or a process.
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest
GROUND := tests/netlayer
# pytest ends so where ARGS leave it no test.
NONE := 5

.DEFAULT_GOAL := help
.PHONY: help setup page quickstart test test-slow test-gpu full check reference format bench reports claims rdma-lab clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## install everything into .venv (pip's own settings are honoured)

# The stamp is written last, so an install that broke off runs again and a finished one never does. Python compiles what is
# imported when it first is; to compile all 18,000 files of the libraries would take a minute of one core before anything runs.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: $(PYTHON) = $$($(PYTHON) -V 2>&1): Python >= 3.11 is needed; run: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
	  || { echo "error: $(PYTHON) cannot make a virtual environment; on Debian and Ubuntu run: apt-get install python3-venv" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	@$(BIN)/python hatch_build.py
	@touch $(STAMP)

page: setup  ## build the page of `netlayer observe serve` (needs npm; setup does it where npm is there)
	@$(BIN)/python hatch_build.py --require

quickstart: setup  ## the main job: bench, fabric, training and one report (ARGS="--steps 50 --out DIR")
	@$(BIN)/netlayer quickstart $(ARGS)

# Files with tests that judge by time: to collect all others would take longer than many of these.
QUIET := $(shell grep -rlE 'mark\.quiet' tests --include='test_*.py')
# To trace every process of every test would cost a quarter of the time: coverage is that of netlayer/ by its own tests and
# by those that judge by time.
COV := --cov --cov-report=
test: setup  ## all tests that CI runs; with the coverage of netlayer/ unless ARGS choose some; what judges by time comes last
	@trap 'exit 130' INT; failed=; \
	$(PYTEST) -n $(WORKERS) --dist loadfile -m "not slow and not quiet" $(or $(ARGS),--ignore $(GROUND)) \
	  || [ $$? -eq $(NONE) ] || failed=1; \
	$(if $(ARGS),,$(BIN)/coverage erase; \
	$(PYTEST) $(COV) -n $(WORKERS) --dist loadfile -m "not slow and not quiet" $(GROUND) || failed=1;) \
	$(PYTEST) $(if $(ARGS),,$(COV) --cov-append) -n 0 -m "quiet and not slow" $(or $(ARGS),$(QUIET)) || [ $$? -eq $(NONE) ] || failed=1; \
	$(if $(ARGS),,rm -f .coverage.*; `# halves that ranks left when a test killed them` \
	$(BIN)/coverage report --skip-covered || failed=1;) \
	test -z "$$failed"

test-slow: setup  ## the tests that are too long for CI, and ten times the examples of those that draw as many as they are told
	$(BIN)/python -m pytest -m slow $(ARGS) || [ $$? -eq $(NONE) ]
	$(BIN)/python -m pytest -m "hypothesis and not slow" --hypothesis-profile thorough $(ARGS) || [ $$? -eq $(NONE) ]

test-gpu: setup  ## the tests that need one GPU or two, one after the other
	$(BIN)/python -m pytest -m "(gpu or multi_gpu) and not slow" $(ARGS)

# Not after setup: it makes an environment of its own, in the clone.
full:  ## before a release: every command of README and docs/ once, in a fresh clone with an empty home (two hours; ARGS=--list)
	@$(PYTHON) tests/full.py $(ARGS)

check: setup  ## format, lint, types, import contracts, claims, reference, wording
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m bench.claims --check
	$(BIN)/python -m tests.make_reference --check
	$(BIN)/python -m tests.wording

reference: setup  ## docs/reference/ from the commands' help and the configuration's keys
	$(BIN)/python -m tests.make_reference

format: setup  ## put the code into the house's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup  ## the acceptance bench on this machine, two gloo ranks
	@for name in all_gather reduce_scatter all_reduce sendrecv; do \
	  $(BIN)/$${name}_perf -g 2 --backend gloo -b 8 -e 16M -f 8 $(ARGS) || exit $$?; done

reports: setup  ## take the records under reports/ anew on this machine, and CLAIMS.md (HARDWARE=cpu)
	@rm -rf runs/reports
	$(BIN)/netlayer quickstart --out runs/reports/quickstart
	$(BIN)/python -m bench.loss_equivalence --out runs/reports/loss_equivalence
	$(BIN)/python -m bench.publish --hardware $(HARDWARE) runs/reports/quickstart runs/reports/loss_equivalence
	@$(BIN)/python -m bench.claims

claims: setup  ## write CLAIMS.md from the records under reports/
	@$(BIN)/python -m bench.claims

rdma-lab: setup  ## tests on real verbs (Soft-RoCE), in a small virtual machine that is built once: no root, no NIC
	@PYTHON=$(CURDIR)/$(BIN)/python lab/build.sh
	@lab/run.sh $(ARGS)

clean:  ## remove what the other targets made, but for tokenised text in ~/.cache/netlayer
	rm -rf $(VENV) runs dist netlayer/observe/page/web/dist netlayer/observe/page/web/node_modules .coverage* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
