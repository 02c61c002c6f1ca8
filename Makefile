# Every target sets up .venv by itself, and again when pyproject.toml or constraints.txt changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt

# Set in some containers; without compiled files every process of the tests compiles all modules again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: train quick compiled test newest soak lint rules style types bench clean

train: $(VENV)/core
	$(BIN)/paceline train

# the pure tests: no training, no compiler, no browser
quick: $(VENV)/dev
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not dist and not slow and not soak'

# each module compiled once: processes that start together would all compile it
compiled: $(VENV)/compiled $(VENV)/dev
	$(BIN)/python -m pytest --collect-only > /dev/null

# of five processes two or three wait for a deadline, a process or a browser, so that two cores are busy
test: $(VENV)/dev
	$(BIN)/python -m pytest -n 5 --dist loadfile --no-loadscope-reorder --durations 10

# the long tests, among them the kernels of GPUs that are not there, then a hundred faults and as root those of several hosts;
# ARGS='--seed 2 --faults 24 --only sigkill,disk' and HOSTS='--only mtu' take others
soak: $(VENV)/dev
	$(BIN)/python -m pytest -n 2 --dist loadfile -m soak
	PYTHONPATH=tests $(BIN)/python -m soak.loop $(or $(ARGS),--write docs/reliability.md)
	PYTHONPATH=tests $(BIN)/python -m soak.hosts $(or $(HOSTS),--write docs/reliability.md)

lint: rules types style

# needs no package, so it runs while the environment is set up
rules: | $(VENV)/python
	$(BIN)/python dev/measure_code.py --lint

types: $(VENV)/dev
	$(BIN)/mypy

style: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# the tests with the newest torch of the index, whose CUDA libraries are gigabytes, in an environment of its own
newest: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-newest
	grep -vE '^(torch|triton|setuptools|typing)' constraints.txt > .venv-newest/constraints.txt
	.venv-newest/bin/pip install --quiet --upgrade torch
	.venv-newest/bin/pip install --quiet -c .venv-newest/constraints.txt -e '.[dev,datasets,peers,trackers,clusters]'
	.venv-newest/bin/python -m pytest -n 2 --dist loadfile

bench: $(VENV)/dev
	$(BIN)/python benchmarks/cpu.py

$(VENV)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python %d.%d, 3.11 or later is needed\n  fix: make PYTHON=python3.12" % sys.version_info[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/torch: constraints.txt | $(VENV)/python
	$(PIP) --upgrade pip
	$(PIP) "$$(grep ^torch== constraints.txt)"
	touch $@

# built by the setuptools that came with torch, not by one that is installed for it
$(VENV)/core: $(VENV)/torch pyproject.toml
	$(PIP) --no-build-isolation -e .
	touch $@

# uv takes a fourth of pip's time; pip reads more settings, such as another index
$(VENV)/dev: EXTRAS := .[dev,datasets,peers,trackers,clusters,gpu-proof]
$(VENV)/dev: $(VENV)/torch pyproject.toml
	$(PIP) uv && \
		$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt --no-build-isolation -e '$(EXTRAS)' || \
		$(PIP) --no-build-isolation -e '$(EXTRAS)'
	touch $(VENV)/core $@

# beside the other packages, which it may meet half installed: without it the tests only take longer
$(VENV)/compiled: $(VENV)/torch
	-$(BIN)/python -c 'import torch._inductor.compile_fx, torch.distributed.fsdp'
	touch $@

clean:
	rm -rf $(VENV) .venv-newest build *.egg-info .pytest_cache .mypy_cache .ruff_cache
