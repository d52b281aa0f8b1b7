#include "pages.hpp"

#include <cstring>
#include <stdexcept>
#include <string>

namespace muxserve::memory {
namespace {

template <class Byte>
void check(const PoolView<Byte>& pool, Span<std::int32_t> pages, std::int32_t lowest) {
  for (const std::int32_t page : pages) {
    if (page < lowest || static_cast<std::size_t>(page) >= pool.num_pages) {
      throw std::out_of_range("page " + std::to_string(page) + " is not one of " + std::to_string(lowest) + " to " +
                              std::to_string(pool.num_pages) + " (exclusive)");
    }
  }
}

[[noreturn]] void no_match(const char* what, std::size_t one, std::size_t other) {
  throw std::invalid_argument(std::string(what) + ": " + std::to_string(one) + " and " + std::to_string(other));
}

template <class Byte>
Byte* at(const PoolView<Byte>& pool, std::int32_t page) {
  return pool.data + static_cast<std::size_t>(page) * pool.page_bytes;
}

// How many entries from `begin` on follow each other.
std::size_t run(Span<std::int32_t> pages, std::size_t begin) {
  std::size_t end = begin + 1;
  while (end < pages.size() && pages[end] == pages[end - 1] + 1) ++end;
  return end - begin;
}

}  // namespace

void copy_pages(const PoolView<const std::uint8_t>& source, Span<std::int32_t> from,
                const PoolView<std::uint8_t>& destination, Span<std::int32_t> to) {
  if (source.page_bytes != destination.page_bytes)
    no_match("pages of the two pools differ in size", source.page_bytes, destination.page_bytes);
  if (from.size() != to.size()) no_match("as many pages must be read as written", from.size(), to.size());
  check(source, from, 0);
  check(destination, to, 1);
  for (std::size_t i = 0; i < from.size();) {
    std::size_t pages = 1;
    while (i + pages < from.size() && from[i + pages] == from[i + pages - 1] + 1 &&
           to[i + pages] == to[i + pages - 1] + 1)
      ++pages;
    std::memcpy(at(destination, to[i]), at(source, from[i]), pages * source.page_bytes);
    i += pages;
  }
}

void gather_pages(const PoolView<const std::uint8_t>& source, Span<std::int32_t> from, std::uint8_t* out,
                  std::size_t bytes) {
  if (bytes != from.size() * source.page_bytes)
    no_match("the pages do not fill the buffer", from.size() * source.page_bytes, bytes);
  check(source, from, 0);
  for (std::size_t i = 0; i < from.size();) {
    const std::size_t pages = run(from, i);
    std::memcpy(out + i * source.page_bytes, at(source, from[i]), pages * source.page_bytes);
    i += pages;
  }
}

void scatter_pages(const std::uint8_t* in, std::size_t bytes, const PoolView<std::uint8_t>& destination,
                   Span<std::int32_t> to) {
  if (bytes != to.size() * destination.page_bytes)
    no_match("the buffer does not fill the pages", bytes, to.size() * destination.page_bytes);
  check(destination, to, 1);
  for (std::size_t i = 0; i < to.size();) {
    const std::size_t pages = run(to, i);
    std::memcpy(at(destination, to[i]), in + i * destination.page_bytes, pages * destination.page_bytes);
    i += pages;
  }
}

}  // namespace muxserve::memory
