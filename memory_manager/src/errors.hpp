// Refusals: what a client is told when its request is not carried out. A refused request changes nothing.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace muxserve::memory {

// Values are part of the protocol: append only.
enum class Code : std::uint32_t {
  kOk = 0,
  kMalformed = 1,          // the payload does not parse
  kBadMagic = 2,           // not this protocol; the connection is closed
  kBadVersion = 3,         // another version of this protocol; the connection is closed
  kTooLarge = 4,           // over the message bound; the connection is closed
  kWrongGeneration = 5,    // meant for an earlier manager
  kNotGreeted = 6,         // HELLO must come first
  kTooManyClients = 7,     // every client slot is taken; the connection is closed
  kUnknownOperation = 8,   // no such operation
  kUnknownModel = 9,       // no such model
  kNotOwner = 10,          // double free, or a block of somebody else
  kKeyExists = 11,         // a hand-off of that key is waiting
  kUnknownKey = 12,        // no hand-off of that key
  kQuotaExceedsPool = 13,  // quotas of a pool would sum to more than its pages
  kModelInUse = 14,        // the model still has owned or handed-off blocks
  kInvalid = 15,           // a value out of its range
  kExhausted = 16,         // a bound of the manager is reached: models, hand-offs, tables
  kNoMemory = 17,          // the machine has not the memory for it
  kForbidden = 18,         // another user's process; the connection is closed
};

// Upper-case name of a code, for people and for the Python exception.
const char* code_name(Code code);

// Thrown by the core for a request that is refused.
class Refused : public std::runtime_error {
 public:
  Refused(Code code, const std::string& words) : std::runtime_error(words), code_(code) {}
  Code code() const { return code_; }

 private:
  Code code_;
};

}  // namespace muxserve::memory
