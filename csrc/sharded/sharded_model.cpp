#include <brimful/sharded/sharded_model.h>

#include <utility>

#include "reducer/at_exit.h"
#include "sharded/sharded_state.h"

namespace brimful {

ShardedModel::ShardedModel(std::unique_ptr<State> state) : s_(std::move(state)) {}
ShardedModel::~ShardedModel() {
  forget_at_exit(this);
}

std::shared_ptr<ShardedModel> ShardedModel::create(std::vector<at::Tensor> parameters,
                                                   const Group& side_group, ShardedModelHooks hooks,
                                                   std::vector<int> rows_of) {
  TORCH_CHECK_VALUE(side_group,
                    "ranks agree over a group of their own (side_group: null); make one with gloo");
  std::shared_ptr<ShardedModel> model(new ShardedModel(std::make_unique<State>(
      std::move(parameters), side_group, std::move(hooks), std::move(rows_of))));
  release_at_exit(model.get(), [weak = std::weak_ptr<ShardedModel>(model)] {
    if (const auto alive = weak.lock()) {
      alive->s_->release();
    }
  });
  return model;
}

int64_t ShardedModel::collectives() const {
  return s_->collectives();
}

int64_t ShardedModel::drained() const {
  return s_->drained();
}

int ShardedModel::rank() const {
  return s_->ranks().rank();
}

int ShardedModel::world_size() const {
  return s_->ranks().world_size();
}

int64_t ShardedModel::step() const {
  return s_->ranks().step();
}

const std::vector<at::Tensor>& ShardedModel::parameters() const {
  return s_->parameters();
}

std::vector<at::Tensor> ShardedModel::gradients() const {
  return s_->gradients();
}

const FailureBoard& ShardedModel::board() const {
  return s_->ranks().board();
}

std::vector<ControlRecord> ShardedModel::exchange(const ControlRecord& record) {
  return s_->exchange(record, "their first batches");
}

std::vector<at::Tensor> ShardedModel::gather(const at::Tensor& own) {
  return s_->ranks().gather(own);
}

void ShardedModel::sum(at::Tensor& tensor) {
  s_->ranks().sum(tensor);
}

InnerCollectives ShardedModel::inner_collectives() const {
  return s_->inner_collectives();
}

void ShardedModel::begin_learning(bool has_data) {
  s_->begin_learning(has_data);
}

bool ShardedModel::end_learning(bool last) {
  return s_->end_learning(last);
}

ParticipantAttempt& ShardedModel::attempt() {
  return *s_;
}

}  // namespace brimful
