// Waiting for a collective of a device: what the backend is asked meanwhile.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include "reducer/device_wait.h"
#include "support/catch.h"

#include <chrono>
#include <string>

namespace test_device_wait {

using namespace brimful;

namespace {

const c10::Device kDevice(c10::DeviceType::CUDA, 0);

/// Of two ranks. As long as it cannot say it throws, as torch's do that do not know the question.
class Asked : public c10d::Backend {
 public:
  Asked() : Backend(0, 2) {}
  const std::string getBackendName() const override { return "asked"; }
  c10d::ErrorType getError() override {
    ++errors_asked;
    TORCH_CHECK(tells, "this backend does not support getError");
    return error;
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    ++options_asked;
    TORCH_CHECK(tells, "this backend does not implement getBackendOptions");
    return c10::make_intrusive<Options>("asked", std::chrono::milliseconds(1000));
  }

  bool tells = true;
  c10d::ErrorType error = c10d::ErrorType::SUCCESS;
  int errors_asked = 0;
  int options_asked = 0;
};
class Mute : public Asked {};
class Forgetful : public Asked {};

class AfterLooks : public c10d::Work {
 public:
  bool isCompleted() override { return --looks_left_ < 0; }
  bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }

 private:
  int looks_left_ = 5;
};

template <typename Kind>
struct OnDevice {
  c10::intrusive_ptr<Kind> backend = c10::make_intrusive<Kind>();
  Group group = c10::make_intrusive<c10d::ProcessGroup>(0, 2);

  OnDevice() {
    group->setBackend(kDevice.type(), c10d::ProcessGroup::BackendType::CUSTOM, backend);
  }
  void wait() {
    AfterLooks work;
    wait_on_device(group, kDevice, work, std::chrono::steady_clock::now(), [] {});
  }
};

}  // namespace

TEST_CASE("a backend that cannot say its error is asked once, and one that can at every look",
          "[reducer]") {
  OnDevice<Mute> mute;
  mute.backend->tells = false;
  for (int i = 0; i < 3; ++i) {
    mute.wait();
    require_no_error(mute.group, kDevice);
  }
  CHECK(mute.backend->errors_asked == 1);
  CHECK(mute.backend->options_asked == 1);

  OnDevice<Asked> asked;
  asked.wait();
  CHECK(asked.backend->errors_asked == 6);
  asked.backend->error = c10d::ErrorType::COMM_ERROR;
  CHECK_THROWS_AS(asked.wait(), std::runtime_error);
  CHECK_THROWS_AS(require_no_error(asked.group, kDevice), std::runtime_error);
}

TEST_CASE("a backend that has said its error and then throws is asked again", "[reducer]") {
  OnDevice<Forgetful> forgetful;
  forgetful.wait();
  forgetful.backend->tells = false;
  CHECK_NOTHROW(forgetful.wait());
  forgetful.backend->tells = true;
  forgetful.backend->error = c10d::ErrorType::TIMEOUT;
  CHECK_THROWS_AS(forgetful.wait(), std::runtime_error);
}

}  // namespace test_device_wait
