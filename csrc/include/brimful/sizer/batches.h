#pragma once
// The loop of BatchSizer::batches(); included by batch_sizer.h.
#include <brimful/sizer/batch_sizer.h>

#include <exception>
#include <optional>
#include <type_traits>
#include <utility>

namespace brimful {

/// A loop over `loader` that looks one batch ahead, so that every rank knows which others have more.
template <typename Loader>
class Batches {
 public:
  using Batch = std::decay_t<decltype(*std::declval<Loader&>().begin())>;

  Batches(BatchSizer& sizer, Loader& loader) : sizer_(sizer), loader_(loader) {}
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
    const bool any = sizer_.begin_loop(next_ || error ? Next::yes : Next::no, input());
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
    sizer_.announce_next(next_ ? Next::yes : Next::no, input());
    calls_ = sizer_.calls();
  }

  void advance() {
    TORCH_CHECK(sizer_.calls() > calls_, "a batch was left out (steps: ", sizer_.steps(),
                "); call sizer.step for every batch of the loop");
    done_ = sizer_.at_end();
    if (!done_) {
      turn();
    }
  }

  BatchSizer& sizer_;
  Loader& loader_;
  std::optional<std::decay_t<decltype(std::declval<Loader&>().begin())>> position_;
  std::optional<Batch> current_;
  std::optional<Batch> next_;
  int64_t calls_ = 0;
  bool done_ = false;
  int exceptions_ = std::uncaught_exceptions();
};

template <typename Loader>
Batches<Loader> BatchSizer::batches(Loader& loader) {
  return Batches<Loader>(*this, loader);
}

}  // namespace brimful
