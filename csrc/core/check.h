// Errors of the native core. Bindings turn each into its namesake in gpudist.errors.
#pragma once

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

namespace gpudist {

struct TransportError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Two threads of a rank are inside its world at once.
struct SimultaneousEntry : TransportError {
  explicit SimultaneousEntry(int rank)
      : TransportError("two threads of rank " + std::to_string(rank) +
                       " are inside operations of one world at once, and no other rank can know "
                       "whose messages come first: call operators of a world from one thread at a "
                       "time, in the same order on every rank") {}
};

// An operation that cannot be part of a graph. Nothing of it was posted, and the world goes on.
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

// Another rank has posted the cause of a failure: the caller reads it from the shared segment.
struct WorldFailed : std::runtime_error {
  WorldFailed() : std::runtime_error("another rank posted a failure") {}
};

inline void check_call(long result, const char* what) {
  if (result < 0)
    throw TransportError(std::string(what) + ": " + std::system_category().message(errno));
}

}  // namespace gpudist
