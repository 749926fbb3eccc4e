# make demo   install, tokenise real text, mix, train, write report.html
# make test   install, run the whole suite
# make check  lint, format, types
# Both start on a fresh machine with Python 3.11 or newer and package registries, nothing else.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# torch first and by itself: asked for by another package, it may come with gigabytes of CUDA.
TORCH  := torch==2.13.0
# Tests at a time: one more than the usual two cores, as many wait for processes they started.
TEST_WORKERS ?= 3

.PHONY: demo test check clean

demo: $(VENV)/.ready-demo
	PATH="$(CURDIR)/$(BIN):$$PATH" bash pipelines/quickstart/run.sh

test: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadgroup

check: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy olm_data olm_train

clean:
	rm -rf $(VENV) pipelines/quickstart/out

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: Python 3.11 or newer is needed; try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready-torch: $(BIN)/python
	$(BIN)/python -m pip install --quiet $(TORCH) -c constraints.txt
	@touch $@

$(VENV)/.ready-demo: $(VENV)/.ready-torch pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -e '.[train,fast,report]' -c constraints.txt
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready-torch pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -e '.[train,fast,s3,hub,ray,report,dev]' -c constraints.txt
	@touch $@
