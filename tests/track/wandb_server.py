"""
As much of a W&B server as its client needs to begin a run, go on with it and end it: on loopback, in this process.

`lines` are the rows that have come, `is_stuck` makes it refuse them.
"""

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ME = {"id": "e", "name": "me"}
PROJECT = {"id": "p", "name": "paceline", "entity": ME}


class WandbServer:
    def __init__(self):
        self.lines: list[dict[str, Any]] = []
        self.exit_codes: list[int] = []
        self.is_stuck = False
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"wandb": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    @property
    def steps(self):
        return [line["_step"] for line in self.lines]

    def graphql(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        bucket = {"id": "b", "name": variables.get("name"), "historyLineCount": len(self.lines), "config": "{}"}
        if "RunResumeStatus" in query:
            tail = {
                "historyTail": json.dumps([json.dumps(line) for line in self.lines[-1:]]),
                "eventsTail": "[]",
                "eventsLineCount": 0,
                "logLineCount": 0,
            }
            stored = {**bucket, **tail, "summaryMetrics": "{}", "wandbConfig": '{"t": 1}', "tags": []}
            return {"model": {**PROJECT, "bucket": stored if self.lines else None}}
        if "upsertBucket" in query:
            return {"upsertBucket": {"bucket": {**bucket, "project": PROJECT}, "inserted": not self.lines}}
        if "createRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        return {"viewer": {"id": "v", "username": "me", "entity": "me", "flags": "{}", "teams": {"edges": []}}}

    def take(self, stream: dict[str, Any]) -> None:
        history = stream.get("files", {}).get("wandb-history.jsonl")
        if history:
            assert history["offset"] == len(self.lines)
            self.lines += map(json.loads, history["content"])
        if stream.get("complete"):
            self.exit_codes.append(stream["exitcode"])


class Handler(BaseHTTPRequestHandler):
    wandb: WandbServer
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer({})

    def do_PUT(self):
        self.body()
        self.answer({})

    def do_POST(self):
        body = self.body()
        if self.path == "/graphql":
            asked = json.loads(body)
            self.answer({"data": self.wandb.graphql(asked["query"], asked.get("variables") or {})})
        elif self.wandb.is_stuck:
            self.answer({}, status=503)
        else:
            if self.path.endswith("/file_stream"):
                self.wandb.take(json.loads(body))
            self.answer({})

    def body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        return gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body

    def answer(self, answer: dict[str, Any], *, status: int = 200) -> None:
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass
