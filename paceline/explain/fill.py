"""
Puts the values of a log into the sentences of the catalogue.

`{name}` becomes its value. A part in [ ] vanishes when a value in it is not known; outside of brackets an unknown rank reads
"a rank" and any other unknown value "n/a".
"""

from __future__ import annotations

import re
from collections.abc import Mapping

OPTIONAL = re.compile(r"\[([^\[\]]*\{[^\[\]]*)\]")
PLACE = re.compile(r"\{(\w+)\}")
MAX_VALUE_CHARS = 300
UNKNOWN = "n/a"


def fill(template: str, values: Mapping[str, str]) -> str:
    """The sentence, on one line."""
    said = OPTIONAL.sub(lambda match: match[1] if set(PLACE.findall(match[1])) <= values.keys() else "", template)
    said = said.replace("rank {rank}", "a rank") if "rank" not in values else said
    return " ".join(PLACE.sub(lambda match: values.get(match[1], UNKNOWN), said).split())


def known(values: Mapping[str, object]) -> dict[str, str]:
    """Without what is unknown, as short text on one line."""
    texts = {name: " ".join(str(value).split()) for name, value in values.items() if value is not None}
    return {name: text[:MAX_VALUE_CHARS] for name, text in texts.items() if text}
