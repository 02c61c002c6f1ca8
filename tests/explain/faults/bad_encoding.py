"""Rank 1 reads a text as UTF-8 that is Latin-1."""

from pathlib import Path

from job import start, train

rank, _ = start()
for step in train():
    if rank == 1 and step == 3:
        Path("corpus.txt").write_bytes("caf\u00e9 au lait".encode("latin-1"))
        Path("corpus.txt").read_text(encoding="utf-8")
