"""A training as a job: what changes in the plan between two attempts, and the measured step compared with the planned one."""

import io
import json
import os
import shlex
import shutil
from dataclasses import asdict, replace

import pytest

from paceline.config import Config, cache_dir
from paceline.config_file import format_toml
from paceline.data import readers
from paceline.data.prepare import run_tokenizer
from paceline.data.tokenizer import train_tokenizer
from paceline.errors import Finding, PacelineError, PlanError
from paceline.launch.cluster import Cluster
from paceline.launch.digest import Digest
from paceline.launch.hosts import HostEntry
from paceline.launch.job import StepWatch, TrainingJob, first_step, planned_step, stop_grace_s, watch_steps
from paceline.launch.policy import Abilities, AttemptEnd, Decision
from paceline.launch.run_text import absolute_texts, changed_keys, prepare_data, record_data, reopen_data, run_data
from paceline.launch.supervisor import Outcome
from paceline.launch.train import changed_run, check_unfinished, config_of_plan, new_folder, resume_run
from paceline.model.checkpoint import CheckpointWriter
from paceline.options import LaunchOptions
from paceline.plan.estimate import Range
from paceline.plan.gpu_table import find_gpu
from paceline.plan.machine import Gpu, Machine
from paceline.plan.planner import Plan, make_plan
from paceline.plan.speeds import Speeds, keep_speeds, load_speeds
from paceline.plan.step_time import StepTime
from paceline.run_options import ResumeOptions
from paceline.rundir import (
    RunDir,
    RunInUse,
    append_event,
    append_json_line,
    append_sample,
    lock_run,
    read_json_lines,
    utc_now,
)

CARD = Gpu(0, "NVIDIA GeForce RTX 5090", 32_607 << 20, (12, 0), find_gpu("RTX 5090"))
ONE, TWO, NONE = (Machine(tuple(replace(CARD, index=i) for i in range(n)), 16, False, 64 << 30) for n in (1, 2, 0))
CONFIG = Config(depth=12, num_steps=50, total_batch_size=524_288)
LOST = AttemptEnd("gpu-hardware-error", "same", rank=1, step=7, new_checkpoint=False, error="fell off the bus")
ON_GPUS = Abilities(own_trainer=True, rows_on_host=False)
NO_MEMORY = replace(LOST, cause="cuda-oom", retry="smaller")


def make(config: Config, machine: Machine) -> Plan:
    return make_plan(config, machine, vocab_size=32_768, num_rows=1000)


@pytest.fixture
def job_on(tmp_path, monkeypatch):
    """Makes a run that began on two cards; probe returns the machine at the end of its attempt."""

    def started(probe):
        run = RunDir(tmp_path / "run")
        run.path.mkdir()
        run.plan_json.write_text(make(CONFIG, TWO).to_json())
        monkeypatch.setattr("paceline.launch.job.probe_machine", probe)
        config = replace(CONFIG, cache_dir=str(tmp_path / "cache"))
        return TrainingJob(run, lock=0, libuv=True, options=LaunchOptions(), config=config, make=make)

    return started


def changed(job, action):
    job.change(Decision(action, 0, "x"))
    [event] = [e for e in read_json_lines(job.run.events) if e["event"] == "plan_changed"]
    return event


def test_after_a_lost_card_the_others_take_the_same_steps(job_on):
    job = job_on(lambda: ONE)
    before = job.plan
    assert job.abilities(LOST) == replace(ON_GPUS, ranks_left=1)
    assert changed(job, "fewer-ranks")["world_size"] == 1
    after = job.plan
    assert (after.world_size, after.total_batch_size, after.num_steps) == (1, before.total_batch_size, 50)
    assert after.device_batch_size * after.grad_accum_steps == before.total_batch_size // CONFIG.sequence_len
    assert not (cache_dir(job.config) / "too_large.jsonl").exists()


SMALL = Machine((replace(CARD, memory_bytes=2 << 30),), 16, False, 64 << 30)
SILENT = replace(NONE, driver_error=PlanError("the driver does not answer", fix="nvidia-smi"))


@pytest.mark.parametrize(
    ("machine", "ranks_left"), [(SMALL, 0), (NONE, 0), (SILENT, None)], ids=["a batch too large", "no card", "silent"]
)
def test_a_run_stops_without_a_card_that_holds_it_and_a_driver_that_does_not_answer_loses_none(
    job_on, machine, ranks_left
):
    assert job_on(lambda: machine).abilities(LOST) == replace(ON_GPUS, ranks_left=ranks_left)


def test_a_size_that_failed_beside_another_process_may_fit_the_whole_card(job_on):
    job = job_on(lambda: TWO)
    others = [{"pid": 1, "bytes": 9 << 30, "ours": False}, {"pid": 2, "bytes": 20 << 30, "ours": True}]
    append_sample(
        job.run.health("tower"), {"time": utc_now(), "gpus": [{"index": 0}, {"index": 1, "processes": others}]}
    )
    assert job.abilities(NO_MEMORY).smaller
    job.change(Decision("smaller", 0, "x"))
    [record] = read_json_lines(cache_dir(job.config) / "too_large.jsonl")
    assert record["card_bytes"] == job.plan.memory["card_bytes"] - (9 << 30)


def test_ranks_that_stop_may_take_as_long_as_a_large_checkpoint(job_on):
    assert 60 < stop_grace_s(make(replace(CONFIG, depth=4), TWO)) < stop_grace_s(job_on(lambda: TWO).plan) < 600


def test_the_attempt_after_running_out_of_memory_is_smaller_and_the_size_is_remembered(job_on):
    job = job_on(lambda: TWO)
    before = job.plan
    rows = before.device_batch_size
    change = f"device_batch_size {rows // 2} instead of {rows}, {2 * before.grad_accum_steps} micro-steps instead of"
    assert job.abilities(NO_MEMORY).smaller.startswith(change)
    assert changed(job, "smaller")["device_batch_size"] == rows // 2
    record = json.loads((cache_dir(job.config) / "too_large.jsonl").read_text())
    assert (record["setup"]["device_batch_size"], record["source"]) == (rows, "run")


def test_any_other_failure_changes_nothing(job_on):
    job = job_on(lambda: TWO)
    before = job.run.plan_json.read_text()
    assert job.abilities(LOST) == ON_GPUS
    job.change(Decision("retry", 1, "this is usually transient"))
    assert job.run.plan_json.read_text() == before
    assert not job.run.events.exists()


def test_a_failure_on_two_hosts_of_one_card_each_loses_no_card(job_on):
    job = job_on(lambda: pytest.fail("the cards of this machine say nothing of those hosts"))
    hosts = [HostEntry("ada"), HostEntry("bob")]
    job.cluster = Cluster(hosts, ONE, nproc=1)
    assert job.plan.world_size == 2
    assert job.abilities(LOST) == ON_GPUS


FINDING = Finding("step-slower-than-planned", "warn", "a step takes 900 ms", "likely the link", "paceline comm")
PLANNED = StepTime(Range(0.5, 0.612, 0.7), {"matmuls": 0.612}, 0.0, 0.0, Range(1.0, 2.0, 3.0), None, "compute", ())


@pytest.fixture
def run(tmp_path):
    return RunDir(tmp_path)


def show(run: RunDir, lines: list[tuple[int, float]], finding: Finding | None = None) -> list[str]:
    """Returns the digest's lines about logged steps (step, step_ms), without those of the steps."""
    stream = io.StringIO()
    watch = StepWatch(run, planned_s=0.612, gap=lambda measured_s: finding)
    digest = Digest(run, num_steps=5000, total_batch_size=1, stream=stream, on_metrics=watch.add)
    for step, step_ms in lines:
        append_json_line(run.metrics, {"step": step, "loss": 1.0, "step_ms": step_ms, "time": utc_now()})
        digest.poll()
    digest.close()
    return [line for line in stream.getvalue().splitlines() if not line.startswith("step ")]


def test_after_twenty_steps_the_measured_step_is_compared_with_the_planned_one_once(run):
    lines = [(1, 9000.0), (10, 800.0), (20, 655.0), (30, 655.0), (40, 655.0)]
    assert show(run, lines) == ["planned 612 ms a step, measured 655 ms (+7 %)"]
    [event] = [event for event in read_json_lines(run.events) if event["event"] == "step_time"]
    assert (event["step"], event["planned_s"], event["measured_s"]) == (20, 0.612, 0.655)


@pytest.mark.parametrize(("lines", "measured"), [
    # the first ten steps do not count
    ([(step, 5000.0 if step <= 10 else 600.0 + 10 * (step % 2)) for step in range(1, 30)], "605 ms (-1 %)"),
    # rarely logged steps are compared at the next line
    ([(1, 9000.0), (500, 612.0)], "612 ms (+0 %)"),
    # a resumed run counts from its own first step
    ([(1001, 9000.0), (1010, 800.0)], None),
    ([(1001, 9000.0), (1010, 800.0), (1020, 612.0)], "612 ms (+0 %)"),
])  # fmt: skip
def test_steps_are_compared_once_they_have_settled(run, lines, measured):
    assert show(run, lines) == ([f"planned 612 ms a step, measured {measured}"] if measured else [])


@pytest.mark.parametrize("before", [None, [{"id": "other"}]])
def test_a_large_gap_is_added_to_the_findings_of_the_checks(run, before):
    if before is not None:
        run.findings.write_text(json.dumps(before))
    shown = show(run, [(1, 900.0), (20, 900.0)], FINDING)
    assert shown == [
        "planned 612 ms a step, measured 900 ms (+47 %)",
        "warn  step-slower-than-planned  a step takes 900 ms",
        "  why                           likely the link",
        "  fix                           paceline comm",
    ]
    findings = json.loads(run.findings.read_text())
    assert [finding["id"] for finding in findings] == [*(["other"] if before else []), FINDING.id]


HOST = Machine(gpus=(), cpu_cores=1, cpu_bf16=False, memory_bytes=8 << 30)
ON_CPU = make_plan(Config(depth=2, total_batch_size=4096, num_steps=1), HOST, vocab_size=512, num_rows=0)


def watch_three_steps(run: RunDir, planned: StepTime | None, *, step_ms: float) -> None:
    cost = json.loads(json.dumps(asdict(planned))) if planned else ON_CPU.cost
    watch = watch_steps(run, replace(ON_CPU, cost=cost), cache=run.path)
    for step in (1, 10, 20):
        watch({"step": step, "step_ms": step_ms})


def test_a_plan_without_a_step_time_is_not_compared(run):
    watch_three_steps(run, None, step_ms=1.0)
    assert not run.events.exists()


def test_a_step_twice_as_long_as_planned_is_a_finding_with_its_likely_cause(run):
    watch_three_steps(run, PLANNED, step_ms=1224.0)
    [finding] = json.loads(run.findings.read_text())
    assert (finding["id"], finding["severity"]) == ("step-slower-than-planned", "warn")
    assert finding["why"] == "likely other processes on these cores: the plan counts on all of them"


def test_a_measured_step_corrects_the_next_plan_of_this_machine(run):
    keep_speeds(run.path, Speeds("CPU", ON_CPU.threads, ON_CPU.world_size, {}, {}, "measured"))
    watch_three_steps(run, replace(PLANNED, uncorrected_s=0.5), step_ms=600.0)
    speeds = load_speeds(run.path, device_name="CPU", threads=ON_CPU.threads, processes=ON_CPU.world_size)
    assert list(speeds.steps.values()) == [pytest.approx(1.2)]


def test_a_planned_step_is_read_back_as_it_was_written():
    assert planned_step(json.loads(json.dumps({**asdict(PLANNED), "run": None, "more": 1}))) == StepTime(
        **{**vars(PLANNED), "assumptions": []}
    )


def test_the_closing_lines_keep_the_prompt_of_a_sample_apart_from_what_the_model_wrote(job_on):
    job = job_on(lambda: TWO)
    append_json_line(job.run.metrics, {"step": 50, "loss": 2.0, "val_bpb": 1.0})
    append_json_line(
        job.run.events, {"event": "sample", "step": 50, "prompt": "painted by local", "text": "ay of\nhis"}
    )
    outcome = Outcome("finished", 0, 1, [])
    lines = "\n".join(job.closing_lines(outcome, seconds=1.0, time_line="time"))
    assert "\n  | painted by local\n        continued by the model\n  | ay of\n  | his\n" in lines


def test_the_closing_lines_of_a_resumed_run_count_the_steps_of_the_last_command(job_on):
    job = job_on(lambda: TWO)
    append_json_line(job.run.metrics, {"step": 50, "loss": 2.0, "val_bpb": 1.0})
    for step in (10, 45):
        append_json_line(job.run.events, {"event": "launch"})
        append_json_line(job.run.events, {"event": "resumed", "step": step})
    append_json_line(job.run.events, {"event": "resumed", "step": 48})  # after a failure of the same command
    append_json_line(job.run.events, {"event": "finished", "step": 50, "val_bpb": 1.0})
    job.run.config_toml.write_text("eval_tokens = 2048\n")
    lines = job.closing_lines(Outcome("finished", 0, 1, []), seconds=5.0, time_line="time")
    assert "done    50 steps, 5 of them in 5s, val_bpb 1.0000 on 2,048 tokens" in lines


def test_the_closing_lines_name_a_checkpoint_that_is_clearly_better(job_on):
    job = job_on(lambda: TWO)
    for step, val_bpb in ((30, 1.0), (50, 1.2)):
        writer = CheckpointWriter(job.run.checkpoints, rank=0, world_size=1, attempt="1", keep_last=2, on_saved=print)
        writer.save(step, [], {}, val_bpb=val_bpb)
        writer.wait()
    append_json_line(job.run.metrics, {"step": 50, "loss": 2.0, "val_bpb": 1.2})
    lines = job.closing_lines(Outcome("finished", 0, 1, []), seconds=5.0, time_line="time")
    assert "best    val_bpb 1.0000 at step 30; eval, sample and export take it with --step 30" in lines


@pytest.mark.parametrize("last, is_noted", [(4.8, True), (3.1, False)])
def test_the_closing_lines_say_what_is_wrong_with_the_curves(job_on, last, is_noted):
    job = job_on(lambda: TWO)
    for step, val_bpb in ((0, 4.1), (20, 5.3), (40, last)):
        append_json_line(job.run.metrics, {"step": step, "val_bpb": val_bpb})
    lines = job.closing_lines(Outcome("finished", 0, 1, []), seconds=5.0, time_line="time")
    assert any(line.startswith("note    the loss diverges: val_bpb is 4.1 at step 0") for line in lines) == is_noted


def test_what_a_resume_cannot_change_is_refused_with_a_command_that_works(job_on, tmp_path, monkeypatch):
    run, text = job_on(lambda: TWO).run, tmp_path / "t.txt"
    run.config_toml.write_text(format_toml(replace(CONFIG, name="run", data=str(text))))
    run.dataset_json.write_text("{}")  # as an earlier version left it
    monkeypatch.chdir(tmp_path)
    config, _ = changed_run(run, {"runs_dir": str(tmp_path), "data": "t.txt"}, otherwise="x")
    assert (config.runs_dir, config.data) == ("runs", str(text))
    for key, fix in (
        ("name", f"mv {run.path} {tmp_path}/other renames it"),
        ("optimizer", "x --name NEW --optimizer other"),
    ):
        with pytest.raises(PacelineError, match="cannot change within a run") as error:
            changed_run(run, {key: "other"}, otherwise="x --name NEW")
        assert error.value.fix == fix
    with pytest.raises(PacelineError, match="text_field is auto in run and cannot change"):
        changed_run(run, {"text_field": "body"}, otherwise="x")
    with pytest.raises(PacelineError, match="tokenizer is auto in run and cannot change"):
        changed_run(run, {"tokenizer": "a.json"}, otherwise="x")
    run.tokenizer_json.parent.mkdir(exist_ok=True)
    for path in (run.tokenizer_json, tmp_path / "copy.json"):
        path.write_text("{}")
    assert changed_run(run, {"tokenizer": "copy.json"}, otherwise="x")[0].tokenizer is None  # that of the run


def test_a_run_is_resumed_with_the_source_of_its_weights_and_no_other(job_on, tmp_path, monkeypatch):
    run = job_on(lambda: TWO).run
    monkeypatch.chdir(tmp_path)
    folders = {name: tmp_path / name / "checkpoints" / "step_000010" for name in ("books", "letters")}
    for folder in folders.values():
        folder.mkdir(parents=True)
        (folder.parent.parent / "config.toml").write_text("depth = 2\n")
    first = str(folders["books"])
    run.config_toml.write_text(format_toml(replace(CONFIG, name="run", init_from=first)))
    run.dataset_json.write_text("{}")
    for same in (first, "books", "books/checkpoints/step_000010"):
        assert changed_run(run, {"init_from": same}, otherwise="x")[0].init_from == first
    for other in ("letters", "nowhere"):
        with pytest.raises(PacelineError, match=f"init_from is {first} in run and cannot change") as error:
            changed_run(run, {"init_from": other}, otherwise="x --name NEW")
        assert error.value.fix == f"x --name NEW --init-from {other}"


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("sequence_len", 1024, "write sequence_len = 2048 there again, or x"),
        ("optimizer", "adamw", 'write optimizer = "muon" there again, or x'),
        ("seed", 7, "write seed = 42 there again, or x"),
        ("tokenizer", "a.json", "take tokenizer out of it again, or x"),
        ("text_field", "title", 'write text_field = "body" there again, or x'),
        ("val_data", "b", "take val_data out of it again, or x"),
        ("data", "b",
         'write data = "builtin" there again; paceline resume {} --data NEW after it, if the text was moved, or x'),
    ],
)  # fmt: skip
def test_an_edit_of_config_toml_that_makes_another_run_is_refused(job_on, key, value, fix):
    run = job_on(lambda: TWO).run
    rows = {"data": "builtin", "text_field": "body", "packing": "stream", "seed": 42}
    run.dataset_json.write_text(json.dumps({"keys": {**rows, "val_data": None, "tokenizer": None}}))
    config = replace(CONFIG, text_field="body")
    run.config_toml.write_text(format_toml(config))
    changed_run(run, {}, otherwise="x")
    run.config_toml.write_text(format_toml(replace(config, **{key: value})))
    with pytest.raises(
        PacelineError, match=f"{key} was edited in .*config.toml, and cannot change within a run"
    ) as error:
        changed_run(run, {}, otherwise="x")
    assert error.value.fix == fix.format(run.path)


def test_a_finished_run_is_extended_past_its_present_step(job_on, monkeypatch):
    run = job_on(lambda: TWO).run
    append_json_line(run.events, {"event": "finished"})
    monkeypatch.setattr("paceline.launch.train.last_good_step", lambda _: 55)
    with pytest.raises(PacelineError, match="finished at step 55 of 20") as error:
        check_unfinished(run, 20, planned=20)
    assert "--num-steps 110" in error.value.fix
    check_unfinished(run, 20, planned=20, step=10)
    with pytest.raises(PacelineError, match="step 20 of run is not before the end, num_steps 20"):
        check_unfinished(run, 20, planned=20, step=20)


@pytest.mark.parametrize("num_steps", [12, 14])
def test_a_stopped_run_does_not_end_before_the_step_where_it_is(job_on, monkeypatch, num_steps):
    run = job_on(lambda: TWO).run
    append_json_line(run.events, {"event": "stopped", "step": 14})
    monkeypatch.setattr("paceline.launch.train.last_good_step", lambda _: 14)
    with pytest.raises(PacelineError) as error:
        check_unfinished(run, num_steps, planned=400)
    assert error.value.message == "run is already at step 14 of 400" + ", past num_steps 12" * (num_steps == 12)
    assert error.value.fix == f"paceline resume {run.quoted} trains to step 400"
    check_unfinished(run, 15, planned=400)
    check_unfinished(run, 14, planned=14)  # it broke after its last checkpoint: it has yet to end


def test_two_runs_without_a_name_that_start_at_once_have_two_folders(tmp_path):
    run = RunDir(tmp_path / "d4-20261127-063439")
    with new_folder(run, is_named=False) as (first, *_), new_folder(run, is_named=False) as (second, *_):
        assert (first.name, second.name) == (run.name, f"{run.name}-2")
    with new_folder(run, is_named=True), pytest.raises(RunInUse) as error, new_folder(run, is_named=True):
        pass
    assert "--name" not in error.value.fix and list(tmp_path.iterdir()) == []


def test_another_users_run_that_is_running_is_reported_as_in_use_and_not_as_a_folder_to_copy(tmp_path, monkeypatch):
    run = RunDir(tmp_path / "books")
    run.path.mkdir()
    run.config_toml.write_text("depth = 4\n")
    lock = lock_run(run)
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(RunInUse) as error:
        resume_run(run, ResumeOptions(run=str(run.path)))
    assert error.value.fix == f"paceline stop {run.quoted} ends it, or wait for its end"
    with pytest.raises(PacelineError, match="already exists") as error, new_folder(run, is_named=True):
        pass
    assert error.value.fix == f"paceline watch {run.quoted} shows it: it is running, or another --name"
    os.close(lock)


def test_a_run_records_absolute_paths_of_a_local_text_and_tokenizer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    local = {"data": str(tmp_path / "t.txt"), "tokenizer": str(tmp_path / "t.json"), "depth": 2}
    assert absolute_texts({"data": "t.txt", "tokenizer": "t.json", "depth": 2}) == local
    for data in ("builtin", "hf:books:en"):
        assert absolute_texts({"data": data, "tokenizer": None}) == {"data": data, "tokenizer": None}


@pytest.fixture
def books(job_on, tmp_path):
    """A run on two cards, its text, and the config of both."""
    text = tmp_path / "t.txt"
    text.write_text("a few words\n" * 1000)
    return job_on(lambda: TWO).run, text, replace(CONFIG, data=str(text), cache_dir=str(tmp_path / "cache"))


@pytest.mark.parametrize("is_own", [False, True])
def test_shards_that_are_gone_are_prepared_again_with_the_same_tokenizer(books, tmp_path, capsys, is_own):
    run, _, first = books
    if is_own:
        first = replace(first, tokenizer=str(tmp_path / "t.json"))
        train_tokenizer(iter(["words"]), vocab_size=260).save(tmp_path / "t.json")
    dataset = prepare_data(first)
    record_data(run, dataset, first)
    given = dataset.meta["vocab_size"]
    assert given < first.vocab_size
    note = f"note    the text gives a vocabulary of {given:,}, not of 32,768\n"
    assert (note in capsys.readouterr().err) is not is_own
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "t.json").write_text("another")
    again = reopen_data(run, replace(first, vocab_size=given))  # as config.toml has it
    assert again.meta["files"] == dataset.meta["files"] and not again.reused


def test_another_tokenizer_in_a_run_is_refused_and_a_missing_one_taken_from_its_shards(books):
    (run, text, config), other = books, b"another"
    run.config_toml.write_text(format_toml(config))
    dataset = prepare_data(config)
    record_data(run, dataset, config)
    own, shards = run.tokenizer_json, dataset.tokenizer_json
    assert run_tokenizer(run) == own and own.read_bytes() == shards.read_bytes()
    own.unlink()
    assert run_tokenizer(run) == shards
    own.write_bytes(other)
    for use in (lambda: reopen_data(run, config), lambda: run_data(run, other=str(text)), lambda: run_tokenizer(run)):
        with pytest.raises(
            PacelineError, match="tokenizer.json is not the tokenizer that the run was trained"
        ) as error:
            use()
        assert error.value.fix == shlex.join(["cp", str(shards), str(own)])
    shards.write_bytes(other)
    own.unlink()
    with pytest.raises(PacelineError, match="tokenizer.json is missing") as error:
        run_tokenizer(run)
    assert error.value.fix == "copy the file there from a backup of the run"
    own.write_bytes(other)
    record = json.loads(run.dataset_json.read_text())
    del record["tokenizer_sha256"]  # as an earlier version left it
    run.dataset_json.write_text(json.dumps(record))
    assert run_tokenizer(run) == own


def test_a_run_records_no_more_eval_tokens_than_are_held_out(books):
    run, _, config = books
    plan, dataset = Plan.from_json(run.plan_json.read_text()), prepare_data(config)
    held_out = dataset.split("val", "stream").num_tokens
    eval_tokens = [config_of_plan(replace(config, eval_tokens=n), plan, dataset).eval_tokens for n in (None, 7)]
    assert eval_tokens == [held_out - 1, 7]  # as `paceline eval` counts them: the first is no target


@pytest.mark.parametrize("has_shards", [True, False])
def test_the_text_of_a_run_may_be_at_another_place_but_not_another_text(books, tmp_path, has_shards):
    (run, text, config), moved = books, tmp_path / "moved.txt"
    record_data(run, dataset := prepare_data(config), config)
    text.rename(moved)
    if not has_shards:
        shutil.rmtree(dataset.path)
    config = replace(config, data=str(moved))
    assert reopen_data(run, config, is_elsewhere=True).meta["files"] == dataset.meta["files"]
    moved.write_text("other words\n" * 1000)
    with pytest.raises(PacelineError, match="moved.txt is another text than that of run"):
        reopen_data(run, config, is_elsewhere=True)


@pytest.mark.parametrize(("is_own", "field"), [(False, None), (True, None), (False, "body")])
def test_a_text_that_has_changed_since_its_run_began_is_reported(job_on, tmp_path, capsys, is_own, field):
    run, text = job_on(lambda: TWO).run, tmp_path / ("t.jsonl" if field else "t.txt")
    text.write_text('{"title": "a", "body": "a few words"}\n{"body": "other"}\n' if field else "a few words\n" * 1000)
    config = replace(CONFIG, data=str(text), text_field=field, cache_dir=str(tmp_path / "cache"))
    if is_own:
        config = replace(config, tokenizer=str(tmp_path / "t.json"))
        train_tokenizer(iter(["words"]), vocab_size=260).save(tmp_path / "t.json")
    record_data(run, dataset := prepare_data(config), config)
    config = replace(config, vocab_size=dataset.meta["vocab_size"])  # as config.toml has it
    capsys.readouterr()
    assert reopen_data(run, config).path == dataset.path
    assert capsys.readouterr().err == ""
    text.write_text("other words\n" * 999)
    assert reopen_data(run, config).path == dataset.path
    what = "has changed since it was prepared (its files, their sizes or times, or which of them are read)"
    assert capsys.readouterr().err == f"note    {text} {what}: run keeps the text that it began with\n"
    text.unlink()
    reopen_data(run, config)
    assert capsys.readouterr().err == ""


def test_test_text_that_is_evaluated_has_no_note_that_it_will_be_trained_on(job_on, tmp_path, capsys):
    run, text = job_on(lambda: TWO).run, tmp_path / "text"
    text.mkdir()
    (text / "test.txt").write_text("a few words\n" * 1000)
    config = replace(CONFIG, data=str(text), cache_dir=str(tmp_path / "cache"))
    run.config_toml.write_text(format_toml(config))
    record_data(run, prepare_data(config), config)
    assert "test.txt will be trained on" in capsys.readouterr().err
    run_data(run, other=str(text))
    assert "trained on" not in capsys.readouterr().err


def test_text_that_another_version_read_otherwise_is_refused_where_its_shards_are_gone(books, monkeypatch):
    run, text, config = books
    text.write_text("".join(f"tale {number}\n<|endoftext|>\n" for number in range(1000)))
    with monkeypatch.context() as earlier:
        earlier.setattr(readers, "MARK", b"no mark")
        record_data(run, dataset := prepare_data(config), config)
    assert reopen_data(run, config).path == dataset.path
    shutil.rmtree(dataset.path)
    with pytest.raises(PacelineError, match="this version of paceline makes other tokens of its text") as error:
        reopen_data(run, config)
    assert error.value.fix == f"restore {dataset.path}, or start a new run"


def test_a_run_whose_text_is_gone_resumes_with_its_shards_and_is_refused_without_them(job_on, tmp_path):
    run = job_on(lambda: TWO).run
    run.dataset_json.write_text(json.dumps({"path": str(tmp_path / "shards"), "fingerprint": "x"}))
    with pytest.raises(
        PacelineError, match="the token shards of run are gone and its text cannot be prepared"
    ) as error:
        reopen_data(run, replace(CONFIG, data=str(tmp_path / "gone.txt")))
    assert (
        error.value.fix
        == f"restore {tmp_path / 'shards'} or the text, --data NEW if the text was moved, or start a new run"
    )
    with pytest.raises(PacelineError) as error:
        reopen_data(run, replace(CONFIG, val_data=str(tmp_path / "gone.txt")))
    assert ", --data or --val-data NEW if the text was moved" in error.value.fix
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/meta.json").write_text('{"format_version": 1, "files": {}}')
    assert reopen_data(run, replace(CONFIG, data=str(tmp_path / "gone.txt"))).path == tmp_path / "shards"


def test_the_steps_of_the_last_command_are_counted_from_where_it_began(tmp_path):
    run = RunDir(tmp_path)
    append_event(run, "launch")
    append_event(run, "resumed", step=60)  # its second attempt
    assert first_step(run) == 0
    append_event(run, "launch")
    append_event(run, "resumed", step=100)
    append_event(run, "resumed", step=120)
    assert first_step(run) == 100


def test_a_key_that_differs_from_the_last_launch_is_told_with_both_values(tmp_path):
    run, config = RunDir(tmp_path), Config(matrix_lr=0.1, num_steps=10)
    assert changed_keys(run, config) == []  # an earlier version recorded no keys
    append_event(run, "launch", prepared_s=1.0, config=asdict(config))
    later = replace(config, num_steps=20, matrix_lr=None, data="/books", keep_last=3)
    assert changed_keys(run, later) == [
        'data changed from "builtin" to "/books"',
        "matrix_lr changed from 0.1 to auto",
        "keep_last changed from 2 to 3",
    ]
    append_event(run, "launch", prepared_s=1.0, config=asdict(later))
    assert changed_keys(run, later) == []
