"""
The help of the commands, and completion scripts for bash, zsh and fish, written from the options dataclasses.

A script has commands, actions, options and the values of choices; runs are looked up in runs/ while one types.
"""

import inspect
import shutil
import textwrap
from collections.abc import Iterator, Mapping

from paceline.command_line import Parameter, all_parameters, usage_of

Parameters = Mapping[str, list[Parameter]]  # of each command
Actions = Mapping[str, list[str]]

HELP_COLUMN = 30
EXAMPLE = "$ "  # how an example's line begins in a docstring
RUN_NAMES = "RUN"  # the value name of a positional argument that is a run

BASH = """\
# paceline completion for bash: source <(paceline completion bash)
_paceline() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]} words="" run
    if [[ $word == "=" ]]; then word=""; elif [[ $before == "=" ]]; then before=${COMP_WORDS[COMP_CWORD-2]}; fi
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        mapfile -t COMPREPLY < <(compgen -W "@NAMES@" -- "$word")
        return
    fi
    if ((COMP_CWORD > 2)); then
        case "$command ${COMP_WORDS[2]}" in @ACTIONS@) command="$command ${COMP_WORDS[2]}" ;; esac
    fi
    if [[ $command == run && " ${COMP_WORDS[*]:2:COMP_CWORD-2} " == *" -- "* ]]; then return; fi
    case "$command $before" in
@CHOICES@
        @VALUES@) return ;;
    esac
    if [[ -z $words ]]; then
        case "$command" in
@OPTIONS@
        esac
        case "$command" in
            @RUNS@) for run in runs/*/config.toml; do [[ -e $run ]] && words+=" $(basename "${run%/config.toml}")"; done ;;
        esac
    fi
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")
    if [[ -z $word ]]; then mapfile -t COMPREPLY < <(printf '%s\\n' "${COMPREPLY[@]}" | grep -v '^-'); fi
}
complete -o default -F _paceline paceline
"""

ZSH = """\
#compdef paceline
# paceline completion for zsh: paceline completion zsh > a folder of fpath, as _paceline
_paceline_runs() {
    local -a names
    names=(runs/*/config.toml(N:h:t))
    compadd -a names
    _files
}
_paceline() {
    local command=$words[2]
    if ((CURRENT == 2)); then
        compadd -- @NAMES@
        return
    fi
    if ((CURRENT > 3)); then
        case "$command $words[3]" in
            @ACTIONS@) command="$command $words[3]"; shift words; ((CURRENT--)) ;;
        esac
    fi
    shift words
    ((CURRENT--))
    case "$command" in
@COMMANDS@
    esac
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then _paceline "$@"; else compdef _paceline paceline; fi
"""

FISH = """\
# paceline completion for fish: paceline completion fish > ~/.config/fish/completions/paceline.fish
function __paceline_is
    set -l words (commandline -opc)
    test (count $words) -gt (count $argv); and test "$words[2.."(math 1 + (count $argv))"]" = "$argv"
end
function __paceline_runs
    for run in runs/*/config.toml
        basename (dirname $run)
    end
end
function __paceline_begins
    test (count (commandline -opc)) -eq 1
end
"""


def format_help(command: str, *, options: type) -> str:
    """The help of a command: the dataclass's docstring, whose lines with `$ ` are examples, and its fields."""
    width = max(40, shutil.get_terminal_size().columns - 2)
    parameters = all_parameters(options)
    lines = inspect.cleandoc(options.__doc__ or "").splitlines()
    prose = "\n".join(line for line in lines if not line.startswith(EXAMPLE)).strip()
    blocks = [f"usage: {usage_of(parameters, command=command)}"]
    blocks += [textwrap.fill(paragraph, width) for paragraph in prose.split("\n\n")]
    groups: dict[str, list[Parameter]] = {}
    for parameter in sorted(parameters.values(), key=lambda parameter: not parameter.positional):
        groups.setdefault(parameter.group, []).append(parameter)
    column = min(HELP_COLUMN, 4 + max(len(parameter.usage) for parameter in parameters.values()))
    for group, members in groups.items():
        blocks.append("\n".join([f"{group}:", *(format_option(member, column, width) for member in members)]))
    blocks.append(
        "\n".join(["examples:", *(f"  {line[len(EXAMPLE) :]}" for line in lines if line.startswith(EXAMPLE))])
    )
    return "\n\n".join(blocks) + "\n"


def format_option(parameter: Parameter, column: int, width: int) -> str:
    """The usage, and from the column on the help, which begins on the next line where the usage is too long."""
    head = f"  {parameter.usage}"
    head = f"{head:<{column}}" if len(head) <= column - 2 else f"{head}\n{' ' * column}"
    return head + f"\n{' ' * column}".join(textwrap.wrap(parameter.help, width - column))


def format_commands(commands: Mapping[str, type]) -> str:
    """The list of commands, wrapped to the terminal; each with the first line of its help."""
    width = max(60, min(120, shutil.get_terminal_size().columns))
    lines = ["paceline trains GPT-style language models on the GPUs you have.", ""]
    for name, takes in commands.items():
        summary = (takes.__doc__ or "").partition("\n")[0]
        indent = f"  {name:<18} "
        lines += textwrap.wrap(summary, width, initial_indent=indent, subsequent_indent=" " * len(indent))
    lines += ["", "paceline COMMAND --help shows its options, with examples.", "paceline --version prints the version."]
    return "\n".join(lines) + "\n"


def completion_script(shell: str, commands: Mapping[str, type]) -> str:
    """The script for 'bash', 'zsh' or 'fish'. commands: name -> options dataclass."""
    actions: dict[str, list[str]] = {}  # of each first word, most of which have none
    for name in commands:
        head, _, action = name.partition(" ")
        actions.setdefault(head, []).extend([action] if action else [])
    parameters = {name: list(all_parameters(takes).values()) for name, takes in commands.items()}
    if shell == "fish":
        return "\n".join([FISH.rstrip(), *fish_lines(parameters, actions)]) + "\n"
    template, parts = (
        (BASH, bash_parts(parameters, actions)) if shell == "bash" else (ZSH, zsh_parts(parameters, actions))
    )
    names = " ".join([*actions, "help", "--help", "--version"])
    full_names = " | ".join(f'"{name}"' for name in commands if " " in name)
    for part, text in {"NAMES": names, "ACTIONS": full_names, **parts}.items():
        template = template.replace(f"@{part}@", text)
    return template


def bash_parts(parameters: Parameters, actions: Actions) -> dict[str, str]:
    choices, values, options, runs = [], [], [], []
    for name in dict.fromkeys([*parameters, *actions]):
        texts = ["--help"] if name in parameters else []
        for parameter in parameters.get(name, ()):
            key = f'"{name} {parameter.option}"'
            if parameter.positional:
                texts = [*parameter.choices, *texts]
                runs += [f'"{name}"'] if is_run(parameter) else []
                continue
            texts += flags_of(parameter)
            if parameter.choices:
                choices.append(f'        {key}) words="{" ".join(parameter.choices)}" ;;')
            elif not parameter.is_switch:
                values.append(key)
        options.append(f'            "{name}") words="{" ".join([*actions.get(name, ()), *texts])}" ;;')
    lines = {"CHOICES": choices, "OPTIONS": options}
    return {**{part: "\n".join(lines[part]) for part in lines}, "VALUES": " | ".join(values), "RUNS": " | ".join(runs)}


def zsh_parts(parameters: Parameters, actions: Actions) -> dict[str, str]:
    lines = []
    for name in dict.fromkeys([*parameters, *actions]):
        first = f"compadd -- {' '.join(actions[name])}" if actions.get(name) else ""
        specs = [f"'{spec}'" for parameter in parameters.get(name, ()) for spec in zsh_specs(parameter)]
        specs += ["'*::script:_normal'"] if name == "run" else []
        if name in parameters:
            first = f"((CURRENT == 2)) && {first}; " if first else ""
            first += f"_arguments {' '.join(specs)}"
        lines.append(f'        "{name}") {first} ;;')
    return {"COMMANDS": "\n".join(lines)}


def zsh_specs(parameter: Parameter) -> list[str]:
    about = "".join(" " if character in "[]:'\\" else character for character in parameter.about)
    values = f"({' '.join(parameter.choices)})" if parameter.choices else "_files"
    many = "*" if parameter.many else ""
    if parameter.positional:
        return [f"{many}:{parameter.name}:{'_paceline_runs' if is_run(parameter) else values}"]
    if parameter.is_switch:
        return [f"{flag}[{about}]" for flag in flags_of(parameter)]
    return [f"{many}{parameter.option}=[{about}]:value:{values}"]


def fish_lines(parameters: Parameters, actions: Actions) -> Iterator[str]:
    for head, texts in actions.items():
        yield f"complete -c paceline -f -n __paceline_begins -a {head}"
        yield from (f'complete -c paceline -f -n "__paceline_is {head}" -a {action}' for action in texts)
    for name, taken in parameters.items():
        here = f'complete -c paceline -n "__paceline_is {name}"'
        for parameter in taken:
            about = parameter.about.replace("\\", "").replace("'", "\\'")
            values = f"-a '{' '.join(parameter.choices)}'" if parameter.choices else ""
            if is_run(parameter):
                yield f'{here} -a "(__paceline_runs)"'
            elif parameter.positional:
                yield from [f"{here} {values}"] if values else []
            elif parameter.is_switch:
                yield from (f"{here} -l {flag[2:]} -d '{about}'" for flag in flags_of(parameter))
            else:
                yield f"{here} -l {parameter.option[2:]} {'-x ' + values if values else '-r'} -d '{about}'"


def flags_of(parameter: Parameter) -> list[str]:
    """An option as one would type it: ['--depth'], ['--compile', '--no-compile']."""
    return [usage.split()[0] for usage in parameter.usage.split(", ")]


def is_run(parameter: Parameter) -> bool:
    return parameter.positional and RUN_NAMES in parameter.value_name.split("|")
