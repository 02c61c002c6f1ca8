"""What the tests of the page in a browser share: hand-made runs, the way to a page, and a picture of it for a look."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from run_folders import FOLDER, TOKEN
from snapshots import LOG_TEXT, STATES

from paceline.explain.lines import strip_escapes
from paceline.watch.snapshot import Snapshot

PICTURES = Path(__file__).parents[2] / "build" / "screenshots"
EVIL = "<img src=x onerror=alert(1)><script>alert(1)</script>"
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
SOON_MS = 120_000  # for what takes a tenth of a second on a quiet machine


class HandMade:
    """A shelf of the hand-made snapshots, one for each state."""

    def glimpse(self, name: str) -> None:
        return None

    def snapshot(self, name: str) -> Snapshot:
        now = time.time() // 20 * 20  # the page compares with the clock; twenty seconds are not yet silence
        return replace(STATES[name](now), name=name)

    def runs(self) -> list[dict[str, Any]]:
        names = (
            "name",
            "state",
            "step",
            "num_steps",
            "loss",
            "val_bpb",
            "tok_per_sec",
            "command",
            "eval_tokens",
            "eval_text",
        )
        return [
            {key: getattr(snapshot, key) for key in names} | {"time": None, "tags": [], "note": ""}
            for snapshot in map(self.snapshot, STATES)
        ]

    def settings(self) -> dict[str, dict[str, Any]]:
        return {name: self.about(name)["config"] for name in STATES}

    def about(self, name: str) -> dict[str, Any]:
        config = {"name": name, "matrix_lr": 0.1 if name == "training" else 0.05, "depth": 12}
        return {"config": config, "facts": [], "samples": [{"name": "step 001000", "text": EVIL}]}

    def log_part(
        self, name: str, *, attempt: int, rank: int | None, log_name: str = "", **place: int
    ) -> dict[str, Any]:
        text = LOG_TEXT + EVIL + "\n" + strip_escapes("\x1b[31mTraceback\x1b[0m\n")
        return {"text": text, "from": 0, "to": len(text), "whole": True}

    def log_hits(self, name: str, text: str, *, attempt: int, rank: int | None, log_name: str = "") -> dict[str, Any]:
        return {"hits": [[3, f"a line with {text}"]], "all": True}


def go(page: Any, port: int, where: str = "/") -> None:
    page.goto(f"http://127.0.0.1:{port}{FOLDER}?token={TOKEN}#{where}")
    page.wait_for_selector("main:not(.waiting) h1")
    page.wait_for_function("() => !app.page.run || app.page.run.head.name")  # the whole run, not only its last figures


def picture(page: Any, name: str) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}.png", full_page=True)


def overflow(page: Any) -> int:
    return page.evaluate("document.documentElement.scrollWidth - innerWidth")
