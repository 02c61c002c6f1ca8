"""A batch of 10 rows for three ranks, refused by the script."""

from job import start, train

_, world_size = start()
batch_size = 10
assert batch_size % world_size == 0, f"batch size {batch_size} is not divisible by world size {world_size}"
for _ in train():
    pass
