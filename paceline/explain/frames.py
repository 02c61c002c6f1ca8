"""
What an exception's frames say beside its message: whether the user's own code is wrong, or something that a package needs.

A message about a missing name or argument has the same form whoever wrote the function, so the names of the usual packages and
their classes tell whether two versions do not fit.
"""

import re
import sys
from collections.abc import Sequence

from paceline.explain.explanation import Record
from paceline.explain.log import SAVED, Log
from paceline.explain.run_bounds import ended_program, failed_at_import, shape_of

PACKAGE = re.compile(r"(?:site|dist)-packages[/\\]")
# a file that is not the user's
INSTALLED = re.compile(
    r"site-packages|dist-packages|/lib/python\d|[Pp]ython\d+\\[Ll]ib\\|/transformers/models/|<frozen |^<|\.p(?:yx|xi)\b"
)
MODULES = re.compile(  # the first part of a module's name, of packages whose names come and go
    r"(?:torch|tensor|tf|jax|keras|onnx|nvidia|unsloth|mm[a-z])\w*|numpy|np|scipy|pandas|sklearn|skimage|cv2|PIL|matplotlib|seaborn"
    r"|plotly|bokeh|flax|optax|orbax|transformers?|transformer_engine|tokenizers|datasets|evaluate|accelerate|peft|trl|diffusers"
    r"|deepspeed|megatron|apex|xformers|flash_attn|triton|bitsandbytes|lightning|pytorch_lightning|gym|gymnasium|ale_py|pybullet"
    r"|baselines|stable_baselines3|ray|vllm|sglang|wandb|mlflow|comet_ml|neptune|clearml|hydra|omegaconf|pkg_resources|setuptools"
    r"|distutils|google|protobuf|pyarrow|h5py|cupy|numba|dgl|timm|open_clip|clip|whisper|fairseq|fairscale|detectron2|faiss|yaml|six"
    r"|requests|urllib3|chardet|openai|huggingface_hub|safetensors|nltk|spacy|gensim|librosa|pydub|ffmpeg|speechbrain|espnet|TTS"
    r"|sacrebleu|xgboost|lightgbm|catboost|optuna|shap|networkx|sympy|statsmodels|imageio|albumentations|pynvml|psutil|tqdm|einops"
    r"|tiktoken|langchain|gradio|axolotl|verl|nemo|composer|litgpt|mamba_ssm|auto_gptq|awq|optimum|compressed_tensors|monai|kornia"
    r"|rdkit|pettingzoo|mujoco\w*|dm_control|tianshou|d4rl|zarr|xarray|soundfile|sentencepiece|aiohttp|httpx|fastapi|starlette|flask"
    r"|click|jinja2|markupsafe|tornado|zmq|IPython|bs4|lxml|streamlit|OpenSSL|Crypto|attr|pydantic|ultralytics|paddle\w*|mindspore"
    r"|mxnet|theano|lasagne|chainer|caffe\w*|dlib|face_recognition|pycocotools|pyspark|dask|cudf|cuml|horovod|mpi4py|colossalai|tvm"
    r"|pl|nn|st|plt|sb3"
)
CLASSES = (
    r"(?:Llama|Llava|Qwen|Mi[sx]tral|Gemma|Phi|GPT(?:2|Neo|J)|Bert|Roberta|T5|Bart|Whisper|CLIP|Auto|Pre[tT]rained|Lora|Peft"
    r"|Training|Generation|BitsAndBytes|SFT|DPO|GRPO|PPO|Reward|ORPO|KTO|RLOO|Seq2Seq|Deepseek|DeepSpeed|FSDP|LLM|Vllm|Cache)\w*"
    r"|\w*(?:Trainer|TrainingArguments|Tokenizer|TokenizerFast|Accelerator|Pipeline|ForCausalLM|Optimizer|AdamW?|LR|Scheduler"
    r"|ReduceLROnPlateau|Callback|Checkpoint|EarlyStopping|Logger|DataLoader|Sampler|Cache|Plugin|Strategy|Classifier|Regressor|DataParallel|Scaler"
    r"|Vectorizer|CV|KFold|Imputer|Executor|Writer)|(?:OneHot|Label|Ordinal)Encoder|SentenceTransformer|Async\w*|Client|OpenAI|HfApi"
    r"|LSTM|GRU|Conv[123]D|Dense|Dropout|BatchNormalization|LayerNorm\w*|\w*EntropyLoss|MultiheadAttention|DataFrame|Process|Popen"
)
# names of packages' classes whose methods are called, which a class of the user's own may have too
OBJECTS = r"\w*Env|\w*Wrapper|TimeLimit|Dataset\w*|\w*Engine|YOLO|Booster|\w*Model|Figure|\w*Axes|Session|Series|Tensor|Module"
OWN = re.compile(  # whoever calls it: a file outside of the packages, a function inside of another one
    r"ImportError: cannot import name '[^']+' from '[^']+' "
    r"\((?!unknown location|.*(?:site-packages|dist-packages|/lib/python))[^)\n]+\)(?:\. Did you mean[^\n]*)?$"
    r"|TypeError: [\w.<>]*<locals>\.\w+\(\) got an unexpected keyword argument"
    # with the statement of the package that it was passed to (tracebacks.STATEMENT_SHOWN)
    r"|TypeError: [a-z]\w*\(\) got an unexpected keyword argument '\w+'\n"
)
OWN_IF_CALLED = re.compile(  # by the user's file, as it is more often its own than a package's
    r"TypeError: [a-z_]\w*\(\) got an unexpected keyword argument|AttributeError: '\w+' object has no attribute '_[a-z]"
    rf"|(?<![\w.])(?!(?:{CLASSES})\.)[A-Z]\w*\.__init__\(\) got an unexpected keyword argument"
    rf"|(?<![\w.])(?!(?:{CLASSES}|{OBJECTS})\.)[A-Z]\w*\.(?!__)\w+\(\) got an unexpected keyword argument"
    rf"|type object '(?!(?:{CLASSES})')[A-Z]\w*' has no attribute"
    r"|AttributeError: (?:partially initialized )?module '(?P<module>\w+)[\w.]*' has no attribute"
    r"|KeyError: (?P<key>'[a-z][\w.-]*')$"
)
BY_FRAME = (  # the cause, its weight, the message, one of the innermost frames
    ("system-tool-missing", 0.9, r"FileNotFoundError: \[Errno 2\] .*: '(?P<tool>[^']+)'", r"\bin _execute_child\b"),
    # torch looks for the end of the archive in front of the file's start where the file is cut
    ("checkpoint-corrupt", 0.9, "OSError", r"torch/serialization\.py\", line \d+, in __init__\b"),
    # the parent that had to send it is gone
    ("killed-from-outside", 0.6, r"\S*UnpicklingError: pickle data was truncated", r"multiprocessing[/\\]spawn\.py.* in _main\b"),
    # the worker that holds the tensor of a batch is gone, and its socket with it
    (
        "dataloader-worker-killed", 0.85, r"(?:FileNotFoundError|ConnectionRefusedError|ConnectionResetError|EOFError)\b",
        r"(?s)\butils[/\\]data[/\\].*multiprocessing[/\\]resource_sharer\.py\", line \d+, in (?:get_connection|detach)\b",
    ),
    # of torchrun's agents the master alone
    ("master-unreachable", 0.9, r"\S*DistStoreError: Timed out after .* for clients\. 1/", "static_tcp_rendezvous"),
    (  # a text that the user's own code reads
        "user-code-exception", 0.6, r"json\.decoder\.JSONDecodeError: ",
        r"^(?:(?!(?:site|dist)-packages|[/\\]json[/\\]).)*\n(?:.*[/\\]json[/\\]\w+\.py\", line .*\n?)+\Z",
    ),
    # in a child, which imports the script again
    (
        "missing-main-guard", 0.9, r"RuntimeError: context has already been set",
        r"\bspawn\.py\", line \d+, in _fixup_main_from_path\b",
    ),
    # a worker that ended before its parent had sent it what it needs
    ("dataloader-worker-killed", 0.95, "BrokenPipeError", r"\bpopen_spawn_win32\.py\b"),
    (
        "hub-offline", 0.85, r"(?:requests\.exceptions|httpx)\.\w*(?:Connect\w*|Timeout)\b",
        r"(?:site|dist)-packages/(?:huggingface_hub/|datasets/|transformers/utils/hub\.py)",
    ),
    (  # of the sample that a trainer takes of its data before it begins
        "dataset-empty", 0.85, "StopIteration",
        r"(?:site|dist)-packages[/\\]\w+[/\\]trainer[/\\]\w+\.py\", line \d+, in __init__\Z",
    ),
    (  # what is stored for each position, and as many were asked for as the sequence has
        "sequence-too-long", 0.7,
        r"RuntimeError: The expanded size of the tensor \((?P<length>\d+)\) must match the existing size \((?P<limit>\d+)\)"
        r".* Tensor sizes: \[1, (?P=limit)\]\.?$",
        r"[/\\]transformers[/\\]models[/\\]\w+[/\\]modeling_\w+\.py\", line \d+, in forward\Z",
    ),
    ("shm-too-small", 0.96, r"OSError: \[Errno 28\]", r"multiprocessing[/\\](?:synchronize|shared_memory|heap)\.py\""),
    ("disk-full", 0.85, r"RuntimeError: Unknown error -1$", r"\bserialization\.py\", line \d+, in (?:_save|save|__exit__)\b"),
    (  # the folder of an output is missing
        "user-code-exception", 0.5, "FileNotFoundError",
        r"\bin (?:mkdir|makedirs|savefig|print_\w+|open_file_cm|to_csv|to_parquet|to_json|to_filename|imsave|imwrite"
        r"|write_text|write_bytes)\b|\blogging[/\\]__init__\.py\", line \d+, in _open\b",
    ),
    ("user-code-exception", 0.5, r"FileNotFoundError: .*\n.*\bopen\(", ""),  # likewise, by the statement
    # a print, whose reader is gone
    ("user-code-exception", 0.6, r"BrokenPipeError: .*\n.*(?:\bprint\(|\bsys\.std(?:out|err)\.(?:write|flush)\()", ""),
    (  # the user's own call of a module, whose forward raised nothing itself
        "user-code-exception", 0.76, rf"TypeError: (?:(?!(?:{CLASSES})\.)\w+\.)?forward\(\) got an unexpected keyword argument",
        r"^(?:(?!(?:site|dist)-packages).)*\n(?:.*torch[/\\]nn[/\\](?:modules[/\\]module|parallel[/\\]\w+)\.py\", line .*\n?)+\Z",
    ),
    (  # the features of the user's own table, in the user's own call
        "user-code-exception", 0.85, r"ValueError: (?:Input|Array)\b.*contains (?:NaN|infinity)",
        r"^(?!.*packages[/\\]).*\n"
        r".*packages[/\\]sklearn[/\\](?!metrics|utils).*, in (?:\w+_)?(?:fit|predict|transform|score)(?:_\w+)?$",
    ),
    # a worker whose parent, which sends it the commands, has ended
    (
        "peer-died", 0.5, r"(?:ConnectionResetError|EOFError)\b",
        r"(?s), in _?(?:async_)?worker\w*\n.*multiprocessing[/\\]connection\.py\", line \d+, in _?recv",
    ),
    # a package that pip builds in an environment of its own
    (
        "compile-failure", 0.9, "(?:ModuleNotFound|Import)Error: ",
        r"[/\\]pip-(?:install|req-build|wheel)-?\w*[/\\].*\bsetup\.py\", line",
    ),
    (
        "config-error", 0.85, r"TypeError: .*__init__\(\) got an unexpected keyword argument '(?P<argument>(?!render_mode)\w+)'",
        r"gym(?:nasium)?[/\\]envs[/\\]registration\.py\", line \d+, in make\b",
    ),
)  # fmt: skip
CHECK = re.compile(r"(?:Value|Assertion|Type|NotImplemented|Index|Lookup|Attribute)Error\b")
OUTCOME_LINES = 8  # behind an exception
TRAINING_FAILED = re.compile(r"(?i)\b(?:training|fine-?tuning|experiment|job|run) (?:has )?failed\b")
NO_MEMBER = re.compile(rf"AttributeError: '(?!(?:{CLASSES})')\w+' object has no attribute")
MODULE_GETATTR = re.compile(r'", line \d+, in __getattr__\b')
OWN_FORWARD = re.compile(r'", line \d+, in (?:__init__|forward)\b')
MISSING_NAME = re.compile(r"AttributeError: module '(?P<module>\w+)' has no attribute '(?P<name>\w+)'")
# names that the packages have: a folder of the user's own that is meant to be there lacks others
HIDDEN_NAME = re.compile(
    r"datasets\.(?:load_\w+|Dataset(?:Dict)?|Features|concatenate_datasets)|evaluate\.(?:load|combine)|wandb\.(?:init|log(?:in)?|Api)"
)
HIDDEN_WEIGHT = 0.9
FRAME_PATH = re.compile(r'"([^"]+)", line \d+')
# of a queue whose reader is gone; its thread prints it and ends
QUEUE = re.compile(
    r"multiprocessing[/\\](?:queues\.py.*, in _feed|connection\.py.*, in (?:close|send_bytes|_send_bytes|_send|_close))$"
)
NO_READER = re.compile(r"BrokenPipeError|OSError: \[Errno 9\]")
IN_CHILD = re.compile(r"multiprocessing[/\\]process\.py\", line \d+,? in _bootstrap")  # likewise, a child process
NOTHING_CAME = re.compile(r"(?:\w+\.)*(?:Empty|EOFError|BrokenPipeError|ConnectionResetError)\b")
WAITS = re.compile(r"\bqueues?\.py\b|[/\\]multiprocessing[/\\]|\bin (?:get|recv|join)\b")
LOST_PEER = re.compile(r"Connection (?:closed|reset) by peer|Broken pipe|remote process exited")
IN_THREAD = re.compile(r"threading\.py\", line \d+,? in _bootstrap")  # the first frame of what ends a thread alone
NOT_LOADED = re.compile(r"(?i)could not|cannot|unable|fail|error")
PACKAGE_IMPORT = re.compile(r"(?:site|dist)-packages[/\\].* in <module>$")  # the first frame is the package's own
TRACKER = re.compile(  # or a server of notebooks, or what looks for a build of bitsandbytes
    r"(?:site|dist)-packages/(?:bitsandbytes/c\w+\.py|(?:tornado|jupyter\w*|notebook|wandb|tensorboardX?|mlflow|comet_ml|neptune"
    r"|trackio|clearml|swanlab)/|iopath/common/event_logger)"
)
TRACKER_COMMAND = re.compile(r"packages/wandb/cli/")  # which is the program itself, where nothing was trained
# where logging prints what a wrong call raised, and a server what a request did
LOGGING = re.compile(
    r"\blogging[/\\]__init__\.py\", line \d+, in emit$|\bsocketserver\.py\", line \d+, in _?(?:handle|process)_request_\w+$"
)
LOGGED = re.compile(r"Message: .*\nArguments: \(")  # behind the stack that logging prints with it
# right behind an exception: what the program does in place of what failed
CAUGHT = re.compile(r"(?i)^.{0,40}?\b(?:(?:re)?trying (?:again )?with|falling back to)\b")
LEFT_STAGE = re.compile(
    r"(?i)^(?!.*\btrain)[\w ,.:-]{0,60}\bskipp(?:ed|ing)\b"
)  # by a script, without a package that it needs
ALL_STAGES = re.compile(r"(?i)\ball stages (?:complete|finished)")
OF_MACHINE = re.compile(r"OutOfMemory|[Oo]ut of memory|CUDA|core dumped|Segmentation fault|terminate called")
# what no process survives
CONTEXT_LOST = re.compile(r"illegal memory access|device-side assert|launch failure|uncorrectable ECC")
LEFT_OUT = re.compile(  # logged right above it, of an item of the data
    r"(?i)^\W*ERROR\b.*\b(?:line|row|sample|example|file|shard|doc(?:ument)?|record|image)s?\b.*\b(?:skipp|ignor)(?:ed|ing)\b"
)
WARNED = re.compile(  # or an error after which a program goes on, as it says
    r"\bWARN(?:ING)?\b|\bERROR\b.*\b(?:optional|keeping|continu(?:e|es|ing)|skipp(?:ed|ing)|ignor(?:ed|ing)|falling back)\b"
)
FAILED = re.compile(
    r"(?i)fail|error|exception|could not|cannot|can't|unable|optional|skip|ignor|retry|fall(?:ing)? back"
)
WORK_FAILED = re.compile(  # not of a side task
    r"(?i)\b(?:training|run|job|step|epoch)\b.{0,30}\b(?:fail|crash|abort|error|exception)"
    r"|\b(?:fail\w*|crash\w*|error|exception)\b.{0,12}\b(?:in|at|during) (?:step|epoch|training)"
    r"|^wandb: |\bnot (?:skipp|continu|ignor)"
)
MIN_EVALUATED = 3  # different errors at one place of the script: Python ends at the first that nobody has caught
CHAIN_LINES = 6  # from an exception to the one that it led to, beside the lines of its frames
CHILD_STEPS = 20  # that a program takes from what its queue still holds
STEPS_BEHIND, ITEMS_BEHIND, ITEMS_ABOVE = 3, 2, 3  # that show that it did; lines above, of which one is of such an item


def is_own(record: Record) -> bool:
    """Whether an exception is about a function, a module or something private of the user's own code."""
    if OWN.match(record.text) or lacks_own_member(record):
        return True
    called = OWN_IF_CALLED.search(record.text)
    if called is None or (INSTALLED.search(record.frames[-1]) if record.frames else called["key"]):
        return False
    module = called["module"] or ""
    return module not in sys.stdlib_module_names and not MODULES.fullmatch(module)


def is_check(record: Record) -> bool:
    """Whether a package refuses a value: the words of such a message name what a setting is about, not what failed."""
    return bool(record.frames) and bool(CHECK.match(record.text) and PACKAGE.search(record.frames[-1]))


def lacks_own_member(record: Record) -> bool:
    """Whether a module of the user's own uses a member of itself that was never set, as its forward alone can show."""
    if len(record.frames) < 2 or not (NO_MEMBER.match(record.text) and MODULE_GETATTR.search(record.frames[-1])):
        return False
    return OWN_FORWARD.search(record.frames[-2]) is not None and not INSTALLED.search(record.frames[-2])


def is_outcome(record: Record, log: Log) -> bool:
    """Whether a line soon behind a traceback says that the training failed with its message."""
    first, *others = record.text.split("\n")
    message = first.partition(": ")[2]
    last = record.line + 2 * len(record.frames) + OUTCOME_LINES  # a frame is two lines
    others += [other.text for other in log.records_between(record.line + 1, last)]
    return bool(record.frames and message) and any(TRAINING_FAILED.search(text) and message in text for text in others)


def match_frames(record: Record) -> tuple[str, float, dict[str, str]] | None:
    """The cause, its weight and its values that the innermost frames of an exception show."""
    if (missing := MISSING_NAME.match(record.text)) and (
        hiding := hiding_file(missing["module"], missing["name"], record.frames)
    ):
        return "import-error", HIDDEN_WEIGHT, {"name": missing["name"], "own_file": hiding}
    frames = "\n".join(record.frames[-8:])
    for cause, weight, message, frame in BY_FRAME if frames else ():
        if (match := re.match(message, record.text)) and re.search(frame, frames, re.MULTILINE):
            return cause, weight, match.groupdict()
    return None


def hiding_file(module: str, name: str, frames: Sequence[str]) -> str | None:
    """The file or folder beside the user's script that has the name of a package, and is imported in its place."""
    if not frames or not (HIDDEN_NAME.fullmatch(f"{module}.{name}") or module in sys.stdlib_module_names):
        return None
    paths = [match[1] for frame in frames if not INSTALLED.search(frame) and (match := FRAME_PATH.search(frame))]
    hiding = re.sub(r"[^/\\]*$", "", paths[0]) + module if paths else ""
    return next((hiding for path in paths if re.match(rf"{re.escape(hiding)}(?:\.py$|[/\\])", path)), None)


def left_program_running(record: Record, log: Log) -> bool:
    """Whether an exception ended no more than a thread, a tracker's or one of a program whose work was done, or a logging call."""
    if record.text.startswith("KeyboardInterrupt"):  # Python raises it in the main thread alone
        return False
    if not record.frames:  # of one that threads have printed at once
        twins = (other for other in log.records if other.frames and other.text.startswith(record.text))
        return record.kind == "exception" and any(left_program_running(twin, log) for twin in twins)
    if NO_READER.match(record.text) and all(map(QUEUE.search, record.frames)):
        return True
    is_thread = IN_THREAD.search(record.frames[0]) is not None
    if outlived(record, log, is_thread=is_thread):
        return True
    # threads that print at once mix their frames
    places = record.frames if is_thread else (record.frames[0], record.frames[-1])
    is_program = TRACKER_COMMAND.search(record.frames[0]) and not log.progress.steps
    if any(map(TRACKER.search, places)) and not is_program:
        return all(map(INSTALLED.search, record.frames))
    done_line = log.progress.done_line or (log.last_progress_line if log.progress.finished else None)
    is_later = done_line is not None and record.line > done_line
    is_logged = LOGGING.search(record.frames[0]) or LOGGED.match(record.text)
    return bool(is_logged) or (is_later and is_thread)


def is_caught(record: Record, log: Log) -> bool:
    """Whether the program says of an exception that it repeats or leaves out what failed, and the work goes on behind it.

    Likewise what a model has written, the end of a trial of Optuna, and of an engine that its server has stopped.
    """
    if log.is_of_trial(record) or log.is_of_shutdown(record) or is_quoted(record, log):
        return True
    if not record.frames or CONTEXT_LOST.search(record.text):
        return False
    following = log.records_between(record.line + 1, record.line + 3 * len(record.frames) + OUTCOME_LINES)
    notices = [*record.text.split("\n")[1:], *(other.text for other in following[:1])]
    is_done = any(line > record.line and ALL_STAGES.search(text) for line, text in log.last_lines)
    if is_of_evaluated(record, log) or (is_done and failed_at_import(record) and any(map(LEFT_STAGE.match, notices))):
        return log.has_one_process
    if any(map(CAUGHT.match, notices)) and len(log.steps_after(record)) >= STEPS_BEHIND:
        return log.has_one_process
    above = log.records_between(record.line - 1 - ITEMS_ABOVE, record.line - 1)
    report = above.pop() if above and above[-1].line == record.line - 1 else None
    if report is None or report.time is None or not LEFT_OUT.match(report.text):
        return False
    shapes = {shape_of(other.text) for other in above}
    behind = log.records_between(record.line + 1, log.last_line)
    times = [other.time for other in behind if other.time is not None and shape_of(other.text) in shapes]
    return sum(time >= report.time for time in times) >= ITEMS_BEHIND and log.has_one_process


def is_of_evaluated(record: Record, log: Log) -> bool:
    """Whether a program prints what failed in each thing that it evaluates: several errors at one place, and results at the end.

    Errors that nobody seems to have caught are such only where code was run that stands in no file.
    """
    if not log.last_lines or not SAVED.search(log.last_lines[-1][1]) or OF_MACHINE.search(record.text):
        return False
    alike = [other for other in log.records if other.frames[:1] == record.frames[:1]]
    runs_texts = any('File "<string>"' in frame for other in alike for frame in other.frames)
    return (runs_texts or not ended_program(record)) and len({shape_of(other.text) for other in alike}) >= MIN_EVALUATED


def outlived(record: Record, log: Log, *, is_thread: bool) -> bool:
    """Whether another exception ended the program, before this thread, or after this failed import that was logged."""
    is_import = PACKAGE_IMPORT.search(record.frames[0]) is not None
    above = log.records_between(record.line - 1, record.line - 1) if is_import else []
    logged = any(other.kind == "line" and NOT_LOADED.search(other.text) for other in above)
    if not (is_thread or logged):
        return False
    ends = [other.line for other in log.records if ended_program(other) and not PACKAGE.search(other.frames[0])]
    return bool(ends) and ((is_thread and ends[0] < record.line) or (logged and ends[-1] > record.line))


def is_warned_of(record: Record, log: Log) -> bool:
    """Whether a logger wrote an exception, and no other that it led to, behind a warning of its own."""
    return WARNED.search(line_above(record, log)) is not None


def is_side_error(record: Record, log: Log) -> bool:
    """Whether that warning says that something failed, and not the training itself."""
    above = line_above(record, log)
    is_of_work = WORK_FAILED.search(above) or OF_MACHINE.search(record.text) or CONTEXT_LOST.search(record.text)
    return bool(WARNED.search(above) and FAILED.search(above) and not is_of_work)


def line_above(record: Record, log: Log) -> str:
    """The text right above an exception that was logged and led to no other; "" for any other record."""
    near = log.records_between(record.line - 2, record.line - 1)
    before = [other for other in near if other.kind == "line" and other.rank == record.rank]
    behind = log.records_between(record.line + 1, record.line + CHAIN_LINES + 3 * len(record.frames))
    is_chained = bool(behind) and behind[0].kind == "exception"
    is_logged = record.kind == "exception" and not ended_program(record) and not is_chained
    return before[-1].text if is_logged and before else ""


def others_waited(record: Record, log: Log) -> bool:
    """Whether an exception ended a child or a rank, for which its parent or another rank then waited in vain, and ended too."""
    ended = [other for other in log.records if other.line > record.line and ended_program(other)]
    if record.frames and IN_CHILD.search(record.frames[0]):
        waited = (other for other in ended if NOTHING_CAME.match(other.text) and any(map(WAITS.search, other.frames)))
        return any(len(log.steps_after(record, before=other.line)) < CHILD_STEPS for other in waited)
    lost = (other for other in ended if other.rank not in (None, record.rank) and LOST_PEER.search(other.text))
    lines = {line for line, _, _ in log.last_progress if line > record.line}
    went_on = any(other.rank == record.rank and other.line in lines for other in log.records)
    is_rank = record.rank is not None and ended_program(record) and not went_on and not LOST_PEER.search(record.text)
    return is_rank and any(len(log.steps_after(other)) < STEPS_BEHIND for other in lost)


def is_quoted(record: Record, log: Log) -> bool:
    """Whether the only process of a log shows an error in a text that a model has written.

    A buffer may put the end of such a text behind the traceback that ended the program, but not behind a signal.
    """
    is_real = bool(record.frames) and not record.frames[0].startswith('File "<stdin>"')
    is_real = is_real or record.kind == "signal" or OF_MACHINE.search(record.text) is not None
    return not is_real and log.is_in_sample(record.line, record.text) and log.has_one_process
