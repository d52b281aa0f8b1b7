#include "json.hpp"

#include <cstdio>

namespace muxserve::memory::json {

void Writer::separate() {
  if (comma_) text_ += ", ";
  comma_ = false;
}

Writer& Writer::open_object() {
  separate();
  text_ += '{';
  return *this;
}

Writer& Writer::close_object() {
  text_ += '}';
  comma_ = true;
  return *this;
}

Writer& Writer::open_array() {
  separate();
  text_ += '[';
  return *this;
}

Writer& Writer::close_array() {
  text_ += ']';
  comma_ = true;
  return *this;
}

Writer& Writer::key(const std::string& name) {
  separate();
  quote(name);
  text_ += ": ";
  return *this;
}

Writer& Writer::value(std::int64_t number) {
  separate();
  text_ += std::to_string(number);
  comma_ = true;
  return *this;
}

Writer& Writer::value(const std::string& text) {
  separate();
  quote(text);
  comma_ = true;
  return *this;
}

void Writer::quote(const std::string& text) {
  text_ += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      text_ += '\\';
      text_ += c;
    } else if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) == 0x7F) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", static_cast<unsigned>(static_cast<unsigned char>(c)));
      text_ += escaped;
    } else {
      text_ += c;
    }
  }
  text_ += '"';
}

}  // namespace muxserve::memory::json
