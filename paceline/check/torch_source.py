"""
`paceline torch build`: a PyTorch source tree configured, compiled and installed, then tried.

CMake is called as PyTorch's own build calls it, on the same build folder, so the install step (pip) finds everything compiled.
A second call goes on where the first one stopped. Options: torch_recipe.py; an environment variable of the same name wins.
Tested on a stand-in with PyTorch's option names (docs/torch.md); PyTorch itself was not built with it here.
"""

import fcntl
import importlib.metadata
import json
import os
import re
import shlex
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from paceline.check.torch_archs import ARCH_FLAG, ARCH_VARIABLE, AUTO, parse_archs, split_archs
from paceline.check.torch_build import TorchCheck, capabilities_of, check_torch, probe_builder, tools_of
from paceline.check.torch_needs import build_backend, check_source, find_needs
from paceline.check.torch_ninja import (
    SHOWN_LINES,
    STATUS,
    PlainProgress,
    StepInterrupted,
    cmake_message,
    compile_failed,
    configure_failed,
    run_step,
    say,
)
from paceline.check.torch_recipe import DEPENDS, Option, build_options, format_options, num_jobs
from paceline.check.verdict import Facts, at, is_on
from paceline.errors import Interrupted, PacelineError, UsageError
from paceline.kernel_files import read_text
from paceline.rundir import write_atomic
from paceline.terminal import show_progress

LOG, RECORD, LOCK = "paceline-build.log", "paceline-build.json", "paceline-build.lock"
CACHE_LINE = re.compile(r"^(\w+):(\w+)=(.*)$", re.MULTILINE)
SUMMARY_LINE = re.compile(r"^--\s+(USE_\w+|BUILD_\w+)\s*:\s*(ON|OFF|TRUE|FALSE|1|0)\s*$", re.IGNORECASE)
WARNING = re.compile(r"^CMake Warning\b")
SWITCHES = {True: "ON", False: "OFF"}
LIBUV_MACRO = "TORCH_USE_LIBUV"


@dataclass(frozen=True)
class Build:
    """What is built, where, how. prefix: None for this Python."""

    source: Path
    build: Path
    prefix: Path | None
    options: tuple[Option, ...]
    jobs: int
    env: Mapping[str, str]

    @property
    def log(self) -> Path:
        return self.build / LOG

    @property
    def configure(self) -> list[str]:
        prefixes = [sysconfig.get_path("purelib"), self.env.get("CMAKE_PREFIX_PATH")]
        defines = {option.name: option.value for option in self.options} | {
            "Python_EXECUTABLE": sys.executable,
            "CMAKE_INSTALL_PREFIX": str(self.source / "torch"),  # from where PyTorch's own install step packs
            "CMAKE_PREFIX_PATH": ";".join(filter(None, prefixes)),
        }
        words = [f"-D{name}={value}" for name, value in defines.items()]
        return ["cmake", "-S", str(self.source), "-B", str(self.build), "-G", "Ninja", *words]

    @property
    def compile(self) -> list[str]:
        return ["ninja", "-C", str(self.build), "-j", str(self.jobs)]

    @property
    def install(self) -> list[str]:
        pip = [sys.executable, "-m", "pip", "install", "--verbose", "--no-build-isolation", "--no-deps"]
        if self.prefix is not None:  # without --ignore-installed pip would remove the torch of this Python
            pip += ["--prefix", str(self.prefix), "--ignore-installed"]
        if build_backend(self.source).startswith("scikit_build_core"):  # from PyTorch 2.14 on
            pip += ["--config-settings", f"build-dir={self.build}"]
        return [*pip, str(self.source)]


def build_torch(
    source: Path,
    *,
    build_dir: Path | None = None,
    prefix: Path | None = None,
    arch: str | None = None,
    jobs: int | None = None,
    dry_run: bool = False,
    tell: Callable[[str], None] = say,
) -> TorchCheck | None:
    """The check of what was installed; None for a dry run. tell: for each line about what is being done."""
    if jobs is not None and jobs < 1:
        raise UsageError(f"--jobs {jobs}: at least one compiler is needed", fix="--jobs 1")
    source = source.expanduser().absolute()
    check_source(source)
    here = probe_builder()
    made = plan_build(source, build_dir=build_dir, prefix=prefix, arch=arch, jobs=jobs, here=here)
    needs = find_needs(source, made.build, made.options, here, made.env)
    if dry_run:
        print("\n".join(format_plan(made)))
    if needs:
        raise PacelineError(
            "before this can be built: " + "\n         ".join(need.what for need in needs),
            fix="\n       ".join(need.fix for need in needs),
        )
    if dry_run:
        return None
    made.build.mkdir(parents=True, exist_ok=True)
    with only_one(made.build):
        use_build_folder(made)
        for step, doing in ((configure, "configuring"), (compile_all, "compiling"), (install, "installing")):
            with interruption_told(doing, made):
                step(made, tell)
    installed = made.prefix or Path(sysconfig.get_path("purelib"))
    try:
        tell(f"installed into {made.prefix or sys.prefix}; log {made.log}")
        return check_torch(installed)
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted while it was tried; it is installed",
            fix=f"paceline torch check --path {shlex.quote(str(installed))}",
        ) from None


@contextmanager
def interruption_told(doing: str, made: Build) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as stop:
        steps = ""
        if isinstance(stop, StepInterrupted) and stop.total and doing == "compiling":
            steps = f", {stop.done:,} of {stop.total:,} steps done"
        half = f"; the torch in {made.prefix or sys.prefix} may be half there" if doing == "installing" else ""
        raise Interrupted(
            f"interrupted while {doing}{steps}: all that was compiled is kept in {made.build}{half}",
            fix="the same command goes on from there",
        ) from None


def plan_build(
    source: Path, *, build_dir: Path | None, prefix: Path | None, arch: str | None, jobs: int | None, here: Facts
) -> Build:
    archs = archs_asked(arch, here, os.environ)
    options = with_environment(build_options(archs, tools_of(here)), os.environ)
    jobs = jobs or num_jobs(
        memory_bytes=at(here, "host.memory.available_bytes"),
        cores=at(here, "host.cpu.cores") or os.cpu_count() or 1,
        cuda=bool(archs),
    )
    env = {**os.environ, **{option.name: option.value for option in options}}  # for PyTorch's own install step
    env |= {"MAX_JOBS": str(jobs), "NINJA_STATUS": STATUS, "CMAKE_GENERATOR": "Ninja", "PYTHONUNBUFFERED": "1"}
    return Build(
        source,
        (build_dir or source / "build").expanduser().absolute(),
        prefix and prefix.expanduser().absolute(),
        options,
        jobs,
        env,
    )


def archs_asked(arch: str | None, here: Facts, env: Mapping[str, str]) -> list[str]:
    """--arch, else the environment's list, else the cards here; none where there are none, or CUDA is switched off."""
    switched = env.get("USE_CUDA")
    if switched is not None and not is_on(switched):
        return []
    given, listed = (ARCH_FLAG, arch) if arch else (ARCH_VARIABLE, env.get(ARCH_VARIABLE) or AUTO)
    archs = split_archs(listed)
    if archs != [AUTO]:
        parse_archs(listed, given=given)
        return archs
    cards = [f"{major}.{minor}" for major, minor in sorted(set(capabilities_of(here)))]
    asking = "USE_CUDA is set" if switched else f"{given} is {AUTO}" if arch or env.get(ARCH_VARIABLE) else None
    if asking and not cards:
        raise UsageError(f"{asking}, and there is no GPU here to know the architecture of", fix="--arch 12.0")
    return cards


def with_environment(options: Sequence[Option], env: Mapping[str, str]) -> tuple[Option, ...]:
    """PyTorch's own build reads these names from the environment, so whoever set one means it."""
    changed = []
    for option in options:
        given = env.get(option.name)
        if given is None or option.name == ARCH_VARIABLE:
            changed.append(option)
        else:
            value = SWITCHES[is_on(given)] if option.is_switch else given
            changed.append(Option(option.name, value, "set in your environment"))
    return tuple(changed)


def format_plan(made: Build) -> Iterator[str]:
    yield f"source   {made.source}"
    yield f"build    {made.build}, {made.jobs} at once"
    yield f"install  {made.prefix or sys.prefix}"
    yield ""
    yield from format_options(made.options)
    yield ""
    for words in (made.configure, made.compile, made.install):
        yield "$ " + shlex.join(words)


@contextmanager
def only_one(build: Path) -> Iterator[None]:
    """Two builds in one folder would spoil each other."""
    lock: TextIO
    with (build / LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise PacelineError(
                f"another build runs in {build} (pid {lock.read().strip() or 'unknown'})",
                fix="wait for it, or --build-dir another",
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def use_build_folder(made: Build) -> None:
    """PyTorch's own install step builds in SOURCE/build: another folder takes its place by a link."""
    usual = made.source / "build"
    if made.build == usual or usual.resolve() == made.build.resolve():
        return
    if usual.exists() or usual.is_symlink():
        raise PacelineError(
            f"{usual} is there, and PyTorch's install step would build in it instead of {made.build}",
            fix=f"mv {usual} {usual}.old",
        )
    usual.symlink_to(made.build)


def configure(made: Build, tell: Callable[[str], None]) -> None:
    """Nothing where the same was configured before; says what changes otherwise."""
    wanted = {option.name: option.value for option in made.options} | {"Python_EXECUTABLE": sys.executable}
    record, cache = made.build / RECORD, read_cache(made.build)
    check_cache(cache, made)
    before = json.loads(read_text(record) or "null")
    if before == wanted and (made.build / "build.ninja").is_file():
        tell("configured before with the same options: goes on")
        return
    known = before or {name: value for name, (_, value) in cache.items()}
    changes = [
        f"{name} {known[name]} -> {value}" for name, value in wanted.items() if name in known and known[name] != value
    ]
    tell(f"configuring again: {', '.join(changes)}" if changes else "configuring")
    record.unlink(missing_ok=True)
    ended = run_step(made.configure, env=made.env, log=made.log)
    if ended.exit_code:
        raise configure_failed(ended, source=made.source, log=made.log)
    check_taken(made, ended.lines)
    write_atomic(record, json.dumps(wanted, indent=1) + "\n")


def check_cache(cache: Mapping[str, tuple[str, str]], made: Build) -> None:
    other = cache.get("CMAKE_HOME_DIRECTORY", ("", str(made.source)))[1]
    generator = cache.get("CMAKE_GENERATOR", ("", "Ninja"))[1]
    if Path(other).resolve() != made.source.resolve():
        raise PacelineError(f"{made.build} belongs to the source {other}", fix="--build-dir another")
    if generator != "Ninja":
        raise PacelineError(
            f"{made.build} was configured for {generator}, not Ninja", fix=f"rm -r {made.build}, or --build-dir another"
        )


def read_cache(build: Path) -> dict[str, tuple[str, str]]:
    """CMakeCache.txt: name -> type and value."""
    return {name: (kind, value) for name, kind, value in CACHE_LINE.findall(read_text(build / "CMakeCache.txt") or "")}


def check_taken(made: Build, printed: Sequence[str]) -> None:
    """Whether each switch is as asked, before hours go into a build without it."""
    real = switches_taken(read_cache(made.build), printed)
    asked = {option.name: option.value for option in made.options if option.is_switch}
    lost = {name: value for name, value in asked.items() if name in real and real[name] != value}
    if (
        not lost
        and asked.get("USE_TENSORPIPE") == "ON"
        and LIBUV_MACRO not in (read_text(made.build / "build.ninja") or "")
    ):
        raise PacelineError(
            f"USE_TENSORPIPE is on, and no file is compiled with {LIBUV_MACRO}: this torch would have no libuv",
            fix="a source tree whose cmake/Dependencies.cmake sets it; see docs/torch.md",
        )
    if not lost:
        return
    told, fixes = [], []
    for name, value in lost.items():
        cause = DEPENDS.get(name, "")
        if asked.get(cause) == "OFF" or cause in lost:
            told.append(f"{name}={value} did not take: it depends on {cause}, which is OFF")
            if cause not in lost:
                fixes.append(f"unset {cause} (set in your environment), or {name}=0 if it shall be off")
        else:
            told.append("\n         ".join([f"{name}={value} did not take", *warnings_about(printed, name)]))
            fixes.append(
                f"mend what CMake says, or {name}={'0' if value == 'ON' else '1'} before the command; log {made.log}"
            )
    raise PacelineError("\n         ".join(told), fix="\n       ".join(fixes))


def switches_taken(cache: Mapping[str, tuple[str, str]], printed: Sequence[str]) -> dict[str, str]:
    """What each is in truth. The summary knows best; a dependent option that is forced off stays ON in the cache, as INTERNAL."""
    real = {name: "OFF" if kind == "INTERNAL" else SWITCHES[is_on(value)] for name, (kind, value) in cache.items()}
    return real | {found[1]: SWITCHES[is_on(found[2])] for line in printed if (found := SUMMARY_LINE.match(line))}


def warnings_about(printed: Sequence[str], name: str) -> list[str]:
    """CMake's first warning that has the option's name, or what it stands for, in it."""
    word = name.removeprefix("USE_").lower()
    for i, line in enumerate(printed):
        if WARNING.match(line) and word in " ".join(quoted := cmake_message(printed[i:])).lower():
            return quoted
    return []


def compile_all(made: Build, tell: Callable[[str], None]) -> None:
    tell(f"compiling, {made.jobs} at once; log {made.log}")
    if sys.stderr.isatty():
        with show_progress() as show:
            ended = run_step(
                made.compile, env=made.env, log=made.log, on_progress=lambda done, total: show("compiling", done, total)
            )
    else:
        ended = run_step(made.compile, env=made.env, log=made.log, on_progress=PlainProgress(tell, "compiled"))
    if ended.exit_code:
        raise compile_failed(ended, jobs=made.jobs, log=made.log)


def install(made: Build, tell: Callable[[str], None]) -> None:
    replaced = "" if made.prefix else f", in place of torch {installed_version() or 'none'}"
    tell(f"installing into {made.prefix or sys.prefix}{replaced}")
    ended = run_step(made.install, env=made.env, log=made.log, cwd=made.source)
    if ended.exit_code:
        errors = [line.strip() for line in ended.lines if re.search(r"\berror\b", line, re.IGNORECASE)][:SHOWN_LINES]
        words = "\n         ".join(errors or ended.lines[-SHOWN_LINES:])
        raise PacelineError(f"the install step failed: {words}", fix=f"the log has all of it: {made.log}")


def installed_version() -> str | None:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
