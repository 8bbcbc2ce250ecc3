# `make help` lists the verbs. Everything happens in .venv, made from requirements.lock (hashes, no index addresses).

PYTHON ?= python3
UV_VERSION := 0.13.8
BIN := .venv/bin
# Three test files at a time, with one thread each: whole runs wait for Ray and for servers half of their time.
PYTEST := OMP_NUM_THREADS=1 pytest -n 3 --dist loadfile --no-loadscope-reorder
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Some machines forbid Python to keep what it has compiled; each of the many processes of a run would then compile all its imports again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: python help reproduce test test-quick proofs smoke check audit mutants mutants-sample results docs ui stack clean lock

help: ## list the verbs
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

reproduce: .venv/.done ## prepare the embedded dataset, run the standing comparison end to end, show the result
	@dml reproduce

test: .venv/.done ## run all tests but the proofs
	@$(PYTEST) -m "not proof"

proofs: .venv/.done ## run the proofs: all tables, damaged files, killed processes and hosts, the local stack; 4 hours
	@$(PYTEST) -m proof

test-quick: .venv/.done ## run the tests that need no server, no Ray and no whole run
	@$(PYTEST) -m "not slow and not proof"

smoke: .venv/.done ## run every row of all 40 tables through the whole chain on a few drawn images; half an hour
	@dml reproduce '*/*' --smoke

mutants: .venv/.done ## mutation testing of losses, metrics, samplers and identities: which changed lines no quick test notices; more than an hour
	@OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 mutmut run --max-children 2
	@mutmut results

mutants-sample: .venv/.done ## mutation testing of a fixed sample, slow tests too: make mutants-sample FILES=tasks/models/card.py
	@OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 nice -n 10 python tests/mutants.py $(FILES)

check: .venv/.done ## lint, format, types, import rules, sizes of functions, modules and folders
	@ruff check .
	@ruff format --check .
	@mypy
	@lint-imports
	@pytest --quiet -p no:xdist tests/architecture/test_sizes.py tests/architecture/test_architecture.py -k "not import_rules"

audit: .venv/.done ## look for known vulnerabilities of the locked packages; needs a network, and fails if a package cannot be audited
	@pip-audit --strict --require-hashes --disable-pip --progress-spinner off --requirement requirements.lock

results: .venv/.done ## train the runs whose code or settings changed; update the committed results and dvc.lock
	@dvc repro comparison@synthetic comparison@fashion-mnist

docs: .venv/.done ## write the generated pages of docs/reference and build the site in site/, warnings as errors; needs no network
	@python -m infra.docs
	@NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet
	@echo "site/index.html"

ui: .venv/.done ## open the MLflow UI on the local results
	@dml ui

stack: .venv/.done ## start PostgreSQL, Prefect, MLflow, S3 and Ray on this machine; `dml stack down` ends them
	@dml stack up

clean: ## remove the environment, packed data, the built site, and state/ with all results and DVC's remote; raw data and DVC's cache stay
	rm -rf .venv build data/packed state site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

COMPILE := uv pip compile pyproject.toml --all-extras --universal --generate-hashes --no-emit-index-url --no-annotate --no-header \
	--no-emit-package dml-core --python-version 3.11 --quiet

lock: .venv/.done ## compile requirements.lock from pyproject.toml, and the image's part of it
	@$(COMPILE) --group dev --output-file requirements.lock
	@$(COMPILE) --constraint requirements.lock --output-file infra/requirements.lock

# An existing environment keeps its interpreter, whichever runs venv; python3 is that one, as PATH begins with it.
python:
	@test "$$(uname -sm)" = "Linux x86_64" || { echo "error: requirements.lock is for Linux on x86-64"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || \
		{ echo "error: $(PYTHON) is not Python 3.11 or 3.12; name one: make PYTHON=python3.12"; exit 2; }
	@test ! -e .venv/pyvenv.cfg || test -x $(BIN)/$$($(PYTHON) -c 'import sys; print("python%d.%d" % sys.version_info[:2])') || \
		{ echo "error: .venv has another Python than $(PYTHON), or one that was removed; remove it first: rm -r .venv"; exit 2; }

.venv/.done: requirements.lock pyproject.toml dml_core/pyproject.toml | python
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@$(BIN)/uv pip sync --quiet --python $(BIN)/python --require-hashes requirements.lock
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable dml_core --editable . uv==$(UV_VERSION)
	@touch $@
