// Recurrent nets of cuDNN without arithmetic: how their weights lie, and what they need beside them.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "descriptor.h"
#include "tensor.h"
#include "workspace.h"

namespace {

using sim::kCudnnSuccess;

enum { kLstm = 2, kGru = 3 };
enum { kNoBias = 0, kSingleInputBias = 1, kDoubleBias = 2, kSingleRecurrentBias = 3 };

struct Net {
  int mode, bias, bidirectional, type, input, hidden, projection, layers;

  int gates() const { return mode == kLstm ? 4 : mode == kGru ? 3 : 1; }
  int directions() const { return bidirectional != 0 ? 2 : 1; }
  int pseudo_layers() const { return layers * directions(); }
  bool projects() const { return projection > 0 && projection < hidden; }
  int output() const { return projects() ? projection : hidden; }
  int64_t input_of(int pseudo_layer) const {
    return pseudo_layer < directions() ? input : int64_t{output()} * directions();
  }
  int64_t matrices_of(int pseudo_layer) const {
    const int64_t projected = projects() ? int64_t{projection} * hidden : 0;
    return int64_t{gates()} * hidden * (input_of(pseudo_layer) + output()) + projected;
  }
  int biases() const { return bias == kNoBias ? 0 : bias == kDoubleBias ? 2 : 1; }
  /// Where the matrices of a layer begin, in numbers; those of all layers lie before the biases.
  int64_t before(int pseudo_layer) const {
    int64_t sum = 0;
    for (int k = 0; k < pseudo_layer; ++k) {
      sum += matrices_of(k);
    }
    return sum;
  }
  int64_t biases_before(int pseudo_layer) const {
    return int64_t{pseudo_layer} * gates() * hidden * biases();
  }
  int64_t bytes_of_a_number() const { return sim::bytes_of(type); }
};

struct Batch {
  int longest, rows, width;
};

/// The most that it may take, from the only recorded net: some times its gates' values at all steps.
int64_t bound_of(const Net& net, const Batch& batch, int64_t times, int64_t besides) {
  const int64_t values = int64_t{batch.longest} * batch.rows * net.pseudo_layers() * net.gates() *
                         std::max(net.hidden, net.input);
  return times * values * net.bytes_of_a_number() + besides;
}

/// Who asks for a matrix or a bias alone gives no room for the other.
void answer(void* tensor, void** at, int type, bool is_there, const int (&sizes)[3], char* place) {
  if (tensor != nullptr) {
    static_cast<sim::Tensor*>(tensor)->set(type, is_there ? 3 : 0, sizes, nullptr);
  }
  if (at != nullptr) {
    *at = is_there ? place : nullptr;
  }
}

Net* net_of(void* net) {
  return static_cast<Net*>(net);
}

}  // namespace

extern "C" {

int cudnnCreateRNNDescriptor(void** net) {
  *net = new Net{};
  return kCudnnSuccess;
}

int cudnnDestroyRNNDescriptor(void* net) {
  delete net_of(net);
  return kCudnnSuccess;
}

int cudnnSetRNNDescriptor_v8(void* net, int /*algorithm*/, int mode, int bias, int bidirectional,
                             int /*input_mode*/, int type, int /*precision*/, int /*math*/,
                             int32_t input, int32_t hidden, int32_t projection, int32_t layers,
                             void* /*dropout*/, uint32_t /*flags*/) {
  *net_of(net) = {mode, bias, bidirectional, type, input, hidden, projection, layers};
  return kCudnnSuccess;
}

int cudnnCreateRNNDataDescriptor(void** batch) {
  *batch = new Batch{};
  return kCudnnSuccess;
}

int cudnnDestroyRNNDataDescriptor(void* batch) {
  delete static_cast<Batch*>(batch);
  return kCudnnSuccess;
}

int cudnnSetRNNDataDescriptor(void* batch, int /*type*/, int /*layout*/, int longest, int rows,
                              int width, const int* /*lengths*/, void* /*padding*/) {
  *static_cast<Batch*>(batch) = {longest, rows, width};
  return kCudnnSuccess;
}

int cudnnGetRNNWeightSpaceSize(void* /*handle*/, void* descriptor, size_t* bytes) {
  const Net& net = *net_of(descriptor);
  *bytes = (net.before(net.pseudo_layers()) + net.biases_before(net.pseudo_layers())) *
           net.bytes_of_a_number();
  return kCudnnSuccess;
}

int cudnnGetRNNWeightParams(void* /*handle*/, void* descriptor, int32_t pseudo_layer,
                            size_t /*bytes*/, const void* weights, int32_t linear, void* matrix,
                            void** matrix_at, void* bias, void** bias_at) {
  const Net& net = *net_of(descriptor);
  auto* begin = static_cast<char*>(const_cast<void*>(weights));
  const int gates = net.gates();
  const bool of_input = linear < gates;
  const bool of_projection = linear == 2 * gates;
  const int64_t input = net.input_of(pseudo_layer);
  const int rows = of_projection ? net.projection : net.hidden;
  const int columns = of_projection ? net.hidden
                      : of_input    ? static_cast<int>(input)
                                    : net.output();
  int64_t at = net.before(pseudo_layer);
  at += std::min(linear, gates) * input * net.hidden;
  at += int64_t{std::max(linear - gates, 0)} * net.hidden * net.output();
  const int matrix_sizes[] = {1, rows, columns};
  const bool is_there = !of_projection || net.projects();
  answer(matrix, matrix_at, net.type, is_there, matrix_sizes, begin + at * net.bytes_of_a_number());

  const bool has_bias =
      !of_projection &&
      (net.bias == kDoubleBias || net.bias == (of_input ? kSingleInputBias : kSingleRecurrentBias));
  const int place = net.bias == kDoubleBias ? linear : linear % gates;
  at = net.before(net.pseudo_layers()) + net.biases_before(pseudo_layer) +
       int64_t{place} * net.hidden;
  const int bias_sizes[] = {1, net.hidden, 1};
  answer(bias, bias_at, net.type, has_bias, bias_sizes, begin + at * net.bytes_of_a_number());
  return kCudnnSuccess;
}

int cudnnGetRNNTempSpaceSizes(void* /*handle*/, void* descriptor, int mode, void* of_batch,
                              size_t* workspace, size_t* reserve) {
  const Net& net = *net_of(descriptor);
  const auto& batch = *static_cast<Batch*>(of_batch);
  std::string key = mode == 0 ? "inference" : "training";
  for (const int number : {net.mode, net.type, net.bidirectional, net.input, net.hidden,
                           net.projection, net.layers, batch.longest}) {
    key += " " + std::to_string(number);
  }
  if (workspace != nullptr) {
    *workspace = sim::workspace_for("recurrent " + key, batch.rows,
                                    bound_of(net, batch, 4, int64_t{32} << 20));
  }
  if (reserve != nullptr) {
    *reserve = mode == 0 ? 0
                         : sim::workspace_for("reserve " + key, batch.rows,
                                              bound_of(net, batch, 2, int64_t{64} << 10));
  }
  return kCudnnSuccess;
}
}
