"""
docs/checks.md from the table of verdicts: `python -m paceline.check.catalogue > docs/checks.md`; a test says whether it is
up to date.
"""

from paceline.check.verdicts import SUBJECTS

INTRO = """\
# What `paceline check` looks for

Made from the code: `python -m paceline.check.catalogue > docs/checks.md`.

`stop`: the launch would fail; `train`, `resume` and `run` do not start, unless `--no-check` is given. `warn`: it would hurt.
`note`: good to know. What is not known never counts as wrong. `paceline check --json` has the same with all facts
(`check.schema.json`, `facts.schema.json`); `--verbose` shows the facts that a finding follows from.
"""


def format_catalogue() -> str:
    lines = [INTRO]
    for title, verdicts in SUBJECTS:
        lines += [f"## {title}", ""]
        for verdict in verdicts:
            lines.append(f"### {verdict.id} ({verdict.severity})")
            lines += ["", verdict.cause, "", f"- What comes of it: {verdict.why}.", f"- Fix: {verdict.fix}", ""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(format_catalogue(), end="")
