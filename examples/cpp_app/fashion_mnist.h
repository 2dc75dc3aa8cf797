#pragma once
// Reads Fashion-MNIST from Debian's package dataset-fashion-mnist, like ../fashion_mnist.py.
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#ifdef CPP_APP_ZLIB
#include <zlib.h>
#endif

namespace fashion_mnist {

inline std::vector<uint8_t> decompress(const std::string& path) {
  std::vector<uint8_t> data;
  std::vector<uint8_t> block(1 << 20);
#ifdef CPP_APP_ZLIB
  const std::unique_ptr<gzFile_s, int (*)(gzFile)> file(gzopen(path.c_str(), "rb"), gzclose);
  for (int got = 1; file != nullptr && got > 0;) {
    got = gzread(file.get(), block.data(), static_cast<unsigned>(block.size()));
    data.insert(data.end(), block.begin(), block.begin() + std::max(got, 0));
  }
#else
  const std::string command = "gzip -dc '" + path + "'";
  const std::unique_ptr<FILE, int (*)(FILE*)> file(popen(command.c_str(), "r"), pclose);
  for (size_t got = 1; file != nullptr && got > 0;) {
    got = fread(block.data(), 1, block.size(), file.get());
    data.insert(data.end(), block.begin(), block.begin() + got);
  }
#endif
  return data;
}

/// An IDX file: two zero bytes, the type (8: bytes), the number of dimensions, the sizes, the values.
inline torch::Tensor read_idx(const std::string& path) {
  TORCH_CHECK(std::filesystem::exists(path), "Fashion-MNIST is not there (file: ", path,
              "); apt-get install dataset-fashion-mnist, or name a folder that holds its four .gz "
              "files by --data or BRIMFUL_FASHION_MNIST");
  const auto data = std::make_shared<std::vector<uint8_t>>(decompress(path));
  const size_t dimensions = data->size() < 4 ? 0 : (*data)[3];
  const size_t begin = 4 + 4 * dimensions;
  TORCH_CHECK(dimensions > 0 && data->size() >= begin, "not an IDX file (file: ", path, ")");
  std::vector<int64_t> sizes;
  for (size_t at = 4; at < begin; at += 4) {
    sizes.push_back(int64_t{(*data)[at]} << 24 | (*data)[at + 1] << 16 | (*data)[at + 2] << 8 |
                    (*data)[at + 3]);
  }
  TORCH_CHECK(static_cast<int64_t>(data->size() - begin) == c10::multiply_integers(sizes),
              "the file is cut off (file: ", path, ")");
  return torch::from_blob(
      data->data() + begin, sizes, [data](void*) {}, torch::kUInt8);
}

using Data = std::pair<torch::Tensor, torch::Tensor>;

/// Images (uint8, n x 1 x 28 x 28) and labels (int64) of "train" or "t10k".
inline Data load(const std::string& part, std::string folder) {
  if (folder.empty()) {
    const char* asked = std::getenv("BRIMFUL_FASHION_MNIST");
    folder = asked != nullptr && *asked != '\0' ? asked : "/usr/share/datasets/fashion-mnist";
  }
  const auto images = read_idx(folder + "/" + part + "-images-idx3-ubyte.gz");
  const auto labels = read_idx(folder + "/" + part + "-labels-idx1-ubyte.gz");
  return {images.unsqueeze(1), labels.to(torch::kInt64)};
}

/// A rank's part of `data`, uneven on purpose: an eighth less than the rank before has.
inline Data share(const Data& data, int64_t count, int rank, int world_size) {
  const auto parts_below = [](int ranks) {
    double sum = 0;
    for (int i = 0; i < ranks; ++i) {
      sum += std::pow(7.0 / 8.0, i);
    }
    return sum;
  };
  const auto bound = [&](int ranks) {
    return std::llrint(static_cast<double>(count) * parts_below(ranks) / parts_below(world_size));
  };
  const auto begin = bound(rank);
  const auto length = bound(rank + 1) - begin;
  return {data.first.narrow(0, begin, length), data.second.narrow(0, begin, length)};
}

/// The batches of one pass, in order: views, no copies.
inline std::vector<Data> batches(const Data& data, int64_t rows) {
  const auto images = data.first.split(rows);
  const auto labels = data.second.split(rows);
  std::vector<Data> batches;
  for (size_t i = 0; i < images.size(); ++i) {
    batches.emplace_back(images[i], labels[i]);
  }
  return batches;
}

}  // namespace fashion_mnist
