"""Log texts for tests, and the functions that make and parse them."""

from paceline.explain.reader import read_log

TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 31, in main
    loss = model(x)
ValueError: sample 1841 has 3 fields
"""
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    " GPU 0 has a total capacity of 23.56 GiB of which 1.88 GiB is free."
)
PEER = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:12455."
    " This is typically caused by a remote worker crashing"
)
OTHER_LINES = "".join(f"INFO: writing file {number}\n" for number in range(9))  # a program goes on without steps
STEPS = "".join(f"step {step:05d}/00100 | loss {3 - step / 50:.3f}\n" for step in range(10))


def read(text, **options):
    return read_log([text.encode() if isinstance(text, str) else text], **options)


def exceptions(log):
    return [record for record in log.records if record.kind == "exception"]


def prefixed(prefix, text=TRACEBACK):
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())


def raised(rank, error, *, file="train.py", prefix="[rank{}]: "):
    """The lines of a rank's traceback."""
    head = "" if rank is None else prefix.format(rank)
    lines = ["Traceback (most recent call last):", f'  File "{file}", line 31, in main', "    loss = model(x)", error]
    return "".join(f"{head}{line}\n" for line in lines)
