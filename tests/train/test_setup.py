"""What a rank decides before it trains, with the trials' answers in place of a GPU's."""

from dataclasses import replace

import pytest
import torch

from paceline.config import Config, ModelConfig
from paceline.errors import PacelineError
from paceline.plan.gpu_table import find_gpu
from paceline.plan.machine import imagined_machine
from paceline.plan.planner import Plan, make_plan
from paceline.rundir import RunDir, append_json_line, read_json_lines
from paceline.train import evaluate, setup
from paceline.train.setup import choose_attention, choose_kernels, drop_metrics_after

CARD = torch.device("meta")
SMALL = ModelConfig(1, 16, 1, 1, 16, sequence_len=8, vocab_size=64)
CPU = torch.device("cpu")
H100 = imagined_machine(find_gpu("H100"), gpus=1, hosts=1)


def planned(**keys) -> Plan:
    return make_plan(Config(depth=12, num_steps=5, **keys), H100, vocab_size=32_768, num_rows=1000)


def test_metrics_are_rewritten_only_where_a_resume_drops_some_of_them(tmp_path):
    run = RunDir(tmp_path)
    assert drop_metrics_after(run, 0) == 0 and not run.metrics.exists()
    for step in (1, 2, 3):
        append_json_line(run.metrics, {"step": step, "loss": 0.1 + step / 3, "phase": "ü"})
    file = run.metrics.stat()
    assert drop_metrics_after(run, 3) == 0
    assert run.metrics.stat() == file
    with run.metrics.open("a") as metrics:
        metrics.write('{"step": 4, "lo')  # cut by a crash
    assert drop_metrics_after(run, 3) == 0
    assert run.metrics.stat().st_size == file.st_size
    assert drop_metrics_after(run, 1) == 2
    assert [record["step"] for record in read_json_lines(run.metrics)] == [1]


class Trials:
    """The answers of a card: milliseconds of each way that runs; the others have a problem. attempts: in order."""

    def __init__(self, monkeypatch, **times):
        self.times, self.attempts, self.active = times, [], None
        monkeypatch.setattr(setup, "attention_problem", self.problem)
        monkeypatch.setattr(setup, "attention_ms", lambda plan, name, device: self.times[name])
        monkeypatch.setattr(setup, "use_flash3", lambda use: setattr(self, "active", use))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))

    def problem(self, config, name, dtype, device):
        self.attempts.append(name)
        return None if name in self.times else f"no {name} here"


def test_the_fastest_flash_kernel_that_runs_is_taken_and_the_slow_ways_are_not_tried(monkeypatch):
    trials = Trials(monkeypatch, cudnn=20.0, flash=25.0, flex=1.0)
    plan, notes = choose_attention(planned(), CPU)
    assert (plan.attention, plan.attention_kernel, trials.active) == ("cudnn", "flash", False)
    assert trials.attempts == ["fa3", "cudnn", "flash"]
    assert notes == ["attention: cudnn; in a micro-step: cudnn 20.0 ms, flash 25.0 ms; fa3 not: no fa3 here"]


def test_a_way_that_fails_with_all_rows_is_not_taken(monkeypatch):
    def ms(plan, name, device):
        if name == "cudnn":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nGPU 0 has")
        return 25.0

    Trials(monkeypatch, cudnn=20.0, flash=25.0)
    monkeypatch.setattr(setup, "attention_ms", ms)
    plan, notes = choose_attention(planned(), CPU)
    assert plan.attention == "flash"
    assert notes[0].endswith("fa3 not: no fa3 here; cudnn not: CUDA out of memory. Tried to allocate 2 GiB.")


def test_flash_attention_3_is_active_where_it_is_taken(monkeypatch):
    trials = Trials(monkeypatch, fa3=10.0, cudnn=20.0, flash=25.0)
    assert choose_attention(planned(), CPU)[0].attention == "fa3"
    assert trials.active is True


def test_without_flash_kernels_the_others_are_tried_in_their_order(monkeypatch):
    Trials(monkeypatch, flex=30.0, sdpa=1.0)
    assert choose_attention(planned(), CPU)[0].attention == "flex"
    Trials(monkeypatch, sdpa=90.0)
    masks, _ = choose_attention(planned(), CPU)
    assert (masks.attention, masks.attention_kernel) == ("sdpa", "efficient")


def test_what_rank_0_takes_holds_for_all_and_what_one_rank_lacks_for_none(monkeypatch):
    Trials(monkeypatch, fa3=10.0, cudnn=20.0, flash=15.0)

    def any_rank(is_true, device):  # another rank has no FlashAttention 3
        answers.append(is_true or not answers)
        return answers[-1]

    answers: list[bool] = []
    monkeypatch.setattr(setup, "any_rank", any_rank)
    monkeypatch.setattr(setup, "broadcast_object", lambda value: "cudnn" if value == "flash" else value)
    assert choose_attention(planned(), CPU)[0].attention == "cudnn"
    assert answers == [True, False, False]


def test_a_way_that_the_plan_has_is_checked_and_never_replaced(monkeypatch):
    trials = Trials(monkeypatch, fa3=10.0, flash=20.0)
    chosen = replace(planned(), attention="flash")
    assert choose_attention(chosen, CPU) == (chosen, [])
    assert trials.attempts == ["flash"]
    with pytest.raises(PacelineError, match="cudnn not: no cudnn here") as error:
        choose_attention(replace(chosen, attention="cudnn"), CPU)
    assert error.value.fix == "--attention auto"
    assert choose_attention(replace(chosen, attention="flex"), CPU)[0].attention == "flex"
    assert trials.attempts == ["flash", "cudnn"]  # FlexAttention would be compiled


def test_a_loss_without_its_kernel_is_reported(monkeypatch):
    Trials(monkeypatch, flash=20.0)
    plan, *notes = choose_kernels(replace(planned(), attention="flash"), CPU)
    assert not plan.fused_loss
    assert notes == ["the loss is computed without its Triton kernel, which is slower: it is for CUDA devices"]
    monkeypatch.setattr(setup, "fused_loss_problem", lambda device: None)
    plan, *notes = choose_kernels(plan, CPU)
    assert plan.fused_loss and notes == []
    assert setup.make_model(replace(plan, model=SMALL), seed=1, device=CARD).fused_loss


def test_eval_and_sample_take_flash_kernels_where_they_run_and_else_print_why(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(evaluate, "attention_problem", lambda *args: None)
    card = torch.device("cuda")
    assert evaluate.choose_way(planned(), CPU) == "sdpa"
    assert evaluate.choose_way(planned(n_kv_head=1), card) == "flash"
    assert capsys.readouterr().out == ""
    assert evaluate.choose_way(planned(precision="fp32"), card) == "sdpa"
    assert capsys.readouterr().out == (
        "windows of attention by dense masks, which are slower: flash kernels are for bf16 and fp16\n"
    )
