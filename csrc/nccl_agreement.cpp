// NCCL's messages have no headers. So headers are exchanged by themselves, before the first group
// of a kind or before every one, between the ranks that it joins.
#include <cstring>
#include <map>

#include "check.h"
#include "message.h"
#include "nccl_world.h"

namespace gpudist {

namespace {

// What goes to a peer, and what should come from it.
struct Traffic {
  int64_t sent_bytes = 0;
  int64_t received_bytes = 0;
};

// The calls on one communicator.
struct Shared {
  NcclCommunicator* communicator = nullptr;
  int64_t bytes = 0;
  uint64_t hash = 1469598103934665603u;  // FNV-1a
  Signature signature;

  void add(const WireCall& call, int64_t call_bytes) {
    communicator = call.communicator;
    bytes += call_bytes;
    for (uint64_t number : {static_cast<uint64_t>(call.kind), static_cast<uint64_t>(call.peer),
                            static_cast<uint64_t>(call.count), static_cast<uint64_t>(call.dtype),
                            static_cast<uint64_t>(call.op)}) {
      hash = (hash ^ number) * 1099511628211u;
    }
  }
  // The signature of the operation, with which the calls are mixed.
  void sign(const Signature& of) {
    signature = of;
    for (size_t i = 0; i < sizeof(hash); ++i) {
      signature.digest[i] = static_cast<char>(signature.digest[i] ^ (hash >> (8 * i)));
    }
  }
};

template <class... Numbers>
std::string key_of(const std::string& digest, Numbers... numbers) {
  std::string key = digest;
  ((key += ' ' + std::to_string(numbers)), ...);
  return key;
}

Transfer described(const Signature& signature, int peer, int64_t bytes) {
  Transfer transfer;
  transfer.peer = peer;
  transfer.bytes = bytes;
  transfer.signature = &signature;
  return transfer;
}

}  // namespace

void NcclWorld::refuse_capture(const Signature& signature, DeviceStream stream) const {
  uint64_t capture = 0;
  check_device(device_api_, device_api_.capture_id(stream, &capture), "asking for a capture");
  if (capture == 0) return;
  const std::string what = "'" + signature.label + "' is compared between ranks at ";
  if (checks_) {
    throw TransportError(what +
                         "every call, as GPUDIST_CHECK asks for, and so cannot be part of a "
                         "graph; turn that off to capture one");
  }
  throw TransportError(what +
                       "its first call, which cannot be part of a graph; call it once "
                       "before the capture");
}

void NcclWorld::agree(const Signature& signature, const std::vector<WireCall>& calls,
                      DeviceStream stream) {
  std::map<int, Traffic> peers;
  std::map<std::vector<int>, Shared> groups;
  for (const WireCall& call : calls) {
    const int64_t bytes = static_cast<int64_t>(call.count) * nccl_item_bytes(call.dtype);
    if (call.kind == WireKind::kSend) {
      peers[call.peer].sent_bytes += bytes;
    } else if (call.kind == WireKind::kReceive) {
      peers[call.peer].received_bytes += bytes;
    } else {
      groups[call.communicator->members()].add(call, bytes);
    }
  }
  // Two ranks have the same history of each other, and so agree on whether they have agreed.
  std::vector<std::string> keys;
  const auto is_known = [&](std::string key) {
    if (!checks_ && agreed_.count(key) != 0) return true;
    keys.push_back(std::move(key));
    return false;
  };
  for (auto it = peers.begin(); it != peers.end();) {
    const auto& [peer, traffic] = *it;
    const int64_t low = peer < rank_ ? traffic.received_bytes : traffic.sent_bytes;
    const int64_t high = peer < rank_ ? traffic.sent_bytes : traffic.received_bytes;
    it = is_known(key_of(signature.digest, peer, low, high)) ? peers.erase(it) : std::next(it);
  }
  for (auto it = groups.begin(); it != groups.end();) {
    it->second.sign(signature);
    const auto id = reinterpret_cast<uintptr_t>(it->second.communicator);
    it = is_known(key_of(it->second.signature.digest, id)) ? groups.erase(it) : std::next(it);
  }
  size_t expected = peers.size();
  for (const auto& [members, shared] : groups) expected += members.size();
  if (expected == 0) return;

  refuse_capture(signature, stream);
  const size_t sent = peers.size() + groups.size();
  const size_t bytes = (sent + expected) * kHeaderBytes;
  if (pinned_.size() < bytes) pinned_ = PinnedMemory(device_api_, bytes);
  char* header = pinned_.data();
  std::memset(header, 0, sent * kHeaderBytes);
  for (const auto& [peer, traffic] : peers) {
    write_header(described(signature, peer, traffic.sent_bytes), false, header);
    header += kHeaderBytes;
  }
  for (const auto& [members, shared] : groups) {
    write_header(described(shared.signature, -1, shared.bytes), false, header);
    header += kHeaderBytes;
  }
  char* const arrived = header;

  const std::string label = "comparing '" + signature.label + "'";
  const uint64_t operation = enqueue(label, stream, [&](uint64_t) {
    char* leaves = staging_.of(stream, 0, bytes);
    char* const begin = leaves + sent * kHeaderBytes;
    char* arrives = begin;
    check_device(device_api_, device_api_.copy(leaves, pinned_.data(), sent * kHeaderBytes, stream),
                 "copying to the device");
    std::vector<WireCall> headers;
    const size_t length = kHeaderBytes;
    for (const auto& [peer, traffic] : peers) {
      headers.push_back({WireKind::kSend, nullptr, peer, leaves, nullptr, length, kNcclUint8, 0});
      headers.push_back(
          {WireKind::kReceive, nullptr, peer, nullptr, arrives, length, kNcclUint8, 0});
      leaves += length;
      arrives += length;
    }
    for (const auto& [members, shared] : groups) {
      headers.push_back(
          {WireKind::kAllGather, shared.communicator, 0, leaves, arrives, length, kNcclUint8, 0});
      leaves += length;
      arrives += length * members.size();
    }
    group(headers, stream);
    check_device(device_api_, device_api_.copy(arrived, begin, expected * kHeaderBytes, stream),
                 "copying from the device");
  });
  watchdog_.wait(operation, check_signals_);

  const char* came = arrived;
  for (const auto& [peer, traffic] : peers) {
    verify_header(described(signature, peer, traffic.received_bytes), came, rank_);
    came += kHeaderBytes;
  }
  for (const auto& [members, shared] : groups) {
    for (int member : members) {
      verify_header(described(shared.signature, member, shared.bytes), came, rank_);
      came += kHeaderBytes;
    }
  }
  for (std::string& key : keys) agreed_.insert(std::move(key));
}

}  // namespace gpudist
