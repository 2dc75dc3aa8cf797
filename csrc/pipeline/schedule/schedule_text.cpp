#include <brimful/pipeline/schedule_text.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>

namespace brimful::pipeline {
namespace {
constexpr std::array<std::string_view, 8> kNames{"F",      "B",      "I",      "W",
                                                 "SEND_F", "RECV_F", "SEND_B", "RECV_B"};
constexpr std::array<std::string_view, 6> kIgnored{
    "UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD", "WAIT_SEND_F", "WAIT_SEND_B"};
constexpr std::string_view kBlanks = " \t\r\n";
constexpr std::string_view kRemedy =
    "; write a stage, one of F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B, and a microbatch";
constexpr int kLargest = 1'000'000;  // more is a mistake, not a stage

std::string_view trimmed(std::string_view text) {
  const auto begin = text.find_first_not_of(kBlanks);
  return begin == text.npos ? "" : text.substr(begin, text.find_last_not_of(kBlanks) - begin + 1);
}

/// The number that all of `text` is.
std::optional<int> number(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  return whole && value >= 0 && value < kLargest ? std::optional(value) : std::nullopt;
}

/// `text` cut into its stage, kind and microbatch; no stage where there is none.
struct Parts {
  explicit Parts(std::string_view text) {
    const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
    const auto begin = std::find_if_not(text.begin(), text.end(), is_digit);
    const auto end = std::find_if_not(text.rbegin(), text.rend(), is_digit).base();
    if (begin < end) {
      stage = number({text.begin(), begin});
      kind = {begin, end};
      microbatch = number({end, text.end()});
    }
  }
  std::optional<int> stage;
  std::string_view kind;
  std::optional<int> microbatch;
};

std::optional<Action> read_action(std::string_view text) {
  const Parts parts(text);
  const auto kind = std::find(kNames.begin(), kNames.end(), parts.kind);
  if (!parts.stage || !parts.microbatch || kind == kNames.end()) {
    return std::nullopt;
  }
  return Action{*parts.stage, static_cast<ActionKind>(kind - kNames.begin()), *parts.microbatch};
}

/// Calls `take` for each part of `text` between separators.
template <typename Take>
void for_each_part(std::string_view text, char separator, const Take& take) {
  for (size_t begin = 0; begin <= text.size();) {
    const auto end = std::min(text.find(separator, begin), text.size());
    take(text.substr(begin, end - begin));
    begin = end + 1;
  }
}

/// Reads cells into a schedule and knows where it is, for what it throws.
class CsvReader {
 public:
  explicit CsvReader(Schedule& schedule) : schedule_(schedule) {}

  void read(std::string_view text) {
    text = text.substr(0, text.find_last_not_of(" \t\r\n,") + 1);
    for_each_part(text, '\n', [&](std::string_view line) {
      schedule_.ranks.emplace_back();
      cell_ = 0;
      for_each_part(line, ',', [&](std::string_view cell) {
        ++cell_;
        read_cell(trimmed(cell));
      });
    });
  }

 private:
  void read_cell(std::string_view cell) {
    if (cell.size() >= 2 && cell.front() == '"' && cell.back() == '"') {
      cell = trimmed(cell.substr(1, cell.size() - 2));
    }
    if (cell.empty()) {
      return;
    }
    if (cell.front() != '(') {
      read_one(cell);
      return;
    }
    const auto end = cell.find(')');
    check(end != cell.npos && trimmed(cell.substr(end + 1)) == "OVERLAP_F_B", cell);
    for_each_part(cell.substr(1, end - 1), ';',
                  [&](std::string_view part) { read_one(trimmed(part)); });
  }

  void read_one(std::string_view text) {
    if (const auto action = read_action(text)) {
      schedule_.ranks.back().push_back(*action);
      schedule_.stages = std::max(schedule_.stages, action->stage + 1);
      schedule_.microbatches = std::max(schedule_.microbatches, action->microbatch + 1);
      return;
    }
    const Parts parts(text);
    check(parts.stage && std::count(kIgnored.begin(), kIgnored.end(), parts.kind) > 0, text);
    ++schedule_.ignored;
  }

  void check(bool readable, std::string_view text) const {
    TORCH_CHECK_VALUE(readable, "a cell holds no action (line: ", schedule_.ranks.size(),
                      ", cell: ", cell_, ", text: '", text, "')", kRemedy);
  }

  Schedule& schedule_;
  int cell_ = 0;
};
}  // namespace

std::string to_string(const Action& action) {
  return std::to_string(action.stage) + std::string(kNames[static_cast<size_t>(action.kind)]) +
         std::to_string(action.microbatch);
}

Action parse_action(std::string_view text) {
  const auto action = read_action(trimmed(text));
  TORCH_CHECK_VALUE(action, "this is no action (text: '", text, "')", kRemedy);
  return *action;
}

std::string to_csv(const Schedule& schedule) {
  std::string text;
  for (const auto& actions : schedule.ranks) {
    for (size_t i = 0; i < actions.size(); ++i) {
      text += (i == 0 ? "" : ",") + to_string(actions[i]);
    }
    text += '\n';
  }
  return text;
}

Schedule from_csv(std::string_view text, std::string name) {
  Schedule schedule;
  schedule.name = std::move(name);
  CsvReader(schedule).read(text);
  TORCH_CHECK_VALUE(schedule.stages > 0, "the text holds no action (schedule: ", schedule.name,
                    "); write a line a rank, its actions separated by commas");
  return schedule;
}

}  // namespace brimful::pipeline
