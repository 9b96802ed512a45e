"""The picture of a crossover record: nothing is cut off, and no legend lies over a curve."""

import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from kvlab.lab.draw import crossover_figure
from kvlab.lab.draw.style import png, shade_interval


def tier(name):
    return {
        "name": name,
        "tokens": [16, 64, 256],
        "recompute_s": [0.1, 0.2, 0.9],
        "reload_s": [0.12, 0.19, 0.5],
        "predicted_recompute_s": [0.1, 0.2, 0.8],
        "predicted_reload_s": [0.11, 0.2, 0.6],
        "crossover_tokens": 0 if name == "disk" else 64,
        "predicted_crossover_tokens": 80,
        "crossover_interval": [0, 0] if name == "disk" else [32, 128],
    }


@pytest.fixture(params=[1, 2, 3, 4])
def figure(request):
    names = ["host", "disk", "xz", "emulated 27.3 MB/s (218 Mb/s)"]
    drawn = crossover_figure(
        {
            "tiers": [tier(name) for name in names[-request.param :]],
            "model": {"name": "smollm2-135m", "dtype": "fp32"},
            "rounds": 7,
            "provenance": {
                "kind": "live",
                "when": "2026-11-30T00:00:00",
                "facts": {"cpu": "a processor with a name that is quite long, 16-core", "torch_threads": 2},
            },
        }
    )
    png(drawn)  # lays everything out
    return drawn


def test_question_answers_and_source_are_inside_the_picture(figure):
    for text in (figure._suptitle, figure._supxlabel, *(axis.title for axis in figure.axes)):
        box = text.get_window_extent()
        assert figure.bbox.x0 <= box.x0, text.get_text()
        assert box.x1 <= figure.bbox.x1, text.get_text()


def test_legends_stand_outside_every_panel(figure):
    for axis in figure.axes:
        legend = axis.get_legend().get_window_extent()
        assert not any(legend.overlaps(other.get_window_extent()) for other in figure.axes)
        assert not legend.overlaps(axis.xaxis.label.get_window_extent())


def test_times_are_written_as_plain_numbers(figure):
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert "0.2" in labels
    assert not any("10^" in label for label in labels)


def test_a_picture_loads_what_it_needs_itself_and_not_torch():
    """`kvlab plan --plot` would wait two seconds for it."""
    code = (
        "import sys; from kvlab.lab.draw import crossover_figure, plan_figure, probe_figure, save, simulate_figure;"
        "assert 'torch' not in sys.modules;"
        "from kvlab.lab import draw; assert all(hasattr(draw, name) for name in draw.__all__)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parent.parent)


def test_no_flip_is_shaded_where_one_way_always_wins(figure):
    for axis in figure.axes:
        legend = [text.get_text() for text in axis.get_legend().get_texts()]
        assert ("flip, 95 % interval" in legend) == (not axis.get_title().startswith("disk"))


@pytest.mark.parametrize(
    ("interval", "shaded"),
    [
        (None, None),
        ((None, None), None),
        ((0, 0), None),
        ((0, 64), (16, 64)),
        ((32, None), (32, 256)),
        ((32, 999), (32, 256)),
    ],
)
def test_an_interval_that_leaves_the_picture_is_shaded_up_to_its_edge(interval, shaded):
    axis = Figure().add_subplot()
    shade_interval(axis, interval, 16, 256)
    drawn = [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in axis.patches]
    assert drawn == ([] if shaded is None else [shaded])
