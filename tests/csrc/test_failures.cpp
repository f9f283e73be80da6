// Failures that ranks report to each other: a mismatch, a posted failure, a rank that leaves, a
// deadline.
#include <atomic>
#include <chrono>
#include <thread>

#include "test.h"
#include "world.h"

namespace {

using namespace gpudist;
using Kind = Transfer::Kind;

// A wait that ends by its cause and not by the deadline of 60 s, on a machine that may pause.
constexpr double kSoonS = 30;

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void send(HostCommunicator& me, int peer, std::vector<char> data, const Signature& signature) {
  Bytes message(Kind::kSend, peer, data, signature);
  me.begin(signature);
  me.post(&message.transfer);
  me.wait({&message.transfer});
}

std::vector<char> receive(HostCommunicator& me, int peer, size_t bytes,
                          const Signature& signature) {
  std::vector<char> data(bytes);
  Bytes message(Kind::kReceive, peer, data, signature);
  me.begin(signature);
  me.post(&message.transfer);
  me.wait({&message.transfer});
  return data;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

void another_operation_is_a_plan_mismatch() {
  World world(2);
  const auto errors = world.run([](HostCommunicator& me, int rank) {
    if (rank == 0) {
      send(me, 1, std::vector<char>(10), signature_of("repartition"));
    } else {
      receive(me, 0, 10, signature_of("halo exchange"));
    }
  });
  CHECK(!errors[0]);
  const std::string text = text_of<PlanMismatch>(errors[1]);
  CHECK(contains(text, "the operation"));
  CHECK(contains(text, "'repartition'") && contains(text, "'halo exchange'"));
}

void another_size_is_a_plan_mismatch() {
  World world(2);
  const auto errors = world.run([](HostCommunicator& me, int rank) {
    if (rank == 0) {
      send(me, 1, std::vector<char>(10), signature_of("halo exchange"));
    } else {
      receive(me, 0, 12, signature_of("halo exchange"));
    }
  });
  const std::string text = text_of<PlanMismatch>(errors[1]);
  CHECK(contains(text, "the size") && contains(text, "10 bytes") && contains(text, "12 bytes"));
}

void a_posted_failure_ends_every_wait() {
  World world(5);
  const std::string cause(3000, 'x');
  const double start_s = now_s();
  const auto errors = world.run([&](HostCommunicator& me, int rank) {
    if (rank == 2) {
      CHECK(me.post_failure(cause));
      CHECK(!me.post_failure("a later one"));
    } else {
      receive(me, 2, 1, signature_of("never comes"));
    }
  });
  CHECK(now_s() - start_s < kSoonS);
  for (int rank = 0; rank < 5; ++rank) {
    CHECK(world[rank].failure() == cause);
    CHECK(text_of<WorldFailed>(errors[rank]).empty() == (rank == 2));
  }
}

void only_one_of_many_failures_is_kept() {
  for (int round = 0; round < 50; ++round) {
    World world(4);
    std::atomic<int> firsts{0};
    world.run([&](HostCommunicator& me, int rank) {
      firsts += me.post_failure("rank " + std::to_string(rank));
      const std::string seen = me.failure();
      CHECK(seen.empty() || seen == "rank " + seen.substr(5));
    });
    CHECK(firsts == 1);
    CHECK(world[0].failure() == world[3].failure() && !world[0].failure().empty());
  }
}

void what_was_sent_before_leaving_is_received() {
  World world(2);
  const Signature signature = signature_of("parting");
  std::vector<char> received;
  const auto errors = world.run([&](HostCommunicator& me, int rank) {
    if (rank == 0) {
      send(me, 1, std::vector<char>(300'000, 'a'), signature);
      send(me, 1, std::vector<char>(5000, 'b'), signature);
      me.close();
      return;
    }
    receive(me, 0, 300'000, signature);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    received = receive(me, 0, 5000, signature);
    receive(me, 0, 1, signature);
  });
  CHECK(received == std::vector<char>(5000, 'b'));
  CHECK(!errors[0]);
  const std::string text = text_of<PeerFailure>(errors[1]);
  CHECK(contains(text, "rank 0") && contains(text, "has left the world") &&
        contains(text, "'#3 parting'"));
}

void a_receiver_that_left_is_named() {
  World world(2);
  const Signature signature = signature_of("to nobody");
  const auto errors = world.run([&](HostCommunicator& me, int rank) {
    if (rank == 1) {
      // The peer has announced its mailbox, but may never open it.
      std::vector<char> data(1 << 20);
      Bytes message(Kind::kReceive, 0, data, signature);
      me.begin(signature);
      me.post(&message.transfer);
      me.close();
      return;
    }
    send(me, 1, std::vector<char>(1 << 20), signature);
  });
  CHECK(!errors[1]);
  CHECK(contains(text_of<PeerFailure>(errors[0]), "rank 1"));
}

void a_deadline_tells_what_every_rank_did() {
  World world(3, 0.3);
  std::atomic<int> begun{0};
  const auto errors = world.run([&](HostCommunicator& me, int rank) {
    const Signature signature =
        signature_of(rank == 1 ? "thinking" : "waiting on " + std::to_string(rank));
    me.begin(signature);
    ++begun;
    while (begun < 3) std::this_thread::yield();
    if (rank == 1) return;
    std::vector<char> data(4);
    Bytes message(Kind::kReceive, 1, data, signature);
    me.post(&message.transfer);
    me.wait({&message.transfer});
  });
  for (int rank : {0, 2}) {
    const std::string text = text_of<CollectiveTimeout>(errors[rank]);
    CHECK(contains(text, "after 0.3 s"));
    CHECK(contains(text, "rank 1: #1 thinking"));
    CHECK(
        contains(text, "rank " + std::to_string(rank) + ": #1 waiting on " + std::to_string(rank)));
  }
}

void what_the_waiter_throws_ends_the_wait() {
  struct Interrupted {};
  HostCommunicator alone(0, 2, 60, [] { throw Interrupted(); });
  HostCommunicator other(1, 2, 60, [] {});
  alone.connect({{0, 0}, other.address()});
  bool interrupted = false;
  const double start_s = now_s();
  try {
    receive(alone, 1, 4, signature_of("interrupted"));
  } catch (const Interrupted&) {
    interrupted = true;
  }
  CHECK(interrupted);
  CHECK(now_s() - start_s < kSoonS);
}

// After a failure a thread takes back the cells that it lent, and their memory may hold anything.
void what_was_taken_back_is_not_received() {
  struct Interrupted {};
  const auto interrupt = [] { throw Interrupted(); };
  HostCommunicator lender(0, 2, 60, [] {}, interrupt);
  HostCommunicator reader(1, 2, 60, [] {}, interrupt);
  lender.connect({{0, 0}, reader.address()});
  reader.connect({lender.address(), {0, 0}});
  const Signature signature = signature_of("lent");
  std::vector<char> data(1 << 20, 'a'), read(data.size(), 'b');
  Bytes receives(Kind::kReceive, 0, read, signature);
  reader.begin(signature);
  reader.post(&receives.transfer);
  CHECK(!reader.progress());
  bool interrupted = false;
  try {
    send(lender, 1, data, signature);
  } catch (const Interrupted&) {
    interrupted = true;
  }
  CHECK(interrupted);
  while (reader.progress()) continue;
  CHECK(!receives.transfer.complete);
  CHECK(read == std::vector<char>(data.size(), 'b'));
  reader.abandon();
}

void refuses_peers_it_has_not() {
  World world(2);
  for (int peer : {-1, 0, 2}) {
    const auto errors = world.run([&](HostCommunicator& me, int rank) {
      if (rank == 0) send(me, peer, {}, signature_of("misdirected"));
    });
    CHECK(contains(text_of<TransportError>(errors[0]), "no mailbox"));
  }
}

// A label is cut between characters, because Python decodes it.
void cuts_labels_between_characters() {
  std::string label;
  while (label.size() < 300) label += "\xc3\xa4";
  for (const std::string& start : {std::string(), std::string("a")}) {
    World world(1);
    world[0].begin({start + label, std::string(16, ' ')});
    const std::string report = world[0].reports()[0];
    CHECK(report.back() == '\xa4');
    CHECK(report.size() >= 190 && report.size() < 210);
  }
}

}  // namespace

void test_failures() {
  another_operation_is_a_plan_mismatch();
  another_size_is_a_plan_mismatch();
  a_posted_failure_ends_every_wait();
  only_one_of_many_failures_is_kept();
  what_was_sent_before_leaving_is_received();
  a_receiver_that_left_is_named();
  a_deadline_tells_what_every_rank_did();
  what_the_waiter_throws_ends_the_wait();
  what_was_taken_back_is_not_received();
  refuses_peers_it_has_not();
  cuts_labels_between_characters();
}
