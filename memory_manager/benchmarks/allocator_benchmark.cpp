// The allocator itself, in one process: the manager's core (quotas, holders, page tables) beside a bare free list.
//
// usage: allocator_benchmark BLOCKS ITERATIONS
// One iteration gives BLOCKS blocks of a 32-layer, 8-KV-head model back and takes as many. Prints one JSON object with
// nanoseconds per iteration.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "manager.hpp"
#include "segments.hpp"

namespace {

using namespace muxserve::memory;

constexpr std::int64_t kLayers = 32, kHeads = 8, kPagesPerBlock = kLayers * kHeads;

std::int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

template <class Action>
std::vector<std::int64_t> measure(int iterations, Action action) {
  for (int i = 0; i < iterations / 10 + 1; ++i) action();
  std::vector<std::int64_t> times;
  times.reserve(static_cast<std::size_t>(iterations));
  for (int i = 0; i < iterations; ++i) {
    const std::int64_t begin = now();
    action();
    times.push_back(now() - begin);
  }
  return times;
}

// Through Manager::step, as the server does it.
std::vector<std::int64_t> measure_core(std::uint32_t blocks, int iterations) {
  Config config;
  config.prefix = "benchmark";
  const std::int64_t num_blocks = blocks * 4 + 1;
  config.pools = {{"p", 1, num_blocks * kPagesPerBlock}};
  config.models = {{"m", "p", kLayers, kHeads, num_blocks, num_blocks * kPagesPerBlock}};
  HeapSegments segments;
  Manager manager(config, segments, 1);
  const int client = manager.connect("benchmark", 0);
  StepReply reply;
  std::vector<std::int32_t> held;
  StepRequest request;
  request.reserve = blocks;
  manager.step(client, request, reply);
  held = reply.reserved;
  return measure(iterations, [&] {
    request.release = held;
    manager.step(client, request, reply);
    held.swap(reply.reserved);
  });
}

// A vector of free page ids and nothing else: no owners, no quotas, no block ids.
std::vector<std::int64_t> measure_vector(std::uint32_t blocks, int iterations) {
  const std::size_t pages = static_cast<std::size_t>(blocks) * kPagesPerBlock;
  std::vector<std::int32_t> free_pages, table(pages);
  for (std::size_t i = 0; i < pages * 4; ++i) free_pages.push_back(static_cast<std::int32_t>(i));
  const auto take = [&] {
    for (std::int32_t& page : table) {
      page = free_pages.back();
      free_pages.pop_back();
    }
  };
  take();
  return measure(iterations, [&] {
    for (const std::int32_t page : table) free_pages.push_back(page);
    take();
  });
}

void print(const char* name, const std::vector<std::int64_t>& times, const char* end) {
  std::printf("\"%s\": [", name);
  for (std::size_t i = 0; i < times.size(); ++i) std::printf("%s%lld", i ? ", " : "", static_cast<long long>(times[i]));
  std::printf("]%s", end);
}

}  // namespace

int main(int argc, char** argv) {
  const int blocks = argc == 3 ? std::atoi(argv[1]) : 0;
  const int iterations = argc == 3 ? std::atoi(argv[2]) : 0;
  if (blocks < 1 || blocks > 100'000 || iterations < 1 || iterations > 10'000'000) {
    std::fprintf(stderr, "usage: allocator_benchmark BLOCKS ITERATIONS\n");
    return 2;
  }
  std::printf("{");
  print("core", measure_core(static_cast<std::uint32_t>(blocks), iterations), ", ");
  print("vector", measure_vector(static_cast<std::uint32_t>(blocks), iterations), "}\n");
}
