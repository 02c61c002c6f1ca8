"""
Lines that tell of trouble although no cause of the catalogue is in them, and lines that tell that the work is done.

They decide between healthy and unknown where a log shows no failure that is known.
"""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from paceline.explain import survival
from paceline.explain.blame import failed_members
from paceline.explain.catalogue import load_catalogue
from paceline.explain.explanation import Evidence, Record, shorten
from paceline.explain.line_filter import MAX_REPEATS
from paceline.explain.line_measures import ERROR_NAME
from paceline.explain.lines import IGNORABLE, WARNING_LINE, only_begins, split_prefix
from paceline.explain.log import PROMPT, Log
from paceline.explain.matches import Event, as_fatal, failed_saves, matches_of_message
from paceline.explain.run_bounds import failed_at_import, shape_of
from paceline.explain.survival import STEPS_AFTER, WENT_ON, is_caught, is_quoted, left_program_running

LAST_CHECKED, MIN_REPEATED = 3, 3  # lines at the end of a log; alike and far from it: the program went on each time
MAX_WORDS = 200  # characters in which a line tells of trouble; in a long one such a word can be in the data
TROUBLE = re.compile(
    r"(?i)error|exception|traceback|\bfatal|\bfail|\babort(?:ed|ing|s)?\b|\bkill|denied|refused|cannot|can't|unable|invalid"
    r"|no such|not found|do(?:es)? ?n[o']t exist|not supported|timed? ?out|out of memory|\bpanic|crash|\bXid\b|\bNVRM: (?!loading)"
)
NAME = re.compile(  # of an argument or a test, with such a word in it
    r"\b[\w-]*(?:error|exception|fail|timeout|abort|kill|invalid|crash)[a-z]*_\w+"
    r"|\b[\w-]+[_-](?:errors?|exceptions?|timeout|invalid)\b\s*[=<>|]+|^\W*[A-Z]+_[A-Z_]+: (?:-?\d|True|False|None|['\"\[(])"
)
WEAK, MAX_WEAK = re.compile(r"(?i)cannot|can't|unable"), 80  # where a sentence begins so; further on it is prose
MIN_ITEMS, ITEMS_SHARE = 10, 0.8  # errors that come with so many of the lines of progress
NOT_DONE = r"(?!.*(?:\b(?:not|never|no)\b|n't\b|\b0 (?:files|results)))"
PREPARED = r"(?!.*\b(?:load|captur|compil|prepar|initiali|tokeni|warm))"  # before the work
LOGGER = (  # what it writes before a message
    r"(?:[\w./-]+\.py:\d+\W+)?(?:[\w.]+ - |\[[\w.]+\] ?)?(?:\W?(?:INFO|SUCCESS)\b[\]:>\s-]*(?:\w[\w.]*: ?)?)?(?:\[\w+\] )?\W{0,3}"
)
ENDED_WELL = r"(?:completed?|finished|done)"
WORK_DONE = (  # evaluation complete. experiment 3 finished, job finished with exit code 0, export done in 3 s
    rf"{PREPARED}(?:all )?\w+(?:ing|tions?|runs) {ENDED_WELL}\b(?:\W*$|[!.])"
    r"|(?:[a-z]+ ){0,3}(?:suite|pipeline|experiment|benchmark|simulation|workflow)s?(?: (?!\d+/|\w+ly )\S+)?"
    rf" {ENDED_WELL}\W*$|(?:[a-z]+ ){{1,3}}converged (?:after|in) \d+ \w+\W*$"
    rf"|{PREPARED}(?:upload|export|job)s? (?:is )?{ENDED_WELL}(?:[:!.]? (?:https?:|with exit code 0\b).*|\W*)$"
    rf"|{PREPARED}.*\b{ENDED_WELL} in \d[\d.,]* ?(?:s|sec\w*|min\w*|h|hours?)\b\W*$"
    rf"|{PREPARED}(?-i:[A-Z ]{{8,}} COMPLETED?)\W*$|.*(?:완료|完成|完了)\W*$"
)
OUTPUT_SAVED = (  # saved to out.json, exported the model to out/, 3 files were written to out/
    r"(?:all |successfully )?(?:saved|wrote|done)\b(?! (?:before|until|so far)|.{1,9}(?:config|arg|setting|code)\w*\b)"
    r"|(?:exported|uploaded)\b.* (?:to|into|as) \S|saving the dataset \(\d+/\d+ shards\): 100%"
    r"|.*\b(?:files?|results?|outputs?|predictions?|models?) (?:was |were )?(?:saved|written to)\b"
)
OUTPUT_PRINTED = (  # as Python or JSON, by pytest, by llama-bench
    r".*?['\"]eval_\w+['\"]: ?-?\d|\{\"(?:summary|results?|metrics)\": ?[\[{][\"\d{]"
    r"|=+ \d+ passed\b[^=]{0,40}=+$|build: [0-9a-f]{7,10} \(\d+\)$"
)
SERVES = (  # a server that waits, or has answered
    r".*(?:press ctrl\+c to quit|use control-c to stop|\brunning on https?://|\bhttp/\d(?:\.\d)?\" 20\d\b)"
)
RESULT = re.compile(rf"(?i){NOT_DONE}{LOGGER}(?:{WORK_DONE}|{OUTPUT_SAVED}|{OUTPUT_PRINTED}|{SERVES})")
SCORE = re.compile(  # of an evaluation, not a limit or a weight among settings
    r"(?i)(?!.*(?:Namespace\(|\b(?:\w+_)?(?:target|min|max|limit|thres\w*|weights?|lambda|conf|mixed|stop\w*)(?:_\w+)?\b"
    r"|precision[:=] ?(?:16|32)))"
    rf".*\b(?:\w+_)?(?:{ERROR_NAME}|accuracy|acc|f1|bleu-?\d?|rouge-?[12l]|precision|recall|hit_rate(?:_at_\w+)?|r?auc|auprc|m?iou|dice|psnr|ssim|[wc]er|mrr|ndcg"
    r"|sensitivity|specificity|mcc|r2|(?<!confidence )score|p(?:recision|ass)?@\d+)\b.{0,12}[:=] ?\d+(?:\.\d+ ?%?|%)(?:\W|$)"
)
SUCCESS = re.compile(
    r"(?i)\bsuc+es+ful+y [a-z]+ed\b|\b[a-z]+ed suc+es+ful+y\b|\b(?<!no )success\W*$|\brun successfully with command\b"
)
RECORDS_STOP = re.compile(r"did not improve in the last \d+ records\..*Signaling Trainer to stop")  # Lightning's
SUMMARY = re.compile(  # of all the work, with the errors in it that a program expects
    r"^\W*(?:STATUS\W+)?(?:SUCCESS|COMPLETED?)\b(?! RATE)|\b0 failed\b|^\|.*\| *(?:±|\+/-) *\| *\d"
    r"|\bTrial \d+ finished with value\b|^Best trial\b"  # Optuna
    r"|^Test set: Average loss: \S+, Accuracy: \d+/\d+ \("  # the examples of PyTorch
    r"|완료!?$"  # not the time that it took, which a script also prints behind what failed
)
SHUT_DOWN = re.compile(r"(?i)\bapplication shutdown complete\b")  # uvicorn, in a server of vLLM for one
SHELL_TIME = re.compile(r"(?:real|user|sys)\s+\d+m[\d.,]+s$")  # by a shell, behind any command
ENDED = re.compile(r"closing signal SIG|There appear to be \d+ leaked")  # a launcher's warning, Python's for the killed
TROUBLE_AT_END = re.compile(  # of a log, where nothing shows that the program went on
    r"(?i)terminat|\b(?-i:NOT OK)\b"
    r"|(?<!\*)\*{3} (?:STEP|JOB|SIG|Process|Abort|Error|Exception|buffer|stack)|NCCL WARN |stuck|\bhangs?\b"
    rf"|{PROMPT.pattern}"
    r"|^\W*usage: \w|waiting for (?:all|other|rank|worker|peer|client|node)|stack ?trace|^[ ~]*\^{3,}[ ~^]*$"
)
STACK_FRAME = re.compile(  # of C++ in several forms, of Java
    r"^\s*(?:\[bt\] |frame #\d+: |@ +0x[0-9a-f]{6,}|at [\w.$<>]+\([\w.]+:\d+\)|\d+# )|\[0x[0-9a-f]{8,}\]$|^=+ Memory map: =+$"
)
NONE_FAILED = (  # 0 errors, errors: 0, failed requests: 0
    rf"{survival.EXIT_ZERO}|\b(?:0 (?:\w+ )?|(?:no|without) )(?:errors?|exceptions?|fail\w*|invalid)"
    r"|(?:errors?|(?<!check )fail\w*|invalid|killed)\W{1,3}0\b"
    r"|\b(?:errors?|failed) (?:encountered|(?!rank|gpu|device|node|host|worker)\w+e?s): +0\b"
    r"|\bsuccess\w*: \d+(?:/\d+)?\b.{0,20}\bfailed: \d|\bpassed$|^\W*[ℹ✅✓✔🏆🎉]"
)
MEASURED_ERROR = (  # test error 0.25, MeanSquaredError, (relative error): 1.5
    r"(?:error|timeout|failure|crash)[ _]rate|^\W*timeout cases: \d"
    r"|error\w*(?: \([A-Z]+\))?\W{1,3}\d*\.\d|\b(?:train\w*|test|valid\w*) error\b[^:=]{0,30}[:=] ?\d*\.\d"
    r"|\((?:\w+ )?error(?: \w+)?\) ?[:=] ?\d*\.\d+$|\w*(?:Mean|Squared|Absolute|Percentage)\w*Error\b|\bbusbw\b"
    r"|\bis approximately [\d.]+, error is \d"
    r"|^\W*(?:pred|true|predicted|actual) (?:error +\d|\w+ +(?:pred|true|predicted|actual) error$)"
)
HEADING = (  # errors:, error analysis, a cell of a table, advice, a setting
    r"\berrors?:$|\bfailures?:(?: \d+)?$|\bchecking exceptions$|\berror analysis\b(?! fail)|^\|.*\| *(?:not supported|n/a) *\|$"
    r"|^\W*if\b|\bsetting `\w+=\w+`|\btimeout(?: is| was)? ?(?:set to|[:=] ?\d)|\bwith [\d.]+ second timeout|may contain errors"
)
NOT_NEEDED = (  # what a program does instead, or is optional
    r"\busing default\b|, attempting\b|\bshould speed up\b|[.,;:-] (?:but )?continu(?:e|es|ing)\b|loopback address as fallback"
    r"|terminat\w+ (?:condition|normally)\b|error during autotuning|are not found in the checkpoint"
    r"|^`trust_remote_code` is not supported anymore"
    r"|attention mask is not set and cannot be inferred|sequence length is longer than the specified"
    r"|^non-resource variables are not supported in the long term|unable to register cu\w+ factory|number of TPU cores"
    r"|LNK1181: cannot open input file '(?:aio|cufile)\.lib'|^Repo card metadata block was not found"
)
LACKS_SCREEN = (  # terminals, locales, screens and sound that a server lacks, decoders of pictures, films and sound, widgets
    r"Inappropriate ioctl|\bset(?:ting )?locale\b|XDG_RUNTIME_DIR|^(?:ALSA|Xlib|libEGL|libpng|libva|MESA-LOADER|qt\.\w+)\b"
    r"|\bGLFWError\b|no display (?:found|name)|^\[\w+ @ 0x[0-9a-f]+\]|IProgress not found|No such comm\b|^GKS: cannot open display"
)
OF_TOOLS = (  # trackers, the Hub, httpx, lists of packages and files, pip, git, Debian, docker build, sacct, PowerShell
    r"^wandb:|^[\w/-]+\.(?:err|log|out|py|sh|txt)$"
    r"|`HF_TOKEN` (?:secret|does not)|^(?:HTTP Request: )?(?:GET|HEAD) https?://|^Welcome to bitsandbytes\b"
    r"|^[\w.-]+ +\d+(?:\.\w+)+(?: +\S+){0,3}$|error during package walk|\btracker file does not exist|\bMailType="
    r"|\bhas requirement .*, but you'll have |^(?:Installing collected packages|Successfully installed)\b"
    r"|pip's dependency resolver|^fatal: (?:not a git repository|destination path .* already exists)"
    r"|^(?:debconf|invoke-rc\.d): |^#\d+ \d+\.\d+ |RemoteException|FullyQualifiedError|NativeCommandErr"
)
# parts of an error that its own message tells, or that Python ignored
OF_STACKS = r"^frame #|^exception raised from \w+ at \S+:\d+|^Exception ignored|--- Logging error ---"
OF_MODEL = (  # what a model answers, samples of a translation; a simulation
    r"\bI (?:cannot|can't)\b|^assistant: |^\[['\"]|\bsimulat\w+ [\w ]{0,20}(?:fail|error|crash)"
    r"|^[<>=] +(?!(?:(?:fatal|internal) )?(?:error|fail|exception|abort|killed))[a-z]"
)
NO_TROUBLE = re.compile(
    f"(?i){NONE_FAILED}|{MEASURED_ERROR}|{HEADING}|{NOT_NEEDED}|{LACKS_SCREEN}|{OF_TOOLS}|{OF_STACKS}|{OF_MODEL}"
)
ERROR_PREFIX = re.compile(
    r"^(?:\S{1,40}:? )?(?:\[?(?:ERROR|FATAL|CRITICAL)\b|\[(?:error|fatal|critical)\]|(?:[Ff]atal|[Ee]rror)(?: error)?: )"
)
MARKED_ERROR = re.compile(
    r"\W*[❌✗✘] ?\w*(?i:error\b)|[A-Z ]*\bFAILED: "
)  # may name its epoch, and is no line of progress then
ERROR_WORD = re.compile(rf"(?!{ERROR_PREFIX.pattern}).*(?<![A-Za-z])(?:Error|Exception|Traceback)\b")
SKIPPED_STEP = re.compile(
    r"(?i)(?:\bskip(?:ped|ping) (?:train(?:ing)? )?(?:batch|step|iteration)|^error \w+ing \w+) #?(?P<number>\d{1,9}) ?[:(-] ?\S"
)
NOTHING_DONE = re.compile(
    r"(?i)\b(?:examples|samples|items|prompts|questions|images|files|batches) (?:process|complet|generat|evaluat|sav)ed\W+0\W*$"
)
MAX_UNDECODED = 0.01  # of the characters at the end of a log: a model's answer may break one
NO_RESULT = re.compile(r"(?i)\b(?:core|dump|config\w*|log|settings)\b")  # what was written at the start, or by a crash
# lines of a log without progress: of ordinary output to its end, and below which an end that only announces work counts
MIN_LINES, MIN_OUTPUT = 8, 50
TRAINING_BEGINS = re.compile(
    r"(?i)\b(?:(?:start|begin|runn)\w*(?: the)? (?:pre-?)?training|training (?:start|begin)\w+)(?:\W{1,3}(?:for )?\d+ epochs"
    r"|\.{3} \([^)]{1,120}\))?\W*$"
)
ANNOUNCES = re.compile(
    r"(?i)(?<!exiting)(?:\.\.\.|…)\W*$|^\W*\{'\w+': (?!-?\d+\.\d)|\bNamespace\(|\bepoch\W*[01]\b(?!.*\d\.\d)"
    r"|^(?:loading|retrying|starting)\b|^SLURM auto-requeueing enabled"
    r"|(?:^\W*|- )(?:optimizer|(?:number of )?(?:trainable )?param(?:eter)?s?|args|arguments|config)\b.{0,20}:"
)
# the end of any log, where it announces work or prints a model
LAST_WORK = re.compile(
    r"(?:\[[^\]]{1,40}\] ?)*(?:(?:[\w./]+ )?(?:INFO|[\w./]+\.py): *(?:\d+: )?)?\W{0,3}"  # what a logger writes before it
    r"(?:(?:Construct|Load|Build|Creat|Initiali[sz]|Prepar|Download|Compil)ing(?: \S+){,4}"
    r" (?:data|train|model|weights|tokenizer|checkpoint)\S*(?: \S+)? ?(?:\.\.\.|…)\W*$|Training ?(?:\.\.\.|…)\W*$"
    r"|before the start of training\b|(?i:starting training from (?:iteration|epoch|step) \d+|start(?:ing)? epoch:? \d+)\W*$)"
    r"|.* 0%\|[^%]*$|.*\bEpoch:? 0$|.*\bnvidia-smi$|\s*\"vocab_size\": \d+$|\s*\(\w+\): [A-Z]\w+\([^()]*\)$"
)
OF_WARNING = re.compile(r"\.py:\d+: \w*Warning: |^\s+warnings\.warn\(")
# the own log of W&B, which does not tell how the program does
OF_WANDB = re.compile(r"\[\w+\.py:\w+\(\):\d+\] |\"msg\": ?\"(?:stream|sender|handler|writer|server|connection)\w*: ")
MONITOR = re.compile(
    r"^\s*(?:(?:Mem|Swap):|total +used +free)|\d+(?:W|MiB) / +\d+(?:W|MiB) \|"
    r"|^\|.*(?:Processes:|GI +CI +PID|\bID +ID\b|MIG M\.|No running processes found|={20}).*\|$|^\+-{77}\+$"
)


def last_errors(log: Log, *, has_failed: bool) -> list[Record]:
    """The lines that a logger marks as errors and after which the log shows no progress; none whose like the run survived twice.

    has_failed: a process did, and others may have made few steps until they were ended; without ranks, near the end alone.
    """
    if ends_in(SUCCESS, log) or ends_in(SUMMARY, log) or log.is_serving:
        return []
    last_line, above = log.last_progress_line - 1, announcing(log)  # an error may name its step or loss itself
    if ends_well(log):
        last_line = max(last_line, log.last_line - WENT_ON)
    lines = (record for record in log.records if record.kind == "line" and record.line not in above)
    records = [record for record in lines if ERROR_PREFIX.search(record.text)]
    survived = Counter(shape_of(record.text) for record in records if record.line <= last_line)

    def is_last_word(record: Record) -> bool:
        if record.rank is not None:
            return not log.steps_after(record)
        is_near = record.step is not None and log.last_line - record.line <= WENT_ON
        return is_near and len(log.steps_after(record)) < STEPS_AFTER

    return [
        record
        for record in records
        if record.line > last_line or (has_failed and is_last_word(record))
        if survived[shape_of(record.text)] < 2 and not is_harmless(record.text)
    ]


def errors_of_every_item(log: Log) -> list[Record]:
    """The errors of the last items; or the one that came with nearly every line of progress where no measure shows any work."""
    if failed := errors_of_items_at_end(log) or failed_saves(log) or failed_members(log):
        return failed
    if log.losses or log.scores or log.rewards or log.progress.steps < MIN_ITEMS:
        return []
    errors = [record for record in log.records if record.kind == "line" and ERROR_PREFIX.search(record.text)]
    counts = Counter(shape_of(record.text) for record in errors)
    often = max(MIN_ITEMS, ITEMS_SHARE * min(log.progress.steps, MAX_REPEATS))
    last = {shape_of(r.text): r for r in errors if r.line >= log.last_lines[0][0] and not is_harmless(r.text)}
    return [record for shape, record in last.items() if counts[shape] >= often]


def errors_of_items_at_end(log: Log) -> list[Record]:
    """The last of the errors of the last items, if they were not survived."""
    lines = (record for record in log.records if record.kind == "line" and ERROR_PREFIX.search(record.text))
    return survival.errors_of_last_items([record for record in lines if not is_harmless(record.text)], log)[-1:]


def errors_of_all_steps(events: Sequence[Event], logs: Sequence[Log]) -> list[Event]:
    """The events for which every step was skipped, or of which the last items failed: none of them was survived."""
    skipped = {
        id(record) for log in logs for record in (*skipped_steps(log), *errors_of_items_at_end(log), *failed_saves(log))
    }
    return [as_fatal(event) for event in events if id(event.record) in skipped]


def skipped_steps(log: Log) -> list[Record]:
    """The warnings that each step of a log without any measure was skipped: by their numbers, or by its end."""
    lines = (record for record in log.records if record.kind == "line")
    skipped = [(int(match["number"]), record) for record in lines if (match := SKIPPED_STEP.search(record.text))]
    is_measured = log.losses or log.held_out or log.scores or log.rewards
    if is_measured or len(skipped) < max(MIN_ITEMS, ITEMS_SHARE * min(log.progress.steps, MAX_REPEATS)):
        return []
    numbers = [number for number, _ in skipped]
    gaps = sum(after not in (before, before + 1, numbers[0]) for before, after in pairwise(numbers))
    # one gap where a long log was not parsed
    return [record for _, record in skipped] if gaps <= 1 or ends_in(NOTHING_DONE, log) else []


def announcing(log: Log) -> set[int]:
    """The lines right above exceptions that ended no program, as the log goes on."""
    survived = [r for r in log.records if r.line + WENT_ON < log.last_line and left_program_running(r, log)]
    caught = [record for record in log.records if record.kind == "exception" and is_caught(record, log)]
    return {record.line - 1 for record in (*survived, *caught)}


def ends_in(pattern: re.Pattern[str], log: Log) -> bool:
    return any(pattern.search(split_prefix(text).text) for text in last_texts(log))


def last_texts(log: Log) -> list[str]:
    """The last lines that are more than a rule or the time that a command took."""
    texts = (text for _, text in log.last_lines if any(map(str.isalnum, split_prefix(text).text)))
    return [text for text in texts if not SHELL_TIME.match(text)][-LAST_CHECKED:]


def trouble_at_end(logs: Sequence[Log]) -> list[tuple[int, str]]:
    """The last lines of the logs, behind progress and results, that tell of trouble; none whose like was survived twice."""
    trouble = []
    for log in logs:
        threads = [r.line for r in log.records if left_program_running(r, log) or is_quoted(r, log)]
        threads = threads if log.progress.steps or ends_well(log) else []  # else nothing shows that the program went on
        lines = log.last_lines[-LAST_CHECKED:]
        if log.last_ignored is not None and lines and lines[0][0] - log.last_ignored <= WENT_ON:  # its traceback
            threads.append(log.last_ignored)
        last_good = max([log.last_progress_line, *(number for number, text in lines if is_result(text, log))])
        was_shut_down = any(SHUT_DOWN.search(text) for _, text in log.last_lines)
        ends = {shape_of(split_prefix(text).text) for _, text in lines}
        alike = [record for record in log.records if shape_of(record.text) in ends]
        survived = Counter(shape_of(record.text) for record in alike if len(log.steps_after(record)) >= STEPS_AFTER)
        trouble += [
            (number, text)
            for number, text in lines
            if number > last_good or (last_good == number == log.last_progress_line and MARKED_ERROR.match(text))
            if number <= min([number, *threads]) and not log.is_in_sample(number, text)
            if is_trouble(text, at_end=True) and survived[shape_of(split_prefix(text).text)] < 2
            if not (was_shut_down and ENDED.search(text))
        ]
    return trouble


def trouble_anywhere(logs: Sequence[Log]) -> list[tuple[int, str]]:
    """The records of which a word tells of trouble, but for those that a log shows to have passed."""
    return [
        (record.line, record.text)
        for log in logs
        if not ends_in(SUMMARY, log)
        for passed in [passed_shapes(log)]
        for above in [announcing(log)]
        for record in log.records
        if record.line not in above
        if record.line > log.last_line - WENT_ON or not (passed is None or shape_of(record.text) in passed)
        if is_trouble(record.text) and not (left_program_running(record, log) or failed_at_import(record))
        if not is_caught(record, log)
        if not (survival.NOT_FOUND.search(record.text) and record.line + WENT_ON < log.last_line)
        if not (survival.NOT_SET_UP.search(record.text) and record.line + survival.MAX_ADVICE < log.last_line)
    ]


def passed_shapes(log: Log) -> set[str] | None:
    """Shapes of lines that came often, as the program went on each time; None for all, in a log that ends well."""
    if ends_well(log):
        return None
    texts = (record.text for record in log.records if not ERROR_PREFIX.search(record.text))
    return {shape for shape, count in Counter(map(shape_of, texts)).items() if count >= MIN_REPEATED}


def is_trouble(text: str, *, at_end: bool = False) -> bool:
    if at_end and ENDED.search(text):
        return True
    text = load_catalogue().in_english(split_prefix(text).text[:MAX_WORDS])
    if at_end and STACK_FRAME.search(text):
        return True
    text = NAME.sub("", text)
    word = TROUBLE.search(text)
    is_prose = word is not None and word.start() > MAX_WEAK and WEAK.match(word[0])
    has_word = (word and not is_prose) or (at_end and (TROUBLE_AT_END.search(text) or matches_of_message(text)))
    return bool(has_word) and not is_harmless(text) and not WARNING_LINE.search(text)


def is_harmless(text: str) -> bool:
    return bool(NO_TROUBLE.search(text) or IGNORABLE.search(text))


def is_result(text: str, log: Log) -> bool:
    """Whether a line tells that the work is done: saved, done, a score of an evaluation in a log that has no steps."""
    text = split_prefix(text).text
    is_end = RESULT.match(text) or SUCCESS.search(text) or SUMMARY.search(text)
    return bool(is_end or (not log.progress.steps and SCORE.match(text)))


def ends_well(log: Log) -> bool:
    """Whether the end tells that work is done or requests are answered, or cells of a notebook worked after those that failed."""
    return bool(log.note) or any(is_result(text, log) for text in last_texts(log)) or log.is_serving


def final_result(logs: Sequence[Log]) -> str:
    """The last line of a log, where it tells that the work is done and no line near the end is like it."""
    if len(logs) != 1 or logs[0].is_serving or not logs[0].last_lines:
        return ""
    *others, last = (split_prefix(text).text for _, text in logs[0].last_lines)
    is_repeated = shape_of(last) in map(shape_of, others)
    return last if is_result(last, logs[0]) and not (is_repeated or NO_RESULT.search(last)) else ""


def errors_behind_progress(log: Log) -> list[Evidence]:
    """The lines behind the last progress of a log that name an Error, but a logger's (last_errors); none where it ends well."""
    if not log.last_progress or ends_well(log):
        return []
    trouble = [(number, text) for number, text in trouble_anywhere([log]) if number > log.last_progress_line]
    return [Evidence(number, shorten(text)) for number, text in trouble if ERROR_WORD.match(text)]


def is_ordinary(log: Log) -> bool:
    """Whether a log without progress ends with ordinary output: of a program, not of free, nvidia-smi or W&B, and decoded.

    Training that is announced at the very end did not get to its first step, nor did what was announced in a short log.
    """
    # all that a bar draws on its line is one
    ordinary = {(number, "%|" in text or text) for number, text in log.last_lines if not MONITOR.search(text)}
    end = "".join(text for _, text in log.last_lines)
    is_short = log.last_line - log.first_line < MIN_OUTPUT
    warns_alone = is_short and all(OF_WARNING.search(text) for _, text in log.last_lines)
    if warns_alone or any(OF_WANDB.search(text) for text in last_texts(log)[-1:]):
        return False
    begins = any(TRAINING_BEGINS.search(text) for _, text in log.last_lines[-1 - LAST_CHECKED :])
    if (begins and not ends_in(SUMMARY, log)) or end.count("\ufffd") >= MAX_UNDECODED * len(end) + 1:
        return False
    if ends_well(log):
        return True
    last = [split_prefix(text).text for _, text in log.last_lines[-LAST_CHECKED:]]
    announces = is_short and any(map(ANNOUNCES.search, last))
    return (
        len(ordinary) >= MIN_LINES
        and not (announces or only_begins([split_prefix(text).text for _, text in log.last_lines]))
        and not any(LAST_WORK.match(split_prefix(text).text) for text in last_texts(log)[-1:])
    )
