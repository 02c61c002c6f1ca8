"""
The Hugging Face hub as a source of text: which packages it needs, whether a dataset was downloaded before, whether the hub answers.

Nothing of the hub's packages is imported here: they take seconds, and without a network they try for half a minute.
"""

import os
import shlex
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import PacelineError, UnreadableFile, expand_home
from paceline.units import format_list

if TYPE_CHECKING:
    from datasets import Dataset

PREFIX = "hf:"  # of a source: hf:NAME[:CONFIG[:SPLIT]]
PACKAGES = ("datasets", "pyarrow")
OFFLINE_NAMES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
DEADLINE_S = 3.0
HUB = "https://huggingface.co"
MIRROR = "https://hf-mirror.com"  # where the hub itself is blocked


def is_local(source: str) -> bool:
    """Returns whether the source of a text is a path."""
    return source != "builtin" and not source.startswith(PREFIX)


def missing_packages() -> list[str]:
    """Returns the packages that reading a dataset needs and that are not installed."""
    return [name for name in PACKAGES if find_spec(name) is None]


def parse_source(source: str) -> tuple[str, str, str]:
    """Returns name, config and split of a source hf:NAME[:CONFIG[:SPLIT]], where those that are left out are empty.

    The name may be a local folder, which may have colons. One that save_to_disk wrote has no configs: a single word is its split.
    """
    words = source.removeprefix(PREFIX).split(":")
    ends = range(len(words), max(0, len(words) - 3), -1)
    names = {":".join(words[:end]): words[end:] for end in ends}
    local = next((name for name in names if name and expand_home(name).exists()), None)
    name = local or ":".join(words[: max(1, len(words) - 2)])
    config, split = [*names[name], "", ""][:2]
    if local and not split and is_saved_dataset(expand_home(local)):
        config, split = "", config
    return name, config, split


def missing_extra(name: str) -> PacelineError:
    """Returns the error of a text that packages read which are not installed."""
    return PacelineError(
        f"{name} needs the packages datasets and pyarrow, which are not installed",
        fix=f"pip install {' '.join(PACKAGES)}",
    )


def is_saved_dataset(folder: Path) -> bool:
    """Returns whether Dataset.save_to_disk has written the folder."""
    return (folder / "state.json").exists() or (folder / "dataset_dict.json").exists()


def load_split(name: str, *, config: str, split: str) -> "Dataset":
    """Loads one split of a local folder that save_to_disk has written, of a local folder of data files, or of a dataset of the hub.

    config: "" for the only one. split: "" for a dataset without splits. Raises PacelineError.
    """
    folder = Path(name)
    if not missing_packages() and not folder.exists():
        check_hub(name)
    try:
        import datasets
    except ImportError as error:
        raise missing_extra(f"{PREFIX}{name}") from error
    try:
        loaded = (
            datasets.load_from_disk(name) if is_saved_dataset(folder) else datasets.load_dataset(name, config or None)
        )
    except Exception as error:  # datasets raises whatever its parts raise: hub, network, pandas, arrow
        fix = f"check the name and the network: https://huggingface.co/datasets/{name}"
        is_no_config = "BuilderConfig" in str(error)  # "BuilderConfig 'x' not found"
        if folder.is_dir() and is_no_config:
            fix = f"if `{config}` is a split, give {shlex.quote(f'{PREFIX}{name}::{config}')}"
        elif folder.is_dir():
            fix = "write the folder again with Dataset.save_to_disk, or put parquet files in it"
        elif is_no_config or "onfig name" in str(error):  # "Config name is missing"
            fix = f"name the configuration: {PREFIX}{name}:CONFIG, one of those listed on its page"
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UnreadableFile(f"dataset {name} cannot be loaded: {line}", fix=fix) from error
    if isinstance(loaded, datasets.Dataset):
        if split:
            raise UnreadableFile(
                f"dataset {name} has no splits, and so no `{split}`", fix=f"give {shlex.quote(PREFIX + name)}"
            )
        return loaded
    if split not in loaded:
        names = [shlex.quote(f"{PREFIX}{name}:{config}:{other}") for other in loaded]
        raise UnreadableFile(
            f"dataset {name} has no split `{split}`; it has {', '.join(loaded) or 'none'}",
            fix=f"name a split that is there: {format_list(names, limit=3)}" if names else "give another dataset",
        )
    return loaded[split]


def is_cached(name: str) -> bool:
    """Returns whether a dataset of the hub was downloaded before."""
    home = expand_home(os.environ.get("HF_HOME") or "~/.cache/huggingface")
    snapshots = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"datasets--{name.replace('/', '--')}/snapshots"
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets") / name.replace("/", "___")
    try:
        return any(snapshots.iterdir()) or prepared.is_dir()
    except OSError:
        return prepared.is_dir()


def endpoint() -> str:
    """Returns the address of the hub."""
    return (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")


def ask_hub(name: str, *, deadline_s: float = DEADLINE_S) -> tuple[int | None, str | None]:
    """Returns the HTTP status with which the hub answers about a dataset, or None and why there is no answer."""
    for variable in OFFLINE_NAMES:
        if os.environ.get(variable, "0").upper() in ("1", "TRUE", "YES", "ON"):
            return None, f"{variable} is set"
    result: list[tuple[int | None, str | None]] = [(None, f"no answer in {deadline_s:g} s")]
    # a thread, since looking up a name has a deadline of its own, far behind this one
    thread = threading.Thread(target=lambda: result.insert(0, _request(name, deadline_s)), daemon=True)
    thread.start()
    thread.join(deadline_s)
    return result[0]


def reach_fix(error: str, *, server: str) -> str:
    """Returns what may bring a dataset into reach. error: why the server gave no answer."""
    name = error.partition(" ")[0]
    if name in OFFLINE_NAMES:
        return f"unset {name}"
    copy = "save the dataset where there is a network (Dataset.save_to_disk), and give the copy: --data hf:/FOLDER"
    return copy if server != HUB else f"export HF_ENDPOINT={MIRROR} where the hub is blocked; or {copy}"


def check_hub(name: str) -> None:
    """Raises UnreadableFile at once where the hub does not answer and has nothing in the cache; with a copy there, that is read."""
    status, error = ask_hub(name)
    if status is not None:
        return
    if not is_cached(name):
        raise UnreadableFile(
            f"dataset {name} is not in the cache, and {endpoint()} is out of reach: {error}",
            fix=reach_fix(error or "", server=endpoint()),
        )
    print(f"note    {endpoint()} is out of reach ({error}): reading {name} from the cache", file=sys.stderr)
    os.environ.update(dict.fromkeys(OFFLINE_NAMES, "1"))  # otherwise datasets tries for half a minute


def _request(name: str, deadline_s: float) -> tuple[int | None, str | None]:
    from urllib.error import HTTPError, URLError  # here, since they bring ssl, which only a dataset of the hub needs
    from urllib.request import Request, urlopen

    try:
        with urlopen(Request(f"{endpoint()}/api/datasets/{name}", method="HEAD"), timeout=deadline_s) as response:
            return int(response.status), None
    except HTTPError as error:
        return error.code, None
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        return None, str(getattr(reason, "strerror", None) or reason)
