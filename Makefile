# Everything is installed into .venv; `make help` lists the targets.
# PYTHON=... chooses the interpreter that .venv is made with; REDLOCK_...: see setup.py.

VENV := .venv
PY := $(VENV)/bin/python
PIP_INSTALL := $(PY) -m pip install -qq --disable-pip-version-check
SWITCHES := $(REDLOCK_DEBUG),$(REDLOCK_TRACE),$(REDLOCK_SANITIZE),$(REDLOCK_PROFILE)
CYTHON_SOURCES := $(shell find src -name '*.pyx' -o -name '*.pxd') \
    $(addprefix src/redlock_fast/,$(addsuffix .py,rules arguments resolve plan holds client asyncio))

.DELETE_ON_ERROR:
.PHONY: help setup demo test test-all peer-suites coverage sanitize lint docs optimised bench \
    bench-quick bench-instructions bench-tls smoke test-servers clean FORCE

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 20

setup: $(VENV)/installed ## make .venv, install what is needed, build the extension modules

demo: setup ## run the demonstration on servers of its own
	$(PY) demo/demo.py

test: setup ## the quick tests
	$(PY) -m pytest
	@echo 'These were the quick tests; "make test-all" runs all, also on the other loops.'

test-all: setup ## all tests, and the quick ones with sanitizers
	$(PY) -m pytest -m ''
	$(MAKE) peer-suites
	$(MAKE) sanitize

# Downloads the suites. With --original behind a command it tests the package itself.
peer-suites: setup ## the test suites of the packages that drop-ins replace, with the drop-ins
	$(PY) tests/peers/run.py redlock_py

# PYTHONS='python3.10 python3.13' chooses interpreters, PYTHONS=--all takes every CPython found;
# DIST=dist keeps what is built.
smoke: setup ## sdist and wheel, built, installed in an empty venv and tried
	$(PY) tests/smoke/run.py $(if $(DIST),--output $(DIST)) $(PYTHONS)

# Downloads servers, into build/servers; SERVERS='valkey-8.1 redis-7.0' chooses.
test-servers: setup ## the integration tests on Valkey 8.1, Redis 6.2, 7.0 and 8.2, one after the other
	$(PY) tests/servers/run.py $(SERVERS)

# Benchmarks import what lies there.
OPTIMISED := $(CURDIR)/build/optimised
AS_SHIPPED := PYTHONPATH=$(OPTIMISED)/src $(PY)

optimised: $(OPTIMISED)/trained ## the extension modules as in wheels, guided by a profile, in build/optimised

bench: setup optimised ## the benchmarks; writes docs/benchmarks.md (some ten minutes)
	$(AS_SHIPPED) bench/suite.py

bench-quick: setup ## the same, short and coarse, without `optimised`; writes build/bench
	$(PY) bench/suite.py --quick

bench-instructions: setup optimised ## instructions of one pair, by callgrind
	$(AS_SHIPPED) bench/instructions.py

# On a server that was built with TLS, which is fetched as those of test-servers are.
bench-tls: setup optimised ## pairs over TLS beside pairs without
	$(AS_SHIPPED) bench/tls.py --server "$$($(PY) tests/servers/run.py --path redis-7.0)"

# Apart from each other, since tests and bench have a conftest each.
RELAXED := $(addprefix --allow-,untyped-defs incomplete-defs untyped-calls untyped-decorators)
# What type checkers read has the names and signatures of what is compiled.
STUBTEST := --mypy-config-file pyproject.toml --concise --allowlist tests/no_stubs.txt \
    --ignore-unused-allowlist --ignore-disjoint-bases
lint: setup ## style, types and workflows
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy src
	$(PY) -m mypy $(RELAXED) tests
	$(PY) -m mypy $(RELAXED) bench demo
	PATH="$(VENV)/bin:$$PATH" cython-lint src
	$(PY) -m mypy.stubtest $(STUBTEST) redlock_fast
	$(VENV)/bin/zizmor --quiet --offline .github

docs: setup $(VENV)/docs-tools ## the documentation, as build/docs/index.html
	$(PY) -m sphinx -W --keep-going -q -E -b html docs build/docs

# In copies of the tree: these modules are slow, and the C files of traced ones must lie beside the
# sources, where coverage looks for them.
COPY = $(CURDIR)/build/copy
FRESH_COPY = rm -rf $(COPY) && mkdir -p $(COPY) && \
	tar -cf - $(addprefix --exclude=,./.git ./$(VENV) ./build ./.coverage '*.so') . | tar -xf - -C $(COPY)
IN_COPY = export PYTHONPATH=$(COPY)/src PATH="$(CURDIR)/$(VENV)/bin:$$PATH" && cd $(COPY)

$(OPTIMISED)/trained: COPY = $(OPTIMISED)
$(OPTIMISED)/trained: $(VENV)/build-tools setup.py bench/train.py $(CYTHON_SOURCES) \
    $(shell find src -name '*.py') | setup
	$(FRESH_COPY)
	$(IN_COPY) && \
	REDLOCK_PROFILE=generate python setup.py -q build_ext --inplace && python bench/train.py && \
	REDLOCK_PROFILE=use python setup.py -q build_ext --inplace --force
	@touch $@

coverage: setup ## line coverage of Python and Cython by the quick tests
	$(FRESH_COPY)
	export REDLOCK_TRACE=1 && $(IN_COPY) && python setup.py -q build_ext --inplace && \
	{ python -m coverage run -m pytest; status=$$?; python -m coverage report && exit $$status; }

sanitize: setup ## the quick tests with AddressSanitizer and UBSan
	$(FRESH_COPY)
	export REDLOCK_SANITIZE=address,undefined && $(IN_COPY) && python setup.py -q build_ext --inplace && \
	export LD_PRELOAD=$$(gcc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 && \
	export UBSAN_OPTIONS=halt_on_error=1 && \
	python -m pytest --deselect tests/integration/test_local_masters.py

clean: ## remove all that was made here, .venv too
	rm -rf $(VENV) build dist src/*.egg-info .coverage .hypothesis .benchmarks .*_cache
	find . -name __pycache__ -prune -exec rm -r {} +
	find src -name '*.so' -delete -o -name '*.c' -delete

# The steps of setup. Each leaves a stamp in .venv.

define CHECK_PYTHON
import os, shutil, sys, sysconfig
lacks = []
if sys.version_info < (3, 10) or sys.implementation.name != "cpython":
    lacks.append("is not CPython 3.10 or later")
try:
    import ensurepip, venv
except ImportError:
    lacks.append("cannot make virtual environments")
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    lacks.append("lacks its C headers")
if not shutil.which((os.environ.get("CC") or sysconfig.get_config_var("CC")).split()[0]):
    lacks.append("has no C compiler")
sys.exit("; ".join(lacks) or 0)
endef
export CHECK_PYTHON

$(PY):
	@for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.10); do \
	    if ! command -v $$python >/dev/null; then why='not found'; \
	    elif why=$$($$python -c "$$CHECK_PYTHON" 2>&1); then exec $$python -m venv --clear $(VENV); \
	    fi; echo "$$python: $$why" >&2; \
	done; \
	echo 'This needs CPython 3.10 or later with venv and its C headers, and a C compiler.' >&2; \
	echo 'On Debian: apt install python3-dev python3-venv gcc' >&2; \
	echo 'If one is elsewhere: make PYTHON=/path/to/python3' >&2; \
	exit 1

$(VENV)/build-tools: pyproject.toml $(PY)
	$(PIP_INSTALL) 'setuptools>=77' 'Cython>=3.1,<4'
	@touch $@

# Not part of setup: tests do without.
$(VENV)/docs-tools: pyproject.toml | $(VENV)/installed
	$(PIP_INSTALL) --no-build-isolation --check-build-dependencies -e '.[docs]'
	@touch $@

# Changes only when the switches do.
$(VENV)/switches: FORCE | $(PY)
	@echo '$(SWITCHES)' | cmp -s - $@ || echo '$(SWITCHES)' >$@

# setuptools knows when sources have changed, but not when flags have.
$(VENV)/built: $(VENV)/build-tools $(VENV)/switches setup.py $(CYTHON_SOURCES)
	$(PY) setup.py -q build_ext --inplace $(if $(filter-out $(CYTHON_SOURCES),$?),--force)
	@touch $@

# What is built already is not built again here.
$(VENV)/installed: $(VENV)/build-tools setup.py | $(VENV)/built
	$(PIP_INSTALL) --no-build-isolation --check-build-dependencies -e '.[test,bench,lint,local]'
	@touch $@
