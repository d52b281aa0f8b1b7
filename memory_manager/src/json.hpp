// The little JSON that the manager needs: it reads its configuration and writes descriptions and statistics.
// Own code so that building the wheel needs nothing but a C++ compiler.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace muxserve::memory::json {

// The text is not JSON; what() says where.
class ParseError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Value;
using Array = std::vector<Value>;
using Object = std::vector<std::pair<std::string, Value>>;  // in the order of the text

class Value {
 public:
  using Variant = std::variant<std::nullptr_t, bool, std::int64_t, double, std::string, Array, Object>;
  Value() : value_(nullptr) {}
  explicit Value(Variant value) : value_(std::move(value)) {}

  // The value if it is of that kind, else null.
  const std::int64_t* integer() const { return std::get_if<std::int64_t>(&value_); }
  const std::string* string() const { return std::get_if<std::string>(&value_); }
  const Array* array() const { return std::get_if<Array>(&value_); }
  const Object* object() const { return std::get_if<Object>(&value_); }

 private:
  Variant value_;
};

// Reads one JSON text. Throws ParseError.
Value parse(const std::string& text);

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
