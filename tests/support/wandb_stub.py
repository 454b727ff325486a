"""Minimal W&B server that accepts runs from the real client and can misbehave."""

from __future__ import annotations

import gzip
import json
import re
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Table = dict[str, Any]
Fault = Literal["500", "hang", "gone"]


@dataclass
class StubRun:
    """Data that the server received about one run."""

    config: Table = field(default_factory=dict)
    history: list[Table] = field(default_factory=list)
    summary: Table = field(default_factory=dict)
    exit_code: int | None = None


class WandbStub:
    """Server on 127.0.0.1; `runs` holds the received data by run id."""

    def __init__(self) -> None:
        self.runs: dict[str, StubRun] = {}
        self.fault: Fault | None = None
        self.gone = threading.Event()
        handler = type("Handler", (_Handler,), {"stub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def fail(self, fault: Fault) -> None:
        """From now on answers "500", never answers, or is gone: open connections are closed, new ones refused."""
        self.fault = fault
        if fault == "gone" and not self.gone.is_set():
            self.gone.set()
            self._server.shutdown()
            self._server.server_close()

    def __enter__(self) -> WandbStub:
        return self

    def __exit__(self, *_: object) -> None:
        self.fail("gone")

    # -- the three requests of a client
    def stream(self, run_id: str, message: Table) -> None:
        """Appends a `file_stream` message: rows of history, the summary, and the exit code at the end."""
        run = self.runs[run_id]
        files = message.get("files") or {}
        run.history += [json.loads(row) for row in files.get("wandb-history.jsonl", {}).get("content", [])]
        for summary in files.get("wandb-summary.json", {}).get("content", []):
            run.summary = json.loads(summary)
        if message.get("complete"):
            run.exit_code = message.get("exitcode")

    def upsert(self, variables: Table) -> Table:
        """Creates a run or changes its configuration."""
        run_id = variables["name"]
        inserted = run_id not in self.runs
        run = self.runs.setdefault(run_id, StubRun())
        run.config.update(json.loads(variables.get("config") or "{}"))
        return {"upsertBucket": {"bucket": self._bucket(run_id), "inserted": inserted}}

    def resume_status(self, variables: Table) -> Table:
        """Returns the data with which the client resumes a run; no bucket if the run does not exist."""
        run_id = variables["name"]
        model: Table = {"id": "m", "name": "p", "bucket": None, "entity": {"id": "e", "name": "me"}}
        if run_id in self.runs:
            run = self.runs[run_id]
            model["bucket"] = self._bucket(run_id) | {
                "summaryMetrics": json.dumps(run.summary),
                "config": json.dumps(run.config),
                "wandbConfig": json.dumps({"t": 1}),
                "historyTail": json.dumps([json.dumps(row) for row in run.history[-1:]]),
                "eventsTail": "[]",
                "logLineCount": 0,
                "eventsLineCount": 0,
                "tags": [],
            }
        return {"model": model}

    def _bucket(self, run_id: str) -> Table:
        return {
            "id": f"id-{run_id}",
            "name": run_id,
            "displayName": run_id,
            "sweepName": None,
            "historyLineCount": len(self.runs[run_id].history),
            "project": {"id": "p", "name": "p", "entity": {"id": "e", "name": "me"}},
        }


class _Handler(BaseHTTPRequestHandler):
    """Handles the HTTP requests of wandb-core: GraphQL, the file stream and file uploads."""

    stub: WandbStub
    protocol_version = "HTTP/1.1"

    def handle(self) -> None:
        with suppress(ConnectionError):  # a client that gave up or was killed
            super().handle()

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer({})

    def do_PUT(self) -> None:
        self._body()
        self._answer({})

    def do_POST(self) -> None:
        body = self._body()
        if self.stub.fault == "hang":
            self.stub.gone.wait()
        if self.stub.gone.is_set():
            self.close_connection = True
        elif self.stub.fault == "500":
            self._answer({"error": "out of order"}, status=500)
        elif stream := re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", self.path):
            self.stub.stream(stream[1], json.loads(body))
            self._answer({})
        elif self.path == "/graphql":
            self._answer({"data": self._graphql(json.loads(body))})
        else:
            self._answer({})

    def _graphql(self, request: Table) -> Table:
        name = re.search(r"(?:query|mutation)\s+(\w+)", request["query"])
        variables: Table = request.get("variables") or {}
        match name[1] if name else "":
            case "UpsertBucket":
                return self.stub.upsert(variables)
            case "RunResumeStatus":
                return self.stub.resume_status(variables)
            case "Viewer":
                return {"viewer": {"id": "u", "entity": "me", "username": "me", "teams": {"edges": []}}}
            case "ServerFeaturesQuery":
                return {"serverInfo": {"features": []}}
            case "OrganizationCoreWeaveOrganizationID":
                return {"entity": {"organization": None}}
            case "RunStoppedStatus":
                return {"project": {"run": {"stopped": False}}}
            case "CreateRunFiles":
                files = [{"name": f, "uploadUrl": f"{self.stub.url}/upload/{f}"} for f in variables["files"]]
                return {"createRunFiles": {"runID": "id", "uploadHeaders": [], "files": files}}
            case _:
                return {}

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            body = b"".join(iter(self._chunk, b""))
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _chunk(self) -> bytes:
        size = int(self.rfile.readline().split(b";")[0], 16)
        chunk = self.rfile.read(size)
        self.rfile.readline()
        return chunk

    def _answer(self, content: Table, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
