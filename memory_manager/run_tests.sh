#!/usr/bin/env bash
# Builds and runs the C++ unit tests three times: plain, with AddressSanitizer and UndefinedBehaviorSanitizer, and
# with ThreadSanitizer. Needs cmake, ninja, a C++17 compiler and GoogleTest; where GoogleTest is not installed, the
# Debian package is unpacked below build/.
#
#     memory_manager/run_tests.sh          the three
#     memory_manager/run_tests.sh arm64    compiled for arm64 and run by QEMU
set -euo pipefail
cd "$(dirname "$0")/.."

# Unpacks a Debian package into the directory NAME below build/.
debian_package() { # NAME PACKAGE
  if [ -d "build/$1/usr" ]; then return; fi
  if ! command -v apt-get >/dev/null; then
    echo "GoogleTest is missing: install it (Debian and Ubuntu: apt-get install $2)" >&2
    exit 1
  fi
  mkdir -p "build/$1"
  echo "Fetching GoogleTest into build/$1"
  (cd "build/$1" && apt-get -q download "$2" && for deb in ./*.deb; do dpkg -x "$deb" .; done) || {
    rm -rf "build/${1:?}"
    echo "cannot fetch GoogleTest: install it (Debian and Ubuntu: apt-get install $2)" >&2
    exit 1
  }
}

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

# Kernels for arm64 have pages of 4, 16 or 64 KiB.
arm64() {
  local triple=aarch64-linux-gnu each page dir=build/cpp-arm64
  for each in "$triple-g++" qemu-aarch64; do
    command -v "$each" >/dev/null || {
      echo "$each is missing (Debian and Ubuntu: apt-get install g++-$triple qemu-user)" >&2
      exit 1
    }
  done
  local emulator=(qemu-aarch64 -L "/usr/$triple")
  local options=(-G Ninja --log-level=ERROR -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64
    "-DCMAKE_CXX_COMPILER=$triple-g++"
    "-DCMAKE_CROSSCOMPILING_EMULATOR=$(IFS=';' && echo "${emulator[*]}")" "${launcher[@]}")
  debian_package googletest-sources googletest
  cmake -S build/googletest-sources/usr/src/googletest -B "$dir/googletest" "${options[@]}" -DBUILD_GMOCK=OFF \
    "-DCMAKE_C_COMPILER=$triple-gcc" "-DCMAKE_INSTALL_PREFIX=$PWD/$dir/prefix" >/dev/null
  ninja -C "$dir/googletest" -j "${JOBS:-2}" --quiet install >/dev/null
  cmake -S . -B "$dir" "${options[@]}" -DCMAKE_BUILD_TYPE=Release -DMUXSERVE_BUILD_PYTHON=OFF -DMUXSERVE_BUILD_TESTS=ON \
    "-DCMAKE_PREFIX_PATH=$PWD/$dir/prefix" >/dev/null
  ninja -C "$dir" -j "${JOBS:-2}" --quiet memory_manager_tests muxserve-memory-manager
  for page in 4096 16384 65536; do
    echo "== C++ tests: arm64, pages of $page bytes"
    "${emulator[@]}" -p "$page" "$dir/memory_manager_tests" --gtest_brief=1
  done
}

if [ "${1:-}" = arm64 ]; then
  arm64
  exit
fi

prefix=()
if ! echo '#include <gtest/gtest.h>' | "${CXX:-c++}" -E -x c++ - >/dev/null 2>&1; then
  debian_package googletest libgtest-dev
  prefix=("-DCMAKE_PREFIX_PATH=$PWD/build/googletest/usr")
fi

export ASAN_OPTIONS="detect_leaks=1:strict_string_checks=1" UBSAN_OPTIONS="print_stacktrace=1"
export TSAN_OPTIONS="halt_on_error=1"
run plain "" "-O0 -g1"
run asan address,undefined "-O0 -g1"
run tsan thread "-O1 -g1"
