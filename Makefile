# `make train` and `make test` need nothing but Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: train test lint gpu-test clean

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

train: $(VENV)/installed
	$(BIN)/mgt train image

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Tests wait for processes more than they compute: two parts run side by side.
PART := tests/faults tests/distributed tests/monitoring tests/reliability
PART_LOG := $(VENV)/pytest-part.txt

test: lint
	@$(BIN)/pytest $(PART) > $(PART_LOG) 2>&1 & part=$$!; \
	$(BIN)/pytest $(addprefix --ignore=,$(PART)); rest=$$?; \
	wait $$part; code=$$?; cat $(PART_LOG); \
	if [ $$rest -ne 0 ]; then exit $$rest; fi; exit $$code

gpu-test:
	python3 -m pytest -m gpu

clean:
	rm -rf $(VENV) build dist runs .pytest_cache .mypy_cache .ruff_cache
