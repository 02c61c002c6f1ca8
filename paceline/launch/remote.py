"""
The far end of a link: `python -m paceline.launch.remote`, which launch/connect.py starts on another host.

It keeps a copy of the run folder, starts the agent (launch/agent.py) of each attempt, passes its lines on, and sends what its ranks
write. Orders come from its own stdin alone. When that ends, or nothing has come for HEAD_LOST_S in an attempt, the supervisor is
lost: the agent's stdin is closed, so that the ranks save and end, and this process after them. A copy that holds a whole checkpoint
is a run folder that `paceline resume` takes. No torch.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from paceline.check.probes.network_probe import interface_env, interface_here, link_address
from paceline.config import Config, cache_dir
from paceline.errors import PacelineError
from paceline.explain.evidence import read_kernel_errors
from paceline.file_systems import LOCK_WAIT_S, free_space
from paceline.launch.agent import kill_processes, prepare_attempt, start_agent_process
from paceline.launch.channel import ALIVE_S, Channel, Line, frame, wait
from paceline.launch.gather import SENT, Follower, folder_frames, missing_files, receive, remove_newer, write_piece
from paceline.launch.script_copy import PREFIX, ScriptCopy, saved_files
from paceline.launch.stacks import inspect_ranks, rank_processes
from paceline.model.manifest import MANIFEST, read_manifest, step_folders
from paceline.model.publish import prune
from paceline.rundir import RunDir, RunInUse, lock_run, write_atomic

TICK_S, LOOK_S = 0.1, 0.2  # between two rounds, and two looks at what the ranks have written
# without a word from the supervisor, which sends one every second; with the agent's LINK_LOST_GRACE_S and ENGINE_MARGIN_S 29 s
HEAD_LOST_S = 9.0
IDLE_S = 300.0  # between two attempts: the supervisor waits, and hashes a checkpoint
AGENT_END_S = 30.0
LEFT_S = 10.0  # for the ranks that a lost link has left here to end


def main() -> int:
    """Serves one supervisor until it has gone."""
    # Slurm sends SIGTERM to all processes of a step before it takes the nodes back: the ranks save, and the link outlives that
    signal.signal(signal.SIGTERM, lambda *_: None)
    channel = Channel(sys.stdin.fileno(), sys.stdout.fileno())
    channel.send({"event": "hello", "time": time.time()})
    return FarEnd(channel).serve()


class FarEnd:
    """What the supervisor does on this host, through this process."""

    def __init__(self, channel: Channel):
        self.channel = channel
        self.run: RunDir | None = None
        self.host = ""  # what the run calls this host
        self.pids: dict[int, int] = {}  # of the attempt's ranks: pid -> rank
        self.started = 0.0  # when they were, in Unix seconds
        self.has_failed = False  # one of them
        self.shared = False  # the run folder itself is here too: nothing has to travel
        self.is_kept = True  # the copy remains when the link has ended
        self.follower: Follower | None = None
        self.text: Path | None = None
        self.script = ScriptCopy()
        self.agent: subprocess.Popen[bytes] | None = None
        self.lines: Channel | None = None  # to and from the agent
        self.attempt = 0
        self.lock: int | None = None
        self.has_rank_0 = False
        self.interface: str | None = None  # --interface
        self.pool, self.pending = ThreadPoolExecutor(1), list[tuple[Future[Any], Callable[[Any], object]]]()
        self.known = set[str]()  # whole checkpoints of which the supervisor knows
        self.copy = ""  # the folder of the checkpoint whose copy is under way
        self.copied_files: dict[str, str] = {}  # of it: name -> hash
        self.keep_last = 1
        self.ranks = range(0)  # of the attempt, here
        self.is_leaving = False  # the supervisor is lost
        self.is_settling = False  # what arrives is needed for the next attempt
        self.silent_since = 0.0  # when it was last heard, if the attempt ended in its silence

    def serve(self) -> int:
        sent_at = looked_at = 0.0
        kill_at = math.inf  # the supervisor is lost, and the ranks may save until then
        while self.agent or not (self.channel.ended or kill_at < math.inf):
            wait([self.channel, *([self.lines] if self.lines else [])], TICK_S)
            for line, data in self.channel.read():
                try:
                    self.obey(line, data)
                except (OSError, ValueError, KeyError, PacelineError) as error:
                    self.refuse(error, do="copy" if self.is_of_copy(line) else line.get("do"))
            while self.pending and self.pending[0][0].done():
                future, then = self.pending.pop(0)
                try:
                    then(future.result())
                except (OSError, ValueError) as error:
                    self.refuse(error)
            now = time.monotonic()
            if self.lines:
                self.pass_on(self.lines)
            if now - looked_at > LOOK_S and self.follower and self.attempt:
                looked_at = now
                self.follower.hurry(self.attempt)
                if not self.channel.has_more:
                    self.look()
            if now - sent_at > ALIVE_S:
                sent_at = now
                self.channel.send_alive({"event": "alive", "time": time.time(), "processes": self.processes()})
            is_waiting = not self.agent and self.channel.heard_at != self.silent_since
            is_silent = now - self.channel.heard_at > (IDLE_S if is_waiting else HEAD_LOST_S)
            if kill_at == math.inf and (self.channel.ended or is_silent):
                kill_at, self.is_leaving = now + AGENT_END_S, True
                why = f"it heard nothing from the supervisor for {HEAD_LOST_S:.0f} s"
                self.channel.send({"event": "left", "why": why})
                if self.agent:  # its stdin ends: the ranks save, then everything ends
                    assert self.agent.stdin
                    self.agent.stdin.close()
            if now > kill_at and self.agent:
                self.agent.kill()
        self.leave()
        return 0

    def refuse(self, error: Exception, *, do: str | None = None) -> None:
        """Tells the supervisor why an order was not carried out, or why a file could not be written."""
        why, fix = (error.message, error.fix) if isinstance(error, PacelineError) else (str(error), None)
        if is_disk := isinstance(error, OSError) and bool(error.strerror):
            # a write into an open file has no name of its own
            why = f"{error.strerror}: {error.filename or (self.run.path if self.run else cache_dir(Config()))}"
        self.channel.send({"event": "refused", "do": do, "why": why, "fix": fix, "disk": is_disk})

    def is_of_copy(self, line: Line) -> bool:
        """Whether an order or a file is for the copy of a checkpoint: the run goes on without it."""
        is_file = not self.is_settling and str(line.get("file")).startswith(("history/", "checkpoints/"))
        return is_file or line.get("do") == "saved"

    def leave(self) -> None:
        """Removes the copy of a trial or a measurement, and one in which nothing has run."""
        if self.run and self.lock is not None:
            is_empty = {path.name for path in self.run.path.iterdir()} <= {self.run.lock.name}
            if is_empty or not self.is_kept:
                shutil.rmtree(self.run.path.parent, ignore_errors=True)

    def processes(self) -> dict[int, dict[str, object]]:
        """Returns what the supervisor's watchdog asks of each rank's process here."""
        if not (self.agent and self.run):
            return {}
        return {rank: asdict(process) for rank, process in rank_processes(self.run, self.attempt, self.ranks).items()}

    def in_thread(self, function: Callable[..., Any], *arguments: Any, then: Callable[[Any], object]) -> None:
        """Calls a function that takes long beside the loop, which must not fall silent, and `then` with what it returns."""
        self.pending.append((self.pool.submit(function, *arguments), then))

    def look(self) -> None:
        """Sends what the ranks have written since the last look, and the manifest of a checkpoint that rank 0 has completed."""
        assert self.run and self.follower
        self.follower.scan(self.attempt)
        for path in self.run.checkpoints.glob(f"step_*/{MANIFEST}") if self.has_rank_0 else ():
            if path.parent.name not in self.known:
                self.known.add(path.parent.name)
                manifest = path.read_text(encoding="utf-8")
                self.channel.send({"event": "published", "folder": path.parent.name, "manifest": manifest})

    def pass_on(self, lines: Channel) -> None:
        """Sends the agent's lines to the supervisor; when the agent has ended, first everything that its ranks have written."""
        assert self.agent and self.run
        for line, _ in lines.read():
            if self.follower:
                self.follower.hurry(self.attempt)
            self.channel.send(line)
            if line["event"] == "started":
                self.pids = {rank["pid"]: rank["rank"] for rank in line["ranks"]}
            self.has_failed = self.has_failed or line["event"] == "rank_failed"
        if not lines.ended:
            return
        exit_code = self.agent.wait()
        if time.monotonic() - self.channel.heard_at > 3 * ALIVE_S:
            self.silent_since = self.channel.heard_at
        if self.has_failed:
            self.keep_kernel_errors()
        if self.follower:
            self.look()
        self.agent, self.lines = None, None
        end = {"event": "agent_ended", "exit_code": exit_code, "free_bytes": free_space(self.run.path)}
        self.channel.send_behind([frame(end)])

    def keep_kernel_errors(self) -> None:
        """Writes what this host's kernel log has about its ranks, with torch's own prefix for a rank, beside their logs."""
        assert self.run
        if lines := [f"[rank{rank}]: {text}\n" for rank, text in read_kernel_errors(self.pids, since=self.started)]:
            self.run.kernel_log(self.attempt, self.host).write_text("".join(lines), encoding="utf-8")

    def obey(self, line: Line, data: bytes) -> None:
        """Carries out one order."""
        if "file" in line:
            self.take_file(line, data)
            return
        match line["do"]:
            case "alive":
                pass
            case "open":
                self.open(line)
            case "lack":  # which files of a checkpoint, or of the text
                folder, answer = self.folder_of(line["of"]), {"event": "lacks", "of": line["of"]}
                known = folder / ".hashes.json" if line["of"] == "text" else None
                self.in_thread(
                    missing_files,
                    folder,
                    line["files"],
                    known,
                    then=lambda names: self.channel.send({**answer, "files": names}),
                )
            case "script":
                self.in_thread(self.script.answer, line, then=self.channel.send)
            case "list_saved" if self.run:
                self.in_thread(
                    saved_files, self.run, then=lambda files: self.channel.send({"event": "list_saved", "files": files})
                )
            case "settled":
                self.is_settling = False
                self.channel.send({"event": "settled"})
            case "settle":  # before an attempt: the checkpoints that the supervisor has are those that count
                assert self.run
                self.is_settling = True
                if not self.shared:
                    remove_newer(self.run.checkpoints, line["step"])
                    self.run.events.unlink(missing_ok=True)
            case "fetch":
                folder = self.folder_of(line["folder"])
                self.channel.send_behind(
                    folder_frames(folder, line["files"], f"checkpoints/.{folder.name}.fetched.tmp/")
                )
            case "saved":
                self.keep_copy(line)
            case "attempt":
                self.start(line)
            case "stacks":
                assert self.run
                inspect = partial(inspect_ranks, self.run, self.attempt, self.ranks, own_ranks=line["own_ranks"])
                self.in_thread(inspect, then=lambda texts: self.channel.send({"event": "stacks", "ranks": texts}))
            case _ if self.lines and not self.is_leaving:
                self.lines.send(line)

    def open(self, line: Line) -> None:
        """Finds or makes the copy of the run folder.

        line: the folder's path at the supervisor, a token in it, its key; what the run calls this host; and the interface to use.
        """
        self.host, self.interface, self.is_kept = line["host"].replace("/", "_"), line["interface"], line["kept"]
        address = interface_here(self.interface)[1] if self.interface else link_address()
        original = Path(line["path"])
        self.shared = (original / line["token"]).is_file()
        path = original if self.shared else cache_dir(Config()) / "runs" / line["key"] / original.name
        path.mkdir(parents=True, exist_ok=True)
        self.run = RunDir(path)
        if line.get("run_id"):
            # of an attempt that a lost link has ended
            kill_processes(line["run_id"], timeout_s=LEFT_S, index=line["index"])
        if not self.shared:
            self.lock = self.lock_when_free(self.run, line["head"])
            self.follower = Follower(self.run, self.channel)
            self.follower.catch_up(line["sizes"])
            for stale in ("progress", "health"):
                shutil.rmtree(path / stale, ignore_errors=True)
        self.text = cache_dir(Config()) / "data" / line["text"] if line.get("text") else None
        answer = {"event": "opened", "shared": self.shared, "folder": str(path), "address": address}
        self.channel.send_behind([frame(answer)])  # behind what the supervisor lacked

    def lock_when_free(self, run: RunDir, head: str) -> int:
        """Locks the copy for a supervisor on `head`. The ranks of one that was lost may still save and end, in half a minute."""
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                return lock_run(run, host=head)
            except RunInUse as error:
                if time.monotonic() > deadline or self.channel.ended:
                    fix = "wait until it has ended; or leave one out of --hosts, where two of them are one host"
                    raise PacelineError(error.message, fix=fix) from None
            self.channel.send({"event": "alive"})
            time.sleep(ALIVE_S)

    def folder_of(self, name: str) -> Path:
        """Returns the folder that an order means: the text, or a checkpoint."""
        if name == "text":
            assert self.text
            return self.text
        assert self.run
        return self.run.checkpoints / Path(name).name

    def take_file(self, line: Line, data: bytes) -> None:
        name = str(line["file"])
        if name.startswith("text/") and self.text:
            if "/" in name[5:] or name[5:] in ("", ".", ".."):
                raise ValueError(f"not a file of a text: {name!r}")
            self.text.mkdir(parents=True, exist_ok=True)
            write_piece(self.text / name[5:], line, data)
            return
        if name.startswith(PREFIX):
            self.script.take(name.removeprefix(PREFIX), line, data)
            return
        assert self.run
        folder = (self.run.path / name).parent
        is_copy = name.startswith("checkpoints/step_")
        if is_copy and not self.is_settling and folder.name != self.copy:
            return  # the supervisor gave that copy up
        receive(self.run, line, data, allowed=SENT)
        needed = (f".{MANIFEST}", *self.copied_files)
        if line["last"] and is_copy and all((folder / file).exists() for file in needed):
            self.complete_copy(folder)
        if line["last"] and name == "dataset.json" and self.text:
            record = json.loads(self.run.dataset_json.read_text())
            write_atomic(self.run.dataset_json, json.dumps({**record, "path": str(self.text)}) + "\n")

    def start(self, line: Line) -> None:
        """Starts the agent of an attempt; paths and the interpreter in the supervisor's job become those of this host."""
        assert self.run
        if self.agent:
            raise ValueError("an attempt runs here already")
        job, theirs = line["job"], line["theirs"]
        self.attempt = line["attempt"]
        own = {theirs["python"]: sys.executable, theirs["path"]: str(self.run.path)}
        job["command"] = [own.get(word, word) for word in job["command"]]
        reach = job.pop("reach")
        job["env"] = {**own_path(), **own_env(job["env"], self.run), **interface_env(reach, self.interface)}
        job["lock_fd"] = self.lock
        prepare_attempt(self.run, self.attempt, job)
        if self.follower:
            self.follower.skip()
        self.ranks = range(job["first_rank"], job["first_rank"] + job["nproc"])
        self.has_rank_0 = job["first_rank"] == 0 and not self.shared
        self.known = {path.parent.name for path in self.run.checkpoints.glob(f"step_*/{MANIFEST}")}
        self.pids, self.started, self.has_failed = {}, time.time(), False
        self.agent = start_agent_process(self.run.launch_log(self.attempt, self.host), lock_fd=self.lock)
        assert self.agent.stdin and self.agent.stdout
        self.lines = Channel(self.agent.stdout.fileno(), self.agent.stdin.fileno())
        self.lines.send(job)

    def keep_copy(self, line: Line) -> None:
        """A checkpoint is complete at the supervisor: it becomes whole here too if this host keeps the copy, else its part goes."""
        assert self.run
        if self.shared:
            return
        final = self.run.checkpoints / line["folder"]
        if line["manifest"] is not None:
            final.mkdir(parents=True, exist_ok=True)
        for pending in self.run.checkpoints.glob(f".{line['folder']}.*.tmp"):
            for path in pending.glob("*.safetensors") if line["manifest"] is not None else ():
                path.rename(final / path.name)
            shutil.rmtree(pending, ignore_errors=True)
        if line["manifest"] is None:
            return
        write_atomic(final / f".{MANIFEST}", line["manifest"])  # without its name until every file is there
        self.copy, self.copied_files, self.keep_last = final.name, line["files"], line["keep_last"]
        for folder in step_folders(self.run.checkpoints):
            if folder != final and not (folder / MANIFEST).exists():  # a copy that the supervisor gave up
                shutil.rmtree(folder, ignore_errors=True)
        self.complete_copy(final)

    def complete_copy(self, folder: Path) -> None:
        """Asks for the files that a copy lacks, or gives it its manifest, and removes old ones."""

        def answer(names: list[str]) -> None:
            assert self.run
            if names:
                self.channel.send({"event": "lacks", "of": folder.name, "files": names})
            elif (folder / f".{MANIFEST}").exists():
                (folder / f".{MANIFEST}").rename(folder / MANIFEST)
                prune(self.run.checkpoints, step=read_manifest(folder).step, keep_last=self.keep_last)
                self.channel.send({"event": "copied", "folder": folder.name})

        self.in_thread(missing_files, folder, self.copied_files, then=answer)


def own_path() -> dict[str, str]:
    """Returns this host's environment, in which a rank finds the programs of the interpreter's own, such as torchrun, by name."""
    place, path = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)
    return {**os.environ, "PATH": path if place in path.split(os.pathsep) else f"{place}{os.pathsep}{path}"}


def own_env(env: dict[str, str], run: RunDir) -> dict[str, str]:
    """Returns the variables that the supervisor sends as they are on this host."""
    changes = {"PACELINE_RUN": str(run.path)} if "PACELINE_RUN" in env else {}
    if "PYTHONPATH" in env:  # paceline itself is in this host's
        changes["PYTHONPATH"] = os.pathsep.join(filter(None, [env["PYTHONPATH"], os.environ.get("PYTHONPATH")]))
    return {**env, **changes}


if __name__ == "__main__":
    sys.exit(main())
