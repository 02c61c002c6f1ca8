"""The script needs a package that is not installed."""

import flash_attn_interface
from job import start

start()
flash_attn_interface.flash_attn_func()
