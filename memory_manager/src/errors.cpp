#include "errors.hpp"

namespace muxserve::memory {

const char* code_name(Code code) {
  switch (code) {
    case Code::kOk:
      return "OK";
    case Code::kMalformed:
      return "MALFORMED";
    case Code::kBadMagic:
      return "BAD_MAGIC";
    case Code::kBadVersion:
      return "BAD_VERSION";
    case Code::kTooLarge:
      return "TOO_LARGE";
    case Code::kWrongGeneration:
      return "WRONG_GENERATION";
    case Code::kNotGreeted:
      return "NOT_GREETED";
    case Code::kTooManyClients:
      return "TOO_MANY_CLIENTS";
    case Code::kUnknownOperation:
      return "UNKNOWN_OPERATION";
    case Code::kUnknownModel:
      return "UNKNOWN_MODEL";
    case Code::kNotOwner:
      return "NOT_OWNER";
    case Code::kKeyExists:
      return "KEY_EXISTS";
    case Code::kUnknownKey:
      return "UNKNOWN_KEY";
    case Code::kQuotaExceedsPool:
      return "QUOTA_EXCEEDS_POOL";
    case Code::kModelInUse:
      return "MODEL_IN_USE";
    case Code::kInvalid:
      return "INVALID";
    case Code::kExhausted:
      return "EXHAUSTED";
    case Code::kNoMemory:
      return "NO_MEMORY";
    case Code::kForbidden:
      return "FORBIDDEN";
  }
  return "UNKNOWN";
}

}  // namespace muxserve::memory
