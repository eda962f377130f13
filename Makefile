# make demo: quantize the small model in models/ and print the result.
# make test: lint, types, and the whole suite in both environments.
PYTHON ?= python3
PIP = -m pip install --quiet --disable-pip-version-check
TRAINING = .venv-training
STOCK = .venv-stock

.PHONY: demo test lint test-training test-stock clean

demo: $(TRAINING)/.ready
	$(TRAINING)/bin/onnxcalib demo

test: lint test-training test-stock

lint: $(TRAINING)/.ready
	$(TRAINING)/bin/ruff check onnxcalib tests tools
	$(TRAINING)/bin/ruff format --check onnxcalib tests tools
	$(TRAINING)/bin/mypy

test-training: $(TRAINING)/.ready
	$(TRAINING)/bin/python -m pytest -n 2

test-stock: $(STOCK)/.ready
	$(STOCK)/bin/python -m pytest -n 2

# One runtime an environment: the two packages overwrite each other's files.
$(TRAINING)/.ready: pyproject.toml
	$(PYTHON) -m venv $(TRAINING)
	$(TRAINING)/bin/python $(PIP) -e ".[training,dev]"
	touch $@

$(STOCK)/.ready: pyproject.toml
	$(PYTHON) -m venv $(STOCK)
	$(STOCK)/bin/python $(PIP) -e ".[runtime,dev]"
	touch $@

clean:
	rm -rf $(TRAINING) $(STOCK) demo
