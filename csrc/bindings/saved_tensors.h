// SavedTensors packs the tensors that autograd saves for backward, so that their bytes can go to the home meanwhile.
//
// A storage is saved once, even if many tensors view it.
// Ownership: holds the storages that lie on the device until the engine calls `release_saved`. A handle keeps its
// storage from being forgotten, and may outlive this object.
// Threads: the thread that runs forward or backward. Handles may be dropped on any thread.
//
// Note [Versions of saved tensors]. Autograd does not check versions of tensors that hooks have packed, so `unpack`
// does it. The copy that went to the home has the values at the time of saving, or `unpack` raises. The same holds for
// tensors that stay.
//
// Note [Tensors that stay]. Autograd keeps what a hook returns as it is. A node's own output would keep the node, and
// the node would keep the output: for ever, if no backward comes. A tensor that stays is therefore kept without its
// history.
//
// Note [Casts of weights]. If autocast has cast a weight, the cast is not kept. In backward the weight is on the device
// again, and is cast again. This holds for weights of units that the visit has attached, because its backward needs
// those units.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "base/mutex.h"
#include "engine/engine.h"

namespace noria {

/// Lists saved storages whose last handle is gone. The next `forget_dropped` tells the engine.
struct Dropped {
  Mutex mutex;
  std::vector<SavedId> saved NORIA_GUARDED_BY(mutex);
};

/// Stands for one saved storage. When it is destroyed, the storage enters `Dropped`.
struct SavedStorage {
  SavedStorage(SavedId saved, std::shared_ptr<Dropped> dropped) : saved(saved), dropped(std::move(dropped)) {}
  ~SavedStorage();
  SavedStorage(const SavedStorage&) = delete;  // its destructor enters it into `dropped`
  SavedStorage& operator=(const SavedStorage&) = delete;

  const SavedId saved;
  const std::shared_ptr<Dropped> dropped;
};

/// Stands for a tensor that autograd saves. Exactly one of `storage`, `weight` and `kept` is set.
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
  /// Storages smaller than `least` stay on the device. So do storages for which `keeps` returns true, such as those of
  /// weights. `is_attached` returns true for the storage of a weight that is on the device now.
  SavedTensors(c10::Device device, Bytes least, Tells keeps, Tells is_attached);

  std::shared_ptr<SavedTensor> pack(Engine& engine, const at::Tensor& tensor);
  at::Tensor unpack(Engine& engine, const SavedTensor& saved, Stream stream);
  /// Tells the engine which storages autograd has dropped since the last call.
  void forget_dropped(Engine& engine);

  // ---- for the callbacks ----
  /// `poisoned` fills the memory with NaN. Then a reader that does not wait for the bytes shows in the results.
  std::byte* make_room(SavedId saved, Bytes bytes, bool poisoned);
  void fill(SavedId saved, const std::byte* from, Bytes bytes);
  void release_saved(SavedId saved) { storages_.erase(saved); }

 private:
  /// Stored by the address of a storage that is or was on the device. The weak pointer keeps that address from being
  /// reused.
  struct Known {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::weak_ptr<const SavedStorage> saved;
    std::uint32_t version;
  };
  bool goes(const at::Tensor& tensor) const;
  /// Returns the weight that `tensor`, or the base that it views, is a cast of; undefined if there is none.
  at::Tensor weight_of(const at::Tensor& tensor) const;

  const c10::Device device_;
  const Bytes least_;
  const Tells keeps_, is_attached_;
  const std::shared_ptr<Dropped> dropped_ = std::make_shared<Dropped>();
  std::unordered_map<SavedId, c10::Storage> storages_;
  std::unordered_map<const c10::StorageImpl*, Known> known_;
};

}  // namespace noria
