"""A small OpenAI-compatible server on loopback, for tests: it serves a GPT, or replays recorded replies.

with openai_server(app) as url: ...            app(path, body) -> (status, reply), or None to reset the connection
ServedPolicy(model, codec)                      an app that samples from a GPT and loads weights from folders
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.files import open_container
from headrace.order import draws
from headrace.train.policy import logprobs_of

App = Callable[[str, dict[str, Any]], tuple[int, Any] | None]


@contextmanager
def openai_server(app: App) -> Iterator[str]:
    """Serve an app while the context is entered; its address, without a path."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = app(self.path, body)
            if answer is None:
                # With a linger of 0 seconds close() sends RST: what a crashed server looks like.
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
                self.connection.close()
                return
            status, reply = answer
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            return None

        def finish(self) -> None:
            if self.connection.fileno() >= 0:
                super().finish()

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 256

        def shutdown_request(self, request: Any) -> None:
            if request.fileno() >= 0:
                super().shutdown_request(request)

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class ServedPolicy:
    """Samples from a GPT, one request at a time; `takes_weights=False` answers 200 and changes nothing, as a faulty reload does."""

    def __init__(self, model: Any, codec: Any, *, takes_weights: bool = True) -> None:
        self.model, self.codec, self.takes_weights = model, codec, takes_weights
        self.asked: list[str] = []
        self._lock = threading.Lock()

    def __call__(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        with self._lock:
            self.asked.append("probe" if "prompt_logprobs" in body else path)
            if path == "/collective_rpc":
                if self.takes_weights:
                    self._load(Path(body["args"][0]))
                return 200, {"results": [None]}
            return 200, self._completed(body)

    def _load(self, folder: Path) -> None:
        arrays = open_container(folder / "model.safetensors").arrays
        self.model.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})

    def _completed(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, said, logprobs = list(body["prompt"]), [], []
        prompt_logprobs = None
        if body.get("prompt_logprobs") is not None:
            found = logprobs_of(self.model, np.array(ids, np.int32))
            prompt_logprobs = [None, *({str(i): {"logprob": float(p)}} for i, p in zip(ids[1:], found, strict=True))]
        uniform = draws(body.get("seed", 0), body["max_tokens"]).astype(np.float64) / 2.0**64
        with torch.no_grad():
            for draw in uniform:
                row = torch.tensor([ids])
                last = self.model(row, torch.arange(len(ids))[None])[0, -1].double().log_softmax(-1)
                token = int(last.argmax()) if body["temperature"] == 0 else int((last.exp().cumsum(-1) < draw).sum())
                token = min(token, self.codec.vocab_size - 1)
                said.append(token)
                logprobs.append(float(last[token]))
                ids.append(token)
                if token == self.codec.end_id:
                    break
        choice = {
            "index": 0, "text": self.codec.decode(np.array(said)), "token_ids": said, "prompt_token_ids": body["prompt"],
            "logprobs": {"token_logprobs": logprobs, "tokens": [str(t) for t in said]}, "prompt_logprobs": prompt_logprobs, "finish_reason": "length",
        }  # fmt: skip
        return {"id": "cmpl-1", "object": "text_completion", "model": body["model"], "choices": [choice]}
