.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Newer than pyproject.toml and constraints.txt when the environment has what they ask for: all of
# it, or what the demo needs.
READY := $(VENV)/.ready
LAB := $(VENV)/.lab
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: help setup demo test lint unit docs clean

help: ## List the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(READY) ## Make the virtual environment in .venv (the other targets do it as needed)

# torch goes first and by its exact version, before anything that depends on it can choose a build.
$(READY): EXTRAS := test,docs,lab
$(LAB): EXTRAS := lab
$(READY) $(LAB): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or \
	  sys.exit(f"lastlayer needs Python 3.11 or newer, got {v.major}.{v.minor}: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt $(TORCH)
	$(BIN)/pip install --quiet -c constraints.txt -e ".[$(EXTRAS)]"
	@touch $@ $(LAB)

demo: $(LAB) ## Compare ten heads on the source of Python's own library, and write the page
	$(BIN)/lastlayer compare

test: lint unit docs ## Everything that must pass: lint, types, tests, doctests, docs

lint: $(READY) ## Style, types and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(READY) ## Tests and doctests
	$(BIN)/pytest -n 2 --dist worksteal

docs: $(READY) ## Build the documentation into docs/_build/html
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html

clean: ## Remove the environment, caches and built files
	rm -rf $(VENV) build dist docs/_build docs/_generated .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find src tests docs -type d -name __pycache__ -prune -exec rm -rf {} +
