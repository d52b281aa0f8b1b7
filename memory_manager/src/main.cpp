// muxserve-memory-manager: owns the page pools and page tables of one machine and serves them to engines.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <optional>
#include <sstream>

#include "config.hpp"
#include "cuda_memory.hpp"
#include "dispatcher.hpp"
#include "export_server.hpp"
#include "fd_store.hpp"
#include "heartbeat.hpp"
#include "manager.hpp"
#include "posix_memory.hpp"
#include "server.hpp"

namespace {

using namespace muxserve::memory;

constexpr char kUsage[] =
    "usage: muxserve-memory-manager --socket PATH --config FILE.json [--die-with-parent] [--settle-ms N]\n"
    "                               [--fd-store FD] [--heartbeat FILE]\n"
    "\n"
    "  --socket PATH        Unix socket to listen on\n"
    "  --config FILE.json   {\"prefix\", \"pools\": [{\"name\", \"page_bytes\", \"num_pages\"}],\n"
    "                        \"models\": [{\"name\", \"pool\", \"layers\", \"kv_heads\", \"num_blocks\", "
    "\"quota_pages\"}],\n"
    "                        \"ranks\": 1, \"device\": \"posix\" or \"cuda\", \"devices\": [GPU UUID by rank],\n"
    "                        \"ipc\": \"auto\", \"vmm\" or \"legacy\"}\n"
    "  --die-with-parent    stop when the process that started this one dies\n"
    "  --settle-ms N        how long to wait at start for clients of an earlier manager that still write (30000)\n"
    "  --fd-store FD        inherited SEQPACKET socket to whoever keeps descriptors of GPU memory over a restart\n"
    "  --heartbeat FILE     where to show that this process does not hang\n"
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
};

[[noreturn]] void usage_error(const std::string& what) {
  std::cerr << "muxserve-memory-manager: " << what << "\n" << kUsage;
  std::exit(2);
}

Arguments parse_arguments(int argc, char** argv) {
  Arguments arguments;
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
      const std::string text = value();
      char* end = nullptr;
      arguments.settle_ms = std::strtol(text.c_str(), &end, 10);
      if (text.empty() || *end != '\0' || arguments.settle_ms < 0 || arguments.settle_ms > 3'600'000)
        usage_error("--settle-ms needs a whole number of milliseconds up to 3600000, got \"" + text + "\"");
    } else if (flag == "--fd-store") {
      const std::string text = value();
      char* end = nullptr;
      const long fd = std::strtol(text.c_str(), &end, 10);
      if (text.empty() || *end != '\0' || fd < 3 || fd > 1'000'000)
        usage_error("--fd-store needs the number of an open socket, got \"" + text + "\"");
      arguments.fd_store = static_cast<int>(fd);
    } else if (flag == "--heartbeat") {
      arguments.heartbeat = value();
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

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw ConfigError("cannot open \"" + path + "\": " + std::strerror(errno));
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

Config load_config(const std::string& path) {
  const std::string text = read_file(path);
  try {
    return parse_config(text);
  } catch (const ConfigError& error) {
    throw ConfigError(path + ": " + error.what());
  }
}

// Never 0, which stands for "nobody" in the counters.
std::uint64_t new_generation() {
  std::uint64_t generation = 0;
  while (generation == 0)
    if (getrandom(&generation, sizeof generation, 0) != static_cast<ssize_t>(sizeof generation)) generation = 0;
  return generation;
}

// The pools of a configuration, by pool and rank, and how clients map them.
struct Pools {
  std::vector<std::unique_ptr<PoolMemory>> memory;
  std::vector<std::string> segments;  // names of POSIX segments among them
  PoolHandles handles;
  PoolDescriptors descriptors;
};

Pools make_pools(const Config& config, FdStore& store) {
  Pools pools;
  pools.handles.resize(config.pools.size());
  pools.descriptors.resize(config.pools.size());
  for (std::size_t i = 0; i < config.pools.size(); ++i) {
    const PoolConfig& pool = config.pools[i];
    const auto bytes = static_cast<std::size_t>(pool.page_bytes) * static_cast<std::size_t>(pool.num_pages);
    for (std::int64_t rank = 0; rank < config.ranks; ++rank) {
      if (config.device == "cuda") {
        std::string note;
        const std::string name = "pool." + std::to_string(i) + "." + std::to_string(rank);
        const std::string& uuid = config.devices[static_cast<std::size_t>(rank)];
        pools.memory.push_back(cuda_pool(uuid, bytes, name, *pool_ipc(config.ipc), store, note));
        std::cerr << "muxserve-memory-manager: " << note << std::endl;
      } else {
        pools.segments.push_back(pool_segment(config.prefix, i, rank));
        pools.memory.push_back(std::make_unique<PosixPoolMemory>(pools.segments.back(), bytes));
      }
      pools.handles[i].push_back(pools.memory.back()->handle());
      pools.descriptors[i].push_back(pools.memory.back()->descriptor());
    }
  }
  store.forget_rest();
  return pools;
}

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
  const std::uint64_t generation = new_generation();
  FdStore store(arguments.fd_store);
  PosixSegments segments(config.prefix, std::chrono::milliseconds(arguments.settle_ms));
  const Pools pools = make_pools(config, store);
  Manager manager(config, segments, generation);
  segments.remove_stale(pools.segments);
  Dispatcher dispatcher(manager, pools.handles);
  {
    std::optional<ExportServer> exports;
    if (config.device == "cuda") exports.emplace(ExportServer::path_for(arguments.socket), pools.descriptors);
    Heartbeat heartbeat(arguments.heartbeat);
    Server server(dispatcher, arguments.socket);
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
  } catch (const std::exception& error) {
    std::cerr << "muxserve-memory-manager: " << error.what() << std::endl;
    return 3;
  }
}
