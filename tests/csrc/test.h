// A test is a function. CHECK counts checks and reports where one fails.
#pragma once

#include <atomic>
#include <cstdio>

inline std::atomic<long> passed{0};
inline std::atomic<long> failed{0};

inline bool check(bool fine, const char* what, const char* file, int line) {
  (fine ? passed : failed).fetch_add(1, std::memory_order_relaxed);
  if (!fine) std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", file, line, what);
  return fine;
}

#define CHECK(condition) check(static_cast<bool>(condition), #condition, __FILE__, __LINE__)
