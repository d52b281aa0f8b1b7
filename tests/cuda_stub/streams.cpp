// Contexts, streams and CUDA graphs of the stand-in for libcuda.so.1, which that of the runtime uses too: who computes
// on which SMs, what is captured from which stream, and which graphs are launched. Kernels compute nothing, but for
// `mark_sm_kernel` (muxserve/probes/sms.py), which marks the SMs of the context that it runs in.
//
//   CUDA_STUB_TRACE        file of what happens, lines of `PID EVENT ...`: see `trace`
//   CUDA_STUB_REFUSES      names of calls (by commas) that answer 801
//   CUDA_STUB_LOSES        while this file is there, the whole GPU's context is current, whatever has been chosen
//   CUDA_STUB_ASTRAY       graphs are launched on all SMs, wherever they were captured
//
// As the driver does, it refuses what would break a capture (900), and takes what other streams do that wait for the
// captured one into the graph.
#include <fcntl.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

extern "C" {
// Of memory_manager/tests/fake_cuda, which keeps the current context of each thread, under names of its own.
int fakeCtxGetCurrent(void** context);
int fakeCtxSetCurrent(void* context);
}

namespace {

using Result = int;

enum { kInvalid = 1, kUnsupported = 801, kCaptureUnsupported = 900, kSms = 132, kPart = 8, kRelaxed = 2 };

struct Resource {  // CUdevResource
  int type;
  unsigned char padding[92];
  unsigned count, least, alignment;
  unsigned char rest[36];
};
static_assert(sizeof(Resource) == 144);

struct Place {  // SMs of a context, from `first` on
  unsigned first = 0, count = kSms;
};

struct Node {
  Place where;
  std::function<void(Place)> work;
};

struct Graph {
  int number = 0;
  std::vector<Node> nodes;
};

struct Capture {
  void* origin;
  Graph* graph;
};

std::recursive_mutex mutex;
std::map<void*, Place> contexts;                      // green ones
std::map<void*, void*> streams;                       // the context of each that was made
std::map<void*, std::shared_ptr<Capture>> capturing;  // by stream
std::map<void*, std::shared_ptr<Capture>> events;     // recorded in a stream that was captured
std::map<std::string, int> launched;                  // by place, since the last line of it
std::map<void*, std::string> functions;
std::uintptr_t last = 0x100000;
int graphs = 0;
thread_local int mode = 0;
thread_local int begun = 0;

bool listed(const char* variable, const char* name) {
  const char* value = std::getenv(variable);
  return value != nullptr && ("," + std::string(value) + ",").find("," + std::string(name) + ",") != std::string::npos;
}

// `context FIRST COUNT`: another is current from now on. `computed FIRST COUNT N`: N kernels were launched there since
// the last such line. `captured NUMBER FIRST COUNT NODES`, `replayed NUMBER`, `dropped NUMBER`: of graphs. `refused
// NAME`: a call that would have broken a capture. `asked`: which context is current. `green FIRST COUNT`: a context was
// made.
void trace(const char* format, ...) {
  const char* path = std::getenv("CUDA_STUB_TRACE");
  if (path == nullptr) return;
  char text[200];
  const int head = std::snprintf(text, sizeof text, "%d ", static_cast<int>(getpid()));
  va_list arguments;
  va_start(arguments, format);
  const int rest = std::vsnprintf(text + head, sizeof text - head - 1, format, arguments);
  va_end(arguments);
  text[head + rest] = '\n';
  const int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (fd >= 0 && write(fd, text, head + rest + 1) < 0) std::abort();
  if (fd >= 0) close(fd);
}

Place place_of(void* context) {
  const auto found = contexts.find(context);
  return found == contexts.end() ? Place() : found->second;
}

// 0 to 2 are the default streams, which are those of the current context.
bool is_default(void* stream) { return reinterpret_cast<std::uintptr_t>(stream) <= 2; }

Place place_of_stream(void* stream) {
  const auto found = streams.find(stream);
  if (!is_default(stream) && found != streams.end()) return place_of(found->second);
  void* current = nullptr;
  fakeCtxGetCurrent(&current);
  return place_of(current);
}

void tell_computed() {
  for (const auto& each : launched) trace("computed %s %d", each.first.c_str(), each.second);
  launched.clear();
}

void do_or_capture(void* stream, std::function<void(Place)> work, bool kernel) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  const Place where = place_of_stream(stream);
  const auto found = capturing.find(stream);
  if (found != capturing.end()) {
    found->second->graph->nodes.push_back({where, std::move(work)});
    return;
  }
  if (begun && kernel) trace("astray");
  if (kernel) ++launched[std::to_string(where.first) + " " + std::to_string(where.count)];
  if (work) work(where);
}

void* number() { return reinterpret_cast<void*>(last += 16); }

}  // namespace

extern "C" {

// ------------------------------------------------------------ for the runtime's stand-in

Result stub_stream_create(void** stream) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  void* current = nullptr;
  fakeCtxGetCurrent(&current);
  *stream = number();
  streams[*stream] = current;
  return 0;
}

void stub_launch(void* stream, const char* name, void** params) {
  std::function<void(Place)> work;
  if (name != nullptr && params != nullptr && std::strcmp(name, "mark_sm_kernel") == 0) {
    int* seen = *static_cast<int**>(params[0]);
    work = [seen](Place where) {
      for (unsigned sm = where.first; sm < where.first + where.count; ++sm) seen[sm] = 1;
    };
  }
  do_or_capture(stream, std::move(work), true);
}

Result stub_copy(void* to, const void* from, std::size_t size, void* stream) {
  do_or_capture(stream, [=](Place) { std::memcpy(to, from, size); }, false);
  return 0;
}

Result stub_set(void* at, int value, std::size_t size, void* stream) {
  do_or_capture(stream, [=](Place) { std::memset(at, value, size); }, false);
  return 0;
}

// Whether a call that must not be made while this thread captures is made then.
Result stub_forbidden(const char* name) {
  if (!begun || mode == kRelaxed) return 0;
  trace("refused %s", name);
  return kCaptureUnsupported;
}

int stub_exchange_mode(int wanted) {
  const int before = mode;
  mode = wanted;
  return before;
}

unsigned long long stub_capture_of(void* stream) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  const auto found = capturing.find(stream);
  return found == capturing.end() ? 0 : static_cast<unsigned long long>(found->second->graph->number);
}

Result stub_begin(void* stream) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  if (is_default(stream) || capturing.count(stream)) return kCaptureUnsupported;
  auto made = std::make_shared<Capture>();
  made->origin = stream;
  made->graph = new Graph;
  made->graph->number = ++graphs;
  capturing[stream] = made;
  ++begun;
  return 0;
}

Result stub_end(void* stream, void** graph) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  const auto found = capturing.find(stream);
  if (found == capturing.end() || found->second->origin != stream) return 901;
  const std::shared_ptr<Capture> ended = found->second;
  for (auto each = capturing.begin(); each != capturing.end();)
    each = each->second == ended ? capturing.erase(each) : std::next(each);
  for (auto each = events.begin(); each != events.end();)
    each = each->second == ended ? events.erase(each) : std::next(each);
  --begun;
  *graph = ended->graph;
  const Place where = place_of_stream(stream);
  trace("captured %d %u %u %zu", ended->graph->number, where.first, where.count, ended->graph->nodes.size());
  return 0;
}

void stub_record(void* event, void* stream) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  const auto found = capturing.find(stream);
  if (found == capturing.end()) {
    events.erase(event);
  } else {
    events[event] = found->second;
  }
}

void stub_wait(void* stream, void* event) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  const auto found = events.find(event);
  if (found != events.end()) capturing[stream] = found->second;
}

std::size_t stub_nodes(void* graph) { return static_cast<Graph*>(graph)->nodes.size(); }

void* stub_instantiate(void* graph) { return new Graph(*static_cast<Graph*>(graph)); }

void stub_destroy(void* graph) { delete static_cast<Graph*>(graph); }

void stub_drop(void* executable) {
  trace("dropped %d", static_cast<Graph*>(executable)->number);
  stub_destroy(executable);
}

// Kernels of a graph compute where they were captured, in whatever stream it is launched.
Result stub_replay(void* executable) {
  const Graph& graph = *static_cast<Graph*>(executable);
  trace("replayed %d", graph.number);
  for (const Node& node : graph.nodes)
    if (node.work) node.work(std::getenv("CUDA_STUB_ASTRAY") ? Place() : node.where);
  return 0;
}

// ------------------------------------------------------------ the driver's own

#define REFUSABLE(name) \
  if (listed("CUDA_STUB_REFUSES", #name)) return kUnsupported

Result cuDeviceGetDevResource(int, Resource* resource, int type) {
  REFUSABLE(cuDeviceGetDevResource);
  std::memset(resource, 0, sizeof *resource);
  resource->type = type;
  resource->count = kSms;
  resource->least = resource->alignment = kPart;
  return 0;
}

Result cuDevSmResourceSplitByCount(Resource* parts, unsigned* groups, const Resource* whole, Resource*, unsigned,
                                   unsigned size) {
  REFUSABLE(cuDevSmResourceSplitByCount);
  if (size % kPart != 0) return kInvalid;
  if (*groups > whole->count / size) *groups = whole->count / size;
  for (unsigned part = 0; parts != nullptr && part < *groups; ++part) {
    parts[part] = *whole;
    parts[part].count = size;
    const unsigned first = part * size;
    std::memcpy(parts[part].padding, &first, sizeof first);
  }
  return 0;
}

Result cuDevResourceGenerateDesc(void** description, Resource* parts, unsigned count) {
  REFUSABLE(cuDevResourceGenerateDesc);
  auto* made = new Place{0, 0};
  std::memcpy(&made->first, parts[0].padding, sizeof made->first);
  for (unsigned part = 0; part < count; ++part) made->count += parts[part].count;
  *description = made;
  return 0;
}

Result cuGreenCtxCreate(void** context, Place* description, int, unsigned flags) {
  REFUSABLE(cuGreenCtxCreate);
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  if (flags != 1) return kInvalid;
  *context = number();
  contexts[*context] = *description;
  trace("green %u %u", description->first, description->count);
  return 0;
}

Result cuCtxFromGreenCtx(void** context, void* of) {
  REFUSABLE(cuCtxFromGreenCtx);
  *context = of;
  return 0;
}

Result cuCtxSynchronize() { return stub_forbidden("cuCtxSynchronize"); }

Result cuCtxGetDevice(int* device) {
  void* current = nullptr;
  fakeCtxGetCurrent(&current);
  const auto value = reinterpret_cast<std::uintptr_t>(current);
  *device = value > 0 && value < 0x1000 ? static_cast<int>(value) - 1 : 0;
  return 0;
}

Result cuStreamCreate(void** stream, unsigned) {
  REFUSABLE(cuStreamCreate);
  return stub_stream_create(stream);
}

Result cuCtxGetCurrent(void** context) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  const char* loses = std::getenv("CUDA_STUB_LOSES");
  fakeCtxGetCurrent(context);
  if (!contexts.count(*context)) return 0;
  trace("asked");
  if (loses == nullptr || access(loses, F_OK) != 0) return 0;
  *context = reinterpret_cast<void*>(1);
  return fakeCtxSetCurrent(*context);
}

Result cuCtxSetCurrent(void* context) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  void* before = nullptr;
  fakeCtxGetCurrent(&before);
  if (before != context && (contexts.count(before) || contexts.count(context))) {
    tell_computed();
    const Place place = place_of(context);
    trace("context %u %u", place.first, place.count);
  }
  return fakeCtxSetCurrent(context);
}

Result cuModuleGetFunction(void** function, void*, const char* name) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  *function = number();
  functions[*function] = name;
  return 0;
}

struct LaunchConfig {  // CUlaunchConfig
  unsigned grid[3], block[3], shared;
  void* stream;
};

static Result launch(void* function, void* stream, void** params) {
  std::string name;
  {
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    name = functions[function];
  }
  stub_launch(stream, name.c_str(), params);
  return 0;
}

Result cuLaunchKernel(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                      void* stream, void** params, void**) {
  return launch(function, stream, params);
}

Result cuLaunchKernelEx(const LaunchConfig* config, void* function, void** params, void**) {
  return launch(function, config->stream, params);
}

}  // extern "C"
