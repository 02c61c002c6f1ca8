"""The two ways to say no: an error that stops, and a usage error of the command line itself."""


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
