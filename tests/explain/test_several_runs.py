"""Several runs in one log, and what a run survives: only the last one's end counts, and it must show that it works."""

import itertools
import re

import pytest
from log_samples import OOM, OTHER_LINES, PEER, STEPS, raised
from rows import with_rows

from paceline.explain.reader import read_log
from paceline.explain.several_runs import reach_verdict

START = "INFO - loading the model speech-1b\nINFO - reading 5,000 samples of audio\n"
OTHER_OUTPUT = "".join(f"INFO - sample {n} has {n % 7} words\n" for n in range(50))
BUG = "ValueError: sample 1841 has 3 fields, expected 4"
LAUNCH = "+ torchrun --nproc-per-node 8 train.py\n"
CANCELLED = "slurmstepd: error: *** JOB {} ON node-3 CANCELLED AT 2026-08-21T02:33:05 ***\n"


def uncaught(error, file="train.py"):
    return f'Traceback (most recent call last):\n  File "{file}", line 9, in <module>\n    main()\n{error}\n'


def verdict(text):
    return reach_verdict([read_log([text.encode()])])


def test_a_run_that_begins_behind_an_error_leaves_it_to_the_earlier_one():
    handled = "ERROR - " + raised(None, BUG)
    explanation = verdict(START + STEPS + OTHER_OUTPUT + handled + START + OTHER_OUTPUT[:200])
    assert (explanation.cause, explanation.summary) == (
        "unknown",
        "the last run in this log begins at line 68 and shows neither a failure nor that it works",
    )
    assert verdict(START + STEPS + OTHER_OUTPUT + handled + START + STEPS).cause == "healthy"
    assert verdict(START + STEPS + OTHER_OUTPUT + handled).cause == "user-code-exception"


def test_the_first_lines_of_a_log_that_come_again_behind_an_error_and_later_begin_another_run():
    def run(minute, *lines):
        begin = ("=" * 40, "Evaluation pipeline begins", "=" * 40)
        return "".join(
            f"2025-11-12 19:{minute}:37,{at:03} [INFO] root: {line}\n" for at, line in enumerate((*begin, *lines))
        )

    broken = (
        run(33, *(f"table {n} has {n} columns" for n in range(8)))
        + "2025-11-12 19:33:38,357 [ERROR] root: no feature list for this period\n"
    )
    missing = run(35, "reading") + "2025-11-12 19:35:39,357 [ERROR] root: the table has no header\n"
    works = run(41, *(f"frame {n} of 20: score {n / 40:.3f}" for n in range(1, 21)), "Results saved to results.json")
    assert verdict(broken + works).cause == "healthy"
    explanation = verdict(broken + works + missing.replace("19:35", "19:55"))
    assert explanation.cause == "unknown" and "the table has no header" in explanation.summary
    assert verdict(works + broken.replace("19:33", "19:53")).cause == "unknown"
    assert verdict(broken + works.replace("19:41", "19:33")).cause == "unknown"


def test_the_stack_of_a_store_that_is_gone_at_the_end_is_no_failure():
    stack = (
        "Exception raised from recvBytes at /pytorch/torch/csrc/distributed/c10d/Utils.hpp:682 (most recent call first):\n"
        "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x9d (0x77d053cf4fdd in /lib/libc10.so)\n"
    )
    rows = "".join(f"  {n}.0 KB {n:>14} {n * 41.7:>16.2f} {41.7:>14} 0.0300\n" for n in range(1, 40))
    assert verdict(stack + rows).cause == "healthy"
    assert (
        verdict(stack.replace("Exception raised from recvBytes at", "Exception in recvBytes of") + rows).cause
        == "unknown"
    )


def test_the_first_line_alone_begins_a_run_behind_an_error_and_half_a_minute():
    def run(minute, lines, text="settings"):
        return f"2026-11-28 10:{minute:02}:00 - INFO - Start of the segmentation\n" + "".join(
            f"2026-11-28 10:{minute:02}:0{at} - {line}\n" for at, line in enumerate((f"INFO - {text}", *lines), 1)
        )

    failed = ["ERROR - the model cannot be made: name 'partial' is not defined"]
    bug = "".join(f"{line}\n" for line in raised(None, BUG).splitlines())
    begun = [f"INFO - step {step} loss {3 - step / 9:.3f}" for step in range(9)]
    assert verdict(run(1, failed) + bug + run(2, begun, "other settings")).cause == "healthy"
    assert verdict(run(1, failed) + bug).cause == "user-code-exception"
    near = run(1, ["INFO - model on cpu"], "other settings").replace("10:01:0", "10:01:1")
    assert verdict(run(1, failed) + bug + near).cause == "user-code-exception"


def test_lines_that_are_all_alike_begin_no_run():
    lines = [f"2026-11-28 10:{at // 60:02}:{at % 60:02} document {at} is read\n" for at in range(900)]
    lines[400] = f"2026-11-28 10:06:40 {OOM}\n"
    explanation = verdict("".join(lines))
    assert (explanation.cause, explanation.line) == ("cuda-oom", 401)


def test_an_uncaught_exception_near_the_end_counts_although_the_first_lines_come_again():
    assert verdict(START + OTHER_OUTPUT + uncaught(OOM) + START).cause == "cuda-oom"


def test_ranks_that_print_the_same_first_lines_are_no_new_run():
    assert verdict(START + START + STEPS + raised(None, BUG) + START).cause == "user-code-exception"


REPORT = (
    "E1130 12:25:48.1 31 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 0\n"
)


@pytest.mark.parametrize(("between", "error", "is_noted"), [
    ("", BUG, False),
    ("", OOM, True),  # another failure
    (REPORT, BUG, True),  # the launcher reports the end of each
])  # fmt: skip
def test_ranks_of_one_launch_that_failed_of_the_same_are_no_earlier_run(between, error, is_noted):
    explanation = verdict(START + uncaught(error) + between + START + uncaught(BUG) + REPORT)
    assert any("earlier run" in note for note in explanation.notes) == is_noted


def test_steps_of_an_earlier_run_do_not_show_that_the_last_one_works():
    assert verdict(START + STEPS + OTHER_OUTPUT + START + OTHER_OUTPUT).cause == "unknown"
    assert verdict(START + STEPS + OTHER_OUTPUT + START + OTHER_OUTPUT + "Training finished\n").cause == "healthy"


def test_of_programs_that_ended_one_after_the_other_the_last_one_is_told():
    first, last = uncaught("ModuleNotFoundError: No module named 'deepspeed'"), uncaught(OOM)
    assert verdict(first + 3 * OTHER_OUTPUT + last).cause == "cuda-oom"
    assert verdict(first + last).cause == "import-error"


def test_of_slurm_jobs_in_one_log_the_last_one_is_told():
    error = raised(None, OOM)
    assert verdict(error + CANCELLED.format(11) + STEPS[:40] + CANCELLED.format(12)).cause == "slurm-cancelled"
    assert verdict(error + CANCELLED.format(12)).cause == "cuda-oom"


def test_lines_about_items_that_are_left_out_are_no_failure():
    item = "Error: Could not find the training data of item {}: no such file\n"
    items = "".join(OTHER_OUTPUT + item.format(n) for n in range(6))
    assert verdict(items + OTHER_OUTPUT).cause == "unknown"
    assert verdict(OTHER_OUTPUT + item.format(1)).cause == "dataset-missing"


def test_an_error_line_whose_like_was_survived_twice_leaves_a_run_healthy():
    error = "[ERROR] Error plotting image\n"
    assert verdict((STEPS + error) * 3 + OTHER_OUTPUT).cause == "healthy"
    assert verdict(STEPS + error + OTHER_OUTPUT).cause == "unknown"


def test_a_last_line_whose_like_was_survived_twice_is_no_trouble():
    bar = "".join(
        f" {at}%|#    | {at}/100 [00:{at}<02:14, 1.5s/trial, best loss: 0.8{at}]\n" for at in range(10, 60, 10)
    )
    line = "Unable to convert hyperparam results!\n"
    assert verdict((bar + line) * 3).cause == "healthy"
    assert verdict(bar + line * 3).cause == "unknown"


def test_a_run_that_made_steps_did_not_end_because_of_the_run_before_it():
    stopped = uncaught("torch.distributed.elastic.multiprocessing.api.SignalException: Process 1701 got signal: 15")
    first = START + uncaught("ValueError: generation_batch_size (4) must be divisible by num_generations (8).")
    assert verdict(first + LAUNCH + START + STEPS + stopped).cause == "preempted-sigterm"
    assert verdict(first + LAUNCH + START + stopped).cause == "batch-divisibility"


def test_a_long_run_behind_a_failed_one_is_asked_about_although_it_reports_no_step():
    failed, banner = CANCELLED.format(11), "| NVIDIA-SMI 570.158.01\n"
    assert verdict(failed + banner + OTHER_OUTPUT).cause == "slurm-cancelled"
    long = verdict(failed + banner + OTHER_OUTPUT * 20)
    assert long.cause != "slurm-cancelled" and "slurm-cancelled" in long.notes[0]


def test_an_exception_that_ray_s_driver_quotes_ends_the_run_although_other_workers_print_on():
    driver = uncaught("ray.exceptions.RayTaskError(RuntimeError): ray::train() (pid=4711, ip=10.0.0.4)").rstrip("\n")
    worker = '\n  File "train.py", line 38, in train\n    data = data[rows]\nRuntimeError: CUDA error: out of memory\n'
    assert verdict(driver + worker + STEPS).cause == "cuda-oom"


def test_threads_that_end_behind_a_complete_progress_bar_are_no_failure():
    bar = "gen: 0.1: 100%|██████████| 200/200 [12:14:52<00:00,  2.06s/it]\ngen: 0.1: : 201it [12:17:02,  3.35s/it]\n"
    frame = '  File "/usr/lib/python3.10/threading.py", line 1016, in _bootstrap_inner\n    self.run()\n'
    thread = f"Exception in thread Thread-1:\nTraceback (most recent call last):\n{frame}"
    error = "OSError: handle is closed\n"
    assert verdict(STEPS + bar + thread + error + error).cause == "healthy"
    assert verdict(STEPS + bar.replace("200/200", "120/200") + thread + error).cause == "user-code-exception"


@pytest.mark.parametrize(
    "end",
    [
        "Treinamento concluído com sucesso",
        "Entrenamiento finalizado",
        "Training abgeschlossen",
        "Entraînement terminé",
        "Обучение завершено",
        "训练已完成",
        "学習が完了しました",
        "학습 완료",
        "Job terminated of its own accord at 2026-01-21T13:48:18Z with exit-code 0.",
    ],
)
def test_the_end_of_a_training_is_read_in_other_languages_and_from_htcondor(end):
    assert verdict(raised(None, BUG) + OTHER_LINES + f"{end}\n").cause == "healthy"


def test_steps_that_were_in_a_buffer_do_not_show_that_a_gpu_s_kernels_went_on_after_an_assertion():
    text = "Assertion `probability tensor contains either `inf`, `nan` or element < 0` failed."
    kernel = f"/pytorch/aten/src/ATen/native/cuda/TensorCompare.cu:109: f: block: [0,0,0], thread: [0,0,0] {text}\n"
    explanation = verdict(kernel + STEPS + uncaught("torch.AcceleratorError: CUDA error: device-side assert triggered"))
    assert explanation.cause == "loss-nan"
    assert explanation.fix.startswith("run generation in bf16 or fp32 instead of fp16")


def test_a_name_that_a_file_of_one_s_own_lacks_is_no_conflict_of_packages():
    error = "ImportError: cannot import name 'inject' from 'model.adapters' ({}/model/adapters.py)"
    own, installed = (
        verdict(uncaught(error.format(path))) for path in ("/home/x", "/venv/lib/python3.12/site-packages")
    )
    assert (own.cause, installed.cause) == ("import-error", "version-mismatch")
    assert own.summary.endswith("or the name inject in /home/x/model/adapters.py in the environment of the run")


def test_a_run_that_a_shell_s_command_begins_is_explained_alone_and_the_failed_one_before_it_is_told():
    command = "+ python train.py --config next.yaml\n"
    explanation = verdict(uncaught(OOM) + command + STEPS)
    assert explanation.cause == "healthy"
    assert explanation.notes == ("1 earlier run in this file failed: cuda-oom (line 1)",)
    assert verdict(STEPS + command + uncaught(OOM)).cause == "cuda-oom"
    assert verdict(uncaught(OOM) + "+ rm -r cache\n").notes == ()


def test_steps_that_begin_again_behind_an_end_are_a_new_run_s_unless_they_may_have_been_in_a_buffer():
    explanation = verdict(STEPS + uncaught(OOM) + STEPS)
    assert (explanation.cause, len(explanation.notes)) == ("healthy", 1)
    assert verdict(uncaught(OOM) + STEPS).cause == "cuda-oom"  # Python may have written them late
    assert verdict(uncaught(OOM) + 3 * OTHER_OUTPUT + STEPS).cause == "healthy"
    workers = "".join(f"[rank0]: {line}\n" for line in STEPS.splitlines())
    assert verdict(workers + uncaught(OOM) + workers).cause == "cuda-oom"  # other ranks go on for a while


def test_a_program_of_a_script_that_did_not_write_its_checkpoint_is_the_cause_of_those_that_lack_it():
    missing = uncaught("FileNotFoundError: [Errno 2] No such file or directory: 'out/checkpoint.pt'", file="test.py")
    script = "+ python train.py\n{}+ python test.py\n" + missing
    explanation = verdict(script.format(STEPS + uncaught(OOM)))
    assert (explanation.cause, explanation.notes) == (
        "cuda-oom",
        ("1 later run in this file failed: checkpoint-missing-or-perm (line 17)",),
    )
    assert verdict(script.format(STEPS)).cause == "checkpoint-missing-or-perm"


def test_the_first_lines_of_a_log_that_come_again_after_a_time_are_a_new_run_s():
    first = "2026-05-07 22:{}:22,912 - INFO - Loading CSM model\n2026-05-07 22:{}:25,000 - INFO - Applying LoRA to it\n"
    failed = "ERROR - " + raised(None, BUG)
    text = first.format(50, 50) + failed
    assert verdict(text + first.format(53, 53)).cause == "unknown"
    assert verdict(text + first.format(50, 50)).cause == "user-code-exception"  # of another rank


def test_a_program_that_never_prints_steps_works_although_it_has_just_been_started_again():
    again = START + OTHER_OUTPUT
    assert verdict(again + OTHER_OUTPUT + again).cause == "healthy"
    assert verdict(START + STEPS + OTHER_OUTPUT + again).cause == "unknown"


def test_evaluations_between_the_steps_begin_no_run_though_the_log_began_with_one():
    evaluation = "INFO - validation step {} val_loss: {:.3f}\n"
    steps = "".join(
        f"INFO - step: {step} loss: {2 + 3 / step:.3f} lr: 0.001\n"
        + evaluation.format(step, 2.1 + 3 / step) * (step % 50 == 0)
        for step in range(1, 301)
    )
    log = read_log([(evaluation.format(0, 11.0) + steps).encode()])
    assert (log.earlier, log.progress.first_step, log.progress.last_step) == ((), 0, 300)


def test_epochs_begin_no_run_though_the_log_began_with_one():
    rows = "".join(f"Train: [{at}/50] loss: {3 - at / 50:.3f} time: 0.1\n" for at in range(1, 51))
    text = "".join(f"Beginning epoch {epoch} of 5\n{rows}" for epoch in range(1, 6))
    assert read_log([text.encode()]).earlier == ()


def test_of_a_program_that_is_started_again_and_again_the_last_end_is_read():
    ends = (LAUNCH + STEPS + uncaught(BUG)) * 100
    log = read_log([ends.encode()])
    assert log.records[-1].line > len(ends.splitlines()) - 5
    assert verdict(ends).cause == "user-code-exception"
    assert verdict(ends + LAUNCH + STEPS + uncaught(OOM)).cause == "cuda-oom"


def test_a_program_that_failed_behind_its_only_line_and_is_started_again_is_another_run():
    first = "Successfully loaded all libraries\n" + uncaught(OOM)
    steps = "step 1 loss 2.3\nstep 2 loss 2.1\nstep 3 loss 1.9\n"
    assert verdict(first + first.splitlines()[0] + "\nseed 1\n" + steps).cause == "healthy"
    assert verdict(first + steps).cause == "cuda-oom"


def test_the_second_rank_s_traceback_in_an_excerpt_that_begins_within_the_first_is_no_other_run():
    source = "    _sync_module_states(\n"
    error = "RuntimeError: CUDA error: no kernel image is available for execution on the device\n"
    whole = f'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n{source}{error}'
    excerpt = [
        f"[rank{rank}]: {line}" for rank, text in enumerate((source + error, whole)) for line in text.splitlines()
    ]
    explanation = verdict("\n".join(excerpt) + "\n")
    assert (explanation.cause, explanation.rank) == ("cuda-arch-unsupported", 0)


def test_a_file_that_python_cannot_open_ends_no_program_that_ran_behind_it():
    typo = "python: can't open file 'trian.py': [Errno 2] No such file or directory\n"
    assert verdict(typo + STEPS + uncaught("KeyboardInterrupt")).cause == "keyboard-interrupt"
    assert verdict(typo).cause != "healthy"


def test_the_next_epoch_behind_an_interrupt_was_in_a_buffer():
    rows = "".join(f"Epoch {epoch} | Iter {at} | images 32\n" for epoch in range(4) for at in range(1, 31))
    more = "".join(f"Epoch 4 | Iter {at} | images 32\n" for at in range(1, 6))
    interrupted = uncaught("KeyboardInterrupt")
    assert verdict(rows + interrupted + more).cause == "keyboard-interrupt"
    again = more.replace("Epoch 4", "Epoch 0")
    assert verdict(rows + interrupted + again).cause == "healthy"  # another run


def test_what_a_bar_leaves_behind_the_first_frame_is_no_part_of_it():
    frame = '  File "train.py", line 9, in <module>                | 405/1198 [04:36<12:11,  1.08it/s]\n    main()\n'
    header = "  6%|█     | 50/897 [04:26<1:15:04,  5.32s/it]Traceback (most recent call last):\n"
    explanation = verdict(header + STEPS + frame + "KeyboardInterrupt\n")
    assert explanation.cause == "keyboard-interrupt"


def test_a_server_that_answers_is_what_counts_behind_one_whose_port_was_taken():
    first = "settings: {'encoder': 'bert-base', 'port': 9000}\n * Serving Flask app 'translate'\n" + OTHER_OUTPUT[:250]
    taken = "Address already in use\nPort 9000 is in use by another program. Stop that program, or use another port.\n"
    answered = '127.0.0.1 - - [21/Sep/2026 16:18:33] "POST /translate HTTP/1.1" 200 -\n'
    assert verdict(first + taken + first + answered).cause == "healthy"
    assert verdict(first + answered + first + taken).cause == "port-in-use"
    assert (
        verdict(LAUNCH + uncaught(BUG) + "+ bash tidy.sh\nremoved 3 files\nwrote tidy.txt\n").cause
        == "user-code-exception"
    )


def test_a_short_run_that_ends_with_a_result_did_its_work():
    runs = START + STEPS + OTHER_OUTPUT + START + "INFO - 12 samples\n"
    assert verdict(runs).cause == "unknown"
    assert verdict(runs + "COMPLETE: 12 samples drawn\n").cause == "healthy"


def test_behind_a_failed_import_settings_begin_a_run_and_other_output_is_another_program_s():
    missing = uncaught("ModuleNotFoundError: No module named 'deepspeed'").replace("    main()", "    import deepspeed")
    settings = "Namespace(epochs=100, gpu='cuda')\n"
    assert verdict(missing + settings + uncaught(OOM)).cause == "cuda-oom"
    assert verdict(missing + settings).cause == "import-error"
    assert verdict(OTHER_OUTPUT + missing + 3 * OTHER_OUTPUT).cause == "healthy"


def test_a_run_that_begins_later_by_the_clock_or_by_its_process_leaves_an_uncaught_error_to_the_earlier_one():
    at = "2026-03-0{} 10:00:00,000 - INFO - "
    begin = "{0}reading the corpus of bird songs\n{0}model has 5,000 weights\n"
    first, later = begin.format(at.format(1)), begin.format(at.format(2))
    assert verdict(first + uncaught(OOM) + later).cause == "unknown"
    assert verdict(first + uncaught(OOM) + first).cause == "cuda-oom"
    joins = (
        "I0305 10:00:0{}.250000 {} nccl_context.cc:83] init nccl context nranks: 2 local rank: 1 gpu id: 1 ring id: 0\n"
    )
    signal = "[SignalInfo: *** SIGTERM (@0x1f4) received by PID 977 (TID 0x7f) from PID 800 ***]"
    stopped = f"FatalError: `Termination signal` is detected by the operating system.\n  {signal}\n"
    assert verdict(joins.format(1, 811) + uncaught(OOM) + joins.format(9, 977)).cause == "unknown"
    assert verdict(joins.format(1, 811) + stopped + joins.format(9, 977)).cause == "unknown"
    both = joins.format(1, 811) + uncaught(OOM) + joins.format(9, 977) + stopped
    assert verdict(both).cause == "preempted-sigterm"


def test_a_run_begins_with_the_log_s_first_line_although_its_settings_differ():
    handled = "ERROR - " + raised(None, BUG)
    begin = "2026-03-0{} 10:00:00 - INFO - reading the corpus of songs\n2026-03-0{} 10:00:00 - INFO - Namespace(path='{}')\n"
    runs = [begin.format(day, day, path) for day, path in ((1, "a"), (2, "bb"), (3, "bb"), (4, "bb"))]
    explanation = verdict(runs[0] + runs[1] + runs[2] + handled + runs[3])
    assert explanation.cause == "unknown"
    assert "begins at line" in explanation.summary


def test_settings_behind_steps_begin_a_run_where_the_next_steps_count_from_their_start():
    at = "2026-06-22 07:30:{} - INFO - main.py - train - 54 - "
    settings = at.format("00,123") + "Namespace(lr={}, data_dir='a')\n"
    losses = [2.05, 1.1, 0.5, 0.1, 0.02, 0.004, 0.003, 0.002, 0.001, 0.0009]
    steps = [at.format(f"{n:02},500") + f"[train] epoch:0 {n}/1911 loss:{loss}\n" for n, loss in enumerate(losses, 10)]
    again = [line.replace(f" {n}/1911", f" {n - 10}/1911") for n, line in enumerate(steps, 10)]
    runs = "".join([settings.format(1), *steps, settings.format(2), *again[:4]])
    assert verdict(runs).cause == "healthy" and verdict(runs).progress.steps == 4
    on = "".join([settings.format(1), *again, settings.format(2), *steps])  # they are printed in the middle
    level = [re.sub("loss:.*", "loss:0.001", line) for line in again]  # an evaluation printed them
    assert verdict("".join([settings.format(1), *again, settings.format(2), *level])).progress.steps == 20
    assert verdict(on).progress.steps == 20


def test_of_a_file_that_collects_the_errors_of_one_script_the_last_one_counts():
    denied = uncaught("PermissionError: [Errno 13] Permission denied: '/my'")
    missing = uncaught("RuntimeError: Dataset not found. You can use download=True to download it")
    assert verdict(denied + uncaught(BUG) + missing).cause == "dataset-missing"
    assert verdict(denied + missing).cause == "permission-denied"  # two may be processes of one run
    assert verdict(uncaught(OOM) + 2 * uncaught(PEER)).cause == "cuda-oom"
    lost = "NVRM: Xid (PCI:0000:3b:00): 79, pid=811, GPU has fallen off the bus.\n"
    ranks = 3 * uncaught("RuntimeError: CUDA error: unspecified launch failure")
    assert verdict(lost + ranks).cause == "gpu-hardware-error"


def test_arguments_that_argparse_refuses_are_the_last_end_of_a_script_too():
    missing = uncaught("RuntimeError: Dataset not found. You can use download=True to download it")
    denied = uncaught("PermissionError: [Errno 13] Permission denied: '/my'")
    refused = "usage: {0} [-h]\n{0}: error: unrecognized arguments: ../output\n"
    assert verdict(missing + denied + refused.format("train.py")).cause == "config-error"
    assert verdict(missing + denied + refused.format("report.py")).cause != "config-error"


def test_of_a_file_in_which_the_last_script_failed_twice_that_counts():
    encoded = uncaught("UnicodeDecodeError: 'utf-8' codec can't decode byte 0x80 in position 64: invalid start byte")
    file = "FileNotFoundError: [Errno 2] No such file or directory: '{}small.json'"
    later = uncaught(file.format("../inputs/"), "search.py")
    assert verdict(encoded + later + "Done\n" + later).cause == "checkpoint-missing-or-perm"
    assert verdict(encoded + later).cause == "text-encoding"
    output = uncaught(file.format("../results/"), "search.py")
    assert verdict(encoded + output + "Done\n" + output).cause == "text-encoding"


def test_a_jupyter_server_outlives_its_kernels():
    failed = uncaught("zmq.error.ZMQError: Address already in use")
    saved = "".join(f"[I 2026-09-25 11:0{n}:01.455 ServerApp] Saving file at /notes.ipynb\n" for n in range(9))
    begin = "[I 2026-09-25 11:00:00.001 ServerApp] Serving notebooks from local directory: /home\n"
    assert verdict(begin + saved + failed + 20 * saved).cause == "healthy"
    assert verdict(begin + saved + failed).cause == "port-in-use"


def test_a_module_that_python_2_does_not_find_ended_one_program_of_several():
    missing = uncaught("ImportError: No module named pathlib").replace("    main()", "    import pathlib")
    assert verdict(missing + 3 * OTHER_OUTPUT).cause == "healthy"


def test_done_behind_a_failed_import_and_commands_that_a_shell_does_not_find_is_no_work():
    missing = uncaught("ModuleNotFoundError: No module named 'numexpr'")
    banner = "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default\n"
    script = "job.sh: line 22: --tasks: command not found\njob.sh: line 26: --width: command not found\ndone\n"
    assert verdict(missing + banner + script).cause == "import-error"
    assert verdict(missing + banner + OTHER_OUTPUT + "done\n").cause == "healthy"


def test_a_summary_that_names_failed_programs_behind_the_end_of_their_training_shows_no_health():
    ends = STEPS + "Training complete in 4568.8s\n"
    summary = "Summary\n    magnitude/seed1    FAILED (4567s)\n    magnitude/seed2    FAILED (4554s)\n"
    assert verdict(ends + summary).cause == "unknown"
    assert verdict(ends + "Summary\n    magnitude/seed1    ok (4567s)\n0 tasks FAILED\n").cause == "healthy"


def test_keys_that_a_terminal_shows_ended_no_program_that_goes_on():
    assert verdict(OTHER_OUTPUT + "^C^C\n" + OTHER_OUTPUT * 3).cause == "healthy"
    assert verdict(OTHER_OUTPUT + "^C^C\n").cause == "keyboard-interrupt"
    assert verdict(STEPS + "^CReceived Signals.SIGINT death signal\n" + OTHER_OUTPUT * 3).cause == "keyboard-interrupt"


def test_a_count_of_no_exceptions_and_what_ucx_tries_are_no_trouble():
    assert verdict(STEPS + "0 exceptions encountered during last training\n").cause == "healthy"
    tried = "[node12:56309:0]   sock.c:32   UCX  DEBUG ioctl(req=35093, ifr_name=ib2) failed: Cannot assign requested address\n"
    assert verdict(STEPS + tried).cause == "healthy"


def test_a_rendezvous_that_another_node_has_shut_down_ended_no_run_and_a_notebook_s_launcher_only_reports_one():
    left = "[W dynamic_rendezvous.py:1203] The node 'n2_253134_0' has failed to shutdown the rendezvous 'none'.\n"
    assert verdict(STEPS + left).cause == "healthy"
    launcher = uncaught(
        "RuntimeError: TorchDistributor failed during training.View stdout logs for detailed error message."
    )
    assert verdict(uncaught("ModuleNotFoundError: No module named 'training'") + launcher).cause == "import-error"


def test_what_tasks_had_in_their_buffers_when_srun_ended_them_is_no_other_run():
    ended = "slurmstepd: error: *** STEP 522.0 ON n7 CANCELLED AT 2026-04-29T23:36:37 ***\n"
    error = uncaught("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert verdict(error + ended + STEPS).cause == "cuda-oom"
    assert verdict(error + ended + STEPS * 20).cause == "healthy"  # another step of the job
    assert verdict(STEPS * 2 + error + ended + STEPS + "Training complete!\n").cause == "healthy"


def test_a_job_that_slurm_has_cancelled_prints_on_until_it_is_killed():
    epochs = [f"2025-06-13 11:30:{n:02} - INFO - Epoch [1/70] loss_all: {3 - n / 30:.4f}\n" for n in range(40)]
    assert verdict("".join((*epochs[:36], CANCELLED.format(53471), *epochs[36:]))).cause == "slurm-cancelled"


def test_a_few_lines_like_the_first_behind_an_error_were_in_a_buffer():
    done = "Saved successfully\n"
    assert verdict(START + uncaught(BUG) + START + done).cause == "user-code-exception"
    assert verdict(START + uncaught(BUG) + START + "reading\n" * 3 + done).cause == "healthy"


def test_a_run_of_which_nothing_is_shown_yet_leaves_the_answer_to_an_interrupt_before_it():
    bar = "Epoch 0:  {0}%|#    | {0}/100 [00:17<02:14, 13.56it/s, loss=0.0104]\n"
    first = "".join(bar.format(at) for at in range(10, 60, 5))
    stop = 'call.py:48: UserWarning: Detected KeyboardInterrupt, attempting graceful shutdown...\n  rank_zero_warn("Detected")\n'
    again = "GPU available: False, used: False\nTPU available: False\n"
    assert verdict(again + first + stop + again).cause == "keyboard-interrupt"


def test_a_program_that_a_user_starts_behind_an_interrupt_is_the_one_that_is_asked_about():
    stopped = STEPS + raised(None, "KeyboardInterrupt") + "^C\n"
    prompt = "(base) ada@node-3:~/run$ python generate.py\n"
    assert verdict(stopped + prompt + "Generating from 12 prompts\n" * 20).cause == "healthy"
    assert verdict(stopped + prompt).cause == "keyboard-interrupt"
    assert verdict(STEPS + uncaught(BUG) + prompt + "Generating from 12 prompts\n" * 20).cause == "user-code-exception"


def test_a_command_line_that_was_refused_ended_before_the_run_behind_it():
    usage = "usage: train.py [-h] [-r RESUME]\ntrain.py: error: argument -r/--resume: expected one argument\n"
    assert verdict(usage).cause == "config-error"
    assert verdict(START + usage + START + STEPS).cause == "healthy"


def test_a_rank_that_prints_its_first_lines_behind_the_end_of_another_one_begins_no_run():
    def start(rank):
        return f"[rank{rank}][INFO] loading shard {rank}-of-4\n[rank{rank}][INFO] encoded 50 rows\n"

    def tagged(rank, error):
        return "".join(f"[rank{rank}]: {line}\n" for line in uncaught(error).splitlines())

    first = start(0) + start(2) + tagged(2, "KeyError: 'label'")
    explanation = verdict(first + start(1) + tagged(0, PEER))
    assert (explanation.cause, explanation.rank, explanation.notes) == ("user-code-exception", 2, ())
    launcher = "E1130 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 2\n"
    notes = verdict(first + launcher + start(1) + tagged(1, BUG)).notes
    assert notes == ("1 earlier run in this file failed: user-code-exception (line 5)",)


@pytest.mark.parametrize(
    "line",
    [
        "hello from rank {}\n",
        "[{}] initialising process group with nccl\n",
        "[{}] initialising process group with nccl\ntrain.py:3: UserWarning: the timeout is not set\n",
    ],
)
def test_ranks_that_fail_behind_their_first_lines_are_of_one_run(line):
    first, second = (line.format(rank) + uncaught(BUG) for rank in range(2))
    assert verdict(first + second).notes == ()
    at = line.count("\n") + 1
    assert verdict(first + first).notes == (f"1 earlier run in this file failed: user-code-exception (line {at})",)


def test_a_job_that_resumes_a_cancelled_one_is_a_run_of_its_own():
    def steps(first, last):
        return "".join(f"step {step}/100 loss {3 / (1 + step / 20):.3f}\n" for step in range(first, last, 2))

    cancelled = steps(0, 50) + CANCELLED.format(4711).replace(" ***", " DUE TO PREEMPTION ***")
    resumed = "Loaded checkpoint at step 40\n"
    explanation = verdict(cancelled + resumed + steps(40, 100) + "Training complete\n")
    assert (explanation.cause, explanation.progress.first_step) == ("healthy", 40)
    assert explanation.notes == ("1 earlier run in this file failed: slurm-cancelled (line 26)",)
    assert verdict(cancelled + resumed).cause == "slurm-cancelled"
    assert verdict(cancelled + resumed + steps(40, 60) + CANCELLED.format(4712)).cause == "slurm-cancelled"
    assert verdict(cancelled + resumed + steps(40, 60) + uncaught(OOM)).cause == "cuda-oom"
    # what the tasks of the same job still had in their buffers
    assert verdict(cancelled + steps(40, 60)).cause == "slurm-cancelled"
    resumed_first = resumed + steps(40, 80) + CANCELLED.format(4711)
    assert verdict(resumed_first + resumed + steps(42, 70)).cause == "slurm-cancelled"
    assert verdict(cancelled.replace("step", "[rank0]: step") + resumed + steps(40, 60)).cause == "slurm-cancelled"


LEFT = ("FileExistsError: [Errno 17] File exists: 'out/run'", "OSError: [Errno 98] Address already in use")
LOCKED = "sqlite3.OperationalError: database is locked"
AGENT = (
    "E1130 15:17:42.559000 {} torch/distributed/elastic/multiprocessing/api.py:1002]"
    " failed (exitcode: 1) local_rank: {} (pid: 18096) of binary: /env/bin/python\n"
)
END = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"


def attempt(agent, rank, error, *, prefix="[rank{}]: ", steps=STEPS):
    head = prefix.format(rank)
    return steps + "".join(f"{head}{line}\n" for line in uncaught(error).splitlines()) + AGENT.format(agent, rank)


@with_rows("error, prefix, steps", itertools.product(
    (*LEFT, LOCKED, "RuntimeError: out/LOCK exists: another run has this folder"),
    ("[rank{}]: ", ""), ("", "".join(STEPS.splitlines(keepends=True)[:2])),
))  # fmt: skip
def test_what_torchrun_s_workers_left_when_it_restarted_them_is_not_the_cause(error, prefix, steps):
    second = attempt(4242, 0, error, prefix=prefix, steps=steps)
    assert BUG in verdict(attempt(4242, 1, BUG, prefix=prefix) + second + END).evidence[0].text
    oom = attempt(4242, 0, OOM, prefix=prefix, steps=steps)
    assert verdict(attempt(4242, 1, BUG, prefix=prefix) + oom + END).cause == "cuda-oom"


@with_rows("error, steps", (
    (LOCKED, STEPS), (LEFT[0], STEPS), ("KeyError: \"column 'text' exists twice\"", STEPS),
    ("RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable; device in use", ""),
))  # fmt: skip
def test_an_attempt_that_trained_or_fails_of_no_file_or_port_failed_of_its_own(error, steps):
    log = attempt(4242, 1, BUG if not steps else OOM) + attempt(4242, 0, error, steps=steps) + END
    assert error in verdict(log).evidence[0].text


@with_rows("error", LEFT)
def test_what_is_left_is_the_cause_where_a_user_started_again_by_hand(error):
    other_agent = verdict(attempt(4242, 1, BUG) + END + attempt(4300, 0, error, steps="") + END)
    first_attempt = verdict(attempt(4242, 0, error) + attempt(4242, 0, error, steps="") + END)
    lost_peer = verdict(attempt(4242, 1, PEER) + attempt(4242, 0, error, steps="") + END)
    assert error in other_agent.evidence[0].text
    assert error in first_attempt.evidence[0].text
    assert error in lost_peer.evidence[0].text


def test_the_jobs_whose_reports_lsf_appends_to_one_file_are_several_runs():
    report = "Sender: LSF System <lsfadmin@cluster>\nSubject: Job {}: <train> in cluster <c> {}\n\n{}\n\n"
    end = "The output (if any) is above this job summary.\n\n"
    failed = raised(None, "ModuleNotFoundError: No module named 'pandas'") + report.format(
        1, "Exited", "Exited with exit code 1."
    )
    worked = "".join(f"trained {n} percent\n" for n in range(30)) + report.format(2, "Done", "Successfully completed.")
    assert verdict(failed + end).cause == "import-error"
    explanation = verdict(failed + end + worked + end)
    assert explanation.cause == "healthy"
    assert explanation.notes == ("1 earlier run in this file failed: import-error (line 1)",)
