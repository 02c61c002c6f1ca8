"""What Slurm says, read; the batch script; what is refused; when a job is requeued: without Slurm. Records of Slurm 22.05."""

import json
import math
import sys
import time
from dataclasses import replace

import pytest

from paceline.check.ready import CheckResult
from paceline.cli import run_command
from paceline.config import Config
from paceline.config_file import format_toml
from paceline.data.prepare import prepare
from paceline.errors import PacelineError, UsageError
from paceline.explain.explanation import Explanation
from paceline.explain.run_folder import explain_run, run_values
from paceline.launch.background import format_stop, stop_run
from paceline.launch.connect import open_module
from paceline.launch.hosts import HostEntry, hosts_of
from paceline.launch.job import TrainingJob
from paceline.launch.queue import follow_job, parse_accounted, record_job_end, stop_job
from paceline.launch.requeue import (
    check_free,
    decide_requeue,
    end_early,
    find_start,
    has_progressed,
    is_ending,
    job_of,
    record_job,
    requeue_job,
    requeue_reason,
)
from paceline.launch.run_text import check_text
from paceline.launch.sbatch import (
    JobLength,
    Submission,
    add_jobs,
    batch_script,
    check_length,
    check_options,
    check_size,
    choose_partition,
    job_note,
    node_notes,
    nodes_of,
    option_flags,
    plan_job,
    read_args,
    read_limit,
    split_args,
    submit,
    submit_run,
)
from paceline.launch.stop_signals import StopSignals
from paceline.launch.supervisor import Outcome
from paceline.launch.train import new_folder, resume_run, run_training, start_run
from paceline.options import PlanOptions, Services, TrainOptions
from paceline.plan.machine import probe_machine
from paceline.plan.planner import make_plan
from paceline.run_options import ResumeOptions
from paceline.rundir import RunDir, append_event, job_facts, lock_run, read_json_lines
from paceline.slurm import (
    Allocation,
    Partition,
    SlurmError,
    SlurmJob,
    allocation,
    expand_nodes,
    format_allocation,
    format_job,
    is_unusable,
    parse_job,
    parse_limit,
    parse_partition,
    read_partitions,
    submit_script,
)
from paceline.watch.events import end_state
from paceline.watch.status import run_status

WAITING = (
    "JobId=4711 JobName=my run=1 UserId=ada(1000) GroupId=ada(1000) MCS_label=N/A Priority=1 Nice=0 Account=physics QOS=normal"
    " JobState=PENDING Reason=Priority Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0 RunTime=00:00:00"
    " TimeLimit=08:00:00 TimeMin=N/A SubmitTime=2026-11-23T14:00:00 EligibleTime=2026-11-23T14:00:00 AccrueTime=Unknown"
    " StartTime=2026-11-23T14:05:00 EndTime=2026-11-23T22:05:00 Deadline=N/A PreemptEligibleTime=2026-11-23T14:05:00"
    " PreemptTime=None SuspendTime=None Partition=gpu AllocNode:Sid=login:29138 ReqNodeList=(null) ExcNodeList=(null) NodeList="
    " NumNodes=4-4 NumCPUs=4 ReqB:S:C:T=0:0:*:* TRES=cpu=4,node=4 Command=/home/ada/my runs/a/slurm.sh WorkDir=/home/ada"
)
PARTITION = (
    "PartitionName=gpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A DefaultTime=01:00:00"
    " DisableRootJobs=NO ExclusiveUser=NO GraceTime=60 Hidden=NO MaxNodes=4 MaxTime=1-00:00:00 MinNodes=0 LLN=NO"
    " Nodes=n[1-8] PriorityTier=1 OverSubscribe=NO PreemptMode=REQUEUE State=UP TotalCPUs=512 TotalNodes=8 JobDefaults=(null)"
)
RUNNING = SlurmJob(4711, "RUNNING", can_requeue=True, is_batch=True, end=1000.0, limit_s=3600.0)
NODES = "4 idle gpu:a100:4(S:0-1)\n2 mixed# gpu:a100:8(S:0-3),lustre:1\n1 drained gpu:a100:4\n1 idle* (null)"


def noon(clock: str) -> float:
    return time.mktime(time.strptime(f"2026-11-23T{clock}:00", "%Y-%m-%dT%H:%M:%S"))


@pytest.fixture
def inside(monkeypatch):
    """Makes this process the batch script of job 4711 on n1 to n4."""
    for name in ("SLURM_STEP_ID", "SLURM_RESTART_COUNT", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-4]")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    return monkeypatch


def put_programs(folder, monkeypatch, **scripts: str) -> None:
    """Puts programs first into PATH: their names, and what sh runs for them."""
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def scontrol(folder, monkeypatch, text: str) -> None:
    """Puts a scontrol that prints this record first into PATH."""
    (folder / "record").write_text(text + "\n")
    put_programs(folder, monkeypatch, scontrol=f"exec cat {folder}/record")


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.config_toml.write_text("seed = 1\n")
    return run


@pytest.mark.parametrize("text, names", [
    ("n1", ["n1"]),
    ("n[1-3,7]", ["n1", "n2", "n3", "n7"]),
    ("gpu[08-10]-ib,login", ["gpu08-ib", "gpu09-ib", "gpu10-ib", "login"]),
    ("rack[1-2]n[0-1]", ["rack1n0", "rack1n1", "rack2n0", "rack2n1"]),
    ("", []),
])  # fmt: skip
def test_the_node_list_of_slurm_is_read_as_slurm_means_it(text, names):
    assert expand_nodes(text) == tuple(names)


@pytest.mark.parametrize("text, seconds", [
    ("90", 5400), ("90:30", 5430), ("8:00:00", 28_800), ("1-12", 129_600), ("2-12:30", 217_800), ("1-0:0:1", 86_401),
    ("UNLIMITED", math.inf), ("infinite", math.inf),
])  # fmt: skip
def test_a_time_limit_is_read_as_sbatch_reads_it(text, seconds):
    assert parse_limit(text) == seconds


@pytest.mark.parametrize("text", ["", "8h", "1:2:3:4", "-5", "a-1"])
def test_what_is_no_time_limit_is_refused(text):
    with pytest.raises(ValueError):
        parse_limit(text)


def test_a_process_knows_its_allocation_and_one_of_several_tasks_has_none():
    batch = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "n[1-4]",
        "SLURMD_NODENAME": "n1",
        "SLURM_RESTART_COUNT": "2",
    }
    assert allocation(batch) == Allocation(4711, ("n1", "n2", "n3", "n4"), "n1", 2)
    salloc = {name: batch[name] for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST")}
    assert allocation(salloc) == Allocation(4711, ("n1", "n2", "n3", "n4"), None, 0)
    assert allocation({**batch, "SLURM_STEP_ID": "4294967290"}) == allocation(batch)  # salloc's interactive step
    task = {**batch, "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n2", "SLURMD_NODENAME": "n2"}
    assert allocation({**task, "SLURM_STEP_NUM_TASKS": "4"}) is None
    assert allocation({**task, "SLURM_STEP_NUM_TASKS": "1"}) == Allocation(4711, ("n2",), "n2", 2)
    assert allocation({}) is None


def test_the_task_of_an_array_that_has_its_number_is_named_as_a_task_so_that_a_command_means_it_alone(inside):
    def of_array(number: int, task: str) -> str:
        return WAITING.replace("JobId=4711", f"JobId={number} ArrayJobId=4711 ArrayTaskId={task}")

    assert parse_job(of_array(4711, "3")).job_id == "4711_3"
    assert parse_job(of_array(4712, "1")).job_id == 4712
    assert parse_job(of_array(4711, "1-3%2")).job_id == 4711  # none has started
    shown = format_job(parse_job(of_array(4712, "1")), now=noon("14:00"))
    assert shown and shown.startswith("job 4711_1 PENDING")  # as squeue has it
    inside.setenv("SLURM_ARRAY_JOB_ID", "4711")
    inside.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert (place := allocation()) and place.job_id == "4711_3"
    inside.setenv("SLURM_JOB_ID", "4720")  # a job that the task has submitted
    assert (place := allocation()) and place.job_id == 4720


def test_a_job_is_read_with_its_state_its_times_and_a_name_with_spaces():
    job = parse_job(WAITING)
    assert (job.job_id, job.text) == (4711, "PENDING (Priority)")
    assert job.can_requeue and job.is_batch and not job.is_preempted
    assert (job.limit_s, job.start, job.end, job.nodes) == (28_800, noon("14:05"), noon("22:05"), "")
    assert format_job(job, now=noon("14:00")) == "job 4711 PENDING (Priority), expected to start at 14:05"
    running = parse_job(WAITING.replace("PENDING", "RUNNING").replace("NodeList= ", "NodeList=n[1-4] "))
    assert format_job(running, now=noon("18:53")) == "job 4711 RUNNING on n[1-4], 3h12m of 8h00m left"
    place = Allocation(4711, ("n1", "n2", "n3", "n4"), "n1", 1)
    assert format_allocation(place, replace(running, end=noon("22:05"))).startswith(
        "slurm   job 4711, 4 nodes: n1 to n4, until "
    )
    assert format_allocation(place, None) == "slurm   job 4711, 4 nodes: n1 to n4, requeued 1 time"


def test_a_partition_is_read_with_its_limits_and_the_fewest_gpus_of_its_nodes():
    partition = parse_partition(PARTITION, NODES)
    assert (partition.name, partition.state, partition.is_default) == ("gpu", "UP", True)
    assert (partition.num_nodes, partition.max_nodes) == (8, 4)
    assert (partition.max_s, partition.default_s, partition.gpus, partition.gpu_kind) == (86_400, 3600, 4, "a100")
    assert parse_partition(PARTITION.replace("1-00:00:00", "UNLIMITED"), "8 idle (null)").gpus is None


def test_a_job_for_more_nodes_than_are_up_is_told_what_it_waits_for():
    partition = parse_partition(PARTITION, NODES)
    assert (partition.num_nodes, partition.num_up) == (8, 6)
    assert node_notes(partition, nodes=6) == []
    assert node_notes(partition, nodes=7) == [
        "slurm   6 of the 8 nodes of partition gpu are up, the job waits for 7; sinfo -R says why"
    ]
    states = ["idle", "idle~", "mixed-", "allocated", "planned", "down", "down~", "draining@", "maint", "fail", "idle*"]
    assert [is_unusable(state) for state in states] == [False] * 5 + [True] * 6


def test_the_batch_script_is_short_and_quotes_what_needs_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = RunDir(tmp_path / 'große "läufe" 100%')
    args = ("--partition=gpu", "--time=8:00:00", "--comment=a b")
    submission = Submission(4, parse_partition(PARTITION, NODES), args, 28_800, 8, 300)
    command = ["train", str(run.submitted_toml), "--min-hosts=2"]
    expected = f"""\
#!/bin/bash
#SBATCH --job-name="große \\"läufe\\" 100%"
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output="{tmp_path}/große \\"läufe\\" 100%%/slurm-%j.log"
#SBATCH --partition=gpu --time=8:00:00 "--comment=a b"
# exec: the warning before the time limit reaches paceline. After a requeue the same command continues the run.
cd {tmp_path} || exit
exec '/opt/my env/bin/python' -m paceline.cli train '{run.submitted_toml}' --min-hosts=2
"""
    assert batch_script(run, command, submission, python="/opt/my env/bin/python") == expected
    without = batch_script(run, ["train"], replace(submission, gpus=None, args=()))
    assert "#SBATCH --exclusive\n" in without and "--gpus" not in without
    assert "--exclusive" not in batch_script(run, ["train"], replace(submission, gpus=None, args=("-c", "8")))


def test_the_options_of_the_command_go_into_the_job_and_those_about_the_submission_do_not():
    local = {"slurm": True, "slurm_args": "-t 10", "detach": True, "tag": ("wide",), "note": "a new text"}
    options = TrainOptions(**local, check=False, min_hosts=2, track=("wandb", "trackio"), hang_after_s=30.0, keys={})
    flags = ["--min-hosts=2", "--hang-after=30", "--track=wandb", "--track=trackio", "--no-check"]
    assert sorted(option_flags(options)) == sorted(flags)
    # the submission goes back itself: a job may begin several times
    assert option_flags(ResumeOptions(run="a", keys={}, slurm=True, step=5)) == []
    for seconds, text in (
        (1234567.0, "1234567"),
        (0.1, "0.1"),
        (59.123456789, "59.123456789"),
    ):  # with all their digits
        assert option_flags(TrainOptions(hang_after_s=seconds, keys={})) == [f"--hang-after={text}"]


@pytest.mark.parametrize(("printed", "number"), [("4711;cluster", 4711), ("Welcome to ada\n4711", 4711)])
def test_the_number_of_a_submitted_job_is_the_last_word_of_sbatch(tmp_path, monkeypatch, printed, number):
    put_programs(tmp_path, monkeypatch, sbatch=f"printf '%s' '{printed}'")
    assert submit_script(tmp_path / "slurm.sh") == number


@pytest.mark.parametrize(("printed", "shown"), [("", "nothing"), ("Submitted batch job", "Submitted batch job")])
def test_a_submission_without_a_number_is_an_error_that_keeps_the_run_for_its_job(
    tmp_path, monkeypatch, printed, shown
):
    put_programs(tmp_path, monkeypatch, sbatch=f"printf '%s' '{printed}'")
    run, config = RunDir(tmp_path / "books"), Config(device="cpu")
    made = Submission(1, Partition("gpu", "UP", True, 1, 1, 600.0, None), limit_s=600.0), JobLength(None, 600.0, 0.0)
    with pytest.raises(PacelineError, match=f"sbatch printed {shown}, and no number of a job"):
        submit(run, ["train"], TrainOptions(slurm=True, keys={}), made, config=config)
    assert run.submitted_toml.is_file()


@pytest.mark.parametrize("text, expected", [
    ("--partition=gpu --time 8:00:00", {"partition": "gpu", "time": "8:00:00"}),
    ("-p gpu -t8:00 -A=physics", {"partition": "gpu", "time": "8:00", "account": "physics"}),
    ("--exclusive --constraint='a100 b'", {"exclusive": "", "constraint": "a100 b"}),
    ("", {}),
])  # fmt: skip
def test_the_users_options_are_read_in_each_form_that_sbatch_takes(text, expected):
    assert read_args(split_args(text)) == expected


@pytest.mark.parametrize("text", [
    "--nodes=4", "-N4", "--array=1-3", "--wrap=ls", "--signal=INT@60", "-o x.log", "-W", "gpu", "--time='8", "-t 1\n-p x",
])  # fmt: skip
def test_options_that_are_paceline_s_own_or_none_are_refused(text):
    with pytest.raises(UsageError):
        read_args(split_args(text))


def test_a_partition_that_is_not_there_down_or_too_small_is_refused_with_what_there_is():
    gpu = parse_partition(PARTITION, NODES)
    long = replace(gpu, name="long", is_default=False, max_s=math.inf)
    partitions = [gpu, long, replace(gpu, name="old", is_default=False, state="DRAIN")]
    assert choose_partition(partitions, None) is gpu
    assert choose_partition(partitions, "long,gpu") is long
    for choices, name, message in (
        (partitions, "gpuu", "no partition gpuu; there are gpu, long and old"),
        (partitions, "old", "partition old is DRAIN"),
        (partitions[1:], None, "no default partition"),
    ):
        with pytest.raises(PacelineError, match=message) as error:
            choose_partition(choices, name)
        assert name != "gpuu" or error.value.fix == '--slurm-args "--partition=gpu"'
    for partition, nodes, gpus, message in (
        (gpu, 5, 4, "5 nodes, and partition gpu gives a job 4"),
        (gpu, 4, 8, "8 GPUs on each node, and those of partition gpu have 4"),
        (replace(gpu, accounts=("physics", "bio")), 1, 1, "is for physics and bio, not for account n/a"),
    ):
        with pytest.raises(PacelineError, match=message):
            check_size(partition, nodes=nodes, gpus=gpus, account=None)


def test_the_limit_is_the_requested_one_else_the_partition_s():
    gpu = parse_partition(PARTITION, NODES)
    assert [read_limit(text, gpu) for text in ("8:00:00", None)] == [28_800, 3600]
    assert read_limit(None, replace(gpu, default_s=None)) == 86_400
    with pytest.raises(PacelineError, match="--time=2-0 is more than the 24h00m that partition gpu allows"):
        read_limit("2-0", gpu)
    with pytest.raises(UsageError, match="--time=8h is not a time"):
        read_limit("8h", gpu)


def test_a_run_takes_as_many_jobs_as_its_time_needs():
    assert JobLength(70_000, 28_800, 180).num_jobs == 3
    assert JobLength(70_000, 28_800, 180).text == "3 jobs of 8h00m: the run needs 19h26m"
    assert JobLength(70_000, math.inf, 180).text == "1 job without a time limit: the run needs 19h26m"
    assert JobLength(None, 3600, 180).num_jobs is None
    with pytest.raises(PacelineError, match="a job of 3m00s has no time for a checkpoint"):
        check_length(JobLength(None, 180, 180), None)
    check_length(JobLength(None, 240, 180), None)


def test_the_plan_of_a_partition_s_gpus_says_how_long_the_run_takes(tmp_path):
    config = Config(depth=12, num_steps=1000, cache_dir=str(tmp_path))
    estimate = plan_job(config, parse_partition(PARTITION, NODES.replace("a100", "h100")), nodes=2, gpus=4)
    assert estimate is not None and estimate.run is not None and estimate.plan.world_size == 8
    assert (
        plan_job(config, parse_partition(PARTITION, "8 idle gpu:fast:4"), nodes=2, gpus=4) is None
    )  # the site's own name


@pytest.mark.parametrize("job, resumes_itself, note", [
    ({}, True, "it is requeued until the run is done"),
    ({}, False, "and is not requeued: that needs --name"),
    ({"can_requeue": False}, True, "and is not requeued: that needs sbatch --requeue"),
    ({"is_batch": False}, True, "it is saved before; paceline resume continues it"),
    ({"end": time.time() + 1e9}, True, None),
    ({"end": None}, True, None),
])  # fmt: skip
def test_a_run_that_is_longer_than_its_job_says_whether_it_continues_by_itself(tmp_path, job, resumes_itself, note):
    config = Config(depth=12, num_steps=100_000, cache_dir=str(tmp_path))
    estimate = plan_job(config, parse_partition(PARTITION, "8 idle gpu:h100:4"), nodes=1, gpus=4)
    running = replace(RUNNING, **{"end": time.time() + 3600.0, **job})
    lines = job_note(running, estimate.plan, resumes_itself=resumes_itself)
    assert [line.endswith(str(note)) for line in lines] == ([True] if note else [])


def test_the_plan_for_a_partition_takes_its_gpus_and_says_how_many_jobs_it_needs(tmp_path, monkeypatch):
    """sinfo and scontrol are scripts that print records."""
    put_programs(tmp_path, monkeypatch, scontrol=f"echo '{PARTITION}'", sinfo="echo 'gpu 8 idle gpu:h100:4'")
    keys = {"hosts": "2", "depth": 20, "num_steps": 1_000_000, "cache_dir": str(tmp_path)}
    options = PlanOptions(slurm=True, slurm_args="--time=4:00:00", keys=keys)

    def answer(options, hosts=lambda config: pytest.fail("no host is asked")):
        return add_jobs(options, hosts, lambda _: (0, 32_768, 0))

    text = answer(options)
    assert "H100" in text and " jobs of 4h00m: the run needs " in text
    assert text.splitlines()[-1].startswith("slurm   2 nodes of partition gpu; ")
    facts = json.loads(answer(replace(options, json=True)))["slurm"]
    assert (facts["nodes"], facts["partition"], facts["limit_s"]) == (2, "gpu", 14_400) and facts["jobs"] > 1
    put_programs(tmp_path, monkeypatch, sinfo="echo gpu 8 idle gpu:fast:4")
    assert answer(replace(options, gpu="H100")) == text
    unnamed = answer(options, lambda config: replace(probe_machine(), hosts=2))
    assert unnamed.splitlines()[-1] == (
        "note    the plan does not know the GPUs of partition gpu (fast): it is for the devices here;"
        " --gpu NAME says what they are"
    )


def test_a_text_that_is_not_here_is_refused_before_the_submission():
    with pytest.raises(PacelineError, match="no such file or folder: gone.txt") as error:
        check_text(Config(data="gone.txt"))
    assert error.value.fix.endswith("; --no-check, if only the nodes have it")


def test_options_about_the_submission_need_it():
    with pytest.raises(UsageError, match="--slurm-args is about --slurm"):
        check_options(TrainOptions(slurm_args="-t 10", keys={}), has_place=False)
    check_options(TrainOptions(slurm_args="-t 10", keys={}), has_place=True)
    assert nodes_of(Config(hosts="4")) == (4, Config())
    with pytest.raises(UsageError, match="--slurm takes a number of nodes, not --hosts ada,bob"):
        nodes_of(Config(hosts="ada,bob"))


def test_in_an_allocation_its_nodes_are_the_hosts_and_a_number_takes_the_first_of_them(inside):
    entries, config = hosts_of(Config())
    assert [(entry.host, entry.way) for entry in entries] == [(f"n{number}", "srun") for number in (1, 2, 3, 4)]
    assert config.hosts is None  # the next start of the job may have others
    assert [entry.host for entry in hosts_of(Config(hosts="2"))[0]] == ["n1", "n2"]
    assert hosts_of(Config(hosts="1"))[0] == []
    assert [entry.way for entry in hosts_of(Config(hosts="n3,n4"))[0]] == ["srun", "srun"]
    assert [entry.way for entry in hosts_of(Config(hosts="n3,other"))[0]] == ["ssh", "ssh"]
    with pytest.raises(UsageError, match="--hosts 5, and job 4711 has 4 nodes"):
        hosts_of(Config(hosts="5"))


def test_a_job_that_slurm_started_again_continues_the_run_that_it_began(tmp_path, inside):
    run = RunDir(tmp_path)
    assert find_start(run) == "new"
    run.submitted_toml.write_text("")
    assert find_start(run) == "submitted"  # the job was faster than its submitter, who writes slurm.json
    record_job(run, 4711)
    assert find_start(run) == "submitted"
    run.config_toml.write_text("")
    assert find_start(run) == "continues"
    record_job(run, 4710)
    assert find_start(run) == "new"


class LostCluster:
    """Hosts that cannot be reached."""

    members = ()

    def connect(self, *_, **__):
        raise PacelineError("host n2: it did not answer for 150 s", fix="ping n2")

    def close(self):
        pass


@pytest.mark.parametrize("is_submitted", [True, False])
def test_a_job_whose_hosts_cannot_be_reached_keeps_its_folder_and_log_and_another_run_leaves_nothing(
    tmp_path, capsys, is_submitted
):
    run = RunDir(tmp_path / "run")
    log = run.path / "slurm-17.log"
    run.path.mkdir()
    if is_submitted:
        run.submitted_toml.write_text("")
        log.write_text("the output of the job\n")
    run.config_toml.write_text("")
    (tmp_path / "books.txt").write_text("A line of a book.\n" * 1000)
    dataset = prepare(str(tmp_path / "books.txt"), tokenizer=None, vocab_size=300, cache_dir=tmp_path / "cache")
    plan = make_plan(Config(device="cpu"), probe_machine(), vocab_size=300, num_rows=1000)
    config = Config(eval_tokens=1024)
    job = TrainingJob(run, lock_run(run), True, TrainOptions(keys={}), config, lambda *_: plan, cluster=LostCluster())
    with pytest.raises(PacelineError, match="did not answer"):
        run_training(job, plan, CheckResult((), ()), dataset, Services(), started=0.0, is_new=True)
    assert (log.is_file(), run.submitted_toml.is_file(), run.path.exists()) == (is_submitted,) * 3
    launches = [event for event in read_json_lines(run.events) if event["event"] == "launch"]
    assert [event["device_batch_size"] for event in launches] == [plan.device_batch_size] * is_submitted


@pytest.mark.parametrize("is_submitted", [True, False])
def test_a_run_that_fails_before_its_launch_leaves_what_its_submission_wrote_alone(tmp_path, is_submitted):
    run = RunDir(tmp_path / "run")
    if is_submitted:
        run.path.mkdir()
        run.submitted_toml.write_text("")
    with pytest.raises(OSError, match="full"), new_folder(run, is_named=True, is_submitted=is_submitted):
        run.dataset_json.write_text("{}")
        raise OSError("the disk is full")
    assert (run.submitted_toml.is_file(), run.lock.exists(), run.path.exists()) == (is_submitted, False, is_submitted)


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"job_id": "x"}'])
def test_what_was_submitted_stays_known_when_its_job_starts_and_a_broken_file_says_nothing(tmp_path, text):
    run = RunDir(tmp_path)
    run.slurm_json.write_text(text)
    assert job_of(run) is None
    record_job(run, 4711, nodes=2, args="--partition=gpu --time=8:00:00")
    record_job(run, 4712)
    assert job_of(run) == 4712
    assert job_facts(run)["args"] == "--partition=gpu --time=8:00:00"


def test_a_run_whose_job_waits_or_runs_is_not_resumed_elsewhere(tmp_path, monkeypatch):
    scontrol(tmp_path, monkeypatch, WAITING)
    run = RunDir(tmp_path)
    check_free(run)
    record_job(run, 4711)
    with pytest.raises(PacelineError, match=r"is in Slurm's job 4711, PENDING \(Priority\)"):
        check_free(run)
    scontrol(tmp_path, monkeypatch, WAITING.replace("BatchFlag=1", "BatchFlag=0"))
    check_free(run)  # salloc's shell: the lock alone says who holds the run
    scontrol(tmp_path, monkeypatch, WAITING.replace("PENDING", "TIMEOUT"))
    check_free(run)
    scontrol(tmp_path, monkeypatch, WAITING)
    append_event(run, "finished", step=5)
    check_free(run)  # the script of the job goes on with something else
    for event in ("requeued", "submitted"):
        append_event(run, event, job_id=4711, why="its time was nearly over")
        with pytest.raises(PacelineError):
            check_free(run)
    scontrol(tmp_path, monkeypatch, WAITING.replace("PENDING", "TIMEOUT"))
    monkeypatch.setenv("PATH", "")  # a copy of the run on a machine without Slurm
    check_free(run)


STOPPED = Outcome("interrupted", 130, 1, [])
LOST = Outcome("failed", 3, 1, [], explanation=Explanation("host-lost", host="n2"))


@pytest.mark.parametrize("outcome, signal, job, reason", [
    (STOPPED, "SIGUSR1", RUNNING, "its time was nearly over"),
    (STOPPED, "SIGUSR1", replace(RUNNING, is_preempted=True), "preempted by another job"),
    (STOPPED, None, replace(RUNNING, is_preempted=True), "preempted by another job"),  # the ranks alone were told
    (LOST, None, RUNNING, "lost host n2"),
    (STOPPED, "SIGINT", RUNNING, None),  # paceline stop
    (STOPPED, "SIGTERM", RUNNING, None),
    (STOPPED, "SIGTERM", replace(RUNNING, state="CANCELLED"), None),  # scancel
    (STOPPED, "SIGUSR1", replace(RUNNING, can_requeue=False), None),
    (STOPPED, "SIGUSR1", replace(RUNNING, is_batch=False), None),  # salloc
    (STOPPED, "SIGUSR1", None, None),
    (replace(LOST, explanation=Explanation("cuda-oom")), None, RUNNING, None),
])  # fmt: skip
def test_a_job_is_requeued_when_slurm_ends_it_and_not_when_its_user_does(outcome, signal, job, reason):
    assert requeue_reason(outcome, signal, job) == reason


def test_a_job_is_not_requeued_where_it_and_the_one_before_it_made_no_newer_checkpoint():
    def checkpoint(step: int) -> dict:
        return {"event": "checkpoint", "step": step}

    requeued = {"event": "requeued"}
    assert has_progressed([]) and has_progressed([checkpoint(5)])
    assert has_progressed([checkpoint(5), requeued]) and has_progressed([checkpoint(5), requeued, checkpoint(9)])
    assert has_progressed([checkpoint(5), requeued, requeued, checkpoint(9)])
    assert not has_progressed([requeued])
    back = {"event": "set_aside", "step": 5}
    assert has_progressed([checkpoint(9), requeued, requeued, back, checkpoint(7), requeued])
    assert not has_progressed([checkpoint(9), requeued, back, requeued, requeued])
    assert not has_progressed([checkpoint(5), requeued, requeued])
    assert not has_progressed([checkpoint(5), requeued, checkpoint(5), requeued, checkpoint(5)])


def test_a_job_that_is_requeued_says_so_while_the_run_is_locked_and_one_that_is_not_says_why(
    tmp_path, monkeypatch, inside
):
    signals, run = StopSignals(first="SIGUSR1"), RunDir(tmp_path)
    scontrol(tmp_path, monkeypatch, WAITING.replace("PENDING", "RUNNING"))
    append_event(run, "checkpoint", step=5)
    append_event(run, "stopped", step=5)
    assert decide_requeue(run, STOPPED, signals) == ("its time was nearly over", [])
    assert end_state(read_json_lines(run.events)) == "queued"  # so check_free refuses a resume from here on
    assert requeue_job(run, "x") == ["requeued: job 4711 continues the run when Slurm starts it again (x)"]
    assert decide_requeue(run, STOPPED, signals)[0] == "its time was nearly over"  # one slow job
    reason, lines = decide_requeue(run, STOPPED, signals)
    assert (reason, lines[0]) == (None, "job 4711 is not requeued: two in a row ended without a new checkpoint")
    assert lines[1] == f"  fix: a longer --time, or a smaller --save-every, then paceline resume {run.path}"
    put_programs(tmp_path, monkeypatch, scontrol="echo 'scontrol: error: Access denied' >&2\nexit 1")
    refused = [
        "job 4711 is not requeued: Slurm: Access denied",
        "  fix: scontrol requeue 4711",
        f"next    paceline resume {run.path}",
    ]
    assert requeue_job(run, "x") == refused
    assert decide_requeue(run, STOPPED, signals)[1][0] == refused[0]
    assert decide_requeue(run, replace(STOPPED, state="finished"), signals) == (None, [])


def test_a_job_that_slurm_itself_has_requeued_is_waited_for_and_not_requeued_again(tmp_path, monkeypatch, inside):
    run, requeued = RunDir(tmp_path), WAITING.replace("PENDING", "COMPLETING").replace("Restarts=0", "Restarts=1")
    scontrol(tmp_path, monkeypatch, requeued)
    line = "requeued: job 4711 continues the run when Slurm starts it again (by Slurm)"
    assert decide_requeue(run, STOPPED, StopSignals(first="SIGTERM")) == (None, [line])
    assert end_state(read_json_lines(run.events)) == "queued"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # it was requeued before this start
    assert decide_requeue(run, STOPPED, StopSignals(first="SIGTERM")) == (None, [])


@pytest.mark.parametrize("exit_code, state", [("130:0", "stopped"), ("1:0", "broken")])
def test_a_requeued_job_that_was_stopped_before_its_attempt_is_no_broken_run(exit_code, state):
    events = [{"event": "requeued"}, {"event": "slurm_job", "state": "FAILED", "exit_code": exit_code}]
    assert end_state(events) == state


def test_a_warning_before_the_first_attempt_ends_with_a_reason():
    with pytest.raises(PacelineError, match="nearly over, and no attempt has begun"):
        end_early(10, None)


@pytest.mark.parametrize("stderr, exit_code, what", [
    ("srun: error: Unable to create step: Requested node configuration is not available", 1, "it is not a node of this job"),
    ("srun: error: Unable to create step: Required node not available (down, drained or reserved)", 1, "Slurm cannot reach it"),
    ("srun: error: Node failure on n2\nsrun: error: n2: task 0: Killed", 137, "Slurm cannot reach it"),
    ("srun: error: Unable to confirm allocation for job 4711: Invalid job id specified", 1, "the job has ended"),
    ("", 127, "no {python} or python3 there"),
    ("slurmstepd: error: chdir failed", 1, "slurmstepd: error: chdir failed"),
    ("", 1, "srun ended with exit code 1"),
])  # fmt: skip
def test_a_node_that_srun_does_not_reach_is_an_error_with_its_reason(tmp_path, monkeypatch, stderr, exit_code, what):
    put_programs(tmp_path, monkeypatch, srun=f"printf '%s\\n' '{stderr}' >&2\nexit {exit_code}")
    with pytest.raises(PacelineError) as error:
        open_module(HostEntry("n2", way="srun"), "paceline.launch.remote", python=None)
    assert error.value.message == what.format(python=sys.executable)


def test_a_process_warns_itself_where_slurm_does_not():
    assert not is_ending(RUNNING, now=800.0) and is_ending(RUNNING, now=881.0)
    assert not is_ending(replace(RUNNING, limit_s=240.0), now=970.0) and is_ending(
        replace(RUNNING, limit_s=240.0), now=977.0
    )
    assert is_ending(replace(RUNNING, is_preempted=True), now=0.0)
    assert not is_ending(replace(RUNNING, state="PENDING"), now=2000.0)
    assert not is_ending(replace(RUNNING, end=None), now=2000.0)


def test_an_end_of_the_following_alone_says_that_the_job_continues_and_is_no_success(tmp_path, monkeypatch, capsys):
    scontrol(tmp_path, monkeypatch, WAITING.replace("PENDING", "RUNNING"))

    def interrupt(seconds):  # as Ctrl-C and SIGTERM do
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.launch.queue.time.sleep", interrupt)
    assert follow_job(RunDir(tmp_path / "run"), 4711) == 130
    assert "\ndetached: job 4711 continues\nnext    paceline watch " in capsys.readouterr().out


def test_stop_waits_for_the_end_of_a_job_while_slurm_does_not_answer(run, tmp_path, monkeypatch):
    running = WAITING.replace("PENDING", "RUNNING")
    (tmp_path / "record").write_text(running.replace("RUNNING", "CANCELLED"))
    # the first answer is an error, as while slurmctld restarts
    outage = f"mkdir {tmp_path}/asked 2>/dev/null && {{ echo 'Unable to contact slurm controller' >&2; exit 1; }}"
    put_programs(tmp_path, monkeypatch, scontrol=f"{outage}\nexec cat {tmp_path}/record", scancel="")
    record_job(run, 4711)
    stop_job(run, parse_job(running), now=False)
    assert [event["state"] for event in read_json_lines(run.events)] == ["CANCELLED"]


@pytest.mark.parametrize("state, cause", [
    ("OUT_OF_MEMORY", "host-oom-killed"), ("TIMEOUT", "slurm-time-limit"), ("DEADLINE", "slurm-time-limit"),
    ("NODE_FAIL", "slurm-node-failure"), ("BOOT_FAIL", "slurm-node-failure"), ("PREEMPTED", "slurm-cancelled"),
    ("CANCELLED", "slurm-cancelled"),
])  # fmt: skip
def test_how_the_job_ended_is_recorded_once_and_explains_the_run(run, tmp_path, monkeypatch, state, cause):
    scontrol(tmp_path, monkeypatch, WAITING.replace("PENDING", state).replace("NodeList= ", "NodeList=n[1-2] "))
    record_job(run, 4711)
    assert [record_job_end(run), record_job_end(run)] == [state, state]
    [event] = read_json_lines(run.events)
    expected = {"event": "slurm_job", "job_id": 4711, "state": state, "nodes": "n[1-2]", "limit_s": 28_800}
    assert event.items() >= expected.items()
    explanation = explain_run(run)
    assert explanation.cause == cause and explanation.evidence[0].source == "scontrol show job"


def test_the_end_of_a_job_that_slurm_has_forgotten_comes_from_its_accounts(run, tmp_path, monkeypatch):
    forgotten = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    accounts = 'case "$*" in *--jobs=4711*) echo OUT_OF_MEMORY;; esac'
    put_programs(tmp_path, monkeypatch, scontrol=forgotten, sacct=accounts)
    record_job(run, 4711)
    assert record_job_end(run) == "OUT_OF_MEMORY"
    explanation = explain_run(run)
    assert (explanation.cause, explanation.evidence[0].source) == ("host-oom-killed", "sacct")
    (tmp_path / "sacct").unlink()  # a cluster without accounts
    run.events.unlink()
    assert record_job_end(run) is None and not run.events.exists()


@pytest.mark.parametrize("state, cause", [("CANCELLED", "slurm-cancelled"), ("NODE_FAIL", "slurm-node-failure")])
@pytest.mark.parametrize("start", ["submitted", "requeued"])
def test_a_job_that_ended_before_it_continued_the_run_is_not_the_end_of_the_attempt_before(
    run, tmp_path, monkeypatch, capsys, state, cause, start
):
    run.logs(1).mkdir(parents=True)
    append_event(run, "submitted", job_id=4710 if start == "submitted" else 4711)
    append_event(run, "attempt", attempt=1, world_size=1)
    append_event(run, "stopping", attempt=1, signal="SIGINT")
    append_event(run, "attempt_ended", attempt=1, state="interrupted", exit_code=130)
    append_event(run, "stopped", step=7)
    if start == "submitted":
        append_event(run, "slurm_job", attempt=1, job_id=4710, state="FAILED", exit_code="130:0")
    append_event(run, start, job_id=4711, why="its time was nearly over")
    record_job(run, 4711)
    scontrol(tmp_path, monkeypatch, WAITING.replace("PENDING", state))
    assert record_job_end(run) == state
    explanation = explain_run(run)
    assert explanation.cause == cause
    assert explanation.summary.startswith("Slurm's job 4711 ended before it continued the run: ")
    assert explain_run(run, attempt=1).cause in ("keyboard-interrupt", "preempted-sigterm")
    assert run_command(["runs", "show", str(run.path)]) == 0
    assert f"  Slurm's job 4711 ended before it continued the run: {state}\n" in capsys.readouterr().out


def test_a_job_that_shows_no_failure_leaves_the_attempt_before_as_the_end(run):
    run.logs(1).mkdir(parents=True)
    run.rank_log(1, 0).write_text("KeyError: 'x'\n")
    append_event(run, "attempt", attempt=1, world_size=1)
    append_event(run, "rank_failed", attempt=1, rank=0, exit_code=1)
    append_event(run, "verdict", attempt=1, cause="user-code-exception", summary="KeyError: 'x'")
    append_event(run, "slurm_job", job_id=12, state="COMPLETED", source="sacct")
    (run.path / "slurm-12.log").write_text("done    nothing to do: all steps are done\n")
    before = explain_run(run)
    assert before.shows_failure and "Slurm" not in before.summary
    (run.path / "slurm-12.log").write_text("OSError: [Errno 28] No space left on device\n")
    last = explain_run(run)
    assert (last.cause, last.notes) == ("disk-full", ("attempt 1 failed: user-code-exception: KeyError: 'x'",))


def test_a_requeue_is_the_reason_of_the_attempt_before_it(run, capsys):
    append_event(run, "attempt", attempt=1, world_size=1)
    append_event(run, "attempt_ended", attempt=1, state="interrupted", exit_code=130)
    append_event(run, "requeued", job_id=4711, why="its time was nearly over")
    append_event(run, "attempt", attempt=2, world_size=1)
    assert run_command(["runs", "show", str(run.path)]) == 0
    assert "interrupted\n  its Slurm job was requeued: its time was nearly over\n" in capsys.readouterr().out


def test_what_slurm_itself_wrote_into_the_log_of_the_job_is_evidence_of_its_last_start_only(run):
    (run.path / "slurm-4711.log").write_text(
        "\nslurm   job 4711, 2 nodes: n1 and n2\nslurmstepd-n1: error: *** JOB 4711 ON n1 CANCELLED AT 2026-11-23T14:00:00 DUE TO"
        " TIME LIMIT ***\n\nslurm   job 4711, 2 nodes: n1 and n2, requeued 1 time\nerror: not Slurm's own\n"
        "slurmstepd-n1: error: Detected 1 oom_kill event in StepId=4711.batch. Some of the step tasks have been OOM Killed.\n"
    )
    append_event(run, "slurm_job", job_id=4711, state="FAILED")
    explanation = explain_run(run)
    assert explanation.cause == "host-oom-killed"
    assert all("TIME LIMIT" not in item.text for item in explanation.evidence)


def test_accounts_are_read_by_their_last_line():
    assert parse_accounted("NODE_FAIL\nPREEMPTED\nCANCELLED by 1000\n") == "CANCELLED"
    assert parse_accounted("OUT_OF_MEMORY\n") == "OUT_OF_MEMORY"
    assert parse_accounted("RUNNING\n") is None and parse_accounted("") is None


def test_a_run_whose_job_was_cancelled_in_the_queue_is_listed_as_stopped(tmp_path, monkeypatch, capsys):
    run = RunDir(tmp_path / "runs" / "books")
    run.path.mkdir(parents=True)
    run.submitted_toml.write_text("")
    record_job(run, 4711)
    scontrol(tmp_path, monkeypatch, WAITING)
    assert run_command(["runs", str(run.path.parent)]) == 0 and "queued" in capsys.readouterr().out
    scontrol(tmp_path, monkeypatch, WAITING.replace("PENDING", "CANCELLED"))
    assert run_command(["runs", str(run.path.parent)]) == 0 and "stopped" in capsys.readouterr().out


def test_a_new_run_in_place_of_one_that_has_ended_is_refused_with_the_command_that_continues_it(run):
    with pytest.raises(PacelineError, match="already exists") as error:
        submit_run(Config(), run, TrainOptions(slurm=True))
    assert error.value.fix == f"paceline resume {run.path} --slurm continues a training, or another --name"


def test_every_command_that_continues_a_submitted_run_submits_it_again(tmp_path):
    run = RunDir(tmp_path)
    job = TrainingJob(run, 0, True, TrainOptions(keys={}), Config(), lambda *_: None)
    stopped = {"run": str(run.path), "state": "stopped", "checkpoint_step": 5}

    def commands():
        last_line = job.closing_lines(STOPPED, seconds=1.0, time_line="time")[-1]
        return {last_line, format_stop(stopped).splitlines()[-1], f"next    {run_values(run)['resume']}"}

    record_job(run, 4711)  # the run began within a job
    assert commands() == {f"next    paceline resume {run.path}"}
    record_job(run, 4711, nodes=2, args="")
    assert commands() == {f"next    paceline resume {run.path} --slurm"}


def test_a_run_whose_job_is_requeued_names_no_command_that_would_be_refused(tmp_path):
    run = RunDir(tmp_path)
    job = TrainingJob(run, 0, True, TrainOptions(keys={}), Config(), lambda *_: None)
    for event, has_command in (("stopped", True), ("requeued", False), ("note", False)):
        append_event(run, event)
        lines = job.closing_lines(STOPPED, seconds=1.0, time_line="time")
        assert any(line.startswith("next ") for line in lines) == has_command


def test_a_resume_outside_of_slurm_says_so_where_a_job_had_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    run = RunDir(tmp_path)
    config = Config(device="cpu", depth=2, vocab_size=300, num_steps=5)
    run.config_toml.write_text(format_toml(config))
    run.plan_json.write_text(make_plan(config, probe_machine(), vocab_size=300, num_rows=1000).to_json())
    run.dataset_json.write_text("{}")
    for has_job in (False, True):
        with pytest.raises(UsageError, match="min-hosts"):  # what is refused next
            resume_run(run, ResumeOptions(run=str(run.path), min_hosts=2))
        line = "slurm   the run was in job 4711, and continues outside of Slurm; --slurm makes it a job again\n"
        assert capsys.readouterr().out == line * has_job
        record_job(run, 4711, args="")


def test_a_job_that_slurm_started_again_goes_back_to_no_step_and_takes_the_options_of_train(tmp_path, inside):
    run = RunDir(tmp_path)
    config = Config(
        device="cpu", depth=2, vocab_size=300, num_steps=5, name=tmp_path.name, runs_dir=str(tmp_path.parent)
    )
    run.config_toml.write_text(format_toml(config))
    run.plan_json.write_text(make_plan(config, probe_machine(), vocab_size=300, num_rows=1000).to_json())
    run.dataset_json.write_text("{}")
    record_job(run, 4711)
    back = ResumeOptions(run=str(run.path), step=3, min_hosts=9)
    with pytest.raises(PacelineError, match="no checkpoint at step 3"):
        resume_run(run, back)
    inside.setenv("SLURM_RESTART_COUNT", "1")
    for start in (lambda: resume_run(run, back), lambda: start_run(config, TrainOptions(min_hosts=9))):
        with pytest.raises(UsageError, match="min-hosts"):  # what is refused next
            start()


def test_a_requeued_run_is_queued_until_its_job_is_known_to_have_ended():
    events = [{"event": "attempt"}, {"event": "attempt_ended", "state": "interrupted"}, {"event": "requeued"}]
    assert end_state(events) == "queued"
    assert end_state([*events, {"event": "slurm_job", "state": "CANCELLED"}]) == "stopped"
    assert end_state([*events, {"event": "slurm_job", "state": "NODE_FAIL"}]) == "broken"
    assert end_state([{"event": "finished"}, {"event": "slurm_job", "state": "COMPLETED"}]) == "finished"


def test_a_job_that_ended_before_its_run_began_leaves_a_run_that_says_why(tmp_path):
    run = RunDir(tmp_path)
    run.submitted_toml.write_text("")
    assert run_status(run).state == "queued"
    summary = f"{run.name} waits, Slurm has not started it yet: its queue is not known here"
    assert explain_run(run) == Explanation("healthy", summary=summary)
    (tmp_path / "slurm-1.log").write_text(
        "slurm   job 1, 1 node: n1\nRuntimeError: CUDA out of memory. Tried to allocate 2 GiB\n"
    )
    append_event(run, "slurm_job", job_id=1, state="CANCELLED", source="sacct")
    assert run_status(run).state == "stopped"
    assert "cuda-oom" in (explain_run(run).cause, *explain_run(run).also)
    with pytest.raises(PacelineError) as error:
        stop_run(run, now=False)
    assert error.value.fix == "the command that submitted it does so again"


def test_the_fix_for_a_question_that_slurm_refuses_can_be_pasted(tmp_path, monkeypatch):
    words = "sinfo: fatal: Could not establish a configuration source"
    for script, fix in (
        ("exit 1", "sinfo --noheader '--format=%R %D %T %G'"),
        (f"echo '{words}' >&2\nexit 1", "run it on a login node, or set SLURM_CONF"),
    ):
        put_programs(tmp_path, monkeypatch, sinfo=script)
        with pytest.raises(SlurmError) as error:
            read_partitions()
        assert error.value.fix == fix
