// muxserve-memory-manager: owns the page pools and page tables of one machine and serves them to engines.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <new>
#include <optional>

#include "config.hpp"
#include "cuda_memory.hpp"
#include "dispatcher.hpp"
#include "export_server.hpp"
#include "fd_store.hpp"
#include "heartbeat.hpp"
#include "manager.hpp"
#include "posix_memory.hpp"
#include "protocol.hpp"
#include "server.hpp"

namespace {

using namespace muxserve::memory;

constexpr char kUsage[] =
    "usage: muxserve-memory-manager --socket PATH --config FILE [--die-with-parent] [--settle-ms N]\n"
    "                               [--fd-store FD] [--heartbeat FILE]\n"
    "                               [--max-hand-offs-per-client N] [--max-hand-offs-per-model N]\n"
    "                               [--max-tables-mib N] [--max-buffers-mib N] [--stall-s N]\n"
    "                               [--linger-ms N]\n"
    "\n"
    "  --socket PATH        Unix socket to listen on\n"
    "  --config FILE        pools and models, as muxserve.memory.server writes them\n"
    "  --die-with-parent    stop when the process that started this one dies\n"
    "  --settle-ms N        how long to wait at start for clients of an earlier manager that still write (30000)\n"
    "  --fd-store FD        inherited SEQPACKET socket to whoever keeps descriptors of GPU memory over a restart\n"
    "  --heartbeat FILE     where to show that this process does not hang\n"
    "  --max-hand-offs-per-client N, --max-hand-offs-per-model N\n"
    "                       waiting hand-offs that one connection has made (4096), and that one model has (8192)\n"
    "  --max-tables-mib N   page tables and books, beyond which no model is added (a quarter of memory, at most 4096)\n"
    "  --max-buffers-mib N  buffers of all connections together; the largest is closed beyond it (256)\n"
    "  --stall-s N          a client that takes nothing of its replies for so long is disconnected (30)\n"
    "  --linger-ms N        how long a dead client's blocks are kept for what it had launched on a GPU (0)\n"
    "\n"
    "Prints \"READY <generation>\" when it listens. Exit status: 0 stopped by a signal, 2 wrong usage or "
    "configuration,\n"
    "3 shared memory, GPU memory or socket not available.\n";

struct Arguments {
  std::string socket;
  std::string config;
  bool die_with_parent = false;
  long settle_ms = 30'000;
  int fd_store = -1;
  std::string heartbeat;
  Limits limits;
};

// A quarter of the machine's memory, if that is less than the bound.
std::int64_t default_table_bytes() {
  const std::int64_t memory = std::int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  return memory > 0 ? std::min(memory / 4, Limits().table_bytes) : Limits().table_bytes;
}

[[noreturn]] void usage_error(const std::string& what) {
  std::cerr << "muxserve-memory-manager: " << what << "\n" << kUsage;
  std::exit(2);
}

// The value of a flag as a whole number between `low` and `high`.
std::int64_t whole_number(const std::string& flag, const std::string& text, std::int64_t low, std::int64_t high) {
  char* end = nullptr;
  errno = 0;
  const long long number = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || errno != 0 || number < low || number > high) {
    usage_error(flag + " needs a whole number from " + std::to_string(low) + " to " + std::to_string(high) +
                ", got \"" + text + "\"");
  }
  return number;
}

Arguments parse_arguments(int argc, char** argv) {
  Arguments arguments;
  arguments.limits.table_bytes = default_table_bytes();
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const auto value = [&]() -> std::string {
      if (i + 1 >= argc) usage_error(flag + " needs a value");
      return argv[++i];
    };
    if (flag == "--socket") {
      arguments.socket = value();
    } else if (flag == "--config") {
      arguments.config = value();
    } else if (flag == "--die-with-parent") {
      arguments.die_with_parent = true;
    } else if (flag == "--settle-ms") {
      arguments.settle_ms = static_cast<long>(whole_number(flag, value(), 0, 3'600'000));
    } else if (flag == "--fd-store") {
      arguments.fd_store = static_cast<int>(whole_number(flag, value(), 3, 1'000'000));
    } else if (flag == "--heartbeat") {
      arguments.heartbeat = value();
    } else if (flag == "--max-hand-offs-per-client") {
      arguments.limits.hand_offs_per_client = whole_number(flag, value(), 1, kMaxHandOffs);
    } else if (flag == "--max-hand-offs-per-model") {
      arguments.limits.hand_offs_per_model = whole_number(flag, value(), 1, kMaxHandOffs);
    } else if (flag == "--max-tables-mib") {
      arguments.limits.table_bytes = whole_number(flag, value(), 0, 1 << 24) << 20;
    } else if (flag == "--max-buffers-mib") {
      arguments.limits.buffer_bytes = static_cast<std::size_t>(whole_number(flag, value(), 64, 1 << 20)) << 20;
    } else if (flag == "--stall-s") {
      arguments.limits.stall_time = whole_number(flag, value(), 1, 86'400) * 1'000'000'000;
    } else if (flag == "--linger-ms") {
      arguments.limits.linger_time = whole_number(flag, value(), 0, 60'000) * 1'000'000;
    } else if (flag == "--help" || flag == "-h") {
      std::cout << kUsage;
      std::exit(0);
    } else {
      usage_error("unknown argument \"" + flag + "\"");
    }
  }
  if (arguments.socket.empty() || arguments.config.empty()) usage_error("--socket and --config are needed");
  return arguments;
}

Bytes read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw ConfigError("cannot open \"" + path + "\": " + std::strerror(errno));
  return Bytes(std::istreambuf_iterator<char>(file), {});
}

Config load_config(const std::string& path) {
  const Bytes file = read_file(path);
  try {
    Config config = decode_config(file);
    check_config(config);
    return config;
  } catch (const ConfigError& error) {
    throw ConfigError(path + ": " + error.what());
  }
}

// Random and never 0, which stands for "nobody" in the counters.
std::uint64_t random_number() {
  std::uint64_t number = 0;
  while (number == 0)
    if (getrandom(&number, sizeof number, 0) != static_cast<ssize_t>(sizeof number)) number = 0;
  return number;
}

// Refuses at start what would kill engines later, when /dev/shm is full.
void check_space(const Config& config, const PosixSegments& segments) {
  std::vector<SegmentSize> wanted;
  for (std::size_t i = 0; i < config.models.size(); ++i) {
    const auto entries = static_cast<std::size_t>(config.models[i].table_entries());
    wanted.push_back({segments.table_name(static_cast<std::uint32_t>(i)), entries * sizeof(std::int32_t)});
  }
  for (std::size_t i = 0; config.device == "posix" && i < config.pools.size(); ++i) {
    const auto pages = static_cast<std::size_t>(config.pools[i].num_pages);
    for (std::int64_t rank = 0; rank < config.ranks; ++rank)
      wanted.push_back(
          {pool_segment(config.prefix, i, rank), pages * static_cast<std::size_t>(config.pools[i].page_bytes)});
  }
  check_shared_memory(wanted);
}

// The pools of a configuration, by pool and rank, and how clients map them.
struct Pools {
  std::vector<std::unique_ptr<PoolMemory>> memory;
  std::vector<std::string> segments;  // names of their POSIX segments
  PoolHandles handles;
  ExportedPools exported;
};

Pools make_pools(const Config& config, FdStore& store) {
  Pools pools;
  pools.handles.resize(config.pools.size());
  pools.exported.resize(config.pools.size());
  for (std::size_t i = 0; i < config.pools.size(); ++i) {
    const PoolConfig& pool = config.pools[i];
    const auto bytes = static_cast<std::size_t>(pool.page_bytes) * static_cast<std::size_t>(pool.num_pages);
    for (std::int64_t rank = 0; rank < config.ranks; ++rank) {
      if (config.device == "cuda") {
        std::string note;
        const std::string name = "pool." + std::to_string(i) + "." + std::to_string(rank);
        const std::string& uuid = config.devices[static_cast<std::size_t>(rank)];
        if (pool.chunk_bytes > 0) {
          const auto chunk = static_cast<std::size_t>(pool.pages_of_a_chunk() * pool.page_bytes);
          auto made = chunked_cuda_pool(uuid, bytes, chunk, name, store, config.prefix + "." + name);
          pools.segments.push_back(made->segment());
          pools.memory.push_back(std::move(made));
          pools.handles[i].push_back(pools.memory.back()->handle());
          pools.exported[i].push_back(pools.memory.back().get());
          continue;
        }
        pools.memory.push_back(cuda_pool(uuid, bytes, name, *pool_ipc(config.ipc), store, note));
        std::cerr << "muxserve-memory-manager: " << note << std::endl;
      } else {
        pools.segments.push_back(pool_segment(config.prefix, i, rank));
        pools.memory.push_back(std::make_unique<PosixPoolMemory>(pools.segments.back(), bytes));
      }
      pools.handles[i].push_back(pools.memory.back()->handle());
      pools.exported[i].push_back(pools.memory.back().get());
    }
  }
  return pools;
}

// The memory of chunks, on all ranks.
class PoolChunks final : public ChunkMemory {
 public:
  PoolChunks(const Config& config, const Pools& pools) : config_(config), pools_(pools) {}

  void give_back(std::uint32_t pool, std::int64_t first_page, std::int64_t pages) noexcept override {
    for (std::int64_t rank = 0; rank < config_.ranks; ++rank)
      memory(pool, rank).give_back(bytes(pool, first_page), bytes(pool, pages));
  }

  void take_again(std::uint32_t pool, std::int64_t first_page, std::int64_t pages) override {
    std::int64_t rank = 0;
    try {
      for (; rank < config_.ranks; ++rank) memory(pool, rank).take_again(bytes(pool, first_page), bytes(pool, pages));
    } catch (...) {
      while (rank-- > 0) memory(pool, rank).give_back(bytes(pool, first_page), bytes(pool, pages));
      throw;
    }
  }

 private:
  PoolMemory& memory(std::uint32_t pool, std::int64_t rank) const {
    return *pools_.memory[pool * static_cast<std::size_t>(config_.ranks) + static_cast<std::size_t>(rank)];
  }
  std::size_t bytes(std::uint32_t pool, std::int64_t pages) const {
    return static_cast<std::size_t>(pages * config_.pools[pool].page_bytes);
  }

  const Config& config_;
  const Pools& pools_;
};

// Threads of the CUDA driver and of the export server must not take signals that the server waits for.
void block_signals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  sigprocmask(SIG_BLOCK, &set, nullptr);
}

void serve(const Arguments& arguments) {
  const Config config = load_config(arguments.config);
  if (config.device == "cuda") block_signals();
  const std::uint64_t generation = random_number();
  FdStore store(arguments.fd_store);
  PosixSegments segments(config.prefix, std::chrono::milliseconds(arguments.settle_ms));
  check_space(config, segments);
  const Pools pools = make_pools(config, store);
  PoolChunks chunks(config, pools);
  Manager manager(config, segments, generation, arguments.limits, random_number(), &chunks);
  store.forget_rest();
  segments.remove_stale(pools.segments);
  Dispatcher dispatcher(manager, pools.handles);
  {
    std::optional<ExportServer> exports;
    if (config.device == "cuda") exports.emplace(ExportServer::path_for(arguments.socket), pools.exported);
    Heartbeat heartbeat(arguments.heartbeat);
    Server server(dispatcher, arguments.socket, arguments.limits);
    server.beat_in(heartbeat);
    server.watch_signals();
    segments.settled();
    std::printf("READY %llu\n", static_cast<unsigned long long>(generation));
    std::fflush(stdout);
    server.run();
  }
  for (const auto& pool : pools.memory) pool->destroy();
  segments.remove_all();
}

}  // namespace

int main(int argc, char** argv) {
  const Arguments arguments = parse_arguments(argc, argv);
  if (arguments.die_with_parent) {
    const pid_t parent = getppid();
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) return 0;  // it died before we asked
  }
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);  // a limit on the size of files is an error of the call that meets it
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
  }
  try {
    serve(arguments);
    return 0;
  } catch (const ConfigError& error) {
    std::cerr << "muxserve-memory-manager: " << error.what() << std::endl;
    return 2;
  } catch (const std::bad_alloc&) {
    std::cerr << "muxserve-memory-manager: this machine has not the memory for the books of these pools and models"
              << std::endl;
    return 3;
  } catch (const std::exception& error) {
    std::cerr << "muxserve-memory-manager: " << error.what() << std::endl;
    return 3;
  }
}
