#pragma once
#include <brimful/sizer/pairs.h>
#include <brimful/step/control_record.h>

#include <cstdint>
#include <string>
#include <vector>

/// What ranks say of their embeddings before they gather them, and where those lie in what is gathered; plain data.
namespace brimful::pairs {

/// Of embeddings without their number of rows.
struct Form {
  struct Tower {
    std::vector<int64_t> sizes;  ///< of a row
    c10::ScalarType dtype;
    int64_t numel() const;
    int64_t bytes() const;
    bool trains() const;  ///< its values may have a gradient
    bool operator==(const Tower&) const = default;
  };
  std::vector<Tower> towers;

  /// @throws c10::ValueError unless each tower has `rows` rows, c10::TypeError if none has floating values
  static Form of(const Towers& towers, int64_t rows);
  int64_t numel() const;  ///< of a row of all towers that train
  int64_t bytes() const;  ///< of a row
  bool is_double() const;
  bool is_half() const;
  uint32_t mark() const;
  std::string text() const;
  bool operator==(const Form&) const = default;
};

/// The records that ranks have exchanged.
class Meeting {
 public:
  static ControlRecord record_of(Status verdict, int64_t rows, const Form& form, int64_t bad_rows);
  Meeting() = default;
  explicit Meeting(std::vector<ControlRecord> records);

  /// Some rank fails or repeats this attempt.
  bool is_off() const;
  /// @throws PlanMismatch on all ranks where forms differ, c10::ValueError where values are not finite, unless `may_be_nan`
  void require_alike(bool may_be_nan) const;
  int64_t rows_of(size_t rank) const;
  int64_t rows() const;  ///< of all ranks
  int ranks_with_rows() const;
  OwnRows own(int rank) const;
  /// What each rank sends: towers one behind the other, each as long as the longest rank's.
  int64_t blob_bytes() const;
  int64_t offset(const Form& form, size_t tower) const;
  int64_t numel() const;  ///< of a row of all towers that train
  bool is_double() const;
  bool is_half() const;

 private:
  int64_t longest() const;
  const ControlRecord* first() const;

  std::vector<ControlRecord> records_;
};

}  // namespace brimful::pairs
