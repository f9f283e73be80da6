// NCCL's messages have no headers. So headers are exchanged by themselves, before the first group of
// a kind or before every one, between the ranks that it joins.
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

int64_t item_bytes_of(int dtype) {
  switch (dtype) {
    case kNcclInt8:
    case kNcclUint8:
      return 1;
    case kNcclFloat16:
    case kNcclBfloat16:
      return 2;
    case kNcclInt32:
    case kNcclFloat32:
      return 4;
    default:
      return 8;
  }
}

Transfer described(const Signature& signature, int peer, int64_t bytes) {
  Transfer transfer;
  transfer.peer = peer;
  transfer.bytes = bytes;
  transfer.signature = &signature;
  return transfer;
}

}  // namespace

void NcclWorld::agree(const Signature& signature, const std::vector<WireCall>& calls,
                      DeviceStream stream) {
  std::map<int, Traffic> peers;
  std::map<std::vector<int>, std::pair<NcclCommunicator*, int64_t>> groups;
  for (const WireCall& call : calls) {
    const int64_t bytes = static_cast<int64_t>(call.count) * item_bytes_of(call.dtype);
    if (call.kind == WireKind::kSend) {
      peers[call.peer].sent_bytes += bytes;
    } else if (call.kind == WireKind::kReceive) {
      peers[call.peer].received_bytes += bytes;
    } else {
      auto& [communicator, sum] = groups[call.communicator->members()];
      communicator = call.communicator;
      sum += bytes;
    }
  }
  size_t expected = peers.size();
  for (const auto& [members, group] : groups) expected += members.size();
  if (expected == 0) return;

  const size_t sent = peers.size() + groups.size();
  const size_t bytes = (sent + expected) * kHeaderBytes;
  if (pinned_.size() < bytes) pinned_ = PinnedMemory(device_api_, bytes);
  char* header = pinned_.data();
  std::memset(header, 0, sent * kHeaderBytes);
  for (const auto& [peer, traffic] : peers) {
    write_header(described(signature, peer, traffic.sent_bytes), false, header);
    header += kHeaderBytes;
  }
  for (const auto& [members, group] : groups) {
    write_header(described(signature, -1, group.second), false, header);
    header += kHeaderBytes;
  }
  char* const arrived = header;

  const std::string label = "comparing '" + signature.label + "'";
  const uint64_t operation = enqueue(label, stream, [&](uint64_t capture) {
    if (capture != 0) {
      throw TransportError("'" + signature.label + "' is compared between ranks at its first call, "
                           "which cannot be part of a graph; call it once before the capture");
    }
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
    for (const auto& [members, group] : groups) {
      headers.push_back(
          {WireKind::kAllGather, group.first, 0, leaves, arrives, length, kNcclUint8, 0});
      leaves += length;
      arrives += length * members.size();
    }
    this->group(headers, stream);
    check_device(device_api_,
                 device_api_.copy(arrived, begin, expected * kHeaderBytes, stream),
                 "copying from the device");
  });
  watchdog_.wait(operation, check_signals_);

  const char* came = arrived;
  for (const auto& [peer, traffic] : peers) {
    verify_header(described(signature, peer, traffic.received_bytes), came, rank_);
    came += kHeaderBytes;
  }
  for (const auto& [members, group] : groups) {
    for (int member : members) {
      verify_header(described(signature, member, group.second), came, rank_);
      came += kHeaderBytes;
    }
  }
  agreed_.insert(signature.digest);
}

}  // namespace gpudist
