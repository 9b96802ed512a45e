"""What lessons 06 and 07 measure and draw: look-alikes that are refused, tokens that drift, delays that add up."""

import pytest
import torch
from matplotlib.colors import to_rgba

import kvlab
from kvlab.experiments import interference, look_alikes, retokenised
from kvlab.lab.draw.names import names_figure
from kvlab.lab.draw.style import CACHED, WRONG
from kvlab.lab.draw.timeline import gaps_figure, layers_figure, split_figure
from kvlab.policy import Recompute, Reload

TEXT = [(i * 7919 + i // 3) % 250 for i in range(400)]
PREFIX, LEAD = TEXT[:96], TEXT[200:232]
CHANGED = [*PREFIX[:40], (PREFIX[40] + 1) % 250, *PREFIX[41:]]


@pytest.fixture(scope="module")
def model():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield kvlab.load_model("tiny", dtype="fp32")
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def others(model):
    return look_alikes.look_alikes(model, PREFIX, CHANGED, LEAD)


def rows_of(model, stored):
    """The bytes that a cache leaves in the blocks of the prefix."""
    pool = kvlab.pool.BlockPool(model.layout(16), 6)
    stored.write(pool, range(6))
    return pool.rows


# Lesson 06 ------------------------------------------------------------------------------------------------------------


def test_every_look_alike_fits_gives_no_error_and_holds_other_bytes(model, others):
    right = rows_of(model, look_alikes.right(model, PREFIX))
    assert len(others) == 7
    for name, stored in others.items():
        assert not torch.equal(rows_of(model, stored), right), name
        assert look_alikes.force(model, stored, TEXT[96:104], new_tokens=3)["errors"] == 0, name


def test_numbers_that_are_none_are_counted_as_errors(model):
    def nan(pool, blocks):
        pool.rows.fill_(float("nan"))

    broken = look_alikes.Stored(tuple(PREFIX), model.fingerprint(16), nan)
    assert look_alikes.force(model, broken, TEXT[96:104], new_tokens=3)["errors"] > 0


def test_the_library_hands_out_only_what_stands_before_a_change_and_names_the_field(model, others):
    found = {name: look_alikes.ask(model, stored, PREFIX) for name, stored in others.items()}
    assert [answer["valid_blocks"] for answer in found.values()] == [40 // 16, 0, 0, 0, 0, 0, 0]
    differs = [answer["differs"] for answer in found.values()]
    assert differs == [[], [], ["first_position"], ["config", "rope"], ["config"], ["adapter"], ["kv_dtype"]]
    assert look_alikes.ask(model, look_alikes.right(model, PREFIX), PREFIX)["valid_blocks"] == 6


def test_each_step_of_the_name_closes_what_it_says(model, others):
    mine = look_alikes.right(model, PREFIX)
    passes = [
        [sum(look_alikes.accepted(mine, stored, covers)) for stored in others.values()] for covers in look_alikes.COVERS
    ]
    assert passes == [
        [5, 6, 6, 6, 6, 6, 6],  # its own tokens: all but the block of the change
        [2, 0, 6, 6, 6, 6, 6],  # the block before it
        [2, 0, 6, 0, 6, 6, 6],  # RoPE
        [2, 0, 6, 0, 0, 6, 6],  # the layer configuration
        [2, 0, 6, 0, 0, 0, 6],  # the adapter
        [2, 0, 6, 0, 0, 0, 0],  # the dtype
        [2, 0, 0, 0, 0, 0, 0],  # the first position
        [2, 0, 0, 0, 0, 0, 0],
    ]


def test_a_false_hit_is_hatched_red_and_a_right_one_green():
    figure = names_figure({"a": ([True, True, False], [True, False, False])}, 16, "nothing", 20)
    faces = [patch.get_facecolor() for patch in figure.axes[0].patches]
    assert (faces.count(to_rgba(CACHED)), faces.count(to_rgba(WRONG))) == (1, 1)
    assert "blocks of another cache that pass: 1" in figure.axes[0].get_title(loc="right")


@pytest.mark.parametrize(("changed", "lead"), [(PREFIX[:80], LEAD), (CHANGED, LEAD[:20])])
def test_what_is_not_whole_blocks_is_refused(model, changed, lead):
    with pytest.raises(ValueError, match="whole blocks"):
        look_alikes.look_alikes(model, PREFIX, changed, lead)


def test_what_drifts_is_found_where_it_begins():
    class Pairs:
        """Two ids for one text: 1 is "ab", and so are 2 and 3 together; it encodes as 1."""

        def decode(self, ids):
            return "".join({1: "ab", 2: "a", 3: "b"}[token] for token in ids)

        def encode(self, text):
            return [1] * (len(text) // 2)

    class Named:
        tokenizer = Pairs()

        def fingerprint(self, block_size):
            return kvlab.fingerprint.Fingerprint("w", "c", "t", "r", "fp32", "l")

    row = retokenised.again(Named(), [1, 1, 1, 1, 2, 3, 1, 1], block_size=2)
    assert (row["same_text"], row["first_difference"], row["usable_blocks"], row["blocks"]) == (True, 4, 2, 4)
    assert row["was"] == ["ab", "a", "b", "ab"]
    assert retokenised.again(Named(), [1, 1, 1], block_size=2)["first_difference"] is None


def test_agents_write_from_the_same_prompt_with_seeds_of_their_own(model):
    written = retokenised.write(model, TEXT[:20], agents=3, new_tokens=6)
    assert all(ids[:20] == TEXT[:20] and len(ids) == 26 for ids in written)
    assert len({tuple(ids) for ids in written}) > 1


# Lesson 07 ------------------------------------------------------------------------------------------------------------


def test_delays_are_counted_from_when_the_other_comes_back_until_its_first_token(model, tmp_path):
    def link():
        return kvlab.LinkTier(kvlab.HostTier(2**24), 0.001)

    ways = {
        "reload": interference.Way(link, Reload()),
        "recompute": interference.Way(link, Recompute(), lambda: interference.FileWriter(tmp_path, 2**12)),
    }
    record = interference.measure(model, TEXT, ways, prefix=256, suffix=8, token_budget=64)
    for way in record["ways"].values():
        served = way["gaps_s"][way["first"] : way["stop"]]
        assert len(served) >= 1
        assert way["delay_s"] == pytest.approx(sum(served) - len(served) * way["quiet_s"])
        assert sum(served) <= way["ttft_s"] + 2 * max(way["gaps_s"])
    # 256 tokens in fp32 cross a link of 1 MB/s; the other one decodes meanwhile.
    reload = record["ways"]["reload"]
    assert reload["ttft_s"] >= kvlab.kv_bytes(model.arch, 256, "fp32") / 1e6
    assert reload["stop"] - reload["first"] > 10
    assert not list(tmp_path.iterdir())
    assert len(gaps_figure(record["ways"], "live").axes) == 2
    with pytest.raises(ValueError, match="whole blocks"):
        interference.measure(model, TEXT, ways, prefix=250)


def test_the_second_on_a_link_waits_for_the_first(model):
    size_s = kvlab.kv_bytes(model.arch, 128, "fp32") / 1e6
    shared = interference.share_link(
        model, TEXT, lambda: kvlab.LinkTier(kvlab.HostTier(2**24), 0.001), Reload(), prefix=128
    )
    assert shared["together_s"][0] >= size_s
    assert shared["together_s"][1] >= 2 * size_s
    with pytest.raises(ValueError, match="are needed"):
        interference.share_link(model, TEXT, lambda: kvlab.HostTier(2**20), Reload(), prefix=256)


def test_layers_take_the_longer_lane_and_a_group_of_the_shorter():
    # 400 ms and 100 ms in 4 groups: the longer one, and a quarter of the shorter one.
    assert layers_figure(0.4, 0.1, (1, 2, 3, 4), "x").axes[0].get_title().startswith("425 ms")
    assert layers_figure(0.1, 0.4, (1, 2, 3, 4), "x").axes[0].get_title().startswith("425 ms")
    assert layers_figure(0.1, 0.4, (4,), "x").axes[0].get_title().startswith("500 ms")
    # The first layer of four alone is there after 25 ms; then computing never waits.
    assert layers_figure(0.1, 0.4, (1, 3, 4), "x").axes[0].get_title().startswith("425 ms")


def test_a_loaded_head_keeps_the_tail_waiting():
    assert "after 350 ms" in split_figure(0.25, 0.3, 0.05, 1.0, "x", "x").axes[0].get_title()
    assert "after 600 ms" in split_figure(0.25, 0.3, 0.05, 1.0, "x", "x", reverse=True).axes[0].get_title()
