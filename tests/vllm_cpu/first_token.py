"""How near the connector's choices come to the better way: first-token times of both ways and of its own, interleaved.

    python tests/vllm_cpu/first_token.py --out vllm.json [--rounds 7]

Four prompt lengths × the disk as it is and one that takes twice as long as computing. Ratios are medians over whole
rounds, own choice ÷ better way, with a bootstrap interval (seven rounds or more). Needs what `.ci/run` installs.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from engine import BLOCK, LENGTHS
from hf_folder import write_hf_folder
from server import Server, fresh_learner
from tokenizers import Tokenizer

from kvlab.bridges.judge import Judge
from kvlab.bridges.learning import CALIBRATING
from kvlab.loading import default_text
from kvlab.records import bootstrap_interval, median, write_json
from kvlab.weights import fetch


def first_token_s(server: Server, prompt: list[int]) -> float:
    """Seconds from request to first token, the server's own cache being empty."""
    assert server.llm.reset_prefix_cache()
    began_s = time.perf_counter()
    server.ask(prompt, new_tokens=1)
    return time.perf_counter() - began_s


def measure(server: Server, prompts: dict[int, list[int]], rounds: int) -> list[dict]:
    """One row for each length."""
    own = server.judge
    ways = {
        "reload": Judge(None, block_size=BLOCK),
        "recompute": Judge(None, block_size=BLOCK, max_load_tokens=0),
        "verdict": own,
    }
    samples = {(length, way): [] for length in prompts for way in ways}
    choices = {length: [] for length in prompts}
    for _ in range(rounds):
        for length, prompt in prompts.items():
            for way, judge in ways.items():
                server.half.judge = judge
                samples[length, way].append(first_token_s(server, prompt))
                if way == "verdict":
                    choices[length].append("reload" if ": reload: " in server.said[0] else "recompute")
    server.half.judge = own
    rows = []
    for length in prompts:
        times = {way: np.asarray(samples[length, way]) for way in ways}
        better = min(("reload", "recompute"), key=lambda way, times=times: median(times[way]))

        def ratio(picked: np.ndarray, times=times, better=better) -> float:
            return float(np.median(times["verdict"][picked]) / np.median(times[better][picked]))

        rows.append(
            {
                "tokens": length,
                "better": better,
                "chosen": {way: choices[length].count(way) for way in ("reload", "recompute")},
                "seconds": {way: list(map(float, times[way])) for way in ways},
                "of_better": ratio(np.arange(rounds)),
                "interval": bootstrap_interval(ratio, rounds),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON with every sample")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", type=Path, help="a folder for SmolLM2 as vLLM reads it, kept (default: temporary)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = write_hf_folder(fetch("smollm2-135m", quiet=True), options.model or Path(scratch, "model"))
        ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(default_text()).ids
        prompts = {length: ids[40 * i : 40 * i + length] for i, length in enumerate(LENGTHS)}
        teach = [ids[2000 + 300 * i :][:273] for i in range(CALIBRATING)]
        server = Server(model, Path(scratch, "store"))
        for prompt in [*prompts.values(), *prompts.values()]:
            server.ask(prompt)  # stores, then calibrates
        report = {"disk": measure(server, prompts, options.rounds)}
        server.judge.learner = learner = fresh_learner(server)
        for prompt in teach:
            server.ask(prompt)
        computing_s = learner.machine.prefill_s(learner.arch, 0, LENGTHS[-1])
        server.disk.seconds_per_byte = 2 * computing_s / learner.load_bytes(LENGTHS[-1] - 17)
        for prompt in teach:
            server.ask(prompt)
        report["a disk at half the speed of computing"] = measure(server, prompts, options.rounds)
        write_json(options.out, report)
    for disk, rows in report.items():
        print(f"{disk}\n  tokens     reload  recompute    verdict  chose            of the better [95 %]")
        for row in rows:
            reload_s, recompute_s, verdict_s = (median(row["seconds"][way]) for way in row["seconds"])
            interval = "[{:.2f}, {:.2f}]".format(*row["interval"]) if row["interval"] else "(too few rounds)"
            chose = ", ".join(f"{way} {count}" for way, count in row["chosen"].items() if count)
            print(
                f"  {row['tokens']:6} {reload_s:8.3f} s {recompute_s:8.3f} s {verdict_s:8.3f} s  {chose:15}"
                f"  {row['of_better']:.2f} × {row['better']} {interval}"
            )


if __name__ == "__main__":
    main()
