"""A loss that is no number, or leaps: seen, kept on file, and with --on-nan rollback left behind on any number of ranks."""

import hashlib
import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import SMALL, Workshop, events, final_bits, metrics, poison

from paceline.data.dataset import rows_of_step
from paceline.data.prepare import TokenDataset, prepare
from paceline.model.checkpoint import CheckpointReader, CheckpointWriter, Piece
from paceline.model.manifest import newest_good
from paceline.rundir import RunDir
from paceline.train.trouble import LossGuard, LossTrouble, Trouble, answer_trouble, find_trouble

SEQUENCE_LEN = SMALL["sequence-len"]
ROWS_PER_STEP = SMALL["total-batch-size"] // SEQUENCE_LEN
SPIKE_BATCH, NAN_BATCH = 20, 6
NAN_ROW = 3  # of its batch: rank 1 of 2 takes it
POISONED = "model.value_embeds.1.weight"
TWO_RANKS = {"nproc": 2, "device_batch_size": SMALL["device-batch-size"]}


def test_a_loss_far_above_the_mean_of_those_before_is_a_spike_and_does_not_count_towards_it():
    guard = LossGuard(max_spike=1.0)
    assert [guard.check(loss) for loss in (5.0, 4.0, 4.5)] == [None, None, None]
    mean = guard.mean
    assert guard.check(mean + 1.5) == pytest.approx(1.5)
    assert guard.mean == mean


def test_without_a_bound_no_loss_is_a_spike():
    guard = LossGuard()
    assert [guard.check(loss) for loss in (5.0, 1e9)] == [None, None]


def test_a_mean_loaded_from_a_checkpoint_is_the_same_to_the_last_bit():
    guard, other = LossGuard(), LossGuard()
    for loss in (5.1, 4.3, 0.7):
        guard.check(loss)
    other.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert other == guard


def test_a_bad_rank_is_reported_before_any_other_trouble():
    trouble = find_trouble(LossGuard(), 7, loss=3.0, bad_ranks=(1, 2), gradient_bad=True)
    assert (trouble.cause, trouble.message) == ("loss-nan", "the loss is not finite at step 7 on ranks 1, 2")


LEAPS = {"num_steps": 26, "save_every": 8, "max_loss_spike": 0.5, "on_nan": "rollback"}


class Shard:
    """The only shard of a training text, to be changed where it lies."""

    def __init__(self, dataset: TokenDataset):
        self.dataset = dataset
        [name] = self.dataset.meta["splits"]["train"]["shards"]
        self.path = self.dataset.path / name
        self.tokens = np.memmap(self.path, dtype="<u2", mode="r+")
        self.lone_token = 0

    def rows(self, batch: int) -> list[int]:
        num_rows = self.dataset.split("train", "stream").num_rows(SEQUENCE_LEN)
        return rows_of_step(batch, rows_per_step=ROWS_PER_STEP, num_rows=num_rows, seed=42).tolist()

    def row(self, row: int) -> np.ndarray:
        """Without its first token, which is the last target of the row before."""
        return self.tokens[row * SEQUENCE_LEN + 1 : (row + 1) * SEQUENCE_LEN]

    def sign(self) -> None:
        """Gives the shard the hash of what it holds."""
        self.tokens.flush()
        meta = self.dataset.meta
        meta["files"][self.path.name]["sha256"] = hashlib.sha256(self.path.read_bytes()).hexdigest()
        (self.dataset.path / "meta.json").write_text(json.dumps(meta))


def spoiled_shard(shop: Workshop, *, tokenizer: Path | None = None) -> Shard:
    """The text as training tokens with one batch of rare tokens, and in another batch one row with a token that is nowhere else."""
    keys = {"vocab_size": SMALL["vocab-size"], "cache_dir": shop.folder / "cache"}
    shard = Shard(prepare(str(shop.text), tokenizer=tokenizer and str(tokenizer), **keys))
    counts = np.bincount(shard.tokens, minlength=SMALL["vocab-size"])
    rare = np.argsort(counts, kind="stable")[:64]
    shard.lone_token = int(rare[0])
    shard.tokens[shard.tokens == shard.lone_token] = rare[1]
    for row in shard.rows(SPIKE_BATCH):
        shard.row(row)[:] = rare[1:]
    shard.row(shard.rows(NAN_BATCH)[NAN_ROW])[20] = shard.lone_token
    shard.sign()
    return shard


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> Workshop:
    shop = Workshop(tmp_path_factory.mktemp("trouble"))
    shop.shard = spoiled_shard(shop)
    return shop


@pytest.fixture(scope="module")
def poisoned(shop):
    """Copies of a run of 4 steps whose checkpoint has a number that overflows where the lone token is embedded."""
    first = shop.train("poisoned", nproc=1, num_steps=4, device_batch_size=6)
    poison(first, POISONED, shop.shard.lone_token, 3e38)
    return lambda name: Path(shutil.copytree(first, first.with_name(name)))


def evidence(run: Path, step: int, rank: int) -> dict:
    [path] = (run / "trouble" / f"step_{step:06d}").glob(f"attempt_*_rank_{rank}.json")
    return json.loads(path.read_text())


def skipped(run: Path) -> list[int]:
    return [each["batch"] for each in json.loads((run / "skipped.json").read_text())["batches"]]


@pytest.mark.dist
def test_a_run_from_other_weights_stops_at_a_nan_loss_and_the_evidence_names_rank_and_row(tmp_path, unbroken):
    """The weights are those of the unbroken run, with a number that overflows where the lone token is embedded."""
    shop = Workshop(tmp_path)
    weights, run = shop.copy(unbroken, "weights"), shop.folder / "runs" / "stops"
    shard = spoiled_shard(shop, tokenizer=RunDir(weights).tokenizer_json)
    poison(weights, POISONED, shard.lone_token, 3e38)
    keys = {**TWO_RANKS, "init_from": weights, "num_steps": 8}
    output = shop.finish(shop.train_command("stops", **keys), code=3)
    start, there = (CheckpointReader(newest_good(path / "checkpoints", set_aside=False)[0]) for path in (run, weights))
    assert (start.step, events(run, "resumed")) == (0, [])
    assert start.keys() == [key for key in there.keys() if key.startswith("model.")]
    assert all(torch.equal(start.read(key), there.read(key)) for key in start.keys())
    assert f"error: the loss is not finite at step {NAN_BATCH + 1} on rank 1" in output
    assert f"fix: see {run / 'trouble' / 'step_000007'}; then paceline resume {run} with a lower --matrix-lr" in output
    [event] = events(run, "trouble")
    assert (event["step"], event["cause"], event["ranks"]) == (7, "loss-nan", [1])
    well, bad = evidence(run, 7, 0), evidence(run, 7, 1)
    assert sorted(well["rows"] + bad["rows"]) == sorted(shard.rows(NAN_BATCH))
    assert None not in well["row_loss"]
    assert [row for row, loss in zip(bad["rows"], bad["row_loss"], strict=True) if loss is None] == [
        shard.rows(NAN_BATCH)[NAN_ROW]
    ]
    assert all(norms["weight_bad"] == 0 for each in (well, bad) for norms in each["parameters"].values())
    assert not (run / "skipped.json").exists()


@pytest.mark.soak
@pytest.mark.dist
def test_a_rollback_skips_the_rows_as_if_they_had_never_existed(shop, poisoned):
    run = poisoned("rolls-back")
    knowing = run.with_name("knows-already")
    shutil.copytree(run, knowing)
    shop.resume(run, num_steps=9, on_nan="rollback", **TWO_RANKS)
    assert skipped(run) == [NAN_BATCH]
    assert [line["step"] for line in metrics(run)] == list(range(1, 10))
    [event] = events(run, "rollback")
    assert (event["step"], event["to_step"], event["batch"], event["number"], event["at_most"]) == (7, 4, 6, 1, 3)
    shutil.copy(run / "skipped.json", knowing)
    shop.resume(knowing, num_steps=9, **TWO_RANKS)
    assert final_bits(run) == final_bits(knowing)


@pytest.mark.dist
@pytest.mark.soak
def test_other_numbers_of_ranks_skip_the_same_rows(shop, poisoned):
    alone, two = poisoned("alone"), poisoned("two")
    shop.resume(alone, num_steps=12, nproc=1, on_nan="rollback")
    shutil.copy(alone / "skipped.json", two)
    shop.resume(two, num_steps=12, **TWO_RANKS)
    assert skipped(alone) == [NAN_BATCH]
    for one, other in zip(metrics(alone), metrics(two), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=2e-3)


@pytest.mark.dist
@pytest.mark.soak
def test_a_loss_spike_is_skipped_from_the_last_checkpoint_on(shop):
    run = shop.train("leaps", nproc=2, **LEAPS)
    assert [event["state"] for event in events(run, "attempt_ended")] == ["failed", "finished"]
    assert skipped(run) == [SPIKE_BATCH]
    [event] = events(run, "rollback")
    assert (event["step"], event["to_step"], event["cause"]) == (SPIKE_BATCH + 1, 16, "loss-spike")
    assert [line["step"] for line in metrics(run)] == list(range(1, 27))
    ends = [evidence(run, SPIKE_BATCH + 1, rank)["loss_of_all_ranks"] for rank in (0, 1)]
    assert ends[0] == ends[1] > metrics(run)[15]["loss"] + 0.5


@pytest.mark.dist
@pytest.mark.soak
def test_after_three_rollbacks_the_run_stops(shop, poisoned):
    run = poisoned("hopeless")
    poison(run, "model.h.0.mlp.c_fc.weight", 0, 3e38)
    output = shop.finish(shop.resume_command(run, num_steps=8, on_nan="rollback", **TWO_RANKS), code=3)
    assert skipped(run) == [4, 5, 6]
    assert "3 batches were skipped already, at steps 5, 5, 5" in output


@pytest.mark.dist
@pytest.mark.soak
def test_resume_refuses_weights_that_hold_nan_and_its_fix_goes_on_from_the_checkpoint_before(shop):
    run = shop.train("bad-weights", nproc=2, num_steps=4, save_every=2)
    poison(run, "model.h.0.mlp.c_fc.weight", 0, float("nan"))
    output = shop.finish(shop.resume_command(run, num_steps=8, on_nan="rollback"), code=1)
    assert "error: the weights of checkpoint step_000004 hold NaN or infinity, first in h.0.mlp.c_fc.weight" in output
    assert f"fix: paceline resume {run} --step 2: goes on from step 2, with a lower" in output
    assert [event["cause"] for event in events(run, "verdict")] == ["loss-nan"]
    shop.resume(run, num_steps=8, step=2)
    assert [line["step"] for line in metrics(run)] == list(range(1, 9))


@pytest.mark.parametrize("saved", [6, 4])
def test_no_batch_is_skipped_where_the_weights_already_held_nan(tmp_path, saved):
    run = RunDir(tmp_path)
    for step in (2, saved):
        writer = CheckpointWriter(
            run.checkpoints, rank=0, world_size=1, attempt="1", keep_last=2, on_saved=lambda *saved: None
        )
        writer.save(step, [Piece("x", (1,), (0, 1), torch.zeros(1))], {})
        writer.wait()
    trouble = Trouble("loss-nan", 7, "the loss is not finite at step 7 on rank 0", None)
    error = LossTrouble(trouble.message, fix="--on-nan rollback", trouble=trouble)
    answer = answer_trouble(run, error, on_nan="rollback", rank=0, bad_weight="wte.weight")
    assert answer.message == f"{trouble.message}: the weights held NaN or infinity before it, first in wte.weight"
    assert (f"{run.path} --step 2: goes on from step 2" in answer.fix) == (saved == 6)
    assert not answer.rollback and not run.skipped_json.exists()


@pytest.fixture
def damage(shop):
    """Sets one token of a row of a batch, and leaves the hash in meta.json as it was; mended after the test."""
    whole = shop.shard.path.read_bytes()

    def change(batch: int, token: int) -> None:
        shop.shard.row(shop.shard.rows(batch)[0])[5] = token

    yield change
    shop.shard.path.write_bytes(whole)


@pytest.mark.dist
@pytest.mark.soak
def test_a_loss_spike_on_a_damaged_shard_is_reported_as_damage_and_no_batch_is_skipped(shop, damage):
    damage(SPIKE_BATCH + 10, token=7)
    output = shop.finish(shop.train_command("leaps-on-damage", nproc=2, **LEAPS), code=1)
    assert f"error: {shop.shard.path} is damaged: its SHA-256 is" in output
    assert not (shop.folder / "runs" / "leaps-on-damage" / "skipped.json").exists()


@pytest.mark.dist
@pytest.mark.soak
def test_a_token_outside_the_vocabulary_is_reported_with_the_damaged_shard(shop, damage):
    damage(1, token=SMALL["vocab-size"] + 5)
    output = shop.finish(shop.train_command("no-such-token", nproc=1), code=1)
    assert f"error: {shop.shard.path} is damaged: its SHA-256 is" in output
    assert f"rm -r {shlex.quote(str(shop.shard.path.parent))}" in output
