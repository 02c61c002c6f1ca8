"""
GPUAlert's public corpus as labelled logs for explain.py: 474 logs of 15 classes, most of them from 31 templates.

It is not part of this repository: git clone https://github.com/Parv-01/gpualert-eval (MIT; paper arXiv 2607.01409). Each line of
corpus/labels.jsonl has an id, a class (`mode`), a source (injected, synthetic or wild) and the path of the log. A class is wider
than a cause of the catalogue, so what counts as right is stated here: for each class by its template, and for the logs from public
threads that show another message one by one.
"""

import json
from pathlib import Path
from typing import Any

LABELS = Path("corpus/labels.jsonl")
CLASSES = {  # the causes that are right for a class; the first one is the label
    "cuda_oom": ("cuda-oom",),
    "nccl": ("nccl-unhandled-system-error", "collective-timeout-desync"),  # a watchdog timeout, then NCCL's error
    "cuda_runtime": ("device-side-assert-index",),
    "ram_oom": ("host-oom-killed",),
    "segfault": ("sigsegv",),
    "file_not_found": ("dataset-missing",),  # /data/imagenet/train_manifest.json
    "permission": ("permission-denied",),
    "missing_module": ("import-error",),
    "div_zero": ("user-code-exception",),
    "device_mismatch": ("device-mismatch",),
    "nan_loss": ("loss-nan",),
    "oom_killer": ("host-oom-killed",),
    "traceback": ("user-code-exception", "config-error"),  # KeyError: 'warmup_steps' of cfg["warmup_steps"]
    "assertion": ("user-code-exception", "shape-mismatch"),  # batch size 30 != 32
    "runtime_error": ("cuda-arch-unsupported",),  # CUDA capability sm_90 is not compatible with this build
}
WILD = {  # logs whose message is another one than their class's template
    "assertion-wild-02": ("process-group-not-initialized",),
    "cuda_runtime-wild-01": ("illegal-memory-access",),
    "file_not_found-wild-01": ("config-error", "checkpoint-missing-or-perm"),  # configs/base.yaml
    "file_not_found-wild-02": ("checkpoint-missing-or-perm",),  # /checkpoints/last.ckpt
    "missing_module-wild-02": ("shared-library-missing",),  # libcudart.so.11.0
    "nan_loss-wild-02": ("loss-nan", "fp16-overflow"),  # Gradient overflow. loss = nan, skipping step
    "nccl-wild-01": ("nccl-cuda-failure",),
    "nccl-wild-02": ("collective-timeout-desync",),
    "runtime_error-wild-01": ("user-code-exception",),  # Trying to resize storage that is not resizable
    "runtime_error-wild-02": ("state-dict-mismatch",),
}


def load_gpualert(folder: Path) -> list[dict[str, Any]]:
    """The corpus in the form of explain.py's cases."""
    cases = []
    for line in (folder / LABELS).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        cause, *also = WILD.get(row["id"], CLASSES[row["mode"]])
        log = (folder / row["log_path"]).read_text(encoding="utf-8", errors="replace")
        file = f"gpualert {row['source']}"
        cases.append({"id": row["id"], "file": file, "source": "gpualert", "log": log, "cause": cause, "also": also})
    return cases
