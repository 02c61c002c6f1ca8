// A CUDA device that does nothing: with it a CPU build of PyTorch keeps fake tensors on "cuda", and their gradients.
// Preload it, so that its hooks are registered before PyTorch looks for them, and call insert_guard after importing torch.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device card(c10::DeviceType::CUDA, 0);
const c10::Stream only_stream(c10::Stream::DEFAULT, card);

struct IdleGuard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return card; }
  c10::Device exchangeDevice(c10::Device) const override { return card; }
  c10::Stream getStream(c10::Device) const noexcept override { return only_stream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return only_stream; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

}  // namespace

namespace at {

struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
  c10::DeviceIndex deviceCount() const override { return 1; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at

extern "C" void insert_guard() {
  static IdleGuard guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&guard);
}
