"""
Counts of nothing at the end of a log: no samples, no batches, no steps, although the program ended as if it had worked.
"""

import math
import re
from collections.abc import Sequence

from paceline.explain.catalogue import load_catalogue
from paceline.explain.explanation import Evidence, shorten
from paceline.explain.line_measures import OF_TRAINING
from paceline.explain.log import Log

NEAR_END, NEAR = 3, 20  # lines; characters before a count that tell what is counted
# counts of what a program works on, in a clause of their own or behind a verb of work: not of what it leaves out
ITEMS = (
    r"(?:samples|examples|images|sequences|files|batches|steps|doc(?:ument)?s|rows|records|items|clients|folds|prompts"
    r"|predictions)(?!\w)"
)
WORK = (
    r"(?:train|process|evaluat|load|read|embed|encod|tokeniz|scor|generat|pars|extract|convert|sav|wr[io]t|us|run|ran"
    r"|found|seen|done)\w*"
)
COUNT = re.compile(
    rf"(?i)(?:(?:^|[^\w\s]|\b(?:{WORK}|on|with|in|has|the|and|ended))\s*(?<![\w.,/=-])0 (?:\w+ )?{ITEMS}"
    rf"(?= *(?:$|[^\w\s:=]|and\b|{WORK}))"
    rf"|(?:^|[^\w\s]\s*|\s\s|\d\s|\b(?:epoch|end|done) )(?:(?:num|n|total)[ _])?(?:(?:train\w*|val\w*|eval\w*|test)[ _])?{ITEMS}"
    rf"(?: {WORK})?['\"]?\s?[:=]\s*0)(?![\d.]*[\w%/])"
)
OTHER_ITEMS = re.compile(
    rf"(?i)(?<![\w.,-])(?:\d+(?: of |/))?[1-9][\d,]* (?:\w+ ){{,2}}{ITEMS}(?!\s?[:=])"
    rf"|{ITEMS}(?: \w+)?['\"]?\s?[:=(]\s?[1-9]|%\|.*\| [1-9]\d*/"
)
LEFT_OUT = re.compile(  # items of which there should be none, or that wait
    r"(?i)\b(?:corrupt|bad|skip|drop|err|miss|remain|left|pend|wait|queue|running|dup|remov|filter|discard|trunc|too|without|no"
    r"|leak|shar|nan|oom|overflow|retr|invalid|broken|mis\w+|fail|download|new|stale|unmatched|unused|out)\w*"
)
ALL_LOST = re.compile(
    rf"(?i)(?<![\d.])(?P<number>\d+) ?(?:of|/) ?(?P=number) (?:\w+ )?{ITEMS}(?:(?!\b0\b).)*\b(?:dropp|skipp|fail|remov|filter)ed\b"
)
HELD_OUT = re.compile(r"(?i)(?<![a-z])(?:val|dev|test|eval)")
# of transformers
EMPTY_EVALUATION = re.compile(r"(?!.*_loss)'(?:eval|test|predict)_samples_per_second': '?0(?:\.0*)?'?[,}]")
IDLE_TRAINING = re.compile(r"'train_runtime': '?0(?:\.\d+)?'?, .*'train_loss': '?0(?:\.0*)?'?[,}]")  # within a second


def idle_trainings(log: Log) -> list[Evidence]:
    """The lines at the end in which transformers reports a training that took no step."""
    return [Evidence(number, shorten(text)) for number, text in log.last_lines if IDLE_TRAINING.search(text)]


def idle_work(logs: Sequence[Log]) -> tuple[Evidence, ...]:
    """The last lines of logs that count nothing that was worked on, if no other count there and no measure shows any work."""
    lines = [(number, load_catalogue().in_english(text)) for log in logs for number, text in log.last_lines]
    if empty := [(number, text) for number, text in lines if EMPTY_EVALUATION.search(text)]:
        return tuple(Evidence(number, shorten(text)) for number, text in empty)
    points = (point for log in logs for point in (*log.losses, *log.held_out, *log.scores, *log.rewards))
    others = (text for _, text in lines if not (HELD_OUT.search(text) or ALL_LOST.search(text)))
    has_worked = any(log.is_serving for log in logs) or any(map(OTHER_ITEMS.search, others))
    if has_worked or any(point.value and math.isfinite(point.value) for point in points):
        return ()
    has_steps = any(log.progress.last_step for log in logs) or any(OF_TRAINING.search(text) for _, text in lines)
    idle = {
        number: text
        for number, text in lines
        for match in COUNT.finditer(text)
        if not LEFT_OUT.search(text[: match.end()] + text[match.end() :].split(",")[0])
        if not (has_steps and HELD_OUT.search(text, max(0, match.start() - NEAR), match.end()))
    }
    idle |= {number: text for number, text in lines if ALL_LOST.search(text)}
    if any(log.progress.last_step for log in logs):  # such as those of a bar over what then all failed
        ends = {line[0] for log in logs for line in log.last_lines[-NEAR_END:]}
        idle = {number: text for number, text in idle.items() if number in ends}
    return tuple(Evidence(number, shorten(text)) for number, text in idle.items())
