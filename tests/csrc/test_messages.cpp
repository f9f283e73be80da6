// Messages between ranks: all sizes, both directions at once, in order, among many ranks.
#include <dirent.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <list>
#include <numeric>
#include <random>

#include "host/mailbox.h"
#include "host/pieces.h"
#include "test.h"
#include "world.h"

namespace {

using namespace gpudist;
using Kind = Transfer::Kind;

// Eight at a time, since sanitizers see every one.
std::vector<char> numbered(size_t bytes, unsigned seed) {
  std::vector<char> data(bytes);
  uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
  for (size_t at = 0; at < bytes; at += sizeof(state)) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const uint64_t mixed = state ^ state >> 29;
    std::memcpy(&data[at], &mixed, std::min(sizeof(mixed), bytes - at));
  }
  return data;
}

void exchanges_every_size_both_ways(bool takes_turns) {
  World world(2, 60, takes_turns);
  const size_t slot = kSlotBytes, first = kSlotBytes - kHeaderBytes;
  const std::vector<size_t> sizes{
      0, 1, 7, first - 1, first, first + 1, slot, first + slot, 600'000, 3 << 20};
  for (size_t bytes : sizes) {
    const Signature signature = signature_of("exchange");
    const auto errors = world.run([&](HostCommunicator& me, int rank) {
      std::vector<char> mine = numbered(bytes, rank), theirs(bytes);
      Bytes send(Kind::kSend, 1 - rank, mine, signature);
      Bytes receive(Kind::kReceive, 1 - rank, theirs, signature);
      me.begin(signature);
      me.post(&send.transfer);
      me.post(&receive.transfer);
      me.wait({&send.transfer, &receive.transfer});
      CHECK(theirs == numbered(bytes, 1 - rank));
    });
    CHECK(all_fine(errors));
  }
}

void many_messages_keep_their_order() {
  World world(2);
  const Signature signature = signature_of("in order");
  const auto errors = world.run([&](HostCommunicator& me, int rank) {
    std::mt19937 random(5);  // same seed, so the same sizes on both ranks
    std::vector<std::vector<char>> data;
    std::list<Bytes> messages;
    std::vector<Transfer*> all;
    data.reserve(1000);
    me.begin(signature);
    for (unsigned i = 0; i < 500; ++i) {
      const size_t bytes = random() % (i % 50 == 0 ? 200'000 : 300);
      data.push_back(numbered(bytes, 2 * i + rank));
      messages.emplace_back(Kind::kSend, 1 - rank, data.back(), signature);
      data.push_back(std::vector<char>(bytes));
      messages.emplace_back(Kind::kReceive, 1 - rank, data.back(), signature);
    }
    for (Bytes& message : messages) {
      me.post(&message.transfer);
      all.push_back(&message.transfer);
    }
    me.wait(all);
    bool fine = true;
    for (unsigned i = 0; i < 500; ++i) {
      const auto& received = data[2 * i + 1];
      fine &= received == numbered(received.size(), 2 * i + 1 - rank);
    }
    CHECK(fine);
  });
  CHECK(all_fine(errors));
}

void eight_ranks_talk_at_random(bool takes_turns) {
  World world(8, 60, takes_turns);
  std::vector<int> rounds(20);
  std::iota(rounds.begin(), rounds.end(), 0);
  const auto errors = world.run([&](HostCommunicator& me, int rank) {
    std::mt19937 random(3);  // same seed, so the same traffic on all ranks
    for (int round : rounds) {
      const Signature signature = signature_of("round " + std::to_string(round));
      std::list<std::vector<char>> data;
      std::list<Bytes> messages;
      std::vector<std::pair<std::vector<char>*, unsigned>> expected;
      std::vector<Transfer*> all;
      for (unsigned number = 0; number < 60; ++number) {
        const int from = random() % 8, to = random() % 8;
        const size_t bytes = random() % (number % 7 == 0 ? 150'000 : 2000);
        if (from == to || (from != rank && to != rank)) continue;
        const unsigned seed = round * 100 + number;
        if (from == rank) {
          data.push_back(numbered(bytes, seed));
          messages.emplace_back(Kind::kSend, to, data.back(), signature);
        } else {
          data.push_back(std::vector<char>(bytes));
          expected.emplace_back(&data.back(), seed);
          messages.emplace_back(Kind::kReceive, from, data.back(), signature);
        }
      }
      me.begin(signature);
      for (Bytes& message : messages) {
        me.post(&message.transfer);
        all.push_back(&message.transfer);
      }
      me.wait(all);
      bool fine = true;
      for (const auto& [received, seed] : expected)
        fine &= *received == numbered(received->size(), seed);
      CHECK(fine);
    }
    me.close();
  });
  CHECK(all_fine(errors));
}

// Messages to random ranks that all of them read in the same slots. Some ranks are late, and all
// messages are in flight at once or few at a time.
void many_messages_share_their_packing(size_t at_once, bool takes_turns) {
  constexpr int kRanks = 5;
  World world(kRanks, 60, takes_turns);
  const auto errors = world.run([&](HostCommunicator& me, int rank) {
    std::mt19937 random(7);  // same seed, so the same traffic on all ranks
    for (int round = 0; round < 6; ++round) {
      const Signature signature = signature_of("round " + std::to_string(round));
      std::list<std::vector<char>> data;
      std::list<SharedPacking> packings;
      std::list<Bytes> messages;
      std::vector<std::pair<std::vector<char>*, unsigned>> expected;
      std::vector<Transfer*> all;
      if (random() % kRanks == static_cast<unsigned>(rank)) usleep(2000);
      me.begin(signature);
      for (unsigned number = 0; number < 24; ++number) {
        const int from = random() % kRanks;
        const unsigned to = random() % (1u << kRanks) & ~(1u << from);
        const size_t bytes = random() % (number % 3 == 0 ? 3'000'000 : 300'000);
        const unsigned seed = round * 100 + number;
        if (from == rank) data.push_back(numbered(bytes, seed));
        if (from == rank) packings.push_back({__builtin_popcount(to), {}});
        for (int peer = 0; peer < kRanks; ++peer) {
          if ((to >> peer & 1u) == 0 || (from != rank && peer != rank)) continue;
          if (from != rank) {
            data.push_back(std::vector<char>(bytes));
            expected.emplace_back(&data.back(), seed);
          }
          messages.emplace_back(from == rank ? Kind::kSend : Kind::kReceive,
                                from == rank ? peer : from, data.back(), signature);
          if (from == rank) messages.back().transfer.shared = &packings.back();
          me.post(&messages.back().transfer);
          all.push_back(&messages.back().transfer);
        }
        if (number % at_once == at_once - 1) me.wait(all);
      }
      me.wait(all);
      bool fine = true;
      for (const auto& [received, seed] : expected)
        fine &= *received == numbered(received->size(), seed);
      CHECK(fine);
    }
  });
  CHECK(all_fine(errors));
}

// One message to two ranks; each rank splits it at different places.
void pieces_are_cut_anywhere(bool takes_turns) {
  World world(3, 60, takes_turns);
  const Signature signature = signature_of("pieces");
  for (const int64_t bytes : {int64_t{1}, int64_t{5000}, int64_t{100'000}, int64_t{3} << 20}) {
    const std::vector<char> expected = numbered(bytes, 3);
    const auto errors = world.run([&](HostCommunicator& me, int rank) {
      std::vector<char> data = rank == 0 ? expected : std::vector<char>(bytes);
      const auto start = reinterpret_cast<uintptr_t>(data.data());
      const int64_t count = rank == 2 ? 400 : 1 + 6 * rank, step = bytes / count + 1;
      std::vector<Piece> cuts;
      for (int64_t at = 0; at < bytes; at += step) {
        cuts.emplace_back(start + at, std::min(step, bytes - at));
        cuts.emplace_back(start, 0);
      }
      const Kind kind = rank == 0 ? Kind::kSend : Kind::kReceive;
      me.begin(signature);
      Pieces pieces(me, signature, kind, rank == 0 ? std::vector<int>{2, 1} : std::vector<int>{0},
                    cuts);
      pieces.wait();
      CHECK(data == expected);
    });
    CHECK(all_fine(errors));
  }
}

void pieces_that_nobody_waits_for_end_the_world() {
  World world(2);
  const Signature signature = signature_of("pieces");
  char byte = 0;
  {
    world[0].begin(signature);
    Pieces forgotten(world[0], signature, Kind::kReceive, {1},
                     {{reinterpret_cast<uintptr_t>(&byte), 1}});
  }
  std::string text;
  try {
    world[0].begin(signature);
  } catch (const TransportError& error) {
    text = error.what();
  }
  CHECK(text.find("did not finish") != std::string::npos);
}

int open_descriptors() {
  DIR* folder = opendir("/proc/self/fd");
  int count = 0;
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

void threads_need_no_descriptors() {
  World world(12, 60, true);
  const Signature signature = signature_of("everyone");
  const int before = open_descriptors();
  const auto errors = world.run([&](HostCommunicator& me, int rank) {
    std::list<std::vector<char>> data;
    std::list<Bytes> messages;
    std::vector<Transfer*> all;
    me.begin(signature);
    for (int peer = 0; peer < world.size(); ++peer) {
      if (peer == rank) continue;
      for (const Kind kind : {Kind::kSend, Kind::kReceive}) {
        data.emplace_back(9, static_cast<char>(kind == Kind::kSend ? rank : -1));
        messages.emplace_back(kind, peer, data.back(), signature);
        me.post(&messages.back().transfer);
        all.push_back(&messages.back().transfer);
      }
    }
    me.wait(all);
    for (const Bytes& message : messages) {
      const Transfer& transfer = message.transfer;
      CHECK(*transfer.tensor == (transfer.kind == Kind::kSend ? rank : transfer.peer));
    }
  });
  CHECK(all_fine(errors));
  CHECK(open_descriptors() == before);
}

// Rank 0 waits for its turn meanwhile, so that its lock is not free.
void a_resting_rank_learns_what_was_abandoned() {
  World world(2, 60, true);
  const Signature signature = signature_of("two pieces");
  std::vector<char> data(1 << 20);
  const Piece piece{reinterpret_cast<uintptr_t>(data.data()), static_cast<int64_t>(data.size())};
  std::unique_ptr<Pieces> forgotten;
  const auto errors = world.run([&](HostCommunicator& me, int rank) {
    if (rank == 1) {
      CHECK(world[0].unfinished().size() == 2);
      CHECK(!world[0].may_go_on());
      forgotten.reset();
      CHECK(world[0].unfinished().empty());
      return;
    }
    me.begin(signature);
    forgotten = std::make_unique<Pieces>(me, signature, Kind::kSend, std::vector<int>{1},
                                         std::vector<Piece>{piece});
    Pieces(me, signature, Kind::kReceive, {1}, {piece}).wait();
  });
  CHECK(!errors[1]);
  CHECK(text_of<TransportError>(errors[0]).find("did not finish") != std::string::npos);
}

void closing_lets_go_of_everything() {
  const int before = open_descriptors();
  {
    World world(3);
    const Signature signature = signature_of("ring");
    const auto errors = world.run([&](HostCommunicator& me, int rank) {
      std::vector<char> mine(100), theirs(100);
      Bytes send(Kind::kSend, (rank + 1) % 3, mine, signature);
      Bytes receive(Kind::kReceive, (rank + 2) % 3, theirs, signature);
      me.begin(signature);
      me.post(&send.transfer);
      me.post(&receive.transfer);
      me.wait({&send.transfer, &receive.transfer});
    });
    CHECK(all_fine(errors));
    CHECK(open_descriptors() > before);
    for (int rank = 0; rank < 3; ++rank) {
      world[rank].close();
      world[rank].close();
    }
    CHECK(open_descriptors() == before);
    CHECK(world[1].failure().empty());
    CHECK(!world[1].post_failure("too late"));
    CHECK(world[1].reports().size() == 3);
    std::string text;
    try {
      world[1].begin(signature);
    } catch (const TransportError& error) {
      text = error.what();
    }
    CHECK(text.find("has left its world") != std::string::npos);
  }
  CHECK(open_descriptors() == before);
}

}  // namespace

void test_messages() {
  for (bool takes_turns : {false, true}) exchanges_every_size_both_ways(takes_turns);
  many_messages_keep_their_order();
  eight_ranks_talk_at_random(false);
  eight_ranks_talk_at_random(true);
  for (bool takes_turns : {false, true}) {
    pieces_are_cut_anywhere(takes_turns);
    for (size_t at_once : {1, 5, 24}) many_messages_share_their_packing(at_once, takes_turns);
  }
  threads_need_no_descriptors();
  a_resting_rank_learns_what_was_abandoned();
  pieces_that_nobody_waits_for_end_the_world();
  closing_lets_go_of_everything();
}
