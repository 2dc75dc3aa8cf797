// How ranks, processes or threads of this machine, find each other: sockets whose names hold the communicator's id.
#include <cuda_runtime_api.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <thread>
#include <utility>

#include "communicator.h"

namespace sim_nccl {
namespace {

constexpr auto kPatience = std::chrono::seconds(60);

std::string text_of(const ncclUniqueId& id) {
  return {id.internal, strnlen(id.internal, 32)};
}

sockaddr_un address(const std::string& id, int rank) {
  sockaddr_un address{AF_UNIX, {}};  // abstract: its first character is 0
  std::snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "sim_nccl_%s_%d", id.c_str(),
                rank);
  return address;
}

int new_socket() {
  return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
}

int listen_as(const std::string& id, int rank, int size) {
  const int fd = new_socket();
  const sockaddr_un own = address(id, rank);
  if (bind(fd, reinterpret_cast<const sockaddr*>(&own), sizeof own) != 0 || listen(fd, size) != 0) {
    close(fd);
    return -1;
  }
  return fd;
}

/// The peer may not listen yet.
int connect_to(const std::string& id, int peer) {
  const int fd = new_socket();
  const sockaddr_un theirs = address(id, peer);
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (connect(fd, reinterpret_cast<const sockaddr*>(&theirs), sizeof theirs) != 0) {
    if (std::chrono::steady_clock::now() > deadline) {
      close(fd);
      return -1;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return fd;
}

}  // namespace

ncclResult_t join(ncclComm_t* out, int size, const std::string& id, int rank) {
  auto comm = std::unique_ptr<ncclComm>(new ncclComm{rank, size, id});
  cudaGetDevice(&comm->device);
  auto& wires = comm->links->wires;
  wires.resize(size);
  int own[2] = {-1, -1};  // what a rank sends itself, as for torch's all_to_all
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, own) != 0) {
    return ncclSystemError;
  }
  wires[rank].in = own[0];
  wires[rank].out = own[1];
  const int listener = listen_as(id, rank, size);
  if (listener < 0) {
    return ncclSystemError;
  }
  bool all = true;
  for (int peer = 0; peer < size && all; ++peer) {
    if (peer != rank) {
      const int fd = wires[peer].out = connect_to(id, peer);
      all = fd >= 0 && send(fd, &rank, sizeof rank, MSG_NOSIGNAL) == sizeof rank;
    }
  }
  for (int i = 1; i < size && all; ++i) {
    int peer = -1;
    const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    all = recv(fd, &peer, sizeof peer, MSG_WAITALL) == sizeof peer;
    if (all) {
      wires[peer].in = fd;
    }
  }
  close(listener);
  if (!all) {
    return ncclRemoteError;
  }
  *out = comm.release();
  return ncclSuccess;
}

}  // namespace sim_nccl

extern "C" {

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  uint32_t random[4] = {};
  std::ifstream("/dev/urandom").read(reinterpret_cast<char*>(random), sizeof random);
  std::memset(id, 0, sizeof *id);
  std::snprintf(id->internal, sizeof id->internal, "%08x%08x%08x%07x", random[0], random[1],
                random[2], random[3] >> 4);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  return sim_nccl::join(comm, size, sim_nccl::text_of(id), rank);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* /*config*/) {
  return sim_nccl::join(comm, size, sim_nccl::text_of(id), rank);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int size, int rank, int /*count*/,
                                      ncclUniqueId* ids, ncclConfig_t* /*config*/) {
  return sim_nccl::join(comm, size, sim_nccl::text_of(ids[0]), rank);
}

ncclResult_t ncclCommInitAll(ncclComm_t* all, int size, const int* devices) {
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  std::vector<std::thread> threads;
  for (int i = 0; i < size; ++i) {
    threads.emplace_back([=] {
      cudaSetDevice(devices == nullptr ? i : devices[i]);
      sim_nccl::join(all + i, size, sim_nccl::text_of(id), i);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return ncclSuccess;
}

// The members of each colour, in the order of their keys and ranks, join under a name that all of them can make.
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* out,
                           ncclConfig_t* /*config*/) {
  struct Want {
    int color, key;
  };
  std::vector<Want> wants(comm->size);
  wants[comm->rank] = {color, key};
  std::vector<sim_nccl::Part> sends;
  std::vector<sim_nccl::Part> receives;
  for (int peer = 0; peer < comm->size; ++peer) {
    if (peer != comm->rank) {
      sends.push_back({peer, reinterpret_cast<char*>(&wants[comm->rank]), sizeof(Want)});
      receives.push_back({peer, reinterpret_cast<char*>(&wants[peer]), sizeof(Want)});
    }
  }
  {
    const sim_nccl::Turn turn(*comm->links, comm->links->calls++);
    sim_nccl::exchange(*comm->links, sends, receives);
  }
  ++comm->splits;
  *out = nullptr;
  if (color == NCCL_SPLIT_NOCOLOR) {
    return ncclSuccess;
  }
  std::vector<std::pair<int, int>> members;  // key, old rank
  for (int peer = 0; peer < comm->size; ++peer) {
    if (wants[peer].color == color) {
      members.emplace_back(wants[peer].key, peer);
    }
  }
  std::sort(members.begin(), members.end());
  const auto at = std::find(members.begin(), members.end(), std::pair(key, comm->rank));
  const std::string name =
      comm->id + "." + std::to_string(comm->splits) + "." + std::to_string(color);
  return sim_nccl::join(out, static_cast<int>(members.size()), name,
                        static_cast<int>(at - members.begin()));
}
}
