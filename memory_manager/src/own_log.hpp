// The file behind this process's stderr, which may be renamed (logrotate); see muxserve/net/logs.py.
#pragma once

#include <string>

namespace muxserve::memory {

class OwnLog {
 public:
  // Nothing is followed where stderr is no file that has a name.
  OwnLog();

  // Opens the file anew when another one, or none, has its name. Costs two system calls.
  void follow() noexcept;

 private:
  std::string path_;
};

}  // namespace muxserve::memory
