#!/usr/bin/env bash
# Runs every benchmark and prints its JSON line. Arguments are passed on, for example --quick.
set -uo pipefail
cd "$(dirname "$0")/.."
status=0
for script in benchmarks/{end_to_end,overlap,rollout,store,train}.py; do
    echo "=== $script"
    timeout --kill-after=30 20m .venv/bin/python "$script" --json "$@" || {
        echo "=== $script FAILED"
        status=1
    }
done
exit $status
