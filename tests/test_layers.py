"""The layers of the design: imports point one way, torch stays where it belongs, importing does nothing."""

import ast
import functools
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "paceline"

# layer -> what of paceline it may import besides itself; "foundation" stands for the modules of FOUNDATION
FOUNDATION = {
    "command_line", "config", "config_file", "encoding", "errors", "file_systems", "heartbeat", "hub", "noise", "options",
    "other_names", "redaction", "run_options", "rundir", "slurm", "terminal", "typed_fields", "units", "__init__",
}  # fmt: skip
MAY_IMPORT = {
    "plan": {"foundation"},
    "data": {"foundation"},
    "watch": {"foundation", "explain"},
    "check": {"foundation", "plan", "data"},
    "explain": {"foundation"},
    "track": {"foundation", "explain", "watch"},
    "comm": {"foundation", "plan", "check", "launch"},
    "launch": {"foundation", "plan", "check", "data", "explain", "model", "watch"},
    "model": {"foundation", "plan"},
    "train": {"foundation", "plan", "data", "model"},
    "foundation": set(),
}
TORCH_LAYERS = {"model", "train"}
TORCH_PROCESSES = {  # processes of their own: two try this torch, three run it
    "paceline.check.probes.torch_probe",
    "paceline.check.torch_install",
    "paceline.comm.sweep",
    "paceline.comm.rank_process",
    "paceline.launch.elastic",
}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name not in ("__init__.py", "__main__.py"))


def layer_of(module: str) -> str:
    """paceline.plan.cost -> plan; paceline.errors -> foundation; paceline.cli -> cli."""
    parts = module.split(".")
    top = parts[1] if len(parts) > 1 else "__init__"
    return "foundation" if top in FOUNDATION else top


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@functools.cache
def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names if node.module == "paceline"}
    return names


def test_a_module_imports_only_the_layers_below_it():
    wrong = {}
    for path in MODULES:
        layer = layer_of(name := name_of(path))
        if layer == "cli":
            continue  # it stands on top; nothing may import it
        allowed = MAY_IMPORT[layer] | {layer} | ({"model", "train"} if name in TORCH_PROCESSES else set())
        used = {layer_of(imported) for imported in imports_of(path) if imported.startswith("paceline.")}
        wrong |= {name: used - allowed} if used - allowed else {}
    assert wrong == {}


def test_torch_is_imported_in_model_train_and_its_own_probe_alone():
    names = {name_of(path): {name.split(".")[0] for name in imports_of(path)} for path in MODULES}
    importing = {name for name, imported in names.items() if imported & {"torch", "safetensors"}}
    assert {name for name in importing - TORCH_PROCESSES if layer_of(name) not in TORCH_LAYERS} == set()


def test_a_command_that_needs_no_torch_imports_none(tmp_path):
    commands = ["--help", "train --help", "runs nowhere", "plan", "explain --list"]
    code = (
        "import sys; from paceline.cli import run_command\n"
        "for command in sys.argv[1:]:\n"
        "    run_command(command.split())\n"
        "    heavy = {'torch', 'rich', 'tokenizers', 'tiktoken', 'datasets', 'pyarrow', 'numpy'} & set(sys.modules)\n"
        "    print(f'{command} loaded {sorted(heavy)}')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *commands], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    loaded = [line for line in done.stdout.splitlines() if " loaded [" in line]
    assert loaded == [f"{command} loaded []" for command in commands]


@pytest.mark.slow
def test_importing_a_module_prints_nothing_and_changes_no_environment():
    modules = [name_of(path) for path in MODULES if path.name != "rank.py"]
    if importlib.util.find_spec("triton") is None:
        modules = [name for name in modules if not name.endswith("_kernel")]
    # transformers takes longer to import than all else here; tests/train/test_export.py sees that this module prints nothing
    modules.remove("paceline.model.modeling_paceline")
    code = (
        "import importlib, os, sys; before = dict(os.environ)\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "changed = {k for k in os.environ if os.environ[k] != before.get(k)} - {'KMP_INIT_AT_FORK', 'KMP_DUPLICATE_LIB_OK',"
        " 'TORCHINDUCTOR_CACHE_DIR', 'TRITON_CACHE_DIR'}\n"
        "assert not changed, changed"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
