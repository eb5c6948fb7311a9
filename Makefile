# Every target creates the virtual environment it needs. LANE picks the tested set of versions:
# default (TransformerLens 3.9, in .venv) or tl4 (TransformerLens 4, in .venv-tl4).

PYTHON ?= python3
LANE ?= default

ifeq ($(LANE),default)
VENV := .venv
TESTS := not real
else ifeq ($(LANE),tl4)
VENV := .venv-tl4
TESTS := not real and not once
else
$(error LANE is "$(LANE)"; it can be default or tl4)
endif

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CONSTRAINTS := .ci/constraints-$(LANE).txt
PIP_INSTALL := $(BIN)/python -m pip install -qq --no-input --disable-pip-version-check \
	-c $(CONSTRAINTS)
PARALLEL := -n auto --dist loadfile
# Annotated shapes and types are checked where every test runs; that takes a third of the time.
CHECKED := --jaxtyping-packages=resid_patching,checked.checked

.PHONY: help demo test test-all test-real test-gpt2 lint docs tour bench fuzz check-device clean \
	distclean

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) \
		| awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'

demo: $(STAMP) ## direct logit attribution on the shipped model (LANE=tl4: with TransformerLens 4)
	$(BIN)/resid-patching dla --model demo \
		--prompt "When Mary and John went to the store, John gave a drink to" \
		--answer " Mary" --foil " John"
	@printf '%s\n' '' 'Next:' '  source $(BIN)/activate' \
		'  resid-patching --help               the other commands' \
		'  resid-patching ablate mean --help   one of them' \
		'Or in a notebook: docs/tour.ipynb goes from a prompt to a circuit in twenty minutes. VS Code' \
		'opens it with $(BIN)/python as kernel; or: pip install jupyterlab; jupyter lab docs/tour.ipynb'

test: $(STAMP) ## the quick tests, in 3 minutes (LANE=tl4: with TransformerLens 4)
	$(BIN)/python -m pytest -m "$(TESTS) and not gpt2 and not full" $(PARALLEL)

test-all: ## what `make test` leaves out, then every test with TransformerLens 4
	$(MAKE) --no-print-directory LANE=default .venv/.installed
	$(MAKE) --no-print-directory LANE=tl4 .venv-tl4/.installed
	.venv/bin/python -m pytest -m "not real and (full or gpt2)" $(PARALLEL)
	.venv-tl4/bin/python -m pytest -m "not real and not once" $(PARALLEL) $(CHECKED)

test-real: $(STAMP) ## prepare SmolLM2-135M, then the tests that need it
	$(BIN)/python scripts/prepare_smollm2.py
	RESID_PATCHING_REQUIRE_REAL=1 OMP_NUM_THREADS=$$(nproc) $(BIN)/python -m pytest -m real $(CHECKED)

test-gpt2: $(STAMP) ## the check-list of GPT-2 small (RESID_PATCHING_GPT2=FOLDER or gpt2, or the hub's cache)
	$(BIN)/python -m pytest -m gpt2

bench: ## time it beside TransformerLens 3.9 and 4, on an idle machine: docs/performance.md
	$(MAKE) --no-print-directory LANE=default .venv/.installed
	$(MAKE) --no-print-directory LANE=tl4 .venv-tl4/.installed
	.venv-tl4/bin/python scripts/benchmark.py --backend bridge --write docs/performance.md
	.venv/bin/python scripts/benchmark.py --backend hooked --write docs/performance.md

fuzz: $(STAMP) ## attack it for MINUTES (30): identities, command lines, damaged files
	$(BIN)/python scripts/fuzz.py --minutes $(or $(MINUTES),30) $(if $(SEED),--seed $(SEED))

check-device: $(STAMP) ## identities and timings on the accelerator that is there, or the CPU
	$(BIN)/python scripts/check_device.py

lint: $(STAMP) ## ruff, formatting and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python

docs: .venv-docs/.installed ## the documentation as a site, build/docs/index.html; needs no torch
	.venv-docs/bin/mkdocs --quiet build

tour: $(STAMP) ## run the notebooks of docs again and keep their outputs (pictures need Chromium)
	$(PIP_INSTALL) -e '.[png]'
	$(BIN)/python scripts/tour.py

clean: ## remove build products and tool caches
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find resid_patching scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## also remove the virtual environments and the prepared models
	rm -rf .venv .venv-tl4 .venv-docs .cache

# Touched last, so that a set-up that failed or was interrupted is done again.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@rm -f $@
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "use PYTHON=python3.11")'
	@echo "Setting up $(VENV) (a few minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) torch
	@$(PIP_INSTALL) -e '.[dev,real]'
	@touch $@

.venv-docs/.installed: .ci/requirements-docs.txt
	@rm -f $@
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip install -qq --no-input --disable-pip-version-check -r $<
	@touch $@
