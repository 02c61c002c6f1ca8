"""
Command lines: options are fields of dataclasses, with type, default, limits and help in one place.

A parser of argparse is made from a command's dataclass; it parses, prints help, and tells argcomplete what can follow. The config's
keys are such fields too, so a file and a flag are checked by the same limits. Every mistake ends in a UsageError of two lines.
"""

import argparse
import inspect
import json
import math
import re
import shlex
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import UsageError, nearest, nearest_choice
from paceline.other_names import OTHER_OPTIONS
from paceline.terminal import HelpFormatter
from paceline.units import format_list, likely_number, whole_number

T = TypeVar("T")
Names = Callable[[], list[str]]
BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
HELP_FLAGS = {"-h", "--help"}
FILES = {"CONFIG", "DIR", "FILE", "HOSTS", "LOG", "PATH", "SCRIPT", "SOURCE"}  # values that may be one
VALUE_NAMES = {int: "N", float: "X", Path: "PATH", str: "TEXT"}
NOT_A_VALUE = re.compile(r"-(?!$|\.?\d|.* )")  # an option; "-", a negative number and a text with spaces are values


def option(default: Any, about: str, **attributes: Any) -> Any:
    """A field that --its-name sets. attributes: of its Parameter.

    A group is the heading in help of this field and of those after it in the class. A name that ends in _s is a time in seconds.
    """
    return field(default=default, metadata={"about": about, **attributes})


def positional(value: str, about: str, *, default: Any = MISSING, **attributes: Any) -> Any:
    """A field that an argument without dashes sets; required if it has no default."""
    return option(default, about, value=value, positional=True, **attributes)


def keys_of(owner: type, **attributes: Any) -> Any:
    """A field with the set fields of `owner`. names: that it takes; shown: in help; foreign: renames other trainers' flags."""
    usual = {"names": (), "shown": (), "foreign": lambda args, _: args}  # empty: all
    return field(default_factory=dict, metadata={"owner": owner, **usual, **attributes})


@dataclass(frozen=True)
class Parameter:
    """An option, a positional argument or a config key."""

    name: str
    kinds: tuple[type, ...]  # (int,), (float, NoneType), ...
    many: bool  # a tuple: the option may be repeated, the argument too
    default: Any  # ... of a positional argument that is required
    about: str
    group: str
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()
    names: tuple[str, ...] = ()  # that a text of names with commas may have, for completion
    also: Mapping[float | str, Any] = field(default_factory=dict)  # other trainers' values -> ours: -1 for off
    value: str | None = None  # its stand-in in help
    usual: Any = None  # a value for a fix, where the default shows none
    positional: bool = False
    has_flag: bool = False  # --its-name sets a positional argument too
    may_be_empty: bool = False
    takes_options: bool = False  # its value may begin with a dash
    is_script: bool = False  # the remaining arguments, from the first one that is no option of ours

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
        name = "SECONDS" if self.name.endswith("_s") else self.value
        return name or "|".join(self.choices) or VALUE_NAMES[self.kinds[0]]

    @property
    def flags(self) -> list[str]:
        """The option as one types it: ['--depth'], ['--no-check'], ['--compile', '--no-compile']."""
        negative = f"--no-{self.option[2:]}"
        if not self.is_switch or self.default is False:
            return [self.option]
        return [negative] if self.default else [self.option, negative]

    @property
    def usage(self) -> str:
        """'--depth N', '--no-check', '--compile, --no-compile', 'RUN'."""
        if self.positional:
            return self.value_name
        return ", ".join(self.flags) if self.is_switch else f"{self.option} {self.value_name}"

    @property
    def help(self) -> str:
        """The text of its line in --help, with the default; that of None is in the text, after `auto:`."""
        if self.is_switch or self.default in (..., (), "") or self.about == argparse.SUPPRESS:
            return self.about
        shown = f"{self.default:g}" if isinstance(self.default, float) else self.default
        return self.about if shown is None else f"{self.about} [{shown}]"

    def example(self, text: str = "") -> Any:
        """A value for a fix: the number that a refused text probably means, or a default that does something."""
        number = likely_number(text, self.kinds[0], is_time=self.name.endswith("_s"), usual=self.usual or self.default)
        if number is not None and not self.problem(number):
            return number
        examples = {bool: True, int: max(8, self.low), float: max(0.5, self.low)}
        usual = self.usual or (self.choices[0] if self.choices else examples.get(self.kinds[0]) or self.value_name)
        return usual if self.default in (None, (), "", ..., 0) else self.default

    @property
    def expected(self) -> str:
        """'an integer from 1 to 512', 'one of fp32, bf16, fp16', 'true or false' ..."""
        text = {bool: "true or false", int: "an integer", float: "a number"}.get(self.kinds[0], "text")
        choices = ", ".join(("true", "false") * self.is_switch + self.choices)
        text = f"one of {choices}" if self.choices and int not in self.kinds else text
        form = "{:,}" if int in self.kinds else "{:g}"
        text += f" from {form.format(self.low)}" if self.low > -math.inf else ""
        text += f" to {form.format(self.high)}" if self.high < math.inf else ""
        return ", or ".join((text, *self.choices * (int in self.kinds), *("auto",) * self.is_optional))

    def parse(self, text: str) -> Any:
        """The value of a command line's text, checked; raises UsageError."""
        if self.is_optional and text.lower() == "auto":
            return None
        if not text and not self.may_be_empty and not (self.default == "" and self.kinds == (str,)):
            raise UsageError(f"{self.title} is empty", fix="give it a value, or leave it out")
        try:
            kind: Any = str if text in self.choices else self.kinds[0]
            value = BOOLEANS[text.lower()] if kind is bool else whole_number(text) if kind is int else kind(text)
        except (ValueError, KeyError):
            example = "auto" if kind is int and self.is_optional and text.isalpha() else self.example(text)
            fix = self.usage if self.is_switch else f"{self.title} {example}"
            if numbers := self.listed_numbers(text):
                fix = f"one run for each: for x in {' '.join(numbers)}; do paceline ... {self.option} $x; done"
            raise UsageError(f"{self.title} {text} is not {self.expected}", fix=fix) from None
        if (value := self.also.get(value, value)) is not None and (problem := self.problem(value)):
            fix = nearest_choice(text, self.choices, self.expected)
            if self.high == 1 and isinstance(value, float) and 5 <= value <= 100 and not self.problem(value / 100):
                fix = f"{self.title} {value / 100:g}; {fix}"  # a percentage in place of a share; 1.01 is a slip
            raise UsageError(f"{self.title} {text} is {problem}", fix=fix)
        return value

    def listed_numbers(self, text: str) -> list[str]:
        """The values in a text such as 0.01,0.02; none where it may be one number: 1,024 or 0,5."""
        kind, numbers = self.kinds[0], [number.strip() for number in text.split(",")]
        with suppress(ValueError):
            are_right = not any(map(self.problem, map(kind, numbers))) if kind in (int, float) else False
            if are_right and not re.fullmatch(r"\d+(,\d{3})+" if kind is int else r"\d+,\d+", text):
                return numbers
        return []

    def problem(self, value: Any) -> str | None:
        """Why a value of the right type is refused."""
        if self.choices and isinstance(value, str) and value not in self.choices:
            return "not known"
        if "\0" in str(value):
            return "not text"
        is_number = isinstance(value, int | float) and not self.is_switch
        return "out of range" if is_number and not self.low <= value <= self.high else None  # nor is NaN in it


@cache
def parameters_of(owner: type) -> dict[str, Parameter]:
    """A dataclass's parameters by field name: its own, the keys that it takes and does not hide, and those of inherited classes."""
    hints, items = typing.get_type_hints(owner), {item.name: item for item in fields(owner)}
    parameters: dict[str, Parameter] = {}
    for holder in (owner, *reversed(owner.__mro__[1:])):
        group = "options"
        for name in inspect.get_annotations(holder):
            if name in items and name not in parameters and "about" in items[name].metadata:
                hint, default = hints[name], items[name].default
                many = typing.get_origin(hint) is tuple
                kinds = typing.get_args(hint)[:1] if many else typing.get_args(hint) or (hint,)
                attributes = {"group": group, **items[name].metadata}
                group = attributes["group"]
                parameters[name] = Parameter(name, kinds, many, ... if default is MISSING else default, **attributes)
    for item in items.values():
        if "owner" in item.metadata:
            own, keys = inspect.get_annotations(owner), parameters_of(item.metadata["owner"])
            keys = {name: keys[name] for name in item.metadata["names"] or keys if name not in parameters}
            hidden = [name for name in keys if name not in (item.metadata["shown"] or keys)]
            keys |= {name: replace(keys[name], about=argparse.SUPPRESS) for name in hidden}
            parameters = {name: parameters[name] for name in parameters if name in own} | keys | parameters
    return parameters


def parse(args: Sequence[str], *, command: str, options: type[T]) -> T:
    """The options that the arguments after `paceline COMMAND` mean. Raises UsageError, or SystemExit after it has printed help."""
    takes: Any = options  # T is a dataclass, which a type variable cannot require
    parser = make_parser(command, takes)
    namespace, extras = parser.parse_known_args(normalize(args, command=command, options=takes))
    if extras:  # of a command that takes options only
        raise UsageError(f"{command} takes options only, not {extras[-1]}", fix=str(parser.usage))
    values: dict[str, Any] = {}
    for name, parameter in parameters_of(takes).items():
        items = getattr(namespace, name, [])
        if (len(items) > 1 and not parameter.many) or (not items and parameter.default is ...):
            fix = f"{parser.usage}" + ("; paceline runs lists them" if parameter.value_name == "RUN" else "")
            listed = f": {format_list(items, limit=3)}" if items else ""
            number = "at least one" if parameter.many else "one"
            what = f"{command} takes {number} {parameter.value_name}, {len(items)} are given{listed}"
            raise UsageError(what, fix=fix)
        if items:
            values[name] = tuple(items) if parameter.many else items[0]
    own = {item.name: values.pop(item.name) for item in fields(takes) if item.name in values}
    return options(**own, **{item.name: values for item in fields(takes) if "owner" in item.metadata})


def normalize(args: Sequence[str], *, command: str, options: type) -> list[str]:
    """Returns each option as one word, --name=value, then `--` and the others as they are; raises UsageError."""
    parameters = parameters_of(options).values()
    flags = {parameter.option: parameter for parameter in parameters if parameter.has_flag or not parameter.positional}
    has_script = any(parameter.is_script for parameter in parameters)
    if not has_script and HELP_FLAGS & set(args):
        return ["--help"]
    words, others, remaining = list[str](), list[str](), list(args)
    for item in fields(options):
        if "foreign" in item.metadata:
            remaining = item.metadata["foreign"](remaining, [flag for p in parameters for flag in p.flags])
    while remaining:
        argument = remaining.pop(0)
        is_option = argument.startswith("-") and argument != "-"
        if argument == "--" or (has_script and (not is_option or argument == "-m")):
            others += remaining if argument == "--" else [argument, *remaining]
            break
        if not is_option:
            others.append(argument)
            continue
        if argument in HELP_FLAGS:
            return ["--help"]
        flag, equals, text = argument.partition("=")
        parameter = flags.get(flag := flag.replace("_", "-"))
        if parameter is None and not equals:  # --no-compile
            switch = flags.get(f"--{flag.removeprefix('--no-')}")
            parameter, equals, text = switch if switch and switch.is_switch else None, "=", "false"
        if parameter is None:
            raise unknown_option(argument, "".join(remaining[:1]), command=command, options=options)
        if parameter.is_switch and not equals:
            plain = () if has_script else ("true", "false")  # `true` may be a script
            values = {*BOOLEANS, "auto", *parameter.choices} if parameter.is_optional else plain
            text = remaining.pop(0) if remaining and remaining[0].lower() in values else "true"
        elif not equals:
            if not remaining or (NOT_A_VALUE.match(remaining[0]) and not parameter.takes_options):
                raise UsageError(f"{flag} has no value", fix=f"{flag} {parameter.example()}")
            text = remaining.pop(0)
        if not parameter.many and any(word.startswith(f"{parameter.option}=") for word in words):
            raise UsageError(f"{parameter.option} is given twice", fix="give it once")
        words.append(f"{parameter.option}={text}")
    return [*words, "--", *others] if others else words


def make_parser(command: str, options: type) -> argparse.ArgumentParser:
    """The parser of a command; the dataclass's docstring ends with its examples, lines that begin with `$ `."""
    parameters = parameters_of(options)
    keys = ["[--key value ...]"] if len(parameters) > 40 else []  # it takes every config key
    usage = ["paceline", command, *keys, "[options]"]
    for parameter in parameters.values():
        if parameter.is_script:
            usage += ["--", parameter.value_name]
        elif parameter.positional:
            text = f"{parameter.value_name} ..." if parameter.many else parameter.value_name
            usage.insert(2, text if parameter.default is ... else f"[{text}]")
    # the others are keys of a config, which tiny sets
    begins_with_tiny = "config" in parameters and "auto: tiny" in parameters["config"].about
    own = inspect.get_annotations(options) if begins_with_tiny else parameters
    prose, _, examples = inspect.cleandoc(options.__doc__ or "").partition("\n\n$ ")
    parser = argparse.ArgumentParser(
        usage=" ".join(usage),
        description=prose,
        epilog="examples:\n  " + examples.replace("\n$ ", "\n  "),
        formatter_class=partial(HelpFormatter, max_help_position=30, own=own),
        allow_abbrev=False,
    )
    add_parameters(parser, options)
    return parser


def add_parameters(parser: argparse.ArgumentParser, options: type, *, gpus: Names | None = None) -> None:
    """Adds each parameter as a list of what is given. gpus: for argcomplete, lists known cards; switches are as one types them."""
    groups: dict[str, Any] = {"options": parser}
    for parameter in parameters_of(options).values():
        name, heading, completer = parameter.name, parameter.group, partial(offer, parameter, gpus=gpus or list)
        group = groups.get(heading) or groups.setdefault(heading, parser.add_argument_group(heading))
        shown: dict[str, Any] = {"default": argparse.SUPPRESS, "help": parameter.help.replace("%", "%%")}
        if gpus is not None and parameter.is_switch:
            group.add_argument(*parameter.flags, action="store_true", **shown)
            continue
        shown |= {"metavar": parameter.usage, "type": str if parameter.is_script else parameter.parse}
        if parameter.positional:
            nargs = argparse.REMAINDER if parameter.is_script and gpus is not None else "*"
            action = "extend" if gpus is None else "store"  # argcomplete does not run "extend"
            group.add_argument(name, nargs=nargs, action=action, **shown).completer = completer
            shown["help"] = argparse.SUPPRESS
        if parameter.has_flag or not parameter.positional:
            group.add_argument(parameter.option, dest=name, action="append", **shown).completer = completer


def offer(parameter: Parameter, *, prefix: str, gpus: Names, parsed_args: Any, **_: Any) -> Iterable[str]:
    """What completes a value: choices, the last of several names, GPUs, configs, runs or steps, and files where it may be one."""
    from argcomplete.completers import FilesCompleter

    known = gpus() if parameter.name in ("gpu", "compare") else parameter.names
    names = [*parameter.choices, *("".join(prefix.rpartition(",")[:2]) + name for name in known)]
    kinds = set(re.findall("[A-Z]+", parameter.value_name))
    folder, run = getattr(parsed_args, "runs_dir", ["runs"])[-1], getattr(parsed_args, "run", [""])[-1]
    if "CONFIG" in kinds:
        names += [path.stem for path in Path(__file__).with_name("configs").glob(f"{prefix}*.toml")]
    if "RUN" in kinds:
        names += [path.parent.name for path in Path(folder).glob(f"{prefix}*/config.toml")]
    for path in Path(folder).glob("*/notes.json") if parameter.name == "tag" else ():
        with suppress(OSError, ValueError, LookupError, TypeError):  # damaged
            names += map(str, json.loads(path.read_text(encoding="utf-8"))["tags"])
    if parameter.name == "step":
        paths = [path for place in (Path(run), Path(folder, run)) for path in place.glob("checkpoints/*/manifest.json")]
        names += [str(int(name)) for path in paths if (name := path.parent.name.removeprefix("step_")).isdigit()]
    return [*names, *(FilesCompleter()(prefix) if kinds & FILES or (not names and "RUN" in kinds) else [])]


def complete(commands: Mapping[str, type], *, gpus: Names) -> None:
    """Answers a shell that asks how a line can go on, and exits. commands: name -> options dataclass. gpus: lists known cards."""
    import argcomplete

    root = argparse.ArgumentParser()
    root.add_argument("--version", action="version")
    actions = {"": root.add_subparsers()}
    actions[""].add_parser("help", help="Show the help of a command.")
    parsers: dict[str, argparse.ArgumentParser] = {}
    # with two words first: `show` must come before the DIR of `runs`
    for name, takes in sorted(commands.items(), key=lambda item: " " not in item[0]):
        head, _, word = name.rpartition(" ")
        if head not in actions:
            parsers[head] = actions[""].add_parser(head)
            actions[head] = parsers[head].add_subparsers()
        add_parameters(parsers.get(name) or actions[head].add_parser(word, help=summary_of(takes)), takes, gpus=gpus)
    argcomplete.autocomplete(root, always_complete_options=False)


def format_commands(commands: Mapping[str, type]) -> str:
    """The list of commands; each with the first line of its help."""
    parser = argparse.ArgumentParser(
        usage="paceline COMMAND ...",
        description="paceline trains GPT-style language models on the GPUs you have.",
        epilog="paceline COMMAND --help shows its options, with examples. paceline --version prints the version.",
        add_help=False,
    )
    group = parser.add_argument_group("commands")
    for name, options in commands.items():
        group.add_argument(name, help=summary_of(options))
    return parser.format_help()


def summary_of(options: type) -> str:
    return (options.__doc__ or "").partition("\n")[0]


def unknown_option(argument: str, following: str, *, command: str, options: type) -> UsageError:
    """Names our option for one of another launcher or trainer, else the nearest. following: the argument after it."""
    flag, _, text = argument.partition("=")
    name = flag.lstrip("-").replace("_", "-")
    for hint, names in OTHER_OPTIONS.get(command, {}).items():
        if name in names.split():
            fix = hint.format(value=shlex.quote(text or (following if following[:1] not in ("", "-") else "2")))
            return UsageError(f"{flag} is not an option of paceline {command}", fix=fix)
    own = [parameter for parameter in parameters_of(options).values() if not parameter.positional]
    if not argument.startswith("--"):
        example = own[0].usage if own else "--help"
        return UsageError(f"unknown option {argument}", fix=f"options have two dashes, such as {example}")
    flags = [name for parameter in own for name in (parameter.option, *parameter.flags)]
    near = nearest(flag, flags) or next(filter(flag.startswith, flags), None)  # --output: --out
    fix = f"did you mean {near}?" if near else f"see paceline {command} --help"
    return UsageError(f"unknown option {flag}", fix=fix)
