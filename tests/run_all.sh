#!/usr/bin/env bash
# Runs the Python tests in lanes beside each other, each a pytest of its own: most tests use half a core, since they
# start processes and wait for them.
#
#     tests/run_all.sh PYTHON [pytest's arguments: then one pytest gets them, and nothing runs beside it]
#     tests/run_all.sh --quick PYTHON      only the packages without I/O
#
# A lane's fixtures are shared by its tests: what imports vLLM is divided so that few do it twice. Lanes should take
# equally long; the output of one is shown as it comes, and that of the others after it.
set -euo pipefail
# Jobs that can be interrupted: other than a killed one, pytest ends what it has started then.
set -m
cd "$(dirname "$0")/.."
quick=
if [ "$1" = --quick ]; then
  quick=1
  shift
fi
python=$1
shift
# Every process that is started would otherwise compile our modules anew.
unset PYTHONDONTWRITEBYTECODE
if [ $# -gt 0 ]; then
  exec "$python" -m pytest "$@"
fi

logs=build/tests
mkdir -p "$logs"
declare -A pids

lane() { # NAME NICENESS PYTEST'S ARGUMENTS: in the background
  local name=$1 niceness=$2
  shift 2
  nice -n "$niceness" env --default-signal=INT "$python" -m pytest -p no:cacheprovider "$@" </dev/null &
  pids[$name]=$!
}

interrupt() {
  for pid in "${pids[@]}"; do kill -INT "$pid" 2>/dev/null || true; done
  for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
}
trap interrupt EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

if [ -n "$quick" ]; then
  shown=searching
  others=(deciding)
  lane deciding 0 tests/{config,costs,global_scheduler/test_core.py,metrics,replicas,rolling,scheduling,simulator,workload} \
    tests/test_imports.py >"$logs/deciding.log" 2>&1
  lane searching 0 tests/{placement,planning}
else
  # Whole fleets; the processes that they are made of, those first that need nothing of the programs that run beside the
  # tests; and what is left, which mostly computes.
  fleets=(tests/e2e)
  parts=(tests/cluster tests/gpu_control tests/gateway tests/models tests/profiling tests/engine tests/engine_cuda
    tests/migration tests/ray)
  computing=()
  for tests in tests/[a-z]*/ tests/test_*.py; do
    tests=${tests%/}
    [[ " ${fleets[*]} ${parts[*]} " == *" $tests "* ]] || computing+=("$tests")
  done
  shown=fleets
  others=(parts computing)
  # What fails runs once more, and the summary says RERUN: a loaded machine does not fail the suite, a defect does.
  # What only computes gives way to the others, which have time limits.
  lane computing 5 --reruns 1 -rR "${computing[@]}" >"$logs/computing.log" 2>&1
  lane parts 0 --reruns 1 -rR "${parts[@]}" >"$logs/parts.log" 2>&1
  lane fleets 0 --reruns 1 -rR "${fleets[@]}"
fi

failed=()
for name in "$shown" "${others[@]}"; do
  wait "${pids[$name]}" || failed+=("$name")
  unset "pids[$name]"
  if [ "$name" != "$shown" ]; then
    echo "== $name"
    cat "$logs/$name.log"
  fi
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "== failed: ${failed[*]}"
  exit 1
fi
