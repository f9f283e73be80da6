// Device memory for what is packed and what arrives: a piece for each stream, whose operations
// follow one another, so that no operation waits for another stream's and none allocates once the
// largest has been met.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "device_api.h"

namespace gpudist {

class Staging {
 public:
  using Allocate = std::function<char*(size_t bytes)>;
  using Release = std::function<void(char* memory)>;

  Staging(const DeviceApi& api, Allocate allocate, Release release)
      : api_(api), allocate_(std::move(allocate)), release_(std::move(release)) {}
  ~Staging() { clear(); }
  Staging(const Staging&) = delete;

  // At least `bytes`, for the next operation of `stream`. What a graph uses, of which `capture` is
  // the number, belongs to that graph.
  char* of(DeviceStream stream, uint64_t capture, size_t bytes);
  // Release everything; nothing may be under way.
  void clear();
  // In all.
  size_t bytes() const;

 private:
  struct Piece {
    char* memory = nullptr;
    size_t bytes = 0;
  };
  struct Retired {
    char* memory;
    DeviceEvent event;  // null: a graph may still use it
  };

  void retire(DeviceStream stream, uint64_t capture, char* memory);
  void release_retired();

  const DeviceApi& api_;
  const Allocate allocate_;
  const Release release_;
  std::map<std::pair<DeviceStream, uint64_t>, Piece> pieces_;
  std::vector<Retired> retired_;
};

}  // namespace gpudist
