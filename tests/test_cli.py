"""The command line: help for every command, quick, and the README's own commands."""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rows import with_rows

import paceline
from paceline import options, run_options
from paceline.cli import COMMANDS, run_command
from paceline.command_line import parameters_of, parse
from paceline.config import KEYS, Config
from paceline.errors import UsageError
from paceline.terminal import tiny_values

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TAKES = {name: takes for name, (_, takes) in COMMANDS.items()}


def typed(line: str) -> list[str]:
    """The arguments of a README's or an example's line, without the shell's pipes and redirections."""
    words = shlex.split(line, comments=True)
    end = next((number for number, word in enumerate(words) if word in ("|", ">", "&", "&&", ";")), len(words))
    return words[1:end]


def options_of(args: list[str]) -> object:
    """Parses a whole command line, as far as a command sees it."""
    name = " ".join(args[:2]) if " ".join(args[:2]) in TAKES else args[0]
    return parse(args[len(name.split()) :], command=name, options=TAKES[name])


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"], ["help"]], ids=str)
def test_help_lists_every_command(args, capsys):
    assert run_command(args) == 0
    text = capsys.readouterr().out
    assert all(re.search(rf"^  {name} +\S", text, re.M) for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_help_with_an_example_and_stands_in_the_readme(name, capsys):
    assert run_command([*name.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: paceline {name}")
    examples = text.partition("examples:\n")[2].splitlines()
    assert any(f"paceline {name}" in line for line in examples)
    assert name == "completion" or f"paceline {name.split()[0]}" in README
    assert run_command(["help", *name.split()]) == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_stands_in_the_help_with_its_meaning_and_its_default(name, capsys):
    run_command([*name.split(), "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for parameter in parameters_of(TAKES[name]).values():
        if parameter.about == argparse.SUPPRESS:
            assert name in ("data prepare", "data info") and parameter.name not in options.DATA_KEYS
            continue
        assert len(parameter.about) > 3
        assert " ".join(f"{parameter.usage} {parameter.help}".split()) in text
        if parameter.default not in (None, ..., "", (), True, False):
            assert f"[{parameter.default}]".replace(".0]", "]") in text


@with_rows("name", COMMANDS)
def test_the_value_that_a_fix_suggests_for_an_option_is_one_that_it_takes(name):
    for parameter in parameters_of(TAKES[name]).values():
        if set(parameter.kinds) & {int, float}:
            parameter.parse(str(parameter.example()))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_read_by_the_code(name):
    """An option that no line of the package reads as an attribute would be a promise that nobody keeps."""
    code = "\n".join(path.read_text() for path in (ROOT / "paceline").rglob("*.py"))
    unread = [option for option in parameters_of(TAKES[name]) if not re.search(rf"\.{option}\b", code)]
    assert not [option for option in unread if f'"{option}"' not in code]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_of_the_help_parse(name, capsys):
    run_command([*name.split(), "--help"])
    for line in capsys.readouterr().out.partition("examples:\n")[2].splitlines():
        if line.startswith("  paceline"):
            options_of(typed(line))


def test_the_commands_of_the_readme_parse():
    lines = [line.removeprefix("$ ") for line in README.splitlines() if line.startswith("$ paceline ")]
    commands = [line for line in lines if typed(line)[:1] and typed(line)[0] in {name.split()[0] for name in COMMANDS}]
    assert len(commands) > 10
    for line in commands:
        if not {"...", "[CONFIG]"} & set(typed(line)):
            options_of(typed(line))


def test_the_help_of_train_shows_every_key_with_its_default(capsys):
    run_command(["train", "--help"])
    text = capsys.readouterr().out
    for key in KEYS:
        assert f"--{key.replace('_', '-')}" in text
    headings = re.findall(r"^(\w+):$", text, re.MULTILINE)
    assert headings[1:5] == ["run", "text", "model", "batch"] and headings.index("trouble") < headings.index("Slurm")


def test_the_help_shows_what_tiny_sets_where_a_command_takes_a_config(capsys):
    run_command(["train", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for key, value in tiny_values().items():
        assert f"(tiny: {value})" in text or getattr(Config, key) == value
    assert "tokens of the tokenizer that is trained [32768] (tiny: 4096)" in text
    for name in ("resume", "emit compose", "watch", "comm"):
        run_command([*name.split(), "--help"])
        assert ("(tiny: " in capsys.readouterr().out) == (name == "emit compose")


def test_the_help_of_data_prepare_shows_the_keys_that_it_uses_and_all_others_are_taken(capsys):
    run_command(["data", "prepare", "--help"])
    flags = re.findall(r"^  --([\w-]+)", capsys.readouterr().out, re.MULTILINE)
    assert {*flags} == {name.replace("_", "-") for name in options.DATA_KEYS} | {"verify", "json"}
    assert options_of(["data", "prepare", "--depth", "12"]).keys == {"depth": 12}


@pytest.mark.parametrize(("columns", "name"), [("80", "train"), ("120", "watch"), ("50", "plan"), ("50", "")])
def test_help_fits_the_terminal_and_has_no_colours(columns, name, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "paceline.cli", *name.split(), "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": columns, "FORCE_COLOR": "1"},
        check=True,
    )
    assert "\x1b" not in done.stdout
    prose = [line for line in done.stdout.splitlines() if not line.startswith(("  paceline", "usage:"))]
    assert max(map(len, prose)) <= max(64, int(columns))


@pytest.mark.parametrize(
    "args",
    [
        ["--device-batch-size", "8", "--no-check", "--no-compile"],
        ["--device_batch_size=8", "--check=false", "--compile", "false"],
        ["--device-batch-size=8", "--no_check", "--compile=no"],
    ],
    ids=" ".join,
)
def test_an_option_has_the_same_meaning_in_every_form(args):
    options = options_of(["train", "a.toml", *args])
    assert (options.check, options.config) == (False, "a.toml")
    assert options.keys == {"device_batch_size": 8, "compile": False}


@pytest.mark.parametrize(
    ("args", "fix"),
    [
        (["trian"], "paceline train"),
        (["chat"], "paceline sample"),
        (["compare", "a", "b"], "paceline runs show A B"),
        (["sft"], "paceline train --init-from RUN --data OTHER"),
        (["tokeniser", "train"], "paceline tokenizer train"),
        (["torch", "chekc"], "paceline torch check"),
        (["watch", "--onec"], "did you mean --once?"),
        (["train", "--eval", "3"], "did you mean --eval-every?"),
        (["run", "--quiet-rank", "x.py"], "did you mean --quiet-ranks?"),
        (["resume", "books", "--nprocs", "2"], "did you mean --nproc?"),
        (["explain", "--zzzzzz"], "see paceline explain --help"),
    ],
    ids=str,
)
def test_a_typo_is_answered_with_the_nearest_name(args, fix, capsys):
    assert run_command(args) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"  fix: {fix}"


def test_the_folder_of_the_runs_is_given_to_runs_as_to_every_command():
    assert options_of(["runs", "--runs-dir", "other"]) == options_of(["runs", "other"])


def test_a_group_of_commands_lists_its_actions(capsys):
    assert run_command(["tokenizer", "--help"]) == 0
    text = capsys.readouterr().out
    assert "tokenizer train" in text
    assert "  watch" not in text


def test_actions_of_a_command_that_is_also_a_group_stand_in_its_help_and_in_the_error(capsys):
    assert run_command(["runs", "--help"]) == 0
    assert capsys.readouterr().out.endswith(
        "also: paceline runs show\nalso: paceline runs tag\nalso: paceline runs note\n"
    )
    assert run_command(["runs", "compare", "a", "b"]) == 2
    assert capsys.readouterr().err.startswith("error: runs takes show or tag or note, not compare\n")


def test_python_m_runs_the_command():
    result = subprocess.run([sys.executable, "-m", "paceline", "nope"], capture_output=True, text=True)
    assert result.returncode == 2 and result.stderr.startswith("error: unknown command nope\n")


def test_the_version_is_printed(capsys):
    assert run_command(["--version"]) == 0
    assert re.fullmatch(r"paceline \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_a_reader_that_goes_away_is_no_error():
    code = "from paceline.cli import main; import sys; sys.argv = ['paceline', 'train', '--help']; main()"
    done = subprocess.run(
        f'{sys.executable} -c "{code}" | head -1', shell=True, capture_output=True, text=True, check=True
    )
    assert (done.stdout.count("\n"), done.stderr) == (1, "")


@pytest.mark.parametrize("closed, lost", [(">&-", "stdout"), ("2>&-", "stderr")])
def test_a_closed_descriptor_is_no_error(closed, lost):
    done = subprocess.run(
        f"{sys.executable} -m paceline.cli configs {closed}", shell=True, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr, bool(done.stdout)) == (0, "", lost != "stdout")


def test_the_readme_names_every_exit_code():
    assert (
        "Exit codes: 0 done, 1 your error with its fix, 2 wrong\nusage, 3 the training failed, 130 interrupted"
        in README
    )


@pytest.mark.parametrize("value", ["--a_b=c d", "-hello there", "--seed=3 x", "--prompt=x y", "-", "-1", "a=b", "auto"])
def test_a_value_reaches_its_option_as_it_was_typed(value):
    assert parse(["run1", "--prompt", value], command="sample", options=run_options.SampleOptions).prompt == value
    assert parse([f"--prompt={value}", "run1"], command="sample", options=run_options.SampleOptions).prompt == value


@pytest.mark.parametrize(
    ("command", "takes", "line", "message"),
    [
        ("plan", options.PlanOptions, ["-m"], "unknown option -m"),
        ("plan", options.PlanOptions, ["--gpu", "-m", "x"], "--gpu has no value"),
        ("plan", options.PlanOptions, ["--depth 8"], "unknown option --depth 8"),
        ("plan", options.PlanOptions, ["-5"], "unknown option -5"),
        ("run", options.ScriptOptions, ["--name", "-m", "train.py"], "--name has no value"),
        ("run", options.ScriptOptions, ["--nproc", "-m", "x"], "--nproc has no value"),
        ("plan", options.PlanOptions, ["--config=a", "--config", "b"], "--config is given twice"),
    ],
)
def test_what_begins_with_a_dash_is_an_option_unless_it_is_a_value(command, takes, line, message):
    with pytest.raises(UsageError) as error:
        parse(line, command=command, options=takes)
    assert error.value.message == message


def test_behind_two_dashes_a_name_may_begin_with_a_dash():
    args = parse(["--json", "a.log", "--", "-x.log", "--json"], command="explain", options=run_options.ExplainOptions)
    assert (args.json, args.logs) == (True, ("a.log", "-x.log", "--json"))
    assert parse(["--", "-x"], command="runs show", options=run_options.RunsShowOptions).runs == ("-x",)


@pytest.mark.parametrize("line", [["--depth", "--help"], ["--depth", "x", "-h"], ["--help", "--nonsense"]])
def test_help_wins_over_a_mistake(line, capsys):
    assert run_command(["plan", *line]) == 0
    assert capsys.readouterr().out.startswith("usage: paceline plan")


@pytest.mark.parametrize(
    "args, fix",
    [
        (["sample", "a", "--max-new-tokens", "20"], "--tokens 20"),
        (["sample", "a", "--start=Once upon"], "--prompt 'Once upon'"),
        (["train", "--resume"], "paceline resume RUN"),
        (["train", "--wandb"], "--track wandb"),
        (["train", "--report-to", "wandb"], "--track wandb"),
        (["train", "--tags", "a"], "did you mean --tag?"),
        (["resume", "a", "--tag", "wide"], "paceline runs tag RUN TAG"),
        (
            ["train", "--matrix-lr", "0.01,0.02"],
            "one run for each: for x in 0.01 0.02; do paceline ... --matrix-lr $x; done",
        ),
        (["train", "--depth", "4, 8"], "one run for each: for x in 4 8; do paceline ... --depth $x; done"),
        (["sample", "a", "--temperature", "0,5"], "--temperature 0.8"),
    ],
)
def test_what_other_tools_take_has_a_fix_of_our_own(args, fix, capsys):
    assert run_command(args) == 2
    assert capsys.readouterr().err.endswith(f"  fix: {fix}\n")


@pytest.mark.parametrize("args", ["train --quux", "train --node-rank 1", "plan --colour red", "train --lrs 3"])
def test_a_name_that_is_near_to_none_gets_no_suggestion_that_leads_astray(args, capsys):
    assert run_command(args.split()) == 2
    assert capsys.readouterr().err.endswith(f"  fix: see paceline {args.split()[0]} --help\n")


def test_the_configs_of_the_package_are_found_by_name_in_any_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_command(["plan", "balanced", "--gpu", "H100"]) == 0
    by_name, notes = capsys.readouterr()
    assert notes == ""
    assert run_command(["plan", "configs/balanced.toml", "--gpu", "H100"]) == 0
    assert capsys.readouterr() == (
        by_name,
        "note    configs/balanced.toml is not here: this is the config balanced of paceline\n",
    )
    (tmp_path / "balanced.toml").write_text("depth = 3\n")
    assert run_command(["plan", "balanced.toml", "--gpu", "H100"]) == 0
    assert capsys.readouterr().out.startswith("model   depth 3,")
    assert run_command(["plan", "elsewhere.toml"]) == 1
    assert "fix: give one that does: balanced.toml, tiny, conservative, balanced, aggressive" in capsys.readouterr().err
    assert run_command(["plan", "blanced"]) == 1
    assert "fix: give one that does: balanced\n" in capsys.readouterr().err


def test_the_configs_of_the_package_are_listed_and_printed(capsys):
    assert run_command(["configs"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["config", "depth", "parameters", "length", "tokens", "a", "step"]
    assert [line.split()[0] for line in lines] == ["tiny", "conservative", "balanced", "aggressive"]
    assert run_command(["configs", "balanced"]) == 0
    assert capsys.readouterr().out == (ROOT / "configs" / "balanced.toml").read_text()
    assert run_command(["configs", "balanced", "--json"]) == 0
    [facts] = json.loads(capsys.readouterr().out)
    assert (facts["name"], facts["depth"], facts["total_batch_size"]) == ("balanced", 16, 49_152)
    assert run_command(["configs", "balancd"]) == 1  # as `plan balancd`
    assert capsys.readouterr().err == "error: no config balancd\n  fix: paceline configs balanced\n"
    assert run_command(["configs", "nosuch"]) == 1
    assert capsys.readouterr().err.endswith("  fix: one of tiny, conservative, balanced, aggressive\n")


@pytest.mark.parametrize("words", [["tokenizer", "train"], ["comm", "--device", "cpu", "--nproc", "2"]], ids=" ".join)
def test_a_place_where_no_file_can_be_made_is_refused_before_any_work(capsys, words):
    assert run_command([*words, "--out", "/proc/a.json"]) == 1
    error, fix = capsys.readouterr().err.splitlines()
    assert error.startswith("error: /proc/a.json cannot be written: ")
    assert fix == "  fix: --out FILE in a place you can write"


def test_ctrl_c_while_the_command_is_imported_ends_it_without_a_traceback(capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "paceline.cli")
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=interrupt)])
    with pytest.raises(SystemExit, match="130"):
        paceline.main()
    assert capsys.readouterr().err == "interrupted\n"


def test_options_are_frozen_and_equal_by_their_values_and_refuse_unknown_and_missing_ones():
    shown = run_options.RunsShowOptions(runs=("a",))
    assert (shown.runs, shown.runs_dir, shown.json) == (("a",), "runs", False)
    assert replace(shown, json=True) == run_options.RunsShowOptions(runs=("a",), json=True) != shown
    assert repr(run_options.TokenizerInfoOptions(file="a")) == "TokenizerInfoOptions(json=False, file='a', text=None)"
    assert options.PlanOptions().keys is not options.PlanOptions().keys
    with pytest.raises(FrozenInstanceError):
        shown.json = True
    for values in ({}, {"runs": (), "run": "a"}):
        with pytest.raises(TypeError):
            run_options.RunsShowOptions(**values)
