#include "host/pieces.h"

#include "core/errors.h"

namespace gpudist {

Pieces::Pieces(HostCommunicator& communicator, const Signature& signature, Transfer::Kind kind,
               const std::vector<int>& peers, const std::vector<Piece>& pieces)
    : communicator_(communicator), transfers_(peers.size()) {
  packing_.receivers = static_cast<int>(peers.size());
  // A transfer stores offsets from one base address, and pieces may be anywhere: use the first.
  const uintptr_t base = pieces.empty() ? 0 : pieces.front().first;
  int64_t total = 0;
  boxes_.reserve(pieces.size());
  for (const auto& [address, bytes] : pieces) {
    if (bytes < 0) throw TransportError("a piece has a negative number of bytes");
    if (bytes == 0) continue;
    BoxView& box = boxes_.emplace_back();
    box.offset = static_cast<int64_t>(address - base);
    box.row_bytes = bytes;
    box.rows = 1;
    total += bytes;
  }
  const auto locked = communicator.enter();
  try {
    for (size_t i = 0; i < peers.size(); ++i) {
      Transfer& transfer = transfers_[i];
      transfer.kind = kind;
      transfer.peer = peers[i];
      transfer.bytes = total;
      transfer.tensor = reinterpret_cast<char*>(base);
      transfer.boxes = &boxes_;
      transfer.signature = &signature;
      if (kind == Transfer::Kind::kSend && peers.size() > 1) transfer.shared = &packing_;
      communicator.post(&transfer);
    }
    communicator.progress();
  } catch (...) {
    communicator.abandon();
    throw;
  }
}

void Pieces::end() {
  if (!complete_) communicator_.abandon();
  complete_ = true;
}

void Pieces::wait() {
  std::vector<Transfer*> waiting;
  waiting.reserve(transfers_.size());
  for (Transfer& transfer : transfers_) waiting.push_back(&transfer);
  complete_ = true;  // otherwise the communicator has dropped it
  communicator_.wait(waiting);
}

}  // namespace gpudist
