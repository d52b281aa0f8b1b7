// Pools in GPU memory over a driver without a GPU: what is called, what is left when something fails, what is shared.
#include "cuda_memory.hpp"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "client/chunk_mapping.hpp"
#include "client/cuda_mapping.hpp"
#include "export_server.hpp"
#include "fd_store.hpp"

namespace muxserve::memory::testing {
namespace {

constexpr char kGpu[] = "GPU-00010203-0405-0607-0809-0a0b0c0d0e00";
constexpr std::size_t kBytes = 3u << 20;

// Keeps descriptors as the controller does, on the other side of a socket.
class Keeper {
 public:
  int open_child() {
    int ends[2] = {-1, -1};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
    ours_ = Descriptor(ends[0]);
    // What LIST will be answered; the manager reads it after it has asked.
    for (const auto& each : kept_) send_message(ours_.get(), "HAVE " + each.first, each.second.get());
    send_message(ours_.get(), "END");
    return ends[1];
  }

  void listen() {
    while (true) {
      char byte = 0;
      if (recv(ours_.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) <= 0) return;
      auto [text, fd] = receive_message(ours_.get());
      if (text.compare(0, 5, "KEEP ") == 0) kept_[text.substr(5)] = std::move(fd);
      if (text.compare(0, 7, "FORGET ") == 0) kept_.erase(text.substr(7));
    }
  }

  std::map<std::string, Descriptor> kept_;

 private:
  Descriptor ours_;
};

class CudaMemory : public ::testing::Test {
 protected:
  void SetUp() override {
    setenv("MUXSERVE_CUDA_DRIVER", FAKE_CUDA, 1);
    for (const char* name : {"FAKE_CUDA_FAIL", "FAKE_CUDA_NO_VMM", "FAKE_CUDA_NEEDS_CONTEXT", "FAKE_CUDA_MEMORY"})
      unsetenv(name);
    log_ = ::testing::TempDir() + "fake_cuda_" + std::to_string(getpid()) + ".log";
    unlink(log_.c_str());
    setenv("FAKE_CUDA_LOG", log_.c_str(), 1);
    cuda::Driver::get();
    unlink(log_.c_str());
    ASSERT_EQ(live(), 0);
  }
  void TearDown() override {
    unsetenv("FAKE_CUDA_FAIL");
    EXPECT_EQ(live(), 0) << "something was not given back";
    unlink(log_.c_str());
  }

  static int live() {
    void* library = dlopen(FAKE_CUDA, RTLD_NOW | RTLD_NOLOAD);
    const auto count = reinterpret_cast<int (*)()>(dlsym(library, "fakeCudaLive"));
    const int result = count();
    dlclose(library);
    return result;
  }

  std::vector<std::string> calls() const {
    std::vector<std::string> names;
    std::ifstream file(log_);
    std::string name;
    int result = 0;
    while (file >> name >> result) names.push_back(name);
    return names;
  }

  std::unique_ptr<PoolMemory> make(PoolIpc ipc = PoolIpc::kAuto) {
    return cuda_pool(kGpu, kBytes, "pool.0.0", ipc, store_, note_);
  }

  std::string words(PoolIpc ipc) {
    try {
      make(ipc);
    } catch (const cuda::DriverError& error) {
      return error.what();
    }
    return "";
  }

  static Descriptor copy(const PoolMemory& pool) { return pool.descriptor(0); }

  std::string log_;
  std::string note_;
  FdStore store_{-1};
};

TEST_F(CudaMemory, WhatOneClientWritesAnotherReads) {
  for (const PoolIpc ipc : {PoolIpc::kVmm, PoolIpc::kLegacy}) {
    const auto pool = make(ipc);
    const CudaMapping one(pool->handle(), copy(*pool));
    const CudaMapping other(pool->handle(), copy(*pool));
    EXPECT_NE(one.address(), other.address());
    EXPECT_GE(one.bytes(), kBytes);
    EXPECT_EQ(one.device_uuid(), kGpu);
    auto* written = reinterpret_cast<char*>(one.address());
    std::strcpy(written + kBytes - 8, "page");
    EXPECT_STREQ(reinterpret_cast<const char*>(other.address()) + kBytes - 8, "page");
  }
}

TEST_F(CudaMemory, MemoryIsLetGoOfAndMappedAgainAtTheSameAddress) {
  const auto first = make(PoolIpc::kVmm);
  CudaMapping mapping(first->handle(), copy(*first), true);
  const auto address = mapping.address();
  std::strcpy(reinterpret_cast<char*>(CudaMapping(first->handle(), copy(*first)).address()), "first");
  EXPECT_STREQ(reinterpret_cast<const char*>(address), "first");
  const int with_memory = live();
  mapping.unmap();
  EXPECT_FALSE(mapping.mapped());
  EXPECT_LT(live(), with_memory);
  mapping.unmap();  // there is nothing more to let go of
  const auto second = cuda_pool(kGpu, kBytes, "pool.0.1", PoolIpc::kVmm, store_, note_);
  std::strcpy(reinterpret_cast<char*>(CudaMapping(second->handle(), copy(*second)).address()), "second");
  mapping.map_again(second->handle(), copy(*second));
  EXPECT_TRUE(mapping.mapped());
  EXPECT_TRUE(mapping.read_only());
  EXPECT_EQ(mapping.address(), address);
  EXPECT_EQ(mapping.handle(), second->handle());
  EXPECT_STREQ(reinterpret_cast<const char*>(address), "second");
}

TEST_F(CudaMemory, OnlyMemoryOfTheSameSizeAndGpuTakesThePlaceOfOther) {
  const auto pool = make(PoolIpc::kVmm);
  CudaMapping mapping(pool->handle(), copy(*pool));
  EXPECT_THROW(mapping.map_again(pool->handle(), copy(*pool)), MappingError) << "it is mapped";
  mapping.unmap();
  const auto larger = cuda_pool(kGpu, 4 * kBytes, "pool.0.1", PoolIpc::kVmm, store_, note_);
  const auto legacy = make(PoolIpc::kLegacy);
  EXPECT_THROW(mapping.map_again(larger->handle(), copy(*larger)), MappingError);
  EXPECT_THROW(mapping.map_again(legacy->handle(), Descriptor()), MappingError);
  EXPECT_THROW(CudaMapping(legacy->handle(), Descriptor()).unmap(), MappingError);
}

TEST_F(CudaMemory, WhatCannotBeMappedAgainIsTriedAnotherTime) {
  const auto pool = make(PoolIpc::kVmm);
  for (const char* call : {"cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"}) {
    CudaMapping mapping(pool->handle(), copy(*pool));
    setenv("FAKE_CUDA_FAIL", "cuMemUnmap@1=999", 1);
    EXPECT_THROW(mapping.unmap(), cuda::DriverError);
    EXPECT_TRUE(mapping.mapped());
    unsetenv("FAKE_CUDA_FAIL");
    mapping.unmap();
    const int before = live();
    setenv("FAKE_CUDA_FAIL", (std::string(call) + "@1=999").c_str(), 1);
    EXPECT_THROW(mapping.map_again(pool->handle(), copy(*pool)), cuda::DriverError) << call;
    unsetenv("FAKE_CUDA_FAIL");
    EXPECT_FALSE(mapping.mapped());
    EXPECT_EQ(live(), before);
    mapping.map_again(pool->handle(), copy(*pool));
    EXPECT_TRUE(mapping.mapped());
  }
}

TEST_F(CudaMemory, CallsInOrder) {
  {
    const auto pool = make(PoolIpc::kVmm);
    const CudaMapping mapping(pool->handle(), copy(*pool));
  }
  const std::vector<std::string> expected{"cuMemGetAllocationGranularity",
                                          "cuMemCreate",
                                          "cuMemExportToShareableHandle",
                                          "cuDevicePrimaryCtxRetain",
                                          "cuCtxGetCurrent",
                                          "cuMemImportFromShareableHandle",
                                          "cuMemAddressReserve",
                                          "cuMemMap",
                                          "cuMemSetAccess",
                                          "cuMemRelease",
                                          "cuMemUnmap",
                                          "cuMemAddressFree",
                                          "cuDevicePrimaryCtxRelease",
                                          "cuMemRelease"};
  std::vector<std::string> seen;
  for (const std::string& name : calls())
    if (name.find("Device") != 2 && name != "cuCtxSetCurrent") seen.push_back(name);
  std::vector<std::string> wanted;
  for (const std::string& name : expected)
    if (name.find("Device") != 2) wanted.push_back(name);
  EXPECT_EQ(seen, wanted);
}

TEST_F(CudaMemory, NoContextIsMadeUnlessTheDriverAsksForOne) {
  make(PoolIpc::kVmm).reset();
  for (const std::string& name : calls()) EXPECT_NE(name, "cuDevicePrimaryCtxRetain");
  setenv("FAKE_CUDA_NEEDS_CONTEXT", "1", 1);
  const auto pool = make(PoolIpc::kVmm);
  EXPECT_NE(pool, nullptr);
}

TEST_F(CudaMemory, WhateverFailsNothingIsLeft) {
  for (const PoolIpc ipc : {PoolIpc::kVmm, PoolIpc::kLegacy}) {
    // Every call that is made when all goes well, failing in its turn.
    unlink(log_.c_str());
    {
      const auto pool = make(ipc);
      const CudaMapping mapping(pool->handle(), copy(*pool));
    }
    std::map<std::string, int> times;
    for (const std::string& name : calls()) {
      if (name == "cuMemRelease" || name == "cuMemUnmap" || name == "cuMemAddressFree" || name == "cuMemFree" ||
          name == "cuIpcCloseMemHandle" || name == "cuDevicePrimaryCtxRelease" || name == "cuDeviceGetAttribute")
        continue;  // giving back, or asking what may be answered with no
      const int nth = ++times[name];
      const std::string plan = name + "@" + std::to_string(nth) + "=999";
      setenv("FAKE_CUDA_FAIL", plan.c_str(), 1);
      bool failed = false;
      try {
        const auto pool = make(ipc);
        const CudaMapping mapping(pool->handle(), copy(*pool));
      } catch (const cuda::DriverError& error) {
        failed = true;
        EXPECT_EQ(error.code(), 999);
        EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
      }
      // The last cuCtxSetCurrent only puts things back.
      EXPECT_TRUE(failed || name == "cuCtxSetCurrent") << plan;
      unsetenv("FAKE_CUDA_FAIL");
      EXPECT_EQ(live(), 0) << plan;
    }
    EXPECT_GE(times.size(), 5u);
  }
}

TEST_F(CudaMemory, ErrorsSayWhatToDo) {
  setenv("FAKE_CUDA_MEMORY", "1000000", 1);
  const std::string memory = words(PoolIpc::kAuto);
  EXPECT_NE(memory.find("allocating a pool of 3 MiB on GPU-"), std::string::npos) << memory;
  EXPECT_NE(memory.find("too little free memory"), std::string::npos) << memory;
  const std::vector<std::pair<const char*, const char*>> cases{
      {"cuMemCreate=214", "memory error that it cannot correct"},
      {"cuMemCreate=999", "Xid"},
      {"cuMemCreate=805", "MPS server does not answer"},
      {"cuMemExportToShareableHandle=801", "does not allow it"},
      {"cuMemCreate=46", "exclusive mode"},
  };
  unsetenv("FAKE_CUDA_MEMORY");
  for (const auto& [plan, advice] : cases) {
    setenv("FAKE_CUDA_FAIL", plan, 1);
    EXPECT_NE(words(PoolIpc::kVmm).find(advice), std::string::npos) << words(PoolIpc::kVmm);
  }
  unsetenv("FAKE_CUDA_FAIL");
  try {
    cuda_pool("GPU-nowhere", kBytes, "pool.0.0", PoolIpc::kAuto, store_, note_);
    FAIL();
  } catch (const cuda::DriverError& error) {
    EXPECT_NE(std::string(error.what()).find(kGpu), std::string::npos) << error.what();
  }
}

TEST_F(CudaMemory, AutoFallsBackToLegacyIpcAndSaysWhy) {
  EXPECT_EQ(make()->handle().rfind("cuda-vmm:", 0), 0u);
  setenv("FAKE_CUDA_NO_VMM", "1", 1);
  EXPECT_EQ(make()->handle().rfind("cuda-ipc:", 0), 0u);
  EXPECT_NE(note_.find("cannot export memory as a file descriptor"), std::string::npos) << note_;
  unsetenv("FAKE_CUDA_NO_VMM");
  setenv("FAKE_CUDA_FAIL", "cuMemExportToShareableHandle=801", 1);
  EXPECT_EQ(make()->handle().rfind("cuda-ipc:", 0), 0u);
  EXPECT_NE(note_.find("cuMemExportToShareableHandle"), std::string::npos) << note_;
  // Out of memory is no reason to try again in another way.
  setenv("FAKE_CUDA_FAIL", "cuMemCreate=2", 1);
  EXPECT_THROW(make(), cuda::DriverError);
}

TEST_F(CudaMemory, ARestartedManagerTakesTheSameMemoryUp) {
  Keeper keeper;
  std::string handle;
  {
    FdStore store(keeper.open_child());
    const VmmPoolMemory pool(cuda::Driver::get(), kGpu, kBytes, "pool.0.0", store);
    handle = pool.handle();
    const CudaMapping client(handle, copy(pool));
    std::strcpy(reinterpret_cast<char*>(client.address()), "kept");
    // As when it is killed: destroy() is not called.
  }
  keeper.listen();
  ASSERT_EQ(keeper.kept_.size(), 1u);
  {
    FdStore store(keeper.open_child());
    VmmPoolMemory pool(cuda::Driver::get(), kGpu, kBytes, "pool.0.0", store);
    EXPECT_EQ(pool.handle(), handle);
    const CudaMapping client(handle, copy(pool));
    EXPECT_STREQ(reinterpret_cast<const char*>(client.address()), "kept");
    pool.destroy();
  }
  keeper.listen();
  EXPECT_TRUE(keeper.kept_.empty());
}

TEST_F(CudaMemory, MemoryOfAnotherSizeIsForgotten) {
  Keeper keeper;
  {
    FdStore store(keeper.open_child());
    const VmmPoolMemory pool(cuda::Driver::get(), kGpu, kBytes, "pool.0.0", store);
  }
  keeper.listen();
  {
    FdStore store(keeper.open_child());
    const VmmPoolMemory pool(cuda::Driver::get(), kGpu, 4 * kBytes, "pool.0.0", store);
    store.forget_rest();
  }
  keeper.listen();
  ASSERT_EQ(keeper.kept_.size(), 1u);
  EXPECT_EQ(keeper.kept_.begin()->first.find("pool.0.0 12582912 "), 0u) << keeper.kept_.begin()->first;
}

TEST_F(CudaMemory, WhatCannotBeTakenUpIsAllocatedAnew) {
  Keeper keeper;
  std::string handle;
  {
    FdStore store(keeper.open_child());
    const VmmPoolMemory pool(cuda::Driver::get(), kGpu, kBytes, "pool.0.0", store);
    handle = pool.handle();
  }
  keeper.listen();
  setenv("FAKE_CUDA_FAIL", "cuMemImportFromShareableHandle=999", 1);
  {
    FdStore store(keeper.open_child());
    const VmmPoolMemory pool(cuda::Driver::get(), kGpu, kBytes, "pool.0.0", store);
    EXPECT_NE(pool.handle(), handle);
  }
  keeper.listen();
  EXPECT_EQ(keeper.kept_.size(), 1u);
}

TEST_F(CudaMemory, AKeeperThatIsGoneKeepsNothing) {
  Keeper keeper;
  const int child = keeper.open_child();
  keeper = Keeper();
  FdStore store(child);
  const VmmPoolMemory pool(cuda::Driver::get(), kGpu, kBytes, "pool.0.0", store);
  EXPECT_TRUE(pool.descriptor());
}

TEST_F(CudaMemory, DescriptorsAreHandedOut) {
  const auto pool = make(PoolIpc::kVmm);
  const std::string path = ::testing::TempDir() + "pools_" + std::to_string(getpid());
  {
    const PosixPoolMemory shared("muxserve-test-export-" + std::to_string(getpid()), 4096);
    const ExportServer server(path, {{pool.get(), &shared}});
    const CudaMapping mapping(pool->handle(), ask_for_descriptor(path, 0, 0));
    EXPECT_NE(mapping.address(), 0u);
    EXPECT_THROW(ask_for_descriptor(path, 0, 1), ExportError);
    EXPECT_THROW(ask_for_descriptor(path, 0, 2), ExportError);
    EXPECT_THROW(ask_for_descriptor(path, 1, 0), ExportError);
    PosixPoolMemory("muxserve-test-export-" + std::to_string(getpid()), 4096).destroy();
  }
  EXPECT_THROW(ask_for_descriptor(path, 0, 0), ExportError);
}

// A pool of three chunks, the last one of half the size, and the server of its descriptors.
struct ChunkedPool {
  explicit ChunkedPool(FdStore& store)
      : socket(::testing::TempDir() + "chunks_" + std::to_string(getpid())),
        memory(chunked_cuda_pool(kGpu, 5 * kMiB2, 2 * kMiB2, "pool.0.0", store,
                                 "muxserve-test-chunks-" + std::to_string(getpid()))),
        server(std::in_place, ExportServer::path_for(socket), ExportedPools{{memory.get()}}) {}

  static constexpr std::size_t kMiB2 = 2u << 20, kChunk = 2 * kMiB2;
  std::string socket;
  std::unique_ptr<ChunkedVmmPoolMemory> memory;
  std::optional<ExportServer> server;
};

// Whether it comes true before long.
bool soon(const std::function<bool()>& what) {
  for (int i = 0; i < 2000 && !what(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return what();
}

TEST_F(CudaMemory, ChunksComeAndGoBehindAddressesThatStay) {
  ChunkedPool pool(store_);
  pool.memory->take_again(0, pool.kChunk);
  {
    ChunkMapping one(pool.memory->handle(), pool.socket, 0, 0), other(pool.memory->handle(), pool.socket, 0, 0);
    EXPECT_EQ(one.mapped(), 1u);
    EXPECT_EQ(one.bytes(), 5 * pool.kMiB2);
    const auto address = one.address();
    pool.memory->take_again(2 * pool.kChunk, pool.kMiB2);
    one.sync();
    other.sync();
    EXPECT_EQ(one.mapped(), 2u);
    std::strcpy(reinterpret_cast<char*>(address + 5 * pool.kMiB2 - 8), "page");
    EXPECT_STREQ(reinterpret_cast<const char*>(other.address() + 5 * pool.kMiB2 - 8), "page");
    // What was given back is let go of by itself, and what replaces it is other memory at the same address.
    pool.memory->give_back(2 * pool.kChunk, pool.kMiB2);
    EXPECT_TRUE(soon([&] { return one.mapped() == 1 && other.mapped() == 1; }));
    pool.memory->take_again(2 * pool.kChunk, pool.kMiB2);
    one.sync();
    EXPECT_EQ(one.address(), address);
    EXPECT_STREQ(reinterpret_cast<const char*>(address + 5 * pool.kMiB2 - 8), "");
  }
  pool.memory->destroy();
}

TEST_F(CudaMemory, MemoryOfChunksIsFreeWhenNobodyHasThemMapped) {
  ChunkedPool pool(store_);
  ChunkMapping mapping(pool.memory->handle(), pool.socket, 0, 0);
  const int without = live();
  pool.memory->take_again(pool.kChunk, pool.kChunk);
  mapping.sync();
  EXPECT_GT(live(), without);
  pool.memory->give_back(pool.kChunk, pool.kChunk);
  EXPECT_TRUE(soon([&] { return live() == without; }));
  pool.memory->give_back(pool.kChunk, pool.kChunk);  // there is nothing more to give
  EXPECT_EQ(live(), without);
  pool.memory->destroy();
}

TEST_F(CudaMemory, AChunkThatTheDriverRefusesChangesNothing) {
  ChunkedPool pool(store_);
  pool.memory->take_again(0, pool.kChunk);
  ChunkMapping mapping(pool.memory->handle(), pool.socket, 0, 0);
  for (const char* call : {"cuMemCreate", "cuMemExportToShareableHandle"}) {
    setenv("FAKE_CUDA_FAIL", (std::string(call) + "=2").c_str(), 1);
    EXPECT_THROW(pool.memory->take_again(pool.kChunk, pool.kChunk), cuda::DriverError) << call;
    unsetenv("FAKE_CUDA_FAIL");
    mapping.sync();
    EXPECT_EQ(mapping.mapped(), 1u);
  }
  pool.memory->take_again(pool.kChunk, pool.kChunk);
  for (const char* call : {"cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"}) {
    setenv("FAKE_CUDA_FAIL", (std::string(call) + "=999").c_str(), 1);
    const int before = live();
    EXPECT_THROW(mapping.sync(), cuda::DriverError) << call;
    EXPECT_EQ(live(), before) << call;
    unsetenv("FAKE_CUDA_FAIL");
    EXPECT_EQ(mapping.mapped(), 1u);
  }
  mapping.sync();
  EXPECT_EQ(mapping.mapped(), 2u);
  pool.memory->destroy();
}

TEST_F(CudaMemory, ChunksOutliveTheirManager) {
  Keeper keeper;
  std::string handle;
  {
    FdStore store(keeper.open_child());
    ChunkedPool pool(store);
    handle = pool.memory->handle();
    pool.memory->take_again(0, pool.kChunk);
    ChunkMapping mapping(handle, pool.socket, 0, 0);
    std::strcpy(reinterpret_cast<char*>(mapping.address()), "first");
  }  // as if it were killed: nothing is destroyed
  keeper.listen();
  EXPECT_EQ(keeper.kept_.size(), 1u);
  FdStore store(keeper.open_child());
  ChunkedPool pool(store);
  ChunkMapping mapping(pool.memory->handle(), pool.socket, 0, 0);
  EXPECT_EQ(pool.memory->handle(), handle);
  EXPECT_EQ(mapping.mapped(), 0u);
  pool.memory->take_again(0, pool.kChunk);
  mapping.sync();
  EXPECT_STREQ(reinterpret_cast<const char*>(mapping.address()), "first");
  pool.memory->destroy();
  keeper.listen();
  EXPECT_TRUE(keeper.kept_.empty());
  // The manager is gone, and a client that maps more hears so; what it has stays.
  pool.server.reset();
  EXPECT_TRUE(soon([&] { return mapping.mapped() == 0; }));
}

TEST_F(CudaMemory, ChunksNeedMemoryThatCanBeExported) {
  setenv("FAKE_CUDA_NO_VMM", "1", 1);
  EXPECT_THROW(ChunkedPool pool(store_), cuda::DriverError);
  unsetenv("FAKE_CUDA_NO_VMM");
  EXPECT_THROW(chunked_cuda_pool(kGpu, 8 << 20, 3 << 20, "pool.0.0", store_, "muxserve-test-none"), cuda::DriverError);
  for (const char* handle : {"cuda-vmm:a:1:b", "cuda-vmm-chunks:a:1:0:b", "cuda-vmm-chunks:a:1:b", ""})
    EXPECT_ANY_THROW(ChunkMapping(handle, "/nowhere", 0, 0)) << handle;
}

TEST_F(CudaMemory, HandlesThatAreNotUnderstood) {
  for (const char* handle : {"posix:x", "cuda-vmm:x", "cuda-other:a:1:b", ""})
    EXPECT_THROW(CudaMapping(handle, Descriptor()), MappingError) << handle;
  const std::string short_digits = std::string("cuda-ipc:") + kGpu + ":64:00";
  EXPECT_THROW(CudaMapping(short_digits, Descriptor()), MappingError);
}

}  // namespace
}  // namespace muxserve::memory::testing
