"""Whether the Hugging Face hub can be read from: asked of a server on this machine in its place."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from paceline.check.probes.storage_probe import probe_text
from paceline.check.ready import find_findings
from paceline.check.verdicts.rules import Intent
from paceline.data.corpus import list_files
from paceline.data.readers import read_documents
from paceline.errors import UnreadableFile
from paceline.hub import HUB, OFFLINE_NAMES, ask_hub, is_cached, missing_packages, parse_source, reach_fix


class Hub(BaseHTTPRequestHandler):
    """Knows one dataset, and never answers about another."""

    def do_HEAD(self):
        if self.path.endswith("/slow"):
            self.server.stopping.wait()
        self.send_response(200 if self.path == "/api/datasets/owner/books" else 404)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.stopping = threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in (*OFFLINE_NAMES, "http_proxy", "HTTP_PROXY", "HF_HUB_CACHE", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield server
    server.stopping.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def no_hub(hub, monkeypatch):
    """The address of a hub that is not there."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


def findings(data):
    facts = probe_text({"data": data, "cache_dir": "/nowhere"})
    return [(finding.id, finding.fix) for finding in find_findings([facts], Intent()) if "hub" in finding.id]


def test_the_hub_is_asked_about_the_dataset(hub):
    assert ask_hub("owner/books", deadline_s=60) == (200, None)
    assert ask_hub("owner/unknown", deadline_s=60) == (404, None)


def test_a_hub_that_is_silent_is_given_up_at_the_deadline(hub):
    assert ask_hub("owner/slow", deadline_s=0.2)[0] is None


def test_a_hub_that_is_not_there_says_why(no_hub):
    assert ask_hub("owner/books", deadline_s=60) == (None, "Connection refused")


def test_an_offline_variable_is_the_reason_and_its_removal_the_fix(hub, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert findings("hf:owner/books") == [("text-hub-silent", "unset HF_HUB_OFFLINE")]


def test_a_dataset_that_the_hub_has_is_ready_and_one_that_it_lacks_is_not(hub):
    assert findings("hf:owner/books:part") == []
    assert findings("hf:owner/unknown") == [("text-hub-unknown", "hf auth login")]


def test_a_dataset_in_the_cache_needs_no_hub(no_hub, tmp_path):
    copy = "save the dataset where there is a network (Dataset.save_to_disk), and give the copy: --data hf:/FOLDER"
    assert findings("hf:owner/books") == [("text-hub-silent", copy)]
    mirror = reach_fix("Connection refused", server=HUB)
    assert mirror == f"export HF_ENDPOINT=https://hf-mirror.com where the hub is blocked; or {copy}"
    (tmp_path / "hub/datasets--owner--books/snapshots/abc").mkdir(parents=True)
    assert is_cached("owner/books")
    assert findings("hf:owner/books") == []


@pytest.mark.skipif(missing_packages() != [], reason="datasets is not installed")
def test_training_without_the_hub_and_without_a_copy_is_refused_before_anything_is_imported(no_hub):
    [source] = list_files("hf:owner/books")
    with pytest.raises(
        UnreadableFile, match="owner/books is not in the cache, and http://127.0.0.1:9 is out of reach: Connection"
    ):
        next(read_documents(source, part_bytes=4096))


def test_the_parts_of_a_source_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:b").mkdir()
    for source, parts in {
        "hf:wikitext": ("wikitext", "", ""),
        "hf:wikitext:raw": ("wikitext", "raw", ""),
        "hf:wikitext:raw:test": ("wikitext", "raw", "test"),
        "hf:wikitext::test": ("wikitext", "", "test"),
        "hf:a:b": ("a:b", "", ""),
        "hf:./a:b::test": ("./a:b", "", "test"),
        "hf:": ("", "", ""),
        "hf::raw": ("", "raw", ""),
    }.items():
        assert parse_source(source) == parts
