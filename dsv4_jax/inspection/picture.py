"""The picture of one layer of a request: ring, open window, blocks."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from dsv4_jax.inspection.request_view import LayerView, RequestView

_COLOURS = ("white", "lightsteelblue", "tab:orange")
_MAX_LABELS = 12


def plot_layer(view: RequestView, layer_idx: int) -> Figure:
    """A figure with a panel for each thing that the layer keeps."""
    layers = [layer for layer in view.layers if layer.layer_idx == layer_idx]
    if not layers:
        raise ValueError(
            f"layer_idx must be one of {[layer.layer_idx for layer in view.layers]}, "
            f"got {layer_idx!r}"
        )
    (layer,) = layers
    panels = [_plot_ring]
    if layer.compression_ratio > 1:
        panels += [_plot_open_window, _plot_blocks]
    figure = Figure(figsize=(4 * len(panels), 3.2), layout="constrained")
    every = np.atleast_1d(figure.subplots(1, len(panels)))
    for axes, panel in zip(every, panels, strict=True):
        panel(axes, view, layer)
    figure.suptitle(
        f"slot {view.slot}, layer {layer_idx} ({layer.attn_type.upper()}), "
        f"{view.length_tokens} tokens"
    )
    return figure


def _plot_ring(axes: Axes, view: RequestView, layer: LayerView) -> None:
    """The position that each ring row holds, and the row that is next."""
    held = layer.ring_positions
    rows = np.flatnonzero(held >= 0)
    axes.plot(rows, held[rows], ".", color="tab:blue", label="token held")
    axes.axvline(layer.cursor, color="tab:red", linewidth=1, label="next row")
    axes.set(xlabel="ring row", ylabel="position", title="ring", xlim=(-1, len(held)))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.legend(fontsize="small", loc="best")


def _plot_open_window(axes: Axes, view: RequestView, layer: LayerView) -> None:
    """Tokens that wait for their window to close."""
    ratio, waiting = layer.compression_ratio, layer.num_open_tokens
    axes.barh([0], [waiting], color="tab:orange", height=0.4)
    axes.barh([0], [ratio - waiting], left=[waiting], color="white", edgecolor="grey", height=0.4)
    first = view.length_tokens - waiting
    said = f"positions {first} to {view.length_tokens - 1}" if waiting else "no token"
    axes.set(xlabel="token of the window", title=f"open window: {said}", xlim=(0, ratio))
    axes.set(ylim=(-1, 1), yticks=[])
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def _plot_blocks(axes: Axes, view: RequestView, layer: LayerView) -> None:
    """Entries by block, in the request's order; those that the next token selects stand out."""
    numbers = np.arange(len(layer.entries))
    state = np.zeros((max(len(view.block_table), 1), layer.entries_per_block), int)
    picked = np.zeros(len(numbers), bool) if layer.selected is None else layer.selected
    state[numbers // layer.entries_per_block, layer.offsets] = 1 + picked
    axes.imshow(
        state, aspect="auto", cmap=ListedColormap(_COLOURS), vmin=0, vmax=2, interpolation="none"
    )
    step = -(-len(view.block_table) // _MAX_LABELS) or 1
    ticks = np.arange(0, len(view.block_table), step)
    axes.set_yticks(ticks, [str(view.block_table[tick]) for tick in ticks])
    axes.set(xlabel="offset in the block", ylabel="physical block")
    axes.set_title(f"{len(numbers)} entries of {layer.compression_ratio} tokens")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    labels = ["empty", "entry", "selected"][: 2 if layer.selected is None else 3]
    axes.legend(
        handles=[
            Patch(facecolor=colour, edgecolor="grey", label=label)
            for colour, label in zip(_COLOURS, labels, strict=False)
        ],
        fontsize="small",
        loc="upper left",
        bbox_to_anchor=(1, 1),
    )
