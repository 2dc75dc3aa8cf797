#include <algorithm>
#include <cstdlib>
#include <set>

#include "sizer/by_length.h"

namespace brimful {
namespace {
constexpr int64_t kMostPieceRows = 4096;  // of a piece
constexpr int64_t kShareOfSameRoom = 32;
constexpr int64_t kMostRehearsed = 16;  // beside the longest of each batch: no law may hold
constexpr int kAnchors = 4;             // lengths that a law needs
constexpr double kWithoutForecast = 0.9;

/// The place of the row whose length is nearest to this.
int64_t place_of(const Lengths& lengths, int64_t length) {
  return std::min_element(
             lengths.begin(), lengths.end(),
             [&](auto a, auto b) { return std::abs(a - length) < std::abs(b - length); }) -
         lengths.begin();
}

/// The kind of rows of a length between the longest and the shortest, or just above; nothing where sizes do not follow it.
std::optional<RowKind> kind_of_length(const RowLengths& rows, int64_t length) {
  auto kind = rows.kind_at(0);
  const auto shortest = rows.kind_at(std::ssize(rows.lengths) - 1);
  const auto from = rows.lengths.front();
  const auto span = rows.lengths.back() - from;
  if (shortest.form != kind.form || shortest.sizes.size() != kind.sizes.size()) {
    return std::nullopt;
  }
  for (size_t i = 0; i < kind.sizes.size(); ++i) {
    const auto change = (shortest.sizes[i] - kind.sizes[i]) * (length - from);
    if (change != 0 && (span == 0 || change % span != 0)) {
      return std::nullopt;
    }
    kind.sizes[i] += change == 0 ? 0 : change / span;
  }
  return kind;
}
}  // namespace

SharedForecast LengthFits::learn(Forecasts& forecasts, const RowLengths& rows,
                                 const Rehearse& rehearse) {
  ran_out_rows_.reset();
  const auto& lengths = rows.lengths;
  const auto span = lengths.front() - lengths.back();
  std::set<int64_t> places = {0, std::ssize(lengths) - 1};
  const auto ends_are_known = [&] {
    return std::all_of(places.begin(), places.end(),
                       [&](auto place) { return forecasts.find(rows.kind_at(place)).has_value(); });
  };
  for (int i = 1; i < kAnchors - 1 && !ends_are_known(); ++i) {
    places.insert(place_of(lengths, lengths.front() - span * i / (kAnchors - 1)));
  }
  for (const auto place : places) {
    const auto kind = rows.kind_at(place);
    auto known = forecasts.find(kind);
    if (!known && place != 0 && rehearsed_ >= kMostRehearsed) {
      continue;
    }
    if (!known) {
      ++rehearsed_;
      auto rehearsal = rehearse(place);
      ran_out_rows_ = rehearsal.fits;
      known = forecasts.keep(kind, std::move(rehearsal));
      rows_.clear();
    }
    if (place == 0 && !*known) {
      return nullptr;
    }
    longest_ = place == 0 ? *known : longest_;
  }
  return longest_;
}

SharedForecast LengthFits::forecast_at(Forecasts& forecasts, const RowLengths& rows,
                                       int64_t place) const {
  const auto length = std::min(rounded_length(rows.lengths[place]), rows.lengths.front());
  if (length == rows.lengths.front()) {
    return longest_;
  }
  if (const auto kind = kind_of_length(rows, length)) {
    if (auto known = forecasts.find(*kind); known && *known) {
      return *known;
    }
  }
  const auto known = forecasts.find(rows.kind_at(place));
  return known ? *known : nullptr;
}

int64_t LengthFits::count_rows(Forecasts& forecasts, const RowLengths& rows,
                               const ForecastRoom& room, int64_t place) {
  if (const auto forecast = forecast_at(forecasts, rows, place)) {
    return room.largest_rows(forecast->second, kMostPieceRows);
  }
  // Shorter rows of as many tokens take no more, but for what each row takes at any length.
  const auto tokens = room.largest_rows(longest_->second, kMostPieceRows) * rows.lengths.front();
  return static_cast<int64_t>(kWithoutForecast * static_cast<double>(tokens)) / rows.lengths[place];
}

MostRows LengthFits::most_rows(Forecasts& forecasts, const RowLengths& rows,
                               const ForecastRoom& room, double margin) {
  const auto bytes = room.bytes();
  const auto form = rows.kind_at(0).form;
  if (form != form_ || margin != margin_ || bytes < room_bytes_ ||
      bytes > room_bytes_ + room_bytes_ / kShareOfSameRoom) {
    rows_.clear();
    form_ = form;
    margin_ = margin;
    room_bytes_ = bytes;
  }
  return [&, this](int64_t place) {
    const auto length = rounded_length(rows.lengths[place]);
    auto found = rows_.find(length);
    if (found == rows_.end()) {
      found = rows_.emplace(length, count_rows(forecasts, rows, room, place)).first;
    }
    return found->second;
  };
}

}  // namespace brimful
