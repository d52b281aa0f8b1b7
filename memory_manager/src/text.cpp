#include "text.hpp"

#include <algorithm>
#include <cstdint>

namespace muxserve::memory {
namespace {

struct Character {
  std::size_t bytes = 0;  // 0: not UTF-8
  std::uint32_t code = 0;
};

// The character that begins at `at`, which is inside of the text.
Character character_at(const std::string& text, std::size_t at) {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint8_t>(text[i]); };
  const std::uint8_t first = byte(at);
  if (first < 0x80) return {1, first};
  std::size_t bytes = 0;
  std::uint32_t code = 0, smallest = 0;
  if ((first & 0xE0) == 0xC0) {
    bytes = 2, code = first & 0x1Fu, smallest = 0x80;
  } else if ((first & 0xF0) == 0xE0) {
    bytes = 3, code = first & 0x0Fu, smallest = 0x800;
  } else if ((first & 0xF8) == 0xF0) {
    bytes = 4, code = first & 0x07u, smallest = 0x10000;
  }
  if (bytes == 0 || text.size() - at < bytes) return {};
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((byte(at + i) & 0xC0) != 0x80) return {};
    code = code << 6 | (byte(at + i) & 0x3Fu);
  }
  if (code < smallest || code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF)) return {};
  return {bytes, code};
}

// C0, DEL and C1; U+2028 and U+2029 end a line for some readers.
bool is_control(std::uint32_t code) {
  return code < 0x20 || (code >= 0x7F && code < 0xA0) || code == 0x2028 || code == 0x2029;
}

}  // namespace

bool is_utf8(const std::string& text) {
  for (std::size_t at = 0; at < text.size();) {
    const Character character = character_at(text, at);
    if (character.bytes == 0) return false;
    at += character.bytes;
  }
  return true;
}

std::string name_problem(const std::string& text, std::size_t max_bytes) {
  if (text.empty()) return "is empty";
  if (text.size() > max_bytes)
    return "has " + std::to_string(text.size()) + " bytes, more than " + std::to_string(max_bytes);
  for (std::size_t at = 0; at < text.size();) {
    const Character character = character_at(text, at);
    if (character.bytes == 0) return "is not UTF-8";
    if (is_control(character.code)) return "has a control character";
    at += character.bytes;
  }
  return {};
}

std::string printable(const std::string& text, std::size_t max_bytes) {
  static const std::string kCut = "...";
  std::string out;
  std::size_t cut = 0;  // where it ends if it does not fit
  for (std::size_t at = 0; at < text.size();) {
    const Character character = character_at(text, at);
    const bool good = character.bytes != 0 && !is_control(character.code);
    good ? out.append(text, at, character.bytes) : out.append(1, '?');
    at += std::max<std::size_t>(1, character.bytes);
    if (out.size() > max_bytes) return out.substr(0, cut) + kCut;
    if (out.size() + kCut.size() <= max_bytes) cut = out.size();
  }
  return out;
}

std::string mebibytes(std::uint64_t bytes) { return std::to_string((bytes + (1u << 20) - 1) >> 20) + " MiB"; }

}  // namespace muxserve::memory
