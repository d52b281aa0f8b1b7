#!/usr/bin/env bash
# Runs the checks and tests in lanes beside each other: most Python tests use half a core, since they start processes
# and wait for them.
#
#     tests/run_all.sh --all PYTHON                  lint, C++ tests, Python tests; MUXSERVE_TESTS=thorough: all of them
#     tests/run_all.sh --quick PYTHON                only the Python packages without I/O
#     tests/run_all.sh PYTHON [pytest's arguments]   all Python tests, or one pytest with these arguments
#
# The output of one lane is shown as it comes. Of the others there is a line when they end; at the end follow the whole
# output of those that failed and the summary of the rest. build/tests/ keeps all of it.
set -euo pipefail
# Jobs that can be interrupted: other than a killed one, pytest ends what it has started then.
set -m
cd "$(dirname "$0")/.."
mode=python
case $1 in
--all | --quick)
  mode=${1#--}
  shift
  ;;
esac
python=$1
shift
# Every process that is started would otherwise compile our modules anew.
unset PYTHONDONTWRITEBYTECODE
if [ $# -gt 0 ]; then
  exec "$python" -m pytest "$@"
fi

logs=build/tests
rm -rf "$logs"
mkdir -p "$logs"
declare -A names # of the lanes that run, by process id
shown=
declare -A statuses arguments # by name
failed=()
passed=()

lane() { # NAME NICENESS COMMAND...: in the background; the lane called `shown` writes to the terminal, too
  local name=$1 niceness=$2
  shift 2
  if [ "$name" = "$shown" ]; then
    nice -n "$niceness" env --default-signal=INT "$@" </dev/null &
  else
    nice -n "$niceness" env --default-signal=INT "$@" </dev/null >"$logs/$name.log" 2>&1 &
  fi
  names[$!]=$name
}

cpp_tests=(env "PATH=$PWD/$(dirname "$python"):$PATH" memory_manager/run_tests.sh)

python_lane() { # NAME NICENESS PYTEST'S ARGUMENTS
  local name=$1 niceness=$2
  shift 2
  arguments[$name]="$*"
  lane "$name" "$niceness" "$python" -m pytest -o "cache_dir=$PWD/$logs/$name.cache" --durations=15 --durations-min=3 "$@"
}

passes_alone() { # NAME STATUS: whether what failed in that lane passes when nothing else runs
  [ "$mode" != quick ] || return
  if [ "$1" = c++ ]; then # some wait for threads, which a loaded machine lets wait as well
    echo "== $1: all of it runs once more, alone"
    "${cpp_tests[@]}" </dev/null
    return
  fi
  [ -n "${arguments[$1]:-}" ] || return
  if [ "$2" != 1 ]; then # of pytest: not that tests failed, but that some did not run, as when it was killed
    echo "== $1: ended with status $2; all of it runs once more, alone"
    # shellcheck disable=SC2086 (these arguments have no blanks)
    "$python" -m pytest --reruns 1 ${arguments[$1]} </dev/null
    return
  fi
  echo "== $1: what failed runs once more, alone"
  "$python" -m pytest --reruns 1 -o "cache_dir=$PWD/$logs/$1.cache" --last-failed --last-failed-no-failures none </dev/null
}

interrupt() {
  # pytest ends what it has started; of the other lanes every process is told.
  for pid in "${!names[@]}"; do
    case ${names[$pid]} in
    lint | c++) kill -INT -- "-$pid" 2>/dev/null || true ;;
    *) kill -INT "$pid" 2>/dev/null || true ;;
    esac
  done
  for pid in "${!names[@]}"; do wait "$pid" 2>/dev/null || true; done
}
trap interrupt EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

if [ "$mode" = quick ]; then
  export MUXSERVE_TESTS=quick
  shown=planning
  python_lane simulating 0 tests/{global_scheduler/test_core.py,replicas,rolling,simulator} tests/test_{docs,imports}.py
  python_lane planning 0 tests/{config,costs,metrics,placement,planning,scheduling,workload}
else
  # Whole fleets; the engines and other processes that they are made of, and Ray, whose programs run beside the others'
  # tests; what only computes; processes that only pretend, which wait most of the time; and what is left. A lane's
  # fixtures are shared by its tests: what imports vLLM is divided so that few do it twice. Lanes should take equally
  # long.
  apart=(tests/e2e/test_{adapters,pooling}.py) # fleets that need nothing of what the other fleets' tests share
  fleets=(tests/e2e "${apart[@]/#/--ignore=}")
  parts=(tests/gateway tests/models tests/profiling tests/engine tests/engine_cuda tests/migration "${apart[@]}" tests/ray)
  computing=(tests/{config,costs,global_scheduler,metrics,placement,planning,replicas,rolling,scheduling,simulator,workload})
  pretending=(tests/{cli,cluster,control,gpu_control,probes})
  others=()
  for tests in tests/[a-z]*/ tests/test_*.py; do
    tests=${tests%/}
    [[ " ${fleets[*]} ${parts[*]} ${computing[*]} ${pretending[*]} " == *" $tests "* ]] || others+=("$tests")
  done
  shown=fleets
  # What fails runs once more, and again alone when the lanes have ended; the summary says so: a loaded machine does not
  # fail the suite, a defect does.
  # What only computes gives way to the others, which have time limits.
  if [ "$mode" = all ]; then
    lane lint 5 make --no-print-directory lint
    lane c++ 5 "${cpp_tests[@]}"
  fi
  python_lane computing 5 --reruns 1 -rR "${computing[@]}"
  python_lane others 5 --reruns 1 -rR "${others[@]}"
  python_lane pretending 0 --reruns 1 -rR "${pretending[@]}"
  python_lane parts 0 --reruns 1 -rR "${parts[@]}"
  python_lane fleets 0 --reruns 1 -rR "${fleets[@]}"
fi

while [ ${#names[@]} -gt 0 ]; do
  status=0
  wait -n -p ended "${!names[@]}" || status=$?
  name=${names[$ended]}
  unset "names[$ended]"
  statuses[$name]=$status
  if [ "$status" = 0 ]; then
    [ "$name" = "$shown" ] || passed+=("$name")
    echo "== $name: passed after $((SECONDS / 60)) min $((SECONDS % 60)) s"
  else
    failed+=("$name")
    echo "== $name: FAILED after $((SECONDS / 60)) min $((SECONDS % 60)) s"
  fi
done
for name in "${passed[@]}"; do
  echo "== $name"
  # pytest's summary, with what was skipped or ran twice; of the others their last lines.
  sed -n '/^[=_]* \(first run of\|rerun test summary\|short test summary\)/,$p' "$logs/$name.log" | grep . || tail -n 6 "$logs/$name.log"
done
lanes=("${failed[@]}")
failed=()
for name in "${lanes[@]}"; do
  [ "$name" = "$shown" ] || { echo "== $name" && cat "$logs/$name.log"; }
  passes_alone "$name" "${statuses[$name]}" || failed+=("$name")
done
if [ "$mode" = all ]; then
  echo "== the house"
  "$python" tools/house.py || true
fi
if [ ${#failed[@]} -gt 0 ]; then
  echo "== failed: ${failed[*]} (output in $logs/)"
  exit 1
fi
