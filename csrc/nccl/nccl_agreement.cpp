// NCCL's messages have no headers. Ranks therefore exchange headers separately with the ranks they
// communicate with: before the first group of a kind, or before every group.
#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "core/errors.h"
#include "core/message.h"
#include "nccl/nccl_world.h"

namespace gpudist {

namespace {

// This rank's operations with one partner: messages, and collectives in which the two are
// neighbours.
struct Partner {
  int64_t sent_bytes = 0;
  int64_t received_bytes = 0;
  uint64_t hash = 0;  // of the collectives

  // Key of the comparison, which is the same on both ranks: it is written from the lower rank's
  // side.
  std::string key(const std::string& digest, int peer, int rank) const {
    const int64_t low = peer < rank ? received_bytes : sent_bytes;
    const int64_t high = peer < rank ? sent_bytes : received_bytes;
    return digest + ' ' + std::to_string(peer) + ' ' + std::to_string(low) + ' ' +
           std::to_string(high) + ' ' + std::to_string(hash);
  }
};

constexpr uint64_t kHashStart = 1469598103934665603u, kHashFactor = 1099511628211u;  // FNV-1a

void add_to(uint64_t& hash, uint64_t number) {
  hash = (hash ^ number) * kHashFactor;
}

// Identify a run of stages. Runs of one digest can differ in sizes and partners if the shapes
// belong to only one call.
std::string run_key(const Signature& signature, const std::vector<DeviceCall>& calls) {
  uint64_t hash = kHashStart;
  for (const DeviceCall& call : calls) {
    for (const WireStep& step : call.stage->steps) {
      add_to(hash, static_cast<uint64_t>(step.kind));
      add_to(hash, static_cast<uint64_t>(step.peer));
      add_to(hash, step.count);
    }
  }
  std::string key(signature.digest.begin(), signature.digest.end());
  return key.append(reinterpret_cast<const char*>(&hash), sizeof(hash));
}

// Every member of a communicator compares with its neighbours: if all pairs agree, all members do.
std::map<int, Partner> partners_of(const std::vector<WireCall>& calls, int rank) {
  std::map<int, Partner> partners;
  // Operations on one communicator, in the order of the calls.
  struct GroupTraffic {
    int64_t bytes = 0;
    uint64_t hash = kHashStart;
  };
  std::map<std::vector<int>, GroupTraffic> groups;
  for (const WireCall& call : calls) {
    const int64_t bytes = static_cast<int64_t>(call.count) * nccl_item_bytes(call.dtype);
    if (call.kind == WireKind::kSend) {
      partners[call.peer].sent_bytes += bytes;
    } else if (call.kind == WireKind::kReceive) {
      partners[call.peer].received_bytes += bytes;
    } else {
      GroupTraffic& shared = groups[call.communicator->members()];
      shared.bytes += bytes;
      for (int number : {static_cast<int>(call.kind), call.peer, call.dtype, call.op}) {
        add_to(shared.hash, static_cast<uint64_t>(number));
      }
      add_to(shared.hash, call.count);
    }
  }
  for (auto& [members, shared] : groups) {
    for (int member : members) add_to(shared.hash, static_cast<uint64_t>(member));
    const size_t size = members.size();
    const size_t mine = std::find(members.begin(), members.end(), rank) - members.begin();
    for (int neighbour :
         std::set<int>{members[(mine + 1) % size], members[(mine + size - 1) % size]}) {
      Partner& partner = partners[neighbour];
      partner.sent_bytes += shared.bytes;
      partner.received_bytes += shared.bytes;
      partner.hash += shared.hash;  // a sum, so that the order of communicators does not matter
    }
  }
  return partners;
}

Signature mixed(const Signature& signature, uint64_t hash) {
  Signature mixture = signature;
  for (size_t i = 0; i < sizeof(hash); ++i) {
    mixture.digest[i] = static_cast<char>(mixture.digest[i] ^ (hash >> (8 * i)));
  }
  return mixture;
}

Transfer described(const Signature& signature, int peer, int64_t bytes, const Given& given) {
  Transfer transfer;
  transfer.given = given.with(peer);
  transfer.peer = peer;
  transfer.bytes = bytes;
  transfer.signature = &signature;
  return transfer;
}

}  // namespace

bool Compared::add(std::string key, size_t most) {
  if (!known_.insert(key).second) return false;
  order_.push_back(std::move(key));
  if (order_.size() <= most) return false;
  while (order_.size() > most) {
    known_.erase(order_.front());
    order_.pop_front();
  }
  return true;
}

void NcclWorld::agree(const Signature& signature, const std::vector<DeviceCall>& calls,
                      DeviceStream stream) {
  std::string key = run_key(signature, calls);
  if (!checks_ && runs_.count(key) != 0) return;
  std::vector<WireCall> planned;
  for (const DeviceCall& call : calls) {
    for (const WireStep& step : call.stage->steps) planned.push_back(step.at({}));
  }
  agree(signature, planned, stream);
  if (runs_.size() >= remembered_) runs_.clear();
  runs_.insert(std::move(key));
}

void NcclWorld::refuse_capture(const Signature& signature, DeviceStream stream) const {
  uint64_t capture = 0;
  check_device(device_api_, device_api_.capture_id(stream, &capture), "asking for a capture");
  if (capture == 0) return;
  const std::string what = "'" + signature.label + "' is compared between ranks at ";
  if (checks_) {
    throw RefusedCapture(what +
                         "every call, as GPUDIST_CHECK asks for, and so cannot be part of a "
                         "graph; turn that off to capture one");
  }
  throw RefusedCapture(what +
                       "its first call, which cannot be part of a graph; call it once "
                       "before the capture");
}

void NcclWorld::agree(const Signature& signature, const std::vector<WireCall>& calls,
                      DeviceStream stream) {
  std::map<int, Partner> partners = partners_of(calls, rank_);
  // The two ranks of a pair have the same history, and so agree on whether to compare.
  std::vector<std::pair<int, std::string>> keys;
  for (auto it = partners.begin(); it != partners.end();) {
    std::string key = it->second.key(signature.digest, it->first, rank_);
    const bool is_known = !checks_ && compared_[it->first].has(key);
    if (!is_known) keys.emplace_back(it->first, std::move(key));
    it = is_known ? partners.erase(it) : std::next(it);
  }
  if (partners.empty()) return;

  const size_t bytes = partners.size() * kHeaderBytes;
  {
    const DeviceGuard guard(device_api_, device_);
    refuse_capture(signature, stream);
    if (pinned_.size() < 2 * bytes) pinned_ = PinnedMemory(device_api_, 2 * bytes);
  }
  char* header = pinned_.data();
  std::memset(header, 0, bytes);
  for (const auto& [peer, partner] : partners) {
    const Signature own = mixed(signature, partner.hash);
    write_header(described(own, peer, partner.sent_bytes, given_), false, header);
    header += kHeaderBytes;
  }
  char* const arrived = header;

  const std::string label = "comparing '" + signature.label + "'";
  const uint64_t operation = enqueue(label, stream, [&](uint64_t) {
    char* leaves = staging_.of(false, 2 * bytes);
    char* arrives = leaves + bytes;
    const char* const begin = arrives;
    check_device(device_api_, device_api_.copy(leaves, pinned_.data(), bytes, stream),
                 "copying to the device");
    std::vector<WireCall> headers;
    const size_t length = kHeaderBytes;
    for (const auto& [peer, partner] : partners) {
      headers.push_back({WireKind::kSend, nullptr, peer, leaves, nullptr, length, kNcclUint8, 0});
      headers.push_back(
          {WireKind::kReceive, nullptr, peer, nullptr, arrives, length, kNcclUint8, 0});
      leaves += length;
      arrives += length;
    }
    group(headers, stream);
    check_device(device_api_, device_api_.copy(arrived, begin, bytes, stream),
                 "copying from the device");
  });
  operations_->wait(operation, [this] { watchdog_.check(); }, check_signals_);

  const char* came = arrived;
  for (const auto& [peer, partner] : partners) {
    const Signature expected = mixed(signature, partner.hash);
    verify_header(described(expected, peer, partner.received_bytes, given_), came, rank_,
                  given_.last());
    came += kHeaderBytes;
  }
  bool has_forgotten = false;
  for (auto& [peer, key] : keys) has_forgotten |= compared_[peer].add(std::move(key), remembered_);
  if (has_forgotten) runs_.clear();
}

}  // namespace gpudist
