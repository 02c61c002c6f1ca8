"""Output that another program has forwarded line by line, indented or broken at a terminal's width is read as it was printed."""

import json
from itertools import count

import pytest
from log_samples import OOM, STEPS, exceptions, prefixed, raised, read
from rows import with_rows

from paceline.explain.forwarded import ForwardedLines, find_width
from paceline.explain.run_folder import explain

BUG = "ValueError: sample 1841 has 3 fields, expected 4"
LOG = "loading the model\n\n" + STEPS + raised(None, BUG)
# of each line; {n} counts the lines
FORWARDERS = {
    "Airflow": "[2026-11-20, 10:00:{n:02d} UTC] {{subprocess.py:93}} INFO - ",
    "logging": "2026-11-20 10:00:{n:02d},123 - launcher - INFO - ",
    "loguru": "2026-11-20 10:00:{n:02d}.123 | INFO     | launch:run:12 - ",
    "Hydra": "[2026-11-20 10:00:{n:02d},123][__main__][INFO] - ",
    "absl": "I1120 10:00:{n:02d}.123456 140234 launch.py:12] ",
    "Spark": "26/11/20 10:00:{n:02d} INFO TorchDistributor: ",
    "Determined": "[2026-11-20T10:00:00.{n:06d}Z] 1c33a [rank=3] || ",
    "stern": "trainer-worker-1 pytorch ",
    "kubectl": "[pod/trainer-0/pytorch] ",
    "SageMaker": "[1,mpirank:0,algo-1]<stderr>:",
    "CloudWatch": "1763632800{n:03d}\t",
    "a colour": "\x1b[36m2026-11-20 10:00:{n:02d},123 - launcher - INFO -\x1b[0m ",
    "numbers": "{n:4d} | ",
    "a quotation": "> ",
    "a tag": "[trainer] ",
    "spaces": "      ",
}


def forwarded(text, prefix):
    return "".join(prefix.format(n=n) + line + "\n" for n, line in enumerate(text.splitlines(), 1))


@with_rows("prefix", FORWARDERS.values())
def test_a_failure_is_found_behind_the_prefix_of_any_program(prefix):
    (record,) = exceptions(read(forwarded(LOG, prefix)))
    assert (record.text, record.line, len(record.frames)) == (BUG, 13, 1)
    assert explain([forwarded(LOG, prefix).encode()]).cause == "user-code-exception"
    assert explain([forwarded(STEPS + raised(None, OOM), prefix).encode()]).cause == "cuda-oom"


def test_the_rank_in_such_a_prefix_is_read():
    (record,) = exceptions(read(forwarded(LOG, FORWARDERS["Determined"])))
    assert record.rank == 3


def test_the_lines_of_two_hosts_are_told_apart_by_their_prefix():
    others = raised(None, OOM).splitlines()
    lines = [
        f"trainer-worker-{worker} pytorch {line}"
        for pair in zip(raised(None, BUG).splitlines(), others, strict=True)
        for worker, line in enumerate(pair)
    ]
    texts = {record.text for record in exceptions(read("\n".join(lines)))}
    assert texts == {BUG, OOM}


def test_the_prefix_is_learned_within_lines_of_json_too():
    numbers = count()
    lines = (
        json.dumps(
            {"log": f"2026-11-20 10:00:{next(numbers):02d},123 - launcher - INFO - {line}\n", "stream": "stderr"}
        )
        for line in LOG.splitlines()
    )
    assert explain(["\n".join(lines).encode()]).cause == "user-code-exception"


@with_rows("prefix", FORWARDERS.values())
def test_a_failure_without_a_traceback_is_found_behind_the_prefix_of_any_program(prefix):
    lines = ["loading the model", "running on 2 GPUs", "OSError: [Errno 28] No space left on device", "leaving"]
    assert explain([forwarded("\n".join(lines), prefix).encode()]).cause == "disk-full"


@pytest.mark.parametrize("prefix", ["epoch {n}: ", "[ERROR] ", "layer {n} loss: ", "Epoch {n} | "])
def test_what_all_lines_say_is_no_prefix(prefix):
    lines = forwarded("\n".join(f"{word} is {n / 7:.3f}" for n, word in enumerate("abcdefgh")), prefix)
    assert ForwardedLines().unwrap(lines.encode().splitlines(), lines.encode()) == lines.encode().splitlines()


def test_a_level_that_a_logger_writes_itself_stays():
    lines = STEPS + "INFO - retrying after an error: timed out\n" + STEPS.replace("step 0000", "step 0001")
    assert explain([lines.encode()]).cause == "healthy"
    assert explain([forwarded(STEPS, "INFO - ").encode()]).cause == "healthy"
    logged = "ERROR - the sample is left out\n" + raised(None, BUG) + prefixed("INFO - ", STEPS)
    assert read(logged).records[0].text == "ERROR - the sample is left out"


def test_what_tells_of_progress_is_no_tag():
    table = "".join(f"| step | {step} | loss | {2 + 1 / step:.3f} |\n" for step in range(1, 30))
    assert explain([table.encode()]).cause == "healthy"


def test_a_traceback_as_one_text_is_read_line_by_line():
    text = 'the worker failed: "' + raised(None, BUG).strip().replace('"', '\\"').replace("\n", "\\n") + '"\n'
    (record,) = exceptions(read(STEPS + text))
    assert record.text.startswith(BUG) and record.frames


def test_a_container_s_output_is_no_error_because_google_cloud_calls_it_one():
    def line(text):
        return json.dumps({"textPayload": text, "severity": "ERROR", "timestamp": "2026-11-20T10:00:00Z"})

    assert explain(["\n".join(map(line, STEPS.splitlines())).encode()]).cause == "healthy"
    assert explain(["\n".join(map(line, LOG.splitlines())).encode()]).cause == "user-code-exception"


@pytest.mark.parametrize("width", [30, 50, 77])
def test_what_powershell_writes_of_stderr_is_read_as_a_whole_however_narrow_its_window(width):
    first, *others = raised(None, f"ValueError: Invalid CUDA 'device=0' requested: {OOM}").splitlines()
    record = ["At line:1 char:1", "+ python train.py", "+ " + "~" * (width - 2), f"    + CategoryInfo {'x' * 60}"]
    lines = [f"python : {first}", *record, "    + FullyQualifiedErrorId : NativeCommandError", " ", *others]
    log = "\r\n".join("\r\n".join(as_powershell(line, width)) for line in lines)
    (found,) = exceptions(read(log.encode()))
    assert found.text == f"ValueError: Invalid CUDA 'device=0' requested: {OOM}"


def as_powershell(line, width):
    """The lines in which PowerShell writes one: broken before a word for which, with its space, there is no place."""
    while len(line) > width:
        space = line.rfind(" ", 1, width)
        at = space + 1 if space > 0 and line[:space].strip() else width
        yield line[:at]
        line = line[at:]
    yield line


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_lines_that_a_terminal_has_broken_are_read_as_a_whole(width, encoding):
    frames = "".join(
        f'  File "/home/user/miniconda3/envs/train/lib/python3.12/site-packages/torch/nn/modules/{name}.py", line {n}, in forward\n'
        "    return self._call_impl(*args, **kwargs)\n"
        for n, name in enumerate(("container", "module", "transformer", "activation", "linear", "normalization"), 100)
    )
    error = (
        "RuntimeError: Error(s) in loading state_dict for Model: size mismatch for layers.11.attention.projection.weight: copying a"
        " param with shape torch.Size([4096, 4096]) from checkpoint, the shape in current model is torch.Size([2048, 4096])."
    )
    text = STEPS + "Traceback (most recent call last):\n" + frames + error + "\n"
    broken = "\n".join(line[at : at + width] for line in text.splitlines() for at in range(0, len(line), width))
    (record,) = exceptions(read(broken.encode(encoding)))
    assert (record.text, len(record.frames)) == (error, 6)
    assert explain([broken.encode(encoding)]).cause == "state-dict-mismatch"
    assert record.line == 11


@pytest.mark.parametrize("number", [1, 10, 100])
def test_lines_of_equal_length_are_whole(number):
    step = "2026-11-20 10:00:00,123 trainer INFO step {:06d} loss {:.4f} lr 0.000300 norm 0.50 tokens_s 123456 mfu 0.41"
    log = "".join(
        f"{step.format(n, 3 - n / 999)}\n" + "saved a checkpoint\n" * (n % number == 0) for n in range(1, 300)
    )
    assert find_width(log.splitlines()) == 0


def test_a_message_behind_which_the_next_text_began_without_a_newline_is_no_prefix():
    glued = raised(None, BUG).strip().removeprefix("Traceback (most recent call last):\n")
    assert explain([(3 * glued).encode()]).cause == "user-code-exception"
