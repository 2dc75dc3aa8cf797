#pragma once
// The loop of BatchSizer::batches(); included by batch_sizer.h.
#include <brimful/export.h>
#include <brimful/sizer/batch_sizer.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <type_traits>
#include <utility>

namespace brimful {
namespace detail {
/// A loop over batches as its sizer sees it. Each step of its body informs the other ranks of the batch after that.
class BRIMFUL_API SizerLoop {
 public:
  /// The sizer outlives it, and stays where it is.
  explicit SizerLoop(BatchSizer& sizer) : sizer_(sizer) {}
  ~SizerLoop() { leave(); }
  SizerLoop(const SizerLoop&) = delete;
  SizerLoop& operator=(const SizerLoop&) = delete;

  /// Within the body of another loop if one is under way. Returns false if no rank has a batch.
  bool begin(Next next, const StepInput& first);
  void begin_body(Next next, StepInput following);
  void leave();
  /// In this body, those that failed too.
  bool has_stepped() const { return steps_ > 0; }
  /// Of the last step: there is no body after this one.
  bool at_end() const { return at_end_; }

 private:
  friend class brimful::BatchSizer;
  void announce();

  BatchSizer& sizer_;
  SizerLoop* outer_ = nullptr;
  StepInput following_;
  Next next_ = Next::unknown;
  bool is_announced_ =
      false;  ///< the sizer knows what follows, and no step has informed the others of it
  int64_t steps_ = 0;
  bool at_end_ = false;
};
}  // namespace detail

/// A loop over `loader` that looks one batch ahead, so that every rank knows which others have more. A body makes at least
/// one step, and as many as the other ranks' bodies; it may contain another loop.
template <typename Loader>
class Batches {
 public:
  using Batch = std::decay_t<decltype(*std::declval<Loader&>().begin())>;

  Batches(BatchSizer& sizer, Loader& loader) : sizer_(sizer), loader_(loader), loop_(sizer) {}
  Batches(const Batches&) = delete;
  Batches& operator=(const Batches&) = delete;
  /// If an exception leaves the loop's body between two steps, the other ranks raise in their next one.
  ~Batches() {
    if (std::uncaught_exceptions() > exceptions_ && sizer_.expects_step()) {
      sizer_.report_failure(Status::error,
                            "an exception ended its loop (see that rank's own output)");
    }
  }

  struct End {};
  class Iterator {
   public:
    explicit Iterator(Batches& loop) : loop_(loop) {}
    std::optional<Batch>& operator*() { return loop_.current_; }
    Iterator& operator++() {
      loop_.advance();
      return *this;
    }
    bool operator==(End /*end*/) const { return loop_.done_; }

   private:
    Batches& loop_;
  };

  Iterator begin() {
    position_.emplace(loader_.begin());
    std::exception_ptr error;
    try {
      fetch();
    } catch (...) {
      error = std::current_exception();
    }
    const bool any = loop_.begin(next_ || error ? Next::yes : Next::no, input());
    if (error) {
      sizer_.announce_failure(Status::error, to_string(error));
      std::rethrow_exception(error);
    }
    done_ = !any;
    if (any) {
      turn();
    }
    return Iterator(*this);
  }
  End end() const { return {}; }

 private:
  StepInput input() const { return next_ ? BatchSizer::input_of(*next_) : StepInput{}; }

  void fetch() {
    next_.reset();
    if (*position_ != loader_.end()) {
      next_.emplace(**position_);
      ++*position_;
    }
  }

  void turn() {
    current_ = std::move(next_);
    try {
      fetch();
    } catch (...) {
      sizer_.announce_failure(Status::error, to_string(std::current_exception()));
      throw;
    }
    loop_.begin_body(next_ ? Next::yes : Next::no, input());
  }

  void advance() {
    TORCH_CHECK(loop_.has_stepped(), "a batch was left out (steps: ", sizer_.steps(),
                "); call sizer.step for every batch of the loop");
    done_ = loop_.at_end();
    if (done_) {
      loop_.leave();
    } else {
      turn();
    }
  }

  BatchSizer& sizer_;
  Loader& loader_;
  std::optional<std::decay_t<decltype(std::declval<Loader&>().begin())>> position_;
  std::optional<Batch> current_;
  std::optional<Batch> next_;
  bool done_ = false;
  int exceptions_ = std::uncaught_exceptions();
  detail::SizerLoop loop_;
};

template <typename Loader>
Batches<Loader> BatchSizer::batches(Loader& loader) {
  return Batches<Loader>(*this, loader);
}

}  // namespace brimful
