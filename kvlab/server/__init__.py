"""An OpenAI-compatible server as its client sees it: completions with times and token counts, resets, counters."""

from kvlab.server.client import Completion, Prompt, Served, Server
from kvlab.server.http import Endpoint, MissingError, RefusedError, SampleError, ServerError
from kvlab.server.metrics import Counters

__all__ = [
    "Completion",
    "Counters",
    "Endpoint",
    "MissingError",
    "Prompt",
    "RefusedError",
    "SampleError",
    "Served",
    "Server",
    "ServerError",
]
