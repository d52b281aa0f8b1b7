#include "chunk_mapping.hpp"

#include <algorithm>
#include <chrono>
#include <sstream>

#include "export_server.hpp"

namespace muxserve::memory {
namespace {

// How soon memory that was given back is let go of.
constexpr std::chrono::milliseconds kLook{20};

std::vector<std::string> split(const std::string& handle) {
  std::vector<std::string> parts;
  std::istringstream in(handle);
  for (std::string part; std::getline(in, part, ':');) parts.push_back(part);
  return parts;
}

}  // namespace

ChunkMapping::ChunkMapping(const std::string& handle, const std::string& manager_socket, std::size_t pool,
                           std::size_t rank)
    : driver_(cuda::Driver::get()), handle_(handle), manager_socket_(manager_socket), pool_(pool), rank_(rank) {
  const std::vector<std::string> parts = split(handle);
  if (parts.size() != 5 || parts[0] != "cuda-vmm-chunks")
    throw MappingError("this client cannot map pool memory of the kind \"" + handle + "\"");
  uuid_ = parts[1];
  bytes_ = static_cast<std::size_t>(std::stoull(parts[2]));
  chunk_bytes_ = static_cast<std::size_t>(std::stoull(parts[3]));
  if (chunk_bytes_ == 0) throw MappingError("a pool in chunks of no bytes cannot be mapped");
  mapped_.resize((bytes_ + chunk_bytes_ - 1) / chunk_bytes_);
  numbers_ = std::make_unique<Mapping>(parts[4], mapped_.size() * sizeof(std::uint32_t), false);
  device_ = driver_.device(uuid_);
  driver_.check(driver_.primary_retain(&context_, device_), "cuDevicePrimaryCtxRetain", "making a CUDA context");
  try {
    enter();
    // All chunks are as large: the last one has addresses that nothing is behind.
    driver_.check(driver_.reserve(&address_, mapped_.size() * chunk_bytes_, 0, 0, 0), "cuMemAddressReserve",
                  "mapping the pool on " + uuid_);
    sync();
  } catch (...) {
    for (std::size_t chunk = 0; chunk < mapped_.size(); ++chunk)
      if (mapped_[chunk] != 0) unmap(chunk);
    if (address_ != 0) driver_.unreserve(address_, mapped_.size() * chunk_bytes_);
    driver_.primary_release(device_);
    throw;
  }
  thread_ = std::thread([this] { watch(); });
}

ChunkMapping::~ChunkMapping() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ends_ = true;
  }
  over_.notify_all();
  thread_.join();
  for (std::size_t chunk = 0; chunk < mapped_.size(); ++chunk)
    if (mapped_[chunk] != 0) unmap(chunk);
  driver_.unreserve(address_, mapped_.size() * chunk_bytes_);
  driver_.primary_release(device_);
}

std::uint32_t ChunkMapping::number(std::size_t chunk) const {
  return static_cast<const std::atomic<std::uint32_t>*>(numbers_->data())[chunk].load(std::memory_order_acquire);
}

std::size_t ChunkMapping::bytes_of(std::size_t chunk) const {
  return std::min(chunk_bytes_, bytes_ - chunk * chunk_bytes_);
}

std::size_t ChunkMapping::mapped() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return mapped_.size() - static_cast<std::size_t>(std::count(mapped_.begin(), mapped_.end(), 0u));
}

// Have a context, if this thread has none.
void ChunkMapping::enter() const {
  cuda::Context current = nullptr;
  driver_.check(driver_.context_current(&current), "cuCtxGetCurrent", "looking for a CUDA context");
  if (current == nullptr) driver_.check(driver_.context_set(context_), "cuCtxSetCurrent", "making a CUDA context");
}

void ChunkMapping::sync() {
  const std::lock_guard<std::mutex> lock(mutex_);
  let_go();
  for (std::size_t chunk = 0; chunk < mapped_.size(); ++chunk)
    if (const std::uint32_t now = number(chunk); now != mapped_[chunk]) map(chunk, now);
}

// What the manager has given back, or has replaced.
void ChunkMapping::let_go() {
  for (std::size_t chunk = 0; chunk < mapped_.size(); ++chunk)
    if (mapped_[chunk] != 0 && number(chunk) != mapped_[chunk]) unmap(chunk);
}

void ChunkMapping::map(std::size_t chunk, std::uint32_t number) {
  if (number == 0) return;
  Descriptor descriptor;
  try {
    descriptor = ask_for_descriptor(ExportServer::path_for(manager_socket_), pool_, rank_, chunk);
  } catch (const ExportError&) {
    if (this->number(chunk) != number) return;  // it has gone meanwhile: nobody has pages there
    throw;
  }
  // What was asked for may be the next one already; then it is mapped anew with the next call.
  enter();
  const std::string doing = "mapping a chunk of the pool on " + uuid_;
  cuda::AllocationHandle allocation = 0;
  void* os_handle = reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor.get()));
  driver_.check(driver_.import_handle(&allocation, os_handle, cuda::kFileDescriptor), "cuMemImportFromShareableHandle",
                doing);
  const cuda::DevicePointer address = address_ + chunk * chunk_bytes_;
  const cuda::Result result = driver_.map(address, bytes_of(chunk), 0, allocation, 0);
  driver_.release(allocation);  // the mapping holds the memory
  driver_.check(result, "cuMemMap", doing);
  cuda::Access access;
  access.location.id = device_;
  access.flags = cuda::kReadAndWrite;
  const cuda::Result allowed = driver_.set_access(address, bytes_of(chunk), &access, 1);
  if (allowed != cuda::kSuccess) driver_.unmap(address, bytes_of(chunk));
  driver_.check(allowed, "cuMemSetAccess", doing);
  mapped_[chunk] = number;
}

void ChunkMapping::unmap(std::size_t chunk) {
  driver_.unmap(address_ + chunk * chunk_bytes_, bytes_of(chunk));
  mapped_[chunk] = 0;
}

void ChunkMapping::watch() {
  std::unique_lock<std::mutex> lock(mutex_);
  driver_.context_set(context_);
  while (!over_.wait_for(lock, kLook, [this] { return ends_; })) let_go();
}

}  // namespace muxserve::memory
