"""Prints docs/causes.md, the entries of paceline/explain/catalogue.toml as a page: `python dev/causes_page.py > docs/causes.md`."""

from paceline.explain.catalogue import Cause, facts_of, format_title, load_catalogue
from paceline.explain.explanation import with_commands

INTRO = """\
# Causes that `paceline explain` knows

Generated from the catalogue by `python dev/causes_page.py > docs/causes.md`.

There is one entry for each cause; `paceline explain --cause ID` also shows the patterns that recognize it. In messages and
fixes, names in braces such as `{rank}` are replaced by values from the log. A part in [ ] is left out when the log does not
contain its value, and `[[{value}]]` is the value in brackets. A fix for one case of a cause replaces the general one, and
commands stand between backticks: there each value is quoted for the shell.
"""


def format_docs() -> str:
    """Returns the text of docs/causes.md: groups by their first entry, the causes of a group in the order of the file."""
    groups: dict[str, list[Cause]] = {}
    for cause in load_catalogue().causes.values():
        groups.setdefault(cause.group, []).append(cause)
    lines = [INTRO]
    for group, causes in groups.items():
        lines += [f"## {group}", ""]
        for cause in causes:
            facts = [f"- {label}: {with_commands(value)}" for label, value in facts_of(cause)]
            lines += [f"### {cause.id}", "", f"{with_commands(format_title(cause))}.", "", *facts, ""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(format_docs(), end="")
