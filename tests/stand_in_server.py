"""A stand-in for an inference server: OpenAI's protocol, prefix caches, billed time and faults to order. Runs no model.

Time is virtual: a request moves the shared clock by what `bill` says, so that tests know the true times exactly.
"""

import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BLOCK = 16


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


@dataclass
class StandIn:
    """What the server is like. `bill(device, tier, total)` gives seconds for a prompt whose first `device` tokens are
    on the device and whose next `tier` tokens are in the tier. `faults` maps the number of a completion (from 0) to
    what happens to it; `always` happens to those without."""

    bill: object = lambda device, tier, total: 0.0
    clock: Clock = field(default_factory=Clock)
    models: tuple = ("toy",)
    owner: str = "vllm"
    root: str | None = None
    max_model_len: int = 100_000
    key: str | None = None
    usage: bool = True
    details: bool = True
    zero_details: bool = True
    metrics: bool = True
    tier: bool = True
    resets: bool = True
    reset_succeeds: bool = True
    takes_ids: bool = True
    noise_tokens: int = 0  # of other users, with each completion
    faults: dict = field(default_factory=dict)
    always: str | None = None
    retry_after: str | None = "2"
    device: set = field(default_factory=set)
    stored: set = field(default_factory=set)
    prompts: list = field(default_factory=list)
    requests: list = field(default_factory=list)  # (method, path, headers)
    counted: dict = field(default_factory=lambda: {"prompt": 0, "device": 0, "external": 0})
    lock: object = field(default_factory=threading.Lock)
    on_completion: object = lambda number: None

    def cached(self, tokens):
        """Whole blocks at the head of `tokens` that the device has, and those behind them that the tier has."""
        counts = []
        for place in (self.device, self.device | self.stored):
            n = 0
            while n + BLOCK < len(tokens) and tuple(tokens[: n + BLOCK]) in place:
                n += BLOCK
            counts.append(n)
        return counts[0], counts[1] - counts[0]

    def keep(self, tokens):
        blocks = {tuple(tokens[:n]) for n in range(BLOCK, len(tokens) + 1, BLOCK)}
        self.device |= blocks
        if self.tier:
            self.stored |= blocks


def handler(server: StandIn):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def answer(self, status, body, **headers):
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(data)

        def error(self, status, message, **headers):
            self.answer(status, {"error": {"message": message}}, **headers)

        def do_GET(self):
            self.serve("GET")

        def do_POST(self):
            self.serve("POST")

        def serve(self, method):
            server.requests.append((method, self.path, dict(self.headers)))
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            sent = self.headers.get("Authorization")
            if server.key and sent != f"Bearer {server.key}":
                return self.error(401, f"Incorrect API key provided: {sent}")
            route = {
                ("GET", "/v1/models"): self.models,
                ("GET", "/version"): lambda: self.answer(200, {"version": "1.2.3"}),
                ("GET", "/openapi.json"): self.openapi,
                ("GET", "/metrics"): self.metrics,
                ("POST", "/tokenize"): lambda: self.answer(200, {"tokens": [*range(300, 900), 300]}),
                ("POST", "/reset_prefix_cache"): self.reset,
                ("POST", "/v1/completions"): lambda: self.complete(json.loads(body)),
            }.get((method, self.path))
            return route() if route else self.error(404, f"no {self.path}")

        def models(self):
            about = {
                "object": "model",
                "owned_by": server.owner,
                "root": server.root,
                "max_model_len": server.max_model_len,
            }
            self.answer(200, {"data": [{"id": name, **about} for name in server.models]})

        def openapi(self):
            self.answer(200, {"paths": {"/reset_prefix_cache": {}} if server.resets else {"/health": {}}})

        def metrics(self):
            if not server.metrics:
                return self.error(404, "no metrics")
            labels = 'engine="0",model_name="toy"'
            return self.answer(
                200,
                "# TYPE vllm:prompt_tokens counter\n"
                f"vllm:prompt_tokens_total{{{labels}}} {float(server.counted['prompt'])}\n"
                f"vllm:prefix_cache_hits_total{{{labels}}} {float(server.counted['device'])}\n"
                f"vllm:external_prefix_cache_hits_total{{{labels}}} {float(server.counted['external'])}\n"
                f"vllm:num_requests_running{{{labels}}} 0.0\n"
                f'vllm:cache_config_info{{block_size="{BLOCK}",cache_dtype="auto",engine="0"}} 1.0\n',
            )

        def reset(self):
            if server.reset_succeeds:
                server.device.clear()
            self.answer(200, {"success": server.reset_succeeds})

        def complete(self, body):
            prompt = body["prompt"]
            with server.lock:
                number = len(server.prompts)
                server.prompts.append(prompt)
            server.on_completion(number)
            fault = server.faults.get(number, server.always)
            if isinstance(prompt, list) and not server.takes_ids:
                return self.error(422, "prompt: expected a string")
            if body["model"] not in server.models:
                return self.error(404, f"The model {body['model']} does not exist.")
            if fault == "500":
                return self.error(500, "CUDA\x1b[2J error: out of\nmemory")
            if fault == "429":
                headers = {"Retry_After": server.retry_after} if server.retry_after else {}
                return self.error(429, "slow down", **headers)
            if fault == "go away":
                self.server.shutdown()
                self.server.server_close()
            if fault in ("hang up", "go away"):
                self.close_connection = True
                return self.connection.close()
            tokens = prompt if isinstance(prompt, list) else prompt.split()
            with server.lock:
                device, tier = server.cached(tokens)
                server.clock.now_s += server.bill(device, tier, len(tokens))
                server.keep(tokens)
                server.counted["prompt"] += len(tokens) + server.noise_tokens
                server.counted["device"] += device
                server.counted["external"] += tier
            return self.stream(len(tokens), device + tier, fault)

        def stream(self, total, cached, fault):
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.close_connection = True
            if fault == "error in stream":
                return self.event({"error": {"message": "engine died"}})
            if fault != "no token":
                self.event({"choices": [{"index": 0, "text": ""}]})
            if fault == "cut":
                return None
            if fault == "not json":
                return self.wfile.write(b"data: <html>\n\n")
            usage = {"prompt_tokens": total, "completion_tokens": 1}
            if server.details and (cached or server.zero_details):
                usage["prompt_tokens_details"] = {"cached_tokens": cached}
            if server.usage:
                self.event({"choices": [], "usage": usage})
            return self.wfile.write(b": a comment\n\ndata: [DONE]\n\n")

        def event(self, data):
            self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())

    return Handler


@contextmanager
def running(server: StandIn):
    """The address of `server` while it serves on loopback."""
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler(server))
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
