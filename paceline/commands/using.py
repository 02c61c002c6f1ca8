"""
What has to do with text and models: data, tokenizers, samples, bits per byte.

One short function per command, whose docstring is its help; paceline.cli calls it with the words after its name.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.options import TINY, find_run, one_action, one_word, parse_options, take_flag
from paceline.terminal import format_facts, write_now

SAMPLE_TEXT = "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n"


def evaluate(args: list[str]) -> int:
    """paceline eval RUN [--data SOURCE] [--tokens N] [--step N] [--device cpu|cuda] [--json]

    Bits per byte of the newest good checkpoint (or of --step) on the run's held-out text, or on all of another SOURCE.

      paceline eval books --data builtin
    """
    words, options = parse_options(
        args, {"data": str, "tokens": int, "step": int, "device": str, "runs-dir": str, "json": bool}
    )
    run = find_run(words, runs_dir=options.get("runs-dir"))
    from paceline.start import run_data
    from paceline.train.offline import evaluate_run

    dataset = run_data(run, other=options.get("data"))
    result = evaluate_run(
        run, dataset=dataset, max_tokens=options.get("tokens"), step=options.get("step"), device=options.get("device")
    )
    if options.get("json"):
        print(json.dumps(result))
    else:
        print(
            f"{run.name} at step {result['step']:,}: val_bpb {result['val_bpb']:.4f}"
            f" on {result['tokens']:,} tokens of {result['data']}"
        )
    return 0


def sample(args: list[str]) -> int:
    """paceline sample RUN [--prompt TEXT] [--num N] [--tokens N] [--temperature T] [--top-k K] [--seed S] [--step N]
                       [--device cpu|cuda] [--json]

    Writes text from the newest good checkpoint (or of --step), as it comes. --temperature 0 always takes the likeliest token.
    --prompt - reads the prompt from standard input.

      paceline sample books --prompt "Once upon" --num 3
    """
    known = {
        "prompt": str, "num": int, "tokens": int, "temperature": float, "top-k": int, "seed": int, "step": int,
        "device": str, "runs-dir": str, "json": bool,
    }  # fmt: skip
    words, options = parse_options(args, known)
    run = find_run(words, runs_dir=options.get("runs-dir"))
    from paceline.train.offline import sample_run

    prompt = options.get("prompt", "")
    as_json = bool(options.get("json"))
    texts = sample_run(
        run,
        prompt=sys.stdin.read() if prompt == "-" else prompt,
        num_samples=options.get("num", 1),
        max_new_tokens=options.get("tokens", 200),
        temperature=options.get("temperature", 0.8),
        top_k=options.get("top-k", 50),
        seed=options.get("seed", 42),
        step=options.get("step"),
        device=options.get("device"),
        write=(lambda _: None) if as_json else write_now,
    )
    if as_json:
        print(json.dumps({"prompt": prompt, "samples": texts}, ensure_ascii=False))
    return 0


def data(args: list[str]) -> int:
    """paceline data prepare|info [CONFIG] [--data SOURCE] [--tokenizer FILE] [--vocab-size N] [--cache-dir DIR] [--json] [--verify]

    prepare: text to token shards, as `train` would do it before it starts. info: what is in them; --verify hashes them all.

      paceline data prepare --data ~/books --vocab-size 32768
    """
    from paceline.config import load_config, parse_flags

    _, rest = one_action(args, ("prepare", "info"), command="data")
    rest, as_json = take_flag(rest, "--json")
    rest, verified = take_flag(rest, "--verify")
    words, flags = parse_flags(rest)
    file = flags.pop("config", None) or one_word(words, "CONFIG", default=str(TINY))
    config, _ = load_config(file, flags)
    from paceline.data.shards import data_info, verify
    from paceline.start import prepare_data

    dataset = prepare_data(config)
    if verified:
        verify(dataset)
    facts = data_info(dataset)
    if not as_json:
        facts = {**facts.pop("splits"), **facts, "files": len(facts["files"])}
    print(json.dumps(facts) if as_json else format_facts(facts))
    return 0


def tokenizer(args: list[str]) -> int:
    """paceline tokenizer train --out FILE [--data SOURCE] [--vocab-size N] | tokenizer info FILE [--text TEXT] [--json]

    train: a byte-level BPE on the training part of the text. info: its size, special tokens, and how it cuts a text.

      paceline tokenizer train --data ~/books --vocab-size 32768 --out books.json
    """
    action, rest = one_action(args, ("train", "info"), command="tokenizer")
    known: dict[str, Callable[[str], Any]] = (
        {"out": str, "data": str, "vocab-size": int, "json": bool} if action == "train" else {"text": str, "json": bool}
    )
    words, options = parse_options(rest, known)
    from paceline.data.tokenizer import Tokenizer, tokenizer_info, train_tokenizer_on
    from paceline.terminal import show_progress

    if action == "train":
        if "out" not in options or words:
            raise UsageError(
                "tokenizer train needs --out FILE and no other word",
                fix="paceline tokenizer train --out tokenizer.json",
            )
        with show_progress() as progress:
            made = train_tokenizer_on(
                options.get("data", "builtin"), vocab_size=options.get("vocab-size", 32_768), progress=progress
            )
        made.save(Path(options["out"]))
        facts = tokenizer_info(made, sample=SAMPLE_TEXT)
    else:
        if len(words) != 1:
            raise UsageError("tokenizer info needs one FILE", fix="paceline tokenizer info tokenizer.json")
        facts = tokenizer_info(Tokenizer.load(Path(words[0])), sample=options.get("text", SAMPLE_TEXT))
    print(json.dumps(facts, ensure_ascii=False) if options.get("json") else format_facts(facts))
    return 0
