#!/usr/bin/env bash
# Runs pytest with these arguments on a number of ranks: tests/ranks_twice.sh 4 tests/mpi. If a test fails, or the job
# does not end, all run once more, and must pass then. The output has both results.
set -uo pipefail

ranks=$1
shift
limit=${LIMIT:-1000} # seconds: four times as long as all tests on four ranks take on two cores
trap 'exit 130' INT

run() {
    timeout --foreground -k 10 "$limit" mpirun -n "$ranks" pytest --with-mpi "$@"
}

run "$@" && exit
echo "The tests on $ranks ranks run once more:"
run "$@"
