# Everything a developer or CI runs. Each target installs what it needs and says what it does; see `make help`.
PYTHON := .venv/bin/python
export UV_SYSTEM_CERTS := 1
UV := $(or $(BIDIKV_CACHE),$(HOME)/.cache/bidikv)/tools/bin/uv
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-unit test-cluster test-engine bench-kv bench-router bench-paths bench-operator soak-kv lint format generate constraints images engine \
        cluster-up cluster-down cluster-status clean

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

setup:  ## Python environment in .venv (idempotent)
	@e2e/setup.sh

engine: setup  ## vLLM and NIXL on CPU and the demo's model, in the cache (idempotent)
	@$(PYTHON) -m e2e.engine.provision

images: setup  ## Build the operator, runtime and engine images and load them into the local cluster
	@$(PYTHON) -m e2e.images

cluster-up: setup  ## Start the local Kubernetes, or check the one that KUBECONFIG names
	@$(PYTHON) -m e2e.cluster up

cluster-down: setup  ## Stop the local Kubernetes and everything it started
	@$(PYTHON) -m e2e.cluster down

cluster-status: setup  ## Show the cluster's state and its KUBECONFIG
	@$(PYTHON) -m e2e.cluster status

demo: cluster-up images engine  ## Three agent conversations on a real Kubernetes, with and without reuse
	@$(PYTHON) -m e2e.demo

test: lint cluster-up images engine  ## All tests
	@echo "The cluster keeps running after the tests; \`make cluster-down\` stops it."
	@$(PYTHON) -m pytest

test-unit: setup  ## Tests that need nothing but Python
	@$(PYTHON) -m pytest -m "not cluster and not engine"

test-cluster: cluster-up images engine  ## Tests on the real Kubernetes
	@$(PYTHON) -m pytest -m cluster

test-engine: engine  ## Tests on real vLLM engines as host processes
	@$(PYTHON) -m pytest -m engine

bench-kv: engine  ## Time to first token by turn, beside a monolith and upstream's connector (40 minutes)
	@$(PYTHON) -m e2e.bench.kv $(ARGUMENTS)

bench-router: setup  ## The router beside vllm-router, on one core each: speed, CPU, memory (30 minutes)
	@$(PYTHON) -m e2e.bench.router $(ARGUMENTS)

bench-paths: engine  ## The paths of a turn on real engines: time to first token, what the router chooses (7 minutes)
	@$(PYTHON) -m e2e.bench.paths $(ARGUMENTS)

bench-operator: setup  ## The operator with 1,000 resources on an API server of its own: time, CPU, memory, calls (4 minutes)
	@$(PYTHON) -m e2e.bench.operator $(ARGUMENTS)

MINUTES := 10
soak-kv: engine  ## The KV protocol under kills, freezes, aborts and evictions; every answer is checked (MINUTES=10)
	@$(PYTHON) -m e2e.bench.soak --minutes $(MINUTES) $(ARGUMENTS)

lint: setup  ## ruff, mypy strict, import rules
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy && .venv/bin/lint-imports

format: setup  ## Format the code
	@.venv/bin/ruff check --fix . ; .venv/bin/ruff format .

generate: setup  ## Regenerate crds/ and the chart's copy from the models
	@$(PYTHON) -m bidikv_operator.api.crd --write

constraints: setup  ## Resolve constraints.txt anew from pyproject.toml
	@$(UV) pip compile -q --python-version 3.11 --all-extras --group dev pyproject.toml -o constraints.txt --upgrade

clean:  ## Remove build outputs in the tree (the cache stays)
	@rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
