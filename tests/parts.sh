#!/usr/bin/env bash
# Runs commands one after the other, and says at the end how long each took: tests/parts.sh "make lint" "make test".
set -euo pipefail

times=""
for part; do
    start=$SECONDS
    $part || { printf '%sfailed: %s\n' "$times" "$part" >&2; exit 1; }
    times+=$(printf '%5d s  %s' $((SECONDS - start)) "$part")$'\n'
done
printf '%s' "$times"
