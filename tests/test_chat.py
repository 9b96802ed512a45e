"""`kvlab chat`: a conversation pauses, leaves, comes back and branches, and nothing that a user types loses it."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_engine import one_thread  # noqa: F401
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models
from typer.testing import CliRunner

from kvlab.arch import ModelArch
from kvlab.cli import app
from kvlab.cli.console import visible
from kvlab.cli.conversation import Conversations, CtrlC
from kvlab.machine import Curve, Link, Machine, Prefill
from kvlab.records import write_json
from kvlab.tiers import DiskTier, segment
from kvlab.tokenizer import ByteTokenizer, TextStream

ROOT = Path(__file__).resolve().parent.parent
RUN = [sys.executable, "-c", "from kvlab.cli import main; main()"]
HELLO = "Hello, this is a message that has more than three whole blocks of text."


def machine_file(folder, gb_per_s=100.0, tier="disk"):
    """A machine that computes at 1 GFLOP/s, so that a fast disk always wins and a slow one never does."""
    link = Link(Curve(((1.0, gb_per_s),)))
    slow = Curve(((1.0, 1e9),))
    machine = Machine("made up", Prefill(1e-3, slow, slow, "tiny"), {tier: {"load": link}})
    write_json(folder / "machine.json", machine.to_dict())
    return folder / "machine.json"


class Chat:
    """`kvlab chat` with a seeded model in this process, with everything that it keeps in one folder."""

    def __init__(self, folder, *options, gb_per_s=100.0):
        self.options = ["chat", "--model", "tiny", "--dtype", "fp64", "--device", "cpu", "--disk", str(folder / "kv")]
        self.options += ["--machine", str(machine_file(folder, gb_per_s)), "--max-new-tokens", "8", *options]

    def __call__(self, *lines, exit_code=0):
        """The result of typing `lines`; its `tokens` are those of each conversation in the end, by name."""
        leave, tokens = Conversations.store, {}

        def store(conversations):
            tokens.update((name, list(r.tokens)) for name, r in conversations._requests.items() if r is not None)
            leave(conversations)

        with patch.object(Conversations, "store", store):
            result = CliRunner().invoke(app, self.options, input="".join(line + "\n" for line in lines))
        result.tokens = tokens
        assert result.exit_code == exit_code, result.output + repr(result.exception)
        assert "Traceback" not in result.stderr
        return result


@pytest.fixture
def chat(tmp_path):
    return Chat(tmp_path)


def test_no_control_character_reaches_the_terminal():
    assert visible("a\tb\n\x1b[2J\x07\x9b é🙂") == "a\tb\n\ufffd[2J\ufffd\ufffd é🙂"


def statuses(result):
    """The lines behind the answers, as (name, new tokens, all tokens, from the pool, from disk, computed, choice)."""
    pattern = (
        r"\[(\S+) · (\d+) of ([\d,]+) tokens are new · TTFT \S+ \S+ · prompt: (\d+) from pool, (\d+) from disk, "
        r"(\d+) computed · (?:nothing to decide|choice: (\w+))"
    )
    return [
        (m[1], *(int(m[i].replace(",", "")) for i in range(2, 7)), m[7]) for m in re.finditer(pattern, result.stdout)
    ]


def answers(result):
    """What the model said: the lines between those of the user and the status lines."""
    return re.findall(r"^\S+> .*\n((?:(?!\[).*\n)+)\[", result.stdout, re.MULTILINE)


def test_a_message_is_answered_with_its_cost_and_the_end_of_input_leaves(chat):
    result = chat(HELLO)
    prompt = len(ByteTokenizer().chat([{"role": "user", "content": HELLO}]))
    assert statuses(result) == [("main", 8, prompt + 8, 0, 0, prompt, None)]
    assert f"main> {HELLO}" in result.stdout
    assert "cut at 8 tokens; /resume goes on" in result.stdout


def test_the_answer_is_the_models_own(chat):
    """The same ids by the model alone, without engine, pool or tiers."""
    from tiny_engine import logits_without_cache

    from kvlab.loading import load_model

    tokenizer = ByteTokenizer()
    prompt = tokens = tokenizer.encode(tokenizer.chat([{"role": "user", "content": HELLO}]))
    model = load_model("tiny", dtype="fp64")
    for _ in range(8):
        tokens = [*tokens, int(logits_without_cache(model, tokens)[-1].argmax())]
    result = chat(HELLO)
    assert result.tokens == {"main": tokens}
    assert answers(result) == [visible(tokenizer.decode(tokens[len(prompt) :])) + "\n"]


def test_offload_then_the_next_message_reloads_and_why_shows_the_arithmetic(chat):
    result = chat(HELLO, "/offload", "More.", "/why")
    first, second = statuses(result)
    blocks = (first[2] - 1) // 16  # the last token has not been computed
    assert f"{blocks} blocks" in result.stdout
    assert second[3:] == (0, 16 * blocks, first[2] + len("\nuser: More.\nassistant: ") - 16 * blocks, "reload")
    for part in ("reload ", "prefill ", "recompute ", f"= {blocks} blocks of 16 =", "made up", "it then took"):
        assert part in result.stdout


def test_a_conversation_that_left_goes_on_with_the_same_answer(tmp_path):
    stayed = Chat(tmp_path)(HELLO, "More.", "And more.")
    for folder, gb_per_s, way in (("fast", 100.0, "reload"), ("slow", 1e-9, "recompute")):
        (tmp_path / folder).mkdir()
        left = Chat(tmp_path / folder, gb_per_s=gb_per_s)(HELLO, "/offload", "More.", "/pause", "/offload", "And more.")
        assert left.tokens == stayed.tokens
        assert [status[6] for status in statuses(left)] == [None, way, way]


def test_resume_goes_on_with_an_answer_that_was_cut(tmp_path):
    at_once = Chat(tmp_path, "--max-new-tokens", "16")(HELLO)
    in_two = Chat(tmp_path)(HELLO, "/offload", "/resume")
    assert in_two.tokens == at_once.tokens
    assert statuses(in_two)[1][6] == "reload"


def test_branches_go_apart_and_share_what_they_have_in_common(chat):
    result = chat(
        HELLO, "/branch other", "To the left.", "/branch main", "To the right.", "/branch", "/branch other", "On."
    )
    main, left, right, on = statuses(result)
    assert [status[0] for status in (main, left, right, on)] == ["main", "other", "main", "other"]
    assert left[3] == right[3] == main[2] - 1, "all that was computed before comes from the pool"
    assert on[3] == left[2] - 1
    assert f"* main: {right[2]} tokens, finished" in result.stdout
    assert f"  other: {left[2]} tokens, finished" in result.stdout


def test_another_process_with_the_same_beginning_reloads_it_from_disk(tmp_path):
    first, again, other = Chat(tmp_path)(HELLO), Chat(tmp_path)(HELLO), Chat(tmp_path, "--seed", "1")(HELLO)
    prompt = statuses(first)[0][5]
    assert f"{(prompt + 7) // 16} blocks were stored" in first.stdout
    ((_, _, _, pool, disk, computed, choice),) = statuses(again)
    assert (pool, disk, computed, choice) == (0, prompt // 16 * 16, prompt % 16, "reload")
    assert again.tokens == first.tokens
    assert "0 blocks were stored" in again.stdout, "they are there already"
    assert statuses(other)[0][4] == 0, "another model gets none of it"


def test_what_is_older_than_its_time_is_computed_again(tmp_path):
    chat = Chat(tmp_path, "--ttl", "1us")
    chat(HELLO)
    assert statuses(chat(HELLO))[0][3:6] == (0, 0, statuses(Chat(tmp_path)(HELLO))[0][2] - 8)


def test_a_conversation_that_is_full_says_so_and_is_not_lost(tmp_path):
    result = Chat(tmp_path, "--pool-blocks", "8")(
        HELLO, "x" * 200, "Short.", "/new other", "Hi", "/branch main", "/branch"
    )
    assert "pool and model hold 128" in result.stderr
    assert "--pool-blocks" in result.stderr
    assert "8,192 positions" in result.stderr
    names = [(status[0], status[2]) for status in statuses(result)]
    first = names[0][1]
    assert names == [("main", first), ("main", 128 + 1), ("other", names[-1][1])], "answers fill what room is left"
    assert "* main: 129 tokens" in result.stdout
    full = Chat(tmp_path, "--pool-blocks", "8")(HELLO, "Short.", "/resume", "One more.", "/why")
    assert full.stderr.count("nothing was sent, and the conversation is kept") == 2


def test_commands_that_make_no_sense_are_one_line_each_and_the_conversation_goes_on(chat):
    result = chat(
        "/why",
        "/offload",
        "/resume",
        "/branch x",
        "/new main",
        "/new",
        "/bogus",
        "",
        " /usr is a folder",
        "/why",
        "/stats",
        "/help",
        "/quit",
        "never read",
    )
    lines = [line for line in result.stderr.splitlines() if line.startswith("kvlab: ")]
    assert len(lines) == 8
    for line, part in zip(
        lines,
        (
            "nothing was decided",
            *["nothing has been said in main"] * 3,
            "taken: main",
            "taken: main",
            "/bogus is not",
            "nothing was decided",
        ),
        strict=True,
    ):
        assert part in line
    assert len(statuses(result)) == 1
    assert "tokens     " in result.stdout
    assert "/branch NAME" in result.stdout
    assert "never read" not in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pool-blocks", "0"], "--pool-blocks is 0"),
        (["--max-new-tokens", "many"], "--max-new-tokens"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--ttl", "7"], "--ttl"),
        (["--machine", "none.json"], "no machine file"),
        (["--model", "gpt-9"], "unknown model"),
        (["--device", "mps"], "mps"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(tmp_path, options, message):
    result = Chat(tmp_path, *options)(exit_code=2)
    assert message in result.stderr
    assert len([line for line in result.stderr.splitlines() if line.startswith("kvlab: ")]) == 1


def test_a_folder_that_cannot_be_one_is_one_line(tmp_path):
    chat = Chat(tmp_path)
    (tmp_path / "kv").write_text("a file", encoding="utf-8")
    assert str(tmp_path / "kv") in chat(exit_code=2).stderr


def test_a_full_disk_costs_time_and_no_answer(tmp_path, monkeypatch):
    said = (HELLO, "/offload", "More.", "/why", "/stats")
    (tmp_path / "whole").mkdir()
    whole = Chat(tmp_path / "whole")(*said)
    chat = Chat(tmp_path)
    chat()  # the folder is there and was found writable

    def full(self, *arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(segment, "write_from", full)
    monkeypatch.setattr(DiskTier, "open", lambda self, geometry, streams: open_without_probe(self, geometry))
    result = chat(*said)
    assert result.tokens == whole.tokens
    assert statuses(result)[1][4] == 0, "nothing came from a disk that took nothing"
    assert "stores failed" in result.stdout


def open_without_probe(tier, geometry):
    tier._geometry, tier._index.extents = geometry, geometry.extents


def test_a_machine_that_does_not_know_the_disk_is_refused(tmp_path):
    chat = Chat(tmp_path)
    machine_file(tmp_path, tier="host")
    assert "no link to tier 'disk'; it knows host" in chat(exit_code=2).stderr


def test_bytes_that_are_no_text_neither_end_the_conversation_nor_reach_the_terminal(tmp_path):
    result = CliRunner().invoke(app, Chat(tmp_path).options, input=b"caf\xe9 \x1b[2J\x07\n\xf0\x9f\x99\x82\n")
    assert result.exit_code == 0, result.output
    assert len(statuses(result)) == 2
    assert "\x1b" not in result.stdout
    assert "\x07" not in result.stdout
    assert "main> caf\ufffd \ufffd[2J\ufffd" in result.stdout
    assert "main> 🙂" in result.stdout


def test_drawn_answers_repeat_with_their_seed(tmp_path):
    drawn = [Chat(tmp_path, "--temperature", "1.5")(HELLO).tokens for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != Chat(tmp_path)(HELLO).tokens


def test_without_a_machine_file_it_calibrates_once_and_remembers(tmp_path, monkeypatch):
    calls = []
    chat = Chat(tmp_path)
    known = Machine.load(tmp_path / "machine.json")

    def calibrate(model, tokens, tiers, **options):
        calls.append(list(tiers))
        from kvlab.records import machine_facts

        return Machine(machine_facts("cpu")["cpu"], known.prefill, known.links)

    monkeypatch.setattr("kvlab.experiments.calibrate.calibrate", calibrate)
    at = chat.options.index("--machine")
    del chat.options[at : at + 2]
    assert "calibrating once" in chat(HELLO).stderr
    again = chat(HELLO)
    assert "calibrating" not in again.stderr
    assert statuses(again)[0][6] == "reload"
    assert calls == [["disk"]]
    (kept,) = (tmp_path / "kv").glob("machine-*.json")
    kept.write_text("{", encoding="utf-8")
    assert "calibrating once" in chat(HELLO).stderr, "a damaged file is measured again"
    other = json.loads(kept.read_text(encoding="utf-8"))
    other["prefill"]["calibrated_shape"] = ModelArch.preset("wide-kv").shape_digest
    write_json(kept, other)
    assert "calibrating once" in chat(HELLO).stderr, "another model of the same name"
    assert not list((tmp_path / "kv").glob(".calibrate-*"))


# Ctrl-C ---------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize("twice", [False, True])
def test_ctrl_c_stops_the_answer_and_a_second_one_leaves_with_130(tmp_path, twice):
    options = Chat(tmp_path, "--max-new-tokens", "7000", "--pool-blocks", "512").options
    process = subprocess.Popen(
        [*RUN, *options], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8",
        errors="replace",
    )  # fmt: skip
    process.stdin.write(HELLO + "\n")
    process.stdin.flush()
    said = ""
    while HELLO not in said:
        said += process.stdout.readline()
    said += process.stdout.read(20)  # it is answering
    process.send_signal(signal.SIGINT)
    while "stopped; /resume goes on" not in said:
        said += process.stdout.readline()
    if twice:
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=120)
    else:
        rest, errors = process.communicate("/branch\n", timeout=120)
        assert re.search(r"\* main: [\d,]+ tokens, paused, [\d,]+ of its own in the pool", rest)
    assert process.returncode == (130 if twice else 0), errors
    assert re.search(r"[1-9]\d* blocks were stored", rest), "what was said is kept either way"
    assert "Traceback" not in errors


def test_ctrl_c_during_a_step_waits_for_its_end_and_the_third_does_not():
    before = signal.getsignal(signal.SIGINT)
    with CtrlC() as ctrl_c:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert ctrl_c.presses == 2
        with pytest.raises(SystemExit, match="130"):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


# Text as it comes -----------------------------------------------------------------------------------------------------


@given(st.text(max_size=30))
def test_characters_come_out_whole_and_as_soon_as_they_can(text):
    stream, said = TextStream(ByteTokenizer().decode), ""
    for position, byte in enumerate(text.encode(), start=1):
        said += stream.push(byte)
        whole = text.encode()[:position].decode(errors="ignore")
        assert said == whole or (whole.endswith("\ufffd") and said == whole.rstrip("\ufffd")[: len(said)])
    assert said + stream.finish() == text


@settings(max_examples=300)
@given(st.lists(st.one_of(st.integers(0, 511), st.sampled_from(list("é☃🙂".encode()))), max_size=30))
def test_whatever_ids_come_the_pieces_make_the_whole(ids):
    stream = TextStream(ByteTokenizer().decode)
    assert "".join(map(stream.push, ids)) + stream.finish() == ByteTokenizer().decode(ids)


@given(st.lists(st.integers(0, 8), max_size=12))
@example([4, 5, 6, 4, 5, 6, 1])
def test_spaces_survive_a_decoder_that_strips_the_first_one_and_spells_rare_characters_in_bytes(ids):
    """As SentencePiece models do: "▁a" is " a" but for the first, and ☃ is three tokens."""
    words = ["▁a", "▁b", "c", "▁", "<0xE2>", "<0x98>", "<0x83>", "é", "?"]
    inner = Inner(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="?", byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    whole = inner.decode([2, *ids])[1:]  # behind a "c"
    said, stream = "", TextStream(inner.decode, [2])
    for token in ids:
        said += stream.push(token)
    if "\ufffd" not in whole:  # bytes that make no character count one by one or together, by their neighbours
        assert said + stream.finish() == whole


def test_a_byte_models_next_turn_makes_the_longer_prompt():
    tokenizer = ByteTokenizer()
    first, answer, second = {"role": "user", "content": "a"}, "b", {"role": "user", "content": "c"}
    longer = tokenizer.chat([first, {"role": "assistant", "content": answer}, second])
    assert tokenizer.chat([first]) + answer + tokenizer.next_turn("c") == longer


@pytest.mark.smollm2
def test_smollm2_talks_leaves_and_comes_back(smollm2, tmp_path):
    """The real model once: its template, its end of turn, streaming, and a reload of what was said."""
    tokenizer = smollm2.tokenizer
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert tokenizer.chat(messages[:1]) + "b" + tokenizer.next_turn("c") == tokenizer.chat(messages)
    text = "It’s naïve: 你好 🙂, isn't it?\n  Yes."
    stream, ids = TextStream(tokenizer.decode), tokenizer.encode(text)
    assert "".join(map(stream.push, ids)) + stream.finish() == text

    chat = Chat(tmp_path, "--model", "smollm2-135m", "--dtype", "fp32", "--max-new-tokens", "24")
    asked = ["What is the capital of France? Answer with one word.", "And of Italy?"]
    result = chat(asked[0], "/offload", asked[1], "/offload", "/resume", "/quit")
    first, second, back = statuses(result)
    said = [answer.rstrip("\n") for answer in answers(result)[:1]]
    assert "Paris" in said[0]
    assert "<|im_" not in result.stdout
    assert "goes on" not in result.stdout, "the model ends its answers itself"
    history = [{"role": "user", "content": asked[0]}, {"role": "assistant", "content": said[0]}]
    prompt = tokenizer.chat([*history, {"role": "user", "content": asked[1]}])
    text = tokenizer.decode(result.tokens["main"])
    assert text.startswith(prompt)
    assert re.fullmatch(r"[^<]+<\|im_end\|>", text.removeprefix(prompt))
    assert second[4] == (first[2] - 1) // 16 * 16
    assert second[6] == back[6] == "reload"
    # Brought back, and no more: the conversation is as long as it was.
    assert back[4] == (second[2] - 1) // 16 * 16
    assert len(result.tokens["main"]) == second[2]
