"""A stored result to a picture: a bar for each way, a panel for each of the figures that matter most."""

from __future__ import annotations

from benchmarks import summary
from benchmarks.contenders import CONTENDERS
from benchmarks.summary import COLUMNS, OURS, Document

PANELS = ("call, ms", "training lost per save, ms", "durable after, s", "CPU s per GB")
_OURS_COLOUR, _OTHERS_COLOUR = "#1b6ca8", "#b8bfc6"


def draw(document: Document, path: str) -> None:
    """Draw the chart; needs matplotlib, raises ``ImportError`` where it is missing."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(reversed(summary.measured(document)))
    if not names:
        return
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(4 * len(PANELS), 0.5 * len(names) + 1.6), sharey=True)
    for axis, heading in zip(axes, PANELS, strict=True):
        (column,) = (column for column in COLUMNS if column.heading == heading)
        spreads = [summary.spread(document, name, column) for name in names]
        medians = [spread.median for spread in spreads]
        reach = [[s.median - s.least for s in spreads], [s.most - s.median for s in spreads]]
        colours = [_OURS_COLOUR if name == OURS else _OTHERS_COLOUR for name in names]
        titles = [CONTENDERS[name].title for name in names]
        axis.barh(titles, medians, xerr=reach, color=colours, ecolor="#555555", capsize=2)
        axis.set_title(heading, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    facts, options = document["facts"], document["options"]
    where = f"{facts['cores']} cores, {facts['filesystem']}, a state of {options['gigabytes']:g} GB"
    figure.suptitle(f"Lower is better. Medians, with the least and the greatest. {where}.", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
