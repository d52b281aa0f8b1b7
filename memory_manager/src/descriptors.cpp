#include "descriptors.hpp"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace muxserve::memory {
namespace {

constexpr std::size_t kMaxMessage = 4096;

// Room for one descriptor, aligned as the kernel wants it.
union Control {
  char bytes[CMSG_SPACE(sizeof(int))];
  cmsghdr align;
};

}  // namespace

void Descriptor::reset() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

bool send_message(int socket, const std::string& text, int fd) {
  iovec data{const_cast<char*>(text.data()), text.size()};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  Control control{};
  if (fd >= 0) {
    message.msg_control = control.bytes;
    message.msg_controllen = sizeof control.bytes;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fd);
    std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  }
  while (true) {
    const ssize_t put = sendmsg(socket, &message, MSG_NOSIGNAL);
    if (put >= 0) return static_cast<std::size_t>(put) == text.size();
    if (errno != EINTR) return false;
  }
}

std::pair<std::string, Descriptor> receive_message(int socket) {
  std::string text(kMaxMessage, '\0');
  iovec data{text.data(), text.size()};
  Control control{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof control.bytes;
  ssize_t got = -1;
  do {
    got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got <= 0) return {};
  text.resize(static_cast<std::size_t>(got));
  Descriptor descriptor;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
    descriptor = Descriptor(fd);
  }
  return {std::move(text), std::move(descriptor)};
}

}  // namespace muxserve::memory
