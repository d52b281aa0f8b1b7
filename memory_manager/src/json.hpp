// Writes JSON: descriptions and statistics. Own code so that building the wheel needs nothing but a C++ compiler.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

namespace muxserve::memory::json {

// Writes JSON piece by piece; commas are put where they belong.
class Writer {
 public:
  Writer& open_object();
  Writer& close_object();
  Writer& open_array();
  Writer& close_array();
  Writer& key(const std::string& name);
  Writer& value(std::int64_t number);
  Writer& value(const std::string& text);

  template <class T>
  Writer& member(const std::string& name, const T& what) {
    key(name);
    if constexpr (std::is_integral_v<T>) {
      return value(static_cast<std::int64_t>(what));
    } else {
      return value(std::string(what));
    }
  }

  const std::string& text() const { return text_; }

 private:
  void separate();
  void quote(const std::string& text);

  std::string text_;
  bool comma_ = false;
};

}  // namespace muxserve::memory::json
