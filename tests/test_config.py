"""One way to configure: defaults < file < flags, every wrong value refused with what would be right."""

import shlex
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
from rows import with_rows

from paceline.command_line import parse
from paceline.config import KEYS, Config, cache_dir, format_flags
from paceline.config_file import format_toml, load_config, resolve_config
from paceline.errors import PacelineError, UsageError
from paceline.options import ConfigOptions
from paceline.rundir import RunDir, append_event
from paceline.typed_fields import find_recorded_run, find_training_run

USAGE = "paceline train [CONFIG] [--key value ...] [options]"
CONFIGS = Path(__file__).parents[1] / "configs"


def parse_flags(args: list[str]) -> tuple[str | None, dict[str, object]]:
    """The config file and the keys of a command that takes a config."""
    options = parse(args, command="train", options=ConfigOptions)
    return options.config, dict(options.keys)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    file = write(tmp_path / "a.toml", "depth = 8\nseed = 7\n")
    config, _ = load_config(file, {"depth": 12})
    assert (config.depth, config.seed, config.keep_last) == (12, 7, KEYS["keep_last"].default)


@pytest.mark.parametrize(
    "args",
    [["--device-batch-size", "8"], ["--device_batch_size", "8"], ["--device-batch-size=8"], ["--device_batch_size=8"]],
)
def test_a_flag_takes_dashes_or_underscores_with_or_without_equals(args):
    assert parse_flags(args) == (None, {"device_batch_size": 8})


def test_the_config_file_stands_first_or_after_its_flag():
    assert parse_flags(["a.toml", "--depth", "2"]) == ("a.toml", {"depth": 2})
    assert parse_flags(["--config", "a.toml", "--depth", "2"]) == ("a.toml", {"depth": 2})
    with pytest.raises(UsageError, match="train takes one CONFIG, 4 are given: b.txt, c.txt, d.txt and 1 more"):
        parse_flags(["--data", "a.txt", "b.txt", "c.txt", "d.txt", "e.txt"])


def test_a_switch_needs_no_value_and_no_turns_it_off():
    assert parse_flags(["--compile", "--no-activation-checkpointing"])[1] == {
        "compile": True,
        "activation_checkpointing": False,
    }
    assert parse_flags(["--compile", "false"])[1] == {"compile": False}
    assert parse_flags(["--compile", "auto"])[1] == {"compile": None}
    assert parse_flags(["--deterministic", "false", "--emulate", "a.toml"]) == (
        "a.toml",
        {"deterministic": False, "emulate": True},
    )


def test_a_switch_may_have_choices_besides():
    for text, value in (("true", True), ("false", False), ("relu", "relu"), ("mlp", "mlp"), ("auto", None)):
        assert parse_flags(["--activation-checkpointing", text])[1] == {"activation_checkpointing": value}
    assert parse_flags(["--activation-checkpointing", "--depth", "2"])[1]["activation_checkpointing"] is True
    with pytest.raises(UsageError, match="half is not one of true, false, relu, mlp, or auto"):
        parse_flags(["--activation-checkpointing=half"])


def test_a_whole_number_of_a_file_may_have_an_exponent(tmp_path):
    config, _ = load_config(write(tmp_path / "a.toml", "num_steps = 1e3\ndepth = 8.0\n"), {})
    assert (config.num_steps, config.depth, type(config.num_steps)) == (1000, 8, int)


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("time = 120", 'time = "8h"'),
        ('total_batch_size = "512k"', "total_batch_size = 524288"),
        ("num_steps = 30.5", "num_steps = 30"),
        ("matrix_lr = 'high'", "matrix_lr = 0.02"),
    ],
)
def test_the_fix_for_a_wrong_type_is_a_value_that_works(tmp_path, line, fix):
    with pytest.raises(PacelineError) as error:
        load_config(write(tmp_path / "a.toml", line), {})
    assert error.value.fix == fix
    load_config(write(tmp_path / "a.toml", fix), {})


def test_numbers_may_be_grouped():
    assert parse_flags(["--total-batch-size", "524_288"])[1] == {"total_batch_size": 524_288}
    assert parse_flags(["--total-batch-size", "524,288"])[1] == {"total_batch_size": 524_288}


def test_the_written_config_reads_back_the_same(tmp_path):
    config = Config(name='quo"te\\', epochs=2.5, compile=False, data="a b/ü.txt")
    file = write(tmp_path / "a.toml", format_toml(config))
    assert load_config(file, {})[0] == config


def test_only_a_tokenizer_that_is_trained_needs_a_token_for_each_byte(tmp_path):
    config, _ = load_config(None, {"tokenizer": "characters.json", "vocab_size": 65})
    assert load_config(write(tmp_path / "a.toml", format_toml(config)), {})[0] == config
    with pytest.raises(PacelineError, match="vocab_size 65 is too small") as error:
        load_config(None, {"vocab_size": 65})
    assert error.value.fix == "--vocab-size 257 or more, or --tokenizer FILE, which may have fewer"


def test_an_unknown_flag_names_the_nearest():
    with pytest.raises(UsageError) as error:
        parse_flags(["--device-batchsize", "8"])
    assert str(error.value) == "error: unknown option --device-batchsize\n  fix: did you mean --device-batch-size?"


def test_flags_of_another_trainer_work_and_one_note_names_ours(capsys):
    args = "--max_seq_len=512 --num-iterations 50 --run=dummy --wandb-project x --target-flops -1 --device-type="
    file, keys = parse_flags(f"{args} --use-compile my.toml --save-interval=-1 --dtype bfloat16".split())
    assert file == "my.toml"
    assert keys == {"sequence_len": 512, "num_steps": 50, "compile": True, "save_every": 0, "precision": "bf16"}
    assert capsys.readouterr().err == (
        "note    names of another trainer: --max_seq_len is --sequence-len; --num-iterations is --num-steps;"
        ' run = "dummy": the run gets a name by itself, and no tracker; --wandb-project is not used; --target-flops is not used;'
        " --use-compile is --compile; --save-interval is --save-every; --dtype is --precision\n"
    )


def test_the_field_of_the_text_has_the_name_that_trl_gives_it_too(capsys):
    assert parse_flags(["--dataset_text_field", "body"])[1] == {"text_field": "body"}
    assert "--dataset_text_field is --text-field" in capsys.readouterr().err


def test_keys_written_as_flags_are_read_as_the_same_keys():
    keys = {"name": "-x", "data": "--my books", "depth": 2, "tokenizer": None, "compile": False, "emulate": True}
    assert parse_flags(shlex.split(format_flags(keys)))[1] == keys


def test_a_learning_rate_of_adamw_as_a_flag_needs_the_optimizer_beside_it():
    assert parse_flags(["--optimizer", "adamw", "--learning-rate", "6e-4"])[1]["matrix_lr"] == 6e-4
    for args in (["--learning-rate", "6e-4"], ["--name", "adamw", "--lr=6e-4"]):
        with pytest.raises(UsageError, match="is a rate of AdamW"):
            parse_flags(args)


def test_a_flag_of_another_trainer_for_what_paceline_does_not_have_is_refused():
    with pytest.raises(UsageError, match="paceline has no bias, and True asks for it"):
        parse_flags(["--bias", "true"])


@pytest.mark.parametrize(
    "flag, key", [("--gradient-accumulation-steps", "--total-batch-size"), ("--n_head", "--head-dim")]
)
def test_a_flag_of_nanogpt_that_depends_on_others_names_the_key_to_set(flag, key):
    with pytest.raises(UsageError, match=f"{flag} is nanoGPT's") as error:
        parse_flags([flag, "3"])
    assert error.value.fix.startswith(f"{key} N")


def test_nanochat_s_switch_for_fp8_is_a_precision(tmp_path):
    assert parse_flags(["--fp8"])[1]["precision"] == "fp8"
    for lines in ("fp8 = True\ndtype = 'bfloat16'\n", "dtype = 'bfloat16'\nfp8 = True\n"):
        config, _ = load_config(write(tmp_path / "a.py", lines), {})
        assert config.precision == "fp8"
    assert load_config(write(tmp_path / "a.py", "fp8 = False\ndtype = 'float16'\n"), {})[0].precision == "fp16"


@with_rows(
    ("args", "message", "fix"),
    [
        (["--depth", "many"], "--depth many is not an integer from 1 to 512", "--depth 4"),
        (["--depth", "6.0x"], "--depth 6.0x is not an integer from 1 to 512", "--depth 4"),
        (["--depth", "5k"], "--depth 5k is not an integer from 1 to 512", "--depth 4"),
        (["--nproc", "gpu"], "--nproc gpu is not an integer from 1 to 1,024, or auto", "--nproc auto"),
        (["--depth", "10%"], "--depth 10% is not an integer from 1 to 512", "--depth 4"),
        (["--depth", "30.5"], "--depth 30.5 is not an integer from 1 to 512", "--depth 30"),
        (
            ["--num-steps", "5k"],
            "--num-steps 5k is not an integer from 1 to 1,000,000,000, or auto",
            "--num-steps 5000",
        ),
        (
            ["--num-steps", "1.5 M"],
            "--num-steps 1.5 M is not an integer from 1 to 1,000,000,000, or auto",
            "--num-steps 1500000",
        ),
        (
            ["--memory-share", "65%"],
            "--memory-share 65% is not a number from 0.01 to 1, or auto",
            "--memory-share 0.65",
        ),
        (["--depth="], "--depth is empty", "give it a value, or leave it out"),
        (["--data", ""], "--data is empty", "give it a value, or leave it out"),
        (["--depth", "0"], "--depth 0 is out of range", "an integer from 1 to 512"),
        (
            ["--precision", "bf17"],
            "--precision bf17 is not known",
            "bf16, or another one of fp32, bf16, fp16, fp8, mxfp8, mxfp4, nvfp4, or auto",
        ),
        (["--warmdown-ratio", "nan"], "--warmdown-ratio nan is out of range", "a number from 0 to 1"),
        (["--compile=perhaps"], "--compile perhaps is not true or false, or auto", "--compile, --no-compile"),
        (["--depth"], "--depth has no value", "--depth 4"),
        (["--depth", "--seed", "3"], "--depth has no value", "--depth 4"),
        (["--depth", "3", "--depth=4"], "--depth is given twice", "give it once"),
        (["--compile", "--no-compile"], "--compile is given twice", "give it once"),
        (["--config", "a.toml", "b.toml"], "train takes one CONFIG, 2 are given: a.toml and b.toml", USAGE),
    ],
)
def test_a_wrong_value_is_refused_with_the_allowed_ones(args, message, fix):
    with pytest.raises(UsageError) as error:
        parse_flags(args)
    assert (error.value.message, error.value.fix) == (message, fix)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("depth = 'four'", "{file}:1: depth is 'four', not an integer from 1 to 512"),
        ("depth = true", "{file}:1: depth is True, not an integer from 1 to 512"),
        ("depth = 4.5", "{file}:1: depth is 4.5, not an integer from 1 to 512"),
        ("[model]\ndepth = 4", "{file}:1: [model] is a table, keys are flat"),
        ("num_iterations = 5", "{file}:1: unknown key num_iterations; paceline calls it num_steps"),
        ("dept = 5", "{file}:1: unknown key dept"),
    ],
)
def test_a_wrong_file_is_refused_and_named(tmp_path, text, message):
    file = write(tmp_path / "a.toml", text)
    with pytest.raises(PacelineError) as error:
        load_config(file, {})
    assert error.value.message == message.format(file=file)


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ('depth = "12"', "depth = 12"),
        ('num_steps = "1e3"', "num_steps = 1000"),
        ('warmup_steps = "0"', "warmup_steps = 0"),
        ('weight_decay = "0.1"', "weight_decay = 0.1"),
        ('compile = "true"', "compile = true"),
        ('n_embd = "auto"', "leave n_embd out"),
        ('depth = "600"', "depth = 4"),
    ],
)
def test_the_fix_of_a_value_in_quotes_is_the_same_value_without_them(tmp_path, line, fix):
    with pytest.raises(PacelineError) as error:
        load_config(write(tmp_path / "a.toml", line), {})
    assert error.value.fix == fix


LLAMA = '{\n "hidden_size": 4096,\n "num_hidden_layers": 32,\n "rms_norm_eps": 1e-05,\n "num_key_value_heads": 8\n}'


@pytest.mark.parametrize("name", ["config.json", "config.toml"])
@pytest.mark.parametrize(
    ("text", "lines"),
    [(LLAMA, "n_embd = 4096, depth = 32, n_kv_head = 8"), ("depth: 8\nlr: 3e-4", "depth = 8"), ("depth", "depth = 12")],
)
def test_the_fix_of_json_and_yaml_has_their_integers_as_toml(tmp_path, name, text, lines):
    with pytest.raises(PacelineError) as error:
        load_config(write(tmp_path / name, text), {})
    begin = "to begin one: paceline configs balanced > mine.toml"
    assert error.value.fix == f"write flat lines in a .toml file, such as {lines}; {begin}"


def test_toml_under_another_ending_is_refused_with_the_command_that_renames_it(tmp_path):
    path = write(tmp_path / "my.cfg", "depth = 8")
    with pytest.raises(PacelineError, match="is neither .toml nor .py") as error:
        load_config(path, {})
    assert error.value.fix == f"mv {path} {tmp_path / 'my.toml'}"


def test_a_python_file_of_literals_is_read_and_its_names_become_ours(tmp_path):
    text = "batch_size = 12  # rows\nblock_size = 1024\ngradient_accumulation_steps = 5 * 8\n"
    text += "max_iters = 600_000\nwandb_log = True\n"
    config, notes = load_config(write(tmp_path / "train_gpt2.py", text), {})
    assert (config.device_batch_size, config.sequence_len, config.total_batch_size) == (12, 1024, 12 * 1024 * 40)
    assert config.num_steps == 600_000
    assert notes == ["train_gpt2.py: not used by paceline: wandb_log"]


def test_a_python_file_is_never_executed_and_what_sets_nothing_is_passed_over(tmp_path):
    ran = tmp_path / "ran"
    text = (
        f"import os\ndepth = 4\nopen({str(ran)!r}, 'w')\nassert depth == 4\nuser_config = {{}}\nbetas = (0.9, 0.95)\n"
    )
    config, notes = load_config(write(tmp_path / "a.py", text), {})
    assert config.depth == 4
    assert notes == ["a.py: not executed: lines 1, 3, 4, 5 and 6"]
    assert not ran.exists()


def test_a_script_in_the_place_of_a_config_file_is_refused(tmp_path):
    path = write(tmp_path / "train.py", "import torch\n\nconfig = dict(depth=4)\n")
    with pytest.raises(PacelineError, match="train.py sets no key, and paceline executes no code") as error:
        load_config(path, {})
    assert error.value.fix == f"write lines such as `depth = 12`; a script starts with: paceline run -- {path}"


NANOCHAT = """
run = "dummy"
device_type = ""
depth = 12
aspect_ratio = 64
head_dim = 128
max_seq_len = 2048
window_pattern = "SSSL"
num_iterations = -1
target_flops = -1.0
target_param_data_ratio = 12
device_batch_size = 32
total_batch_size = -1
embedding_lr = 0.3
unembedding_lr = 0.008
weight_decay = 0.28
matrix_lr = 0.02
scalar_lr = 0.5
warmup_steps = 40
warmup_ratio = 0.0
warmdown_ratio = 0.65
final_lr_frac = 0.05
grad_clip = 0.0
resume_from_step = -1
eval_every = 250
eval_tokens = 80 * 524288
core_metric_every = 2000
sample_every = -1
save_every = -1
model_tag = ""
use_dummy_wandb = True
"""


def test_a_config_of_nanochat_starts_unchanged(tmp_path):
    config, notes = load_config(write(tmp_path / "base.py", NANOCHAT), {})
    expected = Config(
        depth=12, window_pattern="SSSL", device_batch_size=32, eval_tokens=80 * 524288, save_every=0, matrix_lr=0.02
    )
    assert config == expected
    assert notes == [
        'base.py: run = "dummy": the run gets a name by itself, and no tracker',
        "base.py: not used by paceline: aspect_ratio, target_flops, scalar_lr, warmup_ratio, resume_from_step, core_metric_every,"
        " use_dummy_wandb",
    ]


def test_all_wrong_lines_of_a_python_file_are_told_at_once_by_number(tmp_path):
    file = write(tmp_path / "a.py", "depth = 4\nbias = True\nblock_size = len('x')\nmax_iters = 'ten'\nnum_gpu = 2\n")
    with pytest.raises(PacelineError) as error:
        load_config(file, {})
    first, *others = error.value.message.splitlines()
    assert first == f"{file} has 4 lines that paceline cannot use:"
    assert [line.split(":")[0].strip() for line in others] == ["line 2", "line 3", "line 4", "line 5"]
    assert "paceline has no bias" in others[0]


def test_a_learning_rate_of_adamw_is_no_rate_of_muon(tmp_path):
    text = "learning_rate = 6e-4\nn_layer = 4\n"
    config, notes = load_config(write(tmp_path / "a.py", text), {})
    assert config.matrix_lr is None and "Muon trains the matrices" in notes[0]
    config, notes = load_config(write(tmp_path / "a.py", text + "optimizer = 'adamw'\n"), {})
    assert (config.matrix_lr, notes) == (6e-4, [])
    config, notes = load_config(write(tmp_path / "a.py", text), {"optimizer": "adamw"})
    assert (config.matrix_lr, notes) == (6e-4, [])


@pytest.mark.parametrize("line", ["lr = 3e-4", "learning_rate = 3e-4"])
def test_a_toml_file_with_a_rate_of_adamw_is_told_which_optimizer_it_is_for(tmp_path, line):
    with pytest.raises(PacelineError, match="a rate of AdamW; paceline calls it matrix_lr") as error:
        load_config(write(tmp_path / "a.toml", line), {})
    assert error.value.fix.startswith('matrix_lr = 0.0003 beside optimizer = "adamw"; for Muon leave it out')


@pytest.mark.parametrize(("name", "quote"), [("a.toml", '"'), ("a.py", "'")])
def test_a_file_s_rate_of_matrices_is_for_its_own_optimizer(tmp_path, name, quote):
    file = write(tmp_path / name, "matrix_lr = 0.1\n")
    config, notes = load_config(file, {"optimizer": "adamw"})
    assert config.matrix_lr is None
    assert notes == [f"{name}: matrix_lr 0.1 is for muon and is not used: adamw trains at its default rate"]
    assert load_config(file, {"optimizer": "muon"}) == (Config(matrix_lr=0.1), [])
    own = {"optimizer": "adamw", "matrix_lr": 0.01}
    assert load_config(file, own) == (Config(**own), [])
    file = write(tmp_path / name, f"matrix_lr = 0.005\noptimizer = {quote}adamw{quote}\n")
    assert load_config(file, {"optimizer": "adamw"})[0].matrix_lr == 0.005
    assert load_config(file, {"optimizer": "muon"})[0].matrix_lr is None


def test_what_a_file_sets_in_place_of_the_depth_stays_where_a_flag_sets_the_depth_and_a_note_says_so(tmp_path):
    file = write(
        tmp_path / "a.toml",
        "depth = 4\nn_embd = 128\nembedding_lr = 0.6\nweight_decay = 0.28\ntime = '2m'\ntotal_batch_size = 4096\n",
    )
    config, notes = load_config(file, {"depth": 8})
    assert (config.depth, config.n_embd, config.embedding_lr) == (8, 128, 0.6)
    flags = "--n-embd auto --total-batch-size auto --time auto --embedding-lr 0.3"
    assert notes == [
        f"a.toml: n_embd 128, total_batch_size 4096, time 2m, embedding_lr 0.6 stay as they are at depth 8;"
        f" to derive them from the depth: {flags}"
    ]
    assert load_config(file, {"depth": 8, "num_steps": 9, "n_embd": 256})[1] == [
        "a.toml: total_batch_size 4096, embedding_lr 0.6 stay as they are at depth 8;"
        " to derive them from the depth: --total-batch-size auto --embedding-lr 0.3"
    ]
    assert load_config(file, {"depth": 8, "num_steps": 9, "n_embd": 256, "total_batch_size": 8192})[1] == []
    by_depth = {"n_embd": None, "total_batch_size": None, "time": None, "embedding_lr": 0.3}
    assert load_config(file, {"depth": 8, **by_depth}) == (Config(depth=8), [])
    assert load_config(file, {"depth": 4})[1] == []
    assert load_config(write(tmp_path / "b.toml", "depth = 4\n"), {"depth": 8})[1] == []


@pytest.mark.parametrize("value", ["1e18 ** 64", "0 ** -1", "1 / 0", "1 // 0", "2 ** 65"])
def test_arithmetic_without_a_result_in_a_python_file_is_refused_as_code_is(tmp_path, value):
    _, notes = load_config(write(tmp_path / "a.py", f"x = {value}\nseed = 1\n"), {})
    assert notes == ["a.py: not executed: line 1"]
    with pytest.raises(PacelineError, match="a.py:1"):
        load_config(write(tmp_path / "a.py", f"depth = {value}\n"), {})


def test_off_is_off_under_either_name_and_what_a_function_does_inside_is_its_own(tmp_path):
    text = "eval_interval = -1; save_every = -1\ndef rate(step):\n    lr = depth = step\n    return lr\n"
    config, notes = load_config(write(tmp_path / "a.py", text), {})
    assert (config.eval_every, config.save_every, config.depth) == (0, 0, Config().depth)
    assert notes == ["a.py: not executed: line 2"]


def test_a_nanogpt_model_size_becomes_depth_width_and_head_dim(tmp_path):
    config, _ = load_config(write(tmp_path / "a.py", "n_layer = 6\nn_head = 6\nn_embd = 384\ndropout = 0.0\n"), {})
    assert (config.depth, config.n_embd, config.head_dim) == (6, 384, 64)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("conservative", (12, None, 24_576, 1_536)),
        ("balanced", (16, None, 49_152, 2_048)),
        ("aggressive", (20, None, 86_016, 3_072)),
    ],
)
def test_the_shipped_profiles_hold_their_sizes_and_say_their_share(name, values):
    config, _ = load_config(CONFIGS / f"{name}.toml", {})
    assert config.profile == name
    assert (config.depth, config.device_batch_size, config.total_batch_size, config.sequence_len) == values
    share = {"conservative": "48 %", "balanced": "65 %", "aggressive": "90 %"}[name]
    assert share in (CONFIGS / f"{name}.toml").read_text().splitlines()[0]


def test_every_key_says_what_it_is():
    assert all(key.about for key in KEYS.values())


@pytest.mark.parametrize(("first", "second"), [("num_steps", "epochs"), ("num_steps", "time"), ("epochs", "time")])
def test_two_lengths_at_once_are_refused(first, second):
    values = {"num_steps": 10, "epochs": 1.0, "time": "2m"}
    with pytest.raises(PacelineError) as error:
        load_config(None, {first: values[first], second: values[second]})
    assert (error.value.message, error.value.fix) == (f"{first} and {second} are both set", "give one of them")


def test_a_flag_for_one_length_replaces_the_files_other(tmp_path):
    file = write(tmp_path / "a.toml", 'time = "2m"\n')
    config, _ = load_config(file, {"num_steps": 10})
    assert (config.num_steps, config.time) == (10, None)
    config, _ = load_config(file, {"tokens_per_param": 5.0})
    assert (config.tokens_per_param, config.time) == (5.0, None)
    for flags in ({"time": "8h"}, {"epochs": 3.0}):
        config, _ = load_config(write(file, "num_steps = 10\n"), flags)
        assert (config.num_steps, config.time, config.epochs) == (None, flags.get("time"), flags.get("epochs"))


@pytest.mark.parametrize("text", ["2", "soon", "0s", "-2m"])
def test_a_time_that_is_no_duration_is_refused_with_examples(text):
    with pytest.raises(PacelineError) as error:
        load_config(None, {"time": text})
    assert error.value.message == f"time is {text!r}, not a duration"
    assert error.value.fix == "for example 2m, 8h or 1d12h"


def test_the_run_without_a_config_takes_about_two_minutes():
    config, _ = load_config(CONFIGS / "tiny.toml", {})
    assert (config.time, config.num_steps, config.eval_tokens) == ("2m", None, None)


def test_a_user_without_a_home_folder_is_told_to_set_one(monkeypatch):
    """As under `docker run --user 12345`, where HOME may be missing too."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "~")
    with pytest.raises(PacelineError, match="the home folder ~ is not known") as error:
        cache_dir(Config())
    assert error.value.fix.startswith("export HOME=")


@pytest.mark.parametrize("base", ["", "cache", "../cache"])
def test_a_cache_of_the_desktop_standard_that_is_no_absolute_path_is_ignored(monkeypatch, tmp_path, base):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    assert cache_dir(Config()) == tmp_path / ".cache" / "paceline"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    assert cache_dir(Config()) == tmp_path / "c" / "paceline"


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """The folder of a run, in runs/ of the current folder."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "books"
    (run / "checkpoints" / "step_000040").mkdir(parents=True)
    keys = Config(
        name="books",
        runs_dir="/elsewhere",
        hosts="ada,bob",
        depth=6,
        n_embd=384,
        n_kv_head=3,
        vocab_size=300,
        num_steps=40,
        data="/books",
        val_data="/held_out",
        text_field="body",
        seed=7,
    )
    (run / "config.toml").write_text(format_toml(keys))
    return run


def test_a_run_that_starts_with_the_weights_of_another_one_has_its_keys_but_the_name(trained):
    config = resolve_config(None, {"init_from": "books", "data": "/letters"})
    assert config == Config(
        depth=6, n_embd=384, n_kv_head=3, vocab_size=300, num_steps=40, data="/letters", seed=7,
        tokenizer=str(trained / "tokenizer" / "tokenizer.json"), init_from=str(trained),
    )  # fmt: skip


def test_the_field_of_the_text_of_a_run_and_its_validation_text_are_those_of_no_other_text(trained):
    for data, kept in ((None, ("body", "/held_out")), ("/letters", (None, None))):
        keys = {"init_from": "books"} | ({"data": data} if data else {})
        config = resolve_config(None, keys)
        assert (config.text_field, config.val_data) == kept
    assert resolve_config(None, {**keys, "text_field": "body"}).text_field == "body"
    assert resolve_config(None, {**keys, "val_data": "/other"}).val_data == "/other"


def test_what_a_config_file_does_not_set_is_as_other_weights_have_it(trained):
    file = write(trained.parent.parent / "a.toml", "init_from = 'books'")
    assert resolve_config(str(file), {}).depth == 6
    with pytest.raises(PacelineError, match="depth is 4, and books"):
        resolve_config(str(write(file, "init_from = 'books'\ndepth = 4")), {})


def test_a_config_file_beside_other_weights_takes_their_shape_and_sets_the_other_keys(trained):
    file = write(
        trained.parent.parent / "a.toml", "depth = 6\nnum_steps = 9\ninit_from = 'runs/books/checkpoints/step_000040'"
    )
    config = resolve_config(str(file), {})
    assert (config.n_embd, config.n_kv_head, config.vocab_size, config.num_steps) == (384, 3, 300, 9)
    assert config.init_from == str(trained / "checkpoints" / "step_000040")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"depth": 12}, "depth is 12, and books, whose weights it is to start with, has 6"),
        ({"vocab_size": 512}, "vocab_size is 512, and books"),
        ({"init_from": "letters"}, "init_from: no run letters"),
    ],
)
def test_weights_of_another_shape_or_of_no_run_are_refused(trained, keys, message):
    with pytest.raises(PacelineError, match=message):
        resolve_config(None, {"init_from": "books", **keys})


def test_an_export_is_refused_with_the_checkpoint_of_its_run(tmp_path):
    origin = '{"model_type": "paceline", "paceline": {"version": "1", "run": "books", "step": 40}}'
    write(tmp_path / "config.json", origin)
    with pytest.raises(PacelineError, match="is an export of books at step 40") as error:
        resolve_config(None, {"init_from": str(tmp_path)})
    assert "runs/books/checkpoints/step_000040" in error.value.fix


def test_an_export_beside_the_runs_does_not_hide_the_run_of_its_name(trained):
    (folder := trained.parent.parent / "books").mkdir()
    write(folder / "config.json", '{"paceline": {"run": "letters", "step": 40}}')
    assert find_training_run("books", runs_dir="runs").path.resolve() == trained


def test_nanogpt_s_value_for_random_weights_is_auto(tmp_path):
    assert load_config(write(tmp_path / "a.py", "init_from = 'scratch'\n"), {})[0].init_from is None


def test_a_config_that_is_cut_is_written_again_from_the_run_s_events(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = RunDir(Path("runs/old"))
    run.path.mkdir(parents=True)
    append_event(run, "launch", config=asdict(Config(depth=2)))
    config = Config(depth=3, name="old", data='B\u00fccher \U0001f642\x7f"', unembedding_lr=1e-05, packing="best-fit")
    append_event(run, "launch", config=asdict(config))
    run.events.write_text(run.events.read_text() + '{"event": "lau')
    run.config_toml.write_text("depth = 3\ndata = ")
    with pytest.raises(PacelineError) as error:
        find_training_run("old", runs_dir="runs")
    assert error.value.message.endswith("line 2, `data =`: Invalid value, and the file ends there")
    command = error.value.fix.partition(" as the last attempt had it: ")[2]
    subprocess.run(shlex.split(command), check=True)
    assert load_config(run.config_toml, {})[0] == config
    assert (run.path / "config.toml.damaged").read_text() == "depth = 3\ndata = "
    assert find_training_run("old", runs_dir="runs").config_toml == run.config_toml
    run.config_toml.unlink()
    for name, runs_dir in (("old", "runs"), ("runs/old", "elsewhere")):
        for find in (find_training_run, find_recorded_run):
            with pytest.raises(PacelineError, match=r"config\.toml is missing") as error:
                find(name, runs_dir=runs_dir)
    subprocess.run(
        shlex.split(error.value.fix.partition(" as the last attempt had it: ")[2].rpartition(", or ")[0]), check=True
    )
    assert load_config(run.config_toml, {})[0] == config


def test_a_config_without_events_has_no_command_that_writes_it(tmp_path):
    run = RunDir(tmp_path / "old")
    run.path.mkdir()
    run.config_toml.write_text("depth = 3\ndata = ")
    for event in ({}, {"config": None}, {"config": {"command": ["x"]}}):  # of a script, of an earlier version
        append_event(run, "launch", **event)
        with pytest.raises(PacelineError) as error:
            find_training_run(str(run.path), runs_dir="runs")
        assert error.value.fix.endswith("or restore it, such as from a copy of the run")
