"""Frames: whose code is wrong, that the folder for an output is missing, and what a program caught."""

import pytest
from log_samples import OOM, prefixed, raised

from paceline.explain.run_folder import explain

PACKAGE = "/env/lib/python3.11/site-packages"
MISSING = "FileNotFoundError: [Errno 2] No such file or directory: 'out/weights/model.pt'"


def verdict(text):
    return explain([text.encode()])


def traceback(error, *frames, statement="run()"):
    places = "".join(f'  File "{file}", line 3, in {name}\n    {statement}\n' for file, name in frames)
    return f'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    main()\n{places}{error}\n'


@pytest.mark.parametrize("log", [
    traceback(MISSING, ("train.py", "main"), statement="with open(path, 'wb') as file:"),
    traceback(MISSING, (f"{PACKAGE}/joblib/numpy_pickle.py", "dump"), statement="with open(filename, 'wb') as f:"),
    traceback(MISSING, (f"{PACKAGE}/nibabel/filebasedimages.py", "to_filename"), *[("openers.py", "__init__")] * 5),
    traceback(MISSING, (f"{PACKAGE}/torch/serialization.py", "save"), (f"{PACKAGE}/torch/serialization.py", "__init__")),
    traceback(MISSING, ("/usr/lib/python3.11/pathlib.py", "write_text"), ("/usr/lib/python3.11/pathlib.py", "open")),
    traceback(MISSING, ("/usr/lib/python3.11/logging/__init__.py", "_open")),
])  # fmt: skip
def test_a_file_that_cannot_be_written_lacks_its_folder(log):
    explanation = verdict(log)
    assert explanation.cause == "user-code-exception"
    assert "os.makedirs" in explanation.fix


def test_a_file_that_cannot_be_read_is_missing():
    log = traceback(MISSING, ("train.py", "main"), statement="with open(path, 'rb') as file:")
    assert verdict(log).cause == "checkpoint-missing-or-perm"


def test_one_client_at_the_store_is_the_master_alone_only_to_torchrun_s_agents():
    error = "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 1/4 clients joined."
    agent = f"{PACKAGE}/torch/distributed/elastic/rendezvous/static_tcp_rendezvous.py"
    assert verdict(traceback(error, (agent, "next_rendezvous"))).cause == "master-unreachable"
    assert (
        verdict(traceback(error, (f"{PACKAGE}/torch/distributed/rendezvous.py", "_create_c10d_store"))).cause
        == "collective-timeout-desync"
    )
    assert "2/4 clients joined" in verdict(error.replace("1/4", "2/4")).summary


def test_a_batch_whose_worker_is_gone_is_a_worker_that_died():
    sharer = "/usr/lib/python3.11/multiprocessing/resource_sharer.py"
    error = "FileNotFoundError: [Errno 2] No such file or directory"
    log = traceback(
        error,
        (f"{PACKAGE}/torch/utils/data/dataloader.py", "_try_get_data"),
        (sharer, "get_connection"),
        ("/usr/lib/python3.11/multiprocessing/connection.py", "Client"),
    )
    assert verdict(log).cause == "dataloader-worker-killed"
    assert verdict(log.replace("/utils/data/", "/queues/")).cause != "dataloader-worker-killed"


def test_a_worker_that_windows_could_not_start_has_its_error_elsewhere():
    spawn = "C:\\env\\lib\\multiprocessing\\popen_spawn_win32.py"
    log = traceback("BrokenPipeError: [Errno 32] Broken pipe", (spawn, "__init__"), ("C:\\env\\reduction.py", "dump"))
    assert verdict(log).cause == "dataloader-worker-killed"


def test_an_error_of_tensorflow_that_only_says_that_a_graph_failed_is_not_the_cause():
    error = "tensorflow.python.framework.errors_impl.UnknownError: Graph execution error:"
    reason = (
        "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce"
    )
    log = (
        traceback(error, ("train.py", "main"))
        + f"\nDetected at node 'x' defined at (most recent call last):\n{reason}\n"
    )
    assert verdict(log).cause == "peer-died"
    assert verdict(log.replace(reason, "Input is empty.")).cause == "user-code-exception"


def test_the_name_of_a_model_that_only_the_users_own_table_lacks_is_no_mismatch_of_versions():
    own = traceback("KeyError: 'gemma-7-9b'", ("main.py", "batch_size"))
    torch = "TypeError: ReduceLROnPlateau.__init__() got an unexpected keyword argument 'verbose'"
    assert verdict(traceback(torch, ("train.py", "schedule"))).cause == "version-mismatch"
    package = traceback(
        "KeyError: 'gemma7'", (f"{PACKAGE}/transformers/models/auto/configuration_auto.py", "__getitem__")
    )
    assert verdict(own).cause == "user-code-exception"
    assert verdict(package).cause == "version-mismatch"


def test_an_argument_that_an_environment_of_gym_does_not_have_is_one_of_the_configuration():
    make = (f"{PACKAGE}/gym/envs/registration.py", "make")
    error = "TypeError: __init__() got an unexpected keyword argument '{}'"
    assert verdict(traceback(error.format("map_name"), make)).cause == "config-error"
    assert verdict(traceback(error.format("render_mode"), make)).cause == "version-mismatch"


@pytest.mark.parametrize(("file", "name", "cause"), [
    ("hydra/_internal/instantiate/_instantiate2.py", "_call_target", "config-error"),
    ("skorch/net.py", "initialized_instance", "config-error"),
    ("skorch/net.py", "fit", "version-mismatch"),
    ("hydra/core/plugins.py", "_call_target", "version-mismatch"),
])  # fmt: skip
def test_an_argument_that_a_configuration_adds_to_a_class_is_one_of_the_configuration(file, name, cause):
    error = "TypeError: Linear.__init__() got an unexpected keyword argument 'hidden'"
    assert verdict(traceback(error, ("train.py", "main"), (f"{PACKAGE}/{file}", name))).cause == cause


def test_an_exception_while_a_request_is_answered_ends_no_server():
    error = raised(None, "BrokenPipeError: [Errno 32] Broken pipe", file="/usr/lib/python3.8/socketserver.py")
    error = error.replace("in main", "in process_request_thread")
    log = "Exception happened during processing of request from ('10.0.0.7', 41134)\n" + error + "-" * 40 + "\n"
    served = '10.0.0.7 - - [30/Mar/2026 00:20:48] "GET /a.png HTTP/1.1" 200 -\n'
    assert verdict(served * 9 + log + served * 2).cause == "healthy"


def test_a_class_of_the_users_own_lacks_an_attribute_whatever_is_installed():
    own = traceback("AttributeError: type object 'RowReader' has no attribute 'columns'", ("rows.py", "read"))
    assert verdict(own).cause == "user-code-exception"
    assert verdict(own.replace("RowReader", "AutoTokenizer")).cause == "version-mismatch"


@pytest.mark.parametrize(
    ("module", "file", "cause"),
    [
        ("datasets", "datasets/text.py", "import-error"),
        ("random", "random.py", "import-error"),
        ("datasets", "lib/datasets/text.py", "version-mismatch"),  # not beside the script, so not imported by this name
        ("megatron", "megatron/core.py", "version-mismatch"),  # a clone's own, which is meant to be there
        ("utils", "utils/text.py", "user-code-exception"),  # of no package: the user's own lacks the name
    ],
)
def test_a_folder_beside_the_script_with_the_name_of_a_package_hides_it(module, file, cause):
    explanation = verdict(
        traceback(f"AttributeError: module '{module}' has no attribute 'load_dataset'", (file, "read"))
    )
    assert explanation.cause == cause
    assert ("rename the file or folder of your own" in explanation.fix) == (cause == "import-error")


def test_what_ends_a_command_of_a_tracker_is_its_end():
    error = "wandb.errors.errors.UsageError: API key cannot start or end with whitespace"
    frames = ((f"{PACKAGE}/wandb/cli/cli.py", "login"), (f"{PACKAGE}/wandb/sdk/wandb_settings.py", "_validate"))
    log = traceback(error, *frames).replace('  File "train.py", line 9, in <module>\n    main()\n', "")
    assert verdict(log).cause == "wandb-login"
    steps = "step 1 loss 2.1\nstep 2 loss 1.9\n"
    assert verdict(steps + log.replace("/cli/cli.py", "/sdk/internal/sender.py")).cause != "wandb-login"


def test_an_argument_that_the_forward_of_the_user_s_own_module_lacks_is_a_mistake_in_the_script():
    error = "TypeError: forward() got an unexpected keyword argument 'input_ids'"
    module = f"{PACKAGE}/torch/nn/modules/module.py"
    called = ((module, "_wrapped_call_impl"), (module, "_call_impl"))
    assert verdict(traceback(error, ("train.py", "main"), *called)).cause == "user-code-exception"
    parallel = ((f"{PACKAGE}/torch/nn/parallel/distributed.py", "forward"), (module, "_call_impl"))
    assert verdict(traceback(error, ("train.py", "main"), *called, *parallel)).cause == "user-code-exception"
    llama = error.replace("forward()", "LlamaForCausalLM.forward()")
    assert verdict(traceback(llama, ("train.py", "main"), *called)).cause == "version-mismatch"
    of_package = (f"{PACKAGE}/peft/peft_model.py", "forward")
    assert verdict(traceback(error, ("train.py", "main"), *called, of_package, *called)).cause == "version-mismatch"


def test_a_member_that_the_user_s_own_module_never_set_is_no_difference_between_versions():
    getattr_frame = (f"{PACKAGE}/torch/nn/modules/module.py", "__getattr__")
    missing = "AttributeError: '{}' object has no attribute 'mixing'"
    own = traceback(missing.format("AlignmentForGeneration"), ("/home/me/net.py", "forward"), getattr_frame)
    assert verdict(own).cause == "user-code-exception"
    library = traceback(missing.format("LlamaForCausalLM"), ("/home/me/net.py", "forward"), getattr_frame)
    assert verdict(library).cause == "version-mismatch"
    method = traceback(
        "TypeError: Learner.save() got an unexpected keyword argument 'end'", ("/home/me/runner.py", "run")
    )
    assert verdict(method).cause == "user-code-exception"
    gym = traceback(
        "TypeError: TimeLimit.reset() got an unexpected keyword argument 'seed'", ("/home/me/runner.py", "run")
    )
    assert verdict(gym).cause == "version-mismatch"


def test_a_traceback_whose_message_is_said_to_have_ended_the_training_is_the_outcome():
    steps = "".join(f"step {step}/10 loss: {3 - step / 9:.3f}\n" for step in range(10))
    error = traceback("ValueError: Unable to create dataset (name already exists)", ("h5py/h5d.pyx", "create"))
    done = "cleaning up\n" * 20 + "Exit code: 0 SUCCESS\ntraining completed successfully!\n"
    said = "x ConvNet training failed: Unable to create dataset (name already exists)\n"
    handled = error.replace("<module>", "train")  # somebody caught it
    assert verdict(steps + handled + said + done).cause == "user-code-exception"
    assert verdict(steps + handled + done).cause == "healthy"


def test_a_function_that_was_passed_to_a_package_is_the_user_s_own():
    error = "TypeError: reward_len() got an unexpected keyword argument 'prompts'"
    trainer = (f"{PACKAGE}/trl/trainer/grpo_trainer.py", "_calculate_rewards")
    explanation = verdict(traceback(error, trainer, statement="rewards = reward_func("))
    assert explanation.cause == "user-code-exception"
    assert "**kwargs" in explanation.fix
    others = ("outputs = func(self, *args, **kwargs)", "attn_output = attention_interface(", "return (", "y = pad(x)")
    for statement in ("rewards = reward_len(prompts)", *others):
        assert verdict(traceback(error, trainer, statement=statement)).cause == "version-mismatch"


def test_a_text_that_is_no_json_is_blamed_on_who_reads_it():
    error = "json.decoder.JSONDecodeError: Expecting ',' delimiter: line 1 column 13 (char 12)"
    json = [("/usr/lib/python3.11/json/__init__.py", "loads"), ("/usr/lib/python3.11/json/decoder.py", "decode")]
    own = verdict(traceback(error, ("data.py", "__getitem__"), *json))
    assert own.cause == "user-code-exception"
    assert "data.py:3 in __getitem__" in own.fix
    assert "line 1 column 13" in own.fix
    assert verdict(traceback(error, (f"{PACKAGE}/datasets/load.py", "read"), *json)).cause != "user-code-exception"


def test_a_child_that_sets_the_start_method_again_runs_a_script_without_guard():
    error = "RuntimeError: context has already been set"
    context = ("/usr/lib/python3.11/multiprocessing/context.py", "set_start_method")
    spawn = ("/usr/lib/python3.11/multiprocessing/spawn.py", "_fixup_main_from_path")
    assert verdict(traceback(error, spawn, ("train.py", "<module>"), context)).cause == "missing-main-guard"
    assert verdict(traceback(error, ("train.py", "<module>"), context)).cause == "user-code-exception"


def test_a_file_that_is_no_yaml_is_named_with_its_line():
    error = "yaml.scanner.ScannerError: while scanning for the next token\nfound character '\\t' that cannot start any token\n"
    place = '  in "cfg.yaml", line 3, column 1\n'
    explanation = verdict(traceback(error + place, (f"{PACKAGE}/yaml/scanner.py", "fetch_more_tokens")))
    assert explanation.cause == "config-error"
    assert "(line 3 of cfg.yaml)" in explanation.summary
    error = "yaml.scanner.ScannerError: mapping values are not allowed here\n"
    assert "here (line 5 of cfg.yaml)" in verdict(traceback(error + '  in "cfg.yaml", line 5, column 9\n')).summary


def test_a_ctrl_c_that_python_ignored_is_one_only_where_nothing_follows():
    ignored = traceback("KeyboardInterrupt:", (f"{PACKAGE}/torch/utils/data/dataloader.py", "_shutdown_workers"))
    log = "".join(f"step {step} loss {3 - step / 9:.3f}\n" for step in range(1, 9))
    log += f"Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__ at 0x7f>\n{ignored}"
    assert verdict(log).cause == "keyboard-interrupt"
    assert verdict(log + "step 9 loss 1.9\nstep 10 loss 1.8\n").cause == "healthy"
    assert verdict(log.replace("Exception ignored", "Training complete.\nException ignored")).cause == "healthy"
    assert verdict(log.replace("Exception ignored", "Killed\nException ignored")).cause == "host-oom-killed"
    assert explain([log.encode(), log[: log.index("Exception")].encode()]).cause == "healthy"


EPOCHS = "".join(f"epoch {epoch}: loss {1 / (2 + epoch):.4f}\n" for epoch in range(6))
RETRY = "OOM: retrying with batch size 128\n"


def test_an_exception_is_caught_where_the_program_says_what_it_does_instead_and_does_it():
    caught = traceback(OOM, ("train.py", "step")) + RETRY
    assert verdict(caught + EPOCHS + "done, final batch size 128\n").cause == "healthy"
    assert verdict(caught + EPOCHS).cause == "healthy"
    assert verdict(caught).cause == "cuda-oom"
    assert verdict(caught + EPOCHS.splitlines()[0]).cause == "cuda-oom"
    assert verdict(caught + caught.removesuffix(RETRY) + EPOCHS).cause == "cuda-oom"  # from a buffer
    assert verdict(caught + EPOCHS + traceback(OOM, ("train.py", "step"))).cause == "cuda-oom"
    assert verdict(caught.replace(RETRY, "OOM: use a smaller batch size\n") + EPOCHS).cause == "cuda-oom"
    assert verdict("[rank0]: loading\n" + caught + EPOCHS).cause == "cuda-oom"  # another rank's steps
    lost = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    assert verdict(caught.replace(OOM, lost) + EPOCHS).cause == "illegal-memory-access"


def test_data_of_which_a_trainer_finds_no_first_sample_is_empty():
    log = traceback("StopIteration", (f"{PACKAGE}/trl/trainer/sft_trainer.py", "__init__"))
    assert verdict(log).cause == "dataset-empty"
    assert verdict(traceback("StopIteration", ("train.py", "main"))).cause == "user-code-exception"
    later = log.replace("in __init__", "in train")
    assert verdict("step 300 | loss 1.2\n" + later).cause == "user-code-exception"


def test_what_a_model_holds_for_each_position_limits_the_length_of_a_sequence():
    sizes = (
        "The expanded size of the tensor (311) must match the existing size (64) at non-singleton dimension 1."
        "  Target sizes: [2, 311].  Tensor sizes: [1, 64]"
    )
    model = f"{PACKAGE}/transformers/models/bert/modeling_bert.py"
    explanation = verdict(traceback(f"RuntimeError: {sizes}", (model, "forward")))
    assert (explanation.cause, "311 tokens, the limit is 64" in explanation.summary) == ("sequence-too-long", True)
    assert (
        verdict(traceback(f"RuntimeError: {sizes}", (model, "forward"), ("train.py", "hook"))).cause == "shape-mismatch"
    )
    mask = sizes.replace("dimension 1", "dimension 0").replace("[1, 64]", "[64, 1, 8, 8]")
    assert verdict(traceback(f"RuntimeError: {mask}", (model, "forward"))).cause == "shape-mismatch"


def test_an_exception_that_led_to_another_one_is_not_the_warning_above_it():
    chain = "\nThe above exception was the direct cause of the following exception:\n\n"
    first = "Traceback (most recent call last):\n  File \"a.py\", line 3, in f\n    g()\nValueError: too many dimensions 'str'\n"
    log = "[WARNING] no accelerator was found\n" + first + chain + traceback("KeyError: 'labels'") + "waiting\n" * 60
    assert "too many dimensions" in verdict(log).summary
    retried = "WARNING:hub:upload failed\n" + first + "INFO:hub: the upload is there\n"
    retried += "".join(f"step {step} loss {9 - step / 9:.3f}\n" for step in range(60))
    assert verdict(retried).cause == "healthy"


def test_a_warning_that_a_logger_wrote_with_its_exception_is_no_last_word_before_done():
    error = 'Traceback (most recent call last):\n  File "train.py", line 9, in on_save\n    send()\nTimeoutError: timed out\n'
    steps = "".join(f"step {step} loss {9 - step / 9:.3f}\n" for step in range(9))
    assert verdict(f"{steps}WARNING:hub:upload failed\n{error}training completed\n").cause == "healthy"
    assert verdict(f"{steps}ERROR:hub:upload failed\n{error}training completed\n").cause == "user-code-exception"


def test_a_child_that_died_is_why_its_parent_got_nothing_from_a_queue():
    process = "/usr/lib/python3.11/multiprocessing/process.py"
    child = (
        f'Process producer:\nTraceback (most recent call last):\n  File "{process}", line 314, in _bootstrap\n    self.run()\n'
        "  File \"train.py\", line 5, in produce\n    text.decode()\nUnicodeDecodeError: 'utf-8' codec can't decode byte 0xe9\n"
    )
    steps = "".join(f"step {step} loss 0.{step}\n" for step in range(5))
    queue = ("/usr/lib/python3.11/multiprocessing/queues.py", "get")
    assert verdict(child + steps + traceback("_queue.Empty", queue)).cause == "text-encoding"
    assert verdict(child + steps + traceback("KeyError: 'x'")).cause == "user-code-exception"


def test_a_place_in_a_package_has_its_path_there():
    frames = f'Traceback (most recent call last):\n  File "{PACKAGE}/torch/utils/data/_utils/collate.py", line 207, in collate\n'
    explanation = verdict(f"{frames}    f(x)\nTypeError: object of type 'NoneType' has no len()\n")
    assert "(at torch/utils/data/_utils/collate.py:207 in collate)" in explanation.summary


def test_the_own_error_of_a_worker_of_a_data_loader_is_why_it_exited():
    head = 'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\n'
    frame = '  File "train.py", line 4, in __getattr__\n    return getattr(self.base, k)\n'
    worker = f"{head}{frame}RecursionError: maximum recursion depth exceeded\n"
    loader = (f"{PACKAGE}/torch/utils/data/dataloader.py", "_try_get_data")
    exited = "RuntimeError: DataLoader worker (pid(s) 13343) exited unexpectedly"
    explanation = verdict(worker + traceback(exited, loader))
    assert (explanation.cause, "raise AttributeError" in explanation.fix) == ("user-code-exception", True)
    assert verdict(traceback(exited, loader)).cause == "dataloader-worker-killed"


LOSSES = "".join(f"epoch {epoch} loss {3 - epoch / 5:.3f}\n" for epoch in range(9))


def test_an_error_that_a_logger_says_to_go_on_after_is_survived():
    head = 'Traceback (most recent call last):\n  File "t.py", line 6, in upload\n    send()\n'
    error = f"{{}} upload of last.pt failed{{}}\n{head}OSError: no\n"
    end = "INFO Training complete. Best checkpoint: last.pt\n"
    assert verdict(LOSSES + error.format("ERROR optional", ", keeping the local copy") + end).cause == "healthy"
    assert verdict(LOSSES + error.format("ERROR the", "") + end).cause != "healthy"


def test_a_print_without_a_reader_is_no_service_that_is_away():
    explanation = verdict(
        LOSSES + traceback("BrokenPipeError: [Errno 32] Broken pipe", ("train.py", "main"), statement="print(step)")
    )
    assert (explanation.cause, "has ended (head, less" in explanation.fix) == ("user-code-exception", True)
    other = traceback("BrokenPipeError: [Errno 32] Broken pipe", ("train.py", "main"), statement="client.send(step)")
    assert verdict(LOSSES + other).cause != "user-code-exception"


@pytest.mark.parametrize("place, cause", [
    (("sklearn/ensemble/_gb.py", "fit"), "user-code-exception"),
    (("sklearn/tree/tree.py", "predict"), "user-code-exception"),
    (("sklearn/metrics/_regression.py", "mean_squared_error"), "loss-nan"),
])  # fmt: skip
def test_a_table_with_nan_that_an_estimator_refuses_is_no_matter_of_the_learning_rate(place, cause):
    file, name = place
    frames = (f"{PACKAGE}/{file}", name), (f"{PACKAGE}/sklearn/utils/validation.py", "_assert_all_finite")
    explanation = verdict(traceback("ValueError: Input X contains NaN.", *frames))
    assert explanation.cause == cause and "numpy.isfinite" in explanation.fix
    tuner = verdict(
        traceback("ValueError: Input X contains NaN.", (f"{PACKAGE}/bayes_opt/space.py", "suggest"), *frames)
    )
    assert tuner.cause == "loss-nan"  # of what it measured


def test_a_worker_whose_pipe_is_closed_has_lost_its_main_process_and_no_service():
    pipe = ("/usr/lib/python3.12/multiprocessing/connection.py", "recv")
    reset = "ConnectionResetError: [Errno 104] Connection reset by peer"
    worker = (f"{PACKAGE}/stable_baselines3/common/vec_env/subproc_vec_env.py", "_worker")
    explanation = verdict(traceback(reset, worker, pipe))
    assert explanation.cause == "peer-died" and "main process" in explanation.fix
    assert verdict(traceback(reset, ("client.py", "request"), pipe)).cause == "service-unreachable"


def test_a_module_that_the_build_of_another_package_lacks_is_no_module_that_the_run_lacks():
    missing = "ModuleNotFoundError: No module named 'numpy'"
    build = traceback(missing, ("/tmp/pip-install-ad_0m81i/scikit-learn/setup.py", "setup_package"))
    assert verdict(build).cause == "compile-failure"
    assert verdict(traceback(missing, ("/work/scikit-learn/setup.py", "setup_package"))).cause == "import-error"


@pytest.mark.parametrize(("above", "error", "cause"), [
    ("ERROR | Training failed at step 8, keeping the last checkpoint", "KeyError: 'x'", "user-code-exception"),
    ("ERROR | could not send the report, continuing", "torch.OutOfMemoryError: CUDA out of memory.", "cuda-oom"),
    ("WARNING: GPU memory is nearly full", "KeyError: 'x'", "user-code-exception"),
    ("wandb: WARNING Tried to log to step 7 of the past; it is ignored", "KeyError: 'x'", "user-code-exception"),
    ("ERROR | could not send the report, continuing", "TimeoutError: timed out", "healthy"),
])  # fmt: skip
def test_a_line_above_an_exception_vouches_for_a_side_task_alone(above, error, cause):
    trace = traceback(error).replace("in <module>", "in send")
    assert verdict(f"{LOSSES}{above}\n{trace}training complete\n").cause == cause


def test_a_rank_that_took_steps_behind_its_exception_did_not_end_by_it():
    lost = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:32211"
    for went_on, cause in ((True, "peer-died"), (False, "user-code-exception")):
        steps = "".join(f"[rank{1 if went_on else 0}]: step {step} loss 0.{step}\n" for step in range(10, 14))
        log = prefixed("[rank1]: ", traceback("KeyError: 'x'")) + steps + prefixed("[rank0]: ", traceback(lost))
        assert verdict(log).cause == cause


def test_an_engine_that_ends_long_behind_the_stop_of_another_one_has_failed():
    stop = "(APIServer pid=1770) INFO [launcher.py:104] [shutdown] API server: shutdown triggered\n"
    gone = traceback("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.")
    served = "INFO [loggers.py:271] Engine 000: Avg generation throughput: 609.4 tokens/s\n" * 60
    assert verdict(stop + served + gone).cause == "serving-engine-failed"


INDEX = "RuntimeError: index 20 is out of bounds for dimension 0 with size 10"
NEGATIVE = "if not 0.0 <= {}:"
TEXT = "TypeError: '<=' not supported between instances of 'float' and 'str'"


@pytest.mark.parametrize("error, statement, place, words", [
    (INDEX, "return src.new_zeros(size).scatter_add_(dim, i, src)", ("torch_geometric/utils/_scatter.py", "scatter"), "edge_index"),
    (INDEX, "return src.new_zeros(size).scatter_add_(0, expert, src)", ("moe/layer.py", "route"), "print the length"),
    (TEXT, NEGATIVE.format("lr"), ("torch/optim/adamw.py", "__init__"), "pass lr=float(lr)"),
    (TEXT, NEGATIVE.format("eps"), ("torch/optim/adamw.py", "__init__"), "write the number"),
    (TEXT, NEGATIVE.format("warmup"), ("mine/optim/sched.py", "__init__"), "write the number"),
])  # fmt: skip
def test_the_last_frame_and_its_statement_show_which_argument_is_wrong(error, statement, place, words):
    file, name = place
    assert words in verdict(traceback(error, (f"{PACKAGE}/{file}", name), statement=statement)).fix


def test_the_cache_that_ultralytics_makes_when_it_is_not_there_is_not_what_is_missing():
    cache = "FileNotFoundError: [Errno 2] No such file or directory: '/data/labels/train.cache'"
    first = traceback(cache, (f"{PACKAGE}/ultralytics/data/utils.py", "load_dataset_cache_file"))
    second = traceback("ValueError: train: No labels found in /data/labels/train.cache, can not start training.")
    chained = f"{first}\nDuring handling of the above exception, another exception occurred:\n\n{second}"
    assert verdict(chained).cause == "dataset-empty"
    assert verdict(traceback(cache, ("train.py", "main"))).cause == "dataset-missing"


def test_a_saved_model_that_keras_or_pickle_cannot_read_is_of_another_version():
    error = "AttributeError: 'str' object has no attribute 'as_list'"
    keras = (
        (f"{PACKAGE}/keras/saving/saving_api.py", "load_model"),
        (f"{PACKAGE}/keras/engine/functional.py", "process_node"),
    )
    assert "Keras that saved it" in verdict(traceback(error, *keras)).fix
    assert verdict(traceback(error, ("train.py", "load_model"), ("train.py", "parse"))).cause == "user-code-exception"
    assert verdict(traceback("KeyError: 118", ("/usr/lib/python3.11/pickle.py", "load"))).cause == "version-mismatch"
    assert verdict(traceback("KeyError: 118", ("train.py", "load"))).cause == "user-code-exception"
    torch_load = ((f"{PACKAGE}/torch/serialization.py", "_legacy_load"), ("/usr/lib/python3.11/pickle.py", "load"))
    text = verdict(traceback("KeyError: 60", *torch_load))
    assert text.cause == "checkpoint-corrupt" and "git lfs pull" in text.fix


def test_torch_save_into_a_folder_is_told_to_name_a_file():
    error = "IsADirectoryError: [Errno 21] Is a directory: 'outputs'"
    written, loaded = (
        verdict(traceback(error, (f"{PACKAGE}/torch/serialization.py", name))) for name in ("save", "load")
    )
    assert written.fix.startswith("name a file in it: outputs is a folder")
    assert loaded.cause == "checkpoint-missing-or-perm" and "(outputs)" in loaded.summary


def test_an_empty_variable_of_the_launcher_is_named_as_such():
    error = "ValueError: invalid literal for int() with base 10: ''"
    fix = verdict(traceback(error, (f"{PACKAGE}/torch/distributed/rendezvous.py", "_env_rendezvous_handler"))).fix
    assert "shows which one is empty" in fix and "n/a" not in fix


def test_cuda_that_does_not_start_in_a_loader_s_worker_was_forked():
    error = "RuntimeError: CUDA error: initialization error"
    worker = (
        (f"{PACKAGE}/torch/utils/data/_utils/worker.py", "_worker_loop"),
        (f"{PACKAGE}/torch/utils/data/dataset.py", "<genexpr>"),
    )
    assert verdict(traceback(error, *worker)).cause == "cuda-forked"
    assert verdict(traceback(error, (f"{PACKAGE}/torch/cuda/__init__.py", "_lazy_init"))).cause != "cuda-forked"


def test_the_first_stage_that_refused_its_arguments_is_why_the_next_one_finds_no_checkpoint():
    frames = '  File "scripts/base_train.py", line 70, in <module>\n    exec(source)\n  File "<string>", line 29, in <module>\n'
    refused = f"Traceback (most recent call last):\n{frames}AssertionError\n"
    missing = traceback(
        "FileNotFoundError: [Errno 2] No such file or directory: '/c/base_checkpoints'", ("load.py", "find")
    )
    assert (verdict(refused + missing).cause, verdict(refused + missing).line) == ("config-error", 1)
    assert verdict(refused.replace("base_train", "tool")).cause == "user-code-exception"
