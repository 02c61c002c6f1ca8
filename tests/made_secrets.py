"""Made secrets in the shapes in which they stand in text and JSON; and whether a part of one is shown."""

import base64
import json
import string
from random import Random

HEX, BASE62 = "0123456789abcdef", string.ascii_letters + string.digits
WORDS = ["horse", "battery", "staple", "winter", "monkey", "dragon", "sommer", "correct"]
EACH = 25  # secrets of each shape


def drawn(random: Random, letters: str, count: int) -> str:
    return "".join(random.choices(letters, k=count))


def known_key(random: Random) -> str:
    """A key whose own form shows the service."""
    prefix, letters, count = random.choice(
        [
            ("sk-", BASE62, 48),
            ("sk-proj-", BASE62 + "_-", 60),
            ("hf_", BASE62, 34),
            ("ghp_", BASE62, 36),
            ("gho_", BASE62, 36),
            ("github_pat_", BASE62 + "_", 82),
            ("glpat-", BASE62, 20),
            ("xoxb-", "0123456789-", 24),
            ("AIza", BASE62 + "_-", 35),
            ("AKIA", string.ascii_uppercase + string.digits, 16),
            ("npm_", BASE62, 36),
            ("gsk_", BASE62, 52),
            ("nvapi-", BASE62, 64),
        ]
    )
    return prefix + drawn(random, letters, count - 1) + random.choice(BASE62.upper() if prefix == "AKIA" else BASE62)


def jwt(random: Random) -> str:
    parts = (json.dumps({"alg": "HS256", "n": random.random()}), json.dumps({"sub": drawn(random, BASE62, 20)}))
    head = ".".join(base64.urlsafe_b64encode(part.encode()).decode().rstrip("=") for part in parts)
    return f"{head}.{drawn(random, BASE62 + '_-', 43)}"


def password(random: Random) -> str:
    """As people choose them: words, digits, signs."""
    word = random.choice(WORDS) + random.choice(("", "!", "#", "_")) + str(random.randrange(10, 10_000))
    return random.choice([word, word.title(), drawn(random, BASE62 + "!#$%&*+,-_.;", 14) + "x9"])


def random_key(random: Random) -> str:
    """A key that nothing but its name shows: W&B's, AWS's, a UUID, base62."""
    uuid = "-".join(drawn(random, HEX, count) for count in (8, 4, 4, 4, 12))
    return random.choice(
        [drawn(random, HEX, 40), drawn(random, BASE62 + "/+", 39) + "A", uuid, drawn(random, BASE62, 32)]
    )


def pem(random: Random) -> str:
    lines = [drawn(random, BASE62 + "+/", 64) for _ in range(6)]
    return "\n".join(lines)


NAMES = (
    "token",
    "hf_token",
    "wandb_api_key",
    "AWS_SECRET_ACCESS_KEY",
    "password",
    "clientSecret",
    "db-password",
    "apikey",
    "HF_TOKEN",
)

SHAPES = {  # name -> how a secret is made, and the text or JSON in which it stands; {} is the secret, @ a name
    "its own form, in a sentence": (known_key, "401 Client Error: the key {} is not valid"),
    "its own form, in an address": (known_key, "GET https://api.host/v1/{}/models failed"),
    "a JWT": (jwt, "sent {} to the server"),
    "a private key": (pem, "-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----\nstep 7"),
    "a line of a private key": (lambda random: drawn(random, BASE62 + "+/", 62) + "aA", "[rank0]: {}"),
    "a login in an address": (password, "fatal: https://ada:{}@git.host/x.git not found"),
    "a login without a scheme": (lambda random: password(random).replace("/", ""), "scp ada:{}@data.host.org:/x"),
    "the next word after a flag": (password, "python train.py --@ {} --lr 3"),
    "a flag with a sign": (random_key, "python train.py --@={} --lr 3"),
    "a list of words": (password, ["python", "train.py", "--@", "{}", "--lr", "3"]),
    "a printed list of words": (password, "CalledProcessError: Command '['train.py', '--@', '{}']' returned 1"),
    "the environment": (random_key, "export @={}"),
    "a dict": (password, {"lr": 0.1, "@": "{}"}),
    "nested JSON": (random_key, {"env": [{"name": "@", "value": "{}"}], "args": {"@": ["{}"]}}),
    "JSON as text": (password, '{"lr": 0.1, "@": "{}", "depth": 4}'),
    "JSON in JSON": (random_key, '{"body": "{\\"@\\": \\"{}\\"}"}'),
    "YAML": (random_key, "lr: 0.1\n@: {}\ndepth: 4"),
    "TOML": (password, "lr = 0.1\n@ = '{}'\ndepth = 4"),
    "a header": (random_key, "Authorization: Bearer {}\r\nX-Api-Key: {}\r\nCookie: session={}"),
    "a query": (random_key, "https://host/x?lr=1&@={}&X-Amz-Signature={}#top"),
    "prose": (random_key, "wandb: API key {} does not match; the token is {}"),
    "a webhook": (
        lambda random: drawn(random, BASE62, 24),
        "https://hooks.slack.com/services/T0/B1/{} https://discord.com/api/webhooks/1/{} https://ntfy.sh/{} ntfy+https://box:80/{}",
    ),
}  # fmt: skip


def filled(value, name: str, secret: str):
    """The shape with its name and its secret put in."""
    if isinstance(value, str):
        return value.replace("@", name, value.count("@") - value.count("@git") - value.count("@data")).replace(
            "{}", secret
        )
    if isinstance(value, dict):
        return {filled(key, name, secret): filled(item, name, secret) for key, item in value.items()}
    return [filled(item, name, secret) for item in value] if isinstance(value, list) else value


def leaks(secret: str, shown: str) -> list[str]:
    """The parts of a secret, of eight characters, that are shown."""
    plain = secret.replace("\n", "")
    pieces = {plain[start : start + 8] for start in range(max(1, len(plain) - 7))}
    return sorted(piece for piece in pieces if piece in shown)
