"""Lines: prefixes of launchers and loggers, and the steps and losses that lines report."""

import pytest
from log_samples import read

from paceline.explain.line_measures import read_step_and_loss, strip_bars
from paceline.explain.lines import LogLine, split_prefix
from paceline.explain.progress import MAX_LOSSES, ProgressTracker
from paceline.explain.several_runs import reach_verdict


def test_an_nccl_line_has_a_host_and_a_device_that_is_not_a_rank():
    line = split_prefix("gpu-7:4711:4802 [3] socket.c:123 NCCL WARN connection refused")
    assert (line.host, line.rank, line.text) == ("gpu-7", None, "socket.c:123 NCCL WARN connection refused")


@pytest.mark.parametrize(
    "text",
    ["12: x", "key: value", "see main.py: it fails", "[12/30] done", "10% 3/30", "Warning: careful", "std::bad_alloc"],
)
def test_text_that_only_looks_like_a_prefix_is_not_removed(text):
    assert split_prefix(text).text == ("x" if text == "12: x" else text)


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("step 120/2500 | loss 4.1", 120),
        ("{'loss': 2.31, 'step': 40}", 40),
        (" iteration     1200/ 5000 | lm loss: 2.1E+00 |", 1200),
        ("[2026-01-02 03:04:05,123] [INFO] [logging.py:96:log_dist] [Rank 0] step=70, skipped=0, lr=[0.1]", 70),
        ("Epoch 1:  12%|█▏        | 60/500 [00:10<01:10,  6.2it/s, loss=3.2]", 60),
        ("INFO:train:global_step 3,500: loss=1.25", 3500),
        ('{"step": 3, "loss": 1.0, "perf": {"batch_size": 512}}', 3),
    ],
)
def test_the_steps_of_the_usual_trainers_are_read(line, step):
    assert read(line + "\n").progress.last_step == step


def test_progress_has_the_first_and_last_step_and_the_loss():
    log = read("".join(f"step {step:05d}/01000 | loss {4 - step / 1000:.4f}\n" for step in range(0, 500, 10)))
    progress = log.progress
    assert (progress.first_step, progress.last_step, progress.last_loss) == (0, 490, 3.51)
    assert progress.silent_end and not progress.finished


@pytest.mark.parametrize(
    "text",
    [
        "gradient accumulation steps: 8",
        "gradient_accumulation_steps=8",
        "max_steps: 500",
        "Total optimization steps = 500",
        "STEPS: (60000, 90000)",
        "kl_loss_coef: 0.001",
        "hp_loss_smoothing: 0.1",
        "{'data': {'step': 10, 'path': 'anet'}, 'training': {'batch_size': 24, 'lr': 4e-4}, 'loss': {'loss_full': 0.5}}",
    ],
)
def test_a_setting_that_counts_steps_is_no_progress(text):
    assert read_step_and_loss(text) is None


def test_the_number_of_all_steps_in_a_header_is_not_the_first_step():
    progress = read(
        "Number of steps: 2,000\nstep: 2,000\n" + "".join(f"step {n} loss: 2.0\n" for n in range(1, 9))
    ).progress
    assert (progress.first_step, progress.last_step) == (1, 8)


@pytest.mark.parametrize("text", ["Total optimization steps = 500", "steps_per_print: 10", "number of steps: 2000"])
def test_a_count_of_steps_is_no_progress(text):
    assert read_step_and_loss(text) is None


def test_the_number_of_an_item_is_no_rank():
    assert split_prefix("[1757] {'loss': 2.5, 'epoch': 0.1}").rank is None
    assert split_prefix("[1]  step 5 loss: 2.0").rank == 1


@pytest.mark.parametrize(
    ("prefix", "text"),
    [
        ("2026-01-02T03:04:05.123456789Z stderr F ", "ValueError: x"),
        ("Nov 21 10:00:00 node-3 python3[4711]: ", "ValueError: x"),
        ("(raylet) ", "Traceback (most recent call last):"),
        ("(raylet, ip=10.0.0.7) ", '  File "worker.py", line 8, in <module>'),
    ],
)
def test_the_prefixes_of_kubernetes_journald_and_ray_are_removed(prefix, text):
    assert split_prefix(prefix + text).text == text


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("step 7 | loss 2.5", "loss"),
        ("{'train/loss': 2.5, 'step': 7}", "train/loss"),
        ("step 7: policy_loss=0.2 loss=2.5", "policy_loss"),
        ("step 7 validation loss: 2.5", "eval_loss"),
        ("step 7: val loss 2.9, train loss 2.5", "loss"),
    ],
)
def test_a_loss_has_the_name_that_its_line_gives_it(line, name):
    assert read_step_and_loss(line).name == name


@pytest.mark.parametrize(
    ("line", "loss"),
    [
        ("[ep 0 step   50 t= 49s] L=0.0353  D=0.0284  PSNR=15.47", 0.0353),
        ("step 7 L=12 heads=8", None),  # a number of layers
        ('{"step": 3, "num_loss_tokens": 915.0, "train_mean_nll": 0.71}', 0.71),
        ("step 7 packet loss: 12.5%", None),
        ("Iteration: 0, Loss function: 21.5, Average Loss: 0.022", 21.5),  # the average begins at 0
    ],
)
def test_a_loss_is_no_count_and_no_share(line, loss):
    assert read_step_and_loss(line).loss == loss


def test_the_epoch_of_an_evaluation_in_an_mlperf_log_is_progress_and_its_error_a_measure():
    line = ':::MLLOG {"key": "eval_error", "value": 0.1237, "metadata": {"file": "train.py", "epoch_num": %d}}\n'
    stop = ':::MLLOG {"key": "run_stop", "value": null, "metadata": {"status": "success"}}\n'
    log = read("".join(line % epoch for epoch in range(1, 9)) + stop)
    assert (log.progress.steps, log.progress.last_step) == (8, 8)
    assert log.progress.finished and reach_verdict([log]).cause == "healthy"


def test_the_bar_of_an_upload_is_no_progress():
    assert strip_bars("Pushing shards to the hub: 100%|█████| 21/21 [24:33<00:00, 70.1s/it]")[1] is None


def test_the_percentage_of_a_bar_is_no_loss():
    assert strip_bars("Computing loss:  12%|#         | 1/8 [00:01<00:07,  1.00it/s]")[1].loss is None


def test_the_losses_of_one_rank_are_stored_and_those_of_a_policy_are_not():
    lines = "".join(f"[rank{rank}]: step {step} loss: {step}.5\n" for step in range(3) for rank in (1, 0))
    assert [point[:3] for point in read(lines).losses] == [(0, "loss", 0.5), (1, "loss", 1.5), (2, "loss", 2.5)]
    assert read(lines + "[rank1]: step 3 loss: 0.1 reward: 0.7\n").losses == ()


def test_of_many_losses_the_last_are_stored_and_a_part_of_the_first():
    tracker = ProgressTracker()
    for step in range(5 * MAX_LOSSES):
        tracker.add(step, LogLine(f"step {step} loss: 2.5"), None)
    steps = [point.step for point in tracker.losses]
    assert steps[0] == 0 and steps[-3:] == [5 * MAX_LOSSES - n for n in (3, 2, 1)]
    assert len(steps) <= MAX_LOSSES and steps == sorted(steps)


@pytest.mark.parametrize(
    ("prefix", "rank"),
    [
        ("(Worker_TP1 pid=231) ", 1),
        ("(EngineCore_DP0 pid=200) (Worker_PP3 pid=231) ", 3),
        ("(Worker_PP1_TP0 pid=231) ", None),
        ("(MegatronPolicyWorker[rank=12] pid=4120, ip=10.0.0.12) ", 12),
        ("(Trainer[2] pid=4120) ", None),
    ],
)
def test_the_rank_in_the_name_of_a_worker_is_read(prefix, rank):
    assert split_prefix(prefix + "it failed").rank == rank


def test_rewards_without_a_loss_take_limited_memory():
    tracker = ProgressTracker()
    for step in range(2 * MAX_LOSSES):
        tracker.add(step, LogLine(f"step {step}: reward: 0.5"), None)
    assert tracker.losses == () and MAX_LOSSES // 2 <= len(tracker.rewards) <= MAX_LOSSES


def test_what_a_logger_prints_of_other_code_s_stderr_is_no_error_of_its_own():
    line = split_prefix("2024-07-30 17:02:28 | ERROR | stderr | INFO:     Started server process [1944993]")
    assert line.text == "INFO:     Started server process [1944993]"


def test_the_number_of_a_loss_is_no_part_of_its_value():
    assert read_step_and_loss("Iteration 000020 lr 1.20e-04 loss-1 1.024 loss-2 1.247").loss == 1.024
    assert read_step_and_loss("step 3 loss -1.5").loss == -1.5


def test_the_hours_behind_a_count_are_no_step():
    assert read_step_and_loss("gen: -0.008: : 20001it [12:17:03,  3.35s/it]") is None


def test_mmcv_s_bar_is_work_but_no_step_and_no_end_of_a_training():
    bar = "".join(f"[{'>' * n:<40}] {n}/40, 2.1 task/s, elapsed: {n}s, ETA: {40 - n}s\n" for n in range(1, 41))
    log = read("step 300 | loss 2.1\n" + bar)
    assert (log.progress.steps, log.progress.last_step, log.progress.finished) == (41, 300, False)
    assert reach_verdict([log]).cause == reach_verdict([read(bar)]).cause == "healthy"
    error = "srun: error: n1: task 0: lost its connection\nERROR: worker lost the socket to controller\n"
    assert reach_verdict([read(bar + error)]).cause == "unknown"


def test_the_norm_of_a_step_that_is_skipped_for_its_loss_is_none_of_training():
    line = "WARNING step 12: loss is nan, skipping this batch (grad_norm=inf, loss scale 32768 -> 16384)"
    assert read_step_and_loss(line).grad_norm is None
    assert read_step_and_loss("step 12: loss 2.1, skipping this update (grad_norm=inf)").grad_norm == float("inf")
