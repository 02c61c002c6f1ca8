"""
Command lines: options are fields of dataclasses, with type, default, limits and help in one place.

It parses the arguments after `paceline` into a command's dataclass; help.py writes the help. The config's keys are such fields
too, so a file and a flag are checked by the same limits. Every mistake ends in a UsageError of two lines.
"""

import difflib
import inspect
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import UsageError

T = TypeVar("T")

HELP_FLAGS = ("-h", "--help")
MANY_OPTIONS = 40  # of a command that takes every config key
BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
VALUE_NAMES = {int: "N", float: "X", Path: "PATH", str: "TEXT"}
ADDRESS_OPTIONS = (
    "standalone", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "master-addr", "master-port", "main-process-ip", "main-process-port",
)  # fmt: skip

# options of torchrun, accelerate launch and deepspeed -> the fix that names paceline's
OTHER_LAUNCHERS = {
    "nproc-per-node": "--nproc {value}",
    "num-processes": "--nproc {value}",
    "num-gpus": "--nproc {value}",
    "log-dir": "--runs-dir {value}",
    "cpu": "--device cpu",
    "use-cpu": "--device cpu",
    "module": "-m MODULE, as for python",
    "max-restarts": "--max-attempts, which counts the first attempt too",
    "no-python": "leave it out: any executable works",
    "multi-gpu": "leave it out: --nproc 2, or the default of one process for each GPU",
    "config-file": "leave it out: --nproc and --device replace it",
    **dict.fromkeys(("tee", "redirects"), "leave it out: every rank's output is shown and kept"),
    **dict.fromkeys(ADDRESS_OPTIONS, "paceline finds a free port on this host by itself: leave it out"),
}
# an option; a dash alone, a negative number and a text with spaces are values
NOT_A_VALUE = re.compile(r"-(?!$|\.?\d|.* )")


def option(
    default: Any,
    about: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: Sequence[str] = (),
    group: str | None = None,
    value: str | None = None,
) -> Any:
    """A field that --its-name sets. low, high: the least and the largest value. value: its stand-in in help.

    group: the heading in help of this field and of those after it in the class. A name that ends in _s is a time in seconds.
    """
    limits = {"low": low, "high": high, "choices": tuple(choices)}
    return field(default=default, metadata={"about": about, **limits, "group": group, "value": value})


def positional(
    value: str, about: str, *, default: Any = ..., has_flag: bool = False, choices: tuple[str, ...] = ()
) -> Any:
    """A field that an argument without dashes sets; required if it has no default. has_flag: --its-name sets it too."""
    metadata = {"about": about, "value": value, "choices": choices, "positional": True, "has_flag": has_flag}
    return field(metadata=metadata) if default is ... else field(default=default, metadata=metadata)


def keys_of(owner: type, *, names: Sequence[str] = (), foreign: Mapping[str, str] | None = None) -> Any:
    """A field that holds which fields of `owner` the command line sets, by name. foreign: what others call them -> name."""
    metadata = {"owner": owner, "names": tuple(names), "foreign": foreign or {}}
    return field(default_factory=dict, metadata=metadata)


@dataclass(frozen=True)
class Parameter:
    """An option, a positional argument or a config key."""

    name: str
    kinds: tuple[type, ...]  # (int,), (float, NoneType), ...
    many: bool  # a tuple: the option may be repeated, the argument too
    default: Any
    about: str
    group: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    value: str | None = None
    positional: bool = False
    has_flag: bool = True

    @property
    def option(self) -> str:
        return "--" + self.name.removesuffix("_s").replace("_", "-")

    @property
    def title(self) -> str:
        """What a message calls it."""
        return self.value_name if self.positional else self.option

    @property
    def is_switch(self) -> bool:
        return bool in self.kinds

    @property
    def is_optional(self) -> bool:
        return type(None) in self.kinds

    @property
    def value_name(self) -> str:
        if self.name.endswith("_s"):
            return "SECONDS"
        return self.value or ("|".join(self.choices) or VALUE_NAMES[self.kinds[0]])

    @property
    def usage(self) -> str:
        """'--depth N', '--no-check', '--compile, --no-compile', 'RUN'."""
        if self.positional:
            return self.value_name
        if not self.is_switch:
            return f"{self.option} {self.value_name}"
        negative = f"--no-{self.option[2:]}"
        return {True: negative, False: self.option, None: f"{self.option}, {negative}"}[self.default]

    @property
    def help(self) -> str:
        """The text of its line in --help, with the default; that of None is in the text, after `auto:`."""
        if self.is_switch or self.default in (..., (), ""):
            return self.about
        shown = f"{self.default:g}" if isinstance(self.default, float) else self.default
        return self.about if shown is None else f"{self.about} [{shown}]"

    @property
    def example(self) -> Any:
        """A value that would do, for a fix: the default, where there is one."""
        if self.default is not None and self.default not in ((), "", ...):
            return self.default
        if self.is_switch:
            return True
        if self.choices:
            return self.choices[0]
        return 8 if int in self.kinds else 0.5 if float in self.kinds else self.value_name

    @property
    def expected(self) -> str:
        """'an integer from 1 to 512', 'one of fp32, bf16, fp16', 'true or false' ..."""
        if self.choices:
            text = f"one of {', '.join(self.choices)}"
        elif self.is_switch:
            text = "true or false"
        elif int in self.kinds or float in self.kinds:
            text, form = ("an integer", "{:,}") if int in self.kinds else ("a number", "{:g}")
            text += f" from {form.format(self.low)}" if self.low is not None else ""
            text += f" to {form.format(self.high)}" if self.high is not None else ""
        else:
            text = "text"
        return text + (", or auto" if self.is_optional else "")

    def parse(self, text: str) -> Any:
        """The value of a command line's text, checked; raises UsageError."""
        if self.is_optional and text.lower() == "auto":
            return None
        if not text and not (self.default == "" and self.kinds == (str,)):
            raise UsageError(f"{self.title} is empty", fix="give it a value, or leave it out")
        value: Any = text
        try:
            if self.is_switch:
                value = BOOLEANS[text.lower()]
            elif int in self.kinds:
                value = int(text.replace(",", ""))
            elif float in self.kinds:
                value = float(text)
            elif Path in self.kinds:
                value = Path(text)
        except (ValueError, KeyError):
            fix = self.usage if self.is_switch else f"{self.title} {self.example}"
            raise UsageError(f"{self.title} {text} is not {self.expected}", fix=fix) from None
        if problem := self.problem(value):
            raise UsageError(f"{self.title} {text} is {problem}", fix=self.expected)
        return value

    def problem(self, value: Any) -> str | None:
        """Why a value of the right type is refused."""
        if self.choices and value not in self.choices:
            return "not known"
        if isinstance(value, str | Path) and "\0" in str(value):
            return "not text"
        if self.is_switch or not isinstance(value, int | float):
            return None
        too_low, too_high = self.low is not None and value < self.low, self.high is not None and value > self.high
        return "out of range" if too_low or too_high or value != value else None


@cache
def parameters_of(owner: type) -> dict[str, Parameter]:
    """A dataclass's options and positional arguments, by field name; those of inherited classes come last."""
    hints, items = typing.get_type_hints(owner), {item.name: item for item in fields(owner)}
    parameters: dict[str, Parameter] = {}
    for holder in (owner, *reversed(owner.__mro__[1:])):
        group = "options"
        for name in inspect.get_annotations(holder):
            if name in items and name not in parameters and "about" in items[name].metadata:
                group = items[name].metadata.get("group") or group
                parameters[name] = parameter_of(items[name], hints[name], group=group)
    return parameters


def parameter_of(item: Field[Any], hint: Any, *, group: str) -> Parameter:
    many = typing.get_origin(hint) is tuple
    hint = typing.get_args(hint)[0] if many else hint
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    default = ... if item.default is MISSING else item.default
    group = "arguments" if "positional" in item.metadata else group
    return Parameter(item.name, kinds, many, default, **{**item.metadata, "group": group})


@cache
def all_parameters(owner: type) -> dict[str, Parameter]:
    """parameters_of, and after them the keys that the command takes; an option hides the key of its name."""
    parameters = parameters_of(owner)
    for item in fields(owner):
        if "owner" in item.metadata:
            keys = parameters_of(item.metadata["owner"])
            names = [name for name in item.metadata["names"] or keys if name not in parameters]
            parameters = {**parameters, **{name: keys[name] for name in names}}
    return parameters


def parse(args: Sequence[str], *, command: str, options: type[T]) -> T:
    """The options that the arguments after `paceline COMMAND` mean; raises UsageError for the first mistake."""
    takes: Any = options  # T is a dataclass, which a type variable cannot require
    parameters = all_parameters(takes)
    values: dict[str, Any] = {}
    positionals: list[str] = []
    remaining = list(args)
    while remaining:
        argument = remaining.pop(0)
        if not argument.startswith("-") or argument == "-":
            positionals.append(argument)
            continue
        parameter, text = split_option(argument, remaining, takes, parameters)
        if parameter.name in values and not parameter.many:
            raise UsageError(f"{parameter.option} is given twice", fix="give it once")
        value = parameter.parse(text)
        values[parameter.name] = (*values.get(parameter.name, ()), value) if parameter.many else value
    place(positionals, values, parameters, command=command)
    own = parameters_of(takes)
    keys = {name: value for name, value in values.items() if name not in own}
    holders = [item.name for item in fields(takes) if "owner" in item.metadata]
    return options(**{name: values[name] for name in own if name in values}, **dict.fromkeys(holders, keys))


def split_option(
    argument: str, remaining: list[str], options: type, parameters: Mapping[str, Parameter]
) -> tuple[Parameter, str]:
    """The parameter of an option and the text of its value, which is taken from `remaining` where it is not in the argument."""
    by_flag = {parameter.option: parameter for parameter in parameters.values() if parameter.has_flag}
    flag, equals, text = argument.partition("=")
    flag = flag.replace("_", "-")
    parameter = by_flag.get(flag)
    if parameter is None:
        parameter = by_flag.get("--" + flag.removeprefix("--no-"))
        if parameter is None or not parameter.is_switch or equals:
            raise unknown_option(argument, options, parameters, value="".join(remaining[:1]))
        return parameter, "false"
    if equals:
        return parameter, text
    if parameter.is_switch:
        has_value = parameter.is_optional and remaining and remaining[0].lower() in {*BOOLEANS, "auto"}
        return parameter, remaining.pop(0) if has_value else "true"
    if not remaining or NOT_A_VALUE.match(remaining[0]):
        raise UsageError(f"{flag} has no value", fix=f"{flag} {parameter.example}")
    return parameter, remaining.pop(0)


def place(
    arguments: Sequence[str], values: dict[str, Any], parameters: Mapping[str, Parameter], *, command: str
) -> None:
    """Sets the positional parameters in `values` from the arguments that belong to no option."""
    names = [parameter for parameter in parameters.values() if parameter.positional]
    count = len(arguments) + sum(parameter.name in values for parameter in names)
    remaining = list(arguments)
    for parameter in names:
        if parameter.many:
            values[parameter.name] = tuple(parameter.parse(argument) for argument in remaining)
            remaining = []
        elif remaining and parameter.name not in values:
            values[parameter.name] = parameter.parse(remaining.pop(0))
    missing = [parameter for parameter in names if parameter.default is ... and parameter.name not in values]
    if not remaining and not missing:
        return
    takes = " and ".join(f"one {parameter.value_name}" for parameter in names) or "options only"
    problem = f"{count} {'is' if count == 1 else 'are'} given" if names else f"not {remaining[0]}"
    hint = "; paceline runs lists them" if any(parameter.value_name == "RUN" for parameter in names) else ""
    raise UsageError(f"{command} takes {takes}, {problem}", fix=usage_of(parameters, command=command) + hint)


def usage_of(parameters: Mapping[str, Parameter], *, command: str) -> str:
    """'paceline eval RUN [options]'."""
    if command == "run":
        return "paceline run [options] -- SCRIPT.py [args]"
    names = [parameter for parameter in parameters.values() if parameter.positional]
    shown = [f"{parameter.value_name}{' ...' if parameter.many else ''}" for parameter in names]
    texts = [text if name.default is ... else f"[{text}]" for name, text in zip(names, shown, strict=True)]
    keys = ["[--key value ...]"] if len(parameters) > MANY_OPTIONS else []
    return " ".join(["paceline", command, *texts, *keys, "[options]"])


def unknown_option(argument: str, options: type, parameters: Mapping[str, Parameter], *, value: str = "") -> UsageError:
    """Names our option for one of another trainer, else the nearest."""
    flag, _, text = argument.partition("=")
    own = [parameter for parameter in parameters.values() if not parameter.positional]
    if not argument.startswith("--"):
        example = own[0].usage if own and own[0].is_switch else f"{own[0].option} {own[0].example}" if own else "--help"
        return UsageError(f"unknown option {argument}", fix=f"options have two dashes, such as {example}")
    for item in fields(options):
        ours = item.metadata.get("foreign", {}).get(flag[2:].replace("-", "_"))
        if ours in parameters:
            fix = f"{parameters[ours].option} {text or value}".strip()
            return UsageError(f"unknown option {flag}; paceline calls it {ours}", fix=fix)
    usages = [usage for parameter in own for usage in (parameter.option, *parameter.usage.split(", "))]
    near = nearest(flag, [usage.split()[0] for usage in usages])
    return UsageError(f"unknown option {flag}", fix=f"did you mean {near}?" if near else "--help lists the options")


def split_command(args: Sequence[str], options: type) -> tuple[list[str], list[str]]:
    """The arguments of `paceline run` itself, and the command: what follows `--`, or all from the first argument that is no option.

    Raises UsageError for an option of another launcher.
    """
    valued = {key.option for key in all_parameters(options).values() if not key.is_switch}
    own: list[str] = []
    remaining = list(args)
    while remaining:
        if remaining[0] == "--":
            return own, remaining[1:]
        if remaining[0] == "-m" or not remaining[0].startswith("-"):
            return own, remaining
        argument = remaining.pop(0)
        name, equals, value = argument.lstrip("-").replace("_", "-").partition("=")
        if name in OTHER_LAUNCHERS:
            following = remaining[0] if remaining and not remaining[0].startswith("-") else "2"
            hint = OTHER_LAUNCHERS[name].format(value=value or following)
            fix = f"paceline run {hint}" if hint.startswith("-") else hint
            raise UsageError(f"{argument.partition('=')[0]} is not an option of paceline run", fix=fix)
        own.append(argument)
        if f"--{name}" in valued and not equals and remaining:
            own.append(remaining.pop(0))
    return own, []


def split_name(args: Sequence[str], names: Iterable[str]) -> tuple[str, list[str]]:
    """'train', 'runs show', or 'torch' where the action is not known; and the arguments after it."""
    names = list(names)
    if " ".join(args[:2]) in names:
        return " ".join(args[:2]), list(args[2:])
    heads = list(dict.fromkeys(name.split()[0] for name in names))
    if args[0] in heads:
        return args[0], list(args[1:])
    near = nearest(args[0], heads)
    whole = f"{near} {args[1]}" if len(args) > 1 and f"{near} {args[1]}" in names else near
    raise UsageError(f"unknown command {args[0]}", fix=f"paceline {whole}" if near else "paceline --help lists them")


def unknown_action(name: str, args: Sequence[str], names: Iterable[str]) -> UsageError:
    actions = [full.split()[1] for full in names if full.startswith(f"{name} ")]
    what = f"not {args[0]}" if args else "none is given"
    near = nearest(args[0], actions) if args else None
    return UsageError(f"{name} takes {' or '.join(actions)}, {what}", fix=f"paceline {name} {near or actions[0]}")


def nearest(name: str, names: Iterable[str]) -> str | None:
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return near[0] if near else None
