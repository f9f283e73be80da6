// The part of NCCL's binary interface, version 2.22 or later, that is used here. The library is
// loaded at run time, and the build needs none of its headers.
#pragma once

#include <climits>
#include <cstddef>

#include "device/device_api.h"

namespace gpudist {

using NcclComm = void*;  // ncclComm_t

struct NcclUniqueId {
  char internal[128];
};

// ncclResult_t
constexpr int kNcclSuccess = 0;
constexpr int kNcclInvalidUsage = 5;
constexpr int kNcclInProgress = 7;

// ncclDataType_t
enum NcclDtype : int {
  kNcclInt8 = 0,
  kNcclUint8 = 1,
  kNcclInt32 = 2,
  kNcclInt64 = 4,
  kNcclFloat16 = 6,
  kNcclFloat32 = 7,
  kNcclFloat64 = 8,
  kNcclBfloat16 = 9,
};

inline int64_t nccl_item_bytes(int dtype) {
  switch (dtype) {
    case kNcclInt8:
    case kNcclUint8: return 1;
    case kNcclFloat16:
    case kNcclBfloat16: return 2;
    case kNcclInt32:
    case kNcclFloat32: return 4;
    default: return 8;
  }
}

// ncclRedOp_t
enum NcclRedOp : int { kNcclSum = 0, kNcclProd = 1, kNcclMax = 2, kNcclMin = 3 };

constexpr unsigned int kNcclConfigVersion = 22703;

// ncclConfig_t as of 2.27. NCCL reads `size` bytes, and of those the members that exist in
// `version`.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned int magic = 0xcafebeef;
  unsigned int version = kNcclConfigVersion;
  int blocking = INT_MIN;
  int cga_cluster_size = INT_MIN;
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
  int traffic_class = INT_MIN;
  const char* comm_name = nullptr;
  int collnet_enable = INT_MIN;
  int cta_policy = INT_MIN;
  int shrink_share = INT_MIN;
  int nvls_ctas = INT_MIN;
};

constexpr int kNcclSplitNoColor = -1;

}  // namespace gpudist
