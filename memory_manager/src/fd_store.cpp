#include "fd_store.hpp"

#include <sys/socket.h>
#include <sys/time.h>

#include <utility>

namespace muxserve::memory {

FdStore::FdStore(int socket) : socket_(socket) {
  if (!socket_) return;
  timeval limit{};
  limit.tv_sec = 5;
  setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  if (!send_message(socket_.get(), "LIST")) socket_.reset();
  while (socket_) {
    auto [text, fd] = receive_message(socket_.get());
    if (text == "END") return;
    const std::string have = "HAVE ";
    if (text.compare(0, have.size(), have) == 0 && fd) {
      kept_[text.substr(have.size())] = std::move(fd);
    } else {
      kept_.clear();
      socket_.reset();
    }
  }
}

std::pair<std::string, Descriptor> FdStore::take(const std::string& start) {
  const auto found = kept_.lower_bound(start);
  if (found == kept_.end() || found->first.compare(0, start.size(), start) != 0) return {};
  std::pair<std::string, Descriptor> result(found->first.substr(start.size()), std::move(found->second));
  kept_.erase(found);
  return result;
}

void FdStore::keep(const std::string& name, int fd) {
  if (socket_) send_message(socket_.get(), "KEEP " + name, fd);
}

void FdStore::forget(const std::string& name) {
  if (socket_) send_message(socket_.get(), "FORGET " + name);
}

void FdStore::forget_rest() {
  for (const auto& each : kept_) forget(each.first);
  kept_.clear();
}

}  // namespace muxserve::memory
