# `make run` and `make test` are all a fresh clone needs: both make the virtual environment first, `run` without what
# only tests need.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
PLUGIN_TESTS := $(PLUGINS:%=test-%)
# Ranks are forked from large processes, which have fewer pages to copy if these are huge: a tenth of a short run.
FORKS := GLIBC_TUNABLES=glibc.malloc.hugetlb=1
# Three files at a time: many tests wait for ranks. Small files are the last, so that all workers end together.
PYTEST := $(FORKS) $(BIN)/python -m pytest --numprocesses=3 --dist=loadfile --no-loadscope-reorder

# WHEELS=FOLDER: a machine without network. What PYTHON has, torch above all, is used; the rest comes from the folder.
ifdef WHEELS
export PIP_NO_INDEX = 1
export PIP_FIND_LINKS = $(abspath $(WHEELS))
endif

# Tests start hundreds of Pythons: where no bytecode may be kept, each would compile all that it imports.
export PYTHONDONTWRITEBYTECODE =

.PHONY: run package test test-package test-all test-fast test-portable test-versions test-gpu test-gpus test-pretended gpu gpu-wheels pretend-cuda test-plugins test-plugins-together $(PLUGIN_TESTS) bench museum lint docs clean

run: $(BIN)/ddpforge    ## train the digits recipe in 2 processes, on the CPU: a GPU holds one
	$(BIN)/ddpforge launch digits --nproc 2 --fresh --set train.device=cpu

# The cores are busy all the time: what is beside the tests of runs takes what these leave while they wait for ranks.
test: $(VENV)/installed    ## style, types, tests and those of the plugins, in a quarter of an hour on two cores
	nice $(MAKE) --output-sync lint test-plugins-together & rest=$$!; \
	$(MAKE) --no-print-directory test-package; code=$$?; wait $$rest && exit $$code

test-package: $(VENV)/installed
	$(PYTEST)

test-plugins: $(PLUGIN_TESTS)    ## each in its own folder, as its author would

test-plugins-together: $(VENV)/installed    ## all in one process, whose imports they share
	$(FORKS) $(BIN)/python -m pytest plugins -m "not slow and not full"

$(PLUGIN_TESTS): test-%: $(VENV)/installed
	cd $* && $(CURDIR)/$(BIN)/python -m pytest -m ""

test-all: lint            ## also all strategy pairs, faults on two hosts, 320 random kills: three quarters of an hour more
	$(PYTEST) -m "not alone"
	$(BIN)/python -m pytest -m alone
	$(MAKE) test-plugins test-pretended

test-gpu: MARK = gpu
test-gpu: RANKS = 1
test-gpu: AT_ONCE = --numprocesses=auto --maxprocesses=12 --dist=worksteal
test-gpu: gpu    ## what needs a CUDA device, and speed and memory beside loops by hand on one: a report in build/gpu

test-pretended: pretend-cuda    ## the tests of test-gpu that run on a pretended device, on CPUs
	PYTHONPATH=tests $(BIN)/python tests/support/pretended.py 1 $(BIN)/python -m pytest tests/gpu -m gpu

test-gpus: MARK = gpus
test-gpus: RANKS = 0
test-gpus: gpu    ## what needs several CUDA devices, and the same beside loops by hand on all of them

gpu: $(VENV)/installed-gpu
	mkdir -p build/gpu
	rm -f build/gpu/$(MARK).xml
	-$(BIN)/python -m pytest tests/gpu -m $(MARK) $(AT_ONCE) --junitxml=build/gpu/$(MARK).xml  # what failed counts below
	$(BIN)/python benchmarks/gpu.py --ranks $(RANKS) --tests build/gpu/$(MARK).xml

TARGET_PYTHON := 3.12
PLATFORMS := $(foreach glibc,2_28 2_24 2_17 2_12 2_5,--platform=manylinux_$(glibc)_x86_64) --platform=manylinux2014_x86_64
gpu-wheels: $(BIN)/python    ## build/gpu/wheels, for `make test-gpu WHEELS=…` on a machine that has torch but no network
	mkdir -p build/gpu/wheels
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/gpu/wheels 'deepspeed>=0.19.8,<0.20'
	$(BIN)/python -m pip download --quiet --only-binary=:all: --python-version=$(TARGET_PYTHON) $(PLATFORMS) \
		--dest build/gpu/wheels --requirement tests/gpu/wheels.txt

test-fast: $(VENV)/installed    ## without the tests that take tens of seconds
	$(PYTEST) -m "not slow and not full"

test-portable: export PYTHONPATH = $(CURDIR)/tests/portable
test-portable: $(VENV)/installed    ## the same without Linux's own calls, on the ways that macOS takes
	$(PYTEST) -m "not slow and not full"

test-versions: $(VENV)/installed    ## tests in an environment per row of tests/versions.toml, downloaded and removed
	$(BIN)/python tests/versions.py

package: $(VENV)/installed    ## sdist and wheels in build/dist, tried in a fresh environment outside of this clone
	rm -rf build/dist
	$(BIN)/python -m build --outdir build/dist .
	$(BIN)/python -m build --wheel --outdir build/dist plugins/ddpforge-sam
	PYTHON=$(PYTHON) tests/package.sh

pretend-cuda: $(VENV)/installed    ## a CUDA device that is not there, for tests/pretend_cuda; see its README
	$(BIN)/python tests/pretend_cuda/build.py build/pretend_cuda

bench: $(VENV)/installed    ## a step's time beside a loop by hand and other libraries, in half an hour on two cores
	$(BIN)/python -m pip install --quiet --editable '.[bench]'
	$(BIN)/python benchmarks/steps

museum: $(VENV)/installed    ## known silent errors, tried on ddpforge and other trainers: museum/results.json, docs/museum.md
	$(BIN)/python -m pip install --quiet --editable '.[bench]'
	$(BIN)/python -m museum
	$(BIN)/python -m museum --prove

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python docs/plain_english.py

docs: $(VENV)/installed    ## the documentation as a site, in build/site
	$(BIN)/python docs/site.py

# A plugin may need another one, which pip finds only if it was named without extras.
$(VENV)/installed: pyproject.toml $(PLUGINS:%=%/pyproject.toml) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]' $(PLUGINS:%=--editable ./%) $(PLUGINS:%=--editable './%[dev]')
	touch $@

$(VENV)/installed-gpu: pyproject.toml | $(BIN)/python    ## what the tests that need a GPU import
	$(BIN)/python -m pip install --quiet --editable '.[gputests]' --editable plugins/ddpforge-teaching
	touch $@

$(BIN)/ddpforge: pyproject.toml | $(BIN)/python    ## the package alone, without what its tests need
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ddpforge needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv $(VENV)
ifdef WHEELS
	$(PYTHON) -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' > $$(echo $(VENV)/lib/python3*/site-packages)/beside.pth
endif

clean:
	rm -rf $(VENV) runs
