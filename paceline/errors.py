"""The two ways to say no: an error that ends the command, and a finding about a machine or a config, of which there may be many."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal


class PacelineError(Exception):
    """Something a user can mend. Printed as two lines, `error:` and `fix:`, without a traceback."""

    exit_code = 1

    def __init__(self, message: str, *, fix: str):
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"error: {self.message}\n  fix: {self.fix}"


class UsageError(PacelineError):
    """The command line is wrong: unknown command, unknown flag, a value that no such flag takes."""

    exit_code = 2


class PlanError(PacelineError):
    """The run cannot be laid out as asked; `fix` names what can."""


class TrainingFailed(PacelineError):
    """The training itself broke: a crash, a non-finite loss, a rank that was killed."""

    exit_code = 3


class Interrupted(PacelineError):
    """Ctrl-C or SIGTERM; a checkpoint was saved where there was something to save."""

    exit_code = 130


@dataclass(frozen=True)
class Finding:
    """One thing that a check found: `stop` would fail, `warn` would hurt, `note` is good to know."""

    id: str  # stable, kebab-case: people silence and search for it
    severity: Literal["stop", "warn", "note"]
    what: str  # with the numbers
    why: str  # what comes of it
    fix: str  # a command or a value
    evidence: dict[str, Any] = field(default_factory=dict)  # the facts it follows from: "network.addresses" -> value
    host: str | None = None  # None: of the config, or of all hosts together

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
