#!/usr/bin/env bash
# Runs pytest with these arguments. The tests that fail run once more, one after the other, and must pass then: on a
# busy machine, a test that starts processes can fail because of the load. The output names them.
set -uo pipefail

cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT
# The options of pyproject.toml, without the one that disables the cache of failed tests.
options=$(sed -n 's/^addopts = \[\(.*\)\]/\1/p' pyproject.toml | tr -d '",' | sed 's/-p no:cacheprovider//')
with_cache=(-o "addopts=$options" -o "cache_dir=$cache")

pytest "${with_cache[@]}" "$@"
status=$?
[ $status -eq 1 ] || exit $status # 1: tests failed
echo "The failed tests run once more, one after the other:"
pytest "${with_cache[@]}" "$@" -n 0 --last-failed --last-failed-no-failures none
