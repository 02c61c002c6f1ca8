"""
Orders what happened: which event came first and on which rank, and which only followed.

Pure: takes logs as the reader gives them and the catalogue, returns an Explanation. An event is left out of the choice where
the work went on after it, and where its cause can be a mere consequence of another that is there. Of what remains the
surest wins, and among nearly equally sure ones the first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from paceline.explain.blame import PEER_DIED, WAITING, culprit_rank, launcher_blames, named_rank
from paceline.explain.catalogue import Catalogue
from paceline.explain.events import Event, events_of, loud_lines, untold
from paceline.explain.fill import fill, known
from paceline.explain.reader import Log
from paceline.explain.record import Evidence, Explanation, Progress, Record
from paceline.explain.values import values_of

HEALTHY, UNKNOWN, DIVERGED = "healthy", "unknown", "loss-nan"
NEAR = 0.12  # scores that differ by less are decided by what came first
ALSO_NEAR = 0.2
RIGHT = (
    (0.3, 0.4),
    (0.5, 0.6),
    (0.6, 0.8),
    (0.8, 0.88),
    (0.9, 0.92),
    (1.01, 0.97),
)  # score below which, how often right
LEAST = 0.2  # a score below it says nothing
NATIVE = {
    "native-abort",
    "sigsegv",
}  # also how a process goes down after an exception of Python's: its threads are torn down
MAX_EVIDENCE, MAX_CONSEQUENCES = 6, 8
MAX_TEXT = 600
ONE_LOG_EACH = "torchrun --redirects 3 --log-dir logs, then paceline explain logs"
BY_OTHERS = re.compile(r"-15\b|SIGTERM|-6\b|SIGABRT")  # ended by the launcher, or went down with its communicator
WATCHDOG = re.compile(
    r"[Ww]atchdog|ProcessGroupNCCL|taking the entire process down"
)  # NCCL's aborts the process after its error
NO_DIGITS = str.maketrans("", "", "0123456789")


def reach_verdict(logs: Sequence[Log], catalogue: Catalogue, *, values: Mapping[str, str] | None = None) -> Explanation:
    """values: what is known beside the logs, for the sentences of the catalogue."""
    events = [event for number, log in enumerate(logs) for event in events_of(log, catalogue, number=number)]
    progress = together([log.progress for log in logs])
    fatal = [event for event in events if event.cause.severity == "fatal" and event.score >= LEAST]
    standing = [event for event in fatal if not event.survived]
    unexplained = [record for log in logs for record in untold(log, events)]
    if not standing and unexplained and all(record.kind != "exception" for record in unexplained):
        standing = fatal  # others went on for a while: it is the last word that tells that it broke
    if not standing:
        if diverged := explain_divergence(catalogue, progress, values):
            return diverged
        unexplained = unexplained or [record for log in logs for record in loud_lines(log)]
        return explain_unknown(logs, unexplained, progress) if unexplained else explain_health(progress)
    if wordless := ended_without_a_word(standing, unexplained):
        return explain_unknown(logs, [wordless], progress, followed=standing)
    free = [event for event in standing if not follows(event, standing)] or standing
    culprit = choose(free, launcher_blames(record for log in logs for record in log.records))
    return explain_event(culprit, free, standing, logs, progress, values or {})


def choose(events: Sequence[Event], blamed: int | None) -> Event:
    """The surest; among nearly equal ones the first. blamed: the rank that a launcher saw fail first."""
    best = max(event.score for event in events)
    leaders = [event for event in events if event.score >= best - NEAR]
    if len({event.place[0] for event in leaders}) == 1:
        return min(leaders, key=lambda event: (event.place[1], -event.score))
    if all(event.record.time is not None for event in leaders):
        return min(leaders, key=lambda event: (event.record.time or 0.0, -event.score))
    return min(leaders, key=lambda event: (event.record.rank != blamed, -event.score, event.place))


def follows(event: Event, others: Sequence[Event]) -> bool:
    """Whether it can be a mere consequence of another that is there."""
    for other in others:
        if other.record is event.record or (
            other.cause.id == event.cause.id and event.by_launcher == other.by_launcher
        ):
            continue
        if event.by_launcher and not other.by_launcher:
            return True
        if may_follow(event, other) and not (may_follow(other, event) and goes_before(event, other)):
            return True
    return False


def goes_before(event: Event, other: Event) -> bool:
    """Which of two that may each follow from the other is the root: on one rank the earlier, else what is no mere loss."""
    one, two = event.record, other.record
    if one.rank is not None and one.rank == two.rank and event.place[0] == other.place[0]:
        return event.place[1] <= other.place[1]
    mere, other_mere = event.cause.follows is True, other.cause.follows is True
    return event.score >= other.score if mere == other_mere else other_mere


def ended_without_a_word(standing: Sequence[Event], unexplained: Sequence[Record]) -> Record | None:
    """The exit of a rank that said nothing, where all that is told can only have followed from some other rank's end."""
    if any(event.cause.follows is not True and not event.by_launcher for event in standing):
        return None
    if any(event.cause.id in WAITING - {PEER_DIED} for event in standing):
        return None
    told = {event.record.rank for event in standing}
    if None in told:
        return None  # it may be that very rank's
    ends = [record for record in unexplained if record.kind in ("exit", "signal") and record.rank not in told]
    return next((record for record in ends if not BY_OTHERS.search(record.text)), None)


def may_follow(event: Event, other: Event) -> bool:
    allowed = event.cause.follows
    if is_end(event, "native-abort") and WATCHDOG.search(other.record.text):
        return True
    if is_end(other, "native-abort") and WATCHDOG.search(event.record.text):
        return False
    if event.cause.id in NATIVE and event.record.kind != "exception" and other.record.kind == "exception":
        ranks = {event.record.rank, other.record.rank} - {None}
        return len(ranks) < 2 and other.cause.follows is not True
    if isinstance(allowed, bool):
        return allowed
    return other.cause.id in allowed


def is_end(event: Event, cause: str) -> bool:
    return event.cause.id == cause and event.record.kind in ("exit", "signal")


def explain_event(
    culprit: Event,
    free: Sequence[Event],
    standing: Sequence[Event],
    logs: Sequence[Log],
    progress: Progress,
    values: Mapping[str, str],
) -> Explanation:
    cause, record = culprit.cause, culprit.record
    alike = [event for event in standing if event.cause.id == cause.id]
    rank = culprit_rank(culprit, standing, logs)
    also = other_causes(culprit, free)
    step = step_of(culprit, progress)
    filled = values_of(culprit, rank=rank, step=step, progress=progress) | dict(values)
    evidence = shown([record, *(event.record for event in alike)], MAX_EVIDENCE)
    told = {(each.source, each.line) for each in evidence}
    consequences = [event.record for event in standing if (event.record.source, event.record.line) not in told]
    return Explanation(
        cause=cause.id,
        also=tuple(also),
        confidence=confidence(culprit, free),
        rank=rank,
        step=step,
        host=culprit.match.values.get("host") or record.host,
        line=record.line,
        summary=fill(cause.summary, filled),
        fix=fill(cause.fix, filled),
        evidence=tuple(evidence),
        consequences=tuple(shown(consequences, MAX_CONSEQUENCES)),
        progress=progress,
        victims=victims_of(rank, culprit, standing),
    )


def other_causes(culprit: Event, free: Sequence[Event]) -> list[str]:
    near = sorted((event for event in free if event.score >= culprit.score - ALSO_NEAR), key=lambda event: -event.score)
    return [cause for cause in dict.fromkeys(event.cause.id for event in near) if cause != culprit.cause.id]


def confidence(culprit: Event, free: Sequence[Event]) -> float:
    """How often a verdict of this score, with this lead, was right on labelled logs that nothing was tuned on."""
    rival = max((event.score for event in free if event.cause.id != culprit.cause.id), default=0.0)
    lead = min(max(culprit.score - rival, 0.0), ALSO_NEAR) / ALSO_NEAR
    right = next((known for score, known in RIGHT if culprit.score < score), RIGHT[-1][1])
    return round(right * (0.75 + 0.25 * lead), 2)


def step_of(event: Event, progress: Progress) -> int | None:
    """The text's own, else of the last mark before; where that rank has told of none, the last that any has told of."""
    said = event.match.values.get("step")
    if said and said.isdecimal() and len(said) < 16:
        return int(said)
    return progress.last_step if event.record.step is None else event.record.step


def victims_of(rank: int | None, culprit: Event, standing: Sequence[Event]) -> tuple[int, ...]:
    """Ranks that told of something else, or only of the wait."""
    waits = culprit.cause.id in WAITING or named_rank(culprit) is not None
    same = {event.record.rank for event in standing if event.cause.id == culprit.cause.id and not waits}
    ranks = {event.record.rank for event in standing} - same - {rank, None}
    return tuple(sorted(each for each in ranks if each is not None))


def shown(records: Sequence[Record], most: int) -> list[Evidence]:
    """In the order given; what differs from another by digits alone is shown once for each rank."""
    found: dict[tuple[int | None, str], Evidence] = {}
    for record in records:
        text = clipped(record.text)
        found.setdefault(
            (record.rank, text.translate(NO_DIGITS)), Evidence(record.line, text, record.rank, record.source)
        )
    return list(found.values())[:most]


def clipped(text: str) -> str:
    text = text.strip()
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def together(parts: Sequence[Progress]) -> Progress:
    """Of several logs, one a rank: the log that tells most, with what the others add."""
    if not parts:
        return Progress()
    most = max(parts, key=lambda each: (each.steps, each.last_step or 0))
    return replace(
        most,
        finished=any(each.finished for each in parts),
        silent_end=all(each.silent_end for each in parts if each.steps) and most.silent_end,
    )


def explain_divergence(
    catalogue: Catalogue, progress: Progress, values: Mapping[str, str] | None
) -> Explanation | None:
    """The loss is no number any more, and nothing else broke."""
    cause = catalogue.causes.get(DIVERGED)
    if progress.nan_line is None or cause is None:
        return None
    filled = known({"step": progress.nan_step, "last_step": progress.last_step}) | dict(values or {})
    return Explanation(
        cause=DIVERGED, also=(), confidence=0.8, rank=None, step=progress.nan_step, host=None, line=progress.nan_line,
        summary=fill(cause.summary, filled), fix=fill(cause.fix, filled),
        evidence=(Evidence(progress.nan_line, f"loss {progress.last_loss} from here to the end"),), progress=progress,
    )  # fmt: skip


def explain_health(progress: Progress) -> Explanation:
    loss = f", loss {progress.last_loss:g}" if progress.last_loss is not None else ""
    if progress.last_step is None:
        summary = "no failure found"
    else:
        steps = f"step {progress.first_step or 0:,} to {progress.last_step:,}"
        summary = f"no failure found: {progress.steps:,} progress marks, {steps}{loss}"
    fix = ""
    if progress.silent_end:
        summary += "; the log ends there without a word of an end"
        fix = "if the job is gone: sacct -j JOB, or dmesg on its host; if it stands still: py-spy dump --pid PID on each rank"
    return Explanation(
        cause=HEALTHY, also=(), confidence=0.6 if progress.silent_end else 0.9 if progress.steps else 0.7, rank=None, step=None,
        host=None, line=None, summary=summary, fix=fix, progress=progress,
    )  # fmt: skip


def explain_unknown(
    logs: Sequence[Log], unexplained: Sequence[Record], progress: Progress, *, followed: Sequence[Event] = ()
) -> Explanation:
    """It broke, and the catalogue does not say why: what tells most, and what would tell more."""
    first = min(unexplained, key=lambda record: (record.kind != "exception", record.line))
    last = [Evidence(number, clipped(text), None, None) for log in logs for number, text in log.last_lines[-3:]]
    return Explanation(
        cause=UNKNOWN,
        also=(),
        confidence=0.0,
        rank=first.rank,
        step=first.step,
        host=first.host,
        line=first.line,
        summary=f"it ended with something that is not in the catalogue: {clipped(first.text.splitlines()[0])[:200]}",
        fix=next_to_collect(first, logs),
        evidence=(
            *shown([first, *unexplained], MAX_EVIDENCE),
            *(last if len(unexplained) < 2 and not followed else ()),
        ),
        consequences=tuple(shown([event.record for event in followed], MAX_CONSEQUENCES)),
        progress=progress,
        victims=tuple(
            sorted({event.record.rank for event in followed if event.record.rank is not None} - {first.rank})
        ),
    )


def next_to_collect(first: Record, logs: Sequence[Log]) -> str:
    if first.kind == "exception":
        return (
            "read the frames above that line; if they do not tell, the same again with CUDA_LAUNCH_BLOCKING=1"
            " and TORCH_SHOW_CPP_STACKTRACES=1"
        )
    if all(record.kind != "exception" for log in logs for record in log.records):
        return f"what the failed rank itself wrote is not here: {ONE_LOG_EACH}; and dmesg of its host"
    return f"PYTHONFAULTHANDLER=1 and NCCL_DEBUG=INFO, and a log for each rank: {ONE_LOG_EACH}"
