# Every target does its own set-up: a virtual environment in .venv with torch and the package.
# Needs Python 3.10 or later and nothing else. Choose another one with `make test PYTHON=python3.12`.

PYTHON ?= python3
VENV ?= .venv
NP ?= 2

# Where there is no NVIDIA GPU: one torch version that we know the package with. Where there is one:
# what the package itself asks for, so that pip takes the build for that GPU.
TORCH ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo 'torch>=2.9' || echo 'torch==2.13.0')

BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test test-all test-cluster check format bench clean

help:
	@echo 'make demo      train on handwritten digits with $(NP) processes (NP=4 for four)'
	@echo 'make test      the tests, without the slow ones'
	@echo 'make test-all  all tests'
	@echo 'make test-cluster IMAGE=...  the end-to-end tests on the cluster of the kubeconfig'
	@echo 'make check     lint, formatting, types, layers'
	@echo 'make format    put the code into the form that check asks for'
	@echo 'make bench     the benchmarks: start of a job, train step, agreement on names'
	@echo 'make clean     remove the virtual environment and the caches'

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo 'Farandole needs Python 3.10 or later. Name one: make PYTHON=python3.12 ...'; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	  echo 'This Python cannot make virtual environments. On Debian and Ubuntu: apt install'; \
	  echo 'python3-venv. Or name another Python: make PYTHON=python3.12 ...'; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	# The schemas of an older Kubernetes, beside the newest ones. No package depends on it.
	$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/kubernetes-1.34 \
	  kubernetes-validate==1.34.1
	@touch $(READY)

demo: $(READY)
	$(BIN)/farandole run -np $(NP) examples/torch/digits.py

test: $(READY)
	$(BIN)/pytest -m 'not slow'

test-all: $(READY)
	$(BIN)/pytest

# IMAGE: any with python3, torch and scikit-learn. STORAGE_CLASS: of volumes for many nodes; the
# cluster's own choice without it. Namespaces are made and deleted, so it takes an administrator.
test-cluster: $(READY)
	@test -n '$(IMAGE)' || { echo 'Name an image: make test-cluster IMAGE=...'; exit 1; }
	$(BIN)/pytest tests/kubernetes/test_training.py tests/kubernetes/test_on_a_cluster.py \
	  --timeout 600 --cluster-image '$(IMAGE)' \
	  $(if $(STORAGE_CLASS),--storage-class '$(STORAGE_CLASS)')

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python bench/launch.py
	$(BIN)/python bench/step.py
	$(BIN)/python bench/autotune.py
	$(BIN)/python bench/negotiation.py
	$(BIN)/python bench/gpu_checks.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
