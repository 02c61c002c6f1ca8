"""Run folders by hand; and a real browser for the tests of the page, skipped where none is installed."""

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from browser_pages import DESKTOP, SOON_MS, HandMade
from run_folders import Folder, serving

from paceline.rundir import lock_run

# The popups of the address bar are pages of their own in each window, a second of processor time each. The other features are those
# that playwright disables: of two such options Chromium takes the last.
NEEDLESS = (
    "WebUIOmniboxPopup", "WebUIOmniboxAimPopup", "AimEnabled", "AvoidCorsURLLoaderRestartOnRedirect",
    "AvoidUnnecessaryBeforeUnloadCheckSync", "DestroyProfileOnBrowserClose", "HttpsFirstBalancedModeAutoEnable", "HttpsUpgrades",
    "LensOverlay", "MediaRouter", "NetworkTimeServiceQuerying", "OptimizationHints", "PaintHolding", "PreconnectToSearch",
    "ThirdPartyStoragePartitioning",
)  # fmt: skip
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """For one file at a time: while playwright runs, no other event loop can, and textual has one of its own."""
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no chromium or google-chrome is installed")
    with playwright.sync_playwright() as started:
        args = ["--no-sandbox", "--disable-gpu", f"--disable-features={','.join(NEEDLESS)}"]
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=args)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving(HandMade()) as number:
        yield number


@pytest.fixture
def page(browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A page that fails the test for an error, a warning, a dialog, or a request to anywhere but this host.

    `server_ends` marks a test in which the page may ask a server that is gone."""
    context = browser.new_context(viewport=DESKTOP, color_scheme="light", reduced_motion="reduce")
    context.set_default_timeout(SOON_MS)
    opened = context.new_page()
    errors: list[str] = []
    addresses: list[str] = []
    opened.on("console", lambda line: errors.append(line.text) if line.type in ("error", "warning") else None)
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("dialog", lambda dialog: (errors.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    opened.on("request", lambda request: addresses.append(request.url))
    yield opened
    context.close()
    if request.node.get_closest_marker("server_ends"):
        errors = [error for error in errors if "ERR_CONNECTION_REFUSED" not in error]
    assert errors == []
    allowed = ("http://127.0.0.1:", "file://", "data:", "blob:")
    assert [url for url in addresses if not url.startswith(allowed)] == []


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


@pytest.fixture
def script(held):
    """A script's run of one rank, held; no attempt has begun."""
    held.run.config_toml.write_text('command = ["train.py"]\n')
    held.event("script", command=["train.py"], nproc=1)
    return held


@pytest.fixture
def held(folder):
    """The run is held, as by its supervisor."""
    fd = lock_run(folder.run)
    yield folder
    os.close(fd)
