"""
The check before a launch: facts of this host gathered beside other work, what they mean for what is about to be done, and no
launch where that would surely fail. `paceline check` is the same without a launch.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from paceline.check.ask import Ask
from paceline.check.facts import MAX_ANSWER_BYTES, OnProbe, gather_facts
from paceline.check.format import colour, format_findings
from paceline.check.verdict import Facts
from paceline.check.verdicts import find
from paceline.config import Config
from paceline.errors import Finding, PacelineError, PlanError
from paceline.options import cache_dir
from paceline.plan.kept import kept_calibration
from paceline.plan.machine import Machine
from paceline.plan.memory import checkpoint_bytes, state_bytes
from paceline.plan.planner import Plan, make_plan
from paceline.rundir import RunDir, write_atomic

DEADLINE_S = 40.0  # the slowest probe has 30
PROCESS_BYTES = 300 << 20  # Python with torch on a CPU before it holds any weight: RSS with torch 2.13
CUDA_CONTEXT_BYTES = 400 << 20  # less than the 0.77 GiB of context and NCCL seen on RTX 5090 D: a bound from below


class Gathering:
    """The process that gathers this host's facts."""

    def __init__(self, process: subprocess.Popen[bytes]):
        self._process = process

    def facts(self) -> Facts:
        """Waits for them."""
        with suppress(subprocess.TimeoutExpired, ValueError):
            answer, complaint = self._process.communicate(timeout=DEADLINE_S)
            if self._process.returncode == 0:
                facts: Facts = json.loads(answer[:MAX_ANSWER_BYTES])
                return facts
            last = complaint.decode(errors="replace").strip().splitlines()
            raise PacelineError(
                f"the facts of this host could not be gathered: {last[-1] if last else 'no answer'}", fix="--no-check"
            )
        raise PacelineError(f"the facts of this host were not gathered in {DEADLINE_S:.0f} s", fix="--no-check")


@contextmanager
def gathering(**request: Any) -> Iterator[Gathering]:
    """Starts at once, and takes what facts.gather_facts takes; ends with the block, asked for an answer or not."""
    values = {key: str(value) if isinstance(value, Path) else value for key, value in request.items()}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "paceline.check.facts"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # a terminal's Ctrl-C reaches us, and we end it
    )
    assert process.stdin is not None
    try:
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(json.dumps(values).encode())
        process.stdin = None  # communicate() would write to it again
        yield Gathering(process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # it ends its probes, then itself
            with suppress(subprocess.TimeoutExpired):
                process.wait(2.0)
            process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def ask_for_training(config: Config, plan: Plan, *, command: str, set_keys: frozenset[str], run_path: Path) -> Ask:
    """What `train` and `resume` are about to do, in numbers."""
    layout = {"optimizer": plan.optimizer, "shard": plan.shard, "precision": plan.precision, "device": plan.device}
    held = max(
        state_bytes(
            plan.model, world_size=plan.world_size, rank=rank, grad_accum_steps=plan.grad_accum_steps, **layout
        ).total
        for rank in range(plan.world_size)
    )
    on_gpu = plan.device == "cuda"
    return Ask(
        command=command,
        device=plan.device,
        nproc=plan.world_size,
        precision=plan.precision,
        compile=plan.compile,
        config={key: getattr(config, key) for key in config.__dataclass_fields__},
        set_keys=set_keys,
        run_dir=str(run_path),
        data=config.data,
        tokenizer=config.tokenizer,
        vocab_size=plan.model.vocab_size,
        sequence_len=plan.model.sequence_len,
        device_batch_size=plan.device_batch_size,
        total_batch_size=plan.total_batch_size,
        num_steps=plan.num_steps,
        need_gpu_bytes=held + CUDA_CONTEXT_BYTES if on_gpu else None,
        need_host_bytes=plan.world_size * (PROCESS_BYTES + (0 if on_gpu else held)),
        checkpoint_bytes=checkpoint_bytes(plan.model, optimizer=plan.optimizer),
        num_checkpoints=config.keep_last + 2,  # the best, and the one that is being written
    )


@dataclass(frozen=True)
class Checked:
    facts: Sequence[Facts]
    findings: Sequence[Finding]

    @property
    def libuv(self) -> bool:
        """Whether this torch can make its store with libuv; where nothing is known, as every wheel can."""
        return all((facts.get("torch") or {}).get("libuv") is not False for facts in self.facts)


def judge(hosts: Sequence[Facts], ask: Ask) -> Checked:
    return Checked(hosts, find(hosts, ask))


def check_config_here(
    config: Config, machine: Machine, *, set_keys: frozenset[str], port: int | None, on_probe: OnProbe
) -> Checked:
    """`paceline check`: what `train` would do with this config here, and nothing of it done."""
    run_path = Path(config.runs_dir) / (config.name or "")
    cache = Path(config.cache_dir).expanduser() if config.cache_dir else None
    facts = gather_facts(
        run_dir=run_path,
        data=config.data,
        tokenizer=config.tokenizer,
        cache_dir=cache,
        vocab_size=config.vocab_size,
        port=port,
        on_probe=on_probe,
    )
    try:
        plan = make_plan(
            config,
            machine,
            vocab_size=config.vocab_size,
            num_rows=0,
            calibrate=kept_calibration(cache_dir(config)),
        )
        ask = ask_for_training(config, plan, command="check", set_keys=set_keys, run_path=run_path)
    except PlanError as error:
        ask = Ask(
            device=config.device,
            nproc=config.nproc or (len(machine.gpus) if machine.gpus else min(2, machine.cpu_cores)),
            precision=config.precision,
            compile=config.compile,
            set_keys=set_keys,
            run_dir=str(run_path),
            data=config.data,
            sequence_len=config.sequence_len,
            device_batch_size=config.device_batch_size or 1,
            total_batch_size=config.total_batch_size,
            refused=(error.message, error.fix),
        )
    return judge([facts], replace(ask, port=port))


def refuse(findings: Sequence[Finding], *, stopped: str, stream: TextIO | None = None) -> None:
    """Shows what would hurt; raises where something would surely fail. Notes are for `paceline check`."""
    stream = stream or sys.stdout
    shown = [finding for finding in findings if finding.severity != "note"]
    if shown:
        text = format_findings(shown)
        print(colour(text) if stream.isatty() else text, file=stream, flush=True)
    stops = [finding.id for finding in shown if finding.severity == "stop"]
    if stops:
        raise PacelineError(
            f"{stopped} would fail: {', '.join(dict.fromkeys(stops))}",
            fix="as said above; --no-check starts it all the same",
        )


def keep(run: RunDir, checked: Checked) -> None:
    """Into the run folder: what the hosts were like, and what the checks said."""
    for path, text in files_of(run, checked).items():
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, text)


def files_of(run: RunDir, checked: Checked) -> dict[Path, str]:
    files = {run.findings: json.dumps([finding.to_json() for finding in checked.findings], indent=1) + "\n"}
    for facts in checked.facts:
        files[run.facts((facts.get("host") or {}).get("name") or "host")] = json.dumps(facts, indent=1) + "\n"
    return files
