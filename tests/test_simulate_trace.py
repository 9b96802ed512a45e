"""Traces are read as they are, and what is wrong with a line is said with its number."""

import json
from itertools import pairwise

import pytest

from kvlab.simulate import SAMPLE, Session, Turn, read_trace


def request(at_ms=0, tokens=700, output=5, ids=(0, 1)):
    return {"timestamp": at_ms, "input_length": tokens, "output_length": output, "hash_ids": list(ids)}


@pytest.fixture
def jsonl(tmp_path):
    def write(*rows):
        path = tmp_path / "trace.jsonl"
        path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def agents(tmp_path):
    def write(*rows, header="session,gap_s,input_tokens,output_tokens,prefix,prefix_tokens"):
        path = tmp_path / "agents.csv"
        path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
        return path

    return write


def test_the_sample_is_the_first_thousand_requests_of_mooncake():
    """Counted with a JSON parser and a set, once: 13,732,944 prompt tokens, 349,357 of output, 21,514 blocks."""
    trace = read_trace(SAMPLE)
    turns = [turn for session in trace.sessions for turn in session.turns]
    assert (trace.requests, trace.skipped) == (1000, 0)
    assert sum(turn.input_tokens for turn in turns) == 13_732_944
    assert sum(turn.output_tokens for turn in turns) == 349_357
    assert len({block for session in trace.sessions for block in session.blocks}) == 21_514
    assert all(a.turns[0].gap_s <= b.turns[0].gap_s for a, b in pairwise(trace.sessions))


def test_a_request_is_a_session_of_one_turn(jsonl):
    trace = read_trace(jsonl(request(), request(1500, 1024, 7, (0, 2))))
    first, second = trace.sessions
    assert first.turns == (Turn(0.0, 700, 5),)
    assert second.turns == (Turn(1.5, 1024, 7),)
    assert second.tokens == 1031
    # Block 0 is shared; the second one is full in one of them only, and output is nobody else's.
    assert first.hashes(0, 1, 512) == second.hashes(0, 1, 512)
    names = [*first.hashes(1, 3, 512), *second.hashes(1, 3, 512)]
    assert len(set(names)) == 4
    # In smaller blocks, those that lie in the prompt whole have the trace's names.
    assert first.hashes(0, 5, 128) == [*first.hashes(0, 4, 128), b"trace 1 0"]
    assert first.hashes(5, 6, 128)[0].startswith(b"session 1 ")
    assert trace.at_rate(2).sessions[1].turns == (Turn(0.75, 1024, 7),)
    for rate in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="expected a positive factor"):
            trace.at_rate(rate)


def test_a_trace_repeated_goes_on_at_its_pace_with_other_blocks(jsonl):
    trace = read_trace(jsonl(request(1000), request(4000, 1024, 7, (0, 2))))
    twice = trace.repeated(2)
    assert [session.turns[0].gap_s for session in twice.sessions] == [1.0, 4.0, 7.0, 10.0]
    first, second, third, fourth = (session.hashes(0, 1, 512) for session in twice.sessions)
    assert first == second != third == fourth
    same = trace.repeated(2, same_blocks=True)
    assert {session.hashes(0, 1, 512)[0] for session in same.sessions} == {first[0]}
    names = [name for session in same.sessions for name in session.hashes(1, 2, 512)]
    assert len(set(names)) == 3, "what is a session's own stays its own"


BAD_LINES = {
    "not JSON": ("{", "not JSON"),
    "not an object": ("[1]", "no timestamp, input_length, output_length, hash_ids"),
    "a key is missing": ({"timestamp": 0, "input_length": 3, "hash_ids": [1]}, "no output_length"),
    "time goes backwards": (request(500), "timestamp 500 is before 1000"),
    "a negative instant": (request(-3), "timestamp is -3"),
    "no instant": (request(float("nan")), "timestamp is nan"),
    "a negative length": (request(2000, -700), "input_length is -700; expected a whole number of at least 1"),
    "a negative output": (request(2000, output=-1), "output_length is -1"),
    "a broken length": (request(2000, 700.5), "input_length is 700.5"),
    "a length in words": (request(2000, "many"), "input_length is 'many'; expected a whole number"),
    "too few ids": (request(2000, 1025), "2 hash_ids for 1025 tokens; expected 3, one for each 512"),
    "too many ids": (request(2000, 512), "2 hash_ids for 512 tokens; expected 1"),
    "ids that are no ids": (request(2000, ids=("a", "b")), "hash_ids is not a list of whole numbers"),
    "ids out of range": (request(2000, ids=(0, 2**63)), "hash_ids is not a list of whole numbers"),
    "an id in two places": (request(2000, ids=(1, 0)), "block 1 follows -1 here and 0 before"),
    "an id twice": (request(2000, ids=(7, 7)), "block 7 follows 7 here and -1 before"),
}


@pytest.mark.parametrize(("line", "words"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_an_error_with_its_number_or_is_counted(jsonl, line, words):
    path = jsonl(request(), request(1000), line, request(3000))
    with pytest.raises(ValueError) as error:
        read_trace(path)
    assert str(error.value).startswith("trace.jsonl, line 3: ")
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    trace = read_trace(path, skip_bad=True)
    assert (trace.requests, trace.skipped) == (3, 1)


def test_what_is_no_trace_at_all(jsonl, tmp_path):
    with pytest.raises(ValueError, match=r"no request that could be read .2 lines"):
        read_trace(jsonl("x", "y"), skip_bad=True)
    with pytest.raises(ValueError, match=r"neither a .jsonl or .csv file nor mooncake-1k"):
        read_trace("mooncake-2k")
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "bits.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_trace(tmp_path / "bits.jsonl")


def test_agents_have_turns_gaps_and_preambles_in_common(agents):
    trace = read_trace(agents("b,2,1500,10,coder,1100", "a,1,2000,10,coder,2000", "b,30,100,20,,", "c,4,50,5,other,20"))
    a, b, c = trace.sessions  # by arrival
    assert b.turns == (Turn(2.0, 1500, 10), Turn(30.0, 100, 20))
    assert (trace.requests, trace.least_gap_s) == (4, 30.0)
    assert a.hashes(0, 2, 512) == b.hashes(0, 2, 512)
    assert a.hashes(2, 3, 512) != b.hashes(2, 3, 512), "the third block of b is only partly preamble"
    assert b.hashes(8, 9, 128)[0].startswith(b"session")
    assert a.hashes(7, 8, 128) == b.hashes(7, 8, 128)
    assert set(c.hashes(0, 1, 16)).isdisjoint(a.hashes(0, 1, 16))
    assert read_trace(agents("a,0,5,1", header="session,gap_s,input_tokens,output_tokens")).sessions == (
        Session(0, (Turn(0.0, 5, 1),), a.blocks[:0], 0),
    )


BAD_ROWS = {
    "no gap": ("a,soon,5,1,,", "gap_s is 'soon'"),
    "time goes backwards": ("a,-1,5,1,,", "gap_s is -1; expected 0 or more seconds"),
    "endless": ("a,inf,5,1,,", "gap_s is inf"),
    "no tokens": ("a,1,0,1,,", "input_tokens is 0; expected a whole number of at least 1"),
    "negative": ("a,1,5,-1,,", "output_tokens is -1"),
    "words": ("a,1,five,1,,", "input_tokens is 'five'; expected a whole number"),
    "too short": ("a,1,5", "does not have the columns"),
    "too long": ("a,1,5,1,,,9", "does not have the columns"),
    "a preamble in the middle": ("b,1,50,1,coder,20", "only the first turn of a session has one"),
    "a preamble longer than the input": ("a,1,5,1,coder,20", "part of its 5 input_tokens"),
    "a preamble without length": ("a,1,5,1,coder,", "prefix 'coder' of 0 tokens"),
    "a negative preamble": ("a,1,5,1,coder,-2", "prefix_tokens is -2"),
}


@pytest.mark.parametrize(("row", "words"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_an_error_with_its_number_or_ends_its_session(agents, row, words):
    path = agents("b,0,60,1,coder,20", row, row[0] + ",1,7,1,,", "z,5,9,1,,")
    with pytest.raises(ValueError) as error:
        read_trace(path)
    assert str(error.value).startswith("agents.csv, line 3: ")
    assert words in str(error.value)
    trace = read_trace(path, skip_bad=True)
    assert trace.skipped == 2, "what follows in the session stands on a context that nobody knows"
    assert [len(session.turns) for session in trace.sessions] == [1, 1]


def test_other_columns_are_no_agents(agents):
    with pytest.raises(ValueError, match="line 1: columns when, what; expected session, gap_s, input_tokens"):
        read_trace(agents("1,2", header="when,what"), skip_bad=True)


def test_a_spreadsheet_s_mark_and_spaces_behind_commas_change_nothing(tmp_path, agents):
    plain = read_trace(agents("a,0,2000,10,coder,2000", "a,30,100,20,,")).sessions
    path = tmp_path / "saved.csv"
    path.write_text(
        "\ufeffsession, gap_s, input_tokens, output_tokens, prefix, prefix_tokens\n"
        "a, 0, 2000, 10, coder, 2000\na, 30, 100, 20, , \n",
        encoding="utf-8",
    )
    assert read_trace(path).sessions == plain
    path = tmp_path / "saved.jsonl"
    path.write_text("\ufeff" + json.dumps(request()), encoding="utf-8")
    assert read_trace(path).requests == 1
