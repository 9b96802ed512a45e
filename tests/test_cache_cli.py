"""`kvlab cache`: what is on disk is said as it is, and only what was asked for, and is ours, is removed."""

import json
import os
import re
import sys
import time
from dataclasses import replace

import pytest
from test_tiers import FINGERPRINT, HASHES, LAYOUT, Lab, run_python
from typer.testing import CliRunner

from kvlab.cli import app
from kvlab.cli.cache import kv_folder
from kvlab.tiers import DiskTier
from kvlab.tiers.segment import Header, SegmentWriter

SMALL = replace(FINGERPRINT, block_layout=repr(("block_major", "head_major", 4, 2, 4, 8)))
OTHER = replace(SMALL, weights="others", salt="a tenant")
DAY_S = 86400.0


def cache(*arguments, exit_code=0, text=None, columns=160):
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["cache", *map(str, arguments)], input=text)
    assert result.exit_code == exit_code, result.output + repr(result.exception)
    assert "Traceback" not in result.stderr
    if exit_code == 2:
        assert len([line for line in result.stderr.splitlines() if line.startswith("kvlab: ")]) == 1
    return result


def ls(folder, *options):
    return json.loads(cache("ls", "--dir", folder, "--json", *options).stdout)


@pytest.fixture
def folder(tmp_path):
    """Three blocks of "small" stored ten days ago and five just now, two of another model an hour ago."""
    lab = Lab()
    with lab.streams:
        for age_s, fingerprint, label, first, count in (
            (10 * DAY_S, SMALL, "small", 0, 3),
            (0.0, SMALL, "small", 3, 5),
            (3600.0, OTHER, "", 8, 2),
        ):
            tier = DiskTier(tmp_path, 1 << 20, label=label, clock=lambda age_s=age_s: time.time() - age_s)
            lab.store(lab.open(tier, fingerprint), first, count)
    return tmp_path


def segments(folder):
    return sorted((folder / "segments").glob("*.kv"), key=lambda path: Header.read(path)[0].created)


def add_files_of_other_kinds(folder):
    """One of each kind that is no whole segment; returns the folder of segments and the live writer."""
    inside = folder / "segments"
    whole = segments(folder)[0].read_bytes()
    (inside / "cut.kv").write_bytes(whole[:-100])
    (inside / "notes.kv").write_bytes(b"not ours")
    (inside / "later.kv").write_bytes(whole[:8] + (99).to_bytes(4, "little") + whole[12:])
    (inside / "readme.txt").write_bytes(b"hello")
    (inside / ".tmp-dead").write_bytes(b"x" * 10)
    writer = SegmentWriter(inside, Header.new({}, (16, 16), HASHES[:1], None))
    writer._create()
    return inside, writer


# ls -------------------------------------------------------------------------------------------------------------------


def test_ls_counts_what_was_stored_by_fingerprint(folder):
    listing = ls(folder)
    assert listing["folder"] == str(folder)
    assert listing["others"] == []
    small, other = listing["holdings"]
    assert (small["model"], other["model"]) == ("small", None)
    assert (small["blocks"], small["tokens"], small["files"]) == (8, 32, 2)
    assert (other["blocks"], other["tokens"], other["files"]) == (2, 8, 1)
    assert (small["kv_dtype"], small["block_size"], small["layout"]) == ("fp32", 4, "block_major")
    assert (small["salted"], other["salted"]) == (False, True)
    assert small["fingerprint"] == SMALL.digest().hex()[:12]
    assert small["bytes"] + other["bytes"] == sum(path.stat().st_size for path in segments(folder))
    assert small["bytes"] >= 8 * LAYOUT.block_bytes
    assert small["expired_files"] == 1, "ten days are more than seven"
    assert other["expired_files"] == 0
    assert ls(folder, "--ttl", "11d")["holdings"][0]["expired_files"] == 0


def test_ls_for_people_fits_a_terminal_and_says_the_same(folder):
    text = cache("ls", "--dir", folder, columns=80).stdout
    assert max(map(len, text.splitlines()[1:])) <= 80
    for part in (
        "small",
        "no name",
        SMALL.digest().hex()[:12],
        OTHER.digest().hex()[:12],
        "KiB",
        "10 d ago",
        "1 h ago",
    ):
        assert part in text
    assert re.search(r"\bMB\b", text) is None
    assert "expired: 1 of" in " ".join(text.split())


def test_ls_names_every_other_file_and_why_and_changes_nothing(folder):
    inside, writer = add_files_of_other_kinds(folder)
    before = sorted(inside.iterdir())
    listing = ls(folder)
    kinds = {entry["file"]: (entry["kind"], entry["why"]) for entry in listing["others"]}
    assert kinds["cut.kv"][0] == "damaged"
    assert "header says" in kinds["cut.kv"][1]
    assert kinds["notes.kv"] == ("foreign", "not a kvlab segment")
    assert kinds["later.kv"][0] == "foreign"
    assert "version 99" in kinds["later.kv"][1]
    assert kinds["readme.txt"][0] == "foreign"
    if sys.platform != "win32":
        assert kinds[".tmp-dead"][0] == "abandoned"
        assert kinds[writer._temporary.name][0] == "being written"
    assert len(listing["holdings"]) == 2
    text = cache("ls", "--dir", folder).stdout
    for name in kinds:
        assert name in text
    assert sorted(inside.iterdir()) == before
    writer.abandon()


def test_the_same_block_stored_by_two_processes_counts_once(folder):
    path = segments(folder)[-1]
    path.with_name("copy.kv").write_bytes(path.read_bytes())
    small = ls(folder)["holdings"][0]
    assert (small["files"], small["blocks"]) == (3, 8)


def test_headers_from_the_future_or_with_fields_of_another_version_are_listed(folder):
    lab = Lab()
    with lab.streams:
        tier = DiskTier(folder, 1 << 20, label="\x1b[2Jodd", clock=lambda: 1e15)
        lab.store(lab.open(tier, replace(SMALL, weights="far")), 0, 1)
        header = Header.new({"quantum": "yes"}, tier._open_geometry.extents, HASHES[:1], None, time.time())
        writer = SegmentWriter(tier.folder, header)
        for group, extent in enumerate(header.extents):
            writer.write(group, 0, lab.pool.rows.new_zeros(1, extent // 4).numpy().view("u1"), [0])
    listing = {holding["model"]: holding for holding in ls(folder)["holdings"] if holding["blocks"] == 1}
    assert listing["\x1b[2Jodd"]["newest"] is None
    assert listing["\x1b[2Jodd"]["expired_files"] == 1
    assert listing[None]["fingerprint"] == "unreadable"
    assert listing[None]["tokens"] is None
    text = cache("ls", "--dir", folder).stdout
    assert "\x1b" not in text
    assert "ahead of the clock" in text


def test_the_default_folder_is_beside_the_models_and_need_not_be_there(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    assert kv_folder() == tmp_path / "cache" / "kv"
    assert "no KV blocks are kept here" in cache("ls").stdout
    assert "nothing to remove" in cache("clear").stdout
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("what", ["ls", "clear"])
def test_a_folder_that_is_none_of_a_disk_tier_is_refused(tmp_path, what):
    assert "is not a folder" in cache(what, "--dir", tmp_path / "none", exit_code=2).stderr
    (tmp_path / "photo.jpg").write_bytes(b"keep me")
    assert "has no segments in it" in cache(what, "--dir", tmp_path, exit_code=2).stderr
    assert (tmp_path / "photo.jpg").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls", "--ttl", "soon"], "--ttl: "),
        (["ls", "--ttl", "0s"], "--ttl is 0s"),
        (["clear", "--older-than", "7"], "--older-than: "),
        (["clear", "--older-than", "7d"], "add --yes"),
        (["clear"], "add --yes"),
        (["clear", "--model", "big"], "small (" + SMALL.digest().hex()[:12]),
        (["clear", "--model", "big", "--yes"], "'big' is not kept here"),
        (["clear", "--fingerprint", "123", "--yes"], "'123' is not kept here"),
        (["clear", "--fingerprint", "", "--yes"], "'' is not kept here"),
    ],
)
def test_bad_input_is_one_line_and_removes_nothing(folder, arguments, message):
    before = segments(folder)
    assert message in cache(*arguments, "--dir", folder, exit_code=2).stderr
    assert segments(folder) == before


# clear ----------------------------------------------------------------------------------------------------------------


def test_clear_removes_all_of_ours_and_says_what_it_left(folder):
    inside, writer = add_files_of_other_kinds(folder)
    result = cache("clear", "--dir", folder, "--yes")
    assert "8 blocks of small" in result.stdout
    assert f"2 blocks of {OTHER.digest().hex()[:12]}" in result.stdout
    assert "1 damaged file" in result.stdout
    for name in ("notes.kv", "later.kv", "readme.txt"):
        assert f"kept: {name}" in result.stdout
    kept = {path.name for path in inside.iterdir()}
    if sys.platform != "win32":
        assert kept == {"notes.kv", "later.kv", "readme.txt", writer._temporary.name}
    # The writer that was at work is not disturbed.
    for group in range(2):
        writer.write(group, 0, Lab().pool.rows.new_zeros(1, 4).numpy().view("u1"), [0])
    assert writer.path.exists()


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (["--model", "small"], [2]),
        (["--fingerprint", SMALL.digest().hex()[:6]], [2]),
        (["--model", "small", "--fingerprint", OTHER.digest().hex()[:12]], []),
        (["--older-than", "7d"], [2, 5]),
        (["--older-than", "30min"], [5]),
        (["--older-than", "11d"], [3, 2, 5]),
        (["--model", "small", "--older-than", "30min"], [2, 5]),
    ],
)
def test_filters_remove_what_they_name_and_leave_damaged_files_too(folder, options, left):
    add_files_of_other_kinds(folder)[1].abandon()
    result = cache("clear", "--dir", folder, "--yes", *options)
    (folder / "segments" / "cut.kv").unlink()  # it is still there: only a clear of everything takes it
    there = [path for path in (folder / "segments").glob("*.kv") if path.name not in ("notes.kv", "later.kv")]
    headers = sorted((Header.read(path)[0] for path in there), key=lambda header: header.created)
    assert [len(header.hashes) for header in headers] == left
    assert ("nothing to remove" in result.stdout) == (len(left) == 3)


def test_a_tier_that_is_open_computes_again_what_was_cleared(folder):
    lab = Lab()
    with lab.streams:
        tier = lab.open(DiskTier(folder, 1 << 20), SMALL)
        assert lab.fetch(tier).valid_blocks == 8
        cache("clear", "--dir", folder, "--yes")
        # Each segment that is gone is found out when it is asked for.
        assert lab.fetch(tier).valid_blocks == 0
        lab.store(tier)
        assert lab.fetch(tier).valid_blocks == 3
        assert lab.right(3)
        lab.store(tier)
        assert lab.fetch(tier).valid_blocks == 8
        assert lab.right(8)
    assert ls(folder)["holdings"][0]["blocks"] == 8


def test_what_cannot_be_removed_is_an_error_that_names_it(folder, monkeypatch):
    locked = segments(folder)[1]
    real = type(locked).unlink

    def unlink(path, **options):
        if path == locked:
            raise PermissionError(13, "Permission denied", str(path))
        real(path, **options)

    monkeypatch.setattr(type(locked), "unlink", unlink)
    result = cache("clear", "--dir", folder, "--yes", exit_code=2)
    assert f"1 of 3 files could not be removed: {locked.name} (Permission denied)" in result.stderr
    assert segments(folder) == [locked]


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
@pytest.mark.parametrize(("answer", "left"), [("y", 0), ("", 3)])
def test_on_a_terminal_clear_asks(folder, answer, left):
    code = """
        import os, pty, subprocess, sys
        inner, outer = pty.openpty()
        run = [sys.executable, "-c", "from kvlab.cli import main; main()", "cache", "clear", "--dir", sys.argv[1]]
        process = subprocess.Popen(run, stdin=outer, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        os.write(inner, (sys.argv[2] + "\\n").encode())
        print(process.communicate(timeout=60)[0].decode(), process.returncode)
    """
    said = run_python(code, folder, answer)
    assert "8 blocks of small" in said
    assert said.split()[-1] == "0"
    assert len(segments(folder)) == left
    assert ("nothing was removed" in said) == bool(left)
