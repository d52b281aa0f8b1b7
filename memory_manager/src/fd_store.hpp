// Descriptors that outlive the manager: somebody else keeps them, as the controller does, and gives them back to the
// next.
//
// Over a SEQPACKET socket that the manager inherits, one message each:
//   manager: LIST                     keeper: HAVE <name> with the descriptor, for each; then END
//   manager: KEEP <name> with the descriptor
//   manager: FORGET <name>
#pragma once

#include <map>
#include <string>

#include "descriptors.hpp"

namespace muxserve::memory {

class FdStore {
 public:
  // Asks the keeper behind `socket` for what it has. -1, or a keeper that is gone or silent for five seconds: nothing
  // is kept, and nothing will be.
  explicit FdStore(int socket);

  // The kept descriptor whose name starts with `start`, with the rest of its name; it is this object's no more.
  std::pair<std::string, Descriptor> take(const std::string& start);

  void keep(const std::string& name, int fd);
  void forget(const std::string& name);

  // Has the keeper forget what nobody has taken.
  void forget_rest();

 private:
  Descriptor socket_;
  std::map<std::string, Descriptor> kept_;
};

}  // namespace muxserve::memory
