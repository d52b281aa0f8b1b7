#include "json.hpp"

#include <cerrno>
#include <cstdio>
#include <cstdlib>

#include "text.hpp"

namespace muxserve::memory::json {
namespace {

constexpr int kMaxDepth = 32;

class Parser {
 public:
  explicit Parser(const std::string& text) : text_(text) {}

  Value whole() {
    Value value = any(0);
    skip_space();
    if (at_ != text_.size()) fail("unexpected text after the end");
    return value;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    int line = 1, column = 1;
    for (std::size_t i = 0; i < at_ && i < text_.size(); ++i) {
      if (text_[i] == '\n') {
        ++line;
        column = 1;
      } else {
        ++column;
      }
    }
    throw ParseError("line " + std::to_string(line) + ", column " + std::to_string(column) + ": " + what);
  }

  void skip_space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\t' || text_[at_] == '\n' || text_[at_] == '\r'))
      ++at_;
  }

  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  void expect(char wanted) {
    if (peek() != wanted || at_ >= text_.size()) fail(std::string("expected '") + wanted + "'");
    ++at_;
  }

  bool word(const char* wanted) {
    const std::string w(wanted);
    if (text_.compare(at_, w.size(), w) != 0) return false;
    at_ += w.size();
    return true;
  }

  Value any(int depth) {
    if (depth > kMaxDepth) fail("nested too deeply");
    skip_space();
    switch (peek()) {
      case '{':
        return object(depth);
      case '[':
        return array(depth);
      case '"':
        return Value(Value::Variant(string()));
      default:
        if (word("true")) return Value(Value::Variant(true));
        if (word("false")) return Value(Value::Variant(false));
        if (word("null")) return Value();
        return number();
    }
  }

  Value object(int depth) {
    Object members;
    expect('{');
    skip_space();
    if (peek() == '}') {
      ++at_;
      return Value(Value::Variant(std::move(members)));
    }
    while (true) {
      skip_space();
      std::string name = string();
      for (const auto& member : members)
        if (member.first == name) fail("key \"" + name + "\" appears twice");
      skip_space();
      expect(':');
      members.emplace_back(std::move(name), any(depth + 1));
      skip_space();
      if (peek() == ',') {
        ++at_;
        continue;
      }
      expect('}');
      return Value(Value::Variant(std::move(members)));
    }
  }

  Value array(int depth) {
    Array items;
    expect('[');
    skip_space();
    if (peek() == ']') {
      ++at_;
      return Value(Value::Variant(std::move(items)));
    }
    while (true) {
      items.push_back(any(depth + 1));
      skip_space();
      if (peek() == ',') {
        ++at_;
        continue;
      }
      expect(']');
      return Value(Value::Variant(std::move(items)));
    }
  }

  unsigned hex4() {
    unsigned code = 0;
    for (int i = 0; i < 4; ++i) {
      const char c = peek();
      code <<= 4;
      if (c >= '0' && c <= '9')
        code |= static_cast<unsigned>(c - '0');
      else if (c >= 'a' && c <= 'f')
        code |= static_cast<unsigned>(c - 'a' + 10);
      else if (c >= 'A' && c <= 'F')
        code |= static_cast<unsigned>(c - 'A' + 10);
      else
        fail("expected four hexadecimal digits");
      ++at_;
    }
    return code;
  }

  void append_utf8(std::string& out, unsigned code) {
    const auto put = [&out](unsigned byte) { out.push_back(static_cast<char>(byte)); };
    if (code < 0x80) {
      put(code);
    } else if (code < 0x800) {
      put(0xC0 | (code >> 6));
      put(0x80 | (code & 0x3F));
    } else if (code < 0x10000) {
      put(0xE0 | (code >> 12));
      put(0x80 | ((code >> 6) & 0x3F));
      put(0x80 | (code & 0x3F));
    } else {
      put(0xF0 | (code >> 18));
      put(0x80 | ((code >> 12) & 0x3F));
      put(0x80 | ((code >> 6) & 0x3F));
      put(0x80 | (code & 0x3F));
    }
  }

  void escape(std::string& out) {
    const char c = peek();
    ++at_;
    switch (c) {
      case '"':
      case '\\':
      case '/':
        out.push_back(c);
        return;
      case 'b':
        out.push_back('\b');
        return;
      case 'f':
        out.push_back('\f');
        return;
      case 'n':
        out.push_back('\n');
        return;
      case 'r':
        out.push_back('\r');
        return;
      case 't':
        out.push_back('\t');
        return;
      case 'u': {
        unsigned code = hex4();
        if (code >= 0xD800 && code < 0xDC00) {
          if (!word("\\u")) fail("half of a surrogate pair");
          const unsigned low = hex4();
          if (low < 0xDC00 || low > 0xDFFF) fail("half of a surrogate pair");
          code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
        } else if (code >= 0xDC00 && code <= 0xDFFF) {
          fail("half of a surrogate pair");
        }
        append_utf8(out, code);
        return;
      }
      default:
        fail("unknown escape");
    }
  }

  std::string string() {
    expect('"');
    std::string out;
    while (true) {
      if (at_ >= text_.size()) fail("string without an end");
      const char c = text_[at_++];
      if (c == '"') return out;
      if (static_cast<unsigned char>(c) < 0x20) fail("control character in a string");
      if (c == '\\')
        escape(out);
      else
        out.push_back(c);
    }
  }

  Value number() {
    const std::size_t begin = at_;
    bool whole = true;
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == '.' || c == 'e' || c == 'E')
        whole = false;
      else if (!(c >= '0' && c <= '9') && c != '-' && c != '+')
        break;
      ++at_;
    }
    const std::string digits = text_.substr(begin, at_ - begin);
    if (digits.empty()) {
      at_ = begin;
      fail("expected a value");
    }
    char* end = nullptr;
    errno = 0;
    Value::Variant value;
    if (whole)
      value = static_cast<std::int64_t>(std::strtoll(digits.c_str(), &end, 10));
    else
      value = std::strtod(digits.c_str(), &end);
    if (errno != 0 || end != digits.c_str() + digits.size()) {
      at_ = begin;
      fail("\"" + digits + "\" is not a number that fits");
    }
    return Value(std::move(value));
  }

  const std::string& text_;
  std::size_t at_ = 0;
};

}  // namespace

Value parse(const std::string& text) {
  if (!is_utf8(text)) throw ParseError("the text is not UTF-8");
  return Parser(text).whole();
}

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
