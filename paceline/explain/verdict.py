"""
Chooses the cause: which event came first and on which rank, and which events are only consequences.

An event is not chosen if the run continued after it or if its cause can be a consequence of another event. Of the events that
remain the one with the highest score wins, and among nearly equal ones the first.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from paceline.explain import signs_of_trouble as signs
from paceline.explain.blame import (
    culprit_rank,
    failed_alike,
    rank_blamed_by_launcher,
    rank_in_text,
    ranks_of_victims,
    reports_of_leaving,
)
from paceline.explain.catalogue import Cause, load_catalogue
from paceline.explain.collectives import DESYNC, FIRST_TRANSFER, CollectiveHang, ends_at_init, ends_in_nccl, is_closed
from paceline.explain.explanation import (
    HEALTHY,
    UNKNOWN,
    Evidence,
    Explanation,
    LogProgress,
    Record,
    make_evidence,
    shorten,
)
from paceline.explain.idle import idle_epochs, idle_trainings, missing_items
from paceline.explain.line_measures import MEAN_LOSS
from paceline.explain.log import UNNAMED, Log, step_of
from paceline.explain.matches import (
    MIN_STEPS,
    WAITING,
    Event,
    as_ended,
    ended_programs,
    find_events,
    guess_events,
    unexplained_failures,
)
from paceline.explain.reader import INCOMPLETE, NOT_TEXT
from paceline.explain.roots import (
    apply_hang,
    before_restart,
    choose_culprit,
    find_hang,
    find_roots,
    last_words,
    of_last_program,
    silent_exit,
    without_consequences,
    without_ignored_interrupts,
)
from paceline.explain.run_bounds import BUFFERED_LINES, ended_program, shape_of
from paceline.explain.sentences import (
    ONE_LOG,
    ONE_LOG_PER_RANK,
    clean_values,
    describe_doubts,
    describe_ranks,
    describe_survived,
    fill_template,
    format_fix,
    frame_values,
    is_one_process,
    template_values,
    unknown_fix,
)
from paceline.explain.tracebacks import CUT_OFF
from paceline.units import format_number_of

NAN, EMPTY, ASSERT = "loss-nan", "dataset-empty", "device-side-assert-index"
MIN_SCORE = 0.2  # an event with a lower score is ignored
ALSO_NEAR = 0.2  # of scores that differ by less the other cause is reported too
# score below which, how often such a verdict was right on labelled logs that nothing was tuned on
CALIBRATION = ((0.3, 0.4), (0.5, 0.6), (0.6, 0.8), (0.8, 0.88), (0.9, 0.92), (1.01, 0.97))
INIT_CONFIDENCE, OUTPUT_CONFIDENCE, UNNAMED_CONFIDENCE, IDLE_CONFIDENCE = 0.4, 0.5, 0.6, 0.6
# of a single line of progress; steps behind an exception that nobody seems to have caught, and how sure that is
MIN_LATE_STEP, MANY_STEPS, UNSURE = 10, 10, 0.8
MAX_EVIDENCE, MAX_CONSEQUENCES, MAX_QUOTE = 6, 8, 200
FIRST_KINDS = {"exception": 0, "line": 1}  # of the records of a failure: what it says itself before how it ended
CHECK_END = (
    "if the job ended: check sacct -j JOB, or dmesg on its host; if it hangs: run py-spy dump --pid PID on each rank"
)
RAISE_STEPS = "raise max_steps or num_train_epochs above the checkpoint's, or start without resume_from_checkpoint"
NO_STEPS = "nothing was trained: the training began at its end and took no step"
NO_BATCHES = "nothing was trained: no epoch at the end of the log ran a batch"
RERUN_CELLS = "run its cells to the end, save the notebook, and pass it: paceline explain NOTEBOOK"
METRICS = re.compile(r'\{[^{}]*"(?:global_|current_)?(?:step|epoch|iter|iteration)s?": ?\d[^{}]*\}')
FAILED = re.compile(
    r"(?i)\b[1-9]\d* (?:\w+ )?(?:failed|failures|errors?)\b|\b(?:failed|failures|err(?:or)?s?)[:= ]+[1-9]"
)
FAILED = re.compile(r"\bFAILED\b")


def explain_one_run(logs: Sequence[Log], values: Mapping[str, str]) -> Explanation:
    """The explanation of one run, the last one in each log; values: what the logs do not contain, such as the batch size."""
    logs, progress = without_ignored_interrupts(logs), progress_of(logs)
    events = [event for number, log in enumerate(logs) for event in find_events(log, number=number)]
    fatal = [event for event in events if event.cause.severity == "fatal" and event.score >= MIN_SCORE]
    candidates = [event for event in fatal if not event.run_continued]
    unexplained = unexplained_failures(logs, events)
    if not candidates and not unexplained:
        candidates = as_ended([event for event in events if event.cause.severity == "fatal"], logs)
        unexplained = [] if candidates else ended_programs(logs, events)
    if not (candidates or unexplained or progress.finished) and stays_at_start(progress, logs):
        candidates = fatal  # a bar that stays at 0 does not show that anything was survived
    if not candidates and not unexplained:
        candidates = signs.errors_of_all_steps(fatal, logs)
    if not candidates and unexplained and all(record.kind != "exception" for record in unexplained):
        candidates = fatal  # other ranks continued for a while, but the exit shows that the run failed
    if not candidates and progress.nan_line is not None:
        return explain_divergence(load_catalogue().causes[NAN], progress.nan_line, progress, values)
    blamed = rank_blamed_by_launcher(logs)
    if all(event.from_launcher and event.record.kind in ("exit", "signal") for event in candidates):
        open_logs = [log for log in logs if not log.progress.finished]
        errors = [record for log in open_logs for record in signs.last_errors(log, has_failed=bool(unexplained))]
        errors = [error for error in errors if blamed is None or error.rank in (blamed, None)]
        errors += [record for log in logs for record in signs.errors_of_every_item(log)]
        trouble = [] if progress.finished else [Record("line", text, line) for line, text in signs.trouble_at_end(logs)]
        known = {id(event.record) for event in fatal}  # and survived
        guesses = guess_events([*unexplained, *(error for error in errors if id(error) not in known)])
        candidates = [*(guesses or guess_events(trouble)), *candidates]
        if all(record.kind != "exception" for record in unexplained):  # how it ended says less than its last words
            errors = errors if blamed is None else [replace(error, rank=blamed) for error in errors]
            unexplained = [*errors, *unexplained]
    if not candidates:
        quiet = explain_unknown(logs, unexplained, progress) if unexplained else explain_quiet(logs, progress, values)
        notes = (*describe_survived(events if fatal else [], num_logs=len(logs)), *describe_doubts(logs))
        return replace(quiet, notes=notes) if quiet.cause == HEALTHY else quiet
    exit_record = silent_exit(candidates, unexplained)
    candidates += last_words(exit_record, logs) if exit_record else []
    if exit_record and all(event.record.rank != exit_record.rank for event in candidates):
        errors = [record for record in unexplained if record.kind == "line"]
        return explain_unknown(logs, [*errors, exit_record], progress, consequences=candidates)
    hang = find_hang(candidates, logs, has_steps=progress.steps > 0)
    candidates = apply_hang(candidates, hang)
    roots = without_consequences(find_roots(before_restart(candidates, events, logs), hang), logs)
    roots = of_last_program(roots, logs)
    culprit = choose_culprit(roots, blamed)
    if (nan_line := progress.nan_line) is not None:
        if culprit.cause.id == NAN and culprit.record.kind == "line":
            return explain_divergence(culprit.cause, nan_line, progress, values)
        # a kernel's check, such as that of a probability, does not hold for NaN
        if culprit.cause.id == ASSERT and len(logs) == 1 and nan_line < culprit.record.line:
            diverged = explain_divergence(load_catalogue().causes[NAN], nan_line, progress, values)
            return replace(diverged, consequences=make_evidence([culprit.record], 1))
    explanation = explain_event(culprit, roots, candidates, logs, progress, values, hang=hang)
    return explanation if unexplained else note_steps_behind(explanation, culprit, logs)


def progress_of(logs: Sequence[Log]) -> LogProgress:
    """The progress of the log with the most steps, with the ends of all: each rank may have a log of its own."""
    parts = [log.progress for log in logs]
    longest = max(parts, key=lambda part: (part.steps, part.last_step or 0), default=LogProgress())
    finished = any(part.finished for part in parts)
    is_open = not finished and not any(log.is_notebook for log in logs)  # a cell has ended
    silent_end = is_open and longest.silent_end and all(part.silent_end for part in parts if part.steps)
    return replace(longest, finished=finished, silent_end=silent_end)


def explain_event(
    culprit: Event,
    roots: Sequence[Event],
    candidates: Sequence[Event],
    logs: Sequence[Log],
    progress: LogProgress,
    values: Mapping[str, str],
    *,
    hang: CollectiveHang | None,
) -> Explanation:
    cause, record = culprit.cause, culprit.record
    rank = culprit_rank(culprit, candidates, logs, hang=hang)
    diverged = cause.id == NAN and progress.nan_line is not None
    step = progress.nan_step if diverged else step_of(rank, record, logs, progress)
    same_cause = [event.record for event in candidates if event.cause.id == cause.id]
    left = reports_of_leaving(logs, rank) if cause.id in WAITING else []
    waiting = [event.record for event in candidates if event.cause.id in WAITING]
    related = waiting if cause.id in WAITING else same_cause
    ranks = describe_ranks(culprit, related, rank=rank, log=logs[culprit.place[0]], left=left)
    values = {**ranks, **template_values(culprit, rank=rank, step=step, progress=progress), **values}
    of_rank = [other for other in same_cause if None in (record.rank, other.rank) or record.rank == other.rank]
    evidence = make_evidence([record, *same_cause], MAX_EVIDENCE)
    before = nan_records(progress) if diverged and len(logs) == 1 else left
    evidence = (*make_evidence(before, 1), *evidence)[:MAX_EVIDENCE]
    shown = {(item.source, item.line) for item in evidence}
    texts = {(item.rank, item.text) for item in evidence}  # of which the second traceback of a chain may repeat one
    alike = failed_alike(culprit, logs)
    records = [event.record for event in candidates if not is_long_before(event, culprit)]
    others = [other for other in records if (other.source, other.line) not in shown]
    others = [other for other in others if not alike or shape_of(other.text) != shape_of(record.text)]
    consequences = [other for other in others if (other.rank, shorten(other.text)) not in texts]
    rivals = sorted((event for event in roots if event.cause.id != cause.id), key=lambda event: -event.score)
    also = dict.fromkeys(rival.cause.id for rival in rivals if rival.score >= culprit.score - ALSO_NEAR)
    if cause.id in WAITING or rank_in_text(culprit) is not None:
        victims = [event.record for event in candidates]  # those with the same cause only wait for the culprit
    else:
        failed = {other.rank for other in same_cause}
        victims = [event.record for event in candidates if event.record.rank not in failed]
    return Explanation(
        cause=cause.id, also=tuple(also), confidence=confidence(culprit.score, rivals[0].score if rivals else 0.0),
        rank=rank, step=step, host=culprit.values.get("host") or record.host, line=record.line,
        summary=fill_template(cause.summary, values), fix=format_fix(cause, [record, *of_rank, *before], values),
        evidence=evidence, consequences=make_evidence(consequences, MAX_CONSEQUENCES), progress=progress,
        victims=() if alike or (rank is None and cause.id in WAITING) else ranks_of_victims(victims, rank),
    )  # fmt: skip


def is_long_before(event: Event, culprit: Event) -> bool:
    """Whether a process without a rank reported an event too early to be a consequence of the culprit, even from a buffer."""
    (number, line), (culprit_number, culprit_line) = event.place, culprit.place
    has_rank = event.record.rank is not None or culprit.record.rank is not None
    return number == culprit_number and not has_rank and line < culprit_line - BUFFERED_LINES


def note_steps_behind(explanation: Explanation, culprit: Event, logs: Sequence[Log]) -> Explanation:
    """Adds that many steps follow an exception that seems to have ended its program: a program may also print what it caught."""
    log, record = logs[culprit.place[0]], culprit.record
    ranks = {rank for line, rank, _ in log.last_progress if line > record.line}
    num_steps = len(log.steps_after(record))
    if num_steps < MANY_STEPS or ranks != {record.rank} or not ended_program(record):
        return explanation
    reasons = "a buffer held them when the program ended, another rank or a restart wrote them, or the program caught this error"
    note = f"{num_steps} steps follow it: {reasons}"
    return replace(explanation, confidence=min(explanation.confidence, UNSURE), notes=(*explanation.notes, note))


def confidence(score: float, rival: float) -> float:
    """How often a verdict with this score and this lead over the next cause is right."""
    lead = min(max(score - rival, 0.0), ALSO_NEAR) / ALSO_NEAR
    accuracy = next(accuracy for limit, accuracy in CALIBRATION if score < limit)
    return round(accuracy * (0.75 + 0.25 * lead), 2)


def explain_divergence(cause: Cause, nan_line: int, progress: LogProgress, values: Mapping[str, str]) -> Explanation:
    """For a log whose losses or gradient norms are NaN or infinite to its end and which has no other failure."""
    parts = {"eval_loss": "only the loss of the evaluation is", UNNAMED: "what is printed without a name is"}
    part, is_unnamed = parts.get(progress.nan_measure), progress.nan_measure == UNNAMED
    values = {**clean_values({"nan_step": progress.nan_step, "nan_rank": progress.nan_rank, "message": part}), **values}
    return Explanation(
        cause=cause.id, confidence=UNNAMED_CONFIDENCE if is_unnamed else 0.8, step=progress.nan_step, line=nan_line,
        rank=progress.nan_rank,
        summary=fill_template(cause.summary, values), fix=format_fix(cause, nan_records(progress), values),
        evidence=make_evidence(nan_records(progress), 1), progress=progress,
    )  # fmt: skip


def nan_records(progress: LogProgress) -> list[Record]:
    """The line from which on every loss or every gradient norm is NaN or infinite."""
    if progress.nan_line is None:
        return []
    value = progress.last_loss if progress.nan_measure.endswith("loss") else "NaN or infinite"
    start = "the first one" if progress.is_all_nan and progress.nan_measure == "loss" else "here"
    return [Record("line", f"{progress.nan_measure} {value} from {start} to the end", progress.nan_line)]


def explain_quiet(logs: Sequence[Log], progress: LogProgress, values: Mapping[str, str]) -> Explanation:
    """For logs without any known failure: healthy only if something shows that the run works."""
    if any(log.problem == INCOMPLETE for log in logs):
        return explain_silence(logs, progress, ())
    has_losses = any(point.name != MEAN_LOSS for log in logs for point in (*log.losses, *log.held_out))
    if not (progress.last_step or has_losses) and (idle := [item for log in logs for item in idle_trainings(log)]):
        shown = tuple(idle[:MAX_EVIDENCE])
        return Explanation(UNKNOWN, summary=NO_STEPS, fix=RAISE_STEPS, evidence=shown, progress=progress)
    missing, epochs = missing_items(logs), idle_epochs(logs)
    if shown := (missing or epochs)[:MAX_EVIDENCE]:
        fix = format_fix(load_catalogue().causes[EMPTY], (), values)
        summary = f"nothing is left to work on: {shown[0].text[:MAX_QUOTE]}" if missing else NO_BATCHES
        return Explanation(EMPTY, (), IDLE_CONFIDENCE, summary=summary, fix=fix, evidence=shown, progress=progress)
    at_end = signs.trouble_at_end(logs)
    if progress.finished:  # a summary of several programs names those that failed behind what they have printed
        at_end = [(n, text) for n, text in at_end if n > (progress.done_line or n) and FAILED.search(text)]
    if trouble := [Evidence(n, shorten(text)) for n, text in at_end]:
        return explain_silence(logs, progress, trouble)
    if not progress.finished and (late := [item for log in logs for item in signs.errors_behind_progress(log)]):
        return explain_silence(logs, progress, late)
    texts = (text for log in logs for _, text in log.last_lines)
    stops = progress.last_loss is not None and any(map(signs.RECORDS_STOP.search, texts))
    # a single step far into the work, with its loss, as of a line that was cut out of a log
    is_late = (progress.last_step or 0) >= MIN_LATE_STEP and progress.last_loss is not None and progress.silent_end
    is_over = progress.finished or stops or is_late
    if is_over or (progress.steps >= MIN_STEPS and not stays_at_start(progress, logs)):
        is_log = not all(METRICS.fullmatch(text) for log in logs for _, text in log.last_lines[-1:])
        return explain_health(replace(progress, silent_end=progress.silent_end and is_log and not stops))
    last_lines = [[text for _, text in log.last_lines] for log in logs if log.last_lines]
    in_nccl = bool(last_lines) and all(map(ends_in_nccl, last_lines))
    if any(map(hardly_began, logs)) or (in_nccl and any(map(is_closed, last_lines))):
        return explain_silence(logs, progress, ())
    if in_nccl:
        cause, place = load_catalogue().causes[FIRST_TRANSFER], logs[0].last_lines[-1:]
        values = {
            **values,
            "observed": "the log ends when NCCL's communicators are ready, before a collective completed"
            if all(map(ends_at_init, last_lines))
            else "the log ends while NCCL starts, before a collective completed",
        }
        return Explanation(
            cause=cause.id, also=(DESYNC,), confidence=INIT_CONFIDENCE, progress=progress,
            summary=fill_template(cause.summary, values), fix=format_fix(cause, (), values),
            evidence=tuple(Evidence(number, shorten(text)) for number, text in place),
        )  # fmt: skip
    if trouble := [Evidence(n, shorten(text)) for n, text in signs.trouble_anywhere(logs)]:
        return explain_silence(logs, progress, trouble)
    if any(map(signs.is_ordinary, logs)):
        result = signs.final_result(logs)
        summary = (
            f"no failure found in {sum(log.last_line for log in logs):,} lines, but they report no step and no end"
        )
        if result:
            summary = f"{summary.removesuffix(' and no end')}; the last line is: {shorten(result)[:MAX_QUOTE]}"
        fix = "" if result or any(log.is_notebook for log in logs) else CHECK_END
        return Explanation(HEALTHY, confidence=OUTPUT_CONFIDENCE, summary=summary, fix=fix, progress=progress)
    return explain_silence(logs, progress, ())


def stays_at_start(progress: LogProgress, logs: Sequence[Log]) -> bool:
    """Whether a bar at 0, the first step, or an epoch's start where training is announced at the end is all that is shown."""
    last_steps = (0, None) if any(signs.ends_in(signs.TRAINING_BEGINS, log) for log in logs) else (0,)
    is_first = progress.last_step in last_steps or progress.first_step == progress.last_step == 1
    return progress.steps >= MIN_STEPS and is_first and progress.last_loss is None


def hardly_began(log: Log) -> bool:
    """Whether a log's last run printed little and no step, although runs before it reported steps."""
    has_steps = any(run.progress.steps >= MIN_STEPS for run in log.earlier)
    is_short = log.last_line - log.first_line <= BUFFERED_LINES and not signs.ends_well(log)
    return log.lacks_members or (log.is_restart and has_steps and is_short)


def explain_silence(logs: Sequence[Log], progress: LogProgress, trouble: Sequence[Evidence]) -> Explanation:
    """For logs that show neither a known failure nor that the run works: what was read. trouble: their suspicious lines."""
    num_lines = format_number_of(sum(log.last_line for log in logs), "line")
    fix = f"pass the whole log of every rank: {ONE_LOG_PER_RANK}"
    if is_one_process(logs):
        fix = RERUN_CELLS if logs[0].is_notebook else f"pass all that the run printed: {ONE_LOG}"
    if trouble:
        fix = unknown_fix(Record("line", trouble[0].text, trouble[0].line), logs) if is_one_process(logs) else fix
        is_end = any(trouble[0].line == number for log in logs for number, _ in log.last_lines[-signs.LAST_CHECKED :])
        where = "the log ends with" if is_end else f"line {trouble[0].line:,} is"
        summary = f"no failure is recognized, but {where}: {trouble[0].text[:MAX_QUOTE]}"
    elif any(log.problem == INCOMPLETE for log in logs):
        summary = f"{INCOMPLETE}: no failure found in the {num_lines} that could be read"
        fix = "copy the file again, or pass the log before its compression"
    elif logs and all(log.problem == NOT_TEXT for log in logs):
        summary, fix = NOT_TEXT, "pass the text that the training printed: paceline explain LOG"
    elif not any(log.last_lines for log in logs):
        summary, fix = "the log is empty", "check whether the job started, and where it writes its output"
        if any(log.is_notebook for log in logs):
            summary, fix = "no cell of the notebook printed anything", RERUN_CELLS
    elif start := max((log.first_line for log in logs if log.is_restart), default=0):
        summary = f"the last run in this log begins at line {start:,} and shows neither a failure nor that it works"
    else:
        summary = f"no failure found, but nothing shows that the run works: {num_lines} without a step or an end"
    ends = [Evidence(number, shorten(text)) for log in logs for number, text in log.last_lines[-1:]]
    evidence = tuple([*(trouble or ends)][:MAX_EVIDENCE])
    return Explanation(UNKNOWN, summary=summary, fix=fix, evidence=evidence, progress=progress)


def explain_health(progress: LogProgress) -> Explanation:
    """For a log that shows that the run works and no failure; one that stops at a progress line may have been cut off."""
    summary, fix = "no failure found", ""
    if progress.steps:
        loss = f", loss {progress.last_loss:g}" if progress.last_loss is not None else ""
        first, last = progress.first_step or 0, progress.last_step
        steps = "" if last is None or first == last else f", step {first:,} to {last:,}"
        if progress.last_epoch is not None:
            steps = ", to epoch {:,} of {:,}, step {:,}".format(*progress.last_epoch, last)
        summary += f": {format_number_of(progress.steps, 'progress line')}{steps}{loss}"
    if progress.silent_end:
        summary += "; the log stops there without an error or a final message"
        fix = CHECK_END
    confidence = 0.9 if progress.finished else 0.6 if progress.silent_end else 0.7
    return Explanation(HEALTHY, confidence=confidence, summary=summary, fix=fix, progress=progress)


def explain_unknown(
    logs: Sequence[Log], unexplained: Sequence[Record], progress: LogProgress, *, consequences: Sequence[Event] = ()
) -> Explanation:
    """For a failure that is not in the catalogue: its records, and what to collect for a better answer."""
    first = min(unexplained, key=lambda record: (FIRST_KINDS.get(record.kind, 2), record.line))
    evidence = make_evidence([first, *unexplained], MAX_EVIDENCE)
    if len(unexplained) < 2 and not consequences:
        evidence += tuple(Evidence(number, shorten(text)) for log in logs for number, text in log.last_lines[-3:])
    victims = [event.record for event in consequences]
    summary = f"the failure is not in the catalogue: {shorten(first.text.splitlines()[0])[:MAX_QUOTE]}"
    if first.text == CUT_OFF:
        summary = f"the log ends inside a traceback at {frame_values(first).get('where', 'its first line')}"
    return Explanation(
        cause=UNKNOWN, rank=first.rank, step=first.step, host=first.host, line=first.line, summary=summary,
        fix=unknown_fix(first, logs), evidence=evidence, consequences=make_evidence(victims, MAX_CONSEQUENCES),
        progress=progress, victims=ranks_of_victims(victims, first.rank),
    )  # fmt: skip
