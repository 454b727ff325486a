"""Minimal Hugging Face hub that accepts commits of small files from the real client."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class HubStub:
    """Server on 127.0.0.1; `files` holds the committed files by repository and name. Only `token` may write."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.made: dict[str, Any] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.messages: list[str] = []

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Serves within the context; yields the address."""
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
                allowed = self.headers.get("Authorization") == f"Bearer {stub.token}"
                code, answer = stub.answer(self.path, body) if allowed else (401, {"error": "Invalid credentials"})
                said = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization', 'me')}/{asked['name']}"
            self.made[name] = asked
            return 200, {"url": f"http://127.0.0.1/{name}", "name": name}
        repository, _, action = path.removeprefix("/api/models/").rpartition("/main")[0].rpartition("/")
        if action == "preupload":
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return 200, {"files": files}
        if action == "commit":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "header":
                    self.messages.append(line["value"]["summary"])
                else:
                    found = self.files.setdefault(repository, {})
                    found[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return 200, {"commitUrl": f"http://127.0.0.1/{repository}/commit/1", "commitOid": "1", "success": True}
        return 404, {"error": f"no {path}"}
