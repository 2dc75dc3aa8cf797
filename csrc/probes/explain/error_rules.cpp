#include "probes/explain/error_rules.h"
#include <algorithm>
#include <array>
#include "probes/explain/parts.h"

namespace brimful::probes {
namespace {

constexpr const char* kSeeOtherRanks =
    "look at the other ranks' output: the first error there is the cause, this one follows from it";
constexpr const char* kLostRank =
    "NCCL lost the connection to another rank: its process ended, or the network failed";
constexpr const char* kManyFiles =
    "the limit of open files is reached: each tensor that workers share takes one";
constexpr const char* kAllowMoreFiles =
    "raise it (ulimit -n 65536), or torch.multiprocessing.set_sharing_strategy('file_system')";
constexpr const char* kSharedFileFull =
    "a tensor for another process did not fit into /dev/shm: it is memory, and containers get 64 "
    "MiB of it";
constexpr const char* kGiveSharedMemory =
    "start the container with --ipc=host or --shm-size=8g; or fewer num_workers, a smaller "
    "prefetch_factor, or torch.multiprocessing.set_sharing_strategy('file_system')";

constexpr const char* kNoCacheBlocks =
    "vLLM found no room for its KV cache: gpu_memory_utilization is the share of the device that "
    "weights, activations and cache may take together, with what other processes hold";
constexpr const char* kGiveCacheBlocks =
    "end what else is on the device (`brimful top` lists it), then a higher "
    "gpu_memory_utilization; a smaller max_model_len, max_num_seqs or max_num_batched_tokens; "
    "weights of fewer bits, or more devices (tensor_parallel_size)";
constexpr const char* kJaxShort =
    "XLA found no room on the device: JAX takes most of it when it starts";
constexpr const char* kGiveJaxRoom =
    "a smaller batch, fewer bytes a parameter, or more devices; where another program is on the "
    "device, XLA_PYTHON_CLIENT_PREALLOCATE=false or a smaller XLA_PYTHON_CLIENT_MEM_FRACTION";

// As torch 2.11 to 2.15 and the libraries below it say it. What is particular stands before what is general.
constexpr std::array kRules{
    ErrorRule{
        "Watchdog caught collective operation timeout", "", "collective_timeout", false,
        "a collective did not end in time: some rank did not come to it, or came with another "
        "shape, and the others waited",
        "find the rank that is missing: an error or an OOM that it caught, uneven data, a branch "
        "that only some ranks take, or a slow save of a checkpoint; a longer timeout only helps "
        "a slow one"},
    ErrorRule{"Timed out waiting", "operation to complete", "collective_timeout", false,
              "gloo waited for another rank until its timeout",
              "find the rank that did not come to this collective, or died"},
    ErrorRule{"wait timeout after", "keys:", "collective_timeout", false,
              "ranks did not all meet at the store in time",
              "check that all ranks were started, with the same MASTER_ADDR, MASTER_PORT and "
              "WORLD_SIZE, and that the port is open between the hosts"},
    ErrorRule{"ncclRemoteError", "", "peer_lost", false, kLostRank, kSeeOtherRanks},
    ErrorRule{"remote process exited or there was a network error", "", "peer_lost", false,
              kLostRank, kSeeOtherRanks},
    ErrorRule{"Connection closed by peer", "", "peer_lost", false,
              "another rank's process ended or left the group while this one waited for it",
              kSeeOtherRanks},
    ErrorRule{"gloo", "Connection reset by peer", "peer_lost", false,
              "another rank's process ended or left the group while this one waited for it",
              kSeeOtherRanks},
    ErrorRule{"ncclInvalidUsage", "", "collective", false,
              "NCCL was used wrongly: two ranks on one GPU, or calls that differ between ranks",
              "give each rank its own device (torch.cuda.set_device(local_rank)); NCCL_DEBUG=INFO "
              "says more"},
    ErrorRule{"Duplicate GPU detected", "", "collective", false,
              "two ranks of one NCCL group use the same GPU",
              "give each rank its own device: torch.cuda.set_device(local_rank)"},
    ErrorRule{"No space left on device", "/dev/shm", "shared_memory", true,
              "/dev/shm is full: it is memory, and containers get 64 MiB of it",
              "start the container with --ipc=host or --shm-size=8g, or use fewer workers"},
    ErrorRule{"No space left on device", "</torch_", "shared_memory", true, kSharedFileFull,
              kGiveSharedMemory},
    ErrorRule{
        "[Errno 12]", "", "out_of_memory", true,
        "the operating system gave no memory for a process that was to be forked, a thread or "
        "a mapping",
        "start fewer workers, and start them before this process has grown; see what RLIMIT_AS "
        "(ulimit -v), the cgroup and vm.overcommit_memory allow"},
    ErrorRule{
        "NVML_SUCCESS == ", "CUDACachingAllocator", "hidden_out_of_memory", true,
        "torch's allocator found no memory on the device, and NVML did not answer when the "
        "error was to say how much is in use",
        "a smaller batch, or a brimful.BatchSizer, which splits it; `brimful doctor` says what "
        "is wrong with NVML"},
    ErrorRule{
        "in pin memory thread", "out of memory", "hidden_out_of_memory", true,
        "the DataLoader's thread found no pinned memory for a batch: it is memory of the host, and "
        "a first use of the device by that thread needs room on the device too",
        "pin_memory=False, or fewer pinned batches: a smaller prefetch_factor or fewer "
        "num_workers; leave room on the device that is named"},
    ErrorRule{"No available memory for the cache blocks", "", "out_of_memory", true, kNoCacheBlocks,
              kGiveCacheBlocks},
    ErrorRule{"Free memory on device", "is less than desired GPU memory utilization",
              "out_of_memory", true,
              "others hold so much of the device that vLLM's share (gpu_memory_utilization) is not "
              "free",
              "end what else is on the device (`brimful top` lists it), or a smaller "
              "gpu_memory_utilization"},
    ErrorRule{
        "Some modules are dispatched on the CPU or the disk", "", "out_of_memory", true,
        "the quantized model does not fit the devices, so that device_map put a part of it "
        "on the CPU or a disk, where it cannot run",
        "end what else is on the devices (`brimful top` lists it); more devices, or weights of "
        "fewer bits"},
    ErrorRule{"RESOURCE_EXHAUSTED", "ut of memory", "out_of_memory", true, kJaxShort, kGiveJaxRoom},
    ErrorRule{"RESOURCE_EXHAUSTED", "Failed to allocate request", "out_of_memory", true, kJaxShort,
              kGiveJaxRoom},
    ErrorRule{
        "CUDA error: invalid configuration argument", "", "kernel_limit", false,
        "a kernel was to run over more blocks than a grid has (65,535 in its second and third "
        "dimension), as a rule of a batch with more rows than that, or rows times heads; or over "
        "an empty tensor",
        "a smaller batch; BatchSizer(piece_rows=) keeps the batch and runs it in pieces of at most "
        "that many rows"},
    ErrorRule{"ncclSystemError", "", "collective", false,
              "a call of the operating system failed inside NCCL: no route between the hosts, a "
              "network interface of the wrong name, or no shared memory left",
              "run with NCCL_DEBUG=WARN to see which; set NCCL_SOCKET_IFNAME to the interface that "
              "joins the hosts; in containers pass --shm-size or --ipc=host"},
    ErrorRule{"unhandled system error", "NCCL", "collective", false,
              "a call of the operating system failed inside NCCL: no route between the hosts, a "
              "network interface of the wrong name, or no shared memory left",
              "run with NCCL_DEBUG=WARN to see which; set NCCL_SOCKET_IFNAME to the interface that "
              "joins the hosts; in containers pass --shm-size or --ipc=host"},
    ErrorRule{
        "DataLoader worker", "Bus error", "shared_memory", true,
        "a DataLoader worker wrote a batch into /dev/shm, and it was full: it is memory, and "
        "containers get 64 MiB of it",
        "start the container with --ipc=host or --shm-size=8g; or fewer num_workers, a smaller "
        "prefetch_factor, or torch.multiprocessing.set_sharing_strategy('file_system')"},
    ErrorRule{"Unexpected bus error encountered in worker", "", "shared_memory", true,
              "a DataLoader worker wrote a batch into /dev/shm, and it was full",
              "start the container with --ipc=host or --shm-size=8g; or fewer num_workers"},
    ErrorRule{"DataLoader worker", "killed by signal: Killed", "worker_killed", std::nullopt,
              "a DataLoader worker was killed from outside (SIGKILL): as a rule by the kernel, for "
              "want of host memory",
              "use fewer num_workers, a smaller prefetch_factor, or arrays instead of lists of "
              "Python objects in the dataset, whose pages each worker ends up copying; dmesg and "
              "memory.events of the cgroup say whether it was memory"},
    ErrorRule{
        "DataLoader worker", "Segmentation fault", "worker_failed", false,
        "a library crashed in a DataLoader worker",
        "run with num_workers=0 and `python -X faulthandler` to see where; libraries that start "
        "threads (OpenCV, say) may not survive a fork: try multiprocessing_context='spawn'"},
    ErrorRule{
        "DataLoader worker", "exited unexpectedly", "worker_failed", std::nullopt,
        "a DataLoader worker ended without an error message: it was killed, or a library in it "
        "ended the "
        "process",
        "run with num_workers=0 to see an error of the dataset; dmesg says whether the kernel "
        "killed it for want of memory"},
    ErrorRule{
        "Signal 9 (SIGKILL)", "", "killed", std::nullopt,
        "the process was killed from outside (SIGKILL): often by the kernel, for want of host "
        "memory, or by the scheduler",
        "see dmesg or memory.events of the cgroup; brimful.memory.set_limit('cpu', 'auto') turns "
        "such a kill into an exception"},
    ErrorRule{"terminated with signal SIGKILL", "", "killed", std::nullopt,
              "a process was killed from outside (SIGKILL): often by the kernel, for want of host "
              "memory, or by the scheduler",
              "see dmesg or memory.events of the cgroup; brimful.memory.set_limit('cpu', 'auto') "
              "turns such a kill into an exception"},
    ErrorRule{"Cannot re-initialize CUDA in forked subprocess", "", "cuda_in_fork", false,
              "CUDA was used before this process was forked, or in a DataLoader worker",
              "keep CUDA out of the dataset, or use multiprocessing_context='spawn'"},
    ErrorRule{"Too many open files", "", "open_files", false, kManyFiles, kAllowMoreFiles},
    ErrorRule{"received 0 items of ancdata", "", "open_files", false, kManyFiles, kAllowMoreFiles},
    ErrorRule{"terminate called without an active exception", "", "ended_in_a_thread", false,
              "the process ended while one of its threads was still at work: in a program that "
              "ends right after a backward, mostly autograd's thread of a GPU, which drops the "
              "graph while Python ends; or a C++ thread that was not joined",
              "what the program did before has its result; use Python 3.14, where such "
              "a thread does no harm, or flush what is open and end the program by os._exit(0)"},
};

constexpr const char* kCompareIndices =
    "compare the indices with the size of what they index (labels with the number of classes, "
    "tokens "
    "with the embedding's rows)";
constexpr const char* kBetweenInputs =
    "binary_cross_entropy got an input that is not between 0 and 1 (NaN is not)";
constexpr const char* kUseLogits =
    "give logits to binary_cross_entropy_with_logits, or put a sigmoid before the loss; look for "
    "NaN "
    "(torch.autograd.set_detect_anomaly)";
constexpr const char* kBetweenTargets =
    "binary_cross_entropy got a target that is not between 0 and 1";
constexpr const char* kScaleTargets =
    "bring the targets between 0 and 1: labels of several classes belong into cross_entropy";
constexpr const char* kUseSoftmax =
    "look for NaN and infinity in the logits before the softmax; give weights that are at least 0 "
    "and not all 0";

constexpr std::array kAsserts{
    AssertRule{"srcIndex < srcSelectDimSize", "index",
               "an index of embedding or index_select is not below the number of rows",
               kCompareIndices},
    AssertRule{"ind >=0 && ind < ind_dim_size", "index",
               "an index of index_select, gather or take is out of range", kCompareIndices},
    AssertRule{"idx_dim >= 0 && idx_dim < index_size", "index",
               "an index of gather or scatter is out of range", kCompareIndices},
    AssertRule{"index >= -sizes[i] && index < sizes[i]", "index",
               "an index in square brackets is out of range", kCompareIndices},
    AssertRule{"-sizes[i] <= index && index < sizes[i]", "index",
               "an index in square brackets is out of range", kCompareIndices},
    AssertRule{
        "t >= 0 && t < n_classes", "index",
        "a label of nll_loss or cross_entropy is not below the number of classes, or negative",
        kCompareIndices},
    AssertRule{
        "cur_target >= 0 && cur_target < n_classes", "index",
        "a label of nll_loss or cross_entropy is not below the number of classes, or negative",
        kCompareIndices},
    AssertRule{"input_val >= zero && input_val <= one", "value", kBetweenInputs, kUseLogits},
    AssertRule{"*input >= 0. && *input <= 1.", "value", kBetweenInputs, kUseLogits},
    AssertRule{"all elements of input should be between 0 and 1", "value", kBetweenInputs,
               kUseLogits},
    AssertRule{"target_val >= zero && target_val <= one", "value", kBetweenTargets, kScaleTargets},
    AssertRule{"all elements of target should be between 0 and 1", "value", kBetweenTargets,
               kScaleTargets},
    AssertRule{"probability tensor contains either `inf`, `nan` or element < 0", "value",
               "multinomial got probabilities that are negative, infinite or NaN", kUseSoftmax},
    AssertRule{"invalid multinomial distribution (sum of probabilities <= 0)", "value",
               "multinomial got probabilities that are all 0", kUseSoftmax},
};

// What torch says of a program's own mistakes. Memory has no part in them.
constexpr std::array<std::string_view, 26> kMistakes{
    "shapes cannot be multiplied",
    "must have the same dtype",
    "expected scalar type",
    "should be the same",
    "must match the size of tensor",
    "Sizes of tensors must match",
    "stack expects each tensor to be equal size",
    "is invalid for input of size",
    "size mismatch",
    "view size is not compatible",
    "to match target batch_size",
    "to have the same number of channels",
    "Expected more than 1 value per channel",
    "Expected all tensors to be on the same device",
    "modified by an inplace operation",
    "is being used in an in-place operation",
    "backward through the graph a second time",
    "does not require grad",
    "grad can be implicitly created only for scalar outputs",
    "Error(s) in loading state_dict",
    "no kernel image is available",
    "not implemented for '",
    "invalid device ordinal",
    "No CUDA GPUs are available",
    "static TLS block",
    "Torch not compiled with CUDA enabled",
};

// Ray names its error as torch does, and means the host.
constexpr ErrorRule kKilledByRay{
    "due to the node running low on memory",
    "",
    "killed",
    true,
    "Ray's monitor ended this task because the host's memory (the node's, not a device's) was "
    "nearly full",
    "fewer tasks at a time on that node (num_cpus= of a task), fewer DataLoader workers, or a host "
    "with more memory; RAY_memory_usage_threshold moves the limit"};

}  // namespace

const ErrorRule* rule_before_types(std::string_view text) {
  return contains(text, kKilledByRay.part) ? &kKilledByRay : nullptr;
}

const ErrorRule* rule_for(std::string_view text) {
  const auto* found = std::find_if(kRules.begin(), kRules.end(), [&](const ErrorRule& rule) {
    return contains(text, rule.part) && contains(text, rule.more);
  });
  return found == kRules.end() ? nullptr : found;
}

bool is_mistake(std::string_view text) {
  return std::any_of(kMistakes.begin(), kMistakes.end(),
                     [&](std::string_view part) { return contains(text, part); });
}

const AssertRule* assertion_in(std::string_view text) {
  const auto* found = std::find_if(kAsserts.begin(), kAsserts.end(), [&](const AssertRule& rule) {
    return contains(text, rule.assertion);
  });
  return found == kAsserts.end() ? nullptr : found;
}

}  // namespace brimful::probes
