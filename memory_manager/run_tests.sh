#!/usr/bin/env bash
# Builds and runs the C++ unit tests three times: plain, with AddressSanitizer and UndefinedBehaviorSanitizer, and
# with ThreadSanitizer. Needs cmake, ninja, a C++17 compiler and GoogleTest; where GoogleTest is not installed, the
# Debian package is unpacked below build/.
set -euo pipefail
cd "$(dirname "$0")/.."

prefix=()
if ! echo '#include <gtest/gtest.h>' | "${CXX:-c++}" -E -x c++ - >/dev/null 2>&1; then
  if [ ! -d build/googletest/usr/include/gtest ]; then
    if ! command -v apt-get >/dev/null; then
      echo "GoogleTest is missing: install it (Debian and Ubuntu: apt-get install libgtest-dev)" >&2
      exit 1
    fi
    mkdir -p build/googletest
    echo "Fetching GoogleTest into build/googletest"
    (cd build/googletest && apt-get -q download libgtest-dev && for deb in ./*.deb; do dpkg -x "$deb" .; done) || {
      rm -rf build/googletest
      echo "cannot fetch GoogleTest: install it (Debian and Ubuntu: apt-get install libgtest-dev)" >&2
      exit 1
    }
  fi
  prefix=("-DCMAKE_PREFIX_PATH=$PWD/build/googletest/usr")
fi

# Only what has changed is compiled, since the build directories stay; with ccache that holds after `make clean`, too.
launcher=()
if command -v ccache >/dev/null; then launcher=("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"); fi

run() {
  local name=$1 sanitizers=$2 flags=$3
  local dir=build/cpp-$name
  echo "== C++ tests: $name"
  cmake -S . -B "$dir" -G Ninja --log-level=ERROR -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS="$flags" -DMUXSERVE_BUILD_PYTHON=OFF \
    -DMUXSERVE_BUILD_TESTS=ON -DMUXSERVE_SANITIZE="$sanitizers" "${prefix[@]}" "${launcher[@]}" >/dev/null
  ninja -C "$dir" -j "${JOBS:-2}" --quiet memory_manager_tests
  local log=$dir/tests.log
  if "$dir/memory_manager_tests" --gtest_brief=1 2>&1 | tee "$log"; then return 0; fi
  # The leak checker stops all threads with ptrace when the tests are over. On some machines its own tracer crashes
  # there, every time, which says nothing about the tests: only then does valgrind look for leaks instead. A failed
  # test, an error of an address or a leak never gets here.
  if grep -q PASSED "$log" && ! grep -qE 'FAILED|ERROR: |runtime error' "$log" &&
    grep -q 'LeakSanitizer has encountered a fatal error' "$log"; then
    leaks_by_valgrind
  else
    return 1
  fi
}

# Only leaks and bad accesses count here (exit status 9): all tests have passed by now, and valgrind is
# forty times slower than the deadlines in them expect.
leaks_by_valgrind() {
  if ! command -v valgrind >/dev/null; then
    echo "WARNING: leaks were NOT looked for: LeakSanitizer's tracer crashed, and valgrind is not installed" >&2
    return 0
  fi
  echo "== C++ tests: LeakSanitizer's tracer crashed on this machine; valgrind looks for leaks (a minute)"
  local status=0
  valgrind --quiet --leak-check=full --errors-for-leak-kinds=definite --undef-value-errors=no --error-exitcode=9 \
    build/cpp-plain/memory_manager_tests --gtest_brief=1 || status=$?
  if [ "$status" = 9 ]; then return 1; fi
}

export ASAN_OPTIONS="detect_leaks=1:strict_string_checks=1" UBSAN_OPTIONS="print_stacktrace=1"
export TSAN_OPTIONS="halt_on_error=1"
run plain "" "-O0 -g1"
run asan address,undefined "-O0 -g1"
run tsan thread "-O1 -g1"
