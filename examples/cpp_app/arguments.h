#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>

/// The options of ../train_fashion_mnist.py, and --initial.
struct Arguments {
  int64_t epochs = 5;
  int64_t batch = 512;
  int64_t samples = 60000;
  int64_t budget_mib = 32;
  int64_t fault_rank = 1;
  std::string data;          ///< folder
  std::string initial_file;  ///< file with the parameters to start from
  std::string final_file;    ///< file for the parameters after training
};

inline Arguments parse(int argc, char** argv) {
  Arguments args;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--no-fault") {
      args.fault_rank = -1;
      continue;
    }
    if (++i == argc) {
      throw std::invalid_argument("an option has no value (name: " + name + ")");
    }
    const std::string value = argv[i];
    const auto number = [&] { return std::stoll(value); };
    if (name == "--epochs") {
      args.epochs = number();
    } else if (name == "--batch") {
      args.batch = number();
    } else if (name == "--samples") {
      args.samples = number();
    } else if (name == "--budget-mib") {
      args.budget_mib = number();
    } else if (name == "--fault-rank") {
      args.fault_rank = number();
    } else if (name == "--data") {
      args.data = value;
    } else if (name == "--initial") {
      args.initial_file = value;
    } else if (name == "--save-final") {
      args.final_file = value;
    } else {
      throw std::invalid_argument("unknown option (name: " + name + ")");
    }
  }
  return args;
}
