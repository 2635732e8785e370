# Everything runs in a virtual environment of this checkout. The stamp files inside it remember what was installed, so
# that a second run installs again only after pyproject.toml, constraints.txt or the version changed.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INPUTS := pyproject.toml constraints.txt ckpt_service/_version.py

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test check bench clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "PYTHON=/path/to/python3 chooses the interpreter, PYTEST_ARGS='-k name' the tests, ARGS='--gigabytes 0.3' the benchmark."

demo: $(VENV)/.installed ## install what is needed to run, then show the demo
	@$(BIN)/ckpt-service demo

test: $(VENV)/.installed-dev ## run the test suite
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(VENV)/.installed-dev ## lint, formatting, types and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict -p ckpt_service -p trainer_hooks
	$(BIN)/lint-imports

bench: $(VENV)/.installed-bench ## what saves cost here, ours and those of others (a few minutes)
	@$(BIN)/python -m benchmarks $(ARGS)

clean: ## remove the virtual environment, caches and build output
	rm -rf $(VENV) build dist
	find . -name .git -prune -o -type d \( -name __pycache__ -o -name .pytest_cache -o -name .mypy_cache \
	  -o -name .ruff_cache -o -name .import_linter_cache -o -name .hypothesis \) -prune -exec rm -rf {} +

$(VENV)/.created:
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "error: '$(PYTHON)' was not found. Install Python 3.10 or newer, or name one: make PYTHON=/path/to/python3" >&2; \
	  exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: Python 3.10 or newer is needed, but '$(PYTHON)' is $$("$(PYTHON)" -V 2>&1)." >&2; \
	  echo "Name a newer one: make PYTHON=/path/to/python3" >&2; \
	  exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' cannot make virtual environments: its modules venv and ensurepip are missing." >&2; \
	  echo "On Debian and Ubuntu they come with: apt-get install python3-venv" >&2; \
	  exit 1; }
	"$(PYTHON)" -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(INPUTS) | $(VENV)/.created
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(INPUTS) | $(VENV)/.created
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $(VENV)/.installed $@

$(VENV)/.installed-bench: $(INPUTS) | $(VENV)/.created
	$(PIP) install -c constraints.txt -e '.[bench]'
	@touch $(VENV)/.installed $@
