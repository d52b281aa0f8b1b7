// A view of const elements that somebody else owns (std::span is C++20).
#pragma once

#include <cstddef>
#include <vector>

namespace muxserve::memory {

template <class T>
class Span {
 public:
  Span() = default;
  Span(const T* data, std::size_t size) : data_(data), size_(size) {}
  Span(const std::vector<T>& values) : data_(values.data()), size_(values.size()) {}  // NOLINT: meant to be implicit

  const T* data() const { return data_; }
  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }
  const T& operator[](std::size_t i) const { return data_[i]; }
  Span first(std::size_t n) const { return Span(data_, n); }

 private:
  const T* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace muxserve::memory
