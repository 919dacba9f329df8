# `make train` and `make test` need nothing but Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: train test test-engines lint gpu-test clean

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
	$(BIN)/lint-imports

# Types are checked beside the first tests, which mostly wait for processes.
LINT_LOG := $(VENV)/lint.txt
# Three files of tests at once: two cores are busy while some of the tests wait for processes. A
# file stays with one worker, whose warm ranks it shares; the folders' order ends with quick files.
TOGETHER := -n 3 --dist loadfile --no-loadscope-reorder

test: $(VENV)/installed
	@$(MAKE) --no-print-directory lint > $(LINT_LOG) 2>&1 & lint=$$!; \
	$(BIN)/pytest $(TOGETHER); tests=$$?; \
	wait $$lint; linted=$$?; cat $(LINT_LOG); \
	if [ $$tests -ne 0 ]; then exit $$tests; fi; exit $$linted

# Real servers, schedulers and long campaigns: too heavy for every commit.
test-engines: $(VENV)/installed
	$(BIN)/pytest -m engines

gpu-test:
	python3 -m pytest -m gpu

# Never runs/: that is where trainings save by default.
clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
