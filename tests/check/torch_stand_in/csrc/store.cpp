// As torch/csrc/distributed/c10d/TCPStoreLibUvBackend.cpp: what the macro decides.
#ifdef TORCH_USE_LIBUV
#include <uv.h>
extern "C" int libuv_minor() { return UV_VERSION_MINOR; }
#else
extern "C" int libuv_minor() { return -1; }
#endif
