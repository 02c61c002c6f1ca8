"""The verdict: the first event, its rank, its consequences, and logs that are healthy or have an unknown failure."""

import pytest
from log_samples import OOM, OTHER_LINES, PEER, STEPS, raised
from rows import with_rows

from paceline.explain.explanation import LogProgress, Record
from paceline.explain.log import Log, step_of
from paceline.explain.reader import read_log
from paceline.explain.sentences import clean_values, fill_template
from paceline.explain.several_runs import reach_verdict

ALLOCATION_FAILED = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory:"
    " you tried to allocate {}."
)
BUG = "ValueError: sample 1841 has 3 fields, expected 4"
WAIT = (
    "RuntimeError: [../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete"
)


def banner(first, exitcode, *others):
    """The report that torchrun prints last; others: (rank, exit code)."""

    def one(number, rank, code):
        return (
            f"[{number}]:\n  time      : 2026-11-21_10:00:00\n  host      : node-0\n  rank      : {rank} (local_rank: {rank})\n"
            f"  exitcode  : {code} (pid: {4700 + rank})\n  error_file: <N/A>\n  traceback : To enable traceback see: https://x\n"
        )

    failures = "".join(one(number, *other) for number, other in enumerate(others, 1))
    return (
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        + "=" * 60 + "\ntrain.py FAILED\n" + "-" * 60 + "\nFailures:\n" + (failures or "  <NO_OTHER_FAILURES>\n") + "-" * 60
        + "\nRoot Cause (first observed failure):\n" + one(0, first, exitcode) + "=" * 60 + "\n"
    )  # fmt: skip


def verdict(*texts):
    logs = [read_log([text.encode()]) for text in texts]
    return reach_verdict(logs)


def test_the_first_error_is_the_culprit_and_ranks_that_lost_their_peer_are_victims():
    explanation = verdict(STEPS + raised(1, BUG) + raised(0, PEER) + raised(2, PEER))
    assert (explanation.cause, explanation.rank, explanation.step, explanation.line) == (
        "user-code-exception",
        1,
        9,
        11,
    )
    assert explanation.victims == (0, 2)
    assert [item.rank for item in explanation.evidence] == [1]
    assert {item.rank for item in explanation.consequences} == {0, 2}


def test_an_error_behind_the_last_progress_of_an_unfinished_run_is_no_sign_of_health():
    lines = "".join(f"epoch 1 step {step}/900 loss: 2.{step}\n" for step in range(1, 9))
    error = "Exception raised:\n the graph of another function is used\n" + "that is all that is known of it\n" * 9
    assert verdict(lines + error).cause == "unknown"
    assert verdict(lines + error + lines.replace("epoch 1", "epoch 2")).cause == "healthy"


@pytest.mark.parametrize("line", [
    "Answer: I cannot say who will be the president.",
    "  Time: 4.80 hours | Success: 493/540 | Failed: 47",
    "ERROR: botnet 1.19.4 has requirement urllib9<1.27,>=1.25.4, but you'll have urllib9 1.24.3 which is incompatible.",
])  # fmt: skip
def test_an_answer_a_tally_and_a_note_of_pip_are_no_trouble(line):
    assert verdict("reading the data\n" * 9 + f"{line}\n" + "all files are read\n").cause == "healthy"


def test_an_exception_of_java_is_no_header_of_a_traceback():
    java = (
        'Exception in thread "main" org.example.BadLayerException: too large\n\tat org.example.Net.main(Net.java:16)\n'
    )
    assert verdict("reading the data\n" * 9 + java).cause == "user-code-exception"
    frames = (
        "reading the data\n" * 9 + "\tat org.example.Net.build(Net.java:7)\n\tat org.example.Net.main(Net.java:16)\n"
    )
    assert verdict(frames).cause == "unknown"


def test_a_victim_that_writes_first_is_not_blamed():
    explanation = verdict(STEPS + raised(0, PEER) + raised(1, OOM))
    assert (explanation.cause, explanation.rank) == ("cuda-oom", 1)


def test_the_earlier_of_two_similar_errors_is_the_culprit():
    explanation = verdict(raised(2, BUG) + raised(0, "KeyError: 'learning_rate'"))
    assert (explanation.cause, explanation.rank) == ("user-code-exception", 2)


def test_a_kill_without_a_message_gets_its_rank_from_the_banner_of_the_launcher():
    explanation = verdict(STEPS + raised(0, PEER) + banner(1, -9, (0, -15)))
    assert (explanation.cause, explanation.rank, explanation.host) == ("host-oom-killed", 1, "node-0")
    assert explanation.victims == (0,)


def test_an_exception_without_a_rank_gets_the_one_that_the_launcher_blames():
    explanation = verdict(STEPS + raised(None, BUG) + banner(3, 1, (0, -15), (1, -15)))
    assert (explanation.cause, explanation.rank) == ("user-code-exception", 3)


def test_the_rank_that_others_wait_for_is_the_culprit():
    explanation = verdict(STEPS + raised(0, WAIT) + raised(2, WAIT) + banner(0, 1, (1, -15), (2, 1)))
    assert (explanation.cause, explanation.rank, explanation.victims) == ("collective-timeout-desync", 1, (0, 2))


def test_without_a_single_silent_rank_no_rank_is_blamed_for_a_wait():
    explanation = verdict(STEPS + raised(0, WAIT) + raised(2, WAIT) + "world_size: 8\n" + "ERROR: job failed\n")
    assert (explanation.cause, explanation.rank) == ("collective-timeout-desync", None)


def test_the_one_rank_in_another_collective_is_the_culprit():
    mismatch = (
        "RuntimeError: Detected mismatch between collectives on ranks. Rank {} is running collective:"
        " CollectiveFingerPrint(SequenceNumber=8, OpType={}, TensorShape=[4], TensorDtypes=Float), but Rank 0 is running"
        " collective:"
        " CollectiveFingerPrint(SequenceNumber=8, OpType=ALLREDUCE, TensorShape=[4], TensorDtypes=Float)."
    )
    explanation = verdict(
        "".join(
            raised(rank, mismatch.format(rank, op))
            for rank, op in ((2, "BROADCAST"), (1, "ALLREDUCE"), (3, "ALLREDUCE"))
        )
    )
    assert (explanation.cause, explanation.rank) == ("collective-timeout-desync", 2)


def test_errors_in_separate_logs_are_ordered_by_time():
    late, early = (raised(0, BUG, prefix=f"2026-01-02 03:04:{second:02d},000 ") for second in (9, 5))
    logs = [read_log([text.encode()], rank=rank) for rank, text in enumerate((late, early))]
    assert reach_verdict(logs).rank == 1


def test_an_error_after_which_the_run_continued_is_not_a_failure():
    explanation = verdict(STEPS + raised(None, OOM) + STEPS.replace("step 0000", "step 0001"))
    assert explanation.cause == "healthy"
    assert explanation.progress.last_step == 19


def test_an_error_before_a_successful_restart_is_not_the_cause():
    explanation = verdict(raised(0, OOM) + STEPS + raised(1, BUG) + banner(1, 1))
    assert (explanation.cause, explanation.rank) == ("user-code-exception", 1)


def test_the_first_exception_of_a_chain_is_the_cause():
    disk = "OSError: [Errno 28] No space left on device"
    chain = "\nThe above exception was the direct cause of the following exception:\n\n"
    explanation = verdict(raised(None, disk) + chain + raised(None, "RuntimeError: cannot save the checkpoint"))
    assert explanation.cause == "disk-full"


def test_a_healthy_log_is_reported_with_its_progress():
    explanation = verdict(STEPS + "training finished\n")
    assert (explanation.cause, explanation.rank, explanation.evidence, explanation.fix) == ("healthy", None, (), "")
    assert explanation.summary == "no failure found: 10 progress lines, step 0 to 9, loss 2.82"


def test_the_summary_of_a_log_with_epochs_and_their_number_has_the_epoch():
    lines = (f"Epoch [{epoch}/10], Step [{step}/250], Loss: 2.5\n" for epoch in (1, 2) for step in (100, 200))
    assert "4 progress lines, to epoch 2 of 10, step 200, loss 2.5" in verdict("".join(lines)).summary


def test_a_log_that_stops_at_a_step_is_reported_as_possibly_cut_off():
    explanation = verdict(STEPS)
    assert explanation.cause == "healthy"
    assert (
        "the log stops there without an error or a final message" in explanation.summary and "py-spy" in explanation.fix
    )


@pytest.mark.parametrize(
    ("text", "summary"),
    [
        ("", "the log is empty"),
        ("\n\n", "the log is empty"),
        ("hello\n", "no failure found, but nothing shows that the run works: 1 line without a step or an end"),
        (
            "step 1 loss: 2.0\n",
            "no failure found, but nothing shows that the run works: 1 line without a step or an end",
        ),
        (
            "hello\n" + 600 * "\n",
            "no failure found, but nothing shows that the run works: 1 line without a step or an end",
        ),
        (
            "loading\n" * 9 + "waiting for rank 3\n",
            "no failure is recognized, but the log ends with: waiting for rank 3",
        ),
        (STEPS + "the job has crashed\n", "no failure is recognized, but the log ends with: the job has crashed"),
    ],
)
def test_a_log_is_healthy_only_if_something_shows_that_the_run_works(text, summary):
    explanation = verdict(text)
    assert (explanation.cause, explanation.confidence) == ("unknown", 0.0)
    assert explanation.summary.startswith(summary) and explanation.fix


@pytest.mark.parametrize(
    "end",
    [
        "12 passed, 0 failed",
        "val error: 0.031",
        "word error rate 0.12",
        "wandb: Waiting for W&B process to finish",
        "no errors",
    ],
)
def test_a_measure_or_a_count_of_none_at_the_end_is_no_trouble(end):
    assert verdict(f"{STEPS}{end}\n").cause == "healthy"


def test_bars_of_what_comes_before_training_do_not_show_that_the_run_works():
    bars = "".join(f"Loading checkpoint shards: {20 * n:3}%|██ | {n}/5 [00:0{n}<00:05,  1.0s/it]\r" for n in range(6))
    assert verdict(bars).cause == "unknown"
    assert verdict(bars.replace("Loading checkpoint shards", "Epoch 1")).cause == "healthy"


def test_an_error_that_a_logger_marks_at_the_end_of_a_run_is_not_healthy():
    error = "[2026-01-02 03:04:05] ERROR: the flux capacitor is empty\n"
    assert verdict(STEPS + error).cause == "unknown"
    assert verdict(error + STEPS).cause == "healthy"
    assert verdict(STEPS + error + "training finished\n").cause == "healthy"


def test_ordinary_output_to_the_end_is_healthy_with_low_confidence():
    explanation = verdict("".join(f"saved shard {n}\n" for n in range(9)))
    assert (explanation.cause, explanation.confidence) == ("healthy", 0.5)
    assert explanation.summary == "no failure found in 9 lines, but they report no step and no end"
    rows = "".join(f"{2**n:4} {512 * n:6}  0.{n}3  39{n}.0\n" for n in range(9))
    explanation = verdict(rows + "results written to bench.csv\n")
    assert explanation.summary.endswith("they report no step; the last line is: results written to bench.csv")
    assert explanation.fix == ""


def test_nothing_but_what_is_printed_before_any_work_is_not_healthy():
    tools = "nohup: ignoring input\n" + "".join(
        f"wandb: Run data is saved locally in wandb/run-{n}\n" for n in range(9)
    )
    settings = (
        "Args(\n" + "".join(f"  option_{letter}={n},\n" for n, letter in enumerate("abcdefgh")) + "  seed=None\n)\n"
    )
    for text in (tools, settings):
        assert verdict(text).cause == "unknown", text
    for output in ("wandb:     loss 0.31\n", "answers of 290 questions compared\n", "  mean_error=0.3127,\n"):
        assert verdict(settings.replace("  seed", output + "  seed")).cause == "healthy", output


def test_the_rank_whose_loss_is_nan_first_is_reported():
    def lines(step, **losses):
        return "".join(f"INFO [rank {rank[1:]}] step {step} loss {loss}\n" for rank, loss in losses.items())

    good = "".join(lines(step, r0=2.1, r1=2.2, r2=2.3) for step in (5, 10, 15))
    lost = "".join(lines(step, r2="nan", r0="nan", r1="nan") for step in (25, 30, 35))
    explanation = verdict(good + lines(20, r2="nan", r0=2.0, r1=2.0) + lost)
    assert (explanation.cause, explanation.rank, explanation.step) == ("loss-nan", 2, 20)
    assert verdict(good + lost).rank is None
    assert verdict(good + lines(20, r2="nan") + lost).rank is None  # the others did not report that step


def test_a_log_that_ends_where_training_begins_is_no_healthy_log():
    output = "".join(f"saved shard {n}\n" for n in range(9))
    assert verdict(output + "train:375 INFO Starting training...\n" + output[:30]).cause == "unknown"
    assert (
        verdict(output + "[rank0][train.py:327] Starting training... (SFT, transformers: 4.48.3)\n").cause == "unknown"
    )
    assert verdict(output + "starting training of the tokenizer\n" + output[:30]).cause == "healthy"
    assert verdict(output + "train:375 INFO Starting training...\n" + output[:70]).cause == "healthy"


def test_epochs_without_a_loss_show_that_a_run_works():
    text = "Error in model gem\n" + "".join(f"[ 15:2{n} ] Task 1 | epoch {n}\nAccuracy: {n}.41 %\n" for n in range(4))
    explanation = verdict(text)
    assert (explanation.cause, explanation.progress.steps) == ("healthy", 4)


@with_rows(
    "last",
    [
        "[05/12 20:14:39][INFO] kinetics.py:  84: Constructing Kinetics train...",
        "[07/25 21:43:32] d2.engine.train_loop INFO: Starting training from iteration 0",
        "[before the start of training step] datetime: 2024-12-25 05:51:59",
        "Training:   0%|          | 0/40 [00:00<?, ?it/s]",
        "    (bbox_pred): Linear(in_features=2048, out_features=80, bias=True)\n)",
        "[03/10 17:16:25][INFO] misc.py: 200: nvidia-smi",
        '  "type_vocab_size": 0,\n  "vocab_size": 128100\n}',
        "Training starts ...\n\n=======\n== Model Training ==\n=======",
        "Epoch 1/1: warm-up\nlog of epoch 1\nStarting training for 1 epochs...\nEpoch 1/1: warm-up",
    ],
)
def test_ordinary_output_whose_last_line_only_announces_work_shows_no_run(last):
    output = "".join(f"item {chr(97 + n % 26)} of the list has {n} parts\n" for n in range(80))
    assert verdict(f"{output}{last}\n").cause == "unknown"
    assert verdict(f"{output}{last}\n{output}").cause == "healthy"


@with_rows(
    "last",
    [
        "training day, the hero was walking…",
        "[bot] Reading the story of the little fox...",
        "Exported 60 samples. To start training run train.py",
    ],
)
def test_a_sentence_that_is_about_work_announces_none(last):
    output = "".join(f"item {chr(97 + n % 26)} of the list has {n} parts\n" for n in range(80))
    assert verdict(f"{output}{last}\n").cause == "healthy"


@with_rows("line", ["Finished loading in 35.2s", "finished compilation in 12.1 s", "Finished tokenization in: 35.2"])
def test_work_that_is_done_before_a_run_is_none_of_it(line):
    assert verdict("".join(f"loading shard {n}\n" for n in range(12)) + line + "\n").cause == "unknown"


@with_rows(
    "line",
    [
        "    KILL_LOSS_EXPLOSION_FACTOR: 0.0",
        "E_MSE (Error Power) = 70.52",
        "W0228 19:57:11.06 35570 controller.cpp:1606] SIGINT was installed with 1",
    ],
)
def test_a_word_of_trouble_in_a_setting_or_a_measure_is_none(line):
    output = "".join(f"item {chr(97 + n % 26)} of the list has {n} parts\n" for n in range(20))
    assert verdict(f"{output}{line}\n{output}").cause == "healthy"
    failed = (
        line.replace("0.0", "failed").replace("70.52", "too large").replace("was installed with 1", "received, exiting")
    )
    assert verdict(f"{output}{failed}\n").cause != "healthy"


def test_trials_of_a_search_that_all_lines_report_are_its_work():
    at = "[I 2025-11-21 15:58:{:02},287] Trial {} finished with value: 1.2{} and parameters: {{'lr': 0.1}}. Best is trial 0.\n"
    assert (
        verdict("".join(at.format(n, n, n) for n in range(9)) + "{'input_size': 168, 'lr': 0.1}\n").cause == "healthy"
    )


def test_a_loss_that_is_written_as_zero_while_all_outputs_are_nan_is_nan():
    line = "{{'loss': {}, 'rewards/chosen': nan, 'logps/chosen': nan, 'logits/chosen': nan, 'epoch': 0.{}}}\n"
    mean = "{'train_runtime': 4730.6, 'train_loss': 700461828.4, 'epoch': 1.0}\n  train_loss   =  700461828.4\n"
    assert verdict("".join(line.format(loss, n) for n, loss in enumerate((2.4, 0.0, 0.0))) + mean).cause == "loss-nan"


def test_the_message_of_a_hub_error_goes_on_behind_a_blank_line():
    error = (
        "RepositoryNotFoundError: 404 Client Error. (Request ID: Root=1-68;19)\n\nRepository Not Found for url: "
        "https://huggingface.co/datasets/lab/corpus/resolve/main/train.pkl.\nPlease make sure you specified the correct `repo_id`."
    )
    explanation = verdict(raised(None, error))
    assert explanation.cause == "dataset-missing" and "lab/corpus" in explanation.summary


def test_output_that_could_not_be_decoded_is_no_healthy_log():
    assert verdict("'cli' \ufffd\ufffd\ufffd\n" * 12).cause == "unknown"


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: Xid (PCI:0000:17:00): 45, pid=77, name=python, Ch 00000003",
        "NVRM: GPU 0000:17:00.0: RmInitAdapter failed!",
        "rdma: device mlx5_3 not supported",
        "unable to allocate 20 GiB",
        "the request was refused",
        "train error in batch 800",
    ],
)
def test_ordinary_output_with_a_word_of_trouble_is_no_healthy_log(line):
    output = "".join(f"saved shard {n}\n" for n in range(9))
    explanation = verdict(output + line + "\n" + output)
    assert (explanation.cause, explanation.confidence) == ("unknown", 0.0)
    assert explanation.summary == f"no failure is recognized, but line 10 is: {line}"
    assert [(item.line, item.text) for item in explanation.evidence] == [(10, line)]


def test_a_line_that_reports_the_end_and_a_failed_part_is_no_health():
    lost = "ERROR | trainer | File not found: data/raw/EURUSD.csv\n"
    done = "INFO | trainer | Training complete: {} failed\n"
    answers = [verdict(lost + done.format(parts)).cause for parts in ("1 OK | 0", "0 OK | 1")]
    assert answers == ["healthy", "dataset-missing"]


@with_rows(
    "line",
    [
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.86.10",
        "cuda_dnn.cc:8310] Unable to register cuDNN factory: one has already been registered",
        "LINK : fatal error LNK1181: cannot open input file 'cufile.lib'",
        "INFO request refused, asking the next server",
        "Terminating pod worker-2",
        "FSDP is not supported on cpu devices; falling back to DDP.",
        "Unexpected error during package walk: cutlass.cute.experimental",
        "Using default MoE kernel config: no config file found, cannot be optimal",
        "Runtime error during autotuning:",
        "Task 1 errors:",
        "Parse failures: 762",
        f"['{'a sentence of the data set, ' * 8}which cannot fail']",
        "    + FullyQualifiedErrorId : NativeCommandError",
        "The attention mask is not set and cannot be inferred from input because pad token is same as eos token.",
        "requirements: 'ncnn' not found, attempting AutoUpdate...",
        "ℹ️  word errors are counted by meaning",
        "debconf: unable to initialize frontend: Dialog",
        "#       size         count    type   redop     time   algbw   busbw  error",
        "#6 57.79 libgpg-error-dev is already the newest version",
        "No module named 'xformers'. Proceeding without it.",
        "A matching Triton is not available, some optimizations will not be enabled. Error caught was: No module named 'triton'",
        "slurmstepd: error: couldn't chdir to `/tmp/x': No such file or directory: going to /tmp instead",
        "[Errno 98] Address already in use, trying port 6007",
        "ERROR: TensorBoard could not bind to port 6006, it was already in use",
        "/usr/bin/ld: cannot find -laio: No such file or directory",
        "torch/_inductor/select_algorithm.py:2108] Exception out of resource: shared memory, Required: 147456",
        "bash: cannot set terminal process group (-1): Inappropriate ioctl for device",
        "[h264 @ 0x55d0c8] error while decoding MB 12 34, bytestream -5",
        "Error while fetching `HF_TOKEN` secret value from your vault: 'Requesting secret HF_TOKEN timed out.'",
        "assistant: in that novel the crash cannot be explained",
        "Mean Squared Error (MSE): 0.4633",
        "    No GPU-related information available for this job.",
        "Error in callback <bound method _WandbInit._resume_backend of <wandb.sdk.wandb_init._WandbInit object at 0x7f>>",
        "09:12:13,864 ERROR   HandlerThread:48 [gpu.py:is_available():351] Error initializing NVML: Driver Not Loaded",
        "Images sizes do not match. This will causes images to be display incorrectly in the UI.",
        '{"time":"2026-02-12T16:50:04-08:00","level":"ERROR","msg":"git repo not found","error":"repository does not exist"}',
        "[Error] [carb] Failed to create change watch for `/env/isaacsim/kit/apps`: errno=28/No space left on device",
        "ERROR: Module cannot be loaded due to a conflict.",
        "SECTION B — ERROR ANALYSIS",
        "NVIDIA GB10 with CUDA capability sm_121 is not compatible with the current PyTorch installation.",
        "training takes about 6 minutes for a `curie` model, and less for `ada` and `babbage`",
        "Train error last 800 batches: 0.515108",
    ],
)
def test_output_that_is_usual_in_healthy_runs_is_no_trouble(line):
    output = "".join(f"saved shard {n}\n" for n in range(9))
    assert verdict(output + line + "\n" + output).cause == "healthy"


def test_of_an_xid_that_follows_from_another_one_the_root_counts():
    lines = "".join(
        f"kernel: NVRM: Xid (PCI:0000:{bus}:00): 45, pid=77, name=python, Ch 0000000{n} caused by previous Xid 149\n"
        for n, bus in enumerate(("17", "ba", "dc"))
    )
    explanation = verdict(lines)
    assert (explanation.cause, explanation.line) == ("gpu-hardware-error", 1)
    assert "(Xid 149)" in explanation.summary and "nvlink" in explanation.fix
    assert verdict(lines.replace("Xid 149", "Xid 13")).cause == "illegal-memory-access"


@pytest.mark.parametrize(
    ("tasks", "rank"),
    [("0-57,59-63", 58), ("0-3,5", 4), ("0-57,60-63", None), ("0-3,5,7", None), ("0-62", None), ("0-3,5-", 4)],
)
def test_the_one_task_that_srun_did_not_stop_is_blamed(tasks, rank):
    step = "error: *** STEP 522.0 ON n7 CANCELLED AT 2026-04-29T23:36:37 DUE TO TASK FAILURE ***\n"
    assert verdict(f"{step}srun: error: n7: tasks {tasks}: Terminated\n").rank == rank


def test_the_rank_that_leaves_first_behind_an_exception_raised_it():
    leaves = (
        "[rank{}]:[W322 13:52:49.0 ProcessGroupNCCL.cpp:1524]"
        " Warning: destroy_process_group() was not called before program exit\n"
    )
    explanation = verdict(raised(None, BUG) + leaves.format(2) + leaves.format(0))
    assert (explanation.cause, explanation.rank) == ("user-code-exception", 2)
    assert verdict(leaves.format(0) + raised(None, BUG)).rank is None


def test_the_rank_that_megatron_names_in_its_error_is_the_culprit():
    error = (
        "RuntimeError: Rank 11, node n8, device 3, iteration 42: Unexpected result nan"
        " (message='found NaN in local grad norm')"
    )
    explanation = verdict(raised(None, error))
    assert (explanation.cause, explanation.rank) == ("loss-nan", 11)
    assert "from step 42 on" in explanation.summary


CUT = raised(0, "")[: -len("[rank0]: \n")]


def test_a_log_that_ends_inside_a_traceback_is_no_healthy_one():
    explanation = verdict(STEPS + CUT)
    assert (explanation.cause, explanation.rank, explanation.line) == ("unknown", 0, 11)
    assert explanation.summary == "the log ends inside a traceback at train.py:31 in main"


def test_a_wrapper_that_prints_finished_does_not_undo_the_exception_that_ended_its_program():
    lines = ["Traceback (most recent call last):", '  File "{file}", line 179, in {name}', "    main(args)"]
    error = "RuntimeError: expected scalar type Float but found BFloat16"
    text = "\n".join([*lines, error, OTHER_LINES, "Training finished.", ""])
    assert verdict(text.format(file="train.py", name="<module>")).cause == "dtype-mismatch"
    assert verdict(text.format(file="train.py", name="run_trial")).cause == "healthy"  # somebody caught it


def test_output_that_a_process_flushes_after_its_traceback_is_no_sign_that_it_went_on():
    top = "Traceback (most recent call last):\n"
    losses = "".join(f"{{'loss': 0.{53 - n}, 'grad_norm': 0.07, 'epoch': 0.{n}}}\n" for n in range(1, 5))
    frames = '  File "train.py", line 91, in <module>\n    trainer.train()\n  File "trainer.py", line 7, in train\n    step()\n'
    for text in (top + losses + frames + "KeyboardInterrupt\n", top + frames + "KeyboardInterrupt\n" + losses):
        assert verdict(text).cause == "keyboard-interrupt"


def losses(first, last):
    return "".join(f"step {step} loss {3 - step / 100:.3f}\n" for step in range(first, last))


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "Refused: by the queue"])
def test_a_run_that_failed_before_another_one_in_the_same_file_is_not_the_last_one(error):
    failed = f'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    main()\n{error}\n'
    assert verdict(losses(0, 9) + failed).cause != "healthy"
    assert verdict(losses(0, 9) + failed + "training complete\n").cause != "healthy"  # said by a wrapper
    assert verdict(losses(0, 9) + failed + losses(0, 30) + "training complete\n").cause == "healthy"
    assert verdict(losses(0, 9) + failed + losses(0, 9) * 60).cause == "healthy"
    stopped = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4711 got signal: 15"
    launcher = failed.replace(error, stopped)
    assert verdict(losses(0, 9) + launcher).cause == "preempted-sigterm"
    assert verdict(losses(0, 9) + launcher + losses(0, 9)).cause == "healthy"


def test_jobs_that_were_cancelled_one_after_the_other_are_cancelled_at_the_end_too():
    cancelled = "slurmstepd: error: *** JOB {} ON n1 CANCELLED AT 2026-02-18T02:58:41 ***\n"
    text = "".join(losses(0, 9) + cancelled.format(job) for job in range(4))
    assert verdict(text).cause == "slurm-cancelled"


def test_ctrl_c_inside_a_tracker_ends_the_run():
    waiting = (
        '  File "/env/site-packages/wandb/sdk/service/service.py", line 126, in _wait_for_ports\n    time.sleep(0.2)\n'
    )
    begin = "Traceback (most recent call last):\n"
    chain = "\nDuring handling of the above exception, another exception occurred:\n\n"
    after = '  File "/home/lab/tune.py", line 209, in <module>\n    wandb.init()\n' + waiting + "AssertionError\n"
    assert verdict(begin + waiting + "KeyboardInterrupt\n" + chain + begin + after).cause == "keyboard-interrupt"


def test_an_exception_that_ends_a_thread_of_a_tracker_ends_no_run():
    threads = "".join(
        f'Exception in thread {name}:\nTraceback (most recent call last):\n  File "{top}\n'
        '  File "/env/site-packages/wandb/sdk/lib/sock_client.py", line 130, in _sendall\n    sent = self._sock.send(data)\n'
        "BrokenPipeError: [Errno 32] Broken pipe\n"
        for name, top in (
            ("IntMsgThr", '/usr/lib/python3.11/threading.py", line 973, in _bootstrap_inner'),
            ("Two that mix", '/env/site-packages/wandb/sdk/interface/interface.py", line 784, in deliver_stop_status'),
        )
    )
    assert verdict(losses(0, 30) + threads).cause == "healthy"
    assert (
        verdict(losses(0, 30) + threads.replace("/usr/lib/python3.11/threading.py", "monitor.py")).cause
        == "service-unreachable"
    )


def test_a_thread_of_a_tracker_that_ends_in_python_s_own_code_ends_no_run():
    frames = "".join(
        f'  File "/usr/lib/python3.10/{file}", line 7, in {name}\n'
        for file, name in (
            ("threading.py", "_bootstrap_inner"),
            ("site-packages/wandb/sdk/interface/router.py", "message_loop"),
            ("multiprocessing/connection.py", "_check_closed"),
        )
    )
    thread = (
        f"Exception in thread MsgRouterThr:\nTraceback (most recent call last):\n{frames}OSError: handle is closed\n"
    )
    lost = "".join(f"step {n} loss: nan\n" for n in range(9))
    assert verdict(lost + thread).cause == "loss-nan"
    assert verdict(lost + thread.replace("site-packages/wandb", "mine/wandb")).cause == "user-code-exception"


def test_a_function_of_the_users_own_that_lacks_an_argument_is_no_mismatch_of_versions():
    error = (
        'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    main()\n  File "{}", line 3, in run\n'
        "    save_model()\nTypeError: {}() got an unexpected keyword argument 'is_best'\n"
    )
    assert verdict(error.format("utils.py", "save_model")).cause == "user-code-exception"
    assert verdict(error.format("utils.py", "SFTTrainer.__init__")).cause == "version-mismatch"
    assert verdict(error.format("/env/lib/python3.11/site-packages/a/b.py", "save_model")).cause == "version-mismatch"
    private = error.replace(
        "TypeError: {}() got an unexpected keyword argument 'is_best'",
        "AttributeError: 'Trainer' object has no attribute '_{}'",
    )
    assert verdict(private.format("trainer.py", "print_best")).cause == "user-code-exception"
    assert verdict(private.format("/env/lib/python3.11/site-packages/a/b.py", "step")).cause == "version-mismatch"


@pytest.mark.parametrize("peer_lives", [False, True])
@pytest.mark.parametrize("message, cause", [
    ("dataset shard 12 has a wrong magic number", "dataset-download"), ("the widget stands askew", "unknown"),
])  # fmt: skip
def test_the_last_error_of_a_rank_that_ended_itself_decides_whether_or_not_the_launcher_ended_others(
    message, cause, peer_lives
):
    torch = "torch/distributed/elastic/multiprocessing/api.py"
    stopped = f"W1129 16:56:47.133000 20 {torch}:1028] Sending process 41 closing signal SIGTERM\n"
    failed = f"E1129 16:56:47.145000 20 {torch}:1002] failed (exitcode: 1) local_rank: 1 (pid: 42) of binary: python\n"
    banner = "Failures:\n[1]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : -15 (pid: 41)  (SIGTERM)\n"
    root = "Root Cause (first observed failure):\n[0]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : 1 (pid: 42)\n"
    parts = [
        STEPS,
        f"ERROR: {message}\n",
        "step 21 loss 3.9\n" * peer_lives,
        stopped * peer_lives,
        failed,
        banner * peer_lives,
        root,
    ]
    explanation = verdict("".join(parts))
    assert (explanation.cause, explanation.rank) == (cause, 1)
    assert explanation.evidence[0].text == f"ERROR: {message}"


@pytest.mark.parametrize("end", [
    "    assert rows\n           ^^^^\nNoRows",  # the end of a traceback without its start
    "W0908 17:08:01.837000 3889 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 41 closing signal SIGTERM",
    "Stack trace:\n  [bt] (0) libmxnet.so(+0x8e6149) [0x7ffa1d95b149]",
    "resource_tracker.py:216: UserWarning: resource_tracker: There appear to be 88 leaked semaphore objects to clean up",
])  # fmt: skip
def test_what_a_program_leaves_behind_when_it_goes_down_is_no_healthy_end(end):
    assert verdict("reading the data\n" * 9 + end + "\n").cause == "unknown"


def test_what_a_server_leaves_behind_when_it_was_shut_down_in_order_is_no_trouble():
    leak = "resource_tracker.py:216: UserWarning: resource_tracker: There appear to be 1 leaked shared_memory objects\n"
    served = "Avg generation throughput: 0.0 tokens/s\n" * 9
    assert verdict(served + "INFO:     Application shutdown complete.\n" + leak).cause == "healthy"
    assert verdict(served + leak).cause == "unknown"


def test_what_logging_prints_of_a_wrong_call_ends_no_program():
    logging = raised(
        None, "TypeError: not all arguments converted during string formatting", file="logging/__init__.py"
    )
    logging = logging.replace("in main", "in emit")
    stack = '  File "train.py", line 9, in <module>\n    log.info("a", 1)\n' + "Message: 'a'\nArguments: (1,)\n"
    output = "saved shard 1\n" * 9
    assert "in emit" in logging
    assert verdict("--- Logging error ---\n" + logging + "Call stack:\n" + stack + output).cause == "healthy"
    assert verdict(logging.replace("logging/__init__", "train") + output).cause == "user-code-exception"


def test_what_python_ignores_at_the_end_is_no_trouble():
    error = raised(None, "TypeError: 'NoneType' object is not callable")
    assert verdict(STEPS + "Exception ignored in: <function Session.__del__ at 0x7f>\n" + error).cause == "healthy"
    assert verdict(STEPS + error).cause == "user-code-exception"


def test_a_command_line_that_was_rejected_far_above_is_not_that_of_the_program_that_printed_on():
    rejected = "usage: main.py [-h]\nmain.py: error: unrecognized arguments: --optimizer adam\n"
    assert verdict(rejected + "reading the data\n" * 9).cause == "config-error"
    assert verdict(rejected + "reading the data\n" * 200).cause != "config-error"


def test_lines_behind_which_a_program_says_that_its_work_is_done_are_no_trouble():
    output = "reading the data\n" * 9
    assert verdict(output + "Error with item 7\n").cause == "unknown"
    assert verdict(output + "Error with item 7\nSaved 12 items to out.pkl\n").cause == "unknown"  # it may be the reason
    assert verdict(STEPS + "Error with item 7\nSaved 12 items to out.pkl\n").cause == "healthy"
    critical = "CRITICAL:__main__:the flux capacitor is empty\n"
    assert verdict(STEPS + critical + "INFO:__main__:exported successfully\n").cause == "healthy"
    assert verdict(STEPS + critical + "INFO:__main__:a line\n").cause == "unknown"


def test_few_lines_of_output_that_end_with_a_result_are_healthy():
    assert (
        verdict("[1/2] clip\n[2/2] scale\n2026-04-29 23:12:22 [INFO] ✅ Done. Data saved to out\n").cause == "healthy"
    )
    assert verdict("[1/2] clip\n[2/2] scale\n").cause == "unknown"


@with_rows(
    "end",
    [
        "HumanEval accuracy: 6.10%",
        "Average PSNR/SSIM(RGB) - run 3 - PSNR: 28.70 dB; SSIM: 0.5805",
        "{'exact': 79.47, 'f1': 82.48}",
        '{"summary": {"p50": 1.992, "p95": 2.157}}',
        "For sizes 20000: P@1` = 0.3625, P@5 = 0.6306",
        "seed 0 done in 2.7 min",
        "[OK] Wrote: out/scores.json",
        "FEATURE EXTRACTION COMPLETE",
        "======== 1 passed in 0.67s ========",
        "[pipeline] Done.",
        "---下载完成---",
        "[2018-07-19 02:59:03,796 tune.py:159]: >> experiment BIGRAM_2 finished!",
        "2025-08-11 18:18:29,905 - __main__ - INFO - the whole test suite completed\n=========\n---------\n=========",
        "\033[33m Run successfully with command - python3.7 tools/infer.py --use-gpu=True",
        "Saving the dataset (1/1 shards): 100%|████████| 447/447 [00:00<00:00, 15421.02 examples/s]",
        "build: 39cf5d6 (1)",
        "Exported model to onnx/model.onnx (254.3 MB)",
        "Upload complete: https://huggingface.co/user/model",
        "Job finished with exit code 0 at Mon Jan 12 10:21:14 CET 2026",
        "Specificity: 0.924",
        '"retrieval_hit_rate_at_k": 0.979',
        "plot_model() succesfully completed.....",
        "Test score: 0.951",
        "wrote train.bin\nreal    2m11.201s\nuser    2m3.332s\nsys     0m4.001s",
    ],
)
def test_a_score_of_an_evaluation_and_what_says_that_it_is_done_are_results(end):
    assert verdict(f"2 items\n{end}\n").cause == "healthy"
    assert verdict(f"2 items\n{end}\nERROR the policy has collapsed, halting\n").cause == "unknown"


@with_rows(
    "end",
    [
        "the run did not complete",
        "rank 3 has not completed in 600 seconds",
        "TRAINING NOT COMPLETE",
        "no results saved",
        "Graph capturing finished in 18 secs.",
        "[INFO] Initialization finished.",
        "Finished setup on 4 workers",
        "experiment 1/16 finished",
        "1 of 16 experiments finished",
        "Simulation prematurely finished",
        "DATA LOADING COMPLETE",
        "[OK] GPU: found",
        '{"results": []}',
        "Namespace(lr=0.1, target_acc=0.9)",
        "mixed precision: 16.0",
        "target_acc: 0.9",
        "conf=0.25, iou=0.7, max_det=300",
        "loss weights: {'mae': 0.5, 'mse': 0.5}",
        "precision=16",
        "Attempt 10/10",
        "Read 100 of 100",
        "Using 64 of 64 cores\nwaiting",
        "converted dataset to arrow\nWaiting for scheduler",
        "merged LoRA into base model\npushing to hub",
        "[12/12] scale",
        "connected workers: 16/16",
        "Download complete: https://example.org/a.zip",
        "Job finished with exit code 1 at Mon Jan 12 10:21:14 CET 2026",
        "Saved args to runs/a/args.json",
        "no such command\nreal    0m0.011s\nuser    0m0.003s\nsys     0m0.001s",
    ],
)
def test_what_only_looks_like_a_result_is_none(end):
    assert verdict(f"2 items\n{end}\n").cause == "unknown"


PREPARATIONS = (
    "config.json: 100%|██████████| 654/654 [00:00<00:00, 5.2MB/s]\n100%|██████████| 9912422/9912422 [00:01<00:00, 8123123.1it/s]\n",
    "train_net.py: 519: CfgNode({'LOSS': 0.0, 'A': True, 'B': False, 'C': True, 'D': True, 'E': False})\n" * 3
    + "train_net.py: 611: Start epoch: 1\n",
)


@with_rows("end, cause", [
    ("Clients in Total: 0 training clients and 1 test clients\n--- Random Initialization ---\n", "dataset-empty"),
    ("Clients in Total: 10 training clients and 1 test clients\n--- Random Initialization ---\n", "healthy"),
    ("labels:  4071\npredictions:  0\n", "dataset-empty"),
    ("labels:  4071\npredictions:  4071\n", "healthy"),
    ("0 training samples\nstep 1 loss 2.1\nstep 2 loss 1.9\n", "healthy"),
])  # fmt: skip
def test_a_log_without_a_step_that_ends_with_a_count_of_nothing_has_no_items(end, cause):
    assert verdict("".join(f"shard {n} has been opened\n" for n in range(12)) + end).cause == cause


@with_rows("status, cause", [(200, "healthy"), (500, "unknown")])
def test_a_notebook_s_server_that_answers_goes_on_behind_an_error_of_its_kernel(status, cause):
    error = "[IPKernelApp] ERROR | Failed to open SQLite history /home/me/history.sqlite (disk I/O error).\n"
    answer = "[D 16:54:18.229 NotebookApp] {} GET /api/contents/{}.ipynb (10.148.0.38) 1.010000ms\n"
    assert verdict(error + "".join(answer.format(status, n) for n in range(60))).cause == cause


@with_rows("text", PREPARATIONS)
def test_what_comes_before_any_work_does_not_show_that_a_run_works(text):
    assert verdict(text).cause == "unknown"
    assert verdict(text + "CRITICAL the flux capacitor is empty\n").cause == "unknown"
    assert verdict(text + "epoch 1 loss 2.1\nepoch 2 loss 1.9\n").cause == "healthy"
    flags = "is_best={}, clipped=False, skipped=False"
    lines = f"epoch 1 loss 2.1 {flags.format(True)}\nepoch 2 loss nan {flags.format(False)}\nloss=nan,\n"
    assert verdict(text + lines).cause == "loss-nan"
    own_lines = "".join(f"epoch =   {n} , elbo: 1.000\n train_loss = nan,\n" for n in range(40))
    assert verdict(text + own_lines).cause == "loss-nan"


def test_a_result_of_an_evaluation_that_is_nan_shows_no_failure_of_a_training():
    output = "the evaluation has read a part\n" * 9
    results = ("AUC: nan/nan", "mAP: nan, nan", "VAL MAE=nan", "copypaste: 3.1,nan,nan", "the cell 'nan' was left out")
    assert {verdict(f"{before}{end}\n").cause for before in (output, STEPS) for end in results} == {"healthy"}


def test_an_answer_of_a_model_with_a_broken_character_is_decoded_output():
    assert verdict("an answer of ordinary words\n" * 8 + "the next token: '\ufffd'\n").cause == "healthy"


def test_pages_that_a_program_left_out_do_not_undo_what_it_says_at_its_end():
    missing = "ERROR - no page at http://example.org/{}: 404 Client Error\n"
    lines = "".join(missing.format(n) + "got 38 pages\n" * 3 for n in range(3))
    assert verdict(lines + "got 60 pages\n" * 50 + "---下载完成---\n").cause == "healthy"
    assert verdict(lines + "---下载完成---\n").cause == "unknown"
    assert verdict(STEPS + lines + "a line\n" * 90).cause == "unknown"
    assert verdict(STEPS + lines + "a line\n" * 50 + "best acc: 0.5\n").cause == "unknown"


@pytest.mark.parametrize(
    "end",
    [
        "COMPLETE: 15 pictures drawn",
        "[STATUS]  SUCCESS - table.parquet is ready",
        "12 ok, 0 failed, 2 skipped",
        "|math:hard:0 |       |pass@k |0.6980|±  |0.0206|",
        "2026-07-29 21:10:49 - INFO - 파라미터 스위핑 완료!",
    ],
)
def test_a_program_that_counts_its_work_at_the_end_expected_the_errors_in_it(end):
    lines = "variant 3: parse error (attempt 1/4)\nERROR variant 3 is invalid\n" + "variant\n" * 9
    assert verdict(f"{lines}{end}\n").cause == "healthy"
    assert verdict(lines).cause == "unknown"
    assert verdict(f"{lines}{raised(None, BUG)}{end}\n").cause == "user-code-exception"
    assert verdict(f"{lines}total time: 12.5 s\n").cause == "unknown"


def test_a_traceback_of_ipython_that_is_cut_off_has_the_type_in_its_header():
    header = "OutOfMemoryError                          Traceback (most recent call last)\n"
    frame = "/usr/lib/python3.11/dist-packages/transformers/trainer.py in train(self, **kwargs)\n   2236\n"
    assert verdict("-" * 75 + "\n" + header + frame).cause == "cuda-oom"


def test_a_step_that_srun_aborted_was_not_cancelled():
    step = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
    explanation = verdict(step + "srun: error: n1: task 1: Exited with exit code 1\n")
    assert (explanation.cause, explanation.rank) == ("unknown", 1)


def test_a_script_that_goes_on_without_a_program_has_not_failed_for_it():
    missing = "speedrun.sh: line 48: bc: command not found\n"
    assert verdict(missing).cause == "system-tool-missing"
    assert verdict(missing + STEPS * 6).cause == "healthy"
    assert verdict(missing + STEPS * 6 + raised(None, OOM)).cause == "cuda-oom"


def test_a_short_training_has_not_failed_for_a_program_that_shows_the_machine():
    missing = "run.sh: line 2: nvidia-smi: command not found\n"
    steps = "".join(f"[{step:2d}/30] loss={4 - step / 9:.4f}\n" for step in range(1, 31))
    assert verdict(missing + steps).cause == "healthy"
    twins = [
        missing,
        missing + steps[: steps.index("[ 3/")],
        missing.replace("nvidia-smi", "torchrun") + steps,
        missing + steps + "run.sh: line 9: upload: command not found\n",
    ]
    assert [verdict(text).cause for text in twins] == ["system-tool-missing"] * len(twins)


@pytest.mark.parametrize(
    "line", ["sh: 1: nvcc: not found", "bash: module: command not found", "run.sh: line 3: bc: command not found"]
)
def test_what_a_shell_did_not_find_is_not_the_cause_of_a_mistake_in_code(line):
    assert verdict(f"{line}\n").cause == "system-tool-missing"
    assert verdict(f"{line}\n" + raised(None, "KeyError: 'label'")).cause == "user-code-exception"


def test_the_package_that_raised_an_error_is_named_in_the_fix():
    frames = [
        '  File "train.py", line 129, in main',
        '  File "/venv/lib/site-packages/rsl_rl/runner.py", line 44, in __init__',
    ]
    text = "\n".join(["Traceback (most recent call last):", *frames, "KeyError: 'rnd_cfg'", ""])
    explanation = verdict(text)
    assert "train.py:129 in main" in explanation.fix and "the package rsl_rl raised it" in explanation.fix
    assert "raised it" not in verdict(text.replace("/venv/lib/site-packages/", "")).fix


def test_the_fix_of_an_unknown_line_sends_to_that_line():
    explanation = verdict(f"{STEPS}ERROR: No Python environment found\n")
    assert explanation.cause == "unknown" and explanation.fix.startswith(
        f"read what stands around line {len(STEPS.splitlines()) + 1}"
    )


def test_a_program_that_python_cannot_start_is_named():
    frames = [
        f'  File "/usr/lib/python3.12/subprocess.py", line 1863, in {name}' for name in ("__init__", "_execute_child")
    ]
    error = "FileNotFoundError: [Errno 2] No such file or directory: '/opt/env/bin/python'"
    text = "\n".join(["Traceback (most recent call last):", '  File "run.py", line 3, in <module>', *frames, error, ""])
    explanation = verdict(text)
    assert explanation.cause == "system-tool-missing" and "/opt/env/bin/python" in explanation.summary


def test_a_script_that_python_cannot_open_is_the_cause_of_what_its_launcher_raises():
    ranks = "python: can't open file 'train.py': [Errno 2] No such file or directory\n" * 8
    error = "torchelastic.agent.server.api.WorkerGroupFailureException: [default] exceeded max_restarts=3"
    assert verdict(ranks + raised(None, error)).cause == "config-error"
    assert verdict(ranks + raised(None, BUG)).cause == "user-code-exception"  # of another program


def test_a_numpy_that_an_extension_was_not_built_for_is_no_cause_of_a_later_error():
    warning = "RuntimeError: module compiled against API version 0xc but this version of numpy is 0xa\n"
    assert verdict(warning + raised(None, "KeyError: 'v60109'")).cause == "user-code-exception"
    assert verdict(warning).cause == "abi-mismatch"


def test_a_job_of_htcondor_that_was_submitted_again_and_ended_well_is_not_cancelled():
    removed = "009 (041.000.000) 12/10 09:35:20 Job was aborted by the user.\n\tvia condor_rm (by user ana)\n...\n"
    again = (
        "001 (042.000.000) 12/10 09:36:00 Job executing on host\n...\n\t(1) Normal termination (return value 0)\n...\n"
    )
    assert verdict(removed).cause == "slurm-cancelled"
    assert verdict(removed + again).cause == "healthy"


def test_an_invalid_path_is_that_of_data_unless_it_says_otherwise():
    assert verdict("ERROR Invalid data path: /data/train\n").cause == "dataset-missing"
    assert verdict("ERROR Invalid config file path: conf/train.yaml\n").cause == "config-error"


def test_a_closed_input_is_only_told_to_a_program_that_asks():
    fixes = []
    for name in ("confirm", "read"):
        where = f'  File "/opt/site-packages/click/termui.py", line 233, in {name}\n    value = wait()\n'
        text = raised(None, "OSError: [Errno 9] Bad file descriptor").replace("OSError", f"{where}OSError")
        fixes.append(verdict(text).fix)
    assert ["`yes | COMMAND`" in fix for fix in fixes] == [True, False]


def test_a_program_that_a_signal_ended_behind_a_bar_was_ended_by_its_scheduler():
    assert verdict("sampling: 97%|#########7| 97/100 [00:00<00:00]User defined signal 2\n").cause == "slurm-time-limit"


def test_an_import_that_a_package_has_caught_and_logged_is_not_what_ended_the_program():
    logged = (
        "[ERROR] Could not load bitsandbytes native library: libbitsandbytes_cpu.so: cannot open shared object file\n"
        "Traceback (most recent call last):\n"
        '  File "/venv/lib/python3.12/site-packages/bitsandbytes/cextension.py", line 85, in <module>\n'
        "    lib = get_native_library()\n"
        "OSError: libbitsandbytes_cpu.so: cannot open shared object file: No such file or directory\n"
    )
    assert verdict(logged).cause == "shared-library-missing"
    end = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    main()\nKeyError: 4\n'
    assert verdict(logged + end).cause == "user-code-exception"


def test_a_thread_that_outlives_the_program_did_not_end_it():
    thread = (
        "Exception in thread Thread-7 (results_loop):\nTraceback (most recent call last):\n"
        '  File "/usr/lib/python3.10/threading.py", line 1016, in _bootstrap_inner\n    self.run()\n'
        '  File "/venv/lib/python3.10/site-packages/batchgenerators/augmenter.py", line 103, in results_loop\n'
        "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed.\n"
    )
    assert verdict(STEPS + thread).cause == "dataloader-worker-killed"
    assert verdict(STEPS + raised(None, OOM) + thread).cause == "cuda-oom"


def test_a_log_that_ends_at_a_raise_statement_has_its_error():
    frame = '  File "loader.py", line 272, in get_dataset\n'
    text = f'Traceback (most recent call last):\n{frame}    raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")\n'
    assert verdict(text).cause == "cuda-oom"
    assert verdict(text.replace('"CUDA out of memory. Tried to allocate 2 GiB"', "message")).cause == "unknown"


def test_only_wandb_s_own_look_for_a_gpu_may_fail():
    output = "".join(f"saved shard {n}\n" for n in range(9))
    assert (
        verdict(output + "ERROR Error initializing NVML: Driver/library version mismatch\n").cause
        == "cuda-driver-broken"
    )


def test_steps_that_a_monitor_reports_are_progress():
    lines = [
        f"[Sun Feb  8 04:{minute}:12 UTC 2026] Training progress: {minute}/1500 steps\n" for minute in range(40, 50)
    ]
    assert verdict("".join(lines)).progress.last_step == 49


def test_a_bar_that_stays_at_its_start_is_no_progress():
    bar = "".join(f"\r  0%|          | 0/3442 [00:0{n}<?, ?it/s]" for n in range(5))
    assert verdict(f"resuming from checkpoint-500\n{bar}").cause == "unknown"
    warning = "UserWarning: CUDA initialization: CUDA driver initialization failed, you might not have a CUDA gpu.\n"
    assert verdict(f"{warning}resuming from checkpoint-500\n{bar}").cause == "cuda-driver-broken"
    assert verdict(f"{warning}{STEPS}").cause == "healthy"


def test_of_two_errors_the_rank_of_the_one_that_was_printed_first_is_blamed_whatever_the_launcher_saw_first():
    explanation = verdict(STEPS + raised(1, BUG) + raised(0, "KeyError: 'label'") + banner(0, 1))
    assert (explanation.cause, explanation.rank) == ("user-code-exception", 1) and BUG in explanation.summary


def test_a_rank_that_hung_behind_its_exception_is_to_blame_and_not_the_one_that_the_launcher_saw_end():
    timeout = "[rank0]:[E ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)\n"
    explanation = verdict(STEPS + raised(1, BUG) + raised(2, BUG) + timeout + banner(0, -6))
    assert (explanation.cause, explanation.rank) == ("user-code-exception", 1)


def test_a_plugin_of_jax_that_finds_no_gpu_is_left_out():
    begin = "ERROR:2026-01-21 02:31:31,478:jax._src.xla_bridge:477: Jax plugin configuration error: Exception when calling x()\n"
    assert verdict(begin + raised(None, BUG) + OTHER_LINES).cause == "healthy"


def test_a_healthy_answer_names_the_errors_after_which_the_run_continued():
    lost = "Error processing image {}: CUDA out of memory. Tried to allocate 122.00 MiB. GPU 0 has a total capacity of 79 GiB\n"
    log = "".join(lost.format(n) for n in range(5)) + STEPS + "Training complete\n"
    explanation = verdict(log)
    assert explanation.cause == "healthy" and explanation.notes == (
        "the run continued after errors: cuda-oom (line 1)",
    )
    assert verdict(STEPS + "Training complete\n").notes == ()


def test_an_exception_that_python_ignored_earlier_does_not_hide_another_one():
    ignored = "Exception ignored in: <function Image.__del__ at 0x7f>\n"
    assert verdict(ignored + raised(None, BUG) + STEPS).cause == "healthy"
    assert verdict(ignored + STEPS * 3 + raised(None, BUG)).cause == "user-code-exception"


def test_a_step_count_of_deepspeed_that_skips_all_steps_is_a_failure_although_the_run_goes_on():
    line = "[INFO] [logging.py:96:log_dist] [Rank 0] step={}, skipped={}, lr=[1e-05]\n"
    lost = "".join(STEPS + line.format(step, step) for step in (10, 20, 50))
    assert verdict(lost + STEPS).cause == "fp16-overflow"
    assert verdict(STEPS + line.format(10, 10) + STEPS + line.format(100, 12) + STEPS).cause == "healthy"


def test_a_function_that_a_decorator_replaced_was_not_loaded_twice():
    error = "_pickle.PicklingError: Can't pickle <{}>: it's not the same object as {}"
    assert "restart" in verdict(error.format("class 'trl.SFTConfig'", "trl.SFTConfig")).fix
    assert "restart" not in verdict(error.format("function work at 0x7f", "__main__.work")).fix


def test_what_a_program_skips_is_no_cause():
    line = "[skip] Failed to load a.ckpt: Attempting to deserialize object on CUDA device 7 but torch.cuda.device_count() is 6"
    assert verdict(f"saved shard 1\n{line}\n" + "saved shard 2\n" * 9).cause != "checkpoint-device-mismatch"


def test_a_warning_that_says_it_may_be_ignored_is_no_cause():
    plugin = "utils.py:32: UserWarning: Failed to import the plugin due to: ImportError('peft>=0.17.0 is required'). "
    failure = raised(None, "AssertionError: self.warmup_steps < self.decay_steps")
    assert verdict(plugin + "You may ignore this warning if you do not need it.\n" + failure).cause == "config-error"


@pytest.mark.parametrize("quote", ["'", '"'])
def test_an_exception_that_is_printed_as_its_constructor_is_read(quote):
    lines = [
        "Error in call to target 'models.Encoder':",
        f"KeyError({quote}no key of this name{quote})",
        "full_key: encoder",
    ]
    explanation = verdict("\n".join([*lines, ""]))
    assert (explanation.cause, "no key of this name" in explanation.summary) == ("user-code-exception", True)


def test_a_traceback_that_is_cut_off_before_the_run_continued_is_no_failure():
    assert verdict(CUT + STEPS + "training finished\n").cause == "healthy"


def test_an_exception_that_sys_excepthook_did_not_print_is_a_failure():
    hook = "Error in sys.excepthook:\n" + raised(None, "ImportError: hook") + "\nOriginal exception was:\n"
    explanation = verdict(STEPS + hook)
    assert explanation.cause == "unknown" and "sys.excepthook" in explanation.summary
    assert verdict(STEPS + hook + raised(None, OOM)).cause == "cuda-oom"


def test_a_loss_that_stays_nan_is_a_failure():
    explanation = verdict(STEPS + "".join(f"step {step:05d}/00100 | loss nan\n" for step in range(10, 20)))
    assert (explanation.cause, explanation.step, explanation.line) == ("loss-nan", 10, 11)


def test_a_message_about_nan_at_the_end_has_the_step_where_it_began():
    nans = "".join(f"step {step:05d}/00100 | loss nan\n" for step in range(10, 20))
    explanation = verdict(STEPS + nans + raised(0, "FloatingPointError: loss is nan"))
    assert (explanation.cause, explanation.step) == ("loss-nan", 10)


def test_the_child_that_could_not_read_what_its_parent_could_not_pickle_is_a_victim():
    child = (
        'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\n'
        '  File "/usr/lib/python3.12/multiprocessing/spawn.py", line 132, in _main\n'
        "    self = reduction.pickle.load(from_parent)\nEOFError: Ran out of input\n"
    )
    explanation = verdict(child + raised(None, "AttributeError: Can't pickle local object 'main.<locals>.collate'"))
    assert explanation.cause == "pickle-spawn-error"
    assert any("EOFError" in item.text for item in explanation.consequences)


def test_a_task_that_srun_killed_after_it_cancelled_the_step_did_not_run_out_of_memory():
    cancelled = "slurmstepd: error: *** STEP 4711.0 ON node1 CANCELLED AT 2026-01-02T03:04:05 ***\n"
    killed = "srun: error: node1: task 0: Killed\n"
    assert verdict(STEPS + cancelled + killed).cause == "slurm-cancelled"
    assert verdict(STEPS + killed).cause == "host-oom-killed"


@pytest.mark.parametrize(
    "line", ["INFO: No module named 'apex'", "Could not import extras: No module named 'flash._version'"]
)
def test_an_optional_module_is_neither_a_failure_of_a_healthy_log_nor_the_cause_of_another(line):
    assert verdict(f"{line}\n{STEPS}").cause == "healthy"
    explanation = verdict(f"{line}\n" + raised(None, "ModuleNotFoundError: No module named 'mylib'"))
    assert (explanation.cause, "mylib" in explanation.summary) == ("import-error", True)


def test_an_unknown_cuda_error_inside_nccl_is_no_broken_gpu():
    line = "host:4711:4802 [0] transport/p2p.cc:275 NCCL WARN Cuda failure 999 'unknown error'\n"
    assert verdict(line).cause == "nccl-cuda-failure"


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: The NVIDIA GPU 0000:01:00.0 (PCI ID: 10de:2b85) installed in this system has fallen off the bus and is not",
        "NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.",
        "NVRM: nvCheckOkFailedNoLog: Check failed: GPU lost from the bus [NV_ERR_GPU_IS_LOST] (0x0000000F)",
        "NVRM: _issueRpcAndWait: rpcSendMessage failed with status 0x0000000f for fn 78 sequence 7869!",
        "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
    ],
)
def test_a_gpu_that_is_lost_is_a_failure_with_or_without_an_xid(line):
    assert verdict(f"{STEPS}[ 4711.123456] {line}\n").cause == "gpu-hardware-error"


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: Caught MemoryError in DataLoader worker process 2.\nOriginal {}MemoryError",
        "ValueError: Caught ValueError in DataLoader worker process 0.\nOriginal {}ValueError: cannot read: [Errno 12] Cannot"
        " allocate memory",
    ],
)
def test_memory_that_ran_out_in_a_worker_of_the_data_loader_is_the_cause(error):
    inner = raised(None, "").removesuffix("\n")
    assert verdict(raised(None, error.format(inner))).cause == "host-oom-killed"


def test_a_failure_that_is_not_in_the_catalogue_is_unknown_and_lists_what_to_collect():
    explanation = verdict(STEPS + raised(0, PEER) + banner(1, 3, (0, -15)))
    assert (explanation.cause, explanation.rank, explanation.confidence) == ("unknown", 1, 0.0)
    assert explanation.fix
    assert {item.rank for item in explanation.consequences} >= {0}


def test_a_second_likely_cause_is_reported_and_lowers_the_confidence():
    alone, both = (
        verdict(raised(0, OOM)),
        verdict(raised(0, OOM) + raised(1, "OSError: [Errno 28] No space left on device")),
    )
    assert both.cause == "cuda-oom" and both.also == ("disk-full",)
    assert both.confidence < alone.confidence


@pytest.mark.parametrize(
    ("template", "values", "sentence"),
    [
        ("rank {rank} requested {size}", {"rank": "3", "size": "2 GiB"}, "rank 3 requested 2 GiB"),
        ("rank {rank} requested {size}", {}, "a rank requested n/a"),
        ("half the batch[: --device-batch-size {half_batch}]", {}, "half the batch"),
        (
            "half the batch[: --device-batch-size {half_batch}]",
            {"half_batch": "8"},
            "half the batch: --device-batch-size 8",
        ),
        ("no room[ ({free} of {total})]", {"free": "1 GiB"}, "no room"),
        ("data[0] is {message}", {"message": "a {rank} [b]"}, "data[0] is a {rank} [b]"),
    ],
)
def test_a_template_is_filled_and_parts_with_unknown_values_are_left_out(template, values, sentence):
    assert fill_template(template, values) == sentence


def test_values_are_short_and_on_one_line():
    assert clean_values({"a": "x\n  y", "b": None, "c": "", "d": 7, "e": "z" * 1000}) == {
        "a": "x y",
        "d": "7",
        "e": "z" * 300,
    }


@pytest.mark.parametrize("size", ["67108864 bytes", "67108864"])
def test_bytes_that_could_not_be_allocated_are_shown_with_a_unit(size):
    log = read_log([ALLOCATION_FAILED.format(size).encode()])
    explanation = reach_verdict([log])
    assert explanation.cause == "host-oom-killed"
    assert "(64.0 MiB requested)" in explanation.summary


def test_the_error_that_ray_wraps_is_the_cause():
    wrapped = "ray.exceptions.RayTaskError(ValueError): ray::main() (pid=4711, ip=10.0.0.4)\nValueError: sample 7 has 3 fields"
    explanation = verdict(raised(None, wrapped))
    assert (explanation.cause, explanation.summary[:10]) == ("user-code-exception", "ValueError")


def test_a_traceback_behind_the_prefix_of_vllm_is_read():
    prefix = "(Worker_TP0 pid=231) ERROR 05-19 12:24:51 [core.py:459] "
    explanation = verdict("".join(f"{prefix}{line}\n" for line in raised(None, "RuntimeError: boom").splitlines()))
    assert explanation.summary == "RuntimeError: boom (at train.py:31 in main)"


@pytest.mark.parametrize("line", ["WARN: grad_norm is not finite: nan", "gradient norm is NaN: nan"])
def test_a_gradient_norm_alone_can_be_nan(line):
    assert verdict(f"(WorkerDict pid=4711) {line}\n" * 6).cause == "loss-nan"


def test_a_log_that_ends_while_nccl_starts_may_be_a_hang_of_two_cards():
    lines = [f"host:47:48 [0] NCCL INFO Channel 0{n}/02 : 0 1\n" for n in range(9)]
    found = verdict("".join(lines))
    assert (found.cause, found.also) == ("nccl-p2p-hang", ("collective-timeout-desync",))
    assert "while NCCL starts" in found.summary and found.confidence < 0.5
    assert verdict("".join(lines[:2])).cause == "unknown"


def test_a_process_that_closes_its_communicators_did_not_hang():
    start = "".join(f"n1:44:{n} [0] NCCL INFO Channel {n:02d}/0 : 0[0] -> 1[1] via P2P/IPC\n" for n in range(20))
    end = "n1:44:90 [0] NCCL INFO comm 0x55d0ccb13020 rank 0 nranks 2 cudaDev 0 busId a8000 - Abort COMPLETE\n"
    assert verdict(start).cause == "nccl-p2p-hang"
    assert verdict(start + end).cause == "unknown"


def test_noise_at_the_end_of_a_healthy_run_is_no_failure():
    ignored = "[rank0]:Exception ignored while calling deallocator <function A.__del__ at 0x7f>:\n"
    noise = ignored + raised(0, "PythonFinalizationError: cannot join thread at interpreter shutdown")
    assert verdict(STEPS + "training finished\n" + noise).cause == "healthy"
    left = "[rank1]:[W709 10:36:07.2 x.cpp:1524] Warning: destroy_process_group() was not called before program exit\n"
    lost = "[rank1]:[W709 10:36:07.6 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=105): got 0 bytes.\n"
    assert verdict(STEPS + left + lost).cause == "healthy"
    assert verdict(STEPS + lost).cause == "peer-died"


def test_of_ranks_that_report_the_same_the_launcher_names_the_first():
    text = "".join(
        raised(rank, "RuntimeError: CUDA error: an illegal memory access was encountered") for rank in (3, 0)
    )
    assert verdict(f"{text}E failed (exitcode: 1) local_rank: 6 (pid: 18) of binary: python\n").rank == 6
    assert verdict(f"{text}gpu-7: rank 5 exited with code 1\n").rank == 5
    assert verdict(text).rank == 3


def test_the_only_rank_that_fails_is_blamed_for_a_line_without_one():
    text = raised(1, "torch.distributed.DistBackendError: NCCL error in:")
    assert (
        verdict(
            f"{text}ncclUnhandledCudaError: Call to CUDA function failed.\nHIP failure: 'in the present state'\n"
        ).rank
        == 1
    )


def test_losses_with_a_suffix_can_be_nan():
    lines = "".join(f"train iter: {step} loss_net: nan loss_scale: 1.0000 seconds: 12\n" for step in range(0, 400, 100))
    assert verdict(lines).cause == "loss-nan"
    assert verdict(lines.replace("nan", "0.9")).cause == "healthy"


def test_what_a_shell_says_about_lost_arguments_after_a_failure_is_a_consequence():
    lost = "train.sh: line 45: --disable_tqdm: command not found\n"
    assert verdict(raised(0, OOM) + lost).cause == "cuda-oom"
    assert verdict(lost).cause == "config-error"


def test_a_few_lines_of_output_without_a_step_are_no_healthy_log():
    lines = "".join(f"Class {number}: accuracy 0.7\n" for number in range(8))
    assert verdict(lines).cause == "healthy"
    assert verdict("".join(lines.splitlines(keepends=True)[:5])).cause == "unknown"


def test_a_request_that_is_tried_again_is_no_failure():
    lost = "(ReadTimeoutError(\"HTTPSConnectionPool(host='huggingface.co', port=443): Read timed out.\"))"
    text = f"{lost} thrown while requesting HEAD https://huggingface.co/x/y\nRetrying in 1s [Retry 1/5].\n"
    assert verdict(text + STEPS).cause == "healthy"
    assert verdict(text + raised(0, BUG)).cause == "user-code-exception"


def test_a_warning_of_any_class_is_no_error():
    warning = "check.py:147: UserWarning: Error fetching version info <urlopen error timed out>\n"
    assert verdict(warning + raised(0, "TypeError: save() takes 2 positional arguments")).cause == "user-code-exception"


@pytest.mark.parametrize(
    "line",
    [
        "Epoch: {step:04d} train_loss= 0.0012 train_acc= 0.04 val_loss= {value} val_acc= 0.06\n",
        "   {step}/299    65.1G     {value}   0.0151      0    1.2     1963     320: 100%|####| 729/729 [51:09<00:00,  4.2s/it]\n",
        "{{'loss': {value}, 'learning_rate': 0.001, 'epoch': {step}}}\n",
    ],
    ids=["of the validation", "in a row of YOLO", "written as 0"],
)
def test_a_loss_that_is_nan_in_any_column_is_no_healthy_log(line):
    first = line.format(step=1, value="6.26")
    broken = "0.0" if "learning_rate" in line else "nan"
    lost = "".join(line.format(step=step, value=broken) for step in range(2, 8))
    assert verdict(first + lost).cause == "loss-nan"
    fine = "".join(line.format(step=step, value=f"{6.26 / step:.2f}") for step in range(2, 8))
    assert verdict(first + fine).cause == "healthy"


def test_the_best_loss_is_infinite_at_first():
    lines = "".join(f"step {step}: loss 2.{step}, best val loss inf\n" for step in range(8))
    assert verdict(lines).cause == "healthy"


def test_of_nccl_s_gpus_on_one_host_the_index_is_the_rank():
    lines = (
        "n1:25:48 [0] NCCL INFO init.cc:1079 -> 3\nn1:28:52 [3] alloc.h:178 NCCL WARN Cuda failure 'out of memory'\n"
    )
    assert (verdict(lines).cause, verdict(lines).rank) == ("cuda-oom", 3)
    assert verdict(lines.replace("n1:25", "n2:25")).rank is None
    assert verdict(lines.replace("[0]", "[3]")).rank is None  # each rank may see one GPU alone


def test_the_rank_of_the_only_process_is_0():
    bug = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n' + OOM.splitlines()[0] + "\n"
    assert verdict("RANK and WORLD_SIZE in environ: 0/1\n" + bug).rank == 0
    assert verdict("RANK and WORLD_SIZE in environ: 0/2\n" + bug).rank is None


def test_deepspeed_s_launcher_quotes_the_command_that_it_started_last_which_names_no_rank():
    line = "[ERROR] [launch.py:325:sigkill_handler] ['python3', '-u', 'train.py', '--local_rank=1'] exits with return code = -11\n"
    assert (verdict(line).cause, verdict(line).rank) == ("sigsegv", None)


def test_an_exception_behind_another_rank_s_warning_is_not_what_was_warned_of():
    warning = "03/14 10:00:00 - WARNING - the decoder is deprecated\n"
    later = "".join(f"rank {n} is gone\n" for n in range(50))
    explanation = verdict(warning + raised(1, OOM) + raised(0, OOM) + later)
    assert (explanation.cause, explanation.rank) == ("cuda-oom", 1)


def test_a_row_of_a_table_of_the_environment_is_no_failure():
    rows = "torchvision               0.15\nmylib._C                  not built correctly: No module named 'mylib._C'\n"
    work = "".join(f"INFO - sample {n} has {n % 7} words\n" for n in range(20))
    assert verdict(rows + "CUDA compiler             Not found\n" + work).cause == "healthy"


def test_what_one_command_of_a_script_could_not_do_is_no_failure_where_the_script_goes_on():
    work = "".join(f"INFO - sample {n} has {n % 7} words\n" for n in range(60))
    failed = "mkdir: cannot create directory `/scratch/run7': Permission denied\n"
    assert verdict(failed + work).cause == "healthy"
    assert verdict(work + failed).cause == "permission-denied"
    assert verdict("./all.sh: line 12: syntax error: unexpected end of file\n" + work).cause == "healthy"


def test_the_output_of_monitors_shows_no_run():
    lines = "       total   used   free\nMem:      65     {n}     19\nSwap:      2      0      2\n"
    assert verdict("".join(lines.format(n=n) for n in range(1, 6))).cause == "unknown"


def test_what_nccl_says_while_it_shuts_down_is_no_failure():
    closing = "node-0:94291:96043 [0] NCCL INFO misc/socket.cc:863 -> 3\n" * 4
    ended = "node-0:94291:96043 [0] NCCL INFO comm 0x462e7be0 rank 0 nranks 4 cudaDev 0 busId 100000 - Abort COMPLETE\n"
    assert verdict(STEPS + closing + ended).cause == "healthy"
    assert verdict(STEPS + closing).cause == "nccl-internal-error"
    assert verdict(STEPS + raised(0, OOM) + closing + ended).cause == "cuda-oom"


def test_a_script_that_says_done_behind_a_launcher_s_failure_is_no_sign_of_success():
    worker = "FileNotFoundError: [Errno 2] No such file or directory: 'data/images/4.jpg'"
    ends = (
        "[launch.py:321:sigkill_handler] ['python', 'train.py', '--local_rank=0'] exits with return code = 1\nDone.\n"
    )
    assert verdict(STEPS + raised(None, worker) + ends).cause == "dataset-missing"
    assert verdict(raised(None, worker) + STEPS + "Done.\n").cause == "healthy"


def test_a_program_that_says_done_right_behind_a_traceback_has_not_done_its_work():
    caught = "Traceback for the error!\n" + raised(None, BUG) + "Restarting training ...\n"
    assert verdict(STEPS + caught + "Finished training!\n").cause == "user-code-exception"
    assert verdict(STEPS + caught + OTHER_LINES + "Finished training!\n").cause == "healthy"
    assert verdict(STEPS + caught + "Finished training!\n" + OTHER_LINES).cause == "healthy"


def test_an_error_that_the_run_has_survived_twice_does_not_end_it_the_third_time():
    handled = raised(None, "ValueError: step 2 - extract action failed from: {n}")
    assert verdict("".join(handled.format(n=n) + STEPS for n in range(3)) + handled.format(n=4)).cause == "healthy"
    assert verdict(STEPS + handled.format(n=4)).cause == "user-code-exception"


def test_what_a_program_can_do_without_is_not_why_it_ran_out_of_memory():
    lines = "/bin/sh: 1: c++: not found\nnvcc fatal   : Failed to preprocess host compiler properties.\nfused Adam is not used\n"
    assert verdict(lines + raised(0, OOM)).cause == "cuda-oom"
    assert verdict(lines).cause in ("compile-failure", "system-tool-missing")


def test_a_checkpoint_that_a_program_did_without_is_not_why_it_failed_later():
    line = "Failed loading checkpoint form ./model.safetensors: Error(s) in loading state_dict for Backbone:\n"
    refused = "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasSdot(handle, n, x, incx)`"
    end = raised(None, refused).replace("in main", "in <module>")
    assert verdict(line + end).cause == "cublas-failure"
    assert verdict(line).cause == "state-dict-mismatch"


def test_gradients_of_zeros_are_the_cause_although_the_run_goes_on_to_its_end():
    place = "transformer_engine/common/util/ptx.cuh:935 in function mul_cvt_bf16_to_fp4_4x"
    line = f"{place} (thread ({{}},0,0), block (1,0,0)): FP4 cvt PTX instructions are architecture-specific.\n"
    lines = "".join(line.format(thread) for thread in range(40))
    for text in (lines + STEPS + STEPS, STEPS + lines + STEPS, lines + STEPS + "training finished\n"):
        explanation = verdict(text)
        assert explanation.cause == "fp4-gradients-zero" and "2.20" in explanation.fix
        assert len(explanation.evidence) == 1


def test_what_a_scheduler_ends_hours_after_a_rank_was_killed_is_not_the_cause():
    killed = (
        "slurmstepd-n1: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.\n"
    )
    timeout = (
        "[rank0]:[E913 02:03:34.22 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL("
        "SeqNum=9, OpType=ALLREDUCE, NumelIn=1536, NumelOut=1536, Timeout(ms)=600000) ran for 600023 milliseconds\n"
    )
    ended = "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2025-09-15T03:36:24 DUE TO TIME LIMIT ***\n"
    log = STEPS + killed + "srun: error: n1: task 2: Out Of Memory\n" + timeout + ended
    assert verdict(log).cause == "host-oom-killed" and verdict(log).rank == 2
    assert verdict(STEPS + ended).cause == "slurm-time-limit"


def test_the_source_line_of_a_frame_reports_no_step():
    frame = (
        'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n    steps(40, h)\nCfg: bad batch\n'
    )
    explanation = verdict("step 1 loss 2.5\nstep 2 loss 2.0\n" + frame)
    assert (explanation.cause, explanation.step) == ("user-code-exception", 2)


def test_a_library_that_could_not_be_loaded_at_the_start_is_not_what_ended_the_program():
    """transformers imports torchao where it is installed, and torchao prints this on a machine without its GPU."""
    notice = (
        "Failed to load /env/site-packages/torchao/_C_mxfp8.so: Could not load this library: /env/torchao/_C_mxfp8.so\n"
    )
    other = "RuntimeError: Could not load library libfoo.so: undefined symbol: _ZN3c10\n"
    assert verdict(notice + raised(None, "IndexError: sample 33 is broken")).cause == "user-code-exception"
    assert verdict(notice + "loading\n" * 3).cause != "abi-mismatch"
    assert verdict(raised(None, other)).cause == "abi-mismatch"


def test_the_fix_is_of_the_error_of_the_rank_that_is_to_blame():
    errors = (
        "ModuleNotFoundError: No module named 'books.reader'",
        "ImportError: cannot import name 'x' from 'y' (/a/y.py)",
    )
    fix = verdict(raised(0, errors[0]) + raised(1, errors[1])).fix
    assert "books" in fix and "/a/y.py" not in fix


def test_a_cause_that_tells_little_is_no_root_where_the_same_error_shows_a_better_one():
    error = (
        "RuntimeError: Check failed: (status == cudaSuccess) is false: BatchPrefill failed with error invalid argument"
    )
    assert verdict(raised(0, error) + raised(0, error)).cause == "cuda-error"


def test_a_line_of_source_code_is_no_header_of_a_table():
    code = "    return val_loss, bits_per_token * tokens_per_byte\n"
    log = STEPS + code + "".join(f"{gpu}, 5.{gpu}\n" for gpu in range(6))
    assert verdict(log).cause == "healthy"


def test_settings_that_a_server_dumps_behind_an_error_are_no_part_of_it():
    dump = "Dumping input data for V1 LLM engine with config: model='m', trust_remote_code=True, must be set\n"
    assert verdict(raised(None, "RuntimeError: PassManager::run failed") + dump).cause == "compile-failure"


def test_a_connection_that_a_program_tries_again_to_the_end_is_the_cause():
    log = STEPS + "API connection error: Connection error., retrying in 2s...\n" * 40
    assert verdict(log).cause == "service-unreachable"


@pytest.mark.parametrize(
    "error",
    [
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "ConnectionError: wandb: connection closed by peer",
        "OSError: [Errno 104] Connection reset by peer",
    ],
)
def test_a_rank_whose_own_connection_breaks_is_not_told_that_another_rank_ended_first(error):
    explanation = verdict(STEPS + raised(0, error))
    assert (explanation.cause, explanation.rank) == ("service-unreachable", 0)


def test_a_reset_connection_may_follow_from_the_end_of_another_process():
    reset = "ConnectionResetError: [Errno 104] Connection reset by peer"
    assert verdict(STEPS + raised(0, reset) + raised(1, BUG)).rank == 1


def test_what_is_said_of_the_last_step_does_not_undo_that_it_was_the_last():
    steps = "".join(f"step {step}/60 | loss {5 - step / 60:.3f}\n" for step in range(1, 61))
    assert verdict(steps + "checkpoint at step 60: 1.5 MiB in 0.2 s\n").progress.finished
    assert not verdict(steps + "step 70 | loss 3.9\nstep 80 | loss 3.9\n").progress.finished


CELL = (
    "KeyboardInterrupt                         Traceback (most recent call last)\n"
    "Cell In[7], line 828\n    826 # all folds\n--> 828 pipeline.run()\n    830 print('Training complete')\n\n"
    "File /opt/train/loop.py:359, in Loop.run(self, timeout)\n    357 else:\n--> 359     wait()\n    360 done = 1\n\n"
)


def test_a_cell_of_a_notebook_that_is_interrupted_is_not_done():
    explanation = verdict(STEPS + CELL + "KeyboardInterrupt: \n")
    assert explanation.cause == "keyboard-interrupt"
    assert "Cell In" not in explanation.fix
    raised_in_cell = CELL.replace("KeyboardInterrupt", "ValueError") + "ValueError: sample 3 has no label\n"
    assert "loop.py:359 in run" in verdict(STEPS + raised_in_cell).summary


@pytest.mark.parametrize("world_size, rank", [(4, 2), (1, None)])
def test_a_file_for_each_rank_says_at_its_top_whose_it_is(world_size, rank):
    top = f"[07/25 21:43:23] detectron2 INFO: Rank of current process: 2. World size: {world_size}\n"
    assert (
        verdict(top + STEPS + f'Traceback (most recent call last):\n  File "train.py", line 16, in step\n{BUG}\n').rank
        == rank
    )


def test_a_traceback_of_ray_train_has_the_rank_above_it():
    trace = 'Traceback (most recent call last):\n  File "train.py", line 16, in loop\n    x = net(y)\n' + BUG + "\n"
    explanation = verdict(STEPS + "[Rank 1 Error Snippet]:\n" + trace)
    assert (explanation.cause, explanation.rank) == ("user-code-exception", 1)


def test_a_folder_that_is_there_already_is_no_race_of_ranks_in_a_program_of_one_process():
    frames = '  File "train.py", line 362, in train\n  File "/usr/lib/python3/os.py", line 223, in makedirs\n'
    trace = "Traceback (most recent call last):\n" + frames
    error = "FileExistsError: [Errno 17] File exists: 'models/test'\n"
    alone = verdict("loading\n" + trace + error)
    assert alone.cause == "user-code-exception" and "another output folder" in alone.fix
    assert verdict("[rank0]: loading\n" + trace + error).cause == "rank-file-race"
    assert verdict("loading\n" + trace.replace("train.py", "/x/site-packages/y.py") + error).cause == "rank-file-race"


def test_a_folder_without_its_parents_is_no_missing_checkpoint():
    trace = 'Traceback (most recent call last):\n  File "train.py", line 12, in main\n  File "pathlib.py", line 1311, in mkdir\n'
    explanation = verdict(STEPS + trace + "FileNotFoundError: [Errno 2] No such file or directory: '/home/me/logs'\n")
    assert explanation.cause == "user-code-exception" and "parents=True" in explanation.fix


def test_a_checkpoint_that_is_cut_is_corrupt_although_a_file_system_reports_only_its_number():
    trace = 'Traceback (most recent call last):\n  File "t.py", line 26, in <module>\n'
    trace += '  File "/x/torch/serialization.py", line 807, in __init__\n'
    seek = '  File "/x/site-packages/fsspec/implementations/local.py", line 486, in seek\n'
    assert verdict(trace + seek + "OSError: [Errno 22] Invalid argument\n").cause == "checkpoint-corrupt"


def test_a_lock_between_processes_without_room_is_shared_memory_and_no_disk():
    trace = 'Traceback (most recent call last):\n  File "t.py", line 4, in <module>\n'
    trace += '  File "/usr/lib/python3.11/multiprocessing/synchronize.py", line 57, in __init__\n'
    assert verdict(trace + "OSError: [Errno 28] No space left on device\n").cause == "shm-too-small"
    assert "remount,rw /dev/shm" in verdict(trace + "OSError: [Errno 30] Read-only file system\n").fix


def test_a_bus_error_behind_a_full_shared_memory_is_its_consequence():
    full = "n:1:8 [0] misc/shmutils.cc:87 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-x (size 9637888)\n"
    explanation = verdict(STEPS + full + "Bus error (core dumped)\n")
    assert (explanation.cause, explanation.also) == ("shm-too-small", ())
    alone = verdict(STEPS + "Bus error (core dumped)\n")
    assert (alone.cause, alone.also) == ("sigbus", ())


def test_a_line_of_progress_that_was_cut_out_of_a_log_shows_a_run_that_works():
    assert verdict("step 04245/21400 (19.84%) | loss: 3.012123 | dt: 1377ms\n").cause == "healthy"
    assert verdict("step 00000/21400 (0.00%) | loss: 11.012123 | dt: 1377ms\n").cause == "unknown"


@pytest.mark.parametrize(
    "form",
    ["gpu: Test CUDA failure common.cu:1030 '{}'", "GPUassert: {} main.cu 42", "CUDA error at /src/a.cu:12: {}",
     "CUDA Runtime Error: {}", "Cuda failure kernel.cu:88: '{}'", "CUDA failure 802 '{}'", "CUDA error 701 ({}) at kernel.cu:20",
     "terminate called after throwing an instance of 'thrust::system::system_error'\n  what():  sort: cudaErrorUnknown: {}",
     "alloc_buffer: allocating 360757.13 MiB on device 0: cudaMalloc failed: {}"],
)  # fmt: skip
@pytest.mark.parametrize(
    ("says", "cause"),
    [
        ("out of memory", "cuda-oom"),
        ("system not yet initialized", "cuda-driver-broken"),
        ("an illegal memory access was encountered", "illegal-memory-access"),
        ("no kernel image is available for execution on the device", "cuda-arch-unsupported"),
        ("operation not supported", "cuda-error"),
        ("too many resources requested for launch", "cuda-error"),
        ("uncorrectable ECC error encountered", "gpu-hardware-error"),
    ],
)
def test_what_cuda_says_is_known_in_the_forms_of_any_program(form, says, cause):
    assert verdict(f"loading\n{form.format(says)}\n").cause == cause


def test_an_allocator_that_fails_after_memory_ran_out_only_reports_the_end():
    text = (
        "n_batch = 2048\nbuffer: allocating 36 GiB: cudaMalloc failed: out of memory\nerror: failed to create context\n"
    )
    explanation = verdict(text + "free(): invalid pointer\nAborted\n")
    assert (explanation.cause, explanation.step) == ("cuda-oom", None)


def test_a_missing_attribute_of_a_configuration_is_a_version_where_the_class_is_a_library_s():
    error = "AttributeError: '{}' object has no attribute 'draft_size'\n"
    assert verdict(error.format("LlamaConfig")).cause == "version-mismatch"
    assert verdict(error.format("EConfig")).cause == "config-error"


def test_a_command_that_is_mistyped_behind_a_run_is_no_failure_of_it():
    typed = "$ ls\nrun1\n$ a\na: command not found\n$ \n"
    assert verdict(STEPS + "Training complete.\n" + typed).cause == "healthy"
    assert verdict(STEPS + typed).cause == "system-tool-missing"


def test_a_plugin_of_nccl_that_cannot_start_is_replaced_by_another_network():
    line = "n1:35115:35469 [2] NCCL WARN NET/OFI {}\n"
    plugin = "".join(map(line.format, ("Failed to initialize sendrecv protocol", "aws-ofi-nccl initialization failed")))
    assert verdict(plugin + "n1:35115:35469 [2] NCCL INFO Init COMPLETE\n" + STEPS).cause == "healthy"
    assert verdict(line.format("Request 0x7f completed with error")).cause == "nccl-ib-failure"


def test_a_suspicious_line_long_before_a_good_end_is_no_failure():
    end = "".join(f"request {number} answered\n" for number in range(80)) + "Monitoring completed successfully.\n"
    line = "the double type is not supported now\n"
    assert verdict("start\n" + line + end).cause == "healthy"
    assert verdict("start\n" + line + end.partition("Monitoring")[0]).cause == "unknown"
    assert verdict(end.partition("Monitoring")[0] + line + "Monitoring completed successfully.\n").cause == "unknown"


@pytest.mark.parametrize(
    "line",
    [
        "Ignore import error when loading sglang.srt.models.midashenglm: No module named 'torchaudio'",
        "n1:64904:64921 [1] NCCL INFO dlvsym failed on mlx5dv_reg_dmabuf_mr - libmlx5.so: undefined symbol: mlx5dv_reg_dmabuf_mr",
        "You are using a model of type llama to instantiate one of type . This is not supported for all configurations of models",
        "Timeout set to: 10800 seconds",
    ],
)
def test_what_says_of_itself_that_it_does_no_harm_is_no_failure_of_a_server(line):
    requests = "".join(f'INFO: 127.0.0.1:{n} - "POST /v1/completions HTTP/1.1" 200 OK\n' for n in range(50_000, 50_080))
    assert verdict(line + "\n" + requests).cause == "healthy"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("RuntimeError: Not compiled with CUDA support\n", "extension-not-built"),
        (
            "RuntimeError: Tried to instantiate class '_core_C.ScalarType', but it does not exist!\n",
            "extension-not-built",
        ),
        (
            STEPS
            + "wandb: Ctrl + C detected. Stopping sweep.\n"
            + 'Traceback (most recent call last):\n  File "t.py", line 2, in f\nException\n',
            "keyboard-interrupt",
        ),
        (
            "n1:8:9 [0] NCCL INFO Init COMPLETE\n# Avg bus bandwidth    : 178.1\n# Collective test concluded: all_reduce_perf\n",
            "healthy",
        ),
    ],
)
def test_what_extensions_interrupts_and_the_tests_of_nccl_say(text, cause):
    assert verdict(text).cause == cause


USER_FRAME = 'Traceback (most recent call last):\n  File "/home/me/train.py", line 7, in <module>\n    run()\n'
PACKAGE_FRAME = USER_FRAME + '  File "/x/site-packages/pkg/core.py", line 3, in run\n    go()\n'


@with_rows(
    ("text", "cause"),
    [
        (USER_FRAME + "AttributeError: module 'config' has no attribute 'FREEZE'\n", "user-code-exception"),
        (USER_FRAME + "AttributeError: module 'numpy' has no attribute 'float'\n", "version-mismatch"),
        (USER_FRAME + "AttributeError: module 'tensorflow' has no attribute 'Session'\n", "version-mismatch"),
        (USER_FRAME + "AttributeError: module 'torchvision.ops' has no attribute 'misc'\n", "version-mismatch"),
        (USER_FRAME + "AttributeError: module 'collections' has no attribute 'Mapping'\n", "version-mismatch"),
        (USER_FRAME + "TypeError: OneHotEncoder.__init__() got an unexpected keyword argument 'sparse'\n", "version-mismatch"),
        (PACKAGE_FRAME + "AttributeError: module 'core' has no attribute 'go'\n", "version-mismatch"),
        (USER_FRAME + "TypeError: HardMiner.__init__() got an unexpected keyword argument 'ratio'\n", "user-code-exception"),
        (USER_FRAME + "TypeError: GRPOTrainer.__init__() got an unexpected keyword argument 'ratio'\n", "version-mismatch"),
        (PACKAGE_FRAME + "TypeError: Net.forward.<locals>.inner() got an unexpected keyword argument 'x'\n", "user-code-exception"),
        (PACKAGE_FRAME + "ImportError: cannot import name 'A' from 'b' (/home/me/b.py). Did you mean: 'B'?\n", "import-error"),
        (USER_FRAME + "cv2.error: OpenCV(4.6.0) :-1: error: (-5:Bad argument) in function 'rectangle'\n", "user-code-exception"),
    ],
)  # fmt: skip
def test_names_that_no_package_has_are_the_user_s_own(text, cause):
    assert verdict(text).cause == cause


def test_a_folder_for_an_output_that_is_missing_is_no_missing_checkpoint():
    trace = USER_FRAME + '  File "/x/site-packages/matplotlib/figure.py", line 3, in savefig\n    self.print()\n'
    assert (
        verdict(trace + "FileNotFoundError: [Errno 2] No such file or directory: 'svg/a.svg'\n").cause
        == "user-code-exception"
    )
    trace = USER_FRAME + '  File "/x/site-packages/torch/serialization.py", line 870, in _save\n    zip_file.write()\n'
    assert verdict(trace + "RuntimeError: Unknown error -1\n").cause == "disk-full"


def test_errors_of_single_requests_end_no_server():
    ok = "".join(f'INFO: 127.0.0.1:{n} - "POST /v1/completions HTTP/1.1" 200 OK\n' for n in range(50_000, 50_080))
    error = "ValueError: This model's maximum context length is 6144 tokens. However, you requested 18244677 tokens\n"
    trace = PACKAGE_FRAME.replace("<module>", "serve") + error
    assert verdict(ok + trace + ok).cause == "healthy"
    assert verdict(ok + trace).cause == "sequence-too-long"


def test_a_server_that_reports_its_throughput_has_started_after_all():
    report = "INFO metrics.py:455] Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 8.5 tokens/s, Running: 0 reqs\n"
    failed = "ValueError: Cannot provide a placement group within 1800 seconds"
    assert verdict(raised(None, failed) + report * 60).cause == "healthy"
    assert verdict(raised(None, failed) + "INFO a line\n" * 60).cause != "healthy"
    stuck = report.replace("8.5 tokens/s, Running: 0", "0.0 tokens/s, Running: 12")
    assert verdict("ERROR engine core died of something\n" + stuck * 60).cause == "serving-engine-failed"


def test_a_client_that_has_gone_away_ends_no_server():
    request = '10.0.0.1 - - [30/Mar/2026 00:20:48] "GET /index.html HTTP/1.1" 200 -\n'
    gone = "Exception happened during processing of request from ('10.0.0.1', 41134)\n"
    assert (
        verdict(request + gone + raised(None, "BrokenPipeError: [Errno 32] Broken pipe") + request).cause == "healthy"
    )
    assert verdict(request + raised(None, "BrokenPipeError: [Errno 32] Broken pipe")).cause != "healthy"


def test_an_error_that_is_quoted_below_what_the_program_does_about_it_is_handled():
    announced = "the bridge failed, installing it: an error occurred:\n[ Info: importing\n"
    quoted = "ConfigError: package bridge is required but does not seem to be installed:\n"
    output = "".join(f"package {n} is compiled\n" for n in range(130))
    assert verdict(announced + quoted + output + raised(None, BUG)).summary.startswith(BUG)
    assert not verdict(quoted + output + raised(None, BUG)).summary.startswith(BUG)


def test_what_a_login_shell_cannot_read_stops_no_script():
    shell = "/home/ana/.zshrc: line 97: syntax error near unexpected token `('\n"
    assert verdict(shell + raised(None, BUG)).summary.startswith(BUG)
    assert verdict(shell.replace(".zshrc", "job.sh") + raised(None, BUG)).fix.startswith("run `bash -n SCRIPT`")


def test_an_exception_that_is_logged_as_a_warning_ends_nothing():
    lines = "".join(f"INFO - node {n} is optimized\n" for n in range(80))
    trace = PACKAGE_FRAME.replace("<module>", "convert") + "KeyError: 'a'\n"
    assert verdict("[WARNING] - not converted\n" + trace + lines).cause != "user-code-exception"
    assert verdict("[ERROR] - not converted\n" + trace + lines).cause == "user-code-exception"


@with_rows(
    "line",
    [
        "ddp_timeout=1800,",
        "Requirement already satisfied: async-timeout<6.0,>=4.0 in ./lib",
        "Starting test_exception_handling",
        "Val, Epoch 8, Losses: black_hat: 0.34696, hispanic_hat: 0.20018",
        "check each answer (they may contain errors):",
        "[' are', ' cannot', ' can', ' must']",
        "response: to solve this problem, we need to determine the largest amount of money in cents that cannot be formed",
        "[2026-06-07] Decode batch, #running-req: 1, #token: 66, token usage: 0.00, cuda graph: True",
        "W tensorflow/stream_executor/cuda/cuda_driver.cc:312] failed call to cuInit: UNKNOWN ERROR (303)",
        "slurmstepd: error: _cgroup_procs_check: failed on path (null)/cgroup.procs: No such file or directory",
        "glfw/__init__.py:834: GLFWError: (65544) b'X11: The DISPLAY environment variable is missing'",
        "Some model parameters or buffers are not found in the checkpoint:",
        "| exit_timeout          | 30         |",
        "INFO:jax._src.xla_bridge:822: Unable to initialize backend 'tpu': INTERNAL: Failed to open libtpu.so",
        "ERROR: External init callback must run in same thread as registerClient (-1560304064 != 1860134720)",
        '{"level":"ERROR","msg":"dialing: google: could not find default credentials"}',
        "`use_cache=True` is incompatible with gradient checkpointing. Setting `use_cache=False`...",
        "If error occurs - run training with flag: -dont_show",
        'HTTP Request: HEAD https://huggingface.co/gpt2/resolve/main/chat_template.jinja "HTTP/1.1 404 Not Found"',
        "async-timeout             4.0.3                    pypi_0    pypi",
        "MailUser=ana@lab.org MailType=END,FAIL",
        "Error: 1.4249672553034998e-09",
        "/data/images/cat136.jpg",
        "Failed processes: 0",
        "Checkpoint tracker file does not exist: /data/checkpoints/latest_checkpointed_iteration.txt",
        "Run 3 Error: [Errno 2] No such file or directory: 'a.pt', This run will be skipped.",
        "CREST terminated normally.",
        "|        - Board Limit (%)           | Not Supported                           |",
        "[ERROR ANALYSIS] SENTIMENT:",
        "non-resource variables are not supported in the long term",
        "[W706 PGGloo.cpp:524] Unable to resolve hostname to a (local) address. Using the loopback address as fallback.",
        "CUDA extension for cauchy multiplication not found. This should speed up end-to-end training by 10-50%",
    ],
)
def test_words_that_only_look_like_trouble_hide_no_health(line):
    output = "".join(f"sample {n} was written\n" for n in range(60))
    assert verdict(output + line + "\n" + output).cause == "healthy"
    assert verdict(output + line + "\n").cause == "healthy"


def test_a_package_that_could_not_be_imported_under_a_warning_is_optional():
    warned = "Warning: Flow failed to import. Set D4RL_SUPPRESS_IMPORT_ERROR=1 to suppress this message.\nNo module named 'flow'\n"
    assert verdict(warned + "".join(f"sample {n} was written\n" for n in range(60))).cause == "healthy"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("***** Running training *****\n  Num Epochs = 0\n  Total optimization steps = -1\n0it [00:00, ?it/s]\n", "config-error"),
        ("ValueError: in user code:\n\n    ValueError: Input 0 of layer pool is incompatible with the layer: expected ndim=4\n",
         "shape-mismatch"),
        ("tensorflow.errors.NotFoundError: Key LSTM2/bias not found in checkpoint\n", "state-dict-mismatch"),
        (" * Running on all addresses (0.0.0.0)\n * Running on http://127.0.0.1:5000\nPress CTRL+C to quit\n", "healthy"),
        ("slurm_script: line 98: syntax error: unexpected end of file\n", "user-code-exception"),
        (f"{'/long' * 40}/job.sim: line 54: 2449926 Killed    ./run\nmv: cannot stat 'x': No such file or directory\n",
         "host-oom-killed"),
        ("TimeoutError: timed out waiting for '[draft-daemon] ready'; tail=['Device 0: compute capability 8.6, VMM: yes']\n",
         "worker-start-timeout"),
        ("TypeError: cat() received an invalid combination of arguments - got (Tensor, dim=int), but expected one of:\n",
         "user-code-exception"),
        ("[ERROR] [launch.py:321:sigkill_handler] ['python', 'a.py', '--local_rank=3'] exits with return code = 1\n", "unknown"),
    ],
)  # fmt: skip
def test_shells_launchers_and_empty_trainings_are_known(text, cause):
    assert verdict(text).cause == cause


def test_a_field_of_a_summary_that_was_never_computed_is_no_loss():
    text = "eval_avg_loss_per_sentence=1.62\neval_avg_loss_per_word=nan\nbest_loss_mean=1.63\nactual_iterations=86\n"
    assert verdict(text).cause != "loss-nan"


def test_a_run_that_stands_at_a_debugger_s_prompt_is_not_healthy():
    stops = "> /work/reward.py(53)score()\n-> row = rows[i]\n(Pdb) \n"
    assert verdict(STEPS + "100%|##########| 105/105 [00:00<?, ?it/s]\n" + stops).cause == "unknown"
    assert verdict(STEPS + stops + STEPS).cause == "healthy"


def test_the_steps_that_ranks_still_report_after_the_scheduler_cancelled_them_are_no_health():
    bar = "\n".join(f"  3%|3         | {n}/4545 [06:49<3:01:16,  2.48s/it]" for n in range(155, 166))
    cancelled = "  3%|3         | 154/4545 [06:47<3:04:04,  2.52s/it]slurmstepd: error: *** STEP 42.0 ON n1 CANCELLED AT 9 ***\n"
    assert verdict(STEPS + cancelled + bar + "\n").cause == "slurm-cancelled"


def test_what_python_ignored_at_the_very_end_of_a_log_is_no_failure():
    ignored = (
        "Exception ignored in atexit callback: <function save at 0x7f4c0bd832e0>\nTraceback (most recent call last):\n"
    )
    frames = "".join(f'  File "save.py", line {n}, in save\n    save(path)\n' for n in range(7))
    end = "FileNotFoundError: [Errno 2] No such file or directory: 'a.tmp' -> 'a'\n"
    assert verdict(STEPS + ignored + frames + end).cause == "healthy"
    assert verdict(STEPS + frames.replace("in save", "in <module>") + end).cause != "healthy"


def test_what_a_tracker_could_not_find_out_about_the_environment_is_no_failure():
    saving = "ERROR [system_info.py:218] Error saving conda packages: [Errno 2] No such file or directory: 'conda'\n"
    frame = (
        '  File "/venv/site-packages/wandb/sdk/internal/system/system_info.py", line 214, in _save_conda\n    call(\n'
    )
    inner = '  File "/usr/lib/python3.12/subprocess.py", line 1704, in _execute_child\n    raise child_exception_type\n'
    end = "FileNotFoundError: [Errno 2] No such file or directory: 'conda'\n"
    text = f"{saving}Traceback (most recent call last):\n{frame}{inner}{end}"
    assert verdict(text + "".join(f"file {n} was saved\n" for n in range(60))).cause == "healthy"
    own = text.replace("/venv/site-packages/wandb/sdk/internal/system/", "")
    assert verdict(own + "".join(f"file {n} was saved\n" for n in range(60))).cause == "system-tool-missing"


def test_a_short_log_that_only_announces_work_does_not_show_that_it_was_done():
    began = "".join(f"set-up {n}\n" for n in range(12))
    ends = [
        "--- Epoch 1/3 ---",
        "Optimizer: Adam",
        "{'state_shape': 48, 'obs_shape': 30}",
        "Retrying in 1s [Retry 1/5].",
        "...",
    ]
    assert [verdict(f"{began}{end}\n").cause for end in ends] == ["unknown"] * len(ends)
    assert verdict(began + "--- Epoch 1/3 ---\n" * 3).cause == "unknown"
    assert verdict(began + "{'accuracy': 0.91, 'f1': 0.88}\n").cause == "healthy"
    assert verdict(began + "Testing completed\n").cause == verdict(began + "set-up 12\n").cause == "healthy"
    assert verdict(began * 5 + "Optimizer: Adam\n").cause == "healthy"
    monitor = [
        "| Processes:      |",
        "|  GPU   GI   CI        PID   Type   Process name |",
        "|=====================|",
        f"+{77 * '-'}+",
    ]
    assert (
        verdict("\n".join(["disabled", *monitor, "|  No running processes found   |", "renamed"]) + "\n").cause
        == "unknown"
    )


def test_an_uncaught_error_below_a_warning_was_not_logged_by_it():
    warned = "WARNING:absl:cache miss\nTraceback (most recent call last):\n"
    frame = '  File "train.py", line 9, in <module>\n    main()\n'
    oom = "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    assert verdict(warned + frame + oom + "allocation\n" * 90).cause == "cuda-oom"
    assert verdict(warned + frame.replace("<module>", "step") + oom + "allocation\n" * 90).cause == "unknown"


def test_a_hole_of_zeros_in_a_log_is_not_utf_16():
    error = "ConnectionError: Tried to launch distributed communication on port `29500`, but another process is utilizing it\n"
    text = ("output\n" * 300 + error).encode() + b"\0" * 40_000 + b" done 2/6\n"
    assert [reach_verdict([read_log([raw])]).cause for raw in (text, error.encode("utf-16-le"))] == ["port-in-use"] * 2


def test_lines_behind_a_name_error_are_not_of_its_message():
    frame = 'Traceback (most recent call last):\n  File "eval.py", line 9, in <module>\n    main()\n'
    engine = "ERROR [core_client.py:667] Engine core proc EngineCore died unexpectedly, shutting down client.\n"
    explanation = verdict(f"{frame}NameError: name 'score' is not defined\n{engine}plots are made\n")
    assert explanation.cause == "user-code-exception" and explanation.summary.startswith(
        "NameError: name 'score' is not defined ("
    )


def test_a_shell_that_was_killed_was_no_program_that_ran_out_of_memory():
    assert verdict("test.sh: line 14: 5325 Killed              bash scripts/run.sh\n").cause == "killed-from-outside"
    assert verdict("test.sh: line 14: 5325 Killed              python train.py\n").cause == "host-oom-killed"


def test_a_worker_whose_parent_is_gone_read_no_checkpoint():
    frame = '  File "/usr/lib64/python3.9/multiprocessing/spawn.py", line 126, in _main\n'
    text = f"Traceback (most recent call last):\n{frame}_pickle.UnpicklingError: pickle data was truncated\n"
    assert verdict(text).cause == "killed-from-outside"


def test_what_bitsandbytes_does_not_find_stops_nothing_that_goes_on():
    failed = (
        "CUDA Setup failed despite CUDA being available. Please run the following command to get more information:\n"
    )
    assert verdict(failed).cause == "abi-mismatch"
    assert verdict(failed + "".join(f"sample {n} was written\n" for n in range(9))).cause == "healthy"


def test_ctrl_c_that_a_program_reports_each_time_ends_the_last_run():
    pressed = "2025-04-07 08:06:07 - INFO - You pressed Ctrl+C! Saving the model and exiting...\n"
    assert verdict((STEPS + pressed) * 3 + "Saving interrupted model...\n").cause == "keyboard-interrupt"


def test_lines_of_a_critical_level_are_no_ordinary_output():
    line = "[2026-02-28 22:54:45] [workload] [critical] workload file: /data/all_reduce.16.et does not exist\n"
    assert verdict(line * 20).cause == "dataset-missing"
    assert verdict("the cache folder does not exist\n" * 20).cause == "unknown"


def test_a_download_that_is_tried_again_and_then_works_is_no_failure():
    failed = "WARNING Download failure, retrying 1/3 https://github.com/x.pt... <urlopen error [Errno 110] Connection timed out>\n"
    assert verdict(failed).cause == "hub-offline"
    assert verdict(failed + "".join(f"sample {n} was written\n" for n in range(60))).cause == "healthy"


def test_a_file_that_an_earlier_program_of_the_script_had_to_write_is_not_what_is_missing():
    first = 'Traceback (most recent call last):\n  File "./translate.py", line 107, in <module>\n    main()\nAttributeError: {}\n'
    later = (
        'Traceback (most recent call last):\n  File "./{}.py", line 4, in <module>\n    read()\nFileNotFoundError: {}\n'
    )
    missing = "[Errno 2] No such file or directory: '/runs/en-es/hyp'"
    text = first.format("'Model' object has no attribute 'length'")
    assert verdict(text + later.format("score", missing)).summary.startswith("AttributeError")
    assert "AttributeError" not in verdict(text + later.format("translate", missing)).summary


def test_a_connection_that_fails_in_the_hub_s_library_is_the_hub_s():
    frame = '  File "/venv/lib/site-packages/{}/_http.py", line 63, in send\n    return super().send(request)\n'
    error = "requests.exceptions.ConnectionError: ('Connection aborted.', TimeoutError(110, 'Connection timed out'))\n"
    text = f"Traceback (most recent call last):\n{frame}{error}"
    assert verdict(text.format("huggingface_hub/utils")).cause == "hub-offline"
    others = ("qdrant_client", "transformers/integrations")
    assert [verdict(text.format(other)).cause for other in others] == ["service-unreachable"] * 2


def test_an_error_on_rank_0_is_no_count_of_errors():
    output = "".join(f"sample {n} was written\n" for n in range(60))
    assert verdict(f"{output}error on rank 0\n").cause == verdict(f"{output}failed rank: 0\n").cause == "unknown"


def test_an_error_with_nearly_every_item_up_to_the_end_is_no_good_end():
    refused = "[ERROR] HTTPConnectionPool(host='localhost', port=8080): Max retries exceeded with url: /v1 (Caused by"
    refused += " NewConnectionError('Failed to establish a new connection: [Errno 111] Connection refused'))\n"
    items = [f"Epoch 1/1 | Sample {at}/20" for at in range(20)]
    done = "Training complete!\n"
    assert verdict("".join(item + refused for item in items) + done + refused).cause == "service-unreachable"
    assert verdict("".join(f"{item}\n" for item in items) + refused * 3 + done).cause == "healthy"
    steps = "".join(f"step {step} loss {3 - step / 20:.2f}\n{refused}" for step in range(20))
    assert verdict(steps + done).cause == "healthy"
    many = "".join(f"Epoch 1/1 | Sample {at}/400{refused}" for at in range(400))
    assert verdict(many + done + refused).cause == "service-unreachable"


def test_make_that_ends_with_an_error_is_no_good_end():
    passed = "7 of 9 checks\nall tests passed\n"
    other = "".join(f"compiling {name}.cu\n" for name in range(40))
    assert verdict(f"make: *** [Makefile:96: apex] Error 2\n{other}{passed}").cause == "healthy"
    assert verdict(f"{passed}make: *** [Makefile:96: test] Error 2\n").cause == "unknown"
    assert verdict(f"{passed}make: [Makefile:96: clean] Error 1 (ignored)\nall tests passed\n").cause == "healthy"


def test_the_error_of_another_rank_is_not_that_of_the_rank_that_ended():
    error = "[rank0]: ERROR: eval metrics could not be sent\n"
    steps = "".join(f"[rank0]: step {step} loss {3 - step / 9:.2f}\n" for step in range(20))
    exited = "torchrun failed\n  rank      : 1 (local_rank: 1)\n  exitcode  : 3 (pid: 4711)\n"
    assert "eval metrics" not in verdict(steps + error + exited).summary
    assert "eval metrics" in verdict(steps + error.replace("rank0", "rank1") + exited).summary
    assert verdict(steps + error).rank == 0


@pytest.mark.parametrize(("rank", "step"), [(0, 5), (1, 3), (2, 5), (None, 5)])
def test_the_step_of_a_failure_is_the_last_one_of_its_rank_where_that_is_known(rank, step):
    logs = [Log(ranks=frozenset({r}), progress=LogProgress(last_step=last)) for r, last in ((0, 5), (1, 3))]
    assert step_of(rank, Record("signal", "killed", 1, rank=rank), logs, logs[0].progress) == step
    assert step_of(rank, Record("signal", "killed", 1, rank=rank, step=4), logs, logs[0].progress) == 4


def test_ranks_that_wait_for_one_another_are_named_with_their_places():
    def waiting(rank, line, name):
        lines = [
            "Traceback (most recent call last):",
            '  File "/home/ada/train.py", line 25, in <module>',
            "    main()",
            f'  File "/home/ada/train.py", line {line}, in {name}',
            "    dist.barrier()",
            '  File "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 5356, in barrier',
            "    work.wait()",
            "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 12000ms for recv operation to complete",
        ]
        return "".join(f"[rank{rank}]: {line}\n" for line in lines)

    places = "rank 0 waited at train.py:9 in save and rank 1 at train.py:17 in main"
    apart = verdict(waiting(0, 9, "save") + waiting(1, 17, "main"))
    assert apart.summary == f"ranks are out of sync, stuck or missing: recv did not complete in 12s; {places}"
    assert (apart.rank, apart.victims) == (None, ())
    assert f"in the same order: {places}; look" in apart.fix
    # of three ranks one is not there
    assert verdict(waiting(0, 9, "save") + waiting(1, 17, "main") + "[rank2]: step 3 loss 2.1\n").rank == 2
    summary = verdict(waiting(0, 9, "save") + waiting(1, 9, "save")).summary
    assert summary.endswith("; ranks 0 and 1 waited at train.py:9 in save")


def test_a_message_whose_first_line_ends_with_a_colon_is_quoted_with_the_next_line():
    log = (
        'Traceback (most recent call last):\n  File "/home/ada/train.py", line 9, in <module>\n    trainer.train()\n'
        "ValueError: GenerationConfig is invalid: \n- `temperature`: `do_sample` is not set to `True`.\n"
    )
    assert "GenerationConfig is invalid: - `temperature`: `do_sample` is not set" in verdict(log).summary


def test_a_training_of_transformers_that_took_no_step_is_not_healthy():
    log = (
        "  0%|          | 0/12 [00:00<?, ?it/s]\n"
        "{'train_runtime': 0.0007, 'train_samples_per_second': 0.0, 'train_loss': 0.0, 'epoch': 4.0}\n"
    )
    explanation = verdict(log)
    assert (explanation.cause, explanation.summary.partition(":")[0]) == ("unknown", "nothing was trained")


def test_epochs_that_all_ran_no_batch_are_an_empty_dataset_but_none_where_batches_were_left_out():
    def log(line, end="Training complete!"):
        return "".join(f"{line.format(n)}\n" for n in range(1, 5)) + f"{end}\n"

    logged = '{{"epoch": {}, "steps": %d, "event": "epoch end"}}'
    for line in (logged % 0, "Epoch {}/4 - avg loss: 0.0000 - 0 batches", "INFO epoch {} done, 0 batches trained"):
        explanation = verdict(log(line))
        assert (explanation.cause, explanation.confidence) == ("dataset-empty", 0.6)
        assert explanation.summary.startswith("nothing was trained")
    others = ("0 batches skipped", "dropped 0 batches", "validation: 0 batches", "10 batches", "0 batches too long")
    others = (
        *others,
        "train 100 batches, corrupted 0 batches",
        "oom batches: 0",
        "retried 0 batches",
        "overflow steps: 0",
    )
    trained = "Epoch {}/4 - avg loss: 0.7312 - 0 batches"
    for line in (logged % 7, trained, *(f"INFO epoch {{}} done, {other}" for other in others)):
        assert verdict(log(line)).cause == "healthy", line
    ranks = "step 4/40 loss 2.1\nstep 8/40 loss 1.9\n"
    assert verdict(ranks + log("epoch {} done, 0 batches")).cause == "healthy"
    assert verdict(log("epoch {} done, 0 batches", "epoch 5 done, 40 batches\nTraining complete!")).cause == "healthy"


def test_errors_for_which_every_step_was_skipped_were_not_survived():
    def log(numbers, error="mat1 and mat2 shapes cannot be multiplied (32x16 and 32x4)"):
        lines = "".join(f"2026-11-30 06:02:35,451 WARNING skipping batch {n}: {error}\n" for n in numbers)
        return f"{lines}INFO epoch 1 done\nTraining finished\n"

    assert verdict(log([*range(16), *range(16)])).cause == "shape-mismatch"
    oom = "CUDA out of memory. Tried to allocate 2.00 GiB"
    assert verdict(log(range(20), oom)).cause == "cuda-oom"
    for healthy in (
        log([3, 17, 19, 44, 60, 61, 75, 80, 93, 101, 130, 144]),  # the others printed nothing
        log(range(16)) + "val loss 0.31\n",
        log(range(16), "already trained before the checkpoint"),
        log(range(4)),
    ):
        assert verdict(healthy).cause == "healthy"


def test_errors_of_items_of_which_none_was_done_were_not_survived():
    def log(total, numbers):
        steps = [f"Processing: {at}%|##| {at}/200 [00:01<00:01, 1.1it/s]" for at in range(200)]
        for number in numbers:
            steps[number] += (
                f"\nclaim {number}\nError processing example {number}: CUDA out of memory. Tried to allocate 2 GiB"
            )
        return "\n".join([*steps, f"Processing completed. Total examples processed: {total}\n"])

    sparse = [number for number in range(200) if number % 10]
    assert verdict(log(0, sparse)).cause == "cuda-oom"
    assert verdict(log(20, sparse)).cause == verdict(log(20, sparse[:6])).cause == "healthy"


def test_the_end_of_a_training_may_be_marked_in_capitals():
    for line, is_end in (
        ("END TRAIN", True),
        ("--- End Training ---", True),
        ("END TRAIN STEP 3", False),
        ("END TRAINING DATA", False),
    ):
        assert read_log([f"step 1 loss 2.0\n{line}\n".encode()]).progress.finished == is_end, line


def test_a_healthy_log_has_a_note_on_evaluations_that_score_0():
    def notes(*lines):
        explanation = verdict(
            "".join(f"epoch {n} loss {2 / (n + 1):.4f}\n{lines[n % len(lines)]}\n" for n in range(10))
        )
        assert explanation.cause == "healthy"
        return explanation.notes

    score = "***** Eval results ***** exact_match = {0} f1 = {0}"
    assert "all 10 evaluations have a score of 0" in notes(score.format(0.0))[0]
    assert "all 10 evaluations have a score of 0" in notes("{'eval_loss': 1.2, 'eval_f1': 0.0}")[0]
    assert notes(score.format(0.0), score.format(0.31)) == notes(score.format(0.0), *["saved"] * 9) == ()


def test_a_rank_that_ended_did_not_go_on_with_the_steps_of_a_rank_that_then_lost_it():
    steps = "".join(f"[eval rank 0] step {step}/90 acc 0.5{step}\n" for step in range(9))
    bug = raised(1, BUG).replace("in main", "in <module>")
    lost = raised(0, PEER).replace("in main", "in <module>")
    explanation = verdict(steps + bug + steps + lost)
    assert (explanation.cause, explanation.rank) == ("user-code-exception", 1)
    assert verdict(f"{steps}{bug}{lost}{steps}training finished\n").cause == "healthy"  # started again


def test_a_rank_that_only_lost_another_one_did_not_abort():
    abort = "terminate called after throwing an instance of 'std::runtime_error'\n  what():  corrupt record at offset 4096\n"
    explanation = verdict(STEPS + abort + raised(0, PEER))
    assert (explanation.cause, explanation.rank) == ("native-abort", None)
    assert verdict(STEPS + raised(0, BUG) + abort).rank == 0


def test_what_fails_while_a_rank_handles_a_lost_rank_is_a_consequence():
    chain = "[rank0]: During handling of the above exception, another exception occurred:\n\n"
    second = raised(0, "ModuleNotFoundError: No module named 'pymsteams'")
    explanation = verdict(STEPS + raised(1, BUG) + raised(0, PEER) + "\n" + chain + second)
    assert (explanation.cause, explanation.rank, explanation.victims) == ("user-code-exception", 1, (0,))
    assert verdict(STEPS + raised(0, PEER) + "\n" + chain + second).cause == "peer-died"
    assert verdict(STEPS + raised(0, BUG) + "\n" + chain + second).cause == "import-error"  # nobody was lost
    full = verdict(STEPS + raised(0, PEER) + "\n" + chain + raised(0, "OSError: [Errno 28] No space left on device"))
    assert (full.cause, full.rank, [item.rank for item in full.consequences]) == ("disk-full", 0, [0])
    cuda = "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled cuda error"  # lost nobody
    assert verdict(STEPS + raised(0, cuda) + "\n" + chain + raised(0, OOM) + raised(1, PEER)).cause == "cuda-oom"
    store = "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed."
    agent = chain.replace("[rank0]: ", "") + raised(
        None,
        "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store failed",
    )
    assert verdict(raised(1, BUG), raised(0, PEER) + raised(None, store) + "\n" + agent).rank == 1
    assert verdict(STEPS + raised(0, PEER) + raised(None, store) + "\n" + agent).cause == "peer-died"


def test_the_exception_in_a_distributed_checkpoints_report_and_its_rank_are_the_cause():
    wrapper = "torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([1])"
    inner = raised(0, BUG).replace("last):", "last): (RANK 1)")
    explanation = verdict(STEPS + raised(0, wrapper) + inner)
    assert (explanation.cause, explanation.rank) == ("user-code-exception", 1)
    assert verdict(STEPS + raised(0, wrapper)).cause == "fsdp-state-mismatch"


def test_the_last_error_that_a_rank_logged_before_it_ended_silently_is_the_cause():
    said = "2026-11-30 18:23:51,370 CRITICAL [rank 2] giving up: shard index 17 is negative\n"
    end = (
        raised(0, PEER) + raised(1, PEER) + "E 9 torch/elastic/api.py:9] failed (exitcode: 1) local_rank: 2 (pid: 4)\n"
    )
    steps = "".join(f"[rank {rank}] step {step} loss 2.{step}\n" for step in range(1, 4) for rank in range(3))
    explanation = verdict(steps + said + end)
    assert (explanation.cause, explanation.rank) == ("user-code-exception", 2)
    assert "giving up: shard index 17 is negative" in explanation.summary
    assert verdict(said + steps + end).cause == "unknown"  # the rank took steps behind it
    others = "".join(f"[rank 0] step {step} loss 2.{step}\n" for step in range(4, 9))
    assert verdict(steps + said + others + end).cause == "unknown"  # the ranks went on for long
    without = said.replace("giving up: shard index 17 is negative", "no fused kernel, using the slow path")
    assert verdict(steps + without + end).cause == "unknown"
    assert verdict(steps + said.replace("rank 2", "rank 1") + end).cause == "unknown"


def test_the_error_that_the_late_rank_alone_logged_is_quoted():
    steps = "".join(f"[rank {rank}] step {step} loss 2.{step}\n" for step in range(1, 4) for rank in range(2))
    said = "ERROR [rank {}] prefetch thread stopped: ValueError('negative dimension')\n"
    late = steps + said.format(1) + raised(0, WAIT)
    assert "only rank 1 reports: prefetch thread stopped: ValueError" in verdict(late).summary
    assert "prefetch" not in verdict(late.replace(said.format(1), said.format(0) + said.format(1))).summary


def test_torchruns_own_signal_in_the_rest_of_its_report_is_no_signal_from_outside():
    report = "  traceback : Signal 15 (SIGTERM) received by PID 30977\n" + banner(3, 1).partition("-\nRoot")[2]
    explanation = verdict("  error_file: <N/A>\n" + report.replace(" Cause", "Root Cause", 1))
    assert (explanation.cause, explanation.rank) == ("unknown", 3)
    assert (
        verdict("step 1 loss 2\n  traceback : Signal 15 (SIGTERM) received by PID 30977\n").cause == "preempted-sigterm"
    )


def test_what_ranks_printed_behind_the_shells_report_of_their_killed_launcher_is_no_next_run():
    start = "W1130 18:22:25.723 24 torch/distributed/run.py:874] Setting OMP_NUM_THREADS environment variable for each process\n"
    killed = "cmd.sh: line 1: 24468 Killed                  {}torchrun --nproc-per-node 2 train.py\n"
    limited = verdict(start + killed.format("timeout -s KILL 25 ") + STEPS)
    assert (limited.cause, limited.rank) == ("killed-from-outside", None)
    assert verdict(start + killed.format("") + STEPS).cause == "host-oom-killed"
    assert verdict(start + killed.format("") + start + STEPS).cause == "healthy"  # started again
    table = "| NVIDIA-SMI 550.54.15   Driver Version: 550.54.15 |\n"
    done = "step 10/40 loss 1.6\nTraining complete\n"
    for first in (table, "wandb: Tracking run with wandb version 0.16\n", start):  # a benchmark that went before
        assert verdict(first + killed.format("") + STEPS + done).cause == "healthy"
    path = f"{STEPS}/data/bob's/run.sh: line 4: 3344 Killed                  python train.py\n{STEPS}{done}"
    assert verdict(path).progress.steps == 11  # of the second run
    for end in ("", "done\n"):  # of the script
        assert verdict(start + killed.format("") + STEPS + end).cause == "host-oom-killed"


AGENT = "W0819 12:00:00.000 100 torch/distributed/elastic/multiprocessing/api.py:858] "
TORCHRUN = AGENT.replace("W", "E", 1) + "failed (exitcode: {}) local_rank: {} (pid: 10{}) of binary: python\n"
TWO_RANKS = "".join(f"[rank{rank}]: step {step} loss 2.{step}\n" for step in range(1, 9) for rank in range(2))


def test_the_launchers_rank_is_kept_unless_an_error_is_there_once_for_each_rank_that_failed():
    error, end = raised(None, "IndexError: list index out of range"), TORCHRUN.format(1, 1, 2)
    assert verdict(TWO_RANKS + error + "Exiting\n" + error + end).rank == 1  # logged and raised again
    both = end + banner(1, 1, (0, 1))
    assert verdict(TWO_RANKS + error + error + both).rank is None
    assert verdict(TWO_RANKS + 3 * (error + "retry\n") + both).rank == 1


def test_a_worker_that_a_signal_ended_behind_an_error_or_a_hang_is_not_the_cause():
    stop = AGENT + "Sending process 10{} closing signal SIGTERM\n"
    end = stop.format(2) + TORCHRUN.format(-15, 0, 1)
    explanation = verdict(TWO_RANKS + raised(1, "IndexError: list index out of range") + end)
    assert (explanation.cause, explanation.rank) == ("user-code-exception", 1)
    interrupt = verdict(TWO_RANKS + "KeyboardInterrupt\n" + end)
    assert (interrupt.cause, interrupt.confidence) == ("keyboard-interrupt", 0.88)
    outside = verdict(TWO_RANKS + raised(1, PEER) + end)
    assert (outside.cause, outside.rank, outside.confidence) == ("preempted-sigterm", 0, 0.6)
    work = (
        "WorkNCCL(SeqNum=40, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600010 milliseconds"
    )
    watchdog = f"[rank0]:[E ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: {work}\n"
    hang = verdict(TWO_RANKS + watchdog + stop.format(1) + stop.format(3) + TORCHRUN.format(-15, 1, 2))
    assert (hang.cause, hang.rank) == ("collective-timeout-desync", 1)


def test_a_log_that_ends_while_lightnings_ranks_join_is_not_healthy():
    joined = "Initializing distributed: GLOBAL_RANK: {}, MEMBER: {}/2\n"
    assert verdict("Seed set to 1\nGPU available: False, used: False\n" + joined.format(0, 1)).cause == "unknown"
    assert verdict(joined.format(0, 1) + joined.format(1, 2) + STEPS).cause == "healthy"


def test_a_spawned_process_that_ended_itself_is_the_rank_unless_another_error_says_more():
    end = raised(None, "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with exit code 7")
    end = end.replace("in main", "in <module>")
    explanation = verdict(STEPS + end)
    assert (explanation.cause, explanation.rank, "exit code 7" in explanation.summary) == (
        "user-code-exception",
        1,
        True,
    )
    assert "sample 1841" in verdict(STEPS + raised(1, BUG) + end).summary


def test_a_programs_own_sentence_about_what_it_killed_is_no_report_of_a_shell():
    steps = "Killed 3 zombie workers left by the previous run\n" + STEPS
    assert (verdict(steps).cause, verdict(steps).notes) == ("healthy", ())
    assert verdict(STEPS + "Killed\n").cause == "host-oom-killed"
    assert verdict(STEPS + "run.sh: line 3: 4411 Killed                  python train.py\n").cause == "host-oom-killed"


EPOCHS = tuple(f"epoch {n} loss {2 / n:.3f}\n" for n in range(1, 7))
FULL = "[Errno 28] No space left on device"


@with_rows("saves, cause", [
    ([f"warning: checkpoint not saved: {FULL}: 'ck.pt'"] * 6, "disk-full"),
    ([f"aviso: no se pudo guardar el punto de control: {FULL}"] * 6, "disk-full"),
    ([f"OSError: {FULL}: 'ck.pt'"] * 6, "disk-full"),
    (["saved ck.pt", *[f"save failed: {FULL}"] * 5], "disk-full"),
    (["", "", "", "", "", f"could not write the model: {FULL}"], "disk-full"),
    (["WARNING could not save checkpoint: Parent directory /none does not exist."] * 6, "checkpoint-missing-or-perm"),
    (["saved ck.pt", f"checkpoint not saved: {FULL}"] * 3, "healthy"),  # two were saved behind it or before it
    (["saved ck.pt", f"checkpoint not saved: {FULL}", *["saved ck.pt"] * 4], "healthy"),
    ([f"checkpoint not saved: {FULL}", *["saved ck.pt"] * 5], "healthy"),
    (["could not save the plot: no display"] * 6, "healthy"),
    (["saved the model", *["Not saving the model: val loss did not improve"] * 5], "healthy"),
    (["saved the model", *["the model is not saved, it is not better"] * 5], "healthy"),
])  # fmt: skip
def test_a_run_whose_last_checkpoints_were_all_not_saved_has_failed(saves, cause):
    log = "".join(f"{epoch}{save}\n" for epoch, save in zip(EPOCHS, saves, strict=True))
    assert verdict(f"{log}training complete\n").cause == cause


@with_rows("end, cause", [
    ("Fehler: Datei 'daten/teil_6.npz' wurde nicht gefunden. Training abgebrochen.", "dataset-missing"),
    ("mittlerer Fehler: 0.31", "healthy"),
    ("Erreur : fichier lot_3.npz introuvable, arrêt de l'entraînement", "unknown"),
    ("Erro: o treinamento foi interrompido", "unknown"),
    ("Ошибка: не удалось прочитать файл, обучение прервано", "unknown"),
    ("エラー: 学習データ train_3.csv が見つかりません。", "dataset-missing"),
    ("异常: 显存不足, 无法分配 2.0GB, 程序退出", "cuda-oom"),
    ("警告: 显存不足时会自动减小批次", "healthy"),
    ("오류: 학습을 중단합니다", "unknown"),
    ("giving up", "healthy"),
    ("Val-Verlust nicht besser, Zwischenstand nicht gespeichert", "healthy"),
    ("NOT OK", "unknown"),
    ("stage 2 err 0.5", "healthy"),
])  # fmt: skip
def test_the_last_line_tells_of_an_error_in_any_language(end, cause):
    assert verdict(f"{''.join(EPOCHS)}{end}\n").cause == cause


def test_one_member_of_a_job_that_failed_is_named_whatever_the_others_do():
    def log(*ends):
        return (
            "".join(f"[task {n}] epoch 0 loss 0.9\n[task {n}] {end}\n" for n, end in enumerate(ends)) + "array done\n"
        )

    good, error = "epoch 1 loss 0.4", "Error: label file for seed 1 has 0 rows"
    explanation = verdict(log(good, error, good, good))
    assert (explanation.cause, explanation.line) == ("dataset-empty", 4)
    assert verdict(log(good, good, good, good)).cause == "healthy"
    assert verdict(log(good, f"{error}\n[task 1] {good}", good, good)).cause == "healthy"


@with_rows("log, cause", [
    (f"{''.join(EPOCHS)}trainer-1 exited with code 0\nAborting on container exit...\n", "healthy"),
    (f"{''.join(EPOCHS)}trainer-1 exited with code 3\nAborting on container exit...\n", "unknown"),
])  # fmt: skip
def test_a_container_that_ends_well_is_no_failure_of_compose(log, cause):
    assert verdict(log).cause == cause


@with_rows("line, cause", [
    ("checkpoint step 400 is corrupt (bad magic)\nno usable checkpoint, nothing to resume; exit", "checkpoint-corrupt"),
    ("[!all_pieces.empty()] Vocabulary size too high (8000). Please set it to a value <= 5511.", "config-error"),
    ("fit ended: `ModelCheckpoint(monitor='val_los')` could not find the monitored key in the metrics", "config-error"),
    ('{"level": "error", "msg": "trainer crashed", "error": "KeyError: \'user_id\'"}', "user-code-exception"),
    ('{"level": "info", "msg": "epoch", "epoch": 7, "loss": 0.2, "error": ""}', "healthy"),
    ("embedded 0 docs, 50 failed", "unknown"),
    ("[12/01/2025-10:00:00] [E] [TRT] Error Code 1: Cuda Runtime (out of memory)", "cuda-oom"),
])  # fmt: skip
def test_what_the_last_line_says(line, cause):
    log = "" if line.startswith("embedded") else "".join(EPOCHS)
    assert verdict(f"{log}{line}\n").cause == cause


def test_a_warning_of_torch_that_it_computes_on_the_cpu_is_not_the_cause_of_another_exception():
    warning = (
        "torch/cuda/__init__.py:141: UserWarning: CUDA initialization: The NVIDIA driver on your system is too old (found "
        "version 11040).\n  return torch._C._cuda_getDeviceCount() > 0\ncpu\n"
    )

    def cause(error):
        return verdict(warning + raised(None, error).replace("in main", "in <module>")).cause

    assert cause("torch._C._LinAlgError: torch.linalg.solve: the input matrix is singular.") == "user-code-exception"
    assert cause("RuntimeError: No CUDA GPUs are available") != "user-code-exception"


def test_settings_that_wandb_logs_are_no_losses():
    line = (
        "2023-12-26 01:41:{:02},980 INFO    MainThread:84937 [wandb_run.py:_config_callback():1342] config_cb opt {}\n"
    )
    settings = "{'weights': 'yolov7.pt', 'hyp': {'lr0': 0.01, 'loss_ota': 1}, 'epochs': 300, 'batch_size': 16}"
    assert verdict("".join(line.format(n, settings) for n in range(40))).cause == "unknown"
