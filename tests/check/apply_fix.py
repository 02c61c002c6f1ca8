"""Runs a check in a faulty environment, applies the fixes literally and checks again: `python apply_fix.py ID,ID FLAG...`.

Prints what the findings with these ids were and the whole answer afterwards. A fix is a flag, an export or unset, a ulimit
or a command; INSTEAD is a JSON object of what is done for an id instead.
"""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path


def check(flags: list[str]) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "paceline.cli", "check", "--json", *flags], capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 1) or not done.stdout:
        sys.exit(f"{done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    answer = json.loads(done.stdout)
    assert done.returncode == (0 if answer["ready"] else 1)
    return answer


def apply(fix: str, flags: list[str]) -> list[str]:
    """Changes this process's environment and limits, or gives back other flags."""
    words = fix.split()
    if match := re.match(r"set (\w+) to ([\d,]+)", fix):
        words = [f"--{match[1].replace('_', '-')}", match[2].replace(",", "")]
    if words[0].startswith("--"):
        words[1] = str(Path(words[1]).expanduser())
        if words[0] in flags:
            at = flags.index(words[0])
            return [*flags[:at], *words[:2], *flags[at + 2 :]]
        return [*flags, *words[:2]]
    if words[0] == "unset":
        for name in words[1:]:
            os.environ.pop(name, None)
    elif words[0] == "export":
        os.environ.update(word.split("=", 1) for word in words[1:])
    elif words[:2] == ["ulimit", "-n"]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(words[2]), int(words[2])))
    else:
        subprocess.run(["bash", "-c", f'sudo() {{ "$@"; }}; {fix}'], check=True, stdout=subprocess.DEVNULL)
    return flags


def main() -> None:
    ids, *flags = sys.argv[1:]
    instead = json.loads(os.environ.pop("INSTEAD", "{}"))
    findings = {finding["id"]: finding for finding in reversed(check(flags)["findings"])}
    before = [findings[id] for id in ids.split(",") if id in findings]
    if len(before) < len(ids.split(",")):
        sys.exit(f"not all of {ids} among {[(f['id'], f['what']) for f in findings.values()]}")
    for finding in before:
        flags = apply(instead.get(finding["id"]) or finding["fix"], flags)
    print(json.dumps({"before": before, "answer": check(flags)}))


if __name__ == "__main__":
    main()
