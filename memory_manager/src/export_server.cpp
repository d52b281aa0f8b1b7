#include "export_server.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <sstream>
#include <utility>

namespace muxserve::memory {
namespace {

sockaddr_un address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) throw ExportError("the socket path is too long: \"" + path + "\"");
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  return address;
}

// Nobody is waited for longer than this.
void limit_waiting(int socket) {
  timeval limit{};
  limit.tv_sec = 5;
  setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

}  // namespace

ExportServer::ExportServer(const std::string& path, ExportedPools pools) : path_(path), pools_(std::move(pools)) {
  const sockaddr_un address = address_of(path);
  const auto fail = [&](const char* what) {
    throw ExportError(std::string(what) + " \"" + path + "\": " + std::strerror(errno));
  };
  listener_ = Descriptor(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  stop_ = Descriptor(eventfd(0, EFD_CLOEXEC));
  if (!listener_ || !stop_) fail("cannot make the socket");
  unlink(path.c_str());
  if (bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) fail("cannot listen on");
  if (chmod(path.c_str(), 0600) != 0 || listen(listener_.get(), 64) != 0) fail("cannot listen on");
  thread_ = std::thread([this] { serve(); });
}

ExportServer::~ExportServer() {
  const std::uint64_t one = 1;
  if (write(stop_.get(), &one, sizeof one) == static_cast<ssize_t>(sizeof one)) thread_.join();
  unlink(path_.c_str());
}

void ExportServer::serve() {
  while (true) {
    pollfd events[2] = {{listener_.get(), POLLIN, 0}, {stop_.get(), POLLIN, 0}};
    if (poll(events, 2, -1) < 0 && errno != EINTR) return;
    if (events[1].revents != 0) return;
    if ((events[0].revents & POLLIN) == 0) continue;
    const Descriptor client(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (client) answer(client.get());
  }
}

void ExportServer::answer(int client) const {
  limit_waiting(client);
  const auto [text, unwanted] = receive_message(client);
  std::istringstream words(text);
  std::size_t pool = 0, rank = 0, chunk = 0;
  if (!(words >> pool >> rank >> chunk) || !words.eof()) {
    send_message(client, "the request is not \"<pool> <rank> <chunk>\"");
  } else if (pool >= pools_.size() || rank >= pools_[pool].size()) {
    send_message(client, "there is no pool " + std::to_string(pool) + " on rank " + std::to_string(rank));
  } else if (const Descriptor found = pools_[pool][rank]->descriptor(chunk); !found) {
    send_message(client, "pool " + std::to_string(pool) + " has no descriptor of chunk " + std::to_string(chunk));
  } else {
    send_message(client, "OK", found.get());
  }
}

Descriptor ask_for_descriptor(const std::string& path, std::size_t pool, std::size_t rank, std::size_t chunk) {
  const sockaddr_un address = address_of(path);
  const Descriptor server(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!server || connect(server.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
    throw ExportError("cannot reach the memory manager on \"" + path + "\": " + std::strerror(errno));
  limit_waiting(server.get());
  if (!send_message(server.get(), std::to_string(pool) + " " + std::to_string(rank) + " " + std::to_string(chunk)))
    throw ExportError("the memory manager on \"" + path + "\" is gone");
  auto [text, descriptor] = receive_message(server.get());
  if (text != "OK" || !descriptor)
    throw ExportError(text.empty() ? "the memory manager on \"" + path + "\" is gone" : text);
  return std::move(descriptor);
}

}  // namespace muxserve::memory
