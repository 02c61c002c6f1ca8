"""A shared library that the script loads is not on this machine."""

import ctypes

from job import start

start()
ctypes.CDLL("libcudnn_ops.so.9")
