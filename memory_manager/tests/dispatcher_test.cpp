// The protocol without sockets, including payloads that make no sense.
#include "dispatcher.hpp"

#include <gtest/gtest.h>

#include <random>

#include "support.hpp"

namespace muxserve::memory::testing {
namespace {

struct Reply {
  Header header;
  Bytes payload;
  bool goes_on = true;
  Code code() const { return static_cast<Code>(header.status); }
};

struct Wire : Fixture {
  Dispatcher dispatcher{manager, {{"posix:x"}}};
  Session session;
  std::uint32_t sequence = 100;

  // Payloads are copied to the heap at their exact size, so that AddressSanitizer sees every read beyond the end.
  Reply send(Operation operation, const Bytes& payload, std::uint64_t generation = 7) {
    Header header;
    header.operation = static_cast<std::uint16_t>(operation);
    header.generation = generation;
    header.sequence = ++sequence;
    header.length = static_cast<std::uint32_t>(payload.size());
    const Bytes copy(payload.begin(), payload.end());
    Bytes out;
    Reply reply;
    reply.goes_on = dispatcher.handle(session, header, copy, 0, out);
    if (out.empty()) return reply;
    std::memcpy(&reply.header, out.data(), sizeof reply.header);
    EXPECT_EQ(out.size(), sizeof(Header) + reply.header.length);
    EXPECT_EQ(out.size() % 4, 0u);
    EXPECT_EQ(reply.header.sequence, sequence);
    EXPECT_EQ(reply.header.operation, header.operation | kReply);
    EXPECT_EQ(reply.header.generation, 7u);
    reply.payload.assign(out.begin() + sizeof(Header), out.end());
    return reply;
  }

  static Bytes payload(const std::function<void(FrameWriter&)>& write) {
    Bytes out;
    FrameWriter frame(out, Header{});
    write(frame);
    return Bytes(out.begin() + sizeof(Header), out.end());
  }

  Reply hello() {
    return send(Operation::kHello, payload([](FrameWriter& f) { f.text("test").u32(1); }), 0);
  }

  static Bytes step_payload(std::uint32_t reserve, const std::vector<std::int32_t>& release) {
    return payload([&](FrameWriter& f) {
      f.u32(kA).u32(0).u32(reserve).u32(static_cast<std::uint32_t>(release.size())).u32(0).u32(0);
      f.array(Span<std::int32_t>(release));
    });
  }
};

TEST(Dispatcher, WantsHelloFirst) {
  Wire wire;
  EXPECT_EQ(wire.send(Operation::kStatistics, {}).code(), Code::kNotGreeted);
  const Reply reply = wire.hello();
  ASSERT_EQ(reply.code(), Code::kOk);
  Reader reader(reply.payload.data(), reply.payload.size());
  EXPECT_EQ(reader.u32(), 0u);
  EXPECT_NE(reader.text().find("posix:x"), std::string::npos);
  EXPECT_EQ(wire.hello().code(), Code::kInvalid);
}

TEST(Dispatcher, RefusesAnotherGeneration) {
  Wire wire;
  wire.hello();
  const Reply reply = wire.send(Operation::kStep, Wire::step_payload(1, {}), 8);
  EXPECT_EQ(reply.code(), Code::kWrongGeneration);
  EXPECT_TRUE(reply.goes_on);
  EXPECT_EQ(wire.used(kA), 0);
}

TEST(Dispatcher, StepsAndPosts) {
  Wire wire;
  wire.hello();
  Reply reply = wire.send(Operation::kStep, Wire::step_payload(2, {}));
  ASSERT_EQ(reply.code(), Code::kOk);
  Reader reader(reply.payload.data(), reply.payload.size());
  EXPECT_EQ(reader.u32(), 0u);
  ASSERT_EQ(reader.u32(), 2u);
  const auto view = reader.array<std::int32_t>(2);
  const std::vector<std::int32_t> ids(view.begin(), view.end());
  reader.end();
  reply = wire.send(Operation::kPost, Wire::step_payload(0, {ids[0], ids[1]}));
  EXPECT_EQ(reply.header.sequence, 0u);  // no answer
  EXPECT_EQ(wire.used(kA), 0);
  EXPECT_EQ(wire.send(Operation::kPost, Wire::step_payload(0, {ids[0]})).code(), Code::kNotOwner);
  EXPECT_EQ(wire.send(Operation::kPost, Wire::step_payload(1, {})).code(), Code::kMalformed);
}

TEST(Dispatcher, RefusesTheSixtyFifthClientAndClosesItsConnection) {
  Wire wire;
  for (int i = 0; i < kMaxClients; ++i) wire.manager.connect("c", i);
  const Reply reply = wire.hello();
  EXPECT_EQ(reply.code(), Code::kTooManyClients);
  EXPECT_FALSE(reply.goes_on);
}

TEST(Dispatcher, EndsSessions) {
  Wire wire;
  wire.hello();
  wire.send(Operation::kStep, Wire::step_payload(2, {}));
  wire.dispatcher.end(wire.session);
  EXPECT_EQ(wire.used(kA), 0);
  wire.dispatcher.end(wire.session);
  EXPECT_EQ(wire.send(Operation::kStep, Wire::step_payload(2, {})).code(), Code::kNotGreeted);
}

TEST(Dispatcher, ChecksHeaders) {
  Wire wire;
  const auto code = [&](const std::function<void(Header&)>& change) {
    Header header;
    change(header);
    Bytes out;
    if (wire.dispatcher.check_header(wire.session, header, out)) return Code::kOk;
    Header reply;
    std::memcpy(&reply, out.data(), sizeof reply);
    return static_cast<Code>(reply.status);
  };
  EXPECT_EQ(code([](Header& h) { h.length = kMaxHelloPayload; }), Code::kOk);
  EXPECT_EQ(code([](Header& h) { h.length = kMaxHelloPayload + 4; }), Code::kTooLarge);  // before HELLO
  wire.hello();
  EXPECT_EQ(code([](Header& h) { h.length = kMaxPayload; }), Code::kOk);
  EXPECT_EQ(code([](Header& h) { h.magic = 0x20544547; }), Code::kBadMagic);
  EXPECT_EQ(code([](Header& h) { h.version = kVersion + 1; }), Code::kBadVersion);
  EXPECT_EQ(code([](Header& h) { h.length = kMaxPayload + 4; }), Code::kTooLarge);
  EXPECT_EQ(code([](Header& h) { h.length = 0xFFFFFFFF; }), Code::kTooLarge);
  EXPECT_EQ(code([](Header& h) { h.length = 3; }), Code::kTooLarge);
}

TEST(Dispatcher, RefusesPayloadsCutShortOrTooLong) {
  const std::vector<std::pair<Operation, Bytes>> requests = {
      {Operation::kStep, Wire::step_payload(1, {1, 2, 3})},
      {Operation::kPost, Wire::step_payload(0, {1, 2, 3})},
      {Operation::kHandOff,
       Wire::payload([](FrameWriter& f) { f.u32(kA).i64(1000).u32(1).u32(1).text("key").u32(1).u32(1); })},
      {Operation::kAdopt, Wire::payload([](FrameWriter& f) { f.u32(kA).text("key"); })},
      {Operation::kDrop, Wire::payload([](FrameWriter& f) { f.u32(kA).text("key"); })},
      {Operation::kSetQuotas, Wire::payload([](FrameWriter& f) { f.u32(2).u32(kA).i64(1).u32(kB).i64(2); })},
      {Operation::kResetCache, Wire::payload([](FrameWriter& f) { f.u32(kA); })},
      {Operation::kAddModel, Wire::payload([](FrameWriter& f) { write_model(f, {"c", "p", 1, 1, 4, 0, {0}, 1}); })},
      {Operation::kRemoveModel, Wire::payload([](FrameWriter& f) { f.u32(kA); })},
      {Operation::kHello, Wire::payload([](FrameWriter& f) { f.text("x").u32(1); })},
  };
  for (const auto& [operation, payload] : requests) {
    Wire wire;
    if (operation != Operation::kHello) wire.hello();
    for (std::size_t size = 0; size < payload.size(); size += 4) {
      const Bytes cut(payload.begin(), payload.begin() + static_cast<std::ptrdiff_t>(size));
      EXPECT_EQ(wire.send(operation, cut).code(), Code::kMalformed) << static_cast<int>(operation) << " " << size;
    }
    Bytes longer = payload;
    longer.resize(longer.size() + 4);
    EXPECT_EQ(wire.send(operation, longer).code(), Code::kMalformed) << static_cast<int>(operation);
    EXPECT_EQ(wire.quota(kA), 60);
    wire.manager.check();
  }
}

TEST(Dispatcher, AddsModelsOfABoundedSize) {
  Wire wire;
  wire.hello();
  wire.manager.set_quotas(std::vector<std::pair<std::uint32_t, std::int64_t>>{{kA, 50}});
  const auto add = [&](const ModelConfig& model) {
    return wire.send(Operation::kAddModel, Wire::payload([&](FrameWriter& f) { write_model(f, model); }));
  };
  ModelConfig model{"c", "p", 2000, 1, 2, 10};
  model.window_blocks = 1;
  for (std::int64_t layer = 0; layer < 1100; ++layer) model.windowed_layers.push_back(layer);
  EXPECT_EQ(add(model).code(), Code::kInvalid);
  model = {"c", "p", 3, 1, 4, 10, {0, 2}, 5};
  const Reply reply = add(model);
  EXPECT_EQ(reply.code(), Code::kOk);
  const ModelConfig& added = wire.manager.model(Reader(reply.payload.data(), reply.payload.size()).u32()).config();
  EXPECT_EQ(added.name, "c");
  EXPECT_EQ(added.windowed_layers, model.windowed_layers);
  EXPECT_EQ(added.window_blocks, 5);
  wire.manager.check();
}

TEST(Dispatcher, RefusesCountsThatDoNotFit) {
  Wire wire;
  wire.hello();
  for (const std::uint32_t huge : {0xFFFFFFFFu, 0x80000000u, 0x40000000u, 0x08000000u}) {
    for (int field = 3; field < 6; ++field) {
      const Bytes payload = Wire::payload([&](FrameWriter& f) {
        for (int i = 0; i < 6; ++i) f.u32(i == field ? huge : 0);
      });
      EXPECT_EQ(wire.send(Operation::kStep, payload).code(), Code::kMalformed);
    }
    const Bytes lookups = Wire::payload(
        [&](FrameWriter& f) { f.u32(kA).u32(0).u32(0).u32(0).u32(0).u32(3).u32(huge).u32(huge).u32(huge); });
    EXPECT_EQ(wire.send(Operation::kStep, lookups).code(), Code::kMalformed);
  }
}

TEST(Dispatcher, ReservesNothingForAHugeReservation) {
  Wire wire;
  wire.hello();
  const Reply reply = wire.send(Operation::kStep, Wire::step_payload(0xFFFFFFFF, {}));
  EXPECT_EQ(reply.code(), Code::kOk);
  EXPECT_EQ(wire.used(kA), 0);
}

TEST(Dispatcher, SurvivesRandomPayloads) {
  Wire wire;
  std::mt19937 random(11);
  int malformed = 0;
  for (int i = 0; i < 20000; ++i) {
    Bytes payload(4 * (random() % 24));
    // Mostly small numbers, so that some of it gets past the first checks.
    for (std::size_t at = 0; at < payload.size(); at += 4) {
      const std::uint32_t value = random() % 8 == 0 ? static_cast<std::uint32_t>(random()) : random() % 4;
      std::memcpy(payload.data() + at, &value, 4);
    }
    const auto operation = static_cast<Operation>(random() % 14);
    if (wire.send(operation, payload).code() == Code::kMalformed) ++malformed;
    if (wire.session.client < 0) wire.hello();
    if (random() % 64 == 0) wire.dispatcher.end(wire.session);
    if (i % 64 == 0) wire.manager.check();
  }
  EXPECT_GT(malformed, 1000);
}

}  // namespace
}  // namespace muxserve::memory::testing
