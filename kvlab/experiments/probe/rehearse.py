"""The first requests to a server: what does it take, can it prove its hits, and does a tier survive a reset?

Knows the server as a client. What is found here decides which arms are measured and what proves them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvlab.experiments.probe.ask import SETTLE_S, Ask
from kvlab.experiments.probe.prompts import Prompts
from kvlab.server import Completion, Counters, RefusedError, Server, ServerError

__all__ = ["HIT_SHARE", "MISS_SHARE", "Proof", "Rehearsal", "rehearse"]

Progress = Callable[[str], None]
Proof = Literal["usage", "metrics", "none"]

# Hits come in whole blocks or chunks, so the last part of a prefix may be missing; a miss may share a first token.
HIT_SHARE = 0.9
MISS_SHARE = 0.02
_WORDS = 200


@dataclass(frozen=True)
class Rehearsal:
    """What a server is like. `tier` names the place that a reload comes from; None: there is no such arm, and `notes`
    say why. A prefix needs `settle_s` until that tier has it. `cold_s` and `hit_s` are of the longest prefix.
    """

    proof: Proof
    tier: str | None
    settle_s: float
    cold_s: float
    hit_s: float
    prompts: Prompts
    notes: tuple[str, ...]


def rehearse(server: Server, prompts: Prompts, words: Prompts, ask: Ask, progress: Progress) -> Rehearsal:
    """Send the longest prefix cold, again, and (with `ask.reload`) again behind resets; which also warms the server up.

    `words` are used where token ids are refused. Raises ServerError when the same prefix is computed twice, since
    then there is nothing to compare, and as `Server.complete` does.
    """
    progress(f"rehearsing with {ask.lengths[-1]:,} tokens")
    notes: list[str] = []
    try:
        prefix = prompts.fresh(ask.lengths[-1])
        cold = server.complete(prompts.prompt(prefix, ask.suffix))
    except RefusedError:
        prompts = _measured_words(server, words)
        prefix = prompts.fresh(ask.lengths[-1])
        cold = server.complete(prompts.prompt(prefix, ask.suffix))
        notes.append("the server takes no token ids: prompts are words, and lengths in tokens are approximate")
    before = server.counters()
    hit = server.complete(prompts.prompt(prefix, ask.suffix))
    proof, share = _proof(server, hit, before, ask)
    if proof == "none":
        notes.append(
            "unproven: neither the usage numbers nor the metrics tell cached tokens (vLLM: --enable-prompt-tokens-"
            "details; SGLang: --enable-cache-report), so no hit and no miss can be shown"
        )
    elif share < HIT_SHARE:
        raise ServerError(
            f"the same {ask.lengths[-1]:,} tokens again, and {share:.0%} came from a cache: prefix caching is off, its"
            " room is too small, or several replicas take turns; there is nothing to compare"
        )
    tier, settle_s = None, 0.0
    if not ask.reload:
        notes.append("no reload arm: the server's cache was not reset, so a hit is what was still on its device")
    elif server.reset_path is None:
        notes.append(
            "no reload arm: the server has no path that resets its cache (vLLM has it with VLLM_SERVER_DEV_MODE=1), so"
            " a hit is what was still on its device, and tiers behind it cannot be told apart"
        )
    elif proof == "none":
        notes.append("no reload arm: without proof, a hit behind a reset cannot be told from a miss")
    else:
        tier, settle_s, found = _find_tier(server, prompts, prefix, proof, ask)
        notes += found
    return Rehearsal(proof, tier, settle_s, cold.ttft_s, hit.ttft_s, prompts, tuple(notes))


def _measured_words(server: Server, words: Prompts) -> Prompts:
    """`words` with as many tokens a word as the server counts (4 for 3 where it counts none)."""
    told = server.complete(" ".join(str(word) for word in words.fresh(_WORDS))).prompt_tokens
    pieces = [str(piece) for piece in words.pieces]
    return Prompts(pieces, words.seed + 1, told / _WORDS if told else 4 / 3)


def _proof(server: Server, hit: Completion, before: Counters | None, ask: Ask) -> tuple[Proof, float]:
    """What tells of hits here, and the share of the prefix that it says came from a cache."""
    if hit.cached_tokens is not None:
        return "usage", hit.cached_tokens / ask.lengths[-1]
    if before is not None and hit.prompt_tokens is not None:
        added = server.counted_since(before, hit.prompt_tokens)
        if added is not None:
            return "metrics", sum(added.cached.values()) / ask.lengths[-1]
    return "none", 0.0


def _find_tier(
    server: Server, prompts: Prompts, prefix: tuple[int | str, ...], proof: Proof, ask: Ask
) -> tuple[str | None, float, list[str]]:
    """The tier that still has `prefix` behind a reset, the seconds that it took to get there, and notes."""
    share = 0.0
    for settle_s in SETTLE_S:
        server.endpoint.sleep(settle_s)
        if not server.reset():
            return None, 0.0, [f"no reload arm: {server.reset_path} did not succeed; other requests hold blocks"]
        before = server.counters()
        hit = server.complete(prompts.prompt(prefix, ask.suffix))
        added = None
        if before is not None and hit.prompt_tokens is not None:
            added = server.counted_since(before, hit.prompt_tokens)
        counted = sum(added.cached.values()) if added else 0
        share = (hit.cached_tokens or 0 if proof == "usage" else counted) / ask.lengths[-1]
        if share >= HIT_SHARE:
            places = hit.cached or (added.cached if added else {})
            away = {place: tokens for place, tokens in places.items() if place != "device" and tokens}
            return (max(away, key=lambda place: away[place]) if away else "external"), settle_s, []
    return (
        None,
        0.0,
        [
            f"no reload arm: behind {server.reset_path} {share:.0%} of the prefix came from a cache; no tier keeps what"
            " the reset drops, or it chose to compute"
        ],
    )
