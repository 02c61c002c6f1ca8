"""The command `export` on a run: what it writes, what it checks, what it refuses, and that nothing half is left."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from runs import STEPS

from paceline.cli import run_command
from paceline.data.tokenizer import Tokenizer
from paceline.errors import PacelineError
from paceline.model.manifest import list_checkpoints
from paceline.train import evaluate, export

DOCS = Path(__file__).parents[2] / "docs" / "checkpoint.md"
FILES = ["config.json", "generation_config.json", "model.safetensors", "modeling_paceline.py", "tokenizer.json"]
FILES.append("tokenizer_config.json")
# the three lines as they are printed, with the text that the model then writes
USE = """
{lines}
import sys
assert "paceline" not in sys.modules
tokens = tokenizer("def ", return_tensors="pt")
print(tokenizer.decode(model.generate(**tokens, max_new_tokens=12, do_sample=False)[0], skip_special_tokens=True))
"""


@pytest.fixture
def run(unbroken, tmp_path) -> Path:
    return Path(shutil.copytree(unbroken, tmp_path / "runs" / "books"))


def failed(capsys, *words: object) -> str:
    """Returns the two lines of an error."""
    capsys.readouterr()
    assert run_command(["export", *map(str, words)]) == 1
    return capsys.readouterr().err


def hidden(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.dist
def test_the_printed_lines_load_the_model_without_paceline_and_it_writes_what_sample_writes(run, capsys, tmp_path):
    pytest.importorskip("transformers", reason="needs transformers")
    assert run_command(["export", str(run)]) == 0
    out = run / "export" / f"books_step_{STEPS:06d}"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"model   books at step {STEPS}: ")
    assert lines[1].startswith("check   logits of 64 tokens differ by at most ")
    assert lines[2].startswith(f"wrote   {out}: ") and lines[2].endswith(f"; {', '.join(FILES)}")
    assert sorted(path.name for path in out.iterdir()) == FILES
    example = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)[1]
    code = USE.format(lines="\n".join(line[8:] for line in lines[3:]))
    code += example.replace("runs/books/export/books_step_000040", str(out)) + "assert len(texts) == 2"
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    words = ["--prompt=def ", "--tokens=12", "--temperature=0", "--device=cpu"]
    run_command(["sample", str(run), *words])
    assert done.stdout.strip() == capsys.readouterr().out.strip()


def test_a_step_and_a_folder_can_be_chosen_and_an_earlier_export_is_replaced(run, capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    out = tmp_path / "hf"
    out.mkdir()
    for step in (30, STEPS):
        assert run_command(["export", str(run), f"--step={step}", f"--out={out}", "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert (result["path"], result["step"], result["files"]) == (str(out), step, FILES)
        assert (result["largest_difference"], result["not_checked"]) == (None, "transformers is not installed")
        assert json.loads((out / "config.json").read_text())["paceline"]["step"] == step
    assert hidden(tmp_path) == []
    run_command(["export", str(run), f"--out={out}"])
    assert "check   not done: transformers is not installed\n" in capsys.readouterr().out


def test_a_folder_with_anything_else_is_refused_and_stays(run, capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    out = tmp_path / "hf"
    run_command(["export", str(run), f"--out={out}"])
    (out / "README.md").write_text("mine")
    assert "with README.md and is not as `paceline export` writes it" in failed(capsys, run, f"--out={out}")
    (out / "README.md").unlink()
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "transformers_version": "5"}, indent=1))  # fine-tuned there
    error = failed(capsys, run, f"--out={out}")
    assert error.endswith("\n  fix: --out DIR in another place, or remove it first\n")
    assert "already exists" in failed(capsys, run, f"--out={out / 'config.json'}")
    assert sorted(path.name for path in out.iterdir()) == FILES


def test_a_newer_checkpoint_that_is_clearly_worse_is_taken_with_a_note(run, capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    checkpoints = run / "checkpoints"
    better = replace(dict(list_checkpoints(checkpoints))[checkpoints / "step_000030"], val_bpb=1.25)
    monkeypatch.setattr(evaluate, "better_checkpoint", lambda *key: {(checkpoints, STEPS): better}.get(key))
    assert run_command(["export", str(run), f"--out={tmp_path / 'hf'}"]) == 0
    assert "note: val_bpb is lowest at step 30, 1.2500: --step 30\n" in capsys.readouterr().err


def test_step_best_is_the_checkpoint_with_the_lowest_val_bpb(run, capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    scores = {"step_000030": 1.25, f"step_{STEPS:06d}": 1.5}
    listed = list_checkpoints(run / "checkpoints")
    scored = [(path, replace(manifest, val_bpb=scores[path.name])) for path, manifest in listed]
    monkeypatch.setattr("paceline.model.manifest.list_checkpoints", lambda _: scored)
    assert run_command(["export", str(run), "--step", "best", f"--out={tmp_path / 'hf'}"]) == 0
    assert " at step 30: " in capsys.readouterr().out
    unscored = [(path, replace(manifest, val_bpb=None)) for path, manifest in listed]
    monkeypatch.setattr("paceline.model.manifest.list_checkpoints", lambda _: unscored)
    assert "no checkpoint of" in failed(capsys, run, "--step=best")


@pytest.mark.parametrize(
    "problem", [KeyboardInterrupt(), OSError(28, "No space left on device"), OSError(30, "Read-only")]
)
def test_what_breaks_half_way_leaves_the_earlier_export_and_nothing_else(problem, run, capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    out = tmp_path / "hf"
    run_command(["export", str(run), "--step=30", f"--out={out}"])
    shutil.copytree(out, killed := tmp_path / ".hf.4711.tmp")  # of a process that was killed
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def fail(*_):
        assert not killed.exists()
        raise problem

    monkeypatch.setattr(export, "tokenizer_json", fail)
    capsys.readouterr()
    code = run_command(["export", str(run), f"--out={out}"])
    error = capsys.readouterr().err
    expected = {None: "interrupted\n", 28: "fix: free some space", 30: "fix: --out DIR in a place you can write"}
    assert code == (130 if isinstance(problem, KeyboardInterrupt) else 1)
    assert expected[getattr(problem, "errno", None)] in error
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert hidden(tmp_path) == []


def test_an_interrupt_between_the_two_renames_brings_the_earlier_export_back(tmp_path):
    out = tmp_path / "hf"
    out.mkdir()
    (out / "config.json").write_text("old")
    with pytest.raises(PacelineError), export.new_folder(out, num_bytes=1) as folder:
        folder.rmdir()  # the second rename fails
    assert (out / "config.json").read_text() == "old"
    assert hidden(tmp_path) == []


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(run, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "free_space", lambda path: 1 << 20)
    error = failed(capsys, run, f"--out={tmp_path / 'hf'}")
    assert "are free\n  fix: free some space, or --out DIR on another disk" in error and "hf needs " in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]


def test_a_run_without_a_checkpoint_and_damaged_ones_are_refused(run, capsys, tmp_path):
    shard = next((run / "checkpoints" / "step_000030").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    assert "checkpoint step_000030 is damaged" in failed(capsys, run, "--step=30")
    assert f"has no checkpoint at step 7\n  fix: --step 30 or {STEPS}\n" in failed(capsys, run, "--step=7")
    shutil.rmtree(run / "checkpoints")
    assert "no checkpoint in" in failed(capsys, run)
    assert not (run / "export").exists()


def test_a_model_that_differs_is_not_written(run, capsys, tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="needs transformers")
    weights = export.export_weights

    def rounded(model):
        return {name: p.bfloat16().float() for name, p in weights(model).items()}

    monkeypatch.setattr(export, "export_weights", rounded)
    error = failed(capsys, run, f"--out={tmp_path / 'hf'}")
    assert "does not compute the run's numbers from the exported files: logits differ by" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]


def test_a_tokenizer_made_elsewhere_begins_every_text_with_its_own_token_between_documents(tmp_path):
    """GPT-2's file has another post-processor, and cuts and fills texts."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, processors

    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Library(models.BPE(alphabet | {"</s>": 256}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.post_processor = processors.ByteLevel(trim_offsets=False)
    inner.enable_truncation(2)
    inner.enable_padding(length=9)
    tokenizer = Tokenizer(inner.to_str().encode(), name="other")
    written = Library.from_str(export.tokenizer_json(tokenizer))
    assert written.encode("déjà").ids == [256, *tokenizer.encode("déjà")]
    assert written.encode("a", "b").ids == [256, *tokenizer.encode("ab")]
