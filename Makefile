# make test     everything that must hold before a commit
# make demo     the main job, for real, on a small model
# Needs Python 3.11 or later with venv and pip; PYTHON=... chooses one. The rest comes from PyPI, in
# the versions of constraints.txt. On Linux, PyPI's torch brings CUDA libraries; to do without, set
# PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds.

# A name may be on PATH and still not run (pyenv), so ask each to.
PYTHON ?= $(shell for p in python3.11 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed.stamp
PROTO := kvtier/v1/cache.proto
PROTOC = $(BIN)/python -m grpc_tools.protoc -I proto proto/$(PROTO)

.DELETE_ON_ERROR:
.PHONY: test demo lint format proto proto-check install clean

test: lint
	$(BIN)/pytest

demo: $(STAMP)
	$(BIN)/kvtier demo

lint: $(STAMP) proto-check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(STAMP)
	$(PROTOC) --python_out=. --pyi_out=. --grpc_python_out=.

# The generated code in kvtier/v1 is what cache.proto gives.
proto-check: $(STAMP)
	@rm -rf build/proto && mkdir -p build/proto
	@$(PROTOC) --python_out=build/proto --pyi_out=build/proto --grpc_python_out=build/proto
	@for file in build/proto/kvtier/v1/*; do \
		diff -u "kvtier/v1/$$(basename $$file)" "$$file" || { echo "run: make proto"; exit 1; }; done

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or later on PATH: make PYTHON=..."; exit 1; }
	$(BIN)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[engine,dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
