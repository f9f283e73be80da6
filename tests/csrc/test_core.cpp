// Tests of the C++ core. Ranks are threads, so that sanitizers see a single mapping of every
// segment. With the argument `threads`, only tests of several threads run; with `quick`, a fifth of
// the random combinations.
#include <cstdio>
#include <cstring>

#include "test.h"

void test_packing();
void test_half();
void test_combine(int rounds);
void test_device_api();
void test_hostile();
void test_messages();
void test_norm_lines();
void test_nccl();
void test_nccl_world();
void test_failures();
void test_stages();
void test_recycling();

int main(int count, char** arguments) {
  const auto is_given = [&](const char* word) {
    return count > 1 && std::strcmp(arguments[1], word) == 0;
  };
  if (!is_given("threads")) {
    test_half();
    test_packing();
    test_combine(is_given("quick") ? 480 : 2400);
    test_norm_lines();
  }
  test_device_api();
  test_messages();
  test_hostile();
  test_failures();
  test_nccl();
  test_nccl_world();
  test_stages();
  test_recycling();
  std::printf("%ld passed, %ld failed\n", passed.load(), failed.load());
  return failed.load() == 0 ? 0 : 1;
}
