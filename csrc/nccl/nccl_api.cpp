#include "nccl/nccl_api.h"

#include <dlfcn.h>
#include <link.h>
#include <sys/stat.h>

#include <cstring>
#include <filesystem>

#include "core/errors.h"

namespace gpudist {
namespace {

// Before, ncclCommAbort freed memory at once, also in a group, below a thread inside NCCL.
constexpr int kOldest = 22200;

// A library in this process. A library in use is never closed, because NCCL leaves threads running.
struct Library {
  void* handle = nullptr;
  std::string path;
  std::string found;
};

std::string version_text(int version) {
  const int unit = version < 10000 ? 1000 : 10000;  // 2.8.4 is 2804, 2.9.6 is 20906
  return std::to_string(version / unit) + "." + std::to_string(version % unit / 100) + "." +
         std::to_string(version % 100);
}

std::string last_error() {
  const char* text = dlerror();
  return text != nullptr ? text : "no reason given";
}

// Path of the library that defines `symbol`, looked up in `handle` and its dependencies.
std::string file_of(void* handle, const char* symbol) {
  Dl_info information;
  void* address = dlsym(handle, symbol);
  if (address == nullptr || dladdr(address, &information) == 0) return "";
  return information.dli_fname;
}

Library open_library(const std::string& name, int flags, const char* found) {
  Library library;
  library.handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | flags);
  if (library.handle == nullptr) return library;
  library.path = file_of(library.handle, "ncclGetVersion");
  if (library.path.empty()) library.path = name;
  library.found = found;
  return library;
}

int add_candidate(dl_phdr_info* information, size_t, void* names) {
  const std::string name = information->dlpi_name;
  const bool may_be_nccl = name.find("nccl", name.rfind('/') + 1) != std::string::npos;
  if (may_be_nccl) static_cast<std::vector<std::string>*>(names)->push_back(name);
  return 0;
}

// An NCCL that is already loaded, under its own name or a packager's name.
Library loaded_library() {
  constexpr const char* kFound = "already in the process";
  Library usual = open_library("libnccl.so.2", RTLD_NOLOAD, kFound);
  if (usual.handle != nullptr) return usual;
  std::vector<std::string> names;
  dl_iterate_phdr(add_candidate, &names);
  for (const std::string& name : names) {
    const Library library = open_library(name, RTLD_NOLOAD, kFound);
    // NCCL's plugins and bindings have similar file names.
    if (library.handle != nullptr && file_of(library.handle, "ncclGetUniqueId") == name) {
      return library;
    }
  }
  return {};
}

bool is_same_file(const std::string& left, const std::string& right) {
  struct stat one, other;
  return stat(left.c_str(), &one) == 0 && stat(right.c_str(), &other) == 0 &&
         one.st_dev == other.st_dev && one.st_ino == other.st_ino;
}

Library given_library(const std::string& path) {
  Library loaded = loaded_library();
  const Library given = open_library(path, 0, "GPUDIST_NCCL_LIBRARY");
  if (given.handle == nullptr) {
    throw NotBuiltError("GPUDIST_NCCL_LIBRARY cannot be opened: " + last_error());
  }
  // Test doubles export this symbol. They do not touch the GPUs that a loaded NCCL may be using.
  const bool is_double = dlsym(given.handle, "gpudist_device_api") != nullptr;
  if (loaded.handle != nullptr && !is_double && !is_same_file(loaded.path, given.path)) {
    dlclose(given.handle);
    throw NotBuiltError("GPUDIST_NCCL_LIBRARY is " + given.path + ", but " + loaded.path +
                        " is in this process already: one process cannot use two; unset it, or "
                        "let it name that one");
  }
  return given;
}

Library find_library(const std::string& path, const std::vector<std::string>& wheel_paths) {
  if (!path.empty()) return given_library(path);
  Library loaded = loaded_library();
  if (loaded.handle != nullptr) return loaded;
  for (const std::string& wheel_path : wheel_paths) {
    if (!std::filesystem::exists(wheel_path)) continue;
    const Library wheel = open_library(wheel_path, 0, "nvidia-nccl wheel");
    if (wheel.handle == nullptr) throw NotBuiltError("NCCL cannot be opened: " + last_error());
    return wheel;
  }
  const Library system = open_library("libnccl.so.2", 0, "system");
  if (system.handle == nullptr) {
    throw NotBuiltError("there is no NCCL (" + last_error() +
                        "): install nvidia-nccl-cu12 or nvidia-nccl-cu13, the one of torch's "
                        "CUDA, or let GPUDIST_NCCL_LIBRARY name its file");
  }
  return system;
}

// Looks up the calls of a library; its errors say which of them are missing.
class Calls {
 public:
  explicit Calls(const Library& library) : library_(library) {}

  template <typename Call>
  void find(Call*& call, const char* symbol) const {
    void* address = dlsym(library_.handle, symbol);
    if (address == nullptr) fail(std::string("has no ") + symbol);
    call = reinterpret_cast<Call*>(address);
  }

  int version() const {
    int (*get_version)(int*) = nullptr;
    find(get_version, "ncclGetVersion");
    int version = 0;
    if (get_version(&version) != kNcclSuccess) fail("does not report its version");
    if (version < kOldest) fail("is version " + version_text(version));
    return version;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw NotBuiltError("the NCCL at " + library_.path + " (" + library_.found + ") " + what +
                        ", but NCCL " + version_text(kOldest) + " or later is needed");
  }

  const Library& library_;
};

NcclApi make_api(const Library& library) {
  const Calls calls(library);
  NcclApi api{};
  api.path = library.path;
  api.found = library.found;
  api.version = calls.version();
  calls.find(api.get_unique_id, "ncclGetUniqueId");
  calls.find(api.get_error_string, "ncclGetErrorString");
  calls.find(api.get_last_error, "ncclGetLastError");
  calls.find(api.comm_init_rank_config, "ncclCommInitRankConfig");
  calls.find(api.comm_split, "ncclCommSplit");
  calls.find(api.comm_finalize, "ncclCommFinalize");
  calls.find(api.comm_destroy, "ncclCommDestroy");
  calls.find(api.comm_abort, "ncclCommAbort");
  calls.find(api.comm_get_async_error, "ncclCommGetAsyncError");
  calls.find(api.group_start, "ncclGroupStart");
  calls.find(api.group_end, "ncclGroupEnd");
  calls.find(api.send, "ncclSend");
  calls.find(api.recv, "ncclRecv");
  calls.find(api.broadcast, "ncclBroadcast");
  calls.find(api.reduce, "ncclReduce");
  calls.find(api.all_reduce, "ncclAllReduce");
  calls.find(api.reduce_scatter, "ncclReduceScatter");
  calls.find(api.all_gather, "ncclAllGather");
  return api;
}

}  // namespace

const NcclApi& load_nccl(const std::string& path, const std::vector<std::string>& wheel_paths) {
  static const NcclApi api = make_api(find_library(path, wheel_paths));
  return api;
}

void check_nccl(const NcclApi& api, int result, NcclComm comm, const char* what) {
  if (result == kNcclSuccess) return;
  std::string message = std::string(what) + ": " + api.get_error_string(result);
  const char* last = api.get_last_error(comm);
  if (last != nullptr && *last != '\0') message += std::string(" (") + last + ")";
  throw TransportError(message);
}

}  // namespace gpudist
