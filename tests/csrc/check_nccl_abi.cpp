// Compiled but never run: compares our declarations of NCCL's interface with a real nccl.h.
#include <nccl.h>

#include <type_traits>

#include "nccl/nccl_api.h"

namespace {

using gpudist::NcclApi;
using gpudist::NcclConfig;

#define SAME_VALUE(ours, theirs) static_assert(int{gpudist::ours} == static_cast<int>(theirs))

static_assert(sizeof(gpudist::NcclUniqueId) == sizeof(ncclUniqueId));
static_assert(sizeof(gpudist::NcclComm) == sizeof(ncclComm_t));
static_assert(sizeof(gpudist::DeviceStream) == sizeof(cudaStream_t));
SAME_VALUE(kNcclSplitNoColor, NCCL_SPLIT_NOCOLOR);

SAME_VALUE(kNcclSuccess, ncclSuccess);
SAME_VALUE(kNcclInvalidUsage, ncclInvalidUsage);
SAME_VALUE(kNcclInProgress, ncclInProgress);

SAME_VALUE(kNcclInt8, ncclInt8);
SAME_VALUE(kNcclUint8, ncclUint8);
SAME_VALUE(kNcclInt32, ncclInt32);
SAME_VALUE(kNcclInt64, ncclInt64);
SAME_VALUE(kNcclFloat16, ncclFloat16);
SAME_VALUE(kNcclFloat32, ncclFloat32);
SAME_VALUE(kNcclFloat64, ncclFloat64);
SAME_VALUE(kNcclBfloat16, ncclBfloat16);
static_assert(sizeof(ncclDataType_t) == sizeof(int));

SAME_VALUE(kNcclSum, ncclSum);
SAME_VALUE(kNcclProd, ncclProd);
SAME_VALUE(kNcclMax, ncclMax);
SAME_VALUE(kNcclMin, ncclMin);
static_assert(sizeof(ncclRedOp_t) == sizeof(int));
static_assert(sizeof(ncclResult_t) == sizeof(int));

constexpr ncclConfig_t kTheirs = NCCL_CONFIG_INITIALIZER;
constexpr NcclConfig kOurs;

// NCCL only appends members, so our struct is a prefix of the library's.
static_assert(sizeof(NcclConfig) <= sizeof(ncclConfig_t));
static_assert(kOurs.size == sizeof(NcclConfig));
static_assert(kOurs.magic == kTheirs.magic);

#define SAME(ours, theirs)                                                                   \
  static_assert(offsetof(NcclConfig, ours) == offsetof(ncclConfig_t, theirs));               \
  static_assert(std::is_same_v<decltype(NcclConfig::ours), decltype(ncclConfig_t::theirs)>); \
  static_assert(kOurs.ours == kTheirs.theirs)

static_assert(offsetof(NcclConfig, size) == offsetof(ncclConfig_t, size));
static_assert(offsetof(NcclConfig, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(NcclConfig, version) == offsetof(ncclConfig_t, version));
SAME(blocking, blocking);
SAME(cga_cluster_size, cgaClusterSize);
SAME(min_ctas, minCTAs);
SAME(max_ctas, maxCTAs);
SAME(net_name, netName);
SAME(split_share, splitShare);
SAME(traffic_class, trafficClass);
SAME(comm_name, commName);
SAME(collnet_enable, collnetEnable);
SAME(cta_policy, CTAPolicy);
SAME(shrink_share, shrinkShare);
SAME(nvls_ctas, nvlsCTAs);

// Enumerations are passed as ints, and all pointers as pointers.
template <class Ours, class Theirs>
constexpr bool is_passed_alike() {
  return sizeof(Ours) == sizeof(Theirs) && std::is_pointer_v<Ours> == std::is_pointer_v<Theirs> &&
         std::is_class_v<Ours> == std::is_class_v<Theirs>;
}

template <class>
struct IsSameCall : std::false_type {};
template <class R, class... A, class S, class... B>
struct IsSameCall<void(R (*)(A...), S (*)(B...))> {
  static constexpr bool value() {
    if constexpr (sizeof...(A) == sizeof...(B)) {
      return is_passed_alike<R, S>() && (is_passed_alike<A, B>() && ...);
    } else {
      return false;
    }
  }
};

#define SAME_CALL(ours, theirs) \
  static_assert(IsSameCall<void(decltype(NcclApi::ours), decltype(&theirs))>::value())

SAME_CALL(get_unique_id, ncclGetUniqueId);
SAME_CALL(get_error_string, ncclGetErrorString);
SAME_CALL(get_last_error, ncclGetLastError);
SAME_CALL(comm_init_rank_config, ncclCommInitRankConfig);
SAME_CALL(comm_split, ncclCommSplit);
SAME_CALL(comm_finalize, ncclCommFinalize);
SAME_CALL(comm_destroy, ncclCommDestroy);
SAME_CALL(comm_abort, ncclCommAbort);
SAME_CALL(comm_get_async_error, ncclCommGetAsyncError);
SAME_CALL(group_start, ncclGroupStart);
SAME_CALL(group_end, ncclGroupEnd);
SAME_CALL(send, ncclSend);
SAME_CALL(recv, ncclRecv);
SAME_CALL(broadcast, ncclBroadcast);
SAME_CALL(reduce, ncclReduce);
SAME_CALL(all_reduce, ncclAllReduce);
SAME_CALL(reduce_scatter, ncclReduceScatter);
SAME_CALL(all_gather, ncclAllGather);

}  // namespace
