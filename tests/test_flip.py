"""The pictures of the flip say what `decide` says, and name it in words."""

from dataclasses import replace

import pytest

from kvlab.arch import ModelArch
from kvlab.lab.draw.flip import QUESTION, FlipCurves, flip_curves, flip_figure, tie_figure
from kvlab.lab.draw.style import png
from kvlab.lab.published import published
from kvlab.machine import Curve, Link, Machine, Prefill
from kvlab.storing import storing
from kvlab.verdict import decide

ARCH = ModelArch.preset("smollm2-135m")
RATE = Curve(((1.0, 1e11),))
LINK = Link(Curve(((1.0, 0.015),)), per_request_s=1e-3)
MACHINE = Machine("m", Prefill(4e-3, RATE, RATE, ARCH.name, spread=0.08), {"link": {"load": LINK, "store": LINK}})


def curves(**changes):
    return flip_curves(ARCH, MACHINE, tier="link", suffix=16, kv_dtype="fp32", **changes)


def by_hand(reload_s):
    ones = tuple(1.0 for _ in reload_s)
    return FlipCurves(tuple(16 * (i + 1) for i in range(len(ones))), tuple(reload_s), ones, ones, ones)


def test_the_curves_are_those_of_decide():
    drawn = curves(link_share=0.5)
    assert drawn.tokens[0] == 16
    assert ARCH.max_positions - 32 < drawn.tokens[-1] <= ARCH.max_positions - 16
    for i in (0, len(drawn.tokens) // 2, -1):
        verdict = decide(ARCH, MACHINE, prefix=drawn.tokens[i], suffix=16, tier="link", kv_dtype="fp32", link_share=0.5)
        assert drawn.reload_s[i] == verdict.ttft_reload_s
        assert drawn.recompute_s[i] == verdict.ttft_recompute_s


def test_the_drawn_flip_is_the_exact_one_within_the_grid():
    exact = decide(ARCH, MACHINE, prefix=16, suffix=16, tier="link", kv_dtype="fp32").crossover_tokens
    (drawn,) = curves().flips
    assert exact <= drawn <= 1.08 * exact + 16


def test_who_pays_for_the_store_pays_its_seconds():
    free, half = curves(), curves(offload_share=0.5)
    verdict = decide(ARCH, MACHINE, prefix=free.tokens[40], suffix=16, tier="link", kv_dtype="fp32")
    assert half.reload_s[40] - free.reload_s[40] == pytest.approx(0.5 * storing(verdict).store_s)
    assert half.recompute_s == free.recompute_s


@pytest.mark.parametrize(
    ("reload_s", "answer"),
    [
        ((2, 2, 0.5, 0.5), "reload wins from 48 tokens up"),
        ((0.5, 2, 2, 2), "recompute wins from 32 tokens up"),
        ((0.5, 0.5), "reload wins at every length"),
        ((2, 1, 2), "recompute wins at every length up to 48 tokens"),
        ((0.5, 2, 0.5), "the winner changes at 32 and 48 tokens"),
    ],
)
def test_the_answer_in_words(reload_s, answer):
    assert by_hand(reload_s).answer == answer


def test_the_chart_keeps_the_question_and_marks_what_was_measured():
    samples = [[0.2, 0.3, 0.25], [0.6, 0.5, 0.7], [2.0, 2.1, 2.2]]
    tier = {
        "tokens": [64, 256, 1024],
        "recompute_s": [0.25, 0.6, 2.1],
        "reload_s": [0.3, 0.5, 1.5],
        "reload_samples_s": samples,
        "crossover_tokens": 128,
        "crossover_interval": [80.0, None],
    }
    record = {"tiers": [tier], "recompute_samples_s": samples}
    figure = flip_figure(curves(), "live on a machine", measured=record)
    (axis,) = figure.axes
    assert figure._suptitle.get_text() == QUESTION
    assert axis.get_title().endswith("measured: reload wins from 128 tokens up")
    labels = {text.get_text() for text in axis.get_legend().get_texts()}
    assert {"flip, predicted", "flip, measured", "flip, 95 % interval", "reload, measured"} <= labels
    for at, words in ((None, "recompute still wins at 1,024"), (0, "wins at every measured length")):
        other = {"tiers": [{**tier, "crossover_tokens": at}], "recompute_samples_s": samples}
        assert words in flip_figure(curves(), "live", measured=other).axes[0].get_title()


def test_published_points_are_hollow_and_not_hidden_by_the_prediction():
    blog = published("h100_prefill_8b")
    h100 = flip_curves(
        ModelArch.preset("llama-3.1-8b"), Machine.load("h100-sxm-pcie5"), tier="host", suffix=16, longest=65536
    )
    axis = flip_figure(h100, "published", others=blog).axes[0]
    lines = [line for line in axis.get_lines() if str(line.get_label()).endswith("published")]
    assert len(lines) == 2
    # A filled marker means "measured here".
    assert {(line.get_marker(), line.get_markerfacecolor()) for line in lines} == {("D", "white")}
    drawn_before = {str(line.get_label()): at for at, line in enumerate(axis.get_lines())}
    assert all(
        drawn_before[f"{name}, predicted"] < drawn_before[f"{name}, published"] for name in ("recompute", "reload")
    )


def test_a_long_source_is_wrapped_into_the_picture():
    figure = flip_figure(curves(), "published: a source that has to be told in full, with its figure and date; " * 2)
    assert _inside(figure, figure._supxlabel)


def _inside(figure, text):
    """Whether a text is drawn within the figure's left and right edges."""
    png(figure)
    box = text.get_window_extent()
    return figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1


def test_every_frame_of_the_slider_has_the_same_size():
    def size(figure):
        return png(figure)[16:24]  # width and height in the PNG header

    slow = replace(LINK, gb_per_s=Curve(((1.0, 0.001),)))
    never = flip_curves(ARCH, MACHINE.with_link("link", slow), tier="link", suffix=512, kv_dtype="fp32")
    assert size(flip_figure(curves(), "a")) == size(flip_figure(never, "a much longer source " * 3))


def test_the_tie_figure_marks_where_a_link_begins_to_win_and_skips_lengths_without_a_tie():
    figure = tie_figure([16, 32, 64, 128], [float("inf"), 0.04, 0.02, 0.01], [0.03, 0.005], "predicted")
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert " 64" in texts
    assert sum(text.startswith("a link of") for text in texts) == 2
    assert figure.axes[0].get_xlim()[0] == 32
