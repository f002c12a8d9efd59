# Everything a person or CI runs. Each target sets up what it needs in .venv, once, and again when the pins change.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PINS   := pyproject.toml constraints.txt
CLIENTS := .venv-clients

PORT   ?= 8000
URL    ?= http://127.0.0.1:$(PORT)
MODEL  ?=
ARGS   ?=
BENCH  ?= startup

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help serve test e2e test-clients check bench load metrics image setup setup-clients clean freeze

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  MODEL=$(MODEL) PORT=$(PORT) URL=$(URL) BENCH=\"$(BENCH)\" ARGS=\"...\" PYTHON=$(PYTHON)"

serve: $(VENV)/.stamp-serve  ## start the server: MODEL (the embedded one if empty), PORT, ARGS
	@exec $(BIN)/octavo serve $(MODEL) --port $(PORT) $(ARGS)

test: $(VENV)/.stamp-test  ## every test but the live-server ones, real model included; ARGS go to pytest
	$(BIN)/python -m pytest --ignore=tests/e2e $(ARGS)

e2e: $(VENV)/.stamp-test  ## the tests that start a server and talk to it as a client would
	$(BIN)/python -m pytest tests/e2e $(ARGS)

test-clients: $(VENV)/.stamp-serve $(CLIENTS)/.stamp  ## other people's clients, and schemathesis, against a live server (needs node)
	SERVER_PYTHON=$(abspath $(BIN)/python) $(CLIENTS)/bin/python -m pytest -c tests/clients/pytest.ini tests/clients $(ARGS)

check: $(VENV)/.stamp-lint  ## ruff, formatting, strict types, import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --quiet tests/test_house.py

bench: $(VENV)/.stamp-serve  ## the short benchmarks: BENCH names modules of benchmarks/
	@set -e; for name in $(BENCH); do $(BIN)/python -m benchmarks.$$name $(ARGS); done

load: $(VENV)/.stamp-serve  ## load generator against the server at URL, as ARGS say
	@exec $(BIN)/octavo bench --base-url $(URL) $(ARGS)

metrics: $(VENV)/.stamp-test  ## scrape a live server; what promtool and the client's parser say (needs promtool)
	$(BIN)/python -m tools.check_metrics $(ARGS)

image:  ## build the container image and talk to it (needs root, buildah, debootstrap)
	$(PYTHON) tools/check_image.py $(ARGS)

setup: $(VENV)/.stamp-test $(VENV)/.stamp-lint  ## all of the set-up, nothing run

setup-clients: $(VENV)/.stamp-serve $(CLIENTS)/.stamp  ## the set-up of test-clients

freeze: setup  ## write what is installed into constraints.txt
	@{ grep '^#' constraints.txt; $(BIN)/python -m pip list --format=freeze \
	  | grep -viE '^(octavo|setuptools|torch)=' | LC_ALL=C sort -f; } > constraints.new && mv constraints.new constraints.txt

clean:  ## remove the set-up and everything generated
	rm -rf $(VENV) $(CLIENTS) tests/clients/node_modules build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis results

# pip 25.1 is the first that knows dependency groups; a new venv has whatever its Python shipped with.
$(VENV)/.stamp-venv: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Octavo needs Python 3.11 or newer, PYTHON=... names one; this is " + sys.version)'
	@echo "setting up $(VENV) (once; takes about a minute)" >&2
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade 'pip>=25.1'
	@touch $@

# pip 26 shows, however quiet, what setuptools warns of in every editable installation.
$(VENV)/.stamp-serve: $(VENV)/.stamp-venv $(PINS)
	@PYTHONWARNINGS=ignore $(PIP) --editable '.[fast]'
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-serve
	@$(PIP) --group test
	@touch $@

$(VENV)/.stamp-lint: $(VENV)/.stamp-test
	@$(PIP) --group lint
	@touch $@

# Without Octavo, and apart: these packages' pins agree neither with ours nor always with the newest of each other.
$(CLIENTS)/.stamp: pyproject.toml constraints-clients.txt tests/clients/package.json
	@$(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-clients.txt 'pip>=25.1'
	@$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-clients.txt --group clients
	@npm install --prefix tests/clients --no-package-lock --no-audit --no-fund --loglevel=error
	@touch $@
