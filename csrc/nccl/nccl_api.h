// NCCL's calls, found in a library that is opened at run time.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "nccl/nccl_abi.h"

namespace gpudist {

struct NcclApi {
  std::string path;
  std::string found;  // how: see load_nccl
  int version = 0;    // such as 22703

  int (*get_unique_id)(NcclUniqueId* id);
  const char* (*get_error_string)(int result);
  const char* (*get_last_error)(NcclComm comm);

  int (*comm_init_rank_config)(NcclComm* comm, int size, NcclUniqueId id, int rank,
                               NcclConfig* config);
  int (*comm_split)(NcclComm comm, int color, int key, NcclComm* part, NcclConfig* config);
  int (*comm_finalize)(NcclComm comm);
  int (*comm_destroy)(NcclComm comm);
  int (*comm_abort)(NcclComm comm);
  int (*comm_get_async_error)(NcclComm comm, int* error);

  int (*group_start)();
  int (*group_end)();
  int (*send)(const void* from, size_t count, int dtype, int peer, NcclComm comm,
              DeviceStream stream);
  int (*recv)(void* to, size_t count, int dtype, int peer, NcclComm comm, DeviceStream stream);
  int (*broadcast)(const void* from, void* to, size_t count, int dtype, int root, NcclComm comm,
                   DeviceStream stream);
  int (*reduce)(const void* from, void* to, size_t count, int dtype, int op, int root,
                NcclComm comm, DeviceStream stream);
  int (*all_reduce)(const void* from, void* to, size_t count, int dtype, int op, NcclComm comm,
                    DeviceStream stream);
  int (*reduce_scatter)(const void* from, void* to, size_t received, int dtype, int op,
                        NcclComm comm, DeviceStream stream);
  int (*all_gather)(const void* from, void* to, size_t sent, int dtype, NcclComm comm,
                    DeviceStream stream);

  bool has_windows() const { return version >= 22700; }
  // Several ranks on one GPU.
  bool has_shared_gpus() const { return version >= 23000; }
};

// The one NCCL of this process: `path` if it is not empty; else what the process has already
// loaded; else the first of `wheel_paths` that exists; else what the system finds by its name. The
// first call decides. Throws NotBuiltError: there is none, it is older than 2.19, or it is another
// file than one that is loaded already.
const NcclApi& load_nccl(const std::string& path, const std::vector<std::string>& wheel_paths);

// Throws TransportError with what NCCL says of an error.
void check_nccl(const NcclApi& api, int result, NcclComm comm, const char* what);

}  // namespace gpudist
