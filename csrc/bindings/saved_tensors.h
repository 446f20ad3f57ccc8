// What autograd keeps in the place of tensors that it saves for backward, where they go to the home meanwhile.
//
// A storage is saved once, however many tensors view it. Ownership: holds the storages that lie on the device, until
// the engine says `left`; a handle keeps its storage from being forgotten, and outlives this object safely. Threads:
// the one that runs forward or backward; handles may be dropped on any.
//
// Note [Versions of saved tensors]. Autograd does not check versions of what hooks have packed, so it is done here: the
// copy that went to the home is of the values at the time of saving, or an error. So it is for tensors that stay.
//
// Note [Tensors that stay]. Autograd takes what a hook returns as it is. A node's own output would keep the node, which
// keeps it: until a backward, and for good where none comes. So what stays is kept without its history.
//
// Note [Casts of weights]. What autocast makes of a weight is not kept: where backward asks for it the weight is there
// again, and is cast again. That holds for weights of units that the visit has attached, for its backward needs those.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "engine/engine.h"

namespace noria {

/// Storages of which no handle is left, for the next to come by.
struct Dropped {
  std::mutex mutex;
  std::vector<SavedId> saved;
};

/// One storage. Dropped with its last handle.
struct SavedStorage {
  SavedStorage(SavedId saved, std::shared_ptr<Dropped> dropped) : saved(saved), dropped(std::move(dropped)) {}
  ~SavedStorage();
  SavedStorage(const SavedStorage&) = delete;  // its end counts
  SavedStorage& operator=(const SavedStorage&) = delete;

  const SavedId saved;
  const std::shared_ptr<Dropped> dropped;
};

/// What autograd gets. Either `storage` is there, or `weight`, or `kept`.
struct SavedTensor {
  std::shared_ptr<const SavedStorage> storage;
  at::ScalarType dtype = at::kFloat;
  std::vector<std::int64_t> sizes, strides;
  std::int64_t offset = 0;
  c10::VariableVersion counter;
  std::uint32_t version = 0;
  at::Tensor weight;  // the tensor is a cast of this weight
  std::uint32_t weight_version = 0;
  at::Tensor kept;  // see Note [Tensors that stay]
};

class SavedTensors {
 public:
  using Tells = std::function<bool(const c10::Storage&)>;
  /// `least`: smaller storages stay where they are. `keeps`: storages that must, such as those of weights.
  /// `is_attached`: a weight's, which lies on the device now.
  SavedTensors(c10::Device device, Bytes least, Tells keeps, Tells is_attached);

  std::shared_ptr<SavedTensor> pack(Engine& engine, const at::Tensor& tensor);
  at::Tensor unpack(Engine& engine, const SavedTensor& saved, Stream stream);
  /// Storages of which autograd has let go since the last call.
  void forget_dropped(Engine& engine);

  // ---- for the custodian ----
  /// `poisoned`: filled with NaN, so that whoever does not wait for its bytes is found out.
  std::byte* make_room(SavedId saved, Bytes bytes, bool poisoned);
  void fill(SavedId saved, const std::byte* from, Bytes bytes);
  void left(SavedId saved) { storages_.erase(saved); }

 private:
  /// By storage that is or was on the device. While it is known here its address is nobody else's.
  struct Known {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::weak_ptr<const SavedStorage> saved;
    std::uint32_t version;
  };
  bool goes(const at::Tensor& tensor) const;
  /// The weight that this is a cast of, or a view of such a cast; none: it is something else.
  at::Tensor weight_of(const at::Tensor& tensor) const;

  const c10::Device device_;
  const Bytes least_;
  const Tells keeps_, is_attached_;
  const std::shared_ptr<Dropped> dropped_ = std::make_shared<Dropped>();
  std::unordered_map<SavedId, c10::Storage> storages_;
  std::unordered_map<const c10::StorageImpl*, Known> known_;
};

}  // namespace noria
