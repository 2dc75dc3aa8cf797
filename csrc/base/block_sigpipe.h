#pragma once
#include <pthread.h>
#include <signal.h>

namespace brimful {

/// Threads that are started while it lives never get SIGPIPE. gloo writes to sockets without MSG_NOSIGNAL: where a peer has
/// gone, the signal would end a program that does not ignore it (Python does), before gloo can report the error.
class BlockSigpipe {
 public:
  BlockSigpipe() {
    sigset_t pipe;
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe, &before_);
  }
  ~BlockSigpipe() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockSigpipe(const BlockSigpipe&) = delete;
  BlockSigpipe& operator=(const BlockSigpipe&) = delete;

 private:
  sigset_t before_;
};

}  // namespace brimful
