"""
docs/causes.md from the catalogue: `python -m paceline.explain.causes_page > docs/causes.md`; a test says whether it is up to
date.
"""

from __future__ import annotations

import re

from paceline.explain.catalogue import Catalogue, Cause, load_catalogue

INTRO = """\
# What `paceline explain` knows

Made from the catalogue: `python -m paceline.explain.causes_page > docs/causes.md`.

One entry per cause. `paceline explain --cause ID` also shows the texts by which it is recognised. In the sentences, `{rank}` and
the like are filled in from the log; a part in [ ] is left out where the log does not tell.
"""
MENDS = {"user": "you", "admin": "whoever runs the machine", "hardware": "other hardware, or its repair"}
RETRIES = {
    "never": "fails again",
    "same": "may work",
    "smaller": "works with less memory",
    "other-port": "works on another port",
    "other-checkpoint": "works from an earlier checkpoint",
    "later": "may work later",
}


def format_page(catalogue: Catalogue) -> str:
    """The groups in the order of their first entry, the causes of a group in the order of the file."""
    groups: dict[str, list[Cause]] = {}
    for cause in catalogue.causes.values():
        groups.setdefault(cause.group, []).append(cause)
    lines = [INTRO]
    for group, causes in groups.items():
        lines += [f"## {group}", ""]
        for cause in causes:
            lines += format_entry(cause)
    return "\n".join(lines).rstrip() + "\n"


def format_entry(cause: Cause) -> list[str]:
    warning = " (a warning, never the end of a run by itself)" if cause.severity == "warning" else ""
    lines = [
        f"### {cause.id}",
        "",
        f"{cause.title}{warning}.",
        "",
        f"- Says: {as_text(cause.summary)}",
        f"- Fix: {as_text(cause.fix)}",
    ]
    lines.append(f"- Mended by {MENDS[cause.mend]}; the same again {RETRIES[cause.retry]}.")
    if cause.follows is True:
        lines.append("- Often only follows from something else.")
    elif cause.follows:
        lines.append(f"- Can follow from {', '.join(sorted(cause.follows))}.")
    if cause.mistaken_for:
        lines.append(f"- Easily taken for {', '.join(sorted(cause.mistaken_for))}.")
    return [*lines, f"- Source: {cause.source}", ""]


def as_text(sentence: str) -> str:
    """Markdown would take these characters for its own."""
    return re.sub(r"([<>*_\[\]`|])", r"\\\1", sentence)


if __name__ == "__main__":
    print(format_page(load_catalogue()), end="")
