# Two commands: `make up` serves the quick-start model, `make test` runs every test. Each works first, from a bare clone.
PYTHON ?= python3
VENV   := .venv
PIP    := $(VENV)/bin/python -m pip --disable-pip-version-check

.PHONY: up test lint clean
up: $(VENV)/.installed
	$(VENV)/bin/llamaops up examples/quickstart.yaml

test: lint
	$(VENV)/bin/python -m pytest

lint: $(VENV)/.installed-test
	$(VENV)/bin/ruff check --quiet .
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache

$(VENV)/.python:
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; install Python 3.11 or later (Debian: apt install python3 python3-venv)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $$($(PYTHON) --version) is too old; llamaops needs Python 3.11 or later (make PYTHON=python3.11)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "error: $(PYTHON) has no ensurepip; install it (Debian: apt install python3-venv)" >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.python pyproject.toml constraints.txt
	@echo "installing llamaops into $(VENV)" >&2
	@$(PIP) install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.python pyproject.toml constraints.txt
	@echo "installing llamaops and its test tools into $(VENV)" >&2
	@$(PIP) install --quiet --constraint constraints.txt --editable '.[test]'
	@touch $@ $(VENV)/.installed
