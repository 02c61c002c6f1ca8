"""Keywords: what a text is likely about where no pattern knows it, and when that is asked."""

from log_samples import STEPS, raised

from paceline.explain.catalogue import load_catalogue
from paceline.explain.run_folder import explain

CATALOGUE = load_catalogue()
GUESSES = {
    "cuda-forked": "RuntimeError: this child was made in a forked subprocess and may not touch the card",
    "cuda-visible-devices": "ValueError: bad entry 'GPU-0a1b2c3d-' in the list",
    "serving-memory-share": "RuntimeError: not one of the cache blocks fits",
    "cuda-oom": "RuntimeError: XPU ran out of memory",
    "triton-out-of-resources": "LaunchError: out of resource: shared memory wanted",
    "host-oom-killed": "DeviceError: low on memory",
    "process-limit": "ThreadError: can't start new thread",
    "too-many-open-files": "SocketError: EMFILE",
    "stale-file-handle": "MapError: Stale NFS file handle",
    "disk-full": "WriteError: the disk is full",
    "shm-too-small": "MapError: shm segment: size refused",
    "permission-denied": "OpenError: EACCES",
    "port-in-use": "BindError: port 29500 is already taken",
    "gpu-hardware-error": "HealthError: an uncorrectable fault",
    "illegal-memory-access": "LaunchError: misaligned address",
    "nccl-ib-failure": "TransportError: RoCE path gone",
    "nccl-p2p-failure": "TransportError: p2p is not supported here",
    "cublas-failure": "MathError: cusolver gave up",
    "cudnn-failure": "MathError: cudnn gave up",
    "cuda-not-available": "SetupError: no GPU was detected",
    "cuda-driver-too-old": "SetupError: driver is insufficient",
    "cuda-driver-broken": "SetupError: nvml does not answer",
    "attention-kernel-unavailable": "KernelError: flash_attn cannot run here",
    "cuda-arch-unsupported": "KernelError: sm_75 is too old",
    "device-mismatch": "StateError: inputs are on different devices",
    "cuda-graph-capture": "GraphError: not while a stream captures a graph",
    "collective-bad-tensor": "GroupError: tensors must be contiguous",
    "dtype-mismatch": "MathError: both sides need the same dtype",
    "process-group-not-initialized": "GroupError: the process group was never made",
    "ddp-marked-ready-twice": "GraphError: parameter 3 was marked ready again",
    "ddp-backward-misuse": "GraphError: in reducer.cpp",
    "worker-start-timeout": "PoolError: spawning a worker: timeout",
    "dataloader-worker-killed": "PoolError: a background worker went away",
    "master-unreachable": "GroupError: the rendezvous was not met",
    "collective-timeout-desync": "GroupError: one rank is late at a barrier",
    "service-unreachable ": "ConnectionError: wandb: connection closed by peer",
    "peer-died": "GroupError: the peer is gone",
    "nccl-internal-error": "GroupError: ncclInvalidSomething",
    "rank-file-race": "MakeError: File exists",
    "hub-access-denied": "FetchError: this repository is gated",
    "rate-limited": "FetchError: 429",
    "wandb-login": "TrackError: no api key",
    "hub-offline": "FetchError: offline mode is on",
    "dataset-download": "FetchError: failed to download part 3",
    "service-unreachable": "FetchError: connection refused",
    "ssh-failure": "RemoteError: ssh gave 255",
    "system-tool-missing": "ToolError: executable 'foo' was not found",
    "container-start-failed": "ToolError: docker gave 125",
    "abi-mismatch": "LoadError: binary incompatible",
    "shared-library-missing": "LoadError: libfoo.so is missing",
    "compile-failure": "BuildError: cmake gave 1",
    "checkpoint-corrupt": "LoadError: the checkpoint is truncated",
    "dataset-download ": "LoadError: shard 3 is malformed",
    "state-dict-mismatch": "LoadError: missing keys",
    "tokenizer-mismatch": "TextError: pad_token is not set",
    "batch-divisibility": "PlanError: batch 7 is not divisible by 2",
    "no-resources-to-schedule": "QueueError: not enough: nodes less than 4",
    "dataset-empty": "DataError: the list is empty",
    "shape-mismatch": "MathError: sizes of both must match",
    "import-error": "SetupError: foo is not installed",
    "version-mismatch": "SetupError: foo requires bar >=2",
    "loss-nan": "LossError: nan",
    "fp16-overflow": "LossError: loss scale at its lowest",
    "text-encoding": "TextError: can't decode byte",
    "pickle-spawn-error": "PoolError: pickle gave up",
    "checkpoint-missing-or-perm": "LoadError: weights.safetensors not found",
    "dataset-missing": "LoadError: the corpus does not exist",
    "serving-engine-failed": "PoolError: the engine died",
    "config-error": "SetupError: --foo must be set",
}


def test_every_row_of_keywords_guesses_its_cause():
    assert [keyword.cause for keyword in CATALOGUE.keywords] == [cause.strip() for cause in GUESSES]
    assert {text: CATALOGUE.guess(text).id for text in GUESSES.values()} == {
        text: cause.strip() for cause, text in GUESSES.items()
    }
    assert CATALOGUE.guess("SomeError: nothing known") is None


def test_an_exception_that_no_pattern_knows_is_explained_by_its_words_with_less_confidence():
    explanation = explain([raised(1, "PoolError: the kernel ran into a misaligned address").encode()])
    assert (explanation.cause, explanation.rank) == ("illegal-memory-access", 1)
    known = explain([raised(1, "RuntimeError: CUDA error: an illegal memory access was encountered").encode()])
    assert known.cause == explanation.cause and explanation.confidence <= 0.6 < known.confidence


def test_the_last_words_of_a_log_that_ended_badly_are_read():
    assert explain([f"{STEPS}FATAL: low on memory, giving up\n".encode()]).cause == "host-oom-killed"
    assert explain([f"{STEPS}low on memory, cache dropped\nstep 00011/00100 | loss 2.1\n".encode()]).cause == "healthy"


def test_data_of_no_rows_is_empty_in_other_languages_too():
    for words, cause in (
        ("学習データが0行になりました", "dataset-empty"),
        ("训练数据为空", "dataset-empty"),
        ("学習データが10行になりました", "unknown"),
    ):
        assert explain([f"2026-11-12 22:29:02,460 [ERROR] root: {words}。\n".encode()]).cause == cause


def test_what_python_says_about_code_is_not_guessed():
    for error in ("KeyError: 'tokenizer'", "TypeError: got a port in use", "AttributeError: no pickle here"):
        assert explain([raised(0, error).encode()]).cause == "user-code-exception"


def test_a_word_of_another_meaning_is_no_guess():
    for error in (
        "RuntimeError: the handler comes before the barrier",  # a type has the word time
        'RuntimeError: in_ != nullptr INTERNAL ASSERT FAILED at "/src/inline_container.cc":143',
        "RuntimeError: enum_type INTERNAL ASSERT FAILED at flatbuffer_loader.cpp:429",
        "ValueError: Gated DeltaNet takes flat inputs",
        "ValueError: no compilation mode was chosen",
        "ValueError: one container per layer was wanted",
        "RuntimeError: cuDNN indexer: ratio must be positive",
        "RuntimeError: descriptor overflow",
        "ValueError: Conversion keys: mismatch",
    ):
        assert CATALOGUE.guess(error) is None, error


def test_where_a_package_refuses_a_value_its_message_is_the_answer_and_not_what_a_word_of_it_suggests():
    frame = '  File "{}", line 7, in check\n    raise error\n'
    package = frame.format("/env/lib/python3.11/site-packages/shapes/config.py")
    for error in (
        "ValueError: Size must contain 'shortest_edge' key. Got 8",
        "ValueError: Box dtype must be explicitly provided, cannot be None.",
        "AssertionError: Java version too old",
        "AssertionError: the vocabulary has the blank first",
        "AssertionError: aux add is gated-engine only",
        "ValueError: Tried to access token index 8",
        "ValueError: Flow direction is invalid for shards",
        "ValueError: `margin` got unexpected keys 8, expected keys in 8.",
    ):
        explanation = explain([f"{STEPS}Traceback (most recent call last):\n{package}{error}\n".encode()])
        assert explanation.cause in ("user-code-exception", "config-error"), error
        assert error.partition(": ")[2] in explanation.summary
    own = frame.format("/home/me/train.py")
    for place, error in ((own, "ValueError: the weights are missing"), (package, "OSError: the disk is full")):
        explanation = explain([f"{STEPS}Traceback (most recent call last):\n{place}{error}\n".encode()])
        assert explanation.cause != "user-code-exception", error


def test_a_rule_is_no_reason_to_miss_the_failure_itself():
    errors = {
        "cuda-graph-capture": ("RuntimeError: CUDA Graph capture failed", "RuntimeError: graph capture is in progress"),
        "cublas-failure": ("RuntimeError: cublas initialization returned 1", "RuntimeError: cuBLAS returned status 13"),
        "cudnn-failure": ("RuntimeError: cudnn returned status 4",),
        "attention-kernel-unavailable": ("RuntimeError: xformers is only available on CUDA",),
        "dtype-mismatch": ("RuntimeError: Weight 0 has invalid dtype (expected torch.bfloat16, got torch.float32)",),
        "dataset-empty": ("ValueError: The list of training files is empty", "ValueError: empty list of samples"),
        "master-unreachable": ("MyError: rendezvous did not complete", "MyError: TCPStore is gone"),
        "serving-engine-failed": ("RuntimeError: server did not start", "RuntimeError: launch of server failed"),
        "text-encoding": ("LookupError: unknown codec utf9",),
        "compile-failure": ("RuntimeError: Inductor gave up",),
        "shape-mismatch": (
            "ValueError: Input dimension must be 768, got 512",
            "ValueError: All spatial dimensions must be divisible by 32, got (225, 224)",
            "ValueError: The label shape (8, 3) is different from the source shape (8, 4) /data/config.json",
        ),
        "tokenizer-mismatch": (
            "ValueError: token='foo' isn't in this tokenizer's vocabulary",
            "ValueError: the tokenizer encodes a non-empty string to 0 tokens",
            "ValueError: The chat template is not training-compatible",
        ),
        "version-mismatch": ("RuntimeError: this wrapper does not take the argument. Upgrade mlx-lm",),
    }
    assert {text: explain([raised(0, text).encode()]).cause for texts in errors.values() for text in texts} == {
        text: cause for cause, texts in errors.items() for text in texts
    }


def test_a_size_in_the_name_of_a_class_or_of_a_buffer_is_no_shape_that_does_not_fit():
    for error in (
        "ValueError: `norm`='x' is not supported by `ResnetBlock2DDreamLite`. Use `ResnetBlockCondNorm2D` instead.",
        "ValueError: Invalid `UP_block_type` encountered. Must be `AllegroUpBlock3D`",
        "RuntimeError: cudaMemPrefetchAsync failed (cudaError=invalid value) for buffer 'x': shape=(8, 512)",
        "ValueError: Invalid mesh dim: 'x'. Valid dimensions are a, b",
        "ValueError: dim_val is either torch.SymInt or int, got <class 'list'> for dim value",
        "ValueError: Number of channels should be greater or equal to 1",
        "ValueError: Tensor at index 8 must be contiguous, got non-contiguous tensor with shape=(3, 4)",
        "ValueError: max_seq_length truncated 3 image placeholder tokens",
    ):
        assert explain([raised(0, error).encode()]).cause in ("config-error", "user-code-exception"), error


def test_a_file_that_exists_is_a_race_only_where_the_system_says_so():
    for error, cause in (
        ("FileExistsError: [Errno 17] File exists: 'cache/lock'", "rank-file-race"),
        ("FileExistsError: Files were not created because they already exist (use --overwrite flag)", None),
    ):
        guess = CATALOGUE.guess(error)
        assert (guess and guess.id) == cause


def test_a_warning_that_is_raised_ended_the_program():
    frame = '  File "/home/me/train.py", line 7, in <module>\n    main()\n'
    log = f"{STEPS}Traceback (most recent call last):\n{frame}DeprecationWarning: `head_first` has been removed.\n"
    explanation = explain([log.encode()])
    assert (explanation.cause, explanation.confidence <= 0.6) == ("user-code-exception", True)
