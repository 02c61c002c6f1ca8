"""val_bpb: the same rows whatever the world size, bytes counted once."""

import io
import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from runs import poison
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.cli import run_command
from paceline.config import ModelConfig
from paceline.model.gpt import GPT
from paceline.plan.activations import CPU_CHUNK_BYTES
from paceline.rundir import RunDir, read_json_lines
from paceline.train import evaluate
from paceline.train.evaluate import choose_loss, eval_rows, format_evaluation, val_bpb
from paceline.watch.measures import format_bpb

CONFIG = ModelConfig(n_layer=1, n_embd=32, n_head=1, n_kv_head=1, head_dim=32, sequence_len=8, vocab_size=64)


class Rows:
    """Held-out text of 65 random tokens: 8 rows of 8."""

    def __init__(self):
        self.ids = np.random.default_rng(0).integers(0, 64, 65)

    def num_rows(self, sequence_len):
        return 64 // sequence_len

    def rows(self, indices, sequence_len):
        windows = np.stack([self.ids[i * sequence_len : (i + 1) * sequence_len + 1] for i in indices])
        return windows[:, :-1].copy(), windows[:, 1:].copy()


@pytest.fixture
def model():
    made = GPT(CONFIG, compute_dtype=torch.float32)
    made.init_weights(seed=1)
    return made


def test_rows_are_spread_evenly_over_the_held_out_part():
    assert eval_rows(10, 47, sequence_len=9).tolist() == [0, 2, 4, 6, 8]
    assert eval_rows(3, 45, sequence_len=9).tolist() == [0, 1, 2]
    assert eval_rows(3, 0, sequence_len=9).tolist() == [0]
    assert [len(eval_rows(3, tokens, sequence_len=9)) for tokens in (18, 19)] == [2, 3]  # the last row has one token


def test_a_compiled_model_is_compiled_once_whatever_is_left_for_the_last_batch(model, monkeypatch):
    """Its batches have one shape; gpu_proof/test_walk.py looks at the compiler's graphs."""
    sizes, shapes = torch.full((64,), 2), set()
    options = {"token_bytes": sizes, "max_tokens": 64, "device_batch_size": 3, "rank": 0, "world_size": 1}
    eager = val_bpb(model, Rows(), **options)  # 3 + 3 + 2 rows
    monkeypatch.setattr("paceline.model.layers.compile_once", lambda function: function)
    model.compiled = True
    model.register_forward_pre_hook(lambda _, inputs: shapes.update(tuple(x.shape) for x in inputs))
    assert val_bpb(model, Rows(), **options) == pytest.approx(eager, rel=1e-6)
    assert shapes == {(3, 8)}


def test_an_untrained_model_costs_the_logarithm_of_the_vocabulary_over_the_bytes(model):
    sizes = torch.full((64,), 2)
    bpb = val_bpb(model, Rows(), token_bytes=sizes, max_tokens=64, device_batch_size=3, rank=0, world_size=1)
    assert bpb == pytest.approx(math.log2(64) / 2, rel=1e-3)


def test_special_tokens_count_neither_nats_nor_bytes(model):
    sizes = torch.full((64,), 2)
    sizes[::2] = 0
    bpb = val_bpb(model, Rows(), token_bytes=sizes, max_tokens=64, device_batch_size=3, rank=0, world_size=1)
    assert bpb == pytest.approx(math.log2(64) / 2, rel=1e-3)


def test_the_batch_size_does_not_change_the_figure(model):
    sizes = torch.arange(64) % 5
    figures = [
        val_bpb(model, Rows(), token_bytes=sizes, max_tokens=64, device_batch_size=rows, rank=0, world_size=1)
        for rows in (1, 3, 8)
    ]
    assert figures[1:] == pytest.approx([figures[0]] * 2, rel=1e-6)


class LargestTensor(TorchDispatchMode):
    """Keeps the bytes of the largest tensor that an op makes."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.nbytes = max(self.nbytes, out.nbytes)
        return out


def test_a_large_vocabulary_is_scored_in_chunks_with_the_value_of_all_logits_at_once():
    large = GPT(replace(CONFIG, vocab_size=131_072), compute_dtype=torch.float32)
    large.init_weights(seed=1)
    torch.nn.init.normal_(large.lm_head.weight, std=0.5)
    with LargestTensor() as largest:
        options = {"token_bytes": torch.full((131_072,), 2), "max_tokens": 64, "rank": 0, "world_size": 1}
        bpb = val_bpb(large, Rows(), device_batch_size=8, **options)
    all_logits_bytes = 64 * 131_072 * 4
    assert largest.nbytes <= CPU_CHUNK_BYTES < all_logits_bytes
    idx, targets = map(torch.from_numpy, Rows().rows(range(8), 8))
    nats = F.cross_entropy(large.logits(idx).flatten(0, 1), targets.flatten(), reduction="sum")
    assert bpb == pytest.approx(nats.item() / (64 * 2 * math.log(2)), rel=1e-6)


def test_a_checkpoint_is_scored_by_the_loss_of_training_where_the_device_has_it(model, monkeypatch, capsys):
    choose_loss(model)
    assert not model.fused_loss
    monkeypatch.setattr(evaluate, "fused_loss_problem", lambda device: None)
    choose_loss(model)
    assert model.fused_loss and not capsys.readouterr().out


def json_of(capsys, *words):
    capsys.readouterr()
    assert run_command([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def splits_of(capsys, run, *, data):
    facts = json_of(capsys, "data", "info", f"--data={data}", f"--tokenizer={run / 'tokenizer/tokenizer.json'}")
    return {name: split["num_tokens"] for name, split in facts["splits"].items()}


def test_eval_scores_all_held_out_text_of_a_run_whatever_its_own_evaluations_take(unbroken, capsys):
    held_out = splits_of(capsys, unbroken, data=unbroken.parents[1] / "text")["val"]
    assert held_out > 4096  # eval_tokens of the run
    assert json_of(capsys, "eval", str(unbroken), "--device=cpu")["tokens"] == held_out - 1  # all but the first


def test_eval_scores_both_splits_of_another_text(unbroken, capsys, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("".join(f"{n} bottles of beer on the wall\n" for n in range(3000)))
    tokens = json_of(capsys, "eval", str(unbroken), f"--data={other}", "--device=cpu")["tokens"]
    assert tokens == sum(splits_of(capsys, unbroken, data=other).values()) - 2
    lines = other.with_suffix(".ndjson")
    lines.write_text("".join(f'{{"id": "a{n}", "song": "{n} bottles of beer"}}\n' for n in range(300)))
    words = [f"--data={lines}", "--text-field=song", "--device=cpu"]
    assert json_of(capsys, "eval", str(unbroken), *words)["data"] == str(lines)


def test_eval_of_several_runs_prints_a_line_for_each(unbroken, capsys):
    capsys.readouterr()
    assert run_command(["eval", str(unbroken), str(unbroken), "--tokens=64", "--device=cpu", "--json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == second and first["run"] == unbroken.name
    assert run_command(["eval", str(unbroken), "none", "--device=cpu"]) == 1
    assert capsys.readouterr().out == ""  # before any of them is measured


def test_eval_adds_its_results_to_the_run_and_a_folder_that_cannot_be_written_loses_none(
    unbroken, capsys, tmp_path, monkeypatch
):
    run = RunDir(Path(shutil.copytree(unbroken, tmp_path / "books", ignore=shutil.ignore_patterns("evals.jsonl"))))
    (tmp_path / "other.txt").write_text("99 bottles of beer on the wall\n" * 300)
    monkeypatch.chdir(tmp_path)
    answer = json_of(capsys, "eval", "books", "--tokens=64", "--device=cpu", "--step=30")
    json_of(capsys, "eval", "books", "--data=other.txt", "--device=cpu")
    first, second = read_json_lines(run.evaluations)
    held_out = f"{unbroken.parents[1] / 'text'} (held out)"
    assert first.pop("time").endswith("Z") and first == {
        "step": 30, "val_bpb": answer["val_bpb"], "eval_tokens": 64, "eval_text": held_out, "text_field": None, "max_tokens": 64
    }  # fmt: skip
    assert (second["eval_text"], second["max_tokens"]) == (str(tmp_path / "other.txt"), None)
    run.evaluations.unlink()
    run.evaluations.mkdir()  # as a disk that cannot be written, for root too
    capsys.readouterr()
    assert run_command(["eval", "books", "--tokens=64", "--device=cpu", "--step=30", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == answer
    note = "note    books/evals.jsonl cannot be written: the result is not in the run's folder"
    assert [line for line in err.splitlines() if "evals" in line] == [note]


@pytest.mark.parametrize(("requested", "scored"), [(10, 64), (64, 64), (200, 192)])
def test_eval_takes_whole_rows_and_reports_what_it_scored(unbroken, capsys, requested, scored):
    assert json_of(capsys, "eval", str(unbroken), f"--tokens={requested}", "--device=cpu")["tokens"] == scored


def test_sample_reports_the_prompt_that_it_read_from_standard_input(unbroken, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("def "))
    answer = json_of(capsys, "sample", str(unbroken), "--prompt=-", "--tokens=2", "--device=cpu")
    assert answer["prompt"] == "def "


def test_the_json_of_sample_and_eval_says_which_weights_and_which_choices_it_is_from(unbroken, capsys):
    words = ("--step=30", "--temperature=0", "--seed=3", "--tokens=2", "--device=cpu")
    answer = json_of(capsys, "sample", str(unbroken), *words)
    assert len(answer.pop("samples")) == 1
    assert answer == {
        "run": "unbroken", "step": 30, "prompt": "", "seed": 3, "temperature": 0.0, "top_k": 50, "top_p": 1.0
    }  # fmt: skip
    answer = json_of(capsys, "eval", str(unbroken), "--step=30", "--tokens=64", "--device=cpu")
    assert (answer["run"], answer["step"]) == ("unbroken", 30)


@pytest.mark.parametrize("choice", [["--temperature=0"], ["--top-k=1"], ["--top-p=0"], []])
def test_texts_that_would_be_equal_are_written_once_with_a_note(choice, unbroken, capsys):
    assert run_command(["sample", str(unbroken), "--num=3", *choice, "--tokens=4", "--device=cpu", "--json"]) == 0
    out, err = capsys.readouterr()
    notes = [line for line in err.splitlines() if "equal" in line]
    if choice:
        assert notes == ["note    each token is the likeliest one, so all 3 texts would be equal: writing one"]
    assert (len(json.loads(out)["samples"]), len(notes)) == ((1, 1) if choice else (3, 0))


def test_tokenizer_info_takes_a_run(unbroken, capsys, monkeypatch):
    monkeypatch.chdir(unbroken.parent.parent)
    by_name = json_of(capsys, "tokenizer", "info", "unbroken")
    assert by_name == json_of(capsys, "tokenizer", "info", "runs/unbroken/tokenizer/tokenizer.json")
    assert by_name == json_of(capsys, "tokenizer", "info", "runs/unbroken")


def test_one_token_is_not_called_one_tokens():
    result = {"run": "a", "step": 1, "val_bpb": 2.0, "tokens": 1, "data": "builtin"}
    assert format_evaluation(result) == "a at step 1: val_bpb 2.0000 on 1 token of builtin"
    assert format_bpb(2.0, 1) == "2.0000 on 1 token"


def test_a_damaged_checkpoint_is_refused_by_step_and_otherwise_noted_beside_the_json(unbroken, capsys, tmp_path):
    run = Path(shutil.copytree(unbroken, tmp_path / "books"))
    newest = max((run / "checkpoints").iterdir())
    shard = next(newest.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    words = ["sample", str(run), "--tokens=2", "--device=cpu"]
    assert run_command([*words, f"--step={int(newest.name[5:])}"]) == 1
    assert f"checkpoint {newest.name} is damaged" in capsys.readouterr().err
    assert run_command([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    facts = json.loads(out)
    assert facts["samples"] and (facts["run"], facts["step"], facts["seed"]) == ("books", 30, 42)
    assert json_of(capsys, "eval", str(run), "--device=cpu")["run"] == "books"
    assert "using step_000030 instead\n" in err


@pytest.mark.parametrize("command", ["sample", "eval", "export"])
def test_weights_that_hold_nan_are_refused_with_the_steps_that_are_left(command, unbroken, capsys, tmp_path):
    run = Path(shutil.copytree(unbroken, tmp_path / "books"))
    poison(run, "model.wte.weight", 3, math.nan)
    assert run_command([command, str(run), *([] if command == "export" else ["--device=cpu"])]) == 1
    error = "the weights of checkpoint step_000040 hold NaN or infinity, first in wte.weight"
    assert capsys.readouterr().err == f"error: {error}\n  fix: --step 30\n"


def test_a_checkpoint_that_the_trainer_removes_while_it_is_read_is_not_damaged(unbroken, capsys, monkeypatch, tmp_path):
    run = Path(shutil.copytree(unbroken, tmp_path / "books"))
    newest = max((run / "checkpoints").iterdir())
    find = evaluate.newest_good

    def find_and_prune(directory, **kwargs):
        found = find(directory, **kwargs)
        shutil.rmtree(newest, ignore_errors=True)
        return found

    monkeypatch.setattr(evaluate, "newest_good", find_and_prune)
    assert json_of(capsys, "eval", str(run), "--tokens=64", "--device=cpu")["step"] == 30


@pytest.mark.parametrize("command", ["sample", "eval", "export"])
def test_a_tokenizer_that_is_not_the_run_s_own_is_refused(command, unbroken, capsys, tmp_path):
    run = Path(shutil.copytree(unbroken, tmp_path / "books"))
    path = run / "tokenizer/tokenizer.json"
    path.write_bytes(path.read_bytes() + b"\n")
    assert run_command([command, str(run), "--device=cpu"][: 2 if command == "export" else 3]) == 1
    assert f"{path} is not the tokenizer that the run was trained with\n  fix: cp " in capsys.readouterr().err
