"""The catalogue: every entry is complete, and each known wording shows its cause first."""

import itertools
import re
import runpy
import sys
import time
import tomllib
from collections import Counter
from pathlib import Path
from zlib import crc32

import pytest
from rows import with_rows

from paceline.explain.catalogue import FIXERS, RETRIES, load_catalogue, make_catalogue
from paceline.explain.matches import matches_of_message
from paceline.explain.run_folder import explain
from paceline.explain.sentences import PLACEHOLDER, fill_template
from paceline.explain.signs_of_trouble import is_harmless

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CATALOGUE = load_catalogue()
CAUSES = list(CATALOGUE.causes.values())
PATTERNS = [(cause, pattern) for cause in CAUSES for pattern in cause.patterns]
WORDINGS = tomllib.loads((HERE / "wordings.toml").read_text(encoding="utf-8"))["wording"]
SHOWN = [wording for wording in WORDINGS if wording["cause"] != "harmless"]
HARMLESS = [wording for wording in WORDINGS if wording["cause"] == "harmless"]
RECORD_VALUES = {
    "observed",  # that a sentence may use although no group of a pattern has them
    *("rank", "step", "host", "source", "script", "where", "raised_by", "type", "message", "resume"),
    *("lone_rank", "job", "job_line", "done_line", "times", "nan_rank"),
    *("exit_code", "signal", "last_step", "half_batch", "num_ranks", "file", "duration", "package", "nan_step"),
}
ENTRY = {"id": "a", "group": "G", "title": "A", "summary": "it broke", "fix": "repair it", "why": "it is broken"}
CASES = [(cause, fix) for cause in CAUSES for fix in cause.fixes]
SHOWN_CASES = tomllib.loads((HERE / "fixes.toml").read_text(encoding="utf-8"))["fix"]
TYPE = re.compile(r"(?:\w+\.)*[A-Z]\w*(?:Error|Exception): ")
CURVES = "Curves"  # the group of causes that no line of a log shows
CURVE_VALUES = {"series", "step", "value", "last_step", "last_value", "reason"}


def test_a_known_wording_shows_its_cause_first():
    first = {
        (wording["cause"], wording["text"]): [
            cause.id for cause, _, _ in CATALOGUE.match(wording["text"], wording["kind"])
        ][:1]
        for wording in SHOWN
    }
    assert {shown: causes for shown, causes in first.items() if causes != [shown[0]]} == {}


@with_rows("wording", HARMLESS)
def test_a_line_of_a_healthy_run_shows_nothing_that_ends_a_run(wording):
    matches = CATALOGUE.match(wording["text"], wording["kind"])
    assert [cause.id for cause, _, _ in matches if cause.severity == "fatal"] == []


@pytest.mark.parametrize("one_of", [6, pytest.param(1, marks=pytest.mark.soak)])
def test_the_message_of_an_exception_that_a_program_caught_and_printed_shows_its_cause(one_of):
    """A few messages say too little without their type, such as KeyError's."""
    messages = {
        TYPE.sub("", wording["text"]): wording["cause"]
        for wording in SHOWN
        if wording["kind"] == "exception" and TYPE.match(wording["text"]) and "\n" not in wording["text"]
    }
    messages = {text: cause for text, cause in messages.items() if crc32(text.encode()) % one_of == 0}
    lines = itertools.cycle(["Training failed: {}", "2026-11-20 10:00:00,123 - ERROR - {}", "❌ Error in epoch 3: {}"])
    answers = {
        message: explain([f"step 1 loss 2.3\nstep 2 loss 2.1\n{line.format(message)}\n".encode()]).cause
        for message, line in zip(messages, lines, strict=False)
    }
    wrong = [(message, answers[message]) for message, cause in messages.items() if answers[message] != cause]
    assert len(wrong) <= len(messages) / 10, wrong
    assert sum(cause == "healthy" for _, cause in wrong) <= 1


@with_rows("wording", HARMLESS)
def test_a_line_of_a_healthy_run_is_no_message_of_an_exception(wording):
    assert is_harmless(wording["text"]) or matches_of_message(wording["text"]) == []


@with_rows(
    ("error", "cause"),
    [
        ("TimeoutError: Exceeded time limit (8s) without interrupt; elapsed = 9s", "user-code-exception"),
        ("AssertionError: MNN export requires torch>=1.10.0 to avoid segmentation faults", "version-mismatch"),
        ("ValueError: Invalid rank 8, rank should be in the interval [0, 8]", "config-error"),
        ("megatron.core.CheckpointingException: Invalid rank offsets: 8 for key layer.0", "user-code-exception"),
        ("FileNotFoundError: Report file not found: summary", "user-code-exception"),
        ("FileNotFoundError: No .axm file found in: exports", "user-code-exception"),
        ("FileNotFoundError: Tokenizer path '/home/me/run7' does not exist", "checkpoint-missing-or-perm"),
        (
            "RuntimeError: the weight has no companion scale. The merged model would be corrupted.",
            "user-code-exception",
        ),
        (
            "ValueError: `truncation_weight` must be non-negative or `None`. It weighs truncated samples.",
            "config-error",
        ),
        ("ValueError: nvfp4_merge_aware requires a LoRA adapter (adapter: lora)", "user-code-exception"),
        ("PermissionError: Tried to overwrite /a/b but a dataset can't overwrite itself.", "user-code-exception"),
        ('ValueError: fsdp_state_dict_type must be one of [None, "full", "sharded"], but got flat', "config-error"),
        (
            "ValueError: 'unet' cannot be combined with tensor parallelism: its layout is loaded once",
            "user-code-exception",
        ),
        ("AssertionError: Meta tensors are not supported for this model currently.", "config-error"),
        ("ValueError: Cannot combine adapters with different peft types. Found LORA and IA3.", "user-code-exception"),
        ("ValueError: Axelera export requires imgsz>=64, but got imgsz=32.", "user-code-exception"),
        ("ValueError: vocab_size must be positive when label_smoothing > 0", "config-error"),
        ("ValueError: DFlash layer_types length 3 does not match num_hidden_layers 4.", "user-code-exception"),
        ("AssertionError: causal_conv1d_fn_cuda is not available", "user-code-exception"),
        (
            "ValueError: Loss type `bco` estimates the KL divergence term and requires `strategy='sequential'`",
            "config-error",
        ),
        ("ValueError: Linear8 has no `in_features`: rowwise shards linear layers.", "user-code-exception"),
        ("ValueError: DeepSpeed only supports bf16 mixed precision for now, fp16 is not supported.", "config-error"),
        ("ValueError: Adapter lora_2 not found in ['default']", "user-code-exception"),
        ("ValueError: The model is quantized with GPTQ and is not serializable", "user-code-exception"),
        ("ValueError: LoRA adapter path not found: /home/me/run7", "checkpoint-missing-or-perm"),
        ("ImportError: Relative imports are not allowed in generated code.", "user-code-exception"),
        ("ImportError: PyTorch Flex Attention is not supported on TPU.", "user-code-exception"),
        ("ImportError: torch_xla is not supported on Windows", "import-error"),
        ("ImportError: bitsandbytes is not available on this platform", "import-error"),
        ("ImportError: package not available on PyPI", "import-error"),
        ("ValueError: xformers is not available. Make sure it is installed correctly", "import-error"),
        ("PermissionError: Permission denied for object 3 from the data provider.", "user-code-exception"),
        ("PermissionError: cannot create /data/x", "permission-denied"),
        ("PermissionError: /data/x is not writable", "permission-denied"),
        ("TimeoutError: job exceeded time limit", "slurm-time-limit"),
        (
            "RuntimeError: needs vLLM >= 0.26.0 for an fp32 lm_head, but found vLLM 0.13.0. Upgrade vLLM",
            "version-mismatch",
        ),
        ("ValueError: The current PyTorch version does not support this function", "version-mismatch"),
        ("ValueError: Tokenizer is invalid", "user-code-exception"),
        ("ValueError: tokenizer_path: /data/run7 is invalid", "checkpoint-missing-or-perm"),
        ("RuntimeError: Upload worker crashed. Please check the logs.", "user-code-exception"),
        ("RuntimeError: could not find an available port of the camera", "user-code-exception"),
        ("ValueError: Unknown object: 'train'. Make sure it is one of foo, bar", "user-code-exception"),
        ("AttributeError: Could not locate function 'forward'. in libfoo.so", "user-code-exception"),
        ("sqlite3.OperationalError: no such column: studies.patient_id", "user-code-exception"),
        ("OSError: [E050] Can't find model 'my_model'. It doesn't seem to be", "user-code-exception"),
        ("OSError: [E050] Can't find model 'ner_v2'. It doesn't seem to be", "user-code-exception"),
    ],
)
def test_a_rule_of_a_library_does_not_show_the_failure_that_it_names(error, cause):
    assert CATALOGUE.match(error, "exception")[0][0].id == cause


def test_every_cause_that_a_log_can_show_is_tested_on_at_least_two_wordings():
    counts = Counter(wording["cause"] for wording in WORDINGS)
    assert [cause.id for cause in CAUSES if counts[cause.id] < 2 and cause.group != CURVES] == []


@with_rows("cause", CAUSES)
def test_an_entry_is_complete(cause):
    assert cause.severity in ("fatal", "warning")
    assert cause.fixed_by in FIXERS
    assert cause.retry in RETRIES
    assert bool(cause.patterns) == (cause.group != CURVES)
    assert all([cause.title, cause.summary, cause.fix, cause.why, cause.source, cause.group])
    assert all(all([fix.case, fix.when, fix.fix, fix.why]) for fix in cause.fixes)
    lists = [cause.mistaken_for, *(entry.follows for entry in (cause, *cause.patterns))]
    for ids in (ids for ids in lists if isinstance(ids, list)):
        assert ids == sorted(ids) and set(ids) <= set(CATALOGUE.causes)
    assert cause.id not in cause.mistaken_for
    assert isinstance(cause.follows, bool) or cause.id not in cause.follows


def test_sentences_use_only_values_that_a_log_can_contain():
    unknown = {}
    for cause in CAUSES:
        groups = {name for pattern in cause.patterns for name in pattern.regex.groupindex}
        values = CURVE_VALUES if cause.group == CURVES else groups | RECORD_VALUES
        used = set(PLACEHOLDER.findall(cause.summary + cause.fix)) - values
        for fix in cause.fixes:
            used |= set(PLACEHOLDER.findall(fix.fix)) - values - set(fix.regex.groupindex)
        unknown |= {cause.id: used} if used else {}
    assert unknown == {}


def test_sentences_are_complete_for_a_log_with_nothing_but_a_message():
    sentences = []
    for cause in CAUSES:
        sentences += [fill_template(fix.fix, dict.fromkeys(fix.regex.groupindex, "x")) for fix in cause.fixes]
        sentences += [fill_template(template, {"message": "it broke"}) for template in (cause.summary, cause.fix)]
    assert [sentence for sentence in sentences if "n/a" in sentence] == []
    assert [line for line in sentences if set("{}[]") & set(re.sub(r"\[[\w., '=-]*\]", "", line))] == []


def test_a_text_gives_the_fix_for_its_case():
    chosen = {}
    for shown in SHOWN_CASES:
        cause = CATALOGUE.causes[shown["cause"]]
        fix, _ = cause.choose_fix(shown["text"])
        case = next((other.case for other in cause.fixes if other.fix == fix), None)
        chosen[shown["cause"], shown.get("case"), shown["text"]] = case
    assert {shown: case for shown, case in chosen.items() if case != shown[1]} == {}


SUBMODULE = "ModuleNotFoundError: No module named 'logging.custom'"
EDITABLE = """ImportError: cannot import name 'build' from 'models' (/work/models/models/__init__.py)
  File "/home/ada/run/train.py", line 1, in <module>
  File "/env/lib/python3.11/site-packages/trl/plugins.py", line 45, in <module>"""
UNEVEN = """pyarrow.lib.ArrowInvalid: Column 1 named label expected length 100 but got length 99
  File "/env/lib/python3.11/site-packages/datasets/arrow_dataset.py", line 801, in from_dict"""
REFUSED = """HTTPSConnectionPool(host='{}', port=443): Max retries exceeded (Caused by {}('Connection refused'))"""

SIZES = "RuntimeError: The size of tensor a (64) must match the size of tensor b (128) at non-singleton dimension 0"
UNPICKLE = 'File "/env/lib/python3.11/site-packages/torch/serialization.py", line 2210, in find_class'


MIXED = (
    "RuntimeError: aten.addmm.default got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor"
)
NN = "/env/lib/python3.11/site-packages/torch/nn"
CALLED = f'File "{NN}/modules/module.py", line 1789, in _call_impl'
OWN_LOSS = f"""{MIXED}
File "train.py", line 9, in main
File "train.py", line 7, in masked_loss
{CALLED}
File "{NN}/modules/loss.py", line 1385, in forward"""
OWN_FORWARD = f"""{MIXED}
File "train.py", line 9, in main
{CALLED}
File "train.py", line 5, in forward
File "train.py", line 7, in encode
{CALLED}
File "{NN}/modules/linear.py", line 134, in forward"""
IN_BARRIER = """RuntimeError: [unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation to complete
File "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 5356, in barrier"""
KEYS = "missing ['head.weight'] unexpected ['module.logit_scale']"


@pytest.mark.parametrize(("cause", "text", "words"), [
    ("dtensor-mixed", OWN_LOSS, "register_fsdp_forward_method"),
    ("dtensor-mixed", OWN_FORWARD, "register_fsdp_forward_method"),
    ("dtensor-mixed", MIXED, "set_model_state_dict"),
    ("collective-timeout-desync", IN_BARRIER, "batch_isend_irecv"),
    ("config-error", "train.py: error: unrecognized arguments: --lr", "behind the name of the script"),
    ("config-error", "ValueError: seed must be positive", "2**32"),
    ("user-code-exception", "ValueError: invalid literal for int() with base 10: 'auto'", "environment variable"),
    ("user-code-exception", "AssertionError: parameter count differs from the paper", "DDP"),
    ("user-code-exception", "AssertionError: rank 0 has other parameters than its config", "DDP"),
    ("dataloader-worker-killed", "DataLoader worker (pid 4) is killed by signal: Killed.", "ended itself"),
    ("checkpoint-missing-or-perm", "FileNotFoundError: [Errno 2] No such file or directory: 'a.pt'", "empty text"),
    ("preempted-sigterm", "W api.py:753] Received Signals.SIGUSR1 death signal, shutting down workers", "notice"),
    ("preempted-sigterm", "slurm step ended with exit status 1124", "`timeout`"),
    ("state-dict-mismatch", KEYS, "strict=False the weights"),
    ("ddp-unused-parameters", "RuntimeError: Expected to have finished reduction in the prior iteration", "Trainer("),
    ("import-error", SUBMODULE, "a part of Python"),
    ("import-error", "ModuleNotFoundError: No module named 'zoneinfo'", "install Python again"),
    ("import-error", EDITABLE, "rename"),
    ("user-code-exception", UNEVEN, "remove_columns"),
    ("gloo-connect-failure", "SO_ERROR: Connection refused, remote=[127.0.1.1]:49055", "further up"),
    ("service-unreachable", REFUSED.format("api.openai.com", "NewConnectionError"), "start the server"),
    ("service-unreachable", REFUSED.format("169.254.169.254", "NewConnectionError"), "start the server"),
    ("service-unreachable", REFUSED.format("localhost", "ProxyError"), "start the server"),
    ("service-unreachable", "HTTPConnectionPool(host='localhost', port=1): slow\nConnection refused", "start the server"),
    ("version-mismatch", "ImportError: cannot import name 'TFLite' from 'transformers_x' (x.py)", "PyTorch"),
    ("version-mismatch", "ImportError: cannot import name 'is_flash_attn_available' from 'transformers.utils'", "<5"),
    ("version-mismatch", "AttributeError: module 'numpy' has no attribute 'meann'", "numpy<2"),
    ("fsdp-state-mismatch", "Missing key in checkpoint state_dict: optimizer.param_groups.a.betas.", "the model has"),
    ("state-dict-mismatch", 'Unexpected key(s) in state_dict: "model.0.weight", "net.bias".', "checkpoint is a dict"),
    ("shape-mismatch", f"{SIZES}\n  File \"/env/torch/optim/swa_utils.py\", line 9, in avg", "optimizer's state"),
    ("shape-mismatch", "expected input[8, 32, 30, 3] to have 4 channels, but got 32 channels instead", "permute"),
    ("shape-mismatch", "Expected target size [8, 65], got [4, 16]", "second dimension"),
    ("shape-mismatch", "ValueError: Found input variables with inconsistent numbers of samples: []", "both together"),
    ("abi-mismatch", "OSError: libtorch_cpu.so: undefined symbol: _ZN3c10", "of its builds for a GPU"),
    ("loss-nan", "ValueError: Input X contains NaN.", "without a label"),
    ("hub-offline", REFUSED.format("huggingface.co", "NameResolutionError"), "torch.hub"),
    ("import-error", "ModuleNotFoundError: No module named 'tensorflow'", "KERAS_BACKEND"),
    ("import-error", f"ModuleNotFoundError: No module named 'numpy._core'\n{UNPICKLE}", "whole model"),
    ("import-error", f"ModuleNotFoundError: No module named 'models'\n{UNPICKLE}\n  File \"a.py\", line 3", "whole model"),
    ("user-code-exception", "AttributeError: 'dict' object has no attribute 'to'", "not a model"),
    ("user-code-exception", "KeyError: 'ema'\nnet.load_state_dict(state['ema'])", "the checkpoint has no"),
    ("config-error", f"ValueError: lr\n{UNPICKLE}", "is passed to the package"),
    ("config-error", f"ValueError: lr\nFile \"a.py\", line 3, in main\n{UNPICKLE}\nFile \"b.py\", line 3", "to the package"),
])  # fmt: skip
def test_a_text_is_not_given_the_fix_for_a_case_that_resembles_it(cause, text, words):
    assert words not in CATALOGUE.causes[cause].choose_fix(text)[0]


def test_pip_is_not_asked_for_a_module_of_the_standard_library():
    case = next(fix for cause, fix in CASES if fix.case == "a module of the standard library is missing")
    names = re.search(r"\(\?:((?:\w+\|)+\w+)\)", case.when)[1].split("|")
    assert [name for name in names if name not in sys.stdlib_module_names] == []


def test_every_case_of_a_fix_is_tested_on_a_text():
    shown = {(entry["cause"], entry.get("case")) for entry in SHOWN_CASES}
    assert [(cause.id, fix.case) for cause, fix in CASES if (cause.id, fix.case) not in shown] == []


def test_a_text_of_no_case_gives_the_general_fix():
    entry = ENTRY | {
        "fixes": [{"case": "it is blue", "when": "blue (?P<what>\\w+)", "fix": "paint {what}", "why": "w"}]
    }
    cause = make_catalogue([entry]).causes["a"]
    assert cause.choose_fix("a blue door") == ("paint {what}", {"what": "door"})
    assert cause.choose_fix("a red door") == ("repair it", {})


@pytest.mark.parametrize(
    ("text", "retry"),
    [
        ("PIL.UnidentifiedImageError: cannot identify image file '/mnt/images/0001.jpg'", "never"),
        ("PIL.UnidentifiedImageError: cannot identify image file <_io.BytesIO object at 0x7f2c1c0b5e40>", "later"),
        ("ValueError: dataset shard 12 has a wrong magic number", "never"),
        ("OSError: image file /data/a.png is truncated", "never"),
        ("OSError: truncated file\nRead timed out while downloading from https://host", "later"),
        ("OSError: file /cache/a.tar is truncated\nfailed to fetch https://host/a.tar", "later"),
        ("OSError: dataset stream closed: invalid response from server s3.amazonaws.com", "later"),
        ("ValueError: webdataset: unexpected end of shard s3://bucket/x.tar", "later"),
        ("tarfile.ReadError: unexpected end of data", "later"),
        ("requests.exceptions.JSONDecodeError: Expecting value: line 1 column 1 (char 0)", "later"),
        ("datasets.exceptions.DatasetGenerationError: An error occurred while generating the dataset", "later"),
        ("datasets.table.CastError: Couldn't cast array of type string to int64", "never"),
    ],
)
def test_only_data_that_is_surely_damaged_where_it_lies_is_never_read_again(text, retry):
    assert CATALOGUE.causes["dataset-download"].choose_retry(text) == retry


@pytest.mark.parametrize(
    ("text", "retry"),
    [
        ("RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: ...", "never"),
        ("RuntimeError: op.preamble.length <= op.nbytes. 16 vs 8", "never"),
        ("RuntimeError: [pair.cc] Inconsistent shapes between ranks", "never"),
        ("Watchdog caught collective operation timeout: inconsistent state", "same"),
    ],
)
def test_ranks_that_call_different_collectives_do_so_in_each_attempt(text, retry):
    assert CATALOGUE.causes["collective-timeout-desync"].choose_retry(text) == retry


def test_patterns_compile_and_their_weights_and_literals_are_in_range():
    for cause, pattern in PATTERNS:
        assert pattern.kind in ("any", "exception", "line", "exit", "signal"), cause.id
        assert 0 < pattern.weight < 1, cause.id
        assert pattern.literals, cause.id
        assert all(literal and literal == literal.lower() for literal in pattern.literals), cause.id
        assert pattern.regex.search("") is None, cause.id
        re.compile(pattern.unless, re.MULTILINE)


def test_every_text_of_its_cause_that_a_pattern_matches_contains_one_of_its_literals():
    without = [
        (wording["text"], cause.id, pattern.match)
        for wording in WORDINGS
        for cause, pattern in PATTERNS
        if cause.id == wording["cause"] and pattern.fits(wording["kind"]) and pattern.regex.search(wording["text"])
        if not any(literal in wording["text"].lower() for literal in pattern.literals)
    ]
    assert without == []


def test_no_pattern_takes_long_on_a_long_line():
    for text in (
        "a" * 8000,
        "error " * 1400,
        "x: " * 2600,
        "(" * 8000,
        "/a.b-c_" * 1100,
        "Exception: 0 [" * 570,
        "1 " * 4000,
    ):
        began = time.process_time()
        CATALOGUE.match(text, "line")
        CATALOGUE.match(text, "exception")
        for cause in CAUSES:
            cause.choose_fix(text)
        assert time.process_time() - began < 2


def test_the_pattern_with_the_highest_weight_gives_the_values():
    patterns = [
        {"match": "lost (?P<what>\\w+)", "literals": ["lost"], "weight": 0.5},
        {"match": "lost card (?P<card>\\d+)", "literals": ["lost card"], "weight": 0.9},
    ]
    [(_, weight, values)] = make_catalogue([ENTRY | {"patterns": patterns}]).match("lost card 3", "line")
    assert (weight, values) == (0.9, {"card": "3"})


def test_unless_and_kind_restrict_a_pattern():
    pattern = {"match": "lost", "literals": ["lost"], "weight": 0.5, "unless": "found", "kind": "exception"}
    catalogue = make_catalogue([ENTRY | {"patterns": [pattern]}])
    assert [
        len(catalogue.match(*text))
        for text in (("lost", "exception"), ("lost", "line"), ("lost and found", "exception"))
    ] == [1, 0, 0]


def test_a_pattern_can_override_what_its_cause_follows_from():
    pattern = {"match": "lost", "literals": ["lost"], "weight": 0.5, "follows": True}
    [(cause, _, _)] = make_catalogue([ENTRY | {"patterns": [pattern]}]).match("lost", "line")
    assert cause.follows is True


def test_two_entries_with_the_same_id_are_rejected():
    with pytest.raises(ValueError, match="two entries a"):
        make_catalogue([ENTRY, ENTRY])


def test_the_page_of_causes_is_up_to_date():
    page = runpy.run_path(str(ROOT / "dev" / "causes_page.py"))["format_docs"]()
    assert (ROOT / "docs" / "causes.md").read_text(encoding="utf-8") == page, (
        "python dev/causes_page.py > docs/causes.md"
    )
