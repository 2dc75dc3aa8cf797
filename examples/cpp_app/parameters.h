#pragma once
// Parameters in a file that Python reads and writes too: dict(torch.load(path)), torch.save(pairs, path).
#include <torch/torch.h>

#include <fstream>
#include <iterator>
#include <string>
#include <vector>

inline void load_parameters(torch::nn::Module& module, const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, "cannot read the parameters (file: ", path, ")");
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  const auto pairs = torch::pickle_load(bytes).toTuple();
  auto parameters = module.named_parameters();
  const torch::NoGradGuard no_grad;
  for (const auto& pair : pairs->elements()) {
    const auto& name_and_value = pair.toTupleRef().elements();
    parameters[name_and_value[0].toStringRef()].copy_(name_and_value[1].toTensor());
  }
}

inline void save_parameters(const torch::nn::Module& module, const std::string& path) {
  std::vector<c10::IValue> pairs;  // in tuples: torch.load refuses a C++ dict's type tag
  for (const auto& parameter : module.named_parameters()) {
    pairs.emplace_back(std::make_tuple(parameter.key(), parameter.value().detach()));
  }
  const auto bytes = torch::pickle_save(c10::ivalue::Tuple::create(std::move(pairs)));
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  TORCH_CHECK(file, "cannot write the parameters (file: ", path, ")");
}
