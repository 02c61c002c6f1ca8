"""Prints docs/checks.md, the verdicts of paceline/check/verdicts.toml as a page: `python dev/checks_page.py > docs/checks.md`."""

from itertools import groupby

from paceline.check.ready import load_verdicts

INTRO = """\
# What `paceline check` checks

Generated from the code: `python dev/checks_page.py > docs/checks.md`.

`stop`: the launch would fail; `train`, `resume` and `run` do not start, except with `--no-check`. `warn`: it would hurt.
`note`: good to know. An unknown fact never causes a finding. `paceline check --json` prints the findings with all facts
(`check.schema.json`, `facts.schema.json`); `--verbose` shows the facts that a finding follows from.
"""
HEADINGS = {
    "config": "Config",
    "torch": "PyTorch",
    "gpu": "GPUs",
    "host": "Host",
    "storage": "Disk and text",
    "network": "Network",
    "hosts": "Several hosts",
}


def format_docs() -> str:
    """Returns the text of docs/checks.md."""
    lines = [INTRO]
    for subject, verdicts in groupby(load_verdicts(), key=lambda verdict: verdict.subject):
        lines += [f"## {HEADINGS[subject]}", ""]
        for verdict in verdicts:
            lines.append(f"### {verdict.id} ({verdict.severity})")
            lines += ["", verdict.cause, "", f"- Consequence: {verdict.why}.", f"- Fix: {verdict.fix}", ""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(format_docs(), end="")
