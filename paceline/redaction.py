"""
Takes secrets out of text and JSON before it leaves this host: reports, messages, trackers, Markdown for an issue, facts of hosts.

A secret is recognized by its own form (keys of known services, logins in addresses, webhooks, private keys, long random words) or
by the name before it, in any spelling: `--name VALUE`, NAME=VALUE, `name: value`, the key of a dict, a query parameter. A name
such as `password` hides every value, one such as `key` only what looks random, and `pad_token` none. SET stands in its place.

It errs on the side of hiding: a harmless word after `token=` is lost too. tests/test_redaction.py measures both kinds of errors.
"""

import re
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from typing import Any

SET = "set"  # in place of a secret

PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:(?s:.{0,8000}?)-----END [A-Z ]*PRIVATE KEY-----|[A-Za-z0-9+/=\s\\]*)"
)
# user:password@, or a token alone
URL_LOGIN = re.compile(r"(?<=://)(?:[^\s/?#'\"]*@|[^\s/:@'\"]+:(?!\d+/)[^\s@'\"<>]+@)")
# without a scheme
BARE_LOGIN = re.compile(r"(?<![\w:/@.+-])[\w.+-]{1,64}:(?=[^\s@/:]*\d)[^\s@/:'\"]{4,99}@(?=[\w-]+\.\w)")
LOGIN_FLAG = re.compile(r"(?<!\S)((?:-u|--user|--proxy-user)[ =]+['\"]?)[^\s:'\"]+:[^\s'\"]+")
WEBHOOK = re.compile(
    r"(?i)((?:hooks\.slack\.com|discord(?:app)?\.com/api(?:/v\d+)?/webhooks|webhook\.office\.com|chat\.googleapis\.com/v1"
    r"|api\.telegram\.org|open\.feishu\.cn/open-apis/bot|(?<![\w.])ntfy\.[\w.-]+\w(?::\d+)?"
    r"|(?:ntfy|slack|json)\+https?://[^\s/'\"]+)/)[^\s'\"<>)\]|`]+"
)
KNOWN_KEY = re.compile(
    r"(?<![A-Za-z0-9])(?:(?:hf_|gh[pousr]_|github_pat_|gl(?:pat|ptt|dt|rt|soat)-|sk-(?=[\w-]{0,99}\d)|[sr]k_(?:live|test)_|xox[abeoprs]-|xapp-"
    r"|AIza|wandb_v\d_|npm_|pypi-|nvapi-|gsk_|xai-|r8_|dckr_pat_|dop_v1_|ATATT|tskey-|shpat_|key-(?=[0-9a-f]{32})"
    r"|\d{8,10}:AA)(?:[\w-]{14,}|[\w-]{3,}…)|(?:SG|ya29)\.[\w-]{14,}(?:\.[\w-]+)?"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}(?![A-Za-z0-9])|eyJ[\w-]{10,}(?:\.[\w-]*){0,4})"
)
COOKIE = re.compile(r"(?i)((?<![\w-])(?:set-)?cookie\\*['\"]?[ \t]*[:=][ \t]*\\*['\"]?)[^\n'\"=]{0,200}=[^\n'\"]*")
# AWS's secret keys, lines of a private key; not hashes, which have no capitals
RANDOM_WORD = re.compile(r"(?<![\w.+/=@-])[A-Za-z0-9+/]{40,}={0,2}(?![\w.+/=@-])")
HEX_KEY = re.compile(r"(?=.*\d)(?=.*[a-fA-F])[0-9a-fA-F]{32,}")
STEM = re.compile(
    r"(?i)token|key|secret|passw|passphrase|pass|pwd|credential|cookie|auth|jwt|bearer|sig|login|notify|webhook|密码|密钥|口令|令牌"
)
NOT_BLANK = re.compile(r"\S*")
MAX_VALUE = 256  # characters of a value that are looked at; the whole word is taken out
NAMED_VALUE = re.compile(
    rf"""(?ix)(?:(?P<before>[?&]|(?<![\w-])--?)|(?<![\w-]))  # of a query parameter, of a flag
    (?P<name>[\w.-]{{0,60}}?(?:(?:api|access|secret|private|auth)[ ](?:key|token)|{STEM.pattern[4:]})[\w-]{{0,30}})
    (?P<sep>\\*['"]?\]?[ \t]*(?:=>|:=|==?|[:：>])[ \t]*|\\*['"]?,?[ \t]+(?:is[ ]|was[ ])?)
    (?:(?:bearer|basic|token|digest)[ ]+|[\[(](?=\\*['"]))?
    (?P<value>(?P<quote>\\*['"])(?:.{{0,{MAX_VALUE}}}?)(?P=quote)|\\*['"]\S{{0,{MAX_VALUE}}}
      |(?:(?![&,;|]\s*[\w.-]+\s*[=:])[^\s'"<>]){{1,{MAX_VALUE}}})"""
)
NAMED_PAIR = re.compile(  # {"name": "API_KEY", "value": ...} as text
    r"""((?:name|key|variable)\\*['"]: ?\\*['"]([\w.-]{1,60})\\*['"], ?\\*['"]value\\*['"]: ?\\*['"])[^'"\\]+"""
)
PLACEHOLDER = re.compile(
    r"(?i)set|none|null|nil|true|false|yes|no|auto|n/a|missing|unset|required|optional|invalid|x{3,}|[-.…*]+|your[-_].*|await|lambda|"
    r"(?-i:\$\{?[A-Z_][A-Z0-9_]*\}?|[A-Z]+_[A-Z_]+)|<[\w .-]+>|\{[\w.]*\}|%[sdr]|%\(\w+\)s|@[\w~/.-]+"
)
NUMBER = re.compile(r"[-+]?[\d,_]+(?:\.\d*)?(?:e[-+]?\d+)?[%)]?")
CODE = re.compile(r"[A-Za-z_][\w.]*[(\[].*")  # a call or an index
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\da-zA-Z_]+")
KEY_LIKE = re.compile(r"[\w+/=.~-]{16,}")
LETTER_KIND = re.compile(r"[a-z]+|[A-Z]+|\d+")

ALWAYS, EXPLICIT, RANDOM, NEVER = 3, 2, 1, 0  # how much a name says about its value
SECRETS = ("password", "passwd", "passphrase", "secret", "密码", "密钥", "口令", "令牌")  # a word's end
GLUED = re.compile(r"(?:api|access|auth|secret|private|ssh|wandb|hf|my|bot)_?(?:key|token)")
ALWAYS_NAMES = {"secrets", "passwords", "pwd", "credential", "credentials", "cookie", "cookies", "jwt", "authorization"}
EXPLICIT_NAMES = {"auth", "bearer", "webhook", "notify", "token"}
RANDOM_NAMES = {"key", "keys", "sig", "signature", "pass", "login"}
ABOUT_SECRETS = {  # after `secret` and its like: not the secret itself
    *WORD.findall("file path dir name len length policy prompt hash min max count field id manager stdin type")
}
KEYS_OF = {  # before `key` and `keys`
    *WORD.findall(
        "api access secret private auth encryption signing ssh account wandb hf openai anthropic aws gcp azure license "
        "deploy bot service master app client slack shared session registry"
    )
}
HARMLESS_KEYS = {"public", "primary", "foreign", "sort", "cache", "hash", "commit", "index", "dict", "state", "config"}
TEXT_TOKENS = {  # before `token`: of a model
    *WORD.findall(
        "pad eos bos sos eot unk unknown mask cls sep per next last first prev special stop end start begin prompt input "
        "output new each image target current extra max min num total draft unexpected text sub byte"
    )
}
PASSES = {"forward", "backward", "first", "second", "per", "single", "one"}


def redact(value: Any) -> Any:
    """Returns the same JSON, text or dataclass without secrets. A dict's keys name its values, a flag the next item of a list."""
    if isinstance(value, str):
        return redact_text(value) if len(value) > 5 else value
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{field.name: redact_named(field.name, getattr(value, field.name)) for field in fields(value)}
        )
    if isinstance(value, dict):
        named = next((value[name] for name in ("name", "key", "variable") if isinstance(value.get(name), str)), "")
        names = {key: named if key == "value" else str(key) for key in value}  # {"name": "API_KEY", "value": ...}
        return {redact(key): redact_named(names[key], item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_after(*pair) for pair in pairwise([None, *value])]
    return value


def redact_named(name: str, value: Any) -> Any:
    """Returns a value of a dict. The items of a list or dict under a secret name are secret too."""
    level = secrecy(name)
    if isinstance(value, str):
        return SET if is_secret(value, level, explicit=True) else redact(value)
    if level == ALWAYS and isinstance(value, int | float) and not isinstance(value, bool):
        return SET
    if level >= EXPLICIT and isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        hidden = {key: redact_named(name, item) for key, item in items}
        return hidden if isinstance(value, dict) else list(hidden.values())
    return redact(value)


def redact_after(before: Any, item: Any) -> Any:
    """Returns an item of a list; `before` is the item before it, which may be a flag of a command."""
    if not isinstance(item, str):
        return redact(item)
    if isinstance(before, str) and re.fullmatch(r"--?[\w.-]+", before) and not item.startswith("--"):
        if is_secret(item, secrecy(before) + (secrecy(before) == RANDOM and looks_chosen(item)), explicit=True):
            return SET
        if LOGIN_FLAG.fullmatch(f"{before} {item}"):
            return SET
    return redact(item)


def redact_text(text: str) -> str:
    """Returns text without secrets."""
    text = PRIVATE_KEY.sub(SET, text)
    text = WEBHOOK.sub(rf"\g<1>{SET}", text)
    text = URL_LOGIN.sub(f"{SET}@", text)
    text = BARE_LOGIN.sub(f"{SET}@", text)
    text = LOGIN_FLAG.sub(rf"\g<1>{SET}", text)
    text = KNOWN_KEY.sub(SET, text)
    text = COOKIE.sub(rf"\g<1>{SET}", text)
    text = NAMED_PAIR.sub(lambda match: match[1] + SET if secrecy(match[2]) else match[0], text)
    text = RANDOM_WORD.sub(lambda match: SET if is_base64(match[0]) else match[0], text)
    return "\n".join(redact_line(line) if STEM.search(line) else line for line in text.split("\n"))


def redact_line(line: str) -> str:
    """Returns a line with SET in place of the values after secret names."""
    parts, start = [], 0
    while match := NAMED_VALUE.search(line, start):
        replacement, end = hidden_value(match), match.end()
        if replacement and end - match.start("value") >= MAX_VALUE:
            end = NOT_BLANK.match(line, end).end()  # type: ignore[union-attr]
        # a harmless value may itself be a name with a value: `key: token=...`
        parts += [line[start : match.start("value")], replacement]
        start = end if replacement else match.start("value")
    return "".join(parts) + line[start:]


def hidden_value(match: re.Match[str]) -> str:
    """Returns what stands in place of the value after a name; empty where the value is harmless."""
    before, name, sep, value = match["before"] or "", match["name"], match["sep"], match["value"]
    opening = re.match(r"\\*['\"]?", value)[0]  # type: ignore[index]
    content = value.strip("\\'\"") if opening else value.rstrip(",;.)}]|`")
    content = content.partition("#")[0] if before in ("?", "&") else content
    is_prose = not before.startswith("-") and not re.search(r"[=:：>]", sep)  # the key VALUE
    explicit = bool((before and ":" not in sep) or opening or sep.strip(" \t:："))
    level = secrecy(name)
    level += before != "" and level == RANDOM and looks_chosen(content)
    if is_prose or (not explicit and name.lower() == "secret"):  # the address is a secret: it ...
        level = min(level, RANDOM)
    if not is_secret(content, level, explicit=explicit):
        return ""
    ending = opening if len(value) > len(opening) and value.endswith(opening) else ""
    return f"{opening}{SET}{ending}" if opening else SET + value[len(content) :]


def is_secret(value: str, level: int, *, explicit: bool) -> bool:
    """Whether a value after a name is secret. explicit: written as a setting, not as prose."""
    if level == NEVER or not value or PLACEHOLDER.fullmatch(value):
        return False
    if level == ALWAYS:
        return True
    if NUMBER.fullmatch(value) or CODE.fullmatch(value):
        return False
    return (
        looks_random(value, share=6)
        if level == RANDOM
        else explicit or looks_chosen(value) or looks_random(value, share=6)
    )


def looks_chosen(value: str) -> bool:
    """Whether a word may be a password that a person or a program has chosen: letters and digits, and no path."""
    return len(value) >= 6 and value[0] not in "/~." and bool(re.search(r"\d", value) and re.search(r"[A-Za-z]", value))


def looks_random(value: str, *, share: int) -> bool:
    """Whether a long word is hexadecimal, or changes between small letters, capitals and digits at every `share`-th character."""
    if not KEY_LIKE.fullmatch(value):
        return False
    share = 3 if "/" in value or not re.search(r"\d", value) else share  # paths and names change less often than base64
    return bool(HEX_KEY.fullmatch(value)) or len(LETTER_KIND.findall(value)) > len(value) / share


def is_base64(word: str) -> bool:
    """Whether a long word is random in letters of both cases and digits; hashes have no capitals."""
    return len({char.isdigit() + 2 * char.isupper() for char in word if char.isalnum()}) == 3 and looks_random(
        word, share=3
    )


def secrecy(name: str) -> int:
    """Returns how much the last words of a name say about its value: ALWAYS, EXPLICIT, RANDOM or NEVER secret."""
    words = [word.lower() for word in WORD.findall(name) if not word.isdigit()]
    while len(words) > 1 and words[-1] in ("value", "str", "string", "plain", "url", "env"):
        words.pop()
    if not words:
        return NEVER
    *before, last = words
    qualifiers = set(before)
    if last not in ABOUT_SECRETS and (last in ALWAYS_NAMES or any(word.endswith(SECRETS) for word in words)):
        return ALWAYS
    if last in ("token", "tokens"):
        is_access = bool(qualifiers & {"api", "access", "auth", "refresh", "bot"})
        return EXPLICIT if is_access or (last == "token" and not qualifiers & TEXT_TOKENS) else NEVER
    if last in ("key", "keys"):
        return EXPLICIT if qualifiers & KEYS_OF else NEVER if qualifiers & HARMLESS_KEYS else RANDOM
    if last == "pass" and qualifiers:
        return NEVER if qualifiers & PASSES else EXPLICIT
    return EXPLICIT if last in EXPLICIT_NAMES or GLUED.fullmatch(last) else RANDOM if last in RANDOM_NAMES else NEVER
