"""Rank 1 fetches a file from a server that answers every request with one status."""

import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from urllib.request import urlopen

import requests
from job import start, train


class Refusal(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(int(sys.argv[1]))

    def log_message(self, *_):
        pass


rank, _ = start()
for step in train():
    if rank == 1 and step == 3:
        server = HTTPServer(("127.0.0.1", 0), Refusal)
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/corpus/part_{step:05d}.bin"
        if sys.argv[2] == "urllib":
            urlopen(url)
        requests.get(url, timeout=20).raise_for_status()
