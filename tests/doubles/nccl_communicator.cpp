#include "nccl_communicator.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <set>
#include <vector>

#include "hooks.h"

namespace gpudist::doubles {

namespace {

struct Registry {
  std::mutex mutex;
  std::set<Communicator*> all;
  std::set<std::pair<int, uint64_t>> closed;  // files of addresses created here, and their nonces
};

Registry& registry() {
  static Registry& registry = *new Registry;
  return registry;
}

std::string name_of(const Address& address) {
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(address.nonce));
  return text;
}

// Called once nobody will open the address any more.
void forget_address(const Address& address) {
  if (address.pid != getpid()) return;
  const std::lock_guard<std::mutex> locked(registry().mutex);
  if (registry().closed.insert({address.file, address.nonce}).second) Wire::forget(address);
}

// Members of the color of `rank`, in the order of their new ranks.
std::vector<int> members_of(Wire& wire, uint64_t split, int rank) {
  const auto offer = [&](int r) -> const SplitOffer& { return wire.line(r).offers[split % 2]; };
  std::vector<int> members;
  for (int r = 0; r < wire.size(); ++r) {
    if (offer(r).color == offer(rank).color) members.push_back(r);
  }
  std::stable_sort(members.begin(), members.end(),
                   [&](int a, int b) { return offer(a).key < offer(b).key; });
  return members;
}

int join(const Address& address, int size, int rank, int root_rank,
         const std::atomic<bool>& is_aborted, Communicator** made) {
  std::string why;
  const std::shared_ptr<Wire> wire = Wire::open(address, size, &why);
  if (wire == nullptr) return refuse(kInvalidArgument, "init: " + why);
  if (!wire->join(rank)) {
    why = "two ranks say they are rank " + std::to_string(rank);
    wire->break_all(why);
    return refuse(kInvalidArgument, "init: " + why);
  }
  if (!wire->wait(rank, is_aborted, [&] { return wire->all_joined(); })) {
    return refuse(kNcclInvalidUsage, "init: " + wire->breakage());
  }
  forget_address(address);
  auto* communicator = new Communicator(wire, rank, root_rank);
  const std::lock_guard<std::mutex> locked(registry().mutex);
  registry().all.insert(communicator);
  *made = communicator;
  return kNcclSuccess;
}

}  // namespace

Communicator::Communicator(std::shared_ptr<Wire> wire, int rank, int root_rank)
    : rank(rank),
      size(wire->size()),
      root_rank(root_rank),
      name(name_of(wire->address())),
      wire_(std::move(wire)) {}

std::shared_ptr<Wire> Communicator::wire() {
  const std::lock_guard<std::mutex> locked(mutex_);
  return wire_;
}

int Communicator::error(std::string* text) {
  if (const int injected = injected_error) {
    *text = "remote process exited or there was a network error (injected)";
    return injected;
  }
  const auto open = wire();
  if (open == nullptr || !open->is_broken()) return kNcclSuccess;
  *text = open->breakage();
  return kNcclInvalidUsage;
}

bool Communicator::enter() {
  const std::lock_guard<std::mutex> locked(mutex_);
  const int me = gettid();
  if (uses_ > 0 && user_ != me) return false;
  user_ = me;
  ++uses_;
  return true;
}

void Communicator::leave() {
  const std::lock_guard<std::mutex> locked(mutex_);
  --uses_;
  drop_wire();
}

bool Communicator::is_used_by_another() {
  const std::lock_guard<std::mutex> locked(mutex_);
  return uses_ > 0 && user_ != gettid();
}

void Communicator::add_graph() {
  const std::lock_guard<std::mutex> locked(mutex_);
  ++graphs_;
}

void Communicator::drop_graph() {
  const std::lock_guard<std::mutex> locked(mutex_);
  --graphs_;
  ended_.notify_all();
}

void Communicator::wait_for_graphs() {
  std::unique_lock<std::mutex> locked(mutex_);
  ended_.wait(locked, [this] { return graphs_ == 0; });
}

bool Communicator::start_abort() {
  const auto open = wire();
  {
    const std::lock_guard<std::mutex> locked(mutex_);
    if (state != State::kLive && state != State::kFinalized) return false;
    state = State::kAborting;
    is_aborted = true;
  }
  // Peers do not check this rank's abort flag, but its own threads do.
  open->ring(rank);
  return true;
}

uint64_t Communicator::take_ticket() {
  const std::lock_guard<std::mutex> locked(mutex_);
  return tickets_++;
}

void Communicator::wait_for_turn(uint64_t ticket) {
  std::unique_lock<std::mutex> locked(mutex_);
  ended_.wait(locked, [&] { return turn_ == ticket; });
}

void Communicator::end_turn() {
  const std::lock_guard<std::mutex> locked(mutex_);
  ++turn_;
  drop_wire();
  ended_.notify_all();
}

bool Communicator::has_work() {
  const std::lock_guard<std::mutex> locked(mutex_);
  return turn_ != tickets_;
}

void Communicator::drain() {
  std::unique_lock<std::mutex> locked(mutex_);
  ended_.wait(locked, [&] { return turn_ == tickets_; });
}

bool Communicator::end(State ended) {
  const auto open = wire();
  {
    const std::lock_guard<std::mutex> locked(mutex_);
    if (state == State::kDestroyed || state == State::kAborted) return false;
    state = ended;
  }
  if (ended == State::kDestroyed) open->line(rank).state = RankState::kDestroyed;
  if (ended != State::kAborted) open->ring_all();
  const std::lock_guard<std::mutex> locked(mutex_);
  drop_wire();
  return true;
}

void Communicator::drop_wire() {
  const bool has_ended = state == State::kDestroyed || state == State::kAborted;
  if (has_ended && turn_ == tickets_ && uses_ == 0) wire_.reset();
}

Communicator* find_communicator(NcclComm comm) {
  const std::lock_guard<std::mutex> locked(registry().mutex);
  auto* communicator = static_cast<Communicator*>(comm);
  return registry().all.count(communicator) == 1 ? communicator : nullptr;
}

int join_communicator(const Address& address, int size, int rank, Communicator** made) {
  const std::atomic<bool> never{false};
  return join(address, size, rank, rank, never, made);
}

int split_communicator(Communicator& parent, int color, int key, Communicator** made) {
  const auto wire = parent.wire();
  const uint64_t split = ++parent.splits;
  const auto all_entered = [&] {
    for (int r = 0; r < wire->size(); ++r) {
      if (wire->line(r).splits_entered < split) return false;
    }
    return true;
  };
  RankLine& mine = wire->line(parent.rank);
  SplitOffer& offer = mine.offers[split % 2];
  offer.color = color;
  offer.key = key;
  mine.splits_entered = split;
  wire->ring_all();
  if (!wire->wait(parent.rank, parent.is_aborted, all_entered)) return kNcclInvalidUsage;
  *made = nullptr;
  if (color == kNcclSplitNoColor) return kNcclSuccess;

  const std::vector<int> members = members_of(*wire, split, parent.rank);
  RankLine& first = wire->line(members[0]);
  if (members[0] == parent.rank) {
    if (!Wire::make(&offer.part)) return kSystemError;
    mine.splits_made = split;
    wire->ring_all();
  }
  if (!wire->wait(parent.rank, parent.is_aborted, [&] { return first.splits_made >= split; })) {
    return kNcclInvalidUsage;
  }
  const auto position = std::find(members.begin(), members.end(), parent.rank);
  return join(first.offers[split % 2].part, static_cast<int>(members.size()),
              static_cast<int>(position - members.begin()), parent.root_rank, parent.is_aborted,
              made);
}

}  // namespace gpudist::doubles
