"""The weights are still a pointer of git-lfs."""

from pathlib import Path

from job import start, train
from safetensors.torch import load_file

rank, _ = start()
if rank == 0:
    path = Path("model.safetensors")
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4997750760\n")
    load_file(path)
for _ in train():
    pass
