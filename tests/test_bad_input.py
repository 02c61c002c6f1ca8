"""Bad input: each case ends non-zero with an error: and a fix: line, no traceback, and nothing lost."""

import gzip
import json
from pathlib import Path

import pytest

from paceline.cli import run_command
from paceline.errors import PacelineError

BROKEN_GZIP = gzip.compress(b'{"text": "a"}\n' * 999)[:-9]
LONG = "长" * 86  # 258 bytes
TINY = ["--vocab-size", "300", "--sequence-len", "32", "--total-batch-size", "64", "--num-steps", "1"]


def put(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def make_run(folder: Path) -> str:
    put(folder, "runs/old/config.toml", "depth = 2\nname = 'old'\n")
    return "old"


def script_run(folder: Path) -> str:
    put(folder, "runs/hello/config.toml", 'command = ["train.py"]\nnproc = 2\ndevice = "cpu"\ncwd = "/"\n')
    return "hello"


def finished_run(folder: Path) -> str:
    name = make_run(folder)
    put(folder, f"runs/{name}/plan.json", '{"num_steps": 100}')
    put(folder, f"runs/{name}/events.jsonl", '{"time": "2026-01-01T00:00:00.000Z", "event": "finished", "step": 100}\n')
    return name


def run_without(folder: Path, name: str, content: str | None) -> str:
    """A run of which one file is missing, or holds this content."""
    put(folder, "runs/old/plan.json", "{}")
    run = make_run(folder)
    (folder / "runs/old" / name).unlink(missing_ok=True)
    if content is not None:
        put(folder, f"runs/old/{name}", content)
    return run


def with_checkpoints(folder: Path, missing: str) -> str:
    """A run with a checkpoint of which one file is missing."""
    put(folder, "runs/old/checkpoints/step_000020/manifest.json", "{}")
    return run_without(folder, missing, None)


def six_runs(folder):
    for name in "abcdef":
        put(folder, f"runs/{name}/config.toml", "")
    return str(folder / "runs")


# name, what is typed (given the folder), exit code, a word of the error, a word of the fix
CASES = [
    ("no such command", lambda d: ["trian"], 2, "trian", "paceline train"),
    ("no such flag", lambda d: ["train", "--dpeth", "4"], 2, "--dpeth", "--depth"),
    ("a value of nanochat that is out of range", lambda d: ["train", "--num-iterations", "0"], 2, "--num-steps 0", "from 1"),
    ("a setting of nanochat that is missing here", lambda d: ["train", "--bias", "true"], 2, "no bias", "leave bias out"),
    ("a flag without its value", lambda d: ["train", "--depth"], 2, "no value", "--depth"),
    ("a flag twice", lambda d: ["train", "--depth", "2", "--depth", "3"], 2, "twice", "once"),
    ("an empty value", lambda d: ["train", "--name", ""], 2, "--name is empty", "leave it out"),
    ("an empty number", lambda d: ["train", "--depth="], 2, "--depth is empty", "leave it out"),
    ("a value that is not ASCII", lambda d: ["train", "--depth", "zwölf"], 2, "zwölf", "--depth 4"),
    ("an option that is not ASCII", lambda d: ["train", "--tiefe-größe", "4"], 2, "--tiefe-größe", ""),
    ("a switch with a value", lambda d: ["watch", "--once=perhaps"], 2, "--once perhaps", "--once"),
    ("a wrong negation", lambda d: ["train", "--no-chekc"], 2, "--no-chekc", "--no-check"),
    ("a share in percent", lambda d: ["plan", "--memory-share", "65"], 2, "65 is out of range", "--memory-share 0.65; a number"),
    ("a share just above 1", lambda d: ["plan", "--memory-share", "1.01"], 2, "1.01 is out of range", "fix: a number from 0.01"),
    ("no silence at all", lambda d: ["train", "--hang-after", "0"], 2, "--hang-after 0 is out of range", "from 0.1"),
    ("a silence that is no number", lambda d: ["run", "--hang-after", "nan", "--", "x.py"], 2, "nan", "number"),
    ("no attempt", lambda d: ["resume", "r", "--max-attempts", "0"], 2, "--max-attempts 0", "from 1"),
    ("health samples in the past", lambda d: ["train", "--health-every", "-1"], 2, "--health-every -1", "from 0"),
    ("health samples never", lambda d: ["train", "--health-every", "1e9"], 2, "1e9 is out of range", "86400"),
    ("a tracker that is not known", lambda d: ["train", "--track", "mlflow"], 2, "mlflow", "wandb"),
    ("an address that is none", lambda d: ["train", "--notify", "me"], 2, "not an address", "https://"),
    ("a price without a unit", lambda d: ["plan", "--price", "cheap"], 1, "cheap", "gpu-hour"),
    ("a time without a unit", lambda d: ["plan", "--gpu", "RTX 4090", "--time", "90"], 2, "--time 90", "90m"),
    ("a field of no text", lambda d: ["eval", "a", "--text-field", "body"], 2, "of the text of --data", "--data SOURCE"),
    ("two runs", lambda d: ["sample", "a", "b"], 2, "one RUN, 2 are given", "paceline sample RUN"),
    ("a word for a command without any", lambda d: ["torch", "check", "all"], 2, "not all", "paceline torch check"),
    ("an unknown shell", lambda d: ["completion", "tcsh"], 2, "tcsh", "bash"),
    ("a single dash", lambda d: ["train", "-depth", "2"], 2, "-depth", "two dashes"),
    ("two config files", lambda d: ["train", "a.toml", "b.toml"], 2, "one CONFIG, 2 are given", "CONFIG"),
    ("text for a number", lambda d: ["train", "--depth", "deep"], 2, "deep", "--depth"),
    ("a fraction for a count", lambda d: ["train", "--num-steps", "1.5"], 2, "1.5", "--num-steps"),
    ("zero steps", lambda d: ["train", "--num-steps", "0"], 2, "out of range", "from 1"),
    ("negative epochs", lambda d: ["train", "--epochs", "-2"], 2, "out of range", "number"),
    ("a huge depth", lambda d: ["train", "--depth", "99999999999999999999"], 2, "out of range", "512"),
    ("not a number", lambda d: ["train", "--warmdown-ratio", "nan"], 2, "nan", "from 0 to 1"),
    ("an unknown precision", lambda d: ["train", "--precision", "fp12"], 2, "fp12", "bf16"),
    ("a precision with a wrong letter", lambda d: ["train", "--precision", "nfp4"], 2, "nfp4 is not known", "nvfp4, or another"),
    ("a precision in capitals", lambda d: ["plan", "--precision", "FP8", "--gpu", "H100"], 2, "FP8", "fp8, or another one of"),
    ("a precision of a file", lambda d: ["plan", put(d, "a.toml", 'precision = "mxpf8"')], 1, "mxpf8", "mxfp8, or another"),
    ("a precision that a CPU has not", lambda d: ["train", "--precision", "fp8"], 1, "a CPU has no units for fp8", "--emulate"),
    ("nanochat's fp8 on a CPU", lambda d: ["train", "--fp8"], 1, "a CPU has no units for fp8", "--precision auto"),
    ("a precision for another card", lambda d: ["plan", "--precision", "nvfp4", "--gpu", "RTX 4090"], 1, "10.0", "--precision fp8"),
    ("a precision for no card", lambda d: ["plan", "--precision", "mxfp4", "--gpu", "B200"], 1, "no MXFP4 product", "--emulate"),
    ("emulation of 16 bits", lambda d: ["train", "--emulate"], 1, "emulate is set, but precision is auto", "--precision fp8"),
    ("emulation with a value", lambda d: ["train", "--precision", "fp8", "--emulate=maybe"], 2, "maybe", "--emulate"),
    ("a finish of 16 bits", lambda d: ["train", "--bf16-finish", "0.1"], 1, "bf16_finish is set", "or --bf16-finish 0"),
    ("a finish as a percentage", lambda d: ["train", "--bf16-finish", "10%"], 2, "not a number", "--bf16-finish 0.1"),
    ("a finish that is the whole run", lambda d: ["train", "--bf16-finish", "1"], 2, "out of range", "from 0 to 0.99"),
    ("too few blocks for four bits", lambda d: ["train", "--precision", "nvfp4", "--emulate", "--depth", "2"], 1, "last 2 blocks",
     "--depth 3"),
    ("a width that a format cannot divide", lambda d: ["plan", "--precision", "fp8", "--gpu", "H100", "--sequence-len", "1000"], 1,
     "fp8 takes multiples of 16", "--sequence-len 1008"),
    ("an unknown device", lambda d: ["train", "--device", "tpu"], 2, "tpu", "cuda"),
    ("steps and epochs", lambda d: ["train", "--num-steps", "5", "--epochs", "1"], 1, "num_steps and epochs", "one of them"),
    ("DDP with Muon", lambda d: ["train", "--shard", "none"], 1, "muon", "--optimizer adamw"),
    ("a strange window", lambda d: ["train", "--window-pattern", "LXS"], 1, "LXS", "SSSL"),
    ("a name in latin-1", lambda d: ["train", "--name", "t\udce4xt"], 1, r"name t\xe4xt is not UTF-8", "rename"),
    ("text in a folder in latin-1", lambda d: ["train", "--data", str(d / "t\udce4xt")], 1, "is not UTF-8", "rename the file or"),
    ("a script in latin-1", lambda d: ["run", "--no-check", "--", put(d, "t\udce4xt.py", "")], 1, "the command", "rename"),
    ("the home of nobody", lambda d: ["train", "--data", "~no-such-user/text"], 1, "~no-such-user is not known", "whole path"),
    ("a cache of nobody's", lambda d: ["plan", "--cache-dir", "~no-such-user/c"], 1, "~no-such-user is not known", "whole path"),
    ("an address at nobody's", lambda d: ["run", "--notify", "@~no-such-user/a", "--", "a.py"], 1, "~no-such-user", "path"),
    ("a name with a slash", lambda d: ["train", "--name", "a/b"], 1, "a/b", "runs_dir"),
    ("a name that no folder can have", lambda d: ["run", "--name", LONG, "--", put(d, "a.py", "")], 1, "cannot be a folder", "255"),
    ("a name of dots", lambda d: ["run", "--name", "..", "--", put(d, "a.py", "")], 1, "cannot be a folder", "letters and digits"),
    ("a run that no folder can be", lambda d: ["watch", LONG], 1, LONG, "check the name"),
    ("a config that no file can be", lambda d: ["train", LONG], 1, LONG, "check the name"),
    ("logs that no file can be", lambda d: ["explain", LONG], 1, LONG, "check the name"),
    ("no GPU", lambda d: ["train", "--device", "cuda"], 1, "no GPU", "--device cpu"),
    ("more processes than cores", lambda d: ["train", "--nproc", "1000"], 1, "1000", "--nproc"),
    ("a batch that does not divide", lambda d: ["train", "--total-batch-size", "1000"], 1, "not a multiple", "total_batch_size to"),
    ("a width that is no multiple", lambda d: ["train", "--n-embd", "100"], 1, "not a multiple", "--n-embd 128"),
    ("missing config", lambda d: ["train", "none.toml"], 1, "does not exist", "give one"),
    ("config is a folder", lambda d: ["train", str(d)], 1, "folder", ".toml"),
    ("config of another kind", lambda d: ["train", put(d, "a.yaml", "depth: 4")], 1, "neither .toml nor .py", ".toml"),
    ("broken TOML", lambda d: ["train", put(d, "a.toml", "depth = = 4")], 1, "not valid TOML", "depth = 12"),
    ("a TOML section", lambda d: ["train", put(d, "a.toml", "[model]\ndepth = 4")], 1, "[model]", "section"),
    ("a wrong type in a file", lambda d: ["train", put(d, "a.toml", "depth = '4'")], 1, "'4'", "depth ="),
    ("bytes that are no text in a file", lambda d: ["train", put(d, "a.toml", b"\xff\xfe\x00")], 1, "not UTF-8", "iconv -f utf-16"),
    ("code in a .py file", lambda d: ["train", put(d, "a.py", "depth = len('four')")], 1, "a.py:1", "write the number"),
    ("broken Python", lambda d: ["train", put(d, "a.py", "depth = (")], 1, "not valid Python", "depth = 12"),
    ("missing text", lambda d: ["train", "--data", str(d / "none.txt")], 1, "none.txt", ""),
    ("an empty file", lambda d: ["train", "--data", put(d, "a.txt", "")], 1, "a.txt", ""),
    ("an empty folder", lambda d: ["train", "--data", str(d)], 1, "", ""),
    ("a folder without text", lambda d: ["train", "--data", str(Path(put(d, "x/a.png", "png")).parent)], 1, ".png", ""),
    ("text in latin-1", lambda d: ["train", "--data", put(d, "a.txt", "caf\xe9 " .encode("latin-1") * 500)], 1, "UTF-8", "iconv"),
    ("a broken gzip", lambda d: ["train", "--data", put(d, "a.jsonl.gz", BROKEN_GZIP)], 1, "a.jsonl.gz", ""),
    ("jsonl without text", lambda d: ["train", "--data", put(d, "a.jsonl", json.dumps({"n": 1}) + "\n")], 1, "a.jsonl", "text"),
    ("jsonl cut in a line", lambda d: ["train", "--data", put(d, "a.jsonl", '{"text": "a"}\n{"text": ')], 1, "a.jsonl", ""),
    ("a broken parquet", lambda d: ["train", "--data", put(d, "a.parquet", "PAR1 no")], 1, "a.parquet", ""),
    ("a vocabulary below bytes", lambda d: ["train", "--vocab-size", "100"], 1, "too small", "257"),
    ("a missing tokenizer", lambda d: ["train", "--tokenizer", str(d / "t.json")], 1, "t.json", ""),
    ("a tokenizer that is none", lambda d: ["train", "--tokenizer", put(d, "t.json", "{}")], 1, "t.json", ""),
    ("runs_dir is a file", lambda d: ["train", *TINY, "--runs-dir", put(d, "f", "x")], 1, "cannot be written", "--runs-dir"),
    ("a name that is taken", lambda d: ["train", *TINY, "--name", make_run(d)], 1, "already exists", "resume"),
    ("the name of a finished run", lambda d: ["train", *TINY, "--name", finished_run(d)], 1, "already exists",
     "--num-steps 200 continues it, or another --name"),
    ("the name of a script's run", lambda d: ["train", *TINY, "--name", script_run(d)], 1, "already exists", "fix: another --name"),
    ("a cache that is a file", lambda d: ["train", *TINY, "--cache-dir", put(d, "c", "x")], 1, "", ""),
    ("resume what is not there", lambda d: ["resume", "none"], 1, "no run none", "paceline train"),
    ("resume without a run", lambda d: ["resume"], 2, "one RUN", "paceline runs"),
    ("resume with another depth", lambda d: ["resume", make_run(d), "--depth", "3"], 1, "depth is 2", "new run"),
    ("resume a script with a key of training", lambda d: ["resume", script_run(d), "--num-steps", "4"], 2, "run of a script",
     "paceline run --name NEW -- train.py"),
    ("sample the run of a script", lambda d: ["sample", script_run(d)], 1, "run of a script", "paceline resume"),
    ("run without a script", lambda d: ["run"], 2, "needs a script", "paceline run --"),
    ("run a script that is not there", lambda d: ["run", "none.py"], 1, "none.py does not exist", "path"),
    ("run a launcher", lambda d: ["run", "--nproc", "2", "torchrun", "train.py"], 2, "starts ranks", "-- train.py"),
    ("an option of torchrun", lambda d: ["run", "--nproc-per-node", "2", "train.py"], 2, "not an option", "--nproc 2"),
    ("a port that is text", lambda d: ["check", "--port", "banana"], 2, "banana", "--port"),
    ("a port that is none", lambda d: ["check", "--port", "70000"], 2, "--port 70000 is out of range", "from 1 to 65,535"),
    ("collectives of one process", lambda d: ["comm", "--nproc", "1", "--cache-dir", str(d)], 1, "one process", "--nproc 2"),
    ("a deadline in the past", lambda d: ["comm", "--nproc", "2", "--deadline", "-1"], 2, "-1 is out of range", "from 1"),
    ("torch in a folder without it", lambda d: ["torch", "check", "--path", str(d)], 1, "no torch", "site-packages"),
    ("a build script over another file", lambda d: ["torch", "recipe", "--arch", "12.0", "--script", put(d, "b.sh", "ls")], 1,
     "b.sh exists", "another file"),
    ("no hosts", lambda d: ["accelerate-config", "--nnodes", "0"], 2, "--nnodes 0 is out of range", "from 1"),
    ("a port between hosts that is none", lambda d: ["accelerate-config", "--main-port", "70000"], 2, "70000", "65,535"),
    ("hosts without a rank", lambda d: ["accelerate-config", "--nnodes", "2"], 2, "--node-rank", "each host"),
    ("a file where there is no folder", lambda d: ["accelerate-config", "--out", str(d / "a/b")], 1, "cannot be written", "--out"),
    ("sample what is not there", lambda d: ["sample", "none"], 1, "no run none", ""),
    ("sample with a wrong flag", lambda d: ["sample", "x", "--promt", "a"], 2, "--promt", "--prompt"),
    ("sample with text for a number", lambda d: ["sample", "x", "--num", "two"], 2, "two", "--num"),
    ("resume with an empty plan", lambda d: ["resume", run_without(d, "plan.json", "")], 1, "plan.json is empty", "--name NEW"),
    ("sample with a plan that is cut", lambda d: ["sample", run_without(d, "plan.json", '{"a": ')], 1,
     "plan.json is damaged: Expecting value: line 1 column 7", "restore it"),
    ("sample with a plan of nothing", lambda d: ["sample", run_without(d, "plan.json", "{}")], 1, "plan.json is damaged", "copy"),
    ("eval without its text", lambda d: ["eval", run_without(d, "dataset.json", None)], 1, "dataset.json is missing", "--name NEW"),
    ("eval with an empty config", lambda d: ["eval", run_without(d, "config.toml", "")], 1, "config.toml is empty", "new run"),
    ("resume with a config that is cut", lambda d: ["resume", run_without(d, "config.toml", "depth = ")], 1,
     "config.toml is not valid TOML: line 1, `depth =`: Invalid value, and the file ends there", "correct that line in "),
    ("a run whose config has a wrong value", lambda d: ["resume", run_without(d, "config.toml", "depth = 2\nnum_steps = lots\n")],
     1, "config.toml is not valid TOML: line 2, `num_steps = lots`: Invalid value", "correct that line in "),
    ("train with a config with a wrong value", lambda d: ["train", put(d, "a.toml", "depth = 2\nnum_steps = lots\n")], 1,
     "a.toml is not valid TOML: line 2, `num_steps = lots`: Invalid value", "such as depth = "),
    ("sample without a plan", lambda d: ["sample", with_checkpoints(d, "plan.json")], 1, "plan.json is missing",
     "start a new run with its weights: paceline train --init-from "),
    ("sample without a config", lambda d: ["sample", with_checkpoints(d, "config.toml")], 1, "has checkpoints and no config.toml",
     "write it with the keys"),
    ("eval of no run", lambda d: ["eval"], 2, "eval takes at least one RUN, 0 are given", "paceline eval RUN"),
    ("eval what is not there", lambda d: ["eval", "none"], 1, "no run none", ""),
    ("runs of an empty folder", lambda d: ["runs", str(d)], 1, "no runs", "paceline train"),
    ("runs of no folder, for programs", lambda d: ["runs", str(d / "no"), "--json"], 1, "no runs", "paceline train"),
    ("data with a wrong action", lambda d: ["data", "prepair"], 2, "not prepair", "data prepare"),
    ("data without an action", lambda d: ["data"], 2, "prepare or info", "data prepare"),
    ("tokenizer info of nothing", lambda d: ["tokenizer", "info", str(d / "t.json")], 1, "t.json", "check the path, or copy"),
    ("tokenizer info of no run", lambda d: ["tokenizer", "info", "none"], 1, "no run none", ""),
    ("a tokenizer that is a folder", lambda d: ["tokenizer", "train", "--out", str(d), "--force"], 1, "is a folder", "/FILE"),
    ("a tokenizer in a file", lambda d: ["tokenizer", "train", "--out", put(d, "a", "x") + "/t.json"], 1, "a is a file", "--out"),
    ("a tokenizer without a file", lambda d: ["tokenizer", "train", "--vocab-size", "300"], 2, "--out FILE", "add --out tok"),
    ("an accelerate config that is a folder", lambda d: ["accelerate-config", "--force", "--out", str(d)], 1, "folder", "/FILE"),
    ("stop a finished run", lambda d: ["stop", finished_run(d)], 1, "not running", "--num-steps 200 continues it"),
    ("stop the run of a script", lambda d: ["stop", script_run(d)], 1, "not running", "paceline resume runs/hello"),
    ("one run of many that is not there", lambda d: ["runs", "show", "no", "--runs-dir", six_runs(d)], 1, "no run no",
     "lists all 6 runs"),
    ("the browser for a folder that is not there", lambda d: ["watch", "--web", "--runs-dir", str(d / "no")], 1,
     "no folder of runs", "--runs-dir"),
    (
        "tokenizer train onto a file",
        lambda d: ["tokenizer", "train", "--vocab-size", "300", "--out", put(d, "t.json", "{}")],
        1,
        "already exists",
        "--force overwrites it",
    ),
    ("tokenizer train without a place", lambda d: ["tokenizer", "train"], 2, "--out", "--out tokenizer.json"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "code", "said", "fix"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_bad_input_ends_in_two_lines_that_say_what_and_how_to_mend_it(
    typed, code, said, fix, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert run_command(typed(tmp_path)) == code
    out, err = capsys.readouterr()
    *_, error_line, fix_line = err.strip().splitlines()
    assert error_line.startswith("error: ")
    assert said in error_line
    assert fix_line.startswith("  fix: ")
    assert fix in fix_line
    assert "Traceback" not in out + err


def test_a_quoted_value_of_any_length_leaves_the_error_readable():
    error = str(PacelineError(f"{'x' * 3_000_000} is no host", fix="HOST:2"))
    assert len(error) < 2100
    assert error.endswith("…\n  fix: HOST:2")
