// Every bound of the memory manager, in one place. docs/memory-manager.md has the same table.
#pragma once

#include <cstddef>
#include <cstdint>

namespace muxserve::memory {

// Texts.
constexpr std::size_t kMaxNameBytes = 128;         // of clients, models and pools
constexpr std::size_t kMaxKeyBytes = 128;          // of hand-offs
constexpr std::size_t kMaxModelBytes = 8 << 10;    // a model in ADD_MODEL
constexpr std::size_t kMaxRefusalBytes = 1 << 10;  // what a client is told when it is refused

// Books.
constexpr std::size_t kMaxPools = 64;
constexpr std::int64_t kMaxRanks = 64;
constexpr std::size_t kMaxModels = 4096;             // over the life of one manager
constexpr std::int64_t kMaxBlocks = 1 << 20;         // of one model; keeps every reply under the message bound
constexpr std::int64_t kMaxPagesPerBlock = 1 << 20;  // layers * kv_heads
constexpr std::int64_t kMaxPoolBytes = 1LL << 47;    // the user address space of x86-64
constexpr std::int64_t kMaxPages = (1LL << 31) - 1;  // page ids are int32
// A block in use has pages of its own, so that a page table as large as the pool is never full. Some more leaves room
// for block ids that differ from one moment to the next.
constexpr std::int64_t kMaxTableEntriesPerPage = 4;
constexpr int kMaxClients = 64;  // one bit each in a block's holder mask
// Hand-offs of all models together; their keys are listed in one reply to STATISTICS.
constexpr std::int64_t kMaxHandOffs = 32 << 10;

// Messages.
constexpr std::uint32_t kMaxPayload = 8u << 20;
constexpr std::uint32_t kMaxReply = 4 * kMaxPayload;
constexpr std::uint32_t kMaxHelloPayload = 1u << 10;  // before HELLO has been accepted

// Connections.
constexpr std::ptrdiff_t kMaxStrangers = 128;           // that have not said HELLO
constexpr std::int64_t kGreetingTime = 10'000'000'000;  // ns that they have for it
constexpr int kMaxAcceptsPerTurn = 32;                  // new connections between two rounds of the others
constexpr std::int64_t kExitPoll = 10'000'000;          // ns between two looks at a client that is ending
constexpr std::int64_t kAcceptPause = 100'000'000;      // ns without new connections when descriptors have run out
constexpr int kMaxRequestsPerTurn = 32;                 // of one connection, then the others have theirs
constexpr std::int64_t kMaxTurnTime = 500'000;          // ns of requests of one connection after which its turn ends
constexpr std::size_t kFirstBuffer = 64 << 10;          // what is read from a connection at a time, at first
constexpr std::size_t kKeptBuffer = 256 << 10;          // larger buffers are given back when they are empty
constexpr std::size_t kMaxPendingReplies = 256 << 10;   // bytes not taken by a client: no request of it is read then

// What may be changed when the manager starts; options of muxserve-memory-manager where nothing else is said.
struct Limits {
  // Waiting hand-offs that one connection has made, and that one model has.
  std::int64_t hand_offs_per_client = 4096;
  std::int64_t hand_offs_per_model = 8192;
  // Block ids in the waiting hand-offs of all models together: several may name the same block (a shared prefix). 64
  // MiB; no option.
  std::int64_t handed_ids = 16 << 20;
  // Page tables and books of all models together, beyond which no model is added to a running manager. main() lowers
  // it to a quarter of the machine's memory.
  std::int64_t table_bytes = 4LL << 30;
  // Buffers of all connections together; the connection that has the largest ones is closed when they grow beyond it.
  std::size_t buffer_bytes = std::size_t{256} << 20;
  // ns after which a client that takes nothing of its replies is disconnected.
  std::int64_t stall_time = 30'000'000'000;
  // ns for which a dead client's blocks are kept for what it had launched on a GPU. 0: none of that can be.
  std::int64_t linger_time = 0;
};

}  // namespace muxserve::memory
