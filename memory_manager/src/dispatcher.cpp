#include "dispatcher.hpp"

#include <algorithm>
#include <exception>
#include <new>
#include <utility>

#include "text.hpp"

namespace muxserve::memory {
namespace {

// What every answer has room for beside its lists.
constexpr std::size_t kSmallReply = 64;

// Makes room for `bytes` more, so that writing them cannot fail.
void make_room(Bytes& out, std::size_t bytes) {
  if (out.capacity() - out.size() < bytes) out.reserve(std::max(2 * out.capacity(), out.size() + bytes));
}

}  // namespace

Header Dispatcher::reply_to(const Header& header, Code status) const {
  Header reply;
  reply.operation = static_cast<std::uint16_t>(header.operation | kReply);
  reply.generation = manager_.generation();
  reply.sequence = header.sequence;
  reply.status = static_cast<std::uint32_t>(status);
  reply.core = this_core();
  return reply;
}

void Dispatcher::refuse(const Header& header, Code code, const std::string& words, Bytes& out) const {
  FrameWriter(out, reply_to(header, code)).text(printable(words, kMaxRefusalBytes)).finish();
}

bool Dispatcher::check_header(const Session& session, const Header& header, Bytes& out) const {
  if (header.magic != kMagic) {
    refuse(header, Code::kBadMagic, "this is not the memory manager's protocol", out);
    return false;
  }
  if (header.version != kVersion) {
    refuse(header, Code::kBadVersion,
           "the client speaks version " + std::to_string(header.version) + " of the protocol, the manager version " +
               std::to_string(kVersion) + "; install the same muxserve on both sides",
           out);
    return false;
  }
  const std::uint32_t most = session.client < 0 ? kMaxHelloPayload : kMaxPayload;
  if (header.length > most || header.length % 4 != 0) {
    refuse(header, Code::kTooLarge,
           "a payload of " + std::to_string(header.length) + " bytes is over the bound of " + std::to_string(most) +
               (session.client < 0 ? " before HELLO" : "") + " or no multiple of 4",
           out);
    return false;
  }
  return true;
}

bool Dispatcher::handle(Session& session, const Header& header, Span<std::uint8_t> payload, std::int64_t now,
                        Bytes& out) {
  const std::size_t before = out.size();
  session.core = header.core;
  Code code = Code::kOk;
  std::string words;
  try {
    const bool hello = header.operation == static_cast<std::uint16_t>(Operation::kHello);
    if (!hello && session.client < 0) throw Refused(Code::kNotGreeted, "say HELLO first");
    if (!hello && header.generation != manager_.generation()) {
      throw Refused(Code::kWrongGeneration,
                    "the request is meant for an earlier memory manager; connect again, what was held is gone");
    }
    carry_out(session, header, Reader(payload.data(), payload.size()), now, out);
    return true;
  } catch (const Refused& refused) {
    code = refused.code();
    words = refused.what();
  } catch (const std::bad_alloc&) {
    code = Code::kNoMemory;
    words = "the memory manager's machine has no memory left for this request; nothing was done";
  }
  out.resize(before);
  refuse(header, code, words, out);
  return code != Code::kTooManyClients;
}

void Dispatcher::end(Session& session) {
  if (session.client >= 0) manager_.disconnect(session.client);
  session.client = -1;
}

void Dispatcher::greet(Session& session, Reader in, FrameWriter& reply, Bytes& out) {
  const std::string name = in.text();
  const std::uint32_t pid = in.u32();
  in.end();
  if (session.client >= 0) throw Refused(Code::kInvalid, "this connection has said HELLO already");
  const std::string description = manager_.describe(pool_handles_);
  make_room(out, kSmallReply + description.size());
  session.client = manager_.connect(name, static_cast<int>(pid));
  reply.u32(static_cast<std::uint32_t>(session.client)).text(description);
}

// Room for the answer is made before anything is done: a request that has been carried out is also answered.
void Dispatcher::carry_out(Session& session, const Header& header, Reader in, std::int64_t now, Bytes& out) {
  make_room(out, sizeof(Header) + kSmallReply);
  FrameWriter reply(out, reply_to(header, Code::kOk));
  switch (static_cast<Operation>(header.operation)) {
    case Operation::kHello:
      greet(session, in, reply, out);
      break;
    case Operation::kStep: {
      const StepRequest request = read_step(in);
      const auto blocks = static_cast<std::size_t>(manager_.model(request.model).config().num_blocks);
      const std::size_t most = std::min<std::size_t>(request.reserve, blocks) + request.lookup_hashes.size();
      make_room(out, kSmallReply + (request.lookup_lengths.size() + most) * sizeof(std::int32_t));
      manager_.step(session.client, request, step_reply_);
      reply.u32(static_cast<std::uint32_t>(step_reply_.hit_lengths.size()));
      reply.u32(static_cast<std::uint32_t>(step_reply_.reserved.size()));
      reply.array(Span<std::uint32_t>(step_reply_.hit_lengths)).array(Span<std::int32_t>(step_reply_.hits));
      reply.array(Span<std::int32_t>(step_reply_.reserved));
      break;
    }
    case Operation::kPost: {
      const StepRequest request = read_step(in);
      if (request.reserve != 0 || !request.lookup_lengths.empty())
        throw Refused(Code::kMalformed, "POST can only publish and release; nothing was done");
      manager_.step(session.client, request, step_reply_);
      out.resize(out.size() - sizeof(Header));  // no answer
      return;
    }
    case Operation::kHandOff: {
      const std::uint32_t model = in.u32();
      const std::int64_t ttl = in.i64();
      const std::uint32_t blocks = in.u32();
      const std::uint32_t releases = in.u32();
      const std::string key = in.text();
      const Span<std::int32_t> block_ids = in.array<std::int32_t>(blocks);
      const Span<std::int32_t> release = in.array<std::int32_t>(releases);
      in.end();
      manager_.hand_off(session.client, model, key, block_ids, release, ttl, now);
      break;
    }
    case Operation::kAdopt: {
      const std::uint32_t model = in.u32();
      const std::string key = in.text();
      in.end();
      make_room(out, kSmallReply + manager_.handed_blocks(model, key) * sizeof(std::int32_t));
      const std::vector<std::int32_t> blocks = manager_.adopt(session.client, model, key);
      reply.u32(static_cast<std::uint32_t>(blocks.size())).array(Span<std::int32_t>(blocks));
      break;
    }
    case Operation::kDrop: {
      const std::uint32_t model = in.u32();
      const std::string key = in.text();
      in.end();
      manager_.drop(model, key);
      break;
    }
    case Operation::kSetQuotas: {
      std::vector<std::pair<std::uint32_t, std::int64_t>> quotas;
      const std::uint32_t count = in.u32();
      if (count > kMaxModels)
        throw Refused(Code::kInvalid, "at most " + std::to_string(kMaxModels) + " quotas are set at once");
      for (std::uint32_t i = 0; i < count; ++i) {
        const std::uint32_t model = in.u32();
        quotas.emplace_back(model, in.i64());
      }
      in.end();
      manager_.set_quotas(quotas);
      break;
    }
    case Operation::kStatistics:
      in.end();
      reply.text(manager_.statistics());
      break;
    case Operation::kResetCache: {
      const std::uint32_t model = in.u32();
      in.end();
      manager_.reset_cache(model);
      break;
    }
    case Operation::kAddModel: {
      if (header.length > kMaxModelBytes)
        throw Refused(Code::kInvalid, "a model takes at most " + std::to_string(kMaxModelBytes) + " bytes");
      const ModelConfig model = read_model(in);
      in.end();
      reply.u32(manager_.add_model(model));
      break;
    }
    case Operation::kRemoveModel: {
      const std::uint32_t model = in.u32();
      in.end();
      manager_.remove_model(model);
      break;
    }
    case Operation::kDescribe:
      in.end();
      reply.text(manager_.describe(pool_handles_));
      break;
    case Operation::kLeaveWindow: {
      const std::uint32_t model = in.u32();
      const Span<std::int32_t> blocks = in.array<std::int32_t>(in.u32());
      in.end();
      manager_.leave_window(session.client, model, blocks);
      break;
    }
    case Operation::kSetRoom: {
      const std::uint32_t pool = in.u32();
      const std::int64_t pages = in.i64();
      in.end();
      manager_.set_room(pool, pages);
      break;
    }
    default:
      throw Refused(Code::kUnknownOperation, "there is no operation " + std::to_string(header.operation));
  }
  reply.finish();
}

}  // namespace muxserve::memory
