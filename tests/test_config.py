"""One way to configure: defaults < file < flags, every wrong value refused with what would be right."""

from pathlib import Path

import pytest

from paceline.command_line import parse
from paceline.config import KEYS, Config
from paceline.config_file import format_toml, load_config
from paceline.errors import PacelineError, UsageError
from paceline.options import ConfigOptions

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
    [
        ["--device-batch-size", "8"],
        ["--device_batch_size", "8"],
        ["--device-batch-size=8"],
        ["--device_batch_size=8"],
    ],
)
def test_a_flag_takes_dashes_or_underscores_with_or_without_equals(args):
    assert parse_flags(args) == (None, {"device_batch_size": 8})


def test_the_config_file_stands_first_or_after_its_flag():
    assert parse_flags(["a.toml", "--depth", "2"]) == ("a.toml", {"depth": 2})
    assert parse_flags(["--config", "a.toml", "--depth", "2"]) == ("a.toml", {"depth": 2})


def test_a_switch_needs_no_value_and_no_turns_it_off():
    assert parse_flags(["--compile", "--no-activation-checkpointing"])[1] == {
        "compile": True,
        "activation_checkpointing": False,
    }
    assert parse_flags(["--compile", "false"])[1] == {"compile": False}
    assert parse_flags(["--compile", "auto"])[1] == {"compile": None}


def test_numbers_may_be_grouped():
    assert parse_flags(["--total-batch-size", "524_288"])[1] == {"total_batch_size": 524_288}
    assert parse_flags(["--total-batch-size", "524,288"])[1] == {"total_batch_size": 524_288}


def test_epochs_given_as_a_flag_replace_the_steps_of_the_file(tmp_path):
    file = write(tmp_path / "a.toml", "num_steps = 100\n")
    config, _ = load_config(file, {"epochs": 3.0})
    assert (config.num_steps, config.epochs) == (None, 3.0)


def test_the_written_config_reads_back_the_same(tmp_path):
    config = Config(name='quo"te\\', epochs=2.5, compile=False, data="a b/ü.txt")
    file = write(tmp_path / "a.toml", format_toml(config))
    assert load_config(file, {})[0] == config


def test_an_unknown_flag_names_the_nearest():
    with pytest.raises(UsageError) as error:
        parse_flags(["--device-batchsize", "8"])
    assert str(error.value) == "error: unknown option --device-batchsize\n  fix: did you mean --device-batch-size?"


def test_a_flag_of_another_trainer_is_told_by_our_name():
    with pytest.raises(UsageError) as error:
        parse_flags(["--max-seq-len", "512"])
    assert error.value.message == "unknown option --max-seq-len; paceline calls it sequence_len"
    assert error.value.fix == "--sequence-len 512"


@pytest.mark.parametrize(
    ("args", "message", "fix"),
    [
        (["--depth", "many"], "--depth many is not an integer from 1 to 512", "--depth 4"),
        (["--depth="], "--depth is empty", "give it a value, or leave it out"),
        (["--data", ""], "--data is empty", "give it a value, or leave it out"),
        (["--depth", "0"], "--depth 0 is out of range", "an integer from 1 to 512"),
        (["--precision", "bf17"], "--precision bf17 is not known", "one of fp32, bf16, fp16, or auto"),
        (["--warmdown-ratio", "nan"], "--warmdown-ratio nan is out of range", "a number from 0 to 1"),
        (["--compile=perhaps"], "--compile perhaps is not true or false, or auto", "--compile, --no-compile"),
        (["--depth"], "--depth has no value", "--depth 4"),
        (["--depth", "--seed", "3"], "--depth has no value", "--depth 4"),
        (["--depth", "3", "--depth=4"], "--depth is given twice", "give it once"),
        (["--compile", "--no-compile"], "--compile is given twice", "give it once"),
        (
            ["--config", "a.toml", "b.toml"],
            "train takes one CONFIG, 2 are given",
            USAGE,
        ),
    ],
)
def test_a_wrong_value_is_refused_with_the_allowed_ones(args, message, fix):
    with pytest.raises(UsageError) as error:
        parse_flags(args)
    assert (error.value.message, error.value.fix) == (message, fix)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("depth = 'four'", "{file}: depth is 'four', not an integer from 1 to 512"),
        ("depth = true", "{file}: depth is True, not an integer from 1 to 512"),
        ("depth = 4.5", "{file}: depth is 4.5, not an integer from 1 to 512"),
        ("[model]\ndepth = 4", "{file}: [model] is a table, keys are flat"),
        ("num_iterations = 5", "{file}: unknown key num_iterations; paceline calls it num_steps"),
        ("dept = 5", "{file}: unknown key dept"),
    ],
)
def test_a_wrong_file_is_refused_and_named(tmp_path, text, message):
    file = write(tmp_path / "a.toml", text)
    with pytest.raises(PacelineError) as error:
        load_config(file, {})
    assert error.value.message == message.format(file=file)


def test_a_python_file_of_literals_is_read_and_its_names_become_ours(tmp_path):
    text = "batch_size = 12  # rows\nblock_size = 1024\ngradient_accumulation_steps = 5 * 8\n"
    text += "max_iters = 600_000\nwandb_log = True\n"
    config, notes = load_config(write(tmp_path / "train_gpt2.py", text), {})
    assert (config.device_batch_size, config.sequence_len, config.total_batch_size) == (12, 1024, 12 * 1024 * 40)
    assert config.num_steps == 600_000
    assert notes == ["train_gpt2.py: not used by paceline: wandb_log"]


def test_a_python_file_is_never_executed(tmp_path):
    ran = tmp_path / "ran"
    file = write(tmp_path / "a.py", f"depth = 4\nopen({str(ran)!r}, 'w')\n")
    with pytest.raises(PacelineError, match="only `key = literal` lines are read"):
        load_config(file, {})
    assert not ran.exists()


def test_a_python_file_asking_for_dropout_is_refused(tmp_path):
    with pytest.raises(PacelineError, match="no dropout, and 0.1 asks for it"):
        load_config(write(tmp_path / "a.py", "dropout = 0.1\n"), {})


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
    config, _ = load_config(write(file, "num_steps = 10\n"), {"time": "8h"})
    assert (config.num_steps, config.time) == (None, "8h")


@pytest.mark.parametrize("text", ["2", "soon", "0s", "-2m"])
def test_a_time_that_is_no_duration_is_refused_with_examples(text):
    with pytest.raises(PacelineError) as error:
        load_config(None, {"time": text})
    assert error.value.message == f"time is {text!r}, not a duration"
    assert error.value.fix == "for example 2m, 8h or 1d12h"


def test_the_run_without_a_config_takes_about_two_minutes():
    config, _ = load_config(CONFIGS / "tiny.toml", {})
    assert (config.time, config.num_steps, config.eval_tokens) == ("2m", None, None)
