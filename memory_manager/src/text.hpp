// Texts: which of those that clients choose may become a name, what may be said back, and how sizes are written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace muxserve::memory {

// Whether the text is UTF-8: no byte out of place, nothing longer than it has to be, no surrogates.
bool is_utf8(const std::string& text);

// Why the text cannot be a name of at most `max_bytes` bytes ("is empty", "is not UTF-8", ...); empty if it can. A name
// is UTF-8 without control characters, so that every reader of a list of names can decode and print it.
std::string name_problem(const std::string& text, std::size_t max_bytes);

// The text as something that can be printed: at most `max_bytes` bytes of UTF-8, without control characters. What is
// neither becomes '?', and a text that is cut ends with "...".
std::string printable(const std::string& text, std::size_t max_bytes);

// "12 MiB": a part of one counts as one.
std::string mebibytes(std::uint64_t bytes);

}  // namespace muxserve::memory
