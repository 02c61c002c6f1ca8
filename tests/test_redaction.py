"""Secrets are taken out of all that leaves the host, in whatever shape they stand; harmless text stays."""

import json
import time
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from made_secrets import EACH, NAMES, SHAPES, filled, leaks
from rows import with_rows

from paceline.redaction import redact

ROOT = Path(__file__).parents[1]
LOGS = Path("/work/shared/data/failure-logs/cases.jsonl")


@with_rows("shape", SHAPES)
def test_no_secret_is_left_in_any_shape(shape):
    random, (make, form) = Random(f"{shape} 15"), SHAPES[shape]
    made = [(secret := make(random), filled(form, random.choice(NAMES), secret)) for _ in range(EACH)]
    assert [(text, redact(text)) for secret, text in made if leaks(secret, json.dumps(redact(text)))] == []


def test_there_are_five_hundred_secrets_in_twenty_shapes():
    assert len(SHAPES) >= 20 and len(SHAPES) * EACH >= 500


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://ada:hunter2@example.org/x", "https://set@example.org/x"),
        (
            "git clone https://ghp_0123456789012345678901234567890123456@example.org",
            "git clone https://set@example.org",
        ),
        ("failed with hf_abcdefghijklmnopqrstuvwx", "failed with set"),
        ("python train.py --api_key=sesame --lr 1", "python train.py --api_key=set --lr 1"),
        ("/usr/lib:/opt/cuda/lib64", "/usr/lib:/opt/cuda/lib64"),
        ("http://localhost:8080/a@b", "http://localhost:8080/a@b"),
    ],
)
def test_logins_and_keys_are_removed_from_any_text(text, shown):
    assert redact({"a": [text]}) == {"a": [shown]}
    assert redact({"a": ({"b": text},)}) == {"a": [{"b": shown}]}  # a dataclass as a dict keeps its tuples


def test_values_that_are_not_text_stay_unchanged():
    assert redact({"a": [1, 2.5, None, True]}) == {"a": [1, 2.5, None, True]}


HARMLESS = (
    "max_tokens=2048, token_bytes: 65536, pad_token=<pad> and eos_token='</s>'",
    "tokenizer: gpt2",
    "--tokenizer gpt2 --max-tokens 512 --key value",
    "commit 1b43e805d079d574a76e0e40c07abd94aed505e1",
    "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "run books-2026-11-22-key-ablation",
    'Missing key(s) in state_dict: "transformer.h.0.attn.c_q.weight"',
    "KeyError: 'RANK'",
    "forward pass: 3.2 ms, backward pass: 6.1 ms",
    "14,200 tokens, 3.1 ms per token: fine",
    "for key: store_based_barrier_key:1 (world_size=4)",
    "/usr/local/lib/python3.11/site-packages/torch/distributed/elastic/multiprocessing/errors/__init__.py",
    "http://127.0.0.1:8765/api/runs",
    "failed to pass monitoredBarrier in 30000 ms",
    "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_13AUnaryFunctorE",
    "api_key=$WANDB_API_KEY",
    "Authorization failed: access to meta-llama is restricted",
    "checkpoints/step_000500/model-00001-of-00004.safetensors",
    "sparse_attn_key_dim=64",
)


@with_rows("text", HARMLESS)
def test_harmless_text_stays(text):
    assert redact(text) == text


def words_lost(text: str) -> tuple[int, int]:
    """How many words of a text are taken out, and how many it has."""
    words, shown = Counter(text.split()), Counter(redact(text).split())
    return (words - shown).total(), words.total()


def test_at_most_one_word_in_a_hundred_of_harmless_text_is_taken_out():
    """The project's own documents, configs and sentences of real failures."""
    paths = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("paceline/**/*.toml"),
        ROOT / "tests/explain/wordings.toml",
    ]
    lost, total = map(sum, zip(*(words_lost(path.read_text()) for path in paths), strict=True))
    assert total > 50_000 and lost <= total / 1000


@pytest.mark.skipif(not LOGS.exists(), reason=f"needs {LOGS}")
def test_at_most_one_word_in_a_hundred_of_real_logs_of_failures_is_taken_out():
    logs = [json.loads(line)["log"] for line in LOGS.read_text().splitlines()]
    lost, total = map(sum, zip(*map(words_lost, logs), strict=True))
    assert total > 40_000 and lost <= total / 1000


def test_what_is_redacted_once_stays_as_it_is():
    for make, form in SHAPES.values():
        once = redact(filled(form, "token", make(Random(1))))
        assert redact(once) == once


def test_a_long_line_takes_time_in_proportion_to_its_length():
    """Fifty thousand characters of what each pattern begins with."""
    starts = (
        "a",
        "token=",
        "key ",
        "://",
        "-----BEGIN PRIVATE KEY-----",
        "x.y-",
        'key="',
        "a,",
        "cookie: ",
        "sk-",
        "1a:",
        "-u ",
    )
    started = time.process_time()
    for start in starts:
        redact(start * (50_000 // len(start)))
    assert time.process_time() - started < 30
