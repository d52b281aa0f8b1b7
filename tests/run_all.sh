#!/usr/bin/env bash
# Runs the Python tests: those that only compute beside those that start processes and mostly wait for them.
#
#     tests/run_all.sh PYTHON [pytest's arguments: then one pytest gets them, and nothing runs beside it]
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
if [ $# -gt 0 ]; then
  exec "$python" -m pytest "$@"
fi

computing=(tests/config tests/costs tests/global_scheduler tests/metrics tests/placement tests/replicas tests/rolling
  tests/scheduling tests/simulator tests/workload)
log=build/tests-computing.log
mkdir -p build
# It gives way to the others, which have time limits.
nice -n 10 "$python" -m pytest -p no:cacheprovider "${computing[@]}" >"$log" 2>&1 &
beside=$!
trap 'kill "$beside" 2>/dev/null || true' EXIT
failed=0
"$python" -m pytest "${computing[@]/#/--ignore=}" || failed=1
echo "== tests that only compute, run beside those above"
wait "$beside" || failed=1
trap - EXIT
cat "$log"
exit "$failed"
