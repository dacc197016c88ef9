# `make serve` and `make test` set up what they need; the second run skips the set-up.
#
#   make serve PORT=9000 ARGS="--model mine=DIR"
#   make test ARGS="tests/unit -k cache"
#
# TORCH_INDEX=URL chooses a torch build from a package index (see docs/docker.md for the URLs);
# without it pip takes the one it prefers.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TGI_VENV := .venv-tgi
MIN_PYTHON := (3, 11)

# The first interpreter on the path that is new enough. Override with PYTHON=/path/to/python.
PYTHON ?= $(shell for candidate in python3 python3.13 python3.12 python3.11; do \
	$$candidate -c 'import sys; sys.exit(sys.version_info < $(MIN_PYTHON))' 2>/dev/null \
	&& echo $$candidate && break; done)

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-browser test-ray test-cluster ray-tools soak bench check format checksums deploy-tools manifests \
	image release-tools locks audit dist clean tgi-client

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(STAMP) ## Create .venv and install the project with its extras

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { \
		echo "seqserve needs Python 3.11 or newer, and none was found on the path" \
		     "(python3 is: $$(python3 --version 2>&1)). Install one, or name it: make $(or $(MAKECMDGOALS),setup) PYTHON=/path/to/python3.11" >&2; \
		exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < $(MIN_PYTHON))' || { \
		echo "seqserve needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	$(BIN)/python -m pip install --disable-pip-version-check \
		$(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)") --editable ".[server,hub,check,dev]"
	@touch $@

serve: setup ## Serve the shipped models: PORT=9000, ARGS="--model mine=DIR"
	$(BIN)/seqserve serve $(if $(PORT),--port $(PORT)) $(ARGS)

ON_RAY := $(BIN)/python -m pytest --on-ray tests/api tests/cluster -k on_ray

test: check tgi-client deploy-tools ray-tools ## Format, lint and type checks, then the tests: ARGS="-k name" picks some
	$(BIN)/python -m pytest $(ARGS)
	$(if $(ARGS),,$(ON_RAY))

# Only root can install a browser; whoever is not gets told the command.
test-browser: setup ## The page in a real browser, and its pictures in docs/pictures
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable ".[browser]"
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || { \
		test "$$(id -u)" = 0 && apt-get update && apt-get install --yes --no-install-recommends chromium; } || { \
		echo "the page's tests need chromium: sudo apt-get install chromium" >&2; exit 1; }
	PICTURES=docs/pictures $(BIN)/python -m pytest tests/browser $(ARGS)

soak: setup ## 20,000 requests of every kind to a real server: ARGS="--write docs/reliability.md"
	$(BIN)/python -m tests.soak $(ARGS)

ray-tools: $(VENV)/.ray-tools ## Install Ray Serve

$(VENV)/.ray-tools: $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable ".[ray]"
	@touch $@

test-ray: setup ray-tools ## The tests of the HTTP API again, with two replicas on Ray, and `serve deploy`
	$(ON_RAY) $(ARGS)

test-cluster: setup ray-tools ## Kill replicas and nodes of a Ray cluster under load: ARGS="--write docs/scaling.md"
	$(BIN)/python -m tests.cluster $(ARGS)

bench: setup ## Speed beside CTranslate2 and transformers: ARGS="--shape marian-base --batch 8"
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable ".[bench]"
	$(BIN)/python -m benchmarks.offline $(ARGS)

tgi-client: $(TGI_VENV)/.installed ## Create .venv-tgi, where a test runs the client of text-generation-inference

$(TGI_VENV)/.installed:
	$(PYTHON) -m venv $(TGI_VENV)
	$(TGI_VENV)/bin/python -m pip install --disable-pip-version-check "text-generation>=0.7,<1"
	@touch $@

check: setup ## Format, lint and type checks only
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup ## Format the code and apply the safe lint fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

deploy-tools: $(VENV)/.deploy-tools ## Install what the tests check chart, manifests and compose file with

$(VENV)/.deploy-tools: $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable ".[deploy]"
	@touch $@

manifests: deploy-tools ## Write the plain manifests of Kubernetes from the chart
	$(BIN)/python deploy/kubernetes/render.py

image: ## Build the image without Docker, as root, and see that it keeps its promises: ARGS="seqserve --build-arg ..."
	deploy/build-with-buildah.sh $(ARGS)

release-tools: setup
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable ".[release]"

locks: release-tools ## Write the image's lock files anew, with the newest releases that pyproject.toml allows
	TORCH_INDEX=$(TORCH_INDEX) $(BIN)/python deploy/locks/refresh.py

audit: release-tools ## Ask whether packages in the lock files have known vulnerabilities
	$(BIN)/python deploy/locks/audit.py

dist: release-tools ## Build wheel and sdist, test the sdist from a clean directory, write the bills of materials
	$(BIN)/python deploy/dist.py

checksums: ## Write anew the hashes of the shipped weights, which every load checks
	for directory in weights/*/; do (cd $$directory && sha256sum config.json *.safetensors *_tokenizer.* > SHA256SUMS); done

clean: ## Remove .venv, caches and builds
	rm -rf $(VENV) $(TGI_VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
