"""
Work on nothing: epochs without a batch, counts of no samples, a training that took no step.
"""

import re
from collections.abc import Sequence
from itertools import pairwise

from paceline.explain.explanation import Evidence, shorten
from paceline.explain.log import Log
from paceline.explain.signs_of_trouble import final_result

# the end of an epoch without any work in it, not one without batches that were left out
IDLE_EPOCH = re.compile(
    r"(?i)^(?!.*(?:skip|drop|fail|discard|remain|left|bad|val|eval|test|\b[1-9]\d* (?:\w+ )?(?:batches|steps)(?!\s?[:=])))"
    r".*\bepoch\b(?:.*(?:[^\w\s]|\d|ran|with|in|done|end) +)?(?:\b(?:0|no) (?:batches|steps)(?: (?:trained|processed|done|run))?"
    r"|(?:num_)?(?:batches|steps)(?:: ?|=| )0)\W*$"
)
NO_ITEMS = re.compile(r"(?i)(?<![\d.,])\b0 train(?:ing)? (?:clients|samples|examples|images|sequences|files|batches)\b")
LAST_COUNTS = re.compile(  # labels: 4071, predictions: 0
    r"(?i)\W*[a-z]\w*s\W{1,3}\d\d+\s+(?:predictions|samples|examples|images|sequences|documents|batches|records|rows)\W{1,3}0\W*"
)
EPOCH_END = re.compile(r"(?i)\bepoch\b.*(?:\b(?:batches|steps)\b|\b(?:end|ended|done|finished|completed?)\b)")
MIN_IDLE = 2  # epochs
IDLE_TRAINING = re.compile(r"'train_runtime': '?0(?:\.\d+)?'?, .*'train_loss': '?0(?:\.0*)?'?[,}]")  # within a second


def idle_trainings(log: Log) -> list[Evidence]:
    """The lines at the end in which transformers reports a training that took no step."""
    return [Evidence(number, shorten(text)) for number, text in log.last_lines if IDLE_TRAINING.search(text)]


def idle_epochs(logs: Sequence[Log]) -> tuple[Evidence, ...]:
    """The ends of epochs at the ends of logs if each ran no batch, and if no log has a step or a measure other than 0."""
    points = (point for log in logs for point in (*log.losses, *log.held_out, *log.scores, *log.rewards))
    ends = [(number, text) for log in logs for number, text in log.last_lines if EPOCH_END.search(text)]
    has_worked = any(log.progress.last_step for log in logs) or any(point.value for point in points)
    if has_worked or len(ends) < MIN_IDLE or not all(IDLE_EPOCH.search(text) for _, text in ends):
        return ()
    return tuple(Evidence(number, shorten(text)) for number, text in ends)


def missing_items(logs: Sequence[Log]) -> tuple[Evidence, ...]:
    """The lines at the ends of logs without a step or a result that count nothing to train on, or nothing behind many others."""
    ends = (
        [] if any(log.progress.steps for log in logs) else [log.last_lines for log in logs if not final_result([log])]
    )
    return tuple(
        Evidence(number, shorten(text))
        for end in ends
        for (_, before), (number, text) in pairwise(end)
        if NO_ITEMS.search(text) or (number == end[-1][0] and LAST_COUNTS.fullmatch(f"{before}\n{text}"))
    )
