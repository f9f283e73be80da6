#include "host/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <string>

#include "core/errors.h"

namespace gpudist {

class Segment::Mapping {
 public:
  // Memory of a file, or of this process alone if `fd` is -1.
  Mapping(int fd, size_t bytes) : fd(fd), bytes_(bytes) {
    const int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (memory == MAP_FAILED) {
      const int reason = errno;
      if (fd >= 0) close(fd);
      errno = reason;
      check_call(-1, "mmap of a shared segment");
    }
    data = static_cast<char*>(memory);
  }
  Mapping(const Mapping&) = delete;
  ~Mapping() {
    munmap(data, bytes_);
    if (fd >= 0) close(fd);
  }

  char* data = nullptr;
  int fd;

 private:
  size_t bytes_;
};

namespace {

std::mutex own_mutex;

constexpr mode_t kOwnerOnly = S_IRUSR | S_IWUSR;
// Peers may access the whole mapping safely: the file cannot shrink.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// Process id and descriptor come from the store and may be wrong: check the file.
bool is_segment(int fd, size_t bytes) {
  struct stat status;
  return fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_uid == geteuid() &&
         status.st_size == static_cast<off_t>(bytes) && fcntl(fd, F_GET_SEALS) == kSeals;
}

}  // namespace

// Segments created by this process, by id. Ranks that are threads of it share them.
std::map<int64_t, std::weak_ptr<Segment::Mapping>>& Segment::own() {
  static std::map<int64_t, std::weak_ptr<Mapping>> segments;
  return segments;
}

Segment::Segment(size_t bytes, bool is_shared) {
  const int fd = is_shared ? memfd_create("gpudist", MFD_CLOEXEC | MFD_ALLOW_SEALING) : -1;
  if (is_shared) check_call(fd, "memfd_create");
  if (is_shared && (ftruncate(fd, static_cast<off_t>(bytes)) < 0 || fchmod(fd, kOwnerOnly) < 0 ||
                    fcntl(fd, F_ADD_SEALS, kSeals) < 0)) {
    const int reason = errno;
    close(fd);
    errno = reason;
    check_call(-1, "making a shared segment");
  }
  mapping_ = std::make_shared<Mapping>(fd, bytes);
  const std::lock_guard<std::mutex> lock(own_mutex);
  own()[id()] = mapping_;
}

Segment::Segment(pid_t pid, int64_t id, size_t bytes) {
  if (pid == getpid()) {
    const std::lock_guard<std::mutex> lock(own_mutex);
    mapping_ = own()[id].lock();
    if (mapping_ != nullptr) return;
  }
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(id);
  const int opened = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (opened < 0 && (errno == ENOENT || errno == ESRCH)) throw SegmentGone(path + " is gone");
  check_call(opened, ("open " + path).c_str());
  if (!is_segment(opened, bytes)) {
    close(opened);
    throw TransportError(
        path +
        " is not a shared segment of this user and size: run the same gpudist on every "
        "rank, as one user");
  }
  mapping_ = std::make_shared<Mapping>(opened, bytes);
  // The mapping keeps the memory alive; close the descriptor, since descriptors are limited.
  close(opened);
  mapping_->fd = -1;
}

char* Segment::data() const {
  return mapping_ != nullptr ? mapping_->data : nullptr;
}

int64_t Segment::id() const {
  return mapping_->fd >= 0 ? mapping_->fd : reinterpret_cast<int64_t>(mapping_->data);
}

}  // namespace gpudist
