"""
What an exception's frames say beside its message: whether the user's own code is wrong, or something that a package needs.

A message about a missing name or argument has the same form whoever wrote the function, so the names of the usual packages and
their classes tell whether two versions do not fit.
"""

import re
import sys
from collections.abc import Sequence

from paceline.explain.explanation import Record

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
    ("checkpoint-corrupt", 0.9, r"OSError(?!: \[Errno (?:36|63)\])", r"torch/serialization\.py\", line \d+, in __init__\b"),
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
    # what nanoGPT and nanochat execute to read the command line: its checks have no message
    (
        "config-error", 0.9, r"(?P<message>AssertionError(?:: Type mismatch: .*)?)$",
        r"^File \"(?:.*[/\\])?\w*(?:train|sample|eval|bench|sft|mid|rl|loss)\w*\.py\", line \d+, in <module>\n"
        r"File \"<string>\", line [2-4]\d\b",
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
    (  # a graph's
        "device-side-assert-index", 0.92, r"\w+Error: (?P<detail>index -?\d+ is out of bounds for dimension -?\d+ with size \d+)$",
        r"[/\\]torch_geometric[/\\]utils[/\\]_?scatter\.py\", line \d+, in \w+\Z",
    ),
    (  # a saved model that this version of Keras cannot read
        "version-mismatch", 0.7, r"(?:Attribute|Type|Key)Error: ",
        r"(?s)\bkeras[/\\][^\n]*\", line \d+, in load_model\b.*\n[^\n]*packages[/\\][^\n]*\Z",
    ),
    (  # in a worker of a loader that was forked
        "cuda-forked", 0.92, r"RuntimeError: CUDA error: initialization error",
        r"\butils[/\\]data[/\\]_utils[/\\]worker\.py",
    ),
    # of a distributed checkpoint, or the folder of one
    ("checkpoint-missing-or-perm", 0.9, r"IsADirectoryError(?:: .*'(?P<path>.+)')?", r"torch[/\\]serialization\.py\", line"),
    # a byte that is no command of pickle's format
    ("checkpoint-corrupt", 0.7, r"KeyError: \d{1,3}$", r"(?s)torch[/\\]serialization\.py\".*\bpickle\.py\", line \d+, in load\Z"),
    ("version-mismatch", 0.7, r"KeyError: \d{1,3}$", r"\bpickle\.py\", line \d+, in load\Z"),
    (  # RANK, WORLD_SIZE or MASTER_PORT
        "config-error", 0.9, r"ValueError: (?P<message>invalid literal for int\(\).*)",
        r"torch[/\\]distributed[/\\]rendezvous\.py\", line \d+, in _env_rendezvous_handler\Z",
    ),
    ("shm-too-small", 0.96, r"OSError: \[Errno 28\]", r"multiprocessing[/\\](?:synchronize|shared_memory|heap)\.py\""),
    ("disk-full", 0.85, r"RuntimeError: Unknown error -1$", r"\bserialization\.py\", line \d+, in (?:_save|save|__exit__)\b"),
    (  # the folder of an output is missing
        "user-code-exception", 0.5, "FileNotFoundError",
        r"\bin (?:mkdir|makedirs|savefig|print_\w+|open_file_cm|to_csv|to_parquet|to_json|to_filename|imsave|imwrite"
        r"|write_text|write_bytes)\b|\blogging[/\\]__init__\.py\", line \d+, in _open\b"
        r"|\bserialization\.py\", line \d+, in save\b",
    ),
    ("user-code-exception", 0.5, r"FileNotFoundError: .*\n.*\bopen\(", ""),  # likewise, by the statement
    # Ultralytics makes it then
    ("user-code-exception", 0.41, r"FileNotFoundError: .*\.cache'$", r"\bin load_dataset_cache_file\b"),
    # a print, whose reader is gone
    ("user-code-exception", 0.6, r"BrokenPipeError: .*\n.*(?:\bprint\(|\bsys\.std(?:out|err)\.(?:write|flush)\()", ""),
    ("user-code-exception", 0.6, "BrokenPipeError", r"\btqdm[/\\](?:std|utils|_tqdm)\.py\", line \d+, in \w+\Z"),  # a bar's
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
        r"gym(?:nasium)?[/\\]envs[/\\]registration\.py\", line \d+, in make\b"
        r"|hydra[/\\]_internal[/\\]instantiate[/\\].*, in _call_target\Z|skorch[/\\]net\.py\", line \d+, in initialized_instance\Z",
    ),
)  # fmt: skip
CHECK = re.compile(r"(?:Value|Assertion|Type|NotImplemented|Index|Lookup|Attribute)Error\b")
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
