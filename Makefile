# One file of verbs: people, hooks and CI use the same ones. `make help` lists them.
#
# Everything happens in .venv, which the verbs make themselves. Nothing is done twice: each step leaves
# a stamp that depends on its sources.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -q
CARGO ?= cargo

WORKERS ?=
CONNECTORS ?=
READERS ?=
SEED ?= 1
ARGS ?=
ONLY ?=
ENGINE ?=
FUZZ_SECONDS ?= 60

SOURCES := $(shell find rust/core/src rust/py/src python -type f \( -name '*.rs' -o -name '*.py' -o -name '*.pyi' -o -name py.typed \)) \
	Cargo.toml Cargo.lock pyproject.toml rust/core/Cargo.toml rust/py/Cargo.toml README.md LICENSE
INSTALLED := $(VENV)/.installed
TOOLS := $(VENV)/.tools
WHEEL := dist/.built
ENGINE_SITE := target/engine-site
KVEVENTS_SHARED ?= ../shared
KVEVENTS_ENGINE ?= $(HOME)/.cache/kvevents/engine
VLLM := PYTHONPATH=$(CURDIR)/$(ENGINE_SITE):$(CURDIR)/examples $(KVEVENTS_ENGINE)/bin/python
TINY := $(KVEVENTS_ENGINE)/share/engine/tiny-llama

.DEFAULT_GOAL := help
.PHONY: help demo test test-rust test-py check fmt stubs seam bench bench-smoke bench-rust trace wheel sdist docs fuzz chaos soak \
	develop clean demo-vllm test-vllm bench-vllm

help:  ## this list
	@grep -hE '^[a-z-]+:.*  ## ' $(MAKEFILE_LIST) | awk -F ':.*  ## ' '{printf "  %-12s %s\n", $$1, $$2}'
	@echo "  variables: PYTHON=$(PYTHON) ARGS= (demo, trace, fuzz, soak) WORKERS= CONNECTORS= READERS= (demo) ONLY= ENGINE=DIR (bench) FUZZ_SECONDS=$(FUZZ_SECONDS) (fuzz)"

# ------------------------------------------------------------------ environment, wheel, installation

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or later is needed: make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.maturin: | $(PY)
	$(PIP) install 'maturin>=1.9.4,<2'
	@touch $@

$(TOOLS): pyproject.toml | $(PY)
	$(PY) -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		print(*p["dependencies"], *sum(p["optional-dependencies"].values(), []), sep="\n")' > $(VENV)/requirements.txt
	$(PIP) install -r $(VENV)/requirements.txt
	@touch $@ $(VENV)/.maturin

$(WHEEL): $(SOURCES) | $(VENV)/.maturin
	@command -v $(CARGO) >/dev/null || { echo "Rust 1.88 or later is needed (cargo was not found)"; exit 1; }
	@rm -f dist/*.whl
	$(PY) -m maturin build --release --locked --out dist
	@touch $@

$(INSTALLED): $(WHEEL) | $(PY)
	$(PIP) install dist/*.whl
	$(PIP) install --force-reinstall --no-deps dist/*.whl
	@touch $@

wheel: $(WHEEL)  ## the release wheel, in dist/
	@ls -l dist/*.whl

sdist: $(TOOLS)  ## the source distribution in dist/, and a wheel built from it in a clean folder, offline
	@rm -rf target/sdist dist/*.tar.gz && mkdir -p target/sdist
	$(PY) -m maturin sdist --out dist
	tar -xzf dist/kvevents-*.tar.gz -C target/sdist --strip-components 1
	cd target/sdist && PATH="$(CURDIR)/$(VENV)/bin:$$PATH" CARGO_NET_OFFLINE=true $(CURDIR)/$(PY) -m pip wheel . -q --no-deps --no-index --no-build-isolation -w wheel
	@ls -l dist/*.tar.gz target/sdist/wheel/*.whl

develop: $(TOOLS)  ## an editable install, built in seconds; for work on the package
	$(PY) -m maturin develop -q --profile quick
	@rm -f $(INSTALLED)

clean:  ## remove what the verbs made
	rm -rf $(VENV) dist target site

# ------------------------------------------------------------------ the main job

demo: $(INSTALLED)  ## the main job end to end, in separate processes, with faults on the way
	$(VENV)/bin/kvevents demo $(strip $(if $(WORKERS),--workers $(WORKERS)) \
		$(if $(CONNECTORS),--connectors $(CONNECTORS)) $(if $(READERS),--readers $(READERS)) $(ARGS))

trace: $(INSTALLED)  ## the one-hour trace through a pool: hit rate and rate of work
	$(PY) benches/trace_hour.py $(ARGS)

# ------------------------------------------------------------------ tests and checks

test: test-rust test-py  ## every test, Rust and Python, on the installed wheel

test-rust:  ## the core's tests, without Python
	$(CARGO) test --locked -q -p kvevents-core

test-py: $(INSTALLED) $(TOOLS)  ## the Python tests, on the installed wheel
	KVEVENTS_ENGINE= KVEVENTS_TEST_INSTALLED=1 $(PY) -m pytest -q $(ARGS)

check: $(INSTALLED) $(TOOLS)  ## formatting, lints, types, stubs, seam
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked -q --workspace --all-targets -- -D warnings
	$(VENV)/bin/ruff format --check -q .
	$(VENV)/bin/ruff check -q .
	$(VENV)/bin/mypy
	$(MAKE) --no-print-directory seam

fmt: $(TOOLS)  ## format everything
	$(CARGO) fmt --all
	$(VENV)/bin/ruff format -q .
	$(VENV)/bin/ruff check -q --fix .

stubs: $(INSTALLED) $(TOOLS)  ## _core.pyi against the extension
	$(VENV)/bin/stubtest kvevents._core --allowlist tests/stubtest-allowlist.txt

seam: $(INSTALLED) $(TOOLS)  ## the guards of the Rust/Python seam, stubs among them
	KVEVENTS_TEST_INSTALLED=1 $(PY) -m pytest -q tests/test_seam.py

fuzz:  ## every fuzz target for FUZZ_SECONDS; without a nightly compiler their corpus, as plain tests
	CARGO=$(CARGO) FUZZ_SECONDS=$(FUZZ_SECONDS) rust/fuzz/run.sh $(ARGS)

chaos: $(INSTALLED) $(TOOLS)  ## the long runs: the whole-system simulation (SEED=, 10^6 steps), property, concurrency and integration tests
	$(PY) -m kvevents.testing.system --seed $(SEED) --worlds 10 --steps 100000 --jobs 2
	PROPTEST_CASES=$${PROPTEST_CASES:-20000} KVEVENTS_CHAOS=1 KVEVENTS_WORKER_EVENTS=$${WORKER_EVENTS:-10000000} $(CARGO) test --locked -q --profile quick -p kvevents-core -- --include-ignored
	KVEVENTS_TEST_INSTALLED=1 KVEVENTS_CHAOS=1 KVEVENTS_HYPOTHESIS=slow $(PY) -m pytest -q --timeout 3600 \
		tests/property tests/concurrency tests/integration $(ARGS)

soak: $(INSTALLED)  ## the whole system over real ZMQ for ten minutes: does memory grow? ARGS="--seconds 600"
	$(PY) -m kvevents.demo.soak $(ARGS)

# ------------------------------------------------------------------ inside a real vLLM

$(KVEVENTS_ENGINE)/bin/python:
	@echo "setting up vLLM for CPU in $(KVEVENTS_ENGINE): 2.6 GB, 4.5 GB while installing (KVEVENTS_ENGINE=DIR for an environment that is there)"
	bash $(KVEVENTS_SHARED)/engine/setup_engine.sh $(KVEVENTS_ENGINE)

$(ENGINE_SITE)/.installed: $(INSTALLED)
	@rm -rf $(ENGINE_SITE)
	$(PIP) install --no-deps --target $(ENGINE_SITE) dist/*.whl
	@touch $@

demo-vllm: $(ENGINE_SITE)/.installed | $(KVEVENTS_ENGINE)/bin/python  ## a real engine, two workers, two tiers, and a reader that must hold the same
	$(VLLM) examples/vllm_demo.py --model $(TINY) --logs target $(ARGS)

test-vllm: $(ENGINE_SITE)/.installed | $(KVEVENTS_ENGINE)/bin/python  ## against real vLLM: its own tests, captures, faults; ONLY="captures events" some of it
	$(VLLM) tests/vllm_plugin/prove.py $(KVEVENTS_ENGINE) $(KVEVENTS_SHARED)/engine $(ENGINE_SITE) target/vllm $(ONLY)

bench-vllm: $(ENGINE_SITE)/.installed | $(KVEVENTS_ENGINE)/bin/python  ## figures inside a vLLM environment, stock against the plug-in; ONLY=publish one concept
	$(VLLM) -m benches.engine $(foreach c,$(ONLY),--only $(c)) $(ARGS)

# ------------------------------------------------------------------ figures and docs

bench: $(INSTALLED) $(TOOLS)  ## the tables that the docs quote; ONLY=pool one concept, ENGINE=DIR beside a real vLLM
ifeq ($(ENGINE),)
	$(PY) -m benches $(if $(ONLY),--only $(ONLY)) $(ARGS)
else
	@rm -rf $(ENGINE_SITE)
	$(PIP) install --no-deps --target $(ENGINE_SITE) dist/*.whl
	@touch $(ENGINE_SITE)/.installed
	PYTHONPATH=$(ENGINE_SITE) $(ENGINE)/bin/python -m benches $(if $(ONLY),--only $(ONLY)) $(ARGS)
endif

bench-smoke: $(INSTALLED) $(TOOLS)  ## every benchmark once: does it still give the right answer?
	$(PY) -m pytest -q benches --benchmark-disable

bench-rust:  ## the core's own benchmarks (criterion)
	$(CARGO) bench --locked -p kvevents-core

docs: $(TOOLS)  ## the documentation as a site, in site/
	$(PIP) install 'mkdocs-material>=9.5,<10'
	$(VENV)/bin/mkdocs build --strict -q
