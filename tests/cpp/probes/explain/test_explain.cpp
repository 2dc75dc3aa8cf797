#include <brimful/probes/explain.h>
#include <map>
#include <string>
#include "support/catch.h"
#include "support/scoped_env.h"

namespace test_explain {

using namespace brimful::probes;

namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr const char* kNotInitialized = "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED";

Explanation explain(const char* text, const ErrorEvidence& evidence = {}) {
  return explain_error({text, {"RuntimeError"}}, evidence);
}

ErrorEvidence free_of(int64_t bytes) {
  ErrorEvidence evidence;
  evidence.free_bytes = bytes;
  return evidence;
}

}  // namespace

TEST_CASE("A library that could not start is an OOM where memory was short", "[probes]") {
  auto out = explain(kNotInitialized, free_of(20 * kMiB));
  CHECK(out.kind == "hidden_out_of_memory");
  CHECK(out.is_memory == true);
  CHECK(out.evidence.at(0) == "free on the device before the call: 20.0 MiB");
  out = explain(kNotInitialized, free_of(20000 * kMiB));
  CHECK(out.kind == "library");
  CHECK(out.is_memory == false);
  out = explain(kNotInitialized);
  CHECK(out.kind == "library");
  CHECK_FALSE(out.is_memory.has_value());
  auto evidence = free_of(20000 * kMiB);
  evidence.workspace_bytes = 24000 * kMiB;
  CHECK(explain(kNotInitialized, evidence).is_memory == true);
  evidence.workspace_bytes = std::nullopt;
  evidence.refused = true;
  CHECK(explain(kNotInitialized, evidence).is_memory == true);
}

TEST_CASE("A library's kernel that did not run is an OOM where memory was short", "[probes]") {
  const auto* const status =
      GENERATE("CUBLAS_STATUS_EXECUTION_FAILED", "CUBLAS_STATUS_INTERNAL_ERROR",
               "CUDNN_STATUS_EXECUTION_FAILED", "CUDNN_STATUS_INTERNAL_ERROR",
               "CUSOLVER_STATUS_EXECUTION_FAILED", "CUSOLVER_STATUS_INTERNAL_ERROR",
               "CUSPARSE_STATUS_EXECUTION_FAILED", "CUSPARSE_STATUS_INTERNAL_ERROR",
               "CUFFT_EXEC_FAILED", "CUFFT_INTERNAL_ERROR");
  CAPTURE(status);
  const auto text = std::string("CUDA error: ") + status;
  CHECK(explain(text.c_str(), free_of(kMiB)).kind == "hidden_out_of_memory");
  CHECK(explain(text.c_str(), free_of(20000 * kMiB)).is_memory == false);
  const auto out = explain(text.c_str());
  CHECK(out.kind == "library");
  CHECK_FALSE(out.is_memory.has_value());
}

TEST_CASE("A batch that is too large is explained by its own first line", "[probes]") {
  const auto out = explain("the loss over all pairs does not fit, whatever the split, on rank 1");
  CHECK(out.kind == "out_of_memory");
  CHECK(out.cause.find("whatever the split, on rank 1") != std::string::npos);
}

TEST_CASE("Free memory is held against what the call needs, and the number is shown", "[probes]") {
  const char* no_engine = "GET was unable to find an engine to execute this computation";
  const char* no_handle =
      "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`";
  const auto held_against = [](const Explanation& out) { return out.evidence.at(1); };
  auto evidence = free_of(300 * kMiB);
  SECTION("a first handle, and cuBLAS' workspace by torch's default") {
    auto out = explain(no_handle, evidence);
    CHECK(out.is_memory == false);
    CHECK(held_against(out) ==
          "the call needs: 288.0 MiB (32.0 MiB workspace, torch's largest "
          "default; 256.0 MiB usual for the first handle and its kernels)");
    evidence.free_bytes = 270 * kMiB;
    CHECK(explain(no_handle, evidence).is_memory == true);
    evidence.compute_major = 9;
    CHECK(explain(no_handle, evidence).is_memory == true);
    evidence.compute_major = 8;
    out = explain(no_handle, evidence);
    CHECK(out.is_memory == false);
    CHECK_THAT(held_against(out),
               Catch::Contains("8.1 MiB workspace, torch's default for this GPU"));
  }
  SECTION("cuBLAS' workspace by the environment") {
    evidence.cublas_config = ":4096:2:16384:3";
    auto out = explain(no_handle, evidence);
    CHECK(out.is_memory == true);
    CHECK_THAT(
        held_against(out),
        Catch::Contains("312.0 MiB (56.0 MiB workspace, CUBLAS_WORKSPACE_CONFIG=:4096:2:16384:3;"));
    evidence.cublas_config = "4096";  // torch falls back too
    evidence.compute_major = 8;
    CHECK_THAT(held_against(explain(no_handle, evidence)), Catch::Contains("264.1 MiB (8.1 MiB"));
  }
  SECTION("a convolution's tensors") {
    OpRecord conv{"aten::cudnn_convolution", {}, "", false, std::nullopt, 400 * kMiB};
    OpRecord relu{"aten::relu", {}, "", false, std::nullopt, std::nullopt};
    evidence.operators = {conv, relu};
    auto out = explain(no_engine, evidence);
    CHECK(out.is_memory == true);
    CHECK(held_against(out) ==
          "the call needs: 400.0 MiB (400.0 MiB workspace, as large as the "
          "tensors of aten::cudnn_convolution)");
    evidence.operators[0].input_bytes = 100 * kMiB;
    CHECK(explain(no_engine, evidence).is_memory == false);
    CHECK(explain(kNotInitialized, evidence).is_memory == true);  // the handle as well
    CHECK(explain("CUSOLVER_STATUS_NOT_INITIALIZED", evidence).is_memory == false);
  }
  SECTION("nothing known") {
    CHECK(held_against(explain(no_engine, evidence)) ==
          "the call needs: 256.0 MiB (a usual amount: what this call needs is not "
          "known)");
  }
  SECTION("what is given comes first") {
    evidence.cublas_config = ":4096:2";
    evidence.workspace_bytes = 301 * kMiB;
    CHECK(held_against(explain(no_handle, evidence)) ==
          "the call needs: 301.0 MiB (workspace_bytes, as given)");
  }
}

TEST_CASE("The environment's workspace is evidence", "[probes]") {
  const std::map<std::string, const char*> variables{{"CUBLAS_WORKSPACE_CONFIG", ":16:8"}};
  const brimful::test::ScopedEnv scope(variables);
  CHECK(evidence_now().cublas_config == ":16:8");
}

TEST_CASE("A refusal's numbers distinguish fragmentation from want", "[probes]") {
  const char* fragmented =
      "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of "
      "which 1.20 GiB is free. Including non-PyTorch memory, this process has 77.9 GiB memory in "
      "use. Of the allocated memory 70.1 GiB is allocated by PyTorch, and 6.50 GiB is reserved by "
      "PyTorch but unallocated.";
  ErrorEvidence evidence;
  auto out = explain(fragmented, evidence);
  CHECK(out.kind == "out_of_memory");
  CHECK_THAT(out.cause, Catch::Contains("fragmented"));
  CHECK_THAT(out.remedy, Catch::Contains("expandable_segments:True"));
  evidence.allocator_settings = "expandable_segments:True";
  CHECK_THAT(explain(fragmented, evidence).remedy, Catch::Contains("expandable_segments is on"));
  out = explain("CUDA out of memory. Tried to allocate 20.00 GiB.");
  CHECK_THAT(out.cause, Catch::Contains("no room"));
  CHECK(out.evidence.at(0) == "asked for: 20.0 GiB");
  const ErrorText typed{"Unable to allocate 29.8 GiB for an array with shape (4000000000,)",
                        {"_ArrayMemoryError", "MemoryError", "Exception"}};
  CHECK(explain_error(typed).kind == "out_of_memory");
  CHECK_THAT(explain_error(typed).cause, Catch::Contains("host's memory"));
}

TEST_CASE("The text of a log names the error's class", "[probes]") {
  const auto kind_of = [](const char* text) { return explain_error({text, {}}).kind; };
  const auto memory_of = [](const char* text) { return explain_error({text, {}}).is_memory; };
  CHECK(kind_of("[rank1]: MemoryError") == "out_of_memory");
  CHECK(
      kind_of("MemoryError()\n\nThe above exception was the direct cause of:\n\nValueError: no") ==
      "out_of_memory");
  CHECK(memory_of("KeyError: 'label'") == false);
  CHECK_FALSE(memory_of("KeyError: 'label'\n\nEngineError: stopped").has_value());
  CHECK_FALSE(memory_of("a KeyError: somewhere within a sentence").has_value());
}

TEST_CASE("Another process is named where it holds more than this one", "[probes]") {
  const std::string begin = "CUDA out of memory. Tried to allocate 2.00 GiB. ";
  const std::string own =
      "Including non-PyTorch memory, this process has 7.00 GiB memory in use. "
      "Of the allocated memory 6.00 GiB is allocated by PyTorch, and 1.00 MiB is reserved";
  const auto cause_of = [](const std::string& text) { return explain(text.c_str()).cause; };
  CHECK_THAT(cause_of(begin + "Process 12 has 70.00 GiB memory in use. " + own),
             Catch::Contains("process 12 holds 70.0 GiB of this device, and this process 7.0 GiB"));
  CHECK_THAT(cause_of(begin + "Process 12 has 6.90 GiB memory in use. " + own),
             Catch::Contains("no room for this allocation"));
  CHECK_THAT(cause_of(begin + "Process 12 has 1.00 GiB memory in use."),
             Catch::Contains("no room for this allocation"));
  for (const char* odd :
       {"Process ", "Process 12", "Process 12 has ", "Process 12 has x memory in use",
        "Process x has 70.00 GiB memory in use.", "Process 12 has nan GiB memory"}) {
    CHECK_THAT(cause_of(begin + odd + own), Catch::Contains("no room for this allocation"));
  }
  const auto out = explain((begin + "Process 12 has 300.00 MiB memory in use. " + own).c_str());
  CHECK(out.evidence.at(2) == "process 12 has 300.0 MiB of the device");
}

TEST_CASE("A device-side assert is explained by the kernel's message and by the ring", "[probes]") {
  const char* bare = "CUDA error: device-side assert triggered";
  auto out = explain(bare);
  CHECK(out.kind == "device_lost");
  CHECK(out.is_memory == false);
  CHECK_THAT(out.remedy, Catch::Contains("op_ring"));
  out = explain(
      "Loss.cu:250: block: [0,0,0], thread: [0,0,0] Assertion `t >= 0 && t < n_classes` failed.\n"
      "CUDA error: device-side assert triggered");
  CHECK(out.kind == "index");
  CHECK_THAT(out.cause, Catch::Contains("label"));
  ErrorEvidence evidence;
  evidence.indices = {{"aten::embedding", "train.py:31 in forward", 0, 50257, 0, 50256}};
  evidence.operators = {
      {"aten::embedding", {"Float[50257, 768] cuda:0"}, "train.py:31", false, {}, {}}};
  out = explain(bare, evidence);
  CHECK(out.kind == "index");
  CHECK(out.cause ==
        "train.py:31 in forward: aten::embedding got index 50257, allowed are 0 to 50256");
  CHECK(out.evidence.back() ==
        "operator: aten::embedding(Float[50257, 768] cuda:0) at train.py:31");
}

TEST_CASE("A killed worker is memory where the kernel counted a kill", "[probes]") {
  const char* text = "DataLoader worker (pid 3002) is killed by signal: Killed.";
  CHECK_FALSE(explain(text).is_memory.has_value());
  ErrorEvidence evidence;
  evidence.oom_kills = 0;
  CHECK_FALSE(explain(text, evidence).is_memory.has_value());
  evidence.oom_kills = 2;
  CHECK(explain(text, evidence).is_memory == true);
  CHECK(explain(text, evidence).kind == "worker_killed");
}

TEST_CASE("Another rank's error, and one that nothing is known of, stay what they are",
          "[probes]") {
  const ErrorText other{"rank 1 ran out of memory",
                        {"RankOutOfMemory", "RankFailed", "RuntimeError"}};
  CHECK(explain_error(other).kind == "other_rank");
  CHECK(explain_error(other).is_memory == true);
  CHECK(explain_error({"step 7 failed on rank 1: a bad row", {"RankFailed"}}).is_memory == false);
  auto out = explain("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)\nmore");
  CHECK(out.kind == "other");
  CHECK(out.is_memory == false);
  CHECK(out.cause ==
        "no shortage of memory: mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)");
  for (const char* unknown : {"", "\n\n", "NCCL is a fine library", "status 7", ":", "[rank0]: "}) {
    CHECK(explain(unknown).kind == "other");
    CHECK_FALSE(explain(unknown).is_memory.has_value());
    CHECK_FALSE(explain_error({unknown, {}}).is_memory.has_value());
  }
  // Findings explain an error about indices, and no other.
  ErrorEvidence evidence;
  evidence.indices = {{"aten::embedding", "", 0, 10, 0, 9}};
  CHECK(explain("expected scalar type Float but found Half", evidence).kind == "other");
  CHECK(explain("index out of range in self", evidence).kind == "index");
}

TEST_CASE("What is measured now can be asked for anywhere", "[probes]") {
  const auto evidence = evidence_now();
  CHECK_FALSE(evidence.refused);
  CHECK_THAT(to_string(explain("CUDA out of memory. Tried to allocate 2 GiB", evidence)),
             Catch::Contains("out_of_memory (memory: yes)\n  cause:  ") &&
                 Catch::Contains("\n  - asked for: 2.0 GiB"));
}

}  // namespace test_explain
