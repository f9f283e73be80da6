// Translation of NCCL's errors.
#include <string>

#include "core/errors.h"
#include "nccl/nccl_api.h"
#include "test.h"

namespace {

const char* error_string(int result) {
  return result == 5 ? "invalid usage" : "other";
}
const char* last_error(void* comm) {
  return comm != nullptr ? "peer out of range" : "";
}

std::string message_of(int result, gpudist::NcclComm comm) {
  gpudist::NcclApi api{};
  api.get_error_string = error_string;
  api.get_last_error = last_error;
  try {
    gpudist::check_nccl(api, result, comm, "sending");
  } catch (const gpudist::TransportError& error) {
    return error.what();
  }
  return "";
}

}  // namespace

void test_nccl() {
  int comm = 0;
  CHECK(message_of(gpudist::kNcclSuccess, nullptr).empty());
  CHECK(message_of(gpudist::kNcclInvalidUsage, nullptr) == "sending: invalid usage");
  CHECK(message_of(gpudist::kNcclInvalidUsage, &comm) ==
        "sending: invalid usage (peer out of range)");
}
