# What newcomers and continuous integration call. `make` alone lists the targets.
PYTHON ?= python3
BIN := .venv/bin
SCORE_DIR ?= .score
SCALE ?= certified
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
HASHED := --require-hashes --constraint constraints.txt
UPGRADE ?=
# tests wait for brokers, pages and disks: those of `make test` leave a core idle for little of the time of one worker
# more than cores, those of `make test-all` for a quarter of it
WAITING := 1
WORKERS ?= $(shell cores=$$(nproc 2> /dev/null || echo 2); echo $$((cores + $(WAITING) < 4 ? cores + $(WAITING) : 4)))
PYTEST = $(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder

# without compiled files, each worker and each started command would compile every module anew
test test-all: export PYTHONDONTWRITEBYTECODE :=
test-all: export FLEETPULSE_TEST_ALL_EXAMPLES := 1
test-all: WAITING := 2

.DEFAULT_GOAL := help
.PHONY: help install run test test-all lint types parts docs pictures soak bench score compose-test dist constraints clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: .venv/.installed ## make .venv with the command .venv/bin/fleetpulse

run: .venv/.installed ## start the demo: this host and a simulated fleet, dashboard on http://127.0.0.1:8501
	@$(BIN)/fleetpulse demo

test: .venv/.tests-installed ## run the tests of every change; style, types and import rules are among them
	@$(PYTEST) -m "not extended"

test-all: .venv/.tests-installed ## run what `make test` leaves out: all real parts, large simulated fleets, all examples of properties
	@$(PYTEST) -m "extended or hypothesis"

lint: .venv/.tests-installed ## check and format-check with ruff
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: .venv/.tests-installed ## check types strictly
	@$(BIN)/mypy

docs: .venv/.installed ## write docs/{signals,events,detectors,simulator,exporters}.md anew from the code
	@PYTHONPATH=. $(BIN)/python -P docs/generate.py

pictures: .venv/.tests-installed ## make the pictures of README and docs from the demo, in a headless Chromium
	@PYTHONPATH=. $(BIN)/python -P docs/pictures.py

soak: .venv/.tests-installed ## run for hours: new examples of all properties, a day of faults against the agent, a killed and a frozen broker, a million hostile inputs of each format, 1,000 kills of the pipeline (HOURS=n MINUTES=n ROUNDS=n)
	@FLEETPULSE_TEST_ALL_EXAMPLES=1 FLEETPULSE_TEST_NEW_EXAMPLES=1 $(PYTEST) -m hypothesis
	@$(BIN)/python -m benchmarks.storm --hours $(or $(HOURS),24)
	@$(BIN)/python -m benchmarks.outage --minutes $(or $(MINUTES),10)
	@$(BIN)/python -m benchmarks.outage --minutes $(or $(MINUTES),10) --freeze
	@$(BIN)/python -m benchmarks.hostile_messages
	@for form in otlp prometheus1 prometheus2; do $(BIN)/python -m benchmarks.hostile_requests $$form || exit 1; done
	@$(BIN)/python -m benchmarks.kills --rounds $(or $(ROUNDS),1000)

bench: .venv/.installed ## print the figures of the README
	@for name in ingest kafka agent_stream otlp history live; do echo "== benchmarks/$$name.py"; $(BIN)/python -m benchmarks.$$name || exit 1; done

score: .venv/.installed ## judge the simulated suites and write docs/detection.md: hours, goes on where it was stopped (SCALE=training or small, HOURS=n)
	@test -f $(SCORE_DIR)/trials.json || $(BIN)/python -m benchmarks.detection.trials --results $(SCORE_DIR)
	@$(BIN)/python -m benchmarks.detection.suite --scale $(SCALE) $(if $(HOURS),--hours $(HOURS)) --results $(SCORE_DIR)

parts: ## install what tests need beyond Python: Chromium, Java, Maven, Kafka's jars, PyTorch (PARTS="dist helm": only these; Debian or Ubuntu, as root)
	@PYTHON="$(PYTHON)" deploy/parts.sh $(PARTS)

compose-test: .venv/.tests-installed ## bring docker-compose.yml up for real, kill its broker, take it down (RESULTS=folder)
	@PYTHON=$(BIN)/python deploy/compose_test/run $(RESULTS)

dist: .venv/.tests-installed ## build wheel, sdist, bundles, deb, rpm, bills of materials and checksums into dist/ (KINDS="wheel agent server")
	@PYTHON=$(BIN)/python deploy/packages/make $(KINDS)

constraints: .venv/.made ## write constraints.txt anew for pyproject.toml, with the hashes of all files (UPGRADE=--upgrade: newest versions)
	@$(PYTHON) -m venv .venv/uv && .venv/uv/bin/python -m pip --disable-pip-version-check --quiet install uv
	@head -2 constraints.txt > .venv/head && .venv/uv/bin/uv pip compile --quiet --universal --python-version 3.11 $(UPGRADE) \
	    --generate-hashes --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
	    --extra all --group pyproject.toml:dev pyproject.toml deploy/build.txt --output-file constraints.txt
	@cat .venv/head constraints.txt > .venv/both && cp .venv/both constraints.txt

clean: ## remove .venv and caches
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
	@find agents pipeline detectors dashboards tests benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Fleetpulse needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0] + ". Say which: make install PYTHON=python3.11")'
	@$(PYTHON) -m venv .venv
	@sed -n '/^pip==/,/[^\\]$$/p' constraints.txt > .venv/pip.txt # an older pip knows hashes in requirements alone
	@$(PIP) install --require-hashes --requirement .venv/pip.txt
	@touch $@

.venv/.installed: .venv/.made pyproject.toml constraints.txt
	@echo "installing into .venv ..." >&2
	@$(BIN)/python deploy/requirements.py all > .venv/requirements.txt
	@$(PIP) install $(HASHED) --requirement .venv/requirements.txt
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

.venv/.tests-installed: .venv/.installed
	@echo "installing what tests need into .venv ..." >&2
	@$(PIP) install $(HASHED) --group dev
	@touch $@
