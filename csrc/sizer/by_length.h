#pragma once
#include <brimful/sizer/row_lengths.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "sizer/forecast_room.h"
#include "sizer/forecasts.h"
#include "sizer/length_plan.h"
#include "sizer/piece_times.h"
#include "step/retry_policy.h"

namespace brimful {

/// How many rows of each length fit, by forecasts; kept while there is as much room.
class LengthFits {
 public:
  using Rehearse = std::function<Rehearsal(int64_t place)>;

  /// Forecasts of some lengths of these rows, rehearsed where they are not known: the longest first. Nothing where memory
  /// follows no law; `ran_out_rows` then says how many rows fitted, if memory ran out.
  SharedForecast learn(Forecasts& forecasts, const RowLengths& rows, const Rehearse& rehearse);
  std::optional<int64_t> ran_out_rows() const { return ran_out_rows_; }

  /// Of rows that learn() knows. All arguments outlive what it returns.
  MostRows most_rows(Forecasts& forecasts, const RowLengths& rows, const ForecastRoom& room,
                     double margin);
  /// Of the piece that begins at this place. Nothing: only the longest are known.
  SharedForecast forecast_at(Forecasts& forecasts, const RowLengths& rows, int64_t place) const;

 private:
  int64_t count_rows(Forecasts& forecasts, const RowLengths& rows, const ForecastRoom& room,
                     int64_t place);

  std::optional<int64_t> ran_out_rows_;
  SharedForecast longest_;
  std::string form_;
  double margin_ = 0;
  int64_t rehearsed_ = 0;
  int64_t room_bytes_ = 0;
  std::map<int64_t, int64_t> rows_;  ///< by rounded length
};

/// What a sizer knows of steps by length.
struct ByLength {
  explicit ByLength(c10::Device device) : policy({device}) {}

  RetryPolicy policy;  ///< its rows are tokens, with their padding
  PieceTimes times;
  LengthFits fits;
  bool warm = false;  ///< a step stood: the first one takes longer
};

/// Times the pieces of an attempt; on a device that runs behind its host, all of them together.
class PieceClock {
 public:
  explicit PieceClock(c10::Device device) : by_piece_(device.is_cpu()) {}

  void begin_attempt();
  void begin_piece(int64_t first, int64_t end);
  void end_piece();
  void end_attempt(PieceTimes& times, const Lengths& lengths, const std::vector<int64_t>& split);

 private:
  using Clock = std::chrono::steady_clock;
  struct Timed {
    int64_t first;
    int64_t rows;
    Clock::time_point began;
    double ms;
  };
  bool by_piece_;
  Clock::time_point began_;
  std::vector<Timed> pieces_;
};

}  // namespace brimful
