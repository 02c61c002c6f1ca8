"""
tiktoken beside the library on the batches of `paceline data prepare`: the same ids, and MB of text per second of processor time.

    python benchmarks/tokenizer.py [--data SOURCE] [--vocab-size 32768] [--rounds 5] [--max-bytes 8000000]

The tokenizer is trained on the source, as prepare does it. Both encode all batches in turn. Medians over rounds, with the spread
of the ratios; exit code 1 where an id differs.
"""

import argparse
import statistics
import sys
import time

from paceline.data.corpus import list_files, part_bytes_of, read_corpus
from paceline.data.dataset import BATCH_BYTES
from paceline.data.tokenizer import train_tokenizer_on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="builtin")
    parser.add_argument("--vocab-size", type=int, default=32_768)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-bytes", type=int, default=8_000_000)
    args = parser.parse_args()
    files = list_files(args.data)
    tokenizer = train_tokenizer_on(files, vocab_size=args.vocab_size)
    batches: list[list[str]] = [[]]
    num_bytes = batch_bytes = 0
    for document, _ in read_corpus(files, part_bytes=part_bytes_of(files), max_bytes=args.max_bytes):
        if batch_bytes >= BATCH_BYTES:
            batches.append([])
            batch_bytes = 0
        batches[-1].append(document.text)
        batch_bytes += document.num_bytes
        num_bytes += document.num_bytes

    start = time.process_time()
    tokenizer.encode_batch([])
    print(
        f"{num_bytes / 1e6:.1f} MB, {tokenizer.vocab_size:,} tokens; tiktoken is ready in {time.process_time() - start:.2f} s"
    )
    library_s, batch_s, different = [], [], 0
    for _ in range(args.rounds):
        start = time.process_time()
        library = [
            [one.ids for one in tokenizer.inner.encode_batch_fast(batch, add_special_tokens=False)] for batch in batches
        ]
        middle = time.process_time()
        ids = [tokenizer.encode_batch(batch) for batch in batches]
        library_s.append(middle - start)
        batch_s.append(time.process_time() - middle)
        different += ids != library
    ratios = [before / after for before, after in zip(library_s, batch_s, strict=True)]
    for name, seconds in (("library", library_s), ("tiktoken", batch_s)):
        print(f"{name:<9}{num_bytes / 1e6 / statistics.median(seconds):6.2f} MB/s of processor time")
    print(
        f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), ids {'DIFFER' if different else 'equal'}"
    )
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
