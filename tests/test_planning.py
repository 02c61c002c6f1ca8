"""`paceline plan` as a user meets it: what it prints and answers, for GPUs that are not here."""

import functools
import itertools
import json
import re
import shlex
import subprocess
import sys

import pytest

from paceline.cli import run_command
from paceline.config import KEYS, Config
from paceline.data.prepare import prepare
from paceline.data.tokenizer import train_tokenizer
from paceline.errors import PlanError
from paceline.launch.emit import cluster_job
from paceline.launch.sbatch import plan_job
from paceline.launch.train import start_run
from paceline.options import TrainOptions
from paceline.plan import query
from paceline.plan.gpu_table import find_gpu
from paceline.run_options import EmitK8sOptions
from paceline.slurm import parse_partition
from paceline.units import MIB

TWO = ["--gpu", "RTX 5090", "--gpus", "2"]


@pytest.fixture(autouse=True)
def nothing_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")


SHARED = {}  # of plans for a time or a budget, which take seconds, the text by the words


def plan(capsys, *words: str) -> str:
    if (text := SHARED.get(words)) is None:
        assert run_command(["plan", *words]) == 0
        text = capsys.readouterr().out
        if {"--time", "--budget"} & set(words):
            SHARED[words] = text
    return text


def refused(capsys, *words: str) -> tuple[str, str]:
    assert run_command(["plan", *words]) in (1, 2)
    error, fix = capsys.readouterr().err.splitlines()
    return error.removeprefix("error: "), fix.removeprefix("  fix: ")


def table(text: str) -> list[list[str]]:
    """Cells of a printed table, columns two spaces apart."""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()]


def test_a_plan_is_one_screen_and_says_what_it_stands_on(capsys):
    lines = plan(capsys, "configs/balanced.toml", *TWO).splitlines()
    starts = [line[:8].strip() for line in lines if line and not line.startswith(" ")]
    assert starts == ["model", "step", "length", "device", "memory", "time", "run", "helps", "assumed"]
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120
    assert "2 x NVIDIA GeForce RTX 5090, bf16, muon, states sharded" in lines[3]


def test_the_parts_add_up_to_what_is_needed_and_with_what_is_free_to_the_card(capsys):
    answer = json.loads(plan(capsys, "configs/balanced.toml", *TWO, "--json"))
    memory = answer["memory"]
    assert sum(memory["parts"].values()) == max(memory["phases"].values()) < memory["allocated_bytes"]["expected"]
    assert memory["process_bytes"]["expected"] > memory["allocated_bytes"]["expected"]
    assert memory["card_bytes"] == find_gpu("RTX 5090").memory_mib * MIB
    shown = plan(capsys, "configs/balanced.toml", *TWO)
    shares = [int(row.split("%")[0].split()[-1]) for row in shown.splitlines() if " %  " in row and "GiB" in row]
    assert 95 <= sum(shares) <= 105


def test_the_bars_stand_end_to_end(capsys):
    rows = [line for line in plan(capsys, "configs/balanced.toml", *TWO).splitlines() if " %  " in line]
    bars = [row.split(" %  ", 1)[1] for row in rows if "needed" not in row]
    filled = [(len(bar) - len(bar.lstrip(" ")), len(bar)) for bar in bars]
    for (_, end), (start, _) in itertools.pairwise(filled):
        assert start in (end - 1, end)
    assert bars[-1].strip("· ") == ""


def test_what_is_aimed_at_is_the_profile_s_share(capsys):
    shares = [
        json.loads(plan(capsys, "configs/balanced.toml", *TWO, "--profile", name, "--json"))["memory_share"]
        for name in ("conservative", "balanced", "aggressive")
    ]
    assert shares == [0.48, 0.65, 0.90]


@pytest.mark.parametrize("words", [["--depth", "24"], ["--depth", "20", "--device-batch-size", "1"]], ids=" ".join)
def test_flags_that_would_help_give_the_speed_that_they_promise(capsys, words):
    before = json.loads(plan(capsys, *TWO, *words, "--json"))
    promised = [lever for lever in before["levers"] if lever["what"].startswith("--")]
    assert promised
    for lever in promised:
        changed = lever["what"].split()
        keys = words[:2] if "--device-batch-size" in changed else words
        after = json.loads(plan(capsys, *TWO, *keys, *changed, "--json"))
        gain = after["cost"]["tok_per_sec"]["expected"] / before["cost"]["tok_per_sec"]["expected"] - 1
        assert gain == pytest.approx(lever["gain"])


def test_a_card_without_bf16_is_offered_fp16_unless_its_precision_is_set(capsys):
    def levers(*words):
        return {
            lever["what"]: lever["gain"]
            for lever in json.loads(plan(capsys, "--gpu", "T4", *words, "--json"))["levers"]
        }

    assert levers()["--precision fp16"] > 3
    assert "--precision fp16" not in {**levers("--precision", "fp32"), **levers("--precision", "fp16")}


def test_other_hardware_and_a_larger_batch_give_the_speed_that_they_promise(capsys):
    hosts = ["--gpu", "RTX 5090", "--hosts", "2"]
    before = json.loads(plan(capsys, *hosts, "--json"))
    words = {
        "twice the total batch": [*hosts, "--total-batch-size", str(2 * before["total_batch_size"])],
        "25GbE between the hosts": [*hosts, "--link", "25GbE"],
        "all 2 GPUs in one host": TWO,
    }
    promised = {lever["what"]: lever["gain"] for lever in before["levers"]}
    for what, flags in words.items():
        after = json.loads(plan(capsys, *flags, "--json"))
        gain = after["cost"]["tok_per_sec"]["expected"] / before["cost"]["tok_per_sec"]["expected"] - 1
        assert gain == pytest.approx(promised[what])


@pytest.mark.parametrize("hosts", ["0", "1025", "1000000"])
def test_a_number_of_hosts_that_no_run_may_have_is_refused(capsys, hosts):
    message, fix = refused(capsys, "--gpu", "RTX 5090", "--hosts", hosts)
    assert (message, fix) == (f"--hosts {hosts} is out of range", "a number from 1 to 1,024, or names")


def test_a_time_of_seconds_is_enough_where_the_smallest_model_takes_no_minute(capsys):
    _, fix = refused(capsys, "--gpu", "RTX 5090", "--time", "1s")
    flag, seconds, *words = fix.split()
    assert (flag, words) == ("--time", ["allows", "the", "smallest"]) and int(seconds.removesuffix("s")) < 60
    assert plan(capsys, "--gpu", "RTX 5090", flag, seconds).startswith("advice  depth 1 ")


def test_cards_stand_side_by_side(capsys):
    head, *rows = table(plan(capsys, "configs/balanced.toml", "--compare", "RTX 4090,RTX 5090,H100", "--gpus", "2"))
    assert "  ".join(head) == "GPU  rows  batch  memory  of card  fits  checkpointing  step  tok/s  mfu  run  kWh"
    assert [row[0] for row in rows] == ["RTX 4090", "RTX 5090", "H100"]
    speeds = [int(row[8].replace(",", "")) for row in rows]
    assert speeds == sorted(speeds)


def test_a_card_without_a_time_stands_beside_those_that_cost_something(capsys):
    head, *rows = table(plan(capsys, "--compare", "RTX PRO 4000,H100", "--price", "2/gpu-hour"))
    assert head[-1] == "cost"
    assert rows[0][-5:] == ["n/a"] * 5 and float(rows[1][-1].replace(",", "")) > 0


def test_cards_in_different_numbers_are_compared(capsys):
    words = ("configs/balanced.toml", "--compare", "2x RTX 5090,H100")
    rows = json.loads(plan(capsys, *words, "--json"))
    assert [(row["GPU"], row["world_size"]) for row in rows] == [("2x RTX 5090", 2), ("H100", 1)]
    _, one, two = table(plan(capsys, "--compare", "1x H100,2x H100", "--link", "10GbE"))  # one card alone needs no link
    assert (one[0], two[0], "yes" in one, "yes" in two) == ("1x H100", "2x H100", True, True)
    error, _ = refused(capsys, "--compare", "1x H100,1x A100", "--link", "10GbE")
    assert error == "--link 10GbE, but one device alone sends nothing"


def test_a_key_with_a_fixed_list_is_swept_over_it(capsys):
    values = {"precision": KEYS["precision"].choices, "activation_checkpointing": ("False", "True", "relu", "mlp")}
    values |= {"compile": ("False", "True"), "shard": KEYS["shard"].choices}
    for key, names in values.items():
        _, *rows = table(plan(capsys, "configs/balanced.toml", "--gpu", "H100", "--sweep", key))
        assert [row[0] for row in rows[: len(names)]] == list(names)
    assert "none: shard = none is plain DDP" in plan(capsys, "balanced", *TWO, "--sweep", "shard")


def test_a_card_on_which_nothing_fits_has_its_line_and_its_reason(capsys):
    text = plan(capsys, "--depth", "24", "--compare", "RTX 3060,H200", "--num-steps", "10")
    small, large, _, reason = text.splitlines()[1:]
    assert small.split()[:5] == ["RTX", "3060", "22.0", "GiB", "no"] or " no" in small
    assert " yes " in large
    assert reason.startswith("RTX 3060: ") and "needed on each GPU with device_batch_size 1" in reason


def test_a_sweep_of_rows_takes_every_divisor_of_a_device_s_rows(capsys):
    words = ["configs/balanced.toml", *TWO, "--sweep", "device_batch_size", "--json"]
    found = json.loads(plan(capsys, *words))
    assert [each["device_batch_size"] for each in found] == [1, 2, 3, 4, 6, 12]
    needs = [each["memory"]["process_bytes"]["expected"] for each in found]
    assert needs == sorted(needs)
    assert {each["total_batch_size"] for each in found} == {49_152}


def test_a_sweep_takes_values_of_any_key(capsys):
    rows = table(plan(capsys, *TWO, "--sweep", "depth=4,8", "--num-steps", "10"))
    assert [row[0] for row in rows] == ["depth", "4", "8"]
    assert [row[0] for row in table(plan(capsys, "tiny", *TWO, "--sweep", "num_steps=10,20"))] == [
        "num_steps",
        "10",
        "20",
    ]


def test_a_sweep_of_optimizers_uses_a_file_s_rate_for_the_file_s_own(capsys):
    rows = json.loads(plan(capsys, "tiny", "--sweep", "optimizer", "--json"))
    rates = {row["optimizer"]: row["groups"]["matrix"]["lr"] for row in rows}
    alone = {name: json.loads(plan(capsys, "tiny", "--optimizer", name, "--json")) for name in rates}
    assert rates == {name: facts["groups"]["matrix"]["lr"] for name, facts in alone.items()}


def test_a_time_gives_the_deepest_model_whose_length_ends_in_it(capsys):
    answer = json.loads(plan(capsys, *TWO, "--time", "12h", "--json"))
    assert answer["advice"]["depth"] == answer["model"]["n_layer"]
    assert answer["cost"]["run"]["hours"]["expected"] <= 12
    deeper = json.loads(plan(capsys, *TWO, "--depth", str(answer["advice"]["depth"] + 1), "--json"))
    assert deeper["cost"]["run"]["hours"]["expected"] > 12
    assert answer["advice"]["val_bpb"] is None


def test_a_budget_is_time_at_a_price(capsys):
    budget = json.loads(plan(capsys, *TWO, "--budget", "24", "--price", "1/gpu-hour", "--json"))["advice"]
    time = json.loads(plan(capsys, *TWO, "--time", "12h", "--json"))["advice"]
    depth, _, hours = time.pop("deeper").partition(" takes ")
    assert re.fullmatch(rf"{depth} costs \d\d\.\d\d and takes {hours}", budget.pop("deeper"))
    assert budget == time


def test_measured_points_of_the_recipe_give_an_expected_val_bpb(capsys):
    text = plan(capsys, "--gpu", "H100", "--gpus", "8", "--time", "3h", "--data", "hf:karpathy/climbmix-400b-shuffle")
    assert "val_bpb 0.713 to 0.723" in text


def test_hosts_without_a_named_link_get_an_assumed_one_that_is_said(capsys):
    text = plan(capsys, *TWO, "--hosts", "2", "--num-steps", "10")
    assert "4 x NVIDIA GeForce RTX 5090 on 2 hosts" in text
    assert "10GbE" in text and "assumed" in text


def test_what_a_slow_link_between_hosts_costs_is_said_with_both_speeds(capsys):
    slow = plan(capsys, "--gpu", "RTX 5090", "--hosts", "2", "--link", "1GbE", "--num-steps", "10")
    [line] = [line for line in slow.splitlines() if line.startswith("hosts ")]
    together, alone = (
        int(figure.replace(",", "")) for figure in re.findall(r"([\d,]+) tok/s", slow.partition("hosts ")[2])[:2]
    )
    assert "slower than one alone" in line and together < alone
    one = json.loads(plan(capsys, "--gpu", "RTX 5090", "--num-steps", "10", "--total-batch-size", "524288", "--json"))
    assert one["cost"]["tok_per_sec"]["expected"] == pytest.approx(alone, rel=0.01)
    fast = json.loads(
        plan(capsys, "--gpu", "RTX 5090", "--hosts", "2", "--link", "100GbE", "--num-steps", "10", "--json")
    )
    assert fast["cost"]["hosts"]["tok_per_sec"] > 1.5 * fast["cost"]["hosts"]["one_host_tok_per_sec"]
    assert one["cost"]["hosts"] is None


def test_a_cpu_that_was_not_measured_has_no_time_and_says_why(capsys):
    text = plan(capsys, "--device", "cpu", "--nproc", "2")
    assert "time    n/a, this CPU was not measured yet: paceline plan --measure does it\n" in text


def test_a_plan_is_the_plan_that_train_would_take(capsys):
    answer = json.loads(plan(capsys, "--device", "cpu", "--nproc", "2", "--json"))
    assert (answer["device_batch_size"], answer["grad_accum_steps"], answer["total_batch_size"]) == (8, 3, 12_288)


@pytest.mark.parametrize("words", [["--json"], ["--tokens-per-param", "20", "--json"]])
def test_the_vocabulary_of_a_plan_is_that_of_the_tokenizer_file(capsys, tmp_path, words):
    tokenizer = train_tokenizer(iter(["the vocabulary of a plan is that of the tokenizer"]), vocab_size=270)
    tokenizer.save(file := tmp_path / "own.json")
    answer = json.loads(plan(capsys, *TWO, f"--tokenizer={file}", *words))
    assert answer["model"]["vocab_size"] == tokenizer.vocab_size == 270
    same = json.loads(plan(capsys, *TWO, "--vocab-size=270", *words))
    assert (answer["num_steps"], answer["memory"]) == (same["num_steps"], same["memory"])


@pytest.mark.parametrize("case", ["prepared text", "tokenizer", "neither"])
def test_plan_emit_a_job_of_slurm_and_the_first_check_of_train_take_one_vocabulary(tmp_path, capsys, monkeypatch, case):
    (tmp_path / "books.txt").write_text("a small text gives a small vocabulary\n" * 400)
    keys = {"data": str(tmp_path / "books.txt"), "cache_dir": str(tmp_path / "c"), "vocab_size": 999, "num_steps": 10}
    keys |= {"depth": 4, "packing": "stream", "runs_dir": str(tmp_path / "runs")}
    expected = 999
    if case == "prepared text":
        kwargs = {"tokenizer": None, "vocab_size": 999, "cache_dir": tmp_path / "c"}
        expected = prepare(keys["data"], **kwargs).meta["vocab_size"]
        assert expected < 999
    elif case == "tokenizer":
        train_tokenizer(iter(["a vocabulary"]), vocab_size=260).save(tmp_path / "own.json")
        keys["tokenizer"], expected = str(tmp_path / "own.json"), 260
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in keys.items()]
    assert json.loads(plan(capsys, *TWO, *flags, "--json"))["model"]["vocab_size"] == expected
    config = Config(**keys)
    job = plan_job(config, parse_partition("PartitionName=gpu State=UP", "8 idle gpu:h100:4"), nodes=2, gpus=4)
    assert job.plan.model.vocab_size == expected
    sizes = []

    def planned(*args, vocab_size, **kwargs):
        sizes.append(vocab_size)
        raise PlanError("one size is enough", fix="none")

    monkeypatch.setattr("paceline.launch.emit.forecast", planned)
    monkeypatch.setattr("paceline.launch.train.make_plan", planned)
    with pytest.raises(PlanError):
        cluster_job(EmitK8sOptions(gpu="H100", keys=keys))
    with pytest.raises(PlanError):
        start_run(config, TrainOptions(keys=keys))
    assert sizes == [expected, expected]


def test_each_line_of_a_sweep_has_the_vocabulary_of_its_tokenizer(capsys, tmp_path):
    sizes = {}
    for size in (270, 280):
        text = " ".join(f"token {number}" for number in range(200))
        train_tokenizer(iter([text]), vocab_size=size).save(file := tmp_path / f"{size}.json")
        sizes[str(file)] = size
    rows = json.loads(plan(capsys, *TWO, f"--sweep=tokenizer={','.join(sizes)}", "--json"))
    assert {row["tokenizer"]: row["model"]["vocab_size"] for row in rows} == sizes


def test_a_vocab_size_beside_a_tokenizer_has_no_effect_and_is_no_sweep(capsys, tmp_path):
    train_tokenizer(iter(["the vocabulary of a plan"]), vocab_size=265).save(file := tmp_path / "own.json")
    message, fix = refused(capsys, *TWO, f"--tokenizer={file}", "--sweep=vocab_size=300,400")
    assert (message, fix) == (f"--sweep vocab_size has no effect: {file} has its own vocabulary", "--tokenizer auto")
    assert run_command(["plan", *TWO, f"--tokenizer={file}", "--vocab-size=300"]) == 0
    assert capsys.readouterr().err == f"note    --vocab-size 300 has no effect: {file} has a vocabulary of 265\n"


@pytest.mark.parametrize("content, reason", [(None, "no such tokenizer file"), ("{}", "is not a tokenizer.json")])
def test_a_tokenizer_that_cannot_be_read_leaves_a_plan_its_assumption(capsys, tmp_path, content, reason):
    file = tmp_path / "own.json"
    if content is not None:
        file.write_text(content)
    assert run_command(["plan", *TWO, f"--tokenizer={file}"]) == 0
    shown = capsys.readouterr()
    assert "vocabulary 32,768," in shown.out
    assert shown.err.startswith("note    a vocabulary of 32,768 is assumed: ") and reason in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.slow
def test_exact_traces_the_plan_that_was_found(capsys, monkeypatch):
    monkeypatch.setattr(query, "run_module", functools.cache(query.run_module))  # the same trace for both outputs
    answer = json.loads(plan(capsys, *TWO, "--depth", "2", "--num-steps", "1", "--exact", "--json"))
    assert abs(answer["exact"]["difference"]) < 0.03
    assert answer["exact"]["reserved_bytes"] >= answer["exact"]["allocated_bytes"] >= answer["exact"]["traced_bytes"]
    shown = plan(capsys, *TWO, "--depth", "2", "--num-steps", "1", "--exact")
    assert "exact   " in shown and "reserved with expandable segments" in shown


def test_without_torch_numpy_and_rich_a_plan_is_made(tmp_path):
    code = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'rich', 'tokenizers', 'tiktoken', 'safetensors', 'psutil'): sys.modules[name] = None\n"
        "from paceline.cli import run_command\n"
        "sys.exit(run_command(['plan', '--gpu', 'RTX 5090', '--gpus', '2']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("model   depth 12, 768 wide")


REFUSALS = [
    (["--gpu", "RTX 5091"], "no GPU called RTX 5091 is known", "RTX 5090"),
    (["--gpu", "RTX 4060 Ti"], "the name of 2 cards", "RTX 4060 Ti 8GB"),
    (["--gpus", "0", "--gpu", "5090"], "--gpus 0 is out of range", "from 1"),
    ([*TWO, "--link", "warp"], "warp is not a known link", "10GbE"),
    (["balanced", "--gpus", "5", "--gpu", "H100", "--link", "warp"], "warp is not a known link", "10GbE"),
    ([*TWO, "--slurm-args", "--time=3"], "--slurm-args is about --slurm", "--slurm, or leave it out"),
    ([*TWO, "--price", "3"], "does not say what is paid for", "2.50/gpu-hour"),
    ([*TWO, "--price", "-1/kWh"], "does not say what is paid for", "2.50/gpu-hour"),
    (["--device", "cpu", "--price", "2/gpu-hour"], "this CPU was not measured yet", "paceline plan --measure"),
    (["--gpu", "RTX PRO 4000", "--price", "2/gpu-hour"], "in no table", "leave --price out"),
    ([*TWO, "--sweep", "depth", "--follow-rows"], "needs --sweep device_batch_size", "--sweep device_batch_size --follow-rows"),
    ([*TWO, "--budget", "50"], "--budget needs a price", "--price 2.50/gpu-hour"),
    ([*TWO, "--time", "soon"], "--time soon: not a time", "--time 12h"),
    ([*TWO, "--budget", "9", "--price", "1/gpu-hour", "--depth", "9"], "depth is set", "leave --depth out"),
    (["tiny", *TWO, "--budget", "9", "--price", "1/gpu-hour"], "n_embd is set", "--n-embd auto"),
    (["balanced", *TWO, "--time", "soon"], "'soon', not a duration", "8h"),
    ([*TWO, "--sweep", "colour"], "unknown key colour", "train --help"),
    ([*TWO, "--sweep", "learning_rate=1,2"], "paceline calls it matrix_lr", "--sweep matrix_lr=1,2"),
    ([*TWO, "--sweep", "dept=4,8"], "unknown key dept", "--sweep depth=4,8"),
    ([*TWO, "--sweep", "vocab_size"], "which values?", "--sweep vocab_size=A,B,C"),
    ([*TWO, "--sweep", "depth=4,many"], "--depth many is not", "--sweep depth=A,B,C, each an integer from 1 to 512"),
    ([*TWO, "--compare", ","], "names no GPU", "--compare"),
    ([*TWO, "--epochs", "2"], "given in epochs", "--num-steps N"),
    ([*TWO, "--compare", "H100"], "--compare makes a table, which takes no --gpu", "leave --gpu out"),
    (["--compare", "H100", "--time", "1h"], "takes no --time", "--depth N or a CONFIG, whose length --time then is"),
    (["--compare", "H100", "--sweep", "depth"], "takes no --sweep", "leave --sweep out"),
    (["--compare", "H100", "--exact"], "takes no --exact", "leave --exact out"),
    ([*TWO, "--sweep", "depth", "--budget", "9", "--price", "1/gpu-hour"], "takes no --budget", "leave --budget out"),
    ([*TWO, "--sweep", "depth", "--exact"], "takes no --exact", "leave --exact out"),
    ([*TWO, "--device", "cpu"], "--gpu is about GPUs, but device is cpu", "--device cuda"),
    (["--compare", "H100", "--device", "cpu"], "--compare is about GPUs", "--device cuda"),
    ([*TWO, "--follow-rows"], "needs --sweep device_batch_size", "--sweep device_batch_size --follow-rows"),
    ([*TWO, "--time", "12h", "--n-kv-head", "2"], "n_kv_head is set", "--n-kv-head auto"),
    ([*TWO, "--measure"], "measures the device here", "leave --gpu RTX 5090 out"),
    ([*TWO, "--depth", "48"], "needed on each GPU with device_batch_size 1", "--depth"),
]  # fmt: skip


@pytest.mark.parametrize("words, error, fix", REFUSALS, ids=[" ".join(words[-2:]) for words, _, _ in REFUSALS])
def test_what_cannot_be_planned_is_refused_with_its_fix(capsys, words, error, fix):
    message, shown = refused(capsys, *words)
    assert error in message
    assert fix in shown


def test_the_batch_may_follow_the_rows_of_a_sweep(capsys):
    words = ["aggressive", *TWO, "--sweep", "device_batch_size=3,6,7", "--follow-rows"]
    rows = json.loads(plan(capsys, *words, "--json"))
    assert [row["total_batch_size"] for row in rows] == [92_160, 73_728, 86_016]
    assert plan(capsys, *words).endswith(
        "batch follows the rows: the multiple nearest to 86,016, which changes the training\n"
    )


def test_the_command_below_the_advice_fills_the_time(capsys):
    lines = plan(capsys, *TWO, "--time", "12h").splitlines()
    [offer] = [line for line in lines if " remain, as depths come in steps of width: " in line]
    tokens_per_param, depth = re.search(r"--tokens-per-param ([\d.]+) trains depth (\d+)", offer).groups()
    [command] = [line for line in lines if line.startswith("next")]
    assert command.endswith(f" --depth {depth} --total-batch-size auto --tokens-per-param {tokens_per_param}")
    longer = json.loads(plan(capsys, *TWO, "--time", "12h", "--json"))
    assert longer["advice"]["num_tokens"] == longer["num_steps"] * longer["total_batch_size"]
    assert 11 < longer["cost"]["run"]["hours"]["expected"] <= 12
    words = [*TWO, "--time", "12h", "--tokens-per-param", tokens_per_param]
    assert " remain, " not in plan(capsys, *words)
    assert json.loads(plan(capsys, *words, "--json"))["num_steps"] == longer["num_steps"]
    shorter = json.loads(plan(capsys, *TWO, "--time", "12h", "--tokens-per-param", "12", "--json"))
    assert shorter["num_steps"] < 0.7 * longer["num_steps"]


def test_a_plan_says_how_often_a_text_is_read_that_is_not_prepared(capsys, tmp_path):
    (tmp_path / "books.txt").write_bytes(b"a line\n" * 300_000)  # 525,000 tokens of 4 bytes
    books = ["--gpu", "RTX 5090", "--data", str(tmp_path / "books.txt")]
    assert " tokens, about 2 epochs of the text\n" in plan(capsys, *books, "--num-steps", "2")
    remark = "epochs of the text: more than about four improve the model little"
    text = plan(capsys, *books, "--time", "12h")
    depth = re.match(r"advice  depth (\d+) for ", text)[1]
    assert re.search(
        r"\ntext    about \d,\d00 epochs of the text: use about [\d.]+ GiB of text, or (?:a model of depth|the config tiny)",
        text,
    )
    assert re.search(rf"\nlength  .* tokens, about \d,\d00 {remark}\n", text)
    assert " remain, " not in text and f" --depth {depth} --total-batch-size auto --num-steps " in text
    assert "epochs of the text" not in plan(capsys, *TWO, "--num-steps", "1", "--data", "hf:someone/books")
    assert "given in epochs" in refused(capsys, *books, "--epochs", "2")[0]  # which an estimate does not answer
    assert re.search(
        r"\ntext    [\d.]+B tokens are 4 epochs of about [\d.]+ GiB of text: --data SOURCE\n",
        plan(capsys, *TWO, "--time", "12h"),
    )


@pytest.mark.parametrize(
    "words",
    [
        "",
        "balanced",
        "tiny --n-embd auto --optimizer adamw",
        "--data 'my books' --sequence-len 1024 --activation-checkpointing mlp --tokens-per-param 8",
    ],
)
def test_the_command_below_the_advice_trains_what_is_planned(capsys, words):
    words = shlex.split(words)
    limit = ["--budget", "10", "--price", "1/gpu-hour"]
    [command] = re.findall("^next    paceline train (.*)$", plan(capsys, *words, *TWO, *limit), re.MULTILINE)
    advised = json.loads(plan(capsys, *words, *TWO, *limit, "--json"))
    assert advised.pop("advice")["depth"] == advised["model"]["n_layer"]
    assert json.loads(plan(capsys, *shlex.split(command), *TWO, *limit[2:], "--json")) == advised


def test_the_advice_has_no_command_for_hosts_without_names_or_where_balanced_is_something_else(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert "\nnext " not in plan(capsys, *TWO, "--hosts", "2", "--time", "6h")
    (tmp_path / "balanced").mkdir()
    assert run_command(["plan", *TWO, "--time", "6h"]) == 0
    assert "\nnext " not in capsys.readouterr().out


def test_what_is_left_of_a_budget_is_money(capsys):
    text = plan(capsys, *TWO, "--time", "100h", "--budget", "10", "--price", "1/gpu-hour")
    left, spent = re.search(
        r" ([\d.]+) of 10 remain, as .* trains depth 16 for ([\d.]+) in 4h", text, re.MULTILINE
    ).groups()
    assert 1 < float(left) < 3
    assert 9 < float(spent) <= 10
    assert " 54m12s remain, as " in plan(capsys, *TWO, "--time", "5h", "--budget", "100", "--price", "1/gpu-hour")


@pytest.mark.parametrize(
    "limit", [["--time", "1000h"], pytest.param(["--budget", "100", "--price", "1/gpu-hour"], marks=pytest.mark.soak)]
)
@pytest.mark.parametrize(
    "change",
    [
        "--profile aggressive",
        *(pytest.param(f, marks=pytest.mark.soak) for f in ("--offload optimizer", "--optimizer-states 8bit")),
    ],
)
def test_time_that_memory_leaves_is_offered_to_a_deeper_model(capsys, limit, change):
    text = plan(capsys, "--gpu", "RTX 4090", *limit)
    depth, flags = re.search(r" remain, as memory ends first: depth (\d+) fits with (.*)\n", text).groups()
    assert flags == "--profile aggressive or with --offload optimizer or with --optimizer-states 8bit"
    assert change in flags.split(" or with ")
    answer = json.loads(plan(capsys, "--gpu", "RTX 4090", *limit, *change.split(), "--json"))
    assert answer["advice"]["depth"] >= int(depth)


def test_a_model_that_needs_sharded_weights_is_deeper_than_one_that_does_not_fit(capsys):
    answer = json.loads(plan(capsys, *TWO, "--time", "60d", "--json"))
    assert (answer["advice"]["depth"], answer["shard"]) == (32, "full")
    assert answer["advice"]["deeper"] == "depth 33 does not fit in memory with these settings"


@pytest.mark.parametrize("limit", [["--budget", "0.001", "--price", "2.50/gpu-hour"], ["--time", "1s"]])
def test_the_fix_of_too_small_a_limit_gives_a_plan(capsys, limit):
    message, fix = refused(capsys, "--gpu", "H100", *limit)
    assert "is too little for a model of any depth" in message
    flag, value, *_ = fix.split()
    assert flag == limit[0]
    assert plan(capsys, "--gpu", "H100", flag, value, *limit[2:]).startswith("advice  depth ")


def test_the_depth_of_a_config_that_gives_way_to_a_budget_is_named(capsys):
    limit = ["--budget", "24", "--price", "1/gpu-hour"]
    assert "        depth 16 of balanced is not taken; train takes it\n" in plan(capsys, "balanced", *TWO, *limit)
    assert "is not taken" not in plan(capsys, *TWO, "--time", "12h")


@pytest.mark.parametrize("model", [["balanced"], ["tiny"], ["--depth", "12"]], ids="".join)
def test_a_time_is_the_length_of_a_model_that_is_given_as_it_is_for_train(capsys, model):
    answer = json.loads(plan(capsys, *model, *TWO, "--time", "8h", "--json"))
    assert ("advice" in answer, answer["time"]) == (False, "8h")
    assert answer["model"] == json.loads(plan(capsys, *model, *TWO, "--json"))["model"]
    assert 7 < answer["cost"]["run"]["hours"]["expected"] <= 8.1


def test_a_time_under_that_of_the_fewest_steps_says_so(capsys):
    assert ": about 60 steps, 2.9M tokens, the fewest of a run by time\n" in plan(
        capsys, "balanced", *TWO, "--time", "5s"
    )


def test_a_line_of_a_table_without_a_time_says_why(capsys):
    text = plan(capsys, "balanced", *TWO, "--sweep", "precision=bf16,nvfp4")
    assert text.endswith("\n\nnvfp4: no time: how long nvfp4 products take has not been measured\n")
    text = plan(capsys, "tiny", "--device", "cpu", "--sweep", "num_steps=10,20")
    assert text.endswith("\n\n10, 20: no time: this CPU was not measured yet\n")


def test_a_card_of_amd_has_neither_cuda_nor_cudnn(capsys):
    text = plan(capsys, "--gpu", "MI300X")
    assert "ROCm, kernels, fragments" in text and "attention by flash, flex or sdpa" in text
    assert not any(word in text for word in ("CUDA", "cudnn"))


def test_a_faster_link_is_offered_between_the_gpus_of_one_host(capsys):
    assert "25GbE between the GPUs +" in plan(capsys, *TWO, "--link", "10GbE")
