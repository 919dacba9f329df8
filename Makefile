# `make train` and `make test` need nothing but Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: train test test-engines test-federated test-matrix test-small-core lint docs spelling release-check gpu-test dist install-locked clean

# Not -c: these also hold for the isolated environment in which pip builds the package.
PIN := PIP_CONSTRAINT=$(CURDIR)/constraints.txt PIP_BUILD_CONSTRAINT=$(CURDIR)/constraints.txt

$(VENV)/installed: pyproject.toml constraints.txt
	@echo "Installing PyTorch and what the recipes need into $(VENV): this takes a few minutes"
	$(PYTHON) -m venv $(VENV)
	$(PIN) $(BIN)/pip install --quiet -e '.[recipes]'
	touch $@

# Tests, linters and types: training needs none of them.
$(VENV)/dev: $(VENV)/installed
	$(PIN) $(BIN)/pip install --quiet -e '.[dev]'
	touch $@

# They run examples/notebooks; nothing else needs them.
NOTEBOOKS := nbclient==0.11.0 ipykernel==7.4.0
$(VENV)/engines: $(VENV)/dev
	$(PIN) $(BIN)/pip install --quiet -e '.[dev,engines]'
	$(PIN) $(BIN)/pip install --quiet $(NOTEBOOKS)
	touch $@

train: $(VENV)/installed
	$(BIN)/mgt train image

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Types are checked beside the first tests, which mostly wait for processes.
LINT_LOG := $(VENV)/lint.txt
# Three files of tests at once: two cores are busy while some of the tests wait for processes. A
# file stays with one worker, whose warm ranks it shares; the folders' order ends with quick files.
TOGETHER := -n 3 --dist loadfile --no-loadscope-reorder --durations 40 --durations-min 5

test: $(VENV)/dev
	@$(MAKE) --no-print-directory lint > $(LINT_LOG) 2>&1 & lint=$$!; \
	$(BIN)/pytest $(TOGETHER); tests=$$?; \
	wait $$lint; linted=$$?; cat $(LINT_LOG); \
	if [ $$tests -ne 0 ]; then exit $$tests; fi; exit $$linted

$(VENV)/docs: $(VENV)/dev
	$(PIN) $(BIN)/pip install --quiet -e '.[dev,docs]'
	touch $@

# In an environment of its own: no other package needs it.
CODESPELL := codespell==2.4.3
$(VENV)/spelling/installed: Makefile
	$(PYTHON) -m venv $(VENV)/spelling
	$(VENV)/spelling/bin/pip install --quiet $(CODESPELL)
	touch $@

spelling: $(VENV)/spelling/installed
	$(PYTHON) scripts/check_spelling.py --codespell $(VENV)/spelling/bin/codespell

# The documentation as a site, in site/: its spelling, every link and every name of the reference is
# checked. MkDocs sees links inside docs/ only; the test sees those to other files of the repository.
docs: $(VENV)/docs spelling
	$(BIN)/pytest -q tests/test_docs.py -k 'links_lead or navigation'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# What a release needs, in empty environments: see the script. TAG=v1.2.3 for the last look.
release-check: $(VENV)/dev
	$(BIN)/python scripts/release_check.py $(if $(TAG),--tag $(TAG))

# Real servers, schedulers and long campaigns: too heavy for every commit.
test-engines: $(VENV)/engines
	$(BIN)/pytest -m engines

# Flower pins other versions than constraints.txt.
FED := PIP_CONSTRAINT=$(CURDIR)/constraints-federated.txt
.venv-federated/installed: pyproject.toml constraints-federated.txt
	$(PYTHON) -m venv .venv-federated
	$(FED) .venv-federated/bin/pip install --quiet -e '.[federated,image]' pytest pytest-timeout
	touch $@

test-federated: .venv-federated/installed
	.venv-federated/bin/pytest tests/federated -m 'engines or not engines'

# The oldest and the newest torch, every Python: see the head of the script for what it needs.
TORCH ?= 2.11.0 2.13.0 newest
PYTHONS ?= 3.11 3.12 3.13
test-matrix:
	$(PYTHON) benchmarks/versions.py --torch $(TORCH) --python $(PYTHONS) $(MATRIX)

# The wheel in an empty environment: without TensorBoard, matplotlib and any recipe's packages.
test-small-core:
	$(PYTHON) benchmarks/small_core.py

dist: $(VENV)/installed
	rm -rf dist
	$(PIN) $(BIN)/pip wheel --quiet --no-deps -w dist .
	$(BIN)/python -c "from setuptools.build_meta import build_sdist; build_sdist('dist')"

gpu-test:
	python3 -m pytest -m gpu

# Every package is checked against its hash. The project itself comes after: pip checks none for it.
install-locked:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --require-hashes -r requirements.lock
	$(BIN)/pip install --quiet --no-deps -e .
	touch $(VENV)/installed $(VENV)/dev

# Never runs/: that is where trainings save by default.
clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache
