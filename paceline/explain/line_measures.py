"""
What one line of a log reports of the progress of a run: the step, losses, the norm of the gradients, rewards, memory.

The forms are those of the usual trainers: sentences, dictionaries, progress bars, rows of tables. A program that prints behind an
open progress bar prints on the same line, so bars are removed from a line before it is read.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.explain.lines import has_word

MAX_DIGITS = 15
BAR = re.compile(
    r"(?:[^\s|%][^|%]{0,80}?: +)? {0,3}(?P<percent>\d{1,3})%\|[^|]*"
    r"\|? {0,2}(?P<at>[\d.,]+[kMG]?)/(?P<of>[\d.,]+[kMG]?)(?: \[[^\]]*(?:\]|$)|)"
)
# tqdm's, without a total
COUNTER = re.compile(r"(?:[^\s|%][^|%]{0,80}?: +)? {0,3}(?P<at>\d+)it \[\d+:\d\d[^\]]*(?:\]|$)")
PREPARATION = re.compile(  # the bar of what comes before training, or beside it, also behind a logger's prefix
    r"(?:.*: )?\W*(?:Running tokeniz"
    r"|(?:Up|Down)?[Ll]oad|Fetch|Map|Tokeniz|Generating (?:\w+ split|partition)|Filter|Resolv|Prepar|Extract|Convert"
    r"|Writ|Sav|Quantiz|Compil|Captur|Cach|Index|Pack|Push|Cast|Flatten|Sett|Applying|Adding|Truncating|Creating)"
)
OTHER_BAR = re.compile(r"\W*(?!Train|Finetun|Fit|Learn|Optimiz)[A-Z][a-z]+ing\b")  # whose count is no step of training
BARE_BAR = re.compile(r" {0,3}\d{1,3}%\|[█▏▎▍▌▋▊▉ #=>.-]*\|?")  # cut in the middle, or without a count
# `gradient accumulation steps: 8` is a setting, `tried to step 9 times` an error, and neither is progress
SETTINGS = (
    "accumulation", "accum", "warmup", "max", "num", "total", "total.training", "optimization", "decay", "logging", "save",
    "eval", "target", "print", "of", "tried.to",
)  # fmt: skip
STEP = re.compile(
    "(?=[gsiueb]|num)"
    + "".join(f"(?<!{word}.)" for word in SETTINGS)
    + r"(?<![^a-z]per.)(?<!\bn_)(?<![a-z])(?:global[_ ]?steps?|steps?|iter(?:ation)?s?|updates?|num_updates|batch|episode"
    r"|(?<!\d)it)['\"]?\s*[:=# \[(]{0,3}\s*(?P<step>\d[\d,]*)(?P<of>\s*/\s*\d[\d,]*)?(?![\w.]|\s*[A-Za-z]+/|,? *\d[\d, ]*[\])]"
    r"| tokens = \d+ rows?\b)",  # the size of a step, as `paceline train` says it
    re.IGNORECASE,
)
SECTION = re.compile(r"['\"]: \{")  # in a dictionary
LOSS_FIELD = re.compile(r"(?i)loss['\"]: ['\"]?(?:[-\d]|nan|inf)")
# 2.5, '2.5', nan.0, tensor(nan, np.float64(nan), and in a tuple of Python 2: 'loss: ', nan
VALUE = (
    r"['\"]?\s*(?:[:=|]|is\b(?: (?:not finite|non-finite|NaN)[:,]?)?)?\s*(?:', )?(?:[\w.]{1,20}\()?['\"]?"
    r"(?P<value>(?:(?<![a-z])[-+])?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|nan|inf))(?:\.0)?\b(?![\d.]*%)"  # a share is no measure
)
LOSS = re.compile(
    r"loss(?: (?:train|average|avg|mean|function)"
    r"| (?:for|at|after|of|in|from) (?:epoch|step|batch|iter(?:ation)?) #?\d{1,9}(?: to \d{1,9})?(?= ?[:=]| is )"
    r"|_(?!scal|weight|fn|func|type|tok|per_|smooth|gamma|alpha|coef|(?:num|wrt)(?![a-z]))[a-z]\w{0,15}"
    r"|/[a-z][\w/]{0,30}"
    r"|[_-]?\d{1,2}(?= ?[:=]|[ ]+[-+]?\d))?" + VALUE,
    re.IGNORECASE,
)
# measures that are lower when the model is better, in programs that print no loss under this name
ERROR_NAME = r"r?mse|mae|nll|(?:nt-?)?xent|info_?nce|b?ce|\w*cross[ _-]?entropy|perplexity|ppl|bp[bcd]"
ERROR_WORDS = (
    "mse", "mae", "nll", "xent", "nce", "bce", " ce", "-ce", "_ce", "entropy", "perplex", "ppl", "bpb", "bpc", "bpd",
)  # fmt: skip
ERROR_MEASURE = re.compile(rf"(?<![a-z])(?:{ERROR_NAME})(?:_tra?i?n)?(?![a-z]){VALUE}", re.IGNORECASE)
WORDS = re.compile(r"[A-Za-z_ -]*[A-Za-z]")  # in front of the value
# a line that may report one of training
OF_TRAINING = re.compile(r"(?i)epoch|(?<![a-z])tra?i?n|^\W*\d+(?:/\d+\]| *\| )")
HELD_OUT_WORD = r"(?:vali?|eval|valid(?:_\d)?|validation|dev|test)"
GAP = r"(?:'s)?(?:[_ /.:{'\"-]+(?:[a-z0-9]{2,8}_)?)?(?:log)?"  # from there to the measure
HELD_OUT_NAME = rf"(?<![a-z])(?:{HELD_OUT_WORD}{GAP}(?:loss|{ERROR_NAME})|loss[_ /]{HELD_OUT_WORD})"
HELD_OUT_LOSS = re.compile(HELD_OUT_NAME + VALUE, re.IGNORECASE)
HELD_OUT_WORDS = ("val", "dev", "test")
# fields that say which part of the text a record is of, and their values where the training does not see it
PART_FIELDS = ("mode", "split", "phase", "stage", "subset", "event", "type", "kind")
HELD_OUT_PART = r"(?P<part>dev|test|e?val)(?:id)?(?:(?:u?at)?(?:ion|e|ing))?"
PART_LOSS = "eval_part_loss"  # of a line with such a field, which may stand in all lines: the name of a stage or of an experiment
OF_HELD_OUT = re.compile(rf"(?i)(?<![a-z])(?:{'|'.join(PART_FIELDS)})['\"]?\s?[:=]\s?['\"]?{HELD_OUT_PART}(?![\w/.-])")
OF_WHOLE_RUN = re.compile(r"train_runtime|^ *train_loss +=")  # a line whose loss is a mean
NAN_OUTPUT = re.compile(r"['\"]log(?:p|it)s/\w+['\"]: nan")  # of a model whose loss is written as 0
GRAD_NORM = re.compile(rf"(?:grad(?:ient)?s?[_ /.-]*(?:global[_ ])?|\bg|\b)norm{VALUE}", re.IGNORECASE)
MEMORY_WORD = re.compile(r"(?i)(?<![a-z])(?:mem(?:ory)?|v?ram|rss|allocated|reserved)(?![a-z])")
MEMORY_WORDS = ("mem", "ram", "rss", "allocated", "reserved")  # one is in every text that matches, and found sooner
PART_END = re.compile(r",(?!\d{3}\b)|[|;{}\t]|\s{2}")
THOUSANDS, PERPLEXITY = re.compile(r"(?:,\d{3})+(?![\d.,])"), re.compile(r"(?i)perplex|ppl")  # 9,120
AMOUNT = re.compile(
    r"(?i)(?<![\w./-])(?P<value>\d{1,3}(?:,\d{3})+|\d{1,15}(?:\.\d{1,9})?)[ \t]?(?P<unit>[kmgt]?i?b?)%?(?=[\s,;|()\]/}'\"]|$)"
)
MAX_NAME, MAX_BEFORE = 60, 30  # characters of a measure's name; of what tells before it what is measured
UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
COUNTERS = re.compile(r"(?i)((?:gpu|cuda|device|rank)[ :#]{0,2}\d+)|[ :]?\d+")  # all but a device's number
OTHER_VALUES = re.compile(r".*\w=[-+.\d]\S* ")  # before a name
NOT_IN_USE = re.compile(
    r"(?i)free|avail|total|limit|capacity|cach|load|disk|file|param|fraction"
    r"|(?:time|step|iter|iteration|epoch|batch|loss|acc|accuracy)\W*$"
)
NAME_START = re.compile(r"[\w./-]*$")  # of a measure's name, before the part that LOSS finds
# a value with the words before it as its name; names whose values may be NaN in a healthy run
LABELLED = re.compile(r"(?i)(?<![\w.])[-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|nan|inf)(?!\w)")
LABEL_EDGES = " \t:=|,;()[]{}'\"<>│┃-"
UNCERTAIN = re.compile(
    rf"(?<![a-z]){HELD_OUT_WORD}(?![a-z])|norm|grad|time|eta\b|speed|fps|/s\b|mfu|avg|iou|std|var|cor|r2|acc|auc|\bm?ap|best"
)
YOLO_ROW = re.compile(r"^\s*\d+/\d+\s+[\d.]+[GM]?\s+(?P<losses>(?:(?:\d+\.\d+|0|nan|inf)\s+){2,5})")  # epoch, memory
NUMBER_CELL = re.compile(r"(?i)[-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|nan|inf)")
OTHER_LOSS = re.compile(rf"(?<![a-z])(?:{HELD_OUT_WORD}|best|min|prev){GAP}$", re.IGNORECASE)
HELD_OUT_BEHIND = re.compile(rf"(?i)loss[_ /]{HELD_OUT_WORD}(?![a-z])")
ADVERSARIAL = re.compile(r"(?<!\w)(?P<part>[DG]|[Dd]isc(?:riminator)?|[Gg]en(?:erator)?|[Cc]ritic) $")
OF_POLICY = re.compile(r"(?i)(?:policy|actor|critic|value|pg)[_ /]$")
# before the loss that others are a part of
TOTAL_LOSS = re.compile(r"(?i)(?:^|[\s,;|({\['\"])(?:(?:tot|total|train|training)[_ /])?$")
EVALUATION = re.compile(  # how a line of one begins
    r"(?i)^\W*(?:[\w./-]{1,60}\| |[a-z]{4,8}:[\w.]{1,40}:)?"
    r"(?:test(?:ing)?|val(?:id(?:at(?:e|ion|ing))?)?|eval(?:uat(?:e|ion|ing))?)\b ?"
    r"(?:[:\[\]]|\([^)]{1,12}\):|- |set\b|results?\b|error\b|step\b|(?:in |at )?epoch)"
    r"|(?!.*train).{0,40}[(\[](?:test|val|valid|validation|eval)[)\]]"
)
EVALUATION_TITLE = re.compile(  # or its last line before its averages
    r"(?i)^\W*(?:test|validation|evaluation)(?: (?:error|results?|set))?:?\W*$|^(?:test|val\w*|eval\w*): +total time: "
)
# of an evaluation, as torchvision's references and DETR print them
ONE_OF_BATCHES = re.compile(r"\[ *(?P<at>\d+)/(?P<of>\d+)\] +eta: ")
SCORES = (
    r"(?:acc|accuracy|f1|exact[_ ]match|bleu|top-?1|au(?:ro)?c|dice|m?iou|(?P<errors>[wc]er))"
    r"['\"]?(?:\s*[:=]\s*['\"]?|\s+(?=\d+\.\d))(?P<value>\d+(?:\.\d+)?)"
)
SCORE = re.compile(rf"(?i)(?<![a-z]){SCORES}")  # higher is better
HELD_OUT_SCORE = re.compile(rf"(?i)(?<![a-z]){HELD_OUT_WORD}(?: results?)?[\] _/.*-]*(?:\d+ +)?{SCORES}")
SHORT_LOSS = re.compile(r"(?<![\w.])(?:avg_)?L=(?P<value>nan|\d+\.\d+(?:e[-+]?\d+)?)\b")  # beside a step
# of Lightning's summary of a model, which may hold a loss
MODULE_ROW = re.compile(r"\d+ +\| [A-Za-z_]\w* +\| [A-Z]\w+ +\| ")
MEAN_LOSS = "train_mean_loss"  # of a whole run: of interest where it is exactly 0
LONG_RUN = re.compile(r"'train_runtime': \d{3,}\.")  # in seconds: not one that had nothing left to do
REWARD = re.compile(rf"(?i)(?<![\w/])(?:train/|critic/)?(?:mean_)?(?:rewards?(?:[/_]mean)?|return(?=\W?[:=])){VALUE}")
EPISODE_SCORE = re.compile(rf"(?i)\W*(?:episode|ep)\b.*?(?<![a-z])score{VALUE}")  # of a policy that plays
# infinite at first
RECORD_LOSS = re.compile(r"(?i)(?:best|min|prev|init(?:ial)?|(?:keep\w*|the) last)[_ /.-]*(?:\w{2,6}[_ /.-]*)?$")
OTHER_WORDS = (*HELD_OUT_WORDS, "best", "min", "prev", "init", "keep", "last")  # one is before a loss of these kinds
# the words of losses, evaluations, trainings and epochs in other languages: each alternative becomes the English word
FOREIGN_TRAIN = (
    r"训练集?|訓練|学習|훈련|학습|entra[iî]n\w*|entrena\w*|treina\w*|treino|trainings?|обуч\w*|e[gğ]itim|addestra\w*"
)
FOREIGN_HELD_OUT = (
    r"验证集?|驗證|测试集?|測試|検証|テスト|검증|테스트|valid[ai]\w*|валидац\w*|тест\w*|do[gğ]rulama|prueba|teste?s?"
)
FOREIGN = re.compile(
    rf"(?:(?:(?P<train>{FOREIGN_TRAIN})|(?P<test>{FOREIGN_HELD_OUT}))[ _-]?(?:的|の)?(?:平均)?)?"
    r"(?P<loss>损失值?|損失|손실|p[ée]rdida|perdita|perda|perte|verlust|потер[яиь]\w*|kayb[ıi]|(?<=[^\x00-\x7f])loss)"
    r"(?: (?:de|del|di|en|на|при|sur|la|el|no|ao|d')? ?"
    rf"(?:(?P<train_behind>{FOREIGN_TRAIN})|(?P<test_behind>{FOREIGN_HELD_OUT})))?"
    r"|(?P<epoch>第 ?(?P<number>\d{1,6}) ?[个個]?[轮輪]|轮次|[ée]poca|époque|epoche|эпоха|エポック|에포크|에폭)",
    re.IGNORECASE,
)
RECORD = re.compile(  # a measure as a dictionary, behind its name: {'epoch': 0, 'value': 2.3} ({'split': 'test'})
    r"(?P<name>\w+): \{'epoch': (?P<epoch>\d+(?:\.\d+)?), 'value': (?P<value>\S+)\} \(\{'split': '(?P<split>\w+)'\}\)"
)
FOREIGN_WORDS = ("epoche", "verlust", "perda", "perte", "perdita", "epoca")  # those in ASCII
RANK_NAME = re.compile(r"\brank[ _=:]{0,2}(?P<rank>\d{1,6})\b")
# a line of its own in an object that is printed over several lines
SETTING = re.compile(r"(?i)\W*(?!\w*loss)\w+ ?= ?(?!nan|[-+]?inf)[^=]+,")
MIN_FLAGS = 5  # on a line of settings: a measure is seldom true or false
TRANSFER = re.compile(r"(?i)(?!.*loss).*(?:\d ?[kMGT]?i?B/s\b|\d{7}(?:\.\d+)?it/s\b)")  # a bar of bytes: a download


@dataclass(frozen=True)
class StepLoss:
    """The step, the loss and the norm of the gradients that one line reports."""

    step: int | None
    loss: float | None
    is_last: bool = False  # step 100/100
    grad_norm: float | None = None
    name: str = "loss"
    held_out: float | None = None  # the loss of an evaluation beside that of training
    reward: float | None = None
    score: float | None = None  # of an evaluation: the accuracy or the like
    num_steps: int = 0  # of a progress bar


class TrainingBar:
    """Tells the progress bar of a training with losses from a shorter one behind it.

    That is of an evaluation, unless a loss of training comes while it is unfinished: then it is of another training.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._shorter: StepLoss | None = None  # the last state of a shorter bar since

    def counted(self, line: StepLoss, *, has_losses: bool) -> StepLoss:
        """Returns a line, without a step where it is the bar of an evaluation. has_losses: before it."""
        if line.loss is None and has_losses and 0 < line.num_steps < self._num_steps:
            self._shorter = line
            return replace(line, step=None)
        if line.loss is not None and line.name != "eval_loss" and self._shorter and not self._shorter.is_last:
            line = replace(line, step=line.step or self._shorter.step, num_steps=self._shorter.num_steps)
        if line.num_steps:
            self._num_steps, self._shorter = line.num_steps, None
        return line


def in_english(text: str, lowered: str) -> str:
    """The line with the words of losses and epochs in English, and a record of a measure as words."""
    if "'value': " in text:
        text = RECORD.sub(r"epoch \g<epoch> \g<split> \g<name>: \g<value>", text)
    if text.isascii() and not has_word(lowered, FOREIGN_WORDS):
        return text
    return FOREIGN.sub(english_word, text).replace("：", ": ")


def english_word(match: re.Match[str]) -> str:
    if match["epoch"]:
        return f"epoch {match['number'] or ''}"
    held_out, train = match["test"] or match["test_behind"], match["train"] or match["train_behind"]
    return "val loss" if held_out else "train loss" if train else "loss"


def strip_bars(text: str) -> tuple[str, StepLoss | None]:
    """The line without its progress bars, and the count of the last one with the loss beside it."""
    if "%|" not in text:
        return strip_counters(text) if "it [" in text else (text, None)
    progress = None
    for match in BAR.finditer(text):
        if PREPARATION.match(match[0]) or TRANSFER.match(match[0]):
            continue
        at, of = parse_count(match["at"]), parse_count(match["of"])
        has_loss = "loss" in match[0].lower()
        measure = find_measure(LOSS, match[0]) if has_loss else None
        loss, name = read_value(measure), "eval_loss" if measure and is_held_out(measure) else "loss"
        if row := YOLO_ROW.match(match[0]):
            loss = sum(map(float, row["losses"].split()))
        if loss is not None and EVALUATION.match(match[0]):  # the mean so far, which counts at its end
            name, loss = "eval_loss", loss if at == of or not math.isfinite(loss) else None
        held_out = read_value(HELD_OUT_LOSS.search(match[0])) if has_loss else None
        step = None if OTHER_BAR.match(match[0]) else at
        is_last = at is not None and at == of
        progress = StepLoss(step, loss, is_last, name=name, held_out=held_out, num_steps=of or 0)
    return BARE_BAR.sub("", BAR.sub("", text)).strip(" \t"), progress


def strip_counters(text: str) -> tuple[str, StepLoss | None]:
    """The same for bars without a total."""
    counted = [match for match in COUNTER.finditer(text) if not PREPARATION.match(match[0])]
    progress = StepLoss(parse_count(counted[-1]["at"]), None) if counted else None
    return COUNTER.sub("", text).strip(" \t"), progress


def read_step_and_loss(text: str) -> StepLoss | None:
    """The step or the loss that a line reports; None if it reports neither."""
    lowered = text.lower()
    if MODULE_ROW.match(text):
        return None
    if "{'" in text and "batch_size" in lowered and SECTION.search(text) and not LOSS_FIELD.search(text):
        return None  # settings
    step = STEP.search(text)
    loss_match = find_measure(LOSS, text, lowered.index("loss")) if "loss" in lowered else None
    if loss_match is None and has_word(lowered, ERROR_WORDS) and (step or OF_TRAINING.search(text)):
        loss_match = find_measure(ERROR_MEASURE, text)
    loss = read_value(loss_match)
    if loss is not None and math.isfinite(loss) and OF_WHOLE_RUN.search(text):
        return StepLoss(None, loss, name=MEAN_LOSS) if loss == 0 and LONG_RUN.search(text) else None
    has_held_out = loss is not None and has_word(lowered, HELD_OUT_WORDS)
    held_out = read_value(HELD_OUT_LOSS.search(text)) if has_held_out else None
    has_norm = "norm" in lowered and ("skip" not in lowered or loss is None or math.isfinite(loss))
    grad_norm = read_value(find_measure(GRAD_NORM, text, lowered.index("norm") - MAX_BEFORE)) if has_norm else None
    if step is None and loss is None:
        return None if grad_norm is None or math.isfinite(grad_norm) else StepLoss(None, None, grad_norm=grad_norm)
    if loss is None and step is not None and not (step["of"] or ":" in text or "=" in text or len(text) < 40):
        return None  # prose, such as "takes 3 steps 2 at a time"
    number = parse_count(step["step"]) if step else None
    is_last = bool(step and step["of"] and parse_count(step["of"].strip("/ \t")) == number)
    if loss == 0 and NAN_OUTPUT.search(text):
        loss = math.nan
    elif loss is None:
        loss = read_value(SHORT_LOSS.search(text))
    if loss == 0 and "reward" in lowered and lowered.count("nan") == 1:
        # of GRPO, whose loss is 0 by design: while rewards and KL are finite, only the step is skipped
        grad_norm = None
    name = name_of(loss_match) if loss_match else "loss"
    if EVALUATION.match(text):
        name, batch = "eval_loss", ONE_OF_BATCHES.search(text)
        if batch and loss is not None and math.isfinite(loss) and int(batch["at"]) + 1 < int(batch["of"]):
            return StepLoss(number, None, name=name)
    elif has_held_out and name != "eval_loss" and "train" not in name.lower() and OF_HELD_OUT.search(text):
        name = PART_LOSS
    if loss is not None and loss < 0 and "entropy" in lowered:
        name = next((name_of(match) for match in ERROR_MEASURE.finditer(text) if float(match["value"]) == loss), name)
    reward = read_value(REWARD.search(text)) if has_word(lowered, ("reward", "return")) else None
    if reward is None and "score" in lowered:
        reward = read_value(EPISODE_SCORE.match(text))
    score = None
    if held_out is not None or name in ("eval_loss", PART_LOSS):
        score = read_score(HELD_OUT_SCORE.search(text) or SCORE.search(text))
    return StepLoss(number, loss, is_last, grad_norm, name, held_out, reward, score)


def find_measure(pattern: re.Pattern[str], text: str, start: int = 0) -> re.Match[str] | None:
    """The measure's first value of training, or its first one that is not finite; of validation if there is no other; no record."""
    matches = training = list(pattern.finditer(text, max(0, start)))
    if has_word(text.lower(), OTHER_WORDS):
        matches = [match for match in matches if not RECORD_LOSS.search(before(match))]
        training = [match for match in matches if not is_held_out(match)]
    broken = (match for match in (*training, *matches) if not math.isfinite(float(match["value"])))
    if (measure := next(broken, None)) is not None or len(training) < 2:
        return measure or next(iter(training or matches), None)
    return training[0] if OF_POLICY.search(before(training[0])) else next(filter(is_total, training), training[0])


def rank_of(text: str, rank: int | None) -> int | None:
    """The rank that a line names anywhere; rank: that of its prefix."""
    match = RANK_NAME.search(text) if rank is None and "rank" in text else None
    return int(match["rank"]) if match else rank


def first_to_end(
    of_ranks: Mapping[tuple[str, int | None], Sequence[tuple[int, int | None, int | None]]], measure: str
) -> tuple[int, int, int | None] | None:
    """Line, rank and step from which a measure of one rank is NaN while all others had a finite one of that step or later.

    of_ranks: the line, and the step, of its last finite value and of the next one.
    """
    by_rank = {rank: at for (name, rank), at in of_ranks.items() if name == measure}
    ended = [(at[1][2], rank) for rank, at in by_rank.items() if rank is not None and at[0][0] and len(at) > 1]
    step, first = min(((step, rank) for step, rank in ended if step is not None), default=(0, None))
    others = [-1 if at[0][2] is None else at[0][2] for rank, at in by_rank.items() if rank != first]
    return (by_rank[first][1][0], first, step) if first is not None and others and min(others) >= step else None


def is_setting(text: str) -> bool:
    """Whether a line is a setting, or holds many."""
    has_flags = "({" in text and text.count("True") + text.count("False") >= MIN_FLAGS
    return has_flags or SETTING.fullmatch(text) is not None


def is_held_out(match: re.Match[str]) -> bool:
    """Whether a loss is one of an evaluation, or a record."""
    return HELD_OUT_BEHIND.match(match[0]) is not None or OTHER_LOSS.search(before(match)) is not None


def is_total(match: re.Match[str]) -> bool:
    """Whether a loss is the one of which others on the line are parts."""
    return match[0][4:5] not in {"_", "/"} and TOTAL_LOSS.search(before(match)) is not None


def labelled_values(text: str) -> Iterator[tuple[str, float]]:
    """The values of a line, each with the words before it, but for evaluations, norms, times, scores and averages of nothing."""
    end = 0
    for match in LABELLED.finditer(text):
        label, end = text[end : match.start()].strip(LABEL_EDGES).lower(), match.end()
        if label[:1].isalpha() and len(label) <= MAX_NAME and not UNCERTAIN.search(label):
            yield label, float(match[0])


def before(match: re.Match[str]) -> str:
    """The words before a match that tell what is measured."""
    return match.string[max(0, match.start() - MAX_BEFORE) : match.start()]


def name_of(match: re.Match[str]) -> str:
    """The name of a loss in the form of metrics: train/loss."""
    if is_held_out(match):
        return "eval_loss"
    if (part := ADVERSARIAL.search(before(match))) and match.string.lower().count("loss") > 1:
        return f"{part['part']}_loss"
    prefix = NAME_START.search(match.string[max(0, match.start() - 40) : match.start()])
    measure = WORDS.match(match[0]) if match.re is ERROR_MEASURE else None
    return f"{prefix[0] if prefix else ''}{measure[0] if measure else 'loss'}"


def read_memory(text: str) -> Iterator[tuple[str, float]]:
    """The amounts of memory in use that a line reports, by name: in bytes where they have a unit."""
    for part in PART_END.split(text):
        if not has_word(part.lower(), MEMORY_WORDS):
            continue
        amounts = (AMOUNT.search(part, word.end()) for word in MEMORY_WORD.finditer(part))
        for match in {match.start(): match for match in amounts if match}.values():
            name = part[: match.start()]
            if not NOT_IN_USE.search(name):
                words = " ".join(COUNTERS.sub(r"\1", OTHER_VALUES.sub("", name)).split())
                named = words.strip(" :=([{'\"")[-MAX_NAME:]
                unit = UNITS.get(match["unit"][:1].lower())
                yield (f"{named} (bytes)" if unit else named), float(match["value"].replace(",", "")) * (unit or 1)


def read_score(match: re.Match[str] | None) -> float | None:
    """A score of an evaluation, which is higher where the model is better: of a rate of errors the share that is right."""
    value = read_value(match)
    return (1 if value <= 1 else 100) - value if match and value is not None and match["errors"] else value


def read_value(match: re.Match[str] | None) -> float | None:
    if match and (thousands := THOUSANDS.match(match.string, match.end())) and PERPLEXITY.search(match[0]):
        return float(match["value"] + thousands[0].replace(",", ""))
    return float(match["value"]) if match else None


def parse_count(text: str) -> int | None:
    """'12,345' -> 12345; None if it is not a whole number of at most 15 digits."""
    digits = text.replace(",", "")
    return int(digits) if digits.isdigit() and digits.isascii() and len(digits) <= MAX_DIGITS else None
