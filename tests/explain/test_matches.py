"""Events: what a line or an exception shows beside the lines around it."""

import pytest
from log_samples import OOM, STEPS, raised
from rows import with_rows

from paceline.explain.run_folder import explain

BAR = "Epoch 1/50:  23%|##3       | 3/13 [01:45<06:22, 38.27s/it, loss=0.86]"
LEAKED = "resource_tracker.py:324: UserWarning: resource_tracker: There appear to be 1 leaked semaphore objects\n"


def verdict(text):
    return explain([text.encode()])


def test_what_fails_for_every_file_is_no_race():
    move = "[FAIL] part {0}: [Errno 2] No such file or directory: 'part_{0}.npy.tmp' -> 'part_{0}.npy'\n"
    assert verdict(move.format(7)).cause == "rank-file-race"
    assert verdict("".join(map(move.format, range(30)))).cause == "user-code-exception"


def test_leaked_semaphores_behind_a_bar_that_was_not_finished_are_of_a_process_that_was_killed():
    steps = "Epoch 1/50:   8%|8         | 1/13 [00:27<05:25, 27.14s/it, loss=2.04]\n"
    assert verdict(steps + BAR + LEAKED).cause == "killed-from-outside"
    assert verdict(steps + BAR.replace(" 23%", "100%").replace("3/13", "13/13") + LEAKED).cause == "healthy"


def test_a_signal_is_what_ended_a_process_that_goes_down_with_another_one():
    log = STEPS + "*** SIGTERM received at time=1759753629 on cpu 42 ***\n" + STEPS.replace("step 0", "step 1")
    assert verdict(log).cause == "healthy"
    assert verdict(log + "Command '['simulate']' died with <Signals.SIGABRT: 6>.\n").cause == "preempted-sigterm"


@pytest.mark.parametrize("line", [
    "  from vllm.version import __version__ as VERSION",
])  # fmt: skip
def test_what_a_warning_or_a_checker_quotes_is_no_failure(line):
    assert verdict("reading the data\n" * 9 + line + "\n").cause == "healthy"


def test_source_in_the_box_of_a_forwarded_traceback_shows_no_cause():
    box = "12:00:00 | ERROR |   │   118 │   def call(*args, **kwargs):   │\n"
    assert verdict("reading the data\n" * 9 + box).cause == "unknown"


def test_the_time_at_which_lsf_ended_a_job_is_no_signal():
    report = "Started at Mon Mar  3 09:12:24 2025\nTerminated at Mon Mar  3 09:12:44 2025\n\nSuccessfully completed.\n"
    assert verdict("reading the data\n" * 9 + report).cause == "healthy"


@pytest.mark.parametrize("setting", ["SOLVER.IMS_PER_BATCH: 16", "FED_LOSS_NUM_CLASSES: 50"])
def test_settings_in_capitals_are_no_progress(setting):
    assert verdict(f"{setting}\n" * 3).progress.steps == 0


def test_a_block_of_settings_in_capitals_is_no_progress_and_measures_in_capitals_are():
    block = "SOLVER:\n  UPDATE_ITER: 1\n  BURN_UP_STEP: 60000\n    L1_LOSS_BETA: 0.1\n"
    assert verdict(block).progress.steps == 0
    measures = "Metrics:\n  GLOBAL_STEP: {}\n  TRAIN_LOSS: {}\n"
    assert verdict("".join(measures.format(step, 3 - step / 9) for step in range(9))).progress.last_step == 8
    lost = "".join(measures.format(step, 2.5 if step < 3 else "NaN") for step in range(9))
    assert verdict(lost).cause == "loss-nan"


def test_what_deepspeed_says_of_a_checkpoint_that_it_reads_is_no_trouble():
    assert (
        verdict("reading the data\n" * 9 + "Detected checkpoint of type zero stage 2, world_size: 1\n").cause
        == "healthy"
    )


def test_options_that_the_shell_took_for_commands_are_no_missing_programs():
    explanation = verdict("/bin/bash: line 7: --micro-batch-size: command not found\n")
    assert explanation.cause == "config-error"
    assert "backslash" in explanation.fix


def test_an_environment_that_a_script_could_not_activate_is_not_why_its_program_was_killed():
    activate = "./run.sh: line 3: /home/me/venv/bin/activate: No such file or directory\n"
    assert verdict(activate).cause == "system-tool-missing"
    killed = "./run.sh: line 9: 74849 Killed: 9               python3 train.py\n"
    assert verdict(activate + killed).cause == "host-oom-killed"


@pytest.mark.parametrize(("error", "path"), [
    ("FileNotFoundError: [Errno 2] No such file or directory: '../nets/first'", "../nets/first"),
    ("ValueError: No json files found in D:\\work\\rows", "D:\\work\\rows"),
    ("hub.RepositoryNotFoundError: 404 Client Error.\nRepository Not Found for url: https://huggingface.co/me/net/resolve/main/a",
     "me/net"),
])  # fmt: skip
def test_the_path_that_does_not_exist_is_in_the_summary(error, path):
    log = f'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    main()\n{error}\n'
    assert path in verdict(log).summary


@pytest.mark.parametrize("message", [
    "TypeError: Unrecognized type <class 'lab.tensors.Quantity'>.",
    "lab.graph.errors.InvalidArgumentError: Duplicate node name: 'decoder/out'",
    "py4j.protocol.Py4JJavaError: An error occurred: java.lang.IllegalArgumentException: Illegal pattern letter: Q",
    "pydantic.ValidationError: 1 validation error for Reply\nresponse -> scores -> 0\n  value is not a valid float",
    "AttributeError: '_PrefetchIter' object has no attribute 'dataset'",
    "AttributeError: module '__main__' has no attribute '__spec__'",
    "AttributeError: 'Process' object has no attribute '_cache'",
    "TypeError: Cannot cast scalar from dtype('O') to dtype('int64') according to the rule 'safe'",
    "lab.CallError: expected float but received a list",
    "lab.LoadError: vocabulary file of rank 1 has 0 entries",
    "lab.CallError: Tensor('decay:0', shape=(), dtype=float32) must be from the same graph as Tensor('beta:0')",
])  # fmt: skip
def test_a_word_of_a_message_alone_decides_no_cause(message):
    frame = '  File "/opt/lib/python3.11/site-packages/lab/call.py", line 9, in call\n    call(*args)\n'
    log = f"Traceback (most recent call last):\n{frame}{message}\n"
    assert verdict(log).cause == "user-code-exception"


def test_the_error_of_a_progress_bar_that_cannot_end_is_not_why_its_program_failed():
    bar = 'Traceback (most recent call last):\n  File "bar.py", line 9, in exit\nRuntimeError: cannot join current thread\n'
    cause = 'Traceback (most recent call last):\n  File "train.py", line 9, in step\nRuntimeError: not enough memory: bought 0GB\n'
    assert verdict(bar + cause).cause == "host-oom-killed"


def test_what_a_queue_without_a_reader_prints_ends_no_program():
    folder = "/usr/lib/python3.11/multiprocessing"
    frames = (
        f'  File "{folder}/queues.py", line 244, in _feed\n  File "{folder}/connection.py", line 200, in send_bytes\n'
    )
    gone = f"Traceback (most recent call last):\n{frames}BrokenPipeError: [Errno 32] Broken pipe\n"
    assert verdict(("epoch 1 loss 2.0\nepoch 2 loss 1.0\n" * 3) + gone).cause == "healthy"
    reads = f'  File "train.py", line 3, in step\n  File "{folder}/connection.py", line 430, in _recv_bytes\n'
    assert (
        verdict(f"Traceback (most recent call last):\n{reads}BrokenPipeError: [Errno 32] Broken pipe\n").cause
        != "healthy"
    )


def test_a_pth_file_that_python_leaves_out_is_not_why_a_program_failed():
    left_out = (
        "Error processing line 1 of /venv/lib/python3.8/site-packages/vision-nspkg.pth:\n  Traceback (most recent call last):\n"
        '    File "/usr/lib/python3.8/site.py", line 169, in addpackage\n'
        "  AttributeError: 'NoneType' object has no attribute 'loader'\nRemainder of file ignored\n"
    )
    failure = 'Traceback (most recent call last):\n  File "train.py", line 9, in load\n'
    failure += "RuntimeError: The archive a.tar.gz is not present in"
    assert verdict(f"{left_out}{failure} the root directory or is corrupted.\n").cause == "dataset-missing"


def test_a_process_that_was_killed_behind_its_segmentation_fault_had_crashed():
    crash = "Caught signal 11 (Segmentation fault: address not mapped to object at address 0x3)\n"
    assert verdict("loading the model\nKilled\n").cause == "host-oom-killed"
    assert verdict(crash + "loading the model\nKilled\n").cause == "sigsegv"


def test_threads_that_crash_after_nccl_failed_are_a_consequence():
    failure = "F loops.cc:299] Check failed: r == ncclSuccess NCCL error: unhandled cuda error\n"
    assert verdict("Segmentation fault (core dumped)\n" + failure).cause == "nccl-cuda-failure"


def test_a_line_that_says_no_more_than_invalid_argument_is_no_wrong_setting():
    line = "ERROR engine.py:366] HIP error: invalid argument\n"
    assert verdict("loading the model\n" * 9 + line).cause == "cuda-error"


def test_a_path_is_not_the_example_of_one_in_a_message():
    form = "HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/models/a/b'."
    assert "`ls -ld /models/a/b`" in verdict(form).fix
    assert "library portaudio " in verdict("OSError: portaudio library not found").summary


@pytest.mark.parametrize(("line", "cause"), [
    ("Failed search 1 of 1 with exception: cannot unpack non-iterable int object", "user-code-exception"),
    ("Failed search 1 of 1 with exception: CUDA out of memory. Tried to allocate 2 GiB", "cuda-oom"),
    ("2026-11-30 02:45:03 ERROR training failed: KeyError('validation')", "user-code-exception"),
    ("Training failed: Trying to backward through the graph a second time", "user-code-exception"),
    ("Request failed with error: 429 Too many requests, retrying in 5 s", "rate-limited"),
    ("2026-11-30 02:43:39,586 ERROR training failed: KeyError('validation')", "user-code-exception"),
    ("training failed: PermissionError(13, 'Permission denied')", "permission-denied"),
    ("training failed: ConnectionRefusedError(111, 'Connection refused')", "service-unreachable"),
    ("training failed: MemoryError('cannot allocate')", "host-oom-killed"),
    ("training failed: EOFError('Ran out of input')", "checkpoint-corrupt"),
])  # fmt: skip
def test_a_line_of_what_failed_with_which_exception_shows_the_cause_of_its_message(line, cause):
    assert verdict(STEPS + line + "\n").cause == cause


@pytest.mark.parametrize(("line", "cause"), [
    ("go.sh: line 1: torchrun: command not found", "system-tool-missing"),
    ("run.sh: 3: torchrun: not found", "system-tool-missing"),
    ("mkdir: cannot create directory '/out': Permission denied", "permission-denied"),
])  # fmt: skip
def test_what_a_shell_script_cannot_do_is_not_survived_by_a_few_steps_of_its_next_program(line, cause):
    evaluation = "".join(f"step {number}/5 loss 3.2{number}\n" for number in range(1, 6))
    assert verdict(f"{line}\n{evaluation}").cause == verdict(f"{STEPS}{line}\n{STEPS}").cause == cause


@pytest.mark.parametrize("word", ["", "sample: "])
def test_an_exception_that_ends_its_program_is_not_survived_by_the_steps_of_a_buffer(word):
    bare = f'{word}Traceback (most recent call last):\n  File "app.py", line 3, in <module>\n    main()\n{OOM}\n'
    buffered = verdict(STEPS + bare + STEPS.replace("step 0", "step 1"))
    assert (buffered.shows_failure, buffered.notes[0][:15]) == (True, "10 steps follow")
    rank_0 = "".join(f"[rank0]: {line}\n" for line in STEPS.splitlines())
    others = verdict(rank_0 + bare + rank_0.replace("step 0", "step 1"))
    assert others.shows_failure and not any("follow it" in note for note in others.notes)


def test_training_that_is_stopped_early_has_ended_unless_its_metric_is_nan():
    stop = "Monitored metric val_loss {} Signaling Trainer to stop.\n"
    improved = stop.format("did not improve in the last 2 records. Best score: 0.655.")
    bar = f"Epoch 2/29 {40 * '━'} 8/8 0:00:00 • 0:00:00 19.04it/s train_loss: 2.217 val_loss: 0.937\n"
    assert (verdict(improved + bar).cause, verdict(improved + bar).summary[-12:]) == ("healthy", ", loss 2.217")
    lost = stop.format("= nan is not finite. Previous best value was 0.655.") + bar.replace("0.937", "nan")
    assert verdict(lost).cause != "healthy"
    assert verdict(raised(None, OOM).replace("in main", "in <module>") + STEPS + improved).shows_failure


TRIAL = (
    "[I 2026-11-30 06:38:09,211] Trial {0} finished with value: 0.5 and parameters: {{'lr': 0.1}}. Best is trial 0.\n"
)
FAILED_TRIAL = """[W 2026-11-30 06:38:09,234] Trial 1 failed with parameters: {'lr': 0.2} because of the error: ValueError('no').
Traceback (most recent call last):
  File "/env/lib/python3.11/site-packages/optuna/study/_optimize.py", line 206, in _run_trial
    value_or_values = func(trial)
  File "train.py", line 4, in objective
    check(size)
ValueError: hidden size too small
"""


def test_a_failed_trial_of_a_study_that_goes_on_is_no_failure():
    assert verdict(TRIAL.format(0) + FAILED_TRIAL + TRIAL.format(2)).cause == "healthy"
    assert verdict(TRIAL.format(0) + FAILED_TRIAL).cause == "user-code-exception"
    in_script = FAILED_TRIAL.replace("in _run_trial", "in <module>")  # a study's loop of its own
    invalid = in_script.replace("ValueError: hidden size too small", "ValueError: Invalid learning rate: -1")
    for failed in (in_script, invalid, in_script.replace("ValueError: hidden size too small", OOM)):
        assert verdict(TRIAL.format(0) + failed + TRIAL.format(2)).cause == "healthy"
        assert verdict(TRIAL.format(0) + failed).shows_failure
        error = failed.partition("\n")[2]  # of the program, which no trial has
        assert verdict(TRIAL.format(0) + failed + TRIAL.format(2) + error).shows_failure
        assert verdict(TRIAL.format(0) + failed + error).shows_failure


def test_the_exit_status_of_the_command_timeout_is_a_failure():
    log = STEPS + "train.py finished with rc={0}\n"
    assert verdict(log.format(124)).cause == "preempted-sigterm"
    assert verdict(log.format(0)).cause == "healthy"


def test_a_helper_that_a_script_ends_behind_its_training_is_no_end_of_the_training():
    ended = "run.sh: line 1: 21467 Terminated              tensorboard --logdir runs\n"
    assert verdict(STEPS + "Training finished. Saved best.ckpt\n" + ended).cause == "healthy"
    assert verdict(STEPS + ended).cause == "preempted-sigterm"
    program = ended.replace("tensorboard", "python train.py --tensorboard")
    assert verdict(STEPS + "Training finished. Saved best.ckpt\n" + program).cause == "preempted-sigterm"


def test_the_file_that_does_not_exist_is_the_one_named_right_before_these_words():
    needed = (
        "must be a file or a directory containing 'train.json' and 'val.json' files, but 'data.json' does not exist."
    )
    assert (
        verdict(raised(None, f"FileNotFoundError: The `json_path` {needed}")).summary
        == "the training data data.json does not exist"
    )


def test_a_line_that_quotes_the_command_that_failed_says_no_reason():
    line = "Error in script at line 82: python evaluate.py --batch_size 1 --prompt both --dataset demo\n"
    assert verdict(line).cause == "unknown"
    assert verdict(line.replace("python evaluate.py ", "argument ")).cause == "config-error"


def test_a_container_that_could_not_be_opened_did_not_run_what_follows():
    failed = "FATAL:   could not open image /work/HOME=/opt: failed to retrieve path for /work/HOME=/opt\n"
    cancelled = "slurmstepd: error: *** JOB 144025 ON c227 CANCELLED AT 2026-03-29T20:53:03 ***\n"
    assert verdict(failed + "reading a file\n" * 130 + cancelled).cause == "slurm-cancelled"
    assert verdict(failed + cancelled).cause == "container-start-failed"


def test_an_engine_that_its_server_has_stopped_is_no_failure():
    report = "(APIServer pid=1770) INFO 07-06 09:42:46 [loggers.py:271] Engine 000: Avg generation throughput: 609.4 tokens/s\n"
    stop = "(EngineCore pid=1833) INFO 07-06 09:43:07 [core.py:1178] [shutdown] EngineCore: trigger received signal=SIGTERM\n"
    error = "(APIServer pid=1770) ERROR 07-06 09:43:07 [async_llm.py:704] "
    lines = (
        "AsyncLLM output_handler failed.",
        "Traceback (most recent call last):",
        '  File "/x/site-packages/vllm/v1/engine/async_llm.py", line 660, in output_handler',
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.",
    )
    dead = "".join(f"{error}{line}\n" for line in lines)
    words = ("Shutting down", "Waiting for application shutdown.", "Application shutdown complete.")
    end = "".join(f"(APIServer pid=1770) INFO:     {text}\n" for text in words)
    assert verdict(report * 60 + stop + dead + end).cause == "healthy"
    assert verdict(report * 60 + dead + stop + end).cause == "serving-engine-failed"


def test_a_process_that_called_terminate_does_not_survive_by_the_steps_of_others():
    abort = (
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
        "  what():  [pair.cc:456] op.preamble.length <= op.nbytes. 24 vs 20. Is there a distributed collective mismatch?\n"
    )
    steps = "".join(f"epoch {epoch} loss 0.6{epoch}\n" for epoch in range(4))
    log = f"{steps}{abort}{steps}failed (exitcode: -6) local_rank: 1 (pid: 21207) of binary: python\n"
    explanation = explain([log.encode()])
    assert explanation.cause == "collective-timeout-desync"
    assert "24 bytes arrived where 20 were expected" in explanation.summary


def test_what_shows_the_state_of_a_machine_may_be_missing_behind_a_training_that_was_saved():
    steps = "".join(f"step {step}/60 loss {3 - step / 60:.3f}\n" for step in range(0, 60, 10))
    log = "{}saved model to last.pt\nrun.sh: line 20: {}: command not found\n[2026-11-30 12:37:50] pipeline complete\n"
    assert explain([log.format(steps, "nvidia-smi").encode()]).cause == "healthy"
    assert explain([log.format(steps, "torchrun").encode()]).cause == "system-tool-missing"
    unsaved = log.replace("saved model", "no model")
    assert explain([unsaved.format(steps, "nvidia-smi").encode()]).cause == "system-tool-missing"


def test_a_signal_that_dumps_stacks_or_toggles_a_profiler_is_no_notice():
    for line, notices in (
        ("rank1 received signal 10 (preemption notice), will checkpoint and exit", True),
        ("[rank0]: received SIGUSR1, dumping py stacks", False),
        ("received signal 10 times lower than noise", False),
    ):
        assert (verdict(f"step 1 loss 2.0\n{line}\n").cause == "preempted-sigterm") == notices


def test_of_a_rename_the_path_is_that_of_its_first_file():
    error = "FileNotFoundError: [Errno 2] No such file or directory: '/data/a.tmp' -> '/data/a.bin'"
    assert "'/data/a.bin" not in verdict(raised(0, error)).summary


@with_rows("error, cause", (
    ("CUDA out of memory. Tried to allocate 2.00 GiB", "cuda-oom"), ("[Errno 28] No space left on device", "disk-full"),
))  # fmt: skip
def test_errors_of_most_of_the_last_items_are_not_survived_where_nothing_else_was_done(error, cause):
    def loop(failed, *, announced, done="clip {0} done", ending="", first=11):
        lines = [
            ("processing clip {0}\n" if announced else "")
            + (f"ERROR: failed on clip {{0}}: {error}{ending}\n" if number in failed else f"{done}\n")
            for number in range(first, 131)
        ]
        return "".join(line.format(number, 300 / number) for number, line in enumerate(lines, first)) + "done\n"

    for announced in (True, False):
        most, few = {13, 17, *range(100, 131)}, {13, 17, *range(124, 131)}
        assert verdict(loop(most, announced=announced)).cause == cause
        assert verdict(loop(range(131), announced=announced, first=120)).cause == cause
        healthy = [
            loop(few, announced=announced),
            loop(most - {130}, announced=announced),
            loop(range(12, 131, 2), announced=announced),
            loop(most, announced=announced, done="step {0}: loss {1:.3f}"),
            loop(most, announced=announced, done="clip {0}: accuracy: 0.5"),
            loop(most, announced=announced, ending=", skipped"),
            STEPS + loop(range(131), announced=announced, first=120),
        ]
        assert [verdict(log).cause for log in healthy] == ["healthy"] * len(healthy)


def test_a_build_of_faiss_for_other_processors_that_is_missing_is_no_failure():
    loader = (
        "INFO:faiss.loader:Could not load library with AVX512 support due to:\n"
        "ModuleNotFoundError(\"No module named 'faiss.swigfaiss_avx512'\")\n"
        "INFO:faiss.loader:Successfully loaded faiss with AVX2 support.\n"
    )
    assert verdict(f"step 1 loss 2.0\n{loader}step 2 loss 1.9\nTraining pipeline complete\n").cause == "healthy"
    assert verdict(loader.replace("_avx512", "")).cause == "import-error"


def test_labels_that_were_not_found_are_a_failure_although_the_training_goes_on():
    warning = "WARNING No labels found in /data/Potholes/{}.cache, training may not work correctly.\n"
    assert verdict(warning.format("train") + STEPS).cause == "dataset-empty"
    assert verdict(warning.format("valid") + STEPS).cause == "healthy"
