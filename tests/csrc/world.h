// A world of ranks that are threads of this process.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "host/host_communicator.h"

inline gpudist::Signature signature_of(const std::string& label) {
  std::string digest = label;
  digest.resize(16, ' ');
  return {label, digest};
}

// Lets one rank run at a time, each in turn.
class Turns {
 public:
  explicit Turns(int size) : ended_(size) {}

  void start() {
    std::fill(ended_.begin(), ended_.end(), false);
    rank_ = 0;
  }
  void await(int rank) {
    std::unique_lock<std::mutex> locked(mutex_);
    changed_.wait(locked, [&] { return rank_ == rank; });
  }
  void pass() {
    const std::lock_guard<std::mutex> locked(mutex_);
    const int size = static_cast<int>(ended_.size());
    for (int step = 0; step < size; ++step) {
      rank_ = (rank_ + 1) % size;
      if (!ended_[rank_]) break;
    }
    changed_.notify_all();
  }
  void end(int rank) {
    ended_[rank] = true;
    pass();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<char> ended_;
  int rank_ = 0;
};

class World {
 public:
  explicit World(int size, double timeout_s = 60, bool takes_turns = false)
      : turns_(takes_turns ? std::make_unique<Turns>(size) : nullptr) {
    std::vector<std::pair<pid_t, int64_t>> addresses;
    for (int rank = 0; rank < size; ++rank) {
      std::function<void()> rest;
      if (takes_turns) {
        rest = [this, rank] {
          turns_->pass();
          turns_->await(rank);
        };
      }
      ranks_.push_back(
          std::make_unique<gpudist::HostCommunicator>(rank, size, timeout_s, [] {}, rest));
      addresses.push_back(ranks_.back()->address());
    }
    for (auto& rank : ranks_) rank->connect(addresses);
  }

  gpudist::HostCommunicator& operator[](int rank) { return *ranks_[rank]; }
  int size() const { return static_cast<int>(ranks_.size()); }

  // Call body(communicator, rank) in one thread per rank and return the exception of each, if any.
  template <class Body>
  std::vector<std::exception_ptr> run(Body body) {
    std::vector<std::exception_ptr> errors(ranks_.size());
    std::vector<std::thread> threads;
    if (turns_) turns_->start();
    for (int rank = 0; rank < size(); ++rank) {
      threads.emplace_back([&, rank] {
        if (turns_) turns_->await(rank);
        try {
          body(*ranks_[rank], rank);
        } catch (...) {
          errors[rank] = std::current_exception();
        }
        if (turns_) turns_->end(rank);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return errors;
  }

 private:
  std::unique_ptr<Turns> turns_;
  std::vector<std::unique_ptr<gpudist::HostCommunicator>> ranks_;
};

// A message of raw bytes in flight.
struct Bytes {
  Bytes(gpudist::Transfer::Kind kind, int peer, std::vector<char>& data,
        const gpudist::Signature& signature) {
    const int64_t start = 0, stride = 1, stop = static_cast<int64_t>(data.size());
    boxes = {gpudist::make_box_view(1, &start, &stop, &stride, 1)};
    transfer.kind = kind;
    transfer.peer = peer;
    transfer.bytes = stop;
    transfer.tensor = data.data();
    transfer.boxes = &boxes;
    transfer.signature = &signature;
  }
  Bytes(const Bytes&) = delete;

  std::vector<gpudist::BoxView> boxes;
  gpudist::Transfer transfer;
};

inline bool all_fine(const std::vector<std::exception_ptr>& errors) {
  for (const auto& error : errors) {
    if (error) return false;
  }
  return true;
}

// Text of an error of this type; empty for any other error or none.
template <class Error>
std::string text_of(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const Error& e) {
    return e.what();
  } catch (...) {
  }
  return "";
}
