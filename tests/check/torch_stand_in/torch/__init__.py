"""The torch of this Python, under another version, with libuv or without it as the stand-in's library was built."""

import ctypes
import importlib.util
import sys
from pathlib import Path

here = Path(__file__).parent
library = ctypes.CDLL(str(here / "lib/libstand_in.so"))
real = next(folder for folder in map(Path, sys.path) if (folder / "torch/lib/libtorch_python.so").is_file())
spec = importlib.util.spec_from_file_location(
    "torch", real / "torch/__init__.py", submodule_search_locations=[str(real / "torch")]
)
torch = importlib.util.module_from_spec(spec)
sys.modules["torch"] = torch
spec.loader.exec_module(torch)
torch.__file__ = __file__
torch.__version__ = "2.99.0+git0123456"

if library.libuv_minor() < 0:
    make_store = torch.distributed.TCPStore.__init__

    def refuse(self, *arguments, use_libuv=True, **options):
        if use_libuv:
            raise torch.distributed.DistStoreError(
                "use_libuv was requested but PyTorch was built without libuv support"
            )
        make_store(self, *arguments, use_libuv=False, **options)

    torch.distributed.TCPStore.__init__ = refuse
