// Where page tables and counters lie: shared memory in the server, the heap in tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "counters.hpp"

namespace muxserve::memory {

class Segments {
 public:
  virtual ~Segments() = default;

  // The counters, zeroed. Valid as long as this object.
  virtual Counters& counters() = 0;

  // A zeroed page table of `entries` int32 for the model of that index, whose memory is there: writing to it cannot
  // fail later. Throws std::runtime_error with the reason or std::bad_alloc, and then nothing is left behind.
  virtual std::int32_t* create_table(std::uint32_t model, std::size_t entries) = 0;

  // Gives the table back.
  virtual void destroy_table(std::uint32_t model) noexcept = 0;

  // The name under which a client maps it; empty where it cannot be mapped.
  virtual std::string table_name(std::uint32_t model) const = 0;
};

// Keeps everything in this process.
class HeapSegments final : public Segments {
 public:
  Counters& counters() override { return *counters_; }
  std::int32_t* create_table(std::uint32_t model, std::size_t entries) override {
    auto& table = tables_[model];
    table.assign(entries, 0);
    return table.data();
  }
  void destroy_table(std::uint32_t model) noexcept override { tables_.erase(model); }
  std::string table_name(std::uint32_t) const override { return {}; }

 private:
  std::unique_ptr<Counters> counters_{new Counters{}};
  std::map<std::uint32_t, std::vector<std::int32_t>> tables_;
};

}  // namespace muxserve::memory
