# What people, the pre-commit hooks and CI run. All of it works from a clean clone with Python >= 3.11 and no root.

BIN := .venv/bin
RUN := $(BIN)/python -m
LUA := build/lua
TYPED := $(foreach folder,guard_middleware actors settings tests/typing,$(if $(wildcard $(folder)/*.py),$(folder)))
LUACHECK ?= luacheck
PYTEST ?= $(RUN) pytest -n 3 --dist worksteal

.PHONY: help venv check format format-check lint types imports lua test test-fast bench demo clean

help:
	@echo "make venv       set up .venv (every other target does it, too)"
	@echo "make check      format, lint, types, import rule, Lua"
	@echo "make format     put the format right, and the lint faults that a machine can"
	@echo "make test       all tests; they start what they need       (ARGS='-k breaker -x')"
	@echo "make test-fast  those that take no more than seconds"
	@echo "make bench      the figures of docs/performance.md, side by side with others: 25 minutes (QUICK=1: 4)"
	@echo "make demo       a model server that can die, its workers, and the guard in between"
	@echo "make clean      remove what was built, and .venv"

# ---------------------------------------------------------------- environment

venv: .venv/.installed

# The first Python that is new enough and can make environments; PYTHON=... decides otherwise.
.venv/.installed: pyproject.toml
	@set -e; \
	able='import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))'; \
	if [ ! -x $(BIN)/python ]; then \
	    for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.14 python); do \
	        if "$$python" -c "$$able" >/dev/null 2>&1; then found=$$python; break; fi; \
	    done; \
	    if [ -z "$${found:-}" ]; then \
	        echo "make venv: no Python >= 3.11 with the modules venv and ensurepip." >&2; \
	        echo "  Install one (Debian and Ubuntu: python3 and python3-venv), or name it: make venv PYTHON=/path/to/python3" >&2; \
	        exit 1; \
	    fi; \
	    echo "making .venv with $$($$found --version)"; \
	    "$$found" -m venv .venv; \
	fi; \
	$(RUN) pip install --quiet --disable-pip-version-check --editable '.[dev]'; \
	touch $@

# ---------------------------------------------------------------- checks

check: format-check lint types imports lua

format: venv
	$(RUN) ruff check --fix-only --quiet .
	$(RUN) ruff format .

format-check: venv
	$(RUN) ruff format --check .

lint: venv
	$(RUN) ruff check .

types: venv
	$(RUN) mypy $(TYPED)

imports: venv
	$(BIN)/lint-imports --no-logo --no-cache

# Never passes unseen: where there is no luacheck, say so and fail, unless told LUACHECK=skip.
lua: venv
	$(RUN) guard_middleware.store.scripts --write $(LUA)
	@if [ "$(LUACHECK)" = skip ]; then \
	    echo "luacheck: skipped, as LUACHECK=skip asks"; \
	elif ! command -v "$(LUACHECK)" >/dev/null; then \
	    echo "luacheck is not installed. Debian and Ubuntu: apt-get install lua-check; elsewhere: luarocks install luacheck." >&2; \
	    echo "To go without: make check LUACHECK=skip" >&2; \
	    exit 1; \
	elif ls $(LUA)/*.lua >/dev/null 2>&1; then \
	    "$(LUACHECK)" --no-color --quiet $(LUA); \
	else \
	    echo "luacheck: there are no scripts"; \
	fi

# ---------------------------------------------------------------- tests and runs

test: venv
	$(PYTEST) $(ARGS)

test-fast: venv
	$(PYTEST) -m "not slow" $(wildcard tests/unit tests/contract tests/property) $(ARGS)

# exec: an interrupt reaches the program itself, which ends what it started.
bench: venv $(if $(filter-out 0,$(QUICK)),,.venv/.bench)
	@exec $(RUN) benchmarks $(ARGS)

# What callers are compared with. Without an index the benchmark goes on, and says what it leaves out.
.venv/.bench: .venv/.installed
	@if $(RUN) pip install --quiet --disable-pip-version-check --editable '.[bench]'; then touch $@; else \
	    echo "make bench: without the packages of the extra 'bench'" >&2; \
	fi

demo: venv
	@exec $(RUN) actors.demo $(ARGS)

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
