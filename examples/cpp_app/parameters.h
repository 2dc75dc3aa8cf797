#pragma once
// Parameters in a file that Python's torch.save({name: tensor}) writes and torch.load reads.
#include <torch/torch.h>

#include <fstream>
#include <iterator>
#include <string>
#include <vector>

inline void load_parameters(torch::nn::Module& module, const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, "cannot read the parameters (file: ", path, ")");
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  const auto values = torch::pickle_load(bytes).toGenericDict();
  const torch::NoGradGuard no_grad;
  for (auto& parameter : module.named_parameters()) {
    parameter.value().copy_(values.at(parameter.key()).toTensor());
  }
}

inline void save_parameters(const torch::nn::Module& module, const std::string& path) {
  c10::Dict<std::string, torch::Tensor> values;
  for (const auto& parameter : module.named_parameters()) {
    values.insert(parameter.key(), parameter.value().detach());
  }
  const auto bytes = torch::pickle_save(values);
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  TORCH_CHECK(file, "cannot write the parameters (file: ", path, ")");
}
