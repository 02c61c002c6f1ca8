"""The two kinds of problems: an error, which ends the command, and findings of a check; and the name that was meant."""

import difflib
import errno
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal

NEAR = 0.75  # of the letters: a suggestion that is further off leads astray
MAX_MESSAGE = 2000  # characters that are printed: a value that is quoted may have any length
INTERRUPTED = 130  # the exit code after Ctrl-C or SIGTERM; a checkpoint was saved where there was something to save
Change = Mapping[str, Any]  # config keys and their new values


class PacelineError(Exception):
    """Something that the user can fix. It is printed as two lines, `error:` and `fix:`, without a traceback."""

    exit_code = 1

    def __init__(self, message: str, *, fix: str):
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        message = self.message if len(self.message) <= MAX_MESSAGE else f"{self.message[:MAX_MESSAGE]}…"
        return f"error: {message}\n  fix: {self.fix}"


def expand_home(path: str | Path) -> Path:
    """Returns the path with a folder in place of `~` or `~user`. Raises PacelineError where that home is not known."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        home = Path(path).parts[0]
        fix = "export HOME=DIR, a folder that you can write" if home == "~" else "write the whole path"
        raise PacelineError(f"the home folder {home} is not known", fix=fix) from error


def check_new_file(path: Path, *, force: bool) -> None:
    """Raises PacelineError for a file of --out that exists, unless --force is set, and for what cannot be a file."""
    if path.is_dir():
        raise PacelineError(f"{path} is a folder", fix=f"give the file in it: --out {shlex.quote(str(path / 'FILE'))}")
    if (holder := next(parent for parent in path.absolute().parents if parent.exists())).is_file():
        raise PacelineError(f"{holder} is a file, and no folder of {path.name}", fix="--out FILE in another folder")
    if path.exists() and not force:
        raise PacelineError(f"{path} already exists", fix="--force overwrites it, --out FILE writes another one")
    try:  # a tokenizer may take hours before it is written
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if path.is_file() or not path.exists():  # it is written beside its place first
            with TemporaryFile(dir=holder):
                pass
    except OSError as error:
        fix = "--out FILE in a place you can write"
        raise PacelineError(f"{path} cannot be written: {error.strerror}", fix=fix) from error


@dataclass(frozen=True)
class FileFix:
    """A command that fixes a file; the file's name is the shell's variable f."""

    command: str  # has "$f", and "$f.new" for a file beside it
    note: str = ""  # what follows the command
    guard: str = ""  # succeeds for a file that has not this fault
    before: str = field(default="", compare=False)  # another fix, for all files, and `, or `

    def for_file(self, path: str | Path) -> str:
        """Returns the fix for one file."""
        command = re.sub(r'"\$f([.\w]*)"', lambda match: shlex.quote(f"{path}{match[1]}"), self.command)
        return self.before + command + self.note

    def for_files(self, patterns: str) -> str:
        """Returns the fix for all files that match the shell's patterns."""
        command = f"{self.guard} || {{ {self.command}; }}" if self.guard else self.command
        return f"{self.before}for f in {patterns}; do {command}; done{self.note}"


class UsageError(PacelineError):
    """The command line is wrong: an unknown command, an unknown flag, or a value that the flag does not take."""

    exit_code = 2


class PlanError(PacelineError):
    """No plan fits the request. changes: what may help; the planner tries them in this order, and names the first that does."""

    def __init__(self, message: str, *, fix: str, changes: Iterable[Change] = ()):
        super().__init__(message, fix=fix)
        self.changes = changes


class TrainingFailed(PacelineError):
    """The training itself broke: a crash, a non-finite loss, a rank that was killed."""

    exit_code = 3


@dataclass(frozen=True)
class Finding:
    """One result of a check: with `stop` the run would fail, `warn` would hurt it, `note` is good to know."""

    id: str  # stable, kebab-case: people silence and search for it
    severity: Literal["stop", "warn", "note"]
    what: str  # with the numbers
    why: str  # the consequence
    fix: str  # a command or a value
    # the facts that it follows from: "network.addresses" -> value
    evidence: dict[str, Any] = field(default_factory=dict)
    host: str | None = None  # None: it concerns the config, or all hosts together

    def to_json(self) -> dict[str, Any]:
        """Returns the finding as findings.json has it."""
        return asdict(self)


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Returns the name that was probably meant: one with nearly the same letters, or the shortest that continues it."""
    word, bare = name.lstrip("-"), {other.lstrip("-"): other for other in names}
    continued = sorted((other for other in bare if other.startswith(word) and len(word) > 2), key=len)
    return next((bare[other] for other in (*difflib.get_close_matches(word, bare, n=1, cutoff=NEAR), *continued)), None)


def nearest_choice(value: Any, choices: Iterable[str], expected: str) -> str:
    """Returns what to write in place of a refused value: `nvfp4, or another one of fp32, bf16 ...` for nfp4.

    expected: all that is allowed, in words.
    """
    meant = nearest(str(value).lower(), choices)
    return f"{meant}, or another {expected}" if meant else expected


class UnreadableFile(PacelineError):
    """A source file that is broken, missing or not text; others may be fine. file_fix: of a fault that more files may have."""

    def __init__(self, message: str, *, fix: str, file_fix: FileFix | None = None):
        super().__init__(message, fix=fix)
        self.file_fix = file_fix
