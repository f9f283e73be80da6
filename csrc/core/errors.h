// Errors of the native core. The bindings turn each into the class of the same name in
// gpudist.errors.
#pragma once

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

namespace gpudist {

struct TransportError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Two threads of one rank use its world at the same time.
struct SimultaneousEntry : TransportError {
  explicit SimultaneousEntry(int rank)
      : TransportError(
            "two threads of rank " + std::to_string(rank) +
            " are inside operations of one world at once, so the order of their messages is "
            "undefined: call operators of a world from one thread at a time, in the same "
            "order on every rank") {}
};

// The operation cannot be captured in a graph. It posted nothing, and the world remains usable.
struct RefusedCapture : TransportError {
  using TransportError::TransportError;
};

struct PlanMismatch : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct CollectiveTimeout : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct NotBuiltError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct PeerFailure : std::runtime_error {
  PeerFailure(const std::string& message, int rank) : std::runtime_error(message), rank(rank) {}
  int rank;
};

// Another rank has failed. The caller reads the cause from the shared segment.
struct WorldFailed : std::runtime_error {
  WorldFailed() : std::runtime_error("another rank posted a failure") {}
};

inline void check_call(long result, const char* what) {
  if (result < 0)
    throw TransportError(std::string(what) + ": " + std::system_category().message(errno));
}

}  // namespace gpudist
