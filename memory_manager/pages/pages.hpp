// Copying pages: from one pool to another, and between a pool and one contiguous piece of memory.
//
// Neighbouring pages are moved as one piece. Nothing here knows who holds a page: that is the caller's to make sure.
#pragma once

#include <cstddef>
#include <cstdint>

#include "span.hpp"

namespace muxserve::memory {

// uint8[num_pages, page_bytes], contiguous. Byte is std::uint8_t, const where the pool is only read.
template <class Byte>
struct PoolView {
  Byte* data;
  std::size_t num_pages;
  std::size_t page_bytes;
};

// Each throws std::out_of_range for a page that a pool does not have and std::invalid_argument for sizes that do not
// match, and then nothing has been written. Page 0, the null page, may be read and is never written.

// destination[to[i]] = source[from[i]]. No page of `to` may be in it twice, or be read as well.
void copy_pages(const PoolView<const std::uint8_t>& source, Span<std::int32_t> from,
                const PoolView<std::uint8_t>& destination, Span<std::int32_t> to);

// out[i] = source[from[i]]; `out` is uint8[from.size(), page_bytes] of `bytes` bytes.
void gather_pages(const PoolView<const std::uint8_t>& source, Span<std::int32_t> from, std::uint8_t* out,
                  std::size_t bytes);

// destination[to[i]] = in[i]; `in` is uint8[to.size(), page_bytes] of `bytes` bytes.
void scatter_pages(const std::uint8_t* in, std::size_t bytes, const PoolView<std::uint8_t>& destination,
                   Span<std::int32_t> to);

}  // namespace muxserve::memory
