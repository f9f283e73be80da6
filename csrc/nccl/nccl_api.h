// NCCL's calls, looked up in a library that is loaded at run time.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "nccl/nccl_abi.h"

namespace gpudist {

struct NcclApi {
  std::string path;
  std::string found;  // how it was found; see load_nccl
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
  // Whether several ranks may share a GPU.
  bool has_shared_gpus() const { return version >= 23000; }
};

// Load this process's only NCCL: `path` if it is not empty; otherwise the library that is already
// loaded; otherwise the first of `wheel_paths` that exists; otherwise the system's. Later calls
// return the result of the first. Throws NotBuiltError if there is none, if it is older than 2.22,
// or if another NCCL is already loaded.
const NcclApi& load_nccl(const std::string& path, const std::vector<std::string>& wheel_paths);

// Throws TransportError with NCCL's description of the error.
void check_nccl(const NcclApi& api, int result, NcclComm comm, const char* what);

}  // namespace gpudist
