"""Results of benchmarks as text and as a plot."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any


def first_line(error: Exception) -> str:
    """The type of an error and the first line of its message."""
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0][:300]}"


def timed(row: dict[str, Any], name: str = "ms") -> str:
    """The median of a row's times under a name, and the least and the most where there are some."""
    text = f"{row[name]:.3f} ms"
    if f"{name}_least" in row:
        text += f" ({row[f'{name}_least']:.3f} to {row[f'{name}_most']:.3f})"
    return text


def compiled(row: dict[str, Any], prefix: str = "") -> str:
    """How long it took to trace and compile what a row's fields of that prefix tell of."""
    return f"compiled in {row[f'{prefix}trace_s'] + row[f'{prefix}compile_s']:.1f} s"


def decode_line(row: dict[str, Any]) -> str:
    """One case of `bench decode` as a line of text."""
    split = ", split cache" if row.get("split_cache") else ""
    words = [f"batch {row['batch']}, context {row['context']:,}{split}:"]
    if "skipped" in row:
        return f"{words[0]} skipped {row['skipped']}"
    if "compile_s" in row:
        words.append(f"{compiled(row)}, {row['launches']['total']:,} launches,")
    for each in _by_routing(row):
        if "step_ms" in each:
            words.append(
                f"{_law(each)}{timed(each, 'step_ms')}, {each['tokens_per_s']:,.0f} tokens/s, "
                f"{each['copy_share']:.0%} of the copy bandwidth{_experts(each)},"
            )
    if "cache_part_ms" not in row and "cache_part_compile_s" in row:
        words.append(f"cache part {compiled(row, 'cache_part_')},")
    if "cache_part_ms" in row:
        words.append(
            f"cache part {row['cache_part_ms']:.3f} ms, "
            f"roofline {row['cache_part_roofline_ms']:.3f},"
        )
    if row.get("layer_ms"):
        kinds = (f"{kind} {ms:.3f}" for kind, ms in row["layer_ms"].items())
        words.append(f"ms a layer: {', '.join(kinds)},")
    if "loop_ms" in row:
        words.append(f"{timed(row, 'loop_ms')} a token in a loop of {row['loop_steps']},")
    if "engram_ms" in row:
        words.append(
            f"with {row['engram_rows_read']:,} rows of Engram tables from the host "
            f"{row['engram_step_ms']:.3f} ms, {row['engram_ms']:.3f} to gather them and "
            f"{row['engram_put_ms']:.3f} to bring them,"
        )
    if "engram_pinned_ms" in row:
        words.append(f"where a step reads them itself {timed(row, 'engram_pinned_ms')},")
    words += [f"{part} failed, {error}," for part, error in row.get("failed", {}).items()]
    return " ".join(words).rstrip(",")


def _by_routing(row: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each law of routing that it was measured by."""
    return [row | each for each in row.get("by_routing", {"": {}}).values()]


def _law(row: dict[str, Any]) -> str:
    return f"{row['routing']} routing " if "routing" in row else ""


def _experts(row: dict[str, Any]) -> str:
    """How many experts were read, where that is known."""
    return f", {row['experts_read']:.1f} experts of a layer" if "experts_read" in row else ""


def _experts_of_table(row: dict[str, Any]) -> str:
    """Those that were read; where a mesh counts none, those that picks by the law are to reach."""
    if "experts_read" in row:
        return f"{row['experts_read']:.1f}"
    return f"~{row['expected_experts']:.1f}"


def decode_table(rows: Sequence[dict[str, Any]]) -> str:
    """A table of `bench decode`, one line per case."""
    columns = {
        "batch": lambda r: f"{r['batch']}",
        "context": lambda r: f"{r['context']:,}",
        "routing": lambda r: r["routing"],
        "experts": _experts_of_table,
        "ms/step": lambda r: f"{r['step_ms']:.3f}",
        "spread": lambda r: f"{(r['step_ms_most'] - r['step_ms_least']) / r['step_ms']:.1%}",
        "in a loop": lambda r: f"{r['loop_ms']:.3f}",
        "tokens/s": lambda r: f"{r['tokens_per_s']:,.0f}",
        "GB moved": lambda r: f"{r['bytes_moved'] / 1e9:.2f}",
        "of copy": lambda r: f"{r['copy_share']:.0%}",
        "floor ms": lambda r: f"{r['floor_ms']:.3f}",
        "launches": lambda r: f"{r['launches']['total']:,}",
        "ours": lambda r: f"{r['launches']['ours']}",
        "cache ms": lambda r: f"{r['cache_part_ms']:.3f}",
        "roofline ms": lambda r: f"{r['cache_part_roofline_ms']:.3f}",
        "target ms": lambda r: f"{r['cache_part_target_ms']:.3f}",
        "compile s": lambda r: f"{r['trace_s'] + r['compile_s']:.1f}",
        "again s": lambda r: f"{r['again_trace_s'] + r['again_compile_s']:.1f}",
        "temp GiB": lambda r: f"{r['temp_bytes'] / 2**30:.2f}",
    }
    each_law = [each for row in rows for each in _by_routing(row)]
    text = table_lines(columns, each_law)
    reads = {
        (row["batch"], row.get("routing")): row for row in each_law if "weight_bytes_read" in row
    }
    for row in reads.values():
        text.append(f"at batch {row['batch']} a step reads {_weights_read(row)}")
    for row in rows:
        if row.get("layer_ms"):
            kinds = ", ".join(f"{kind} {ms:.3f}" for kind, ms in row["layer_ms"].items())
            text.append(f"ms a layer at batch {row['batch']}, {row['context']:,}: {kinds}")
    return "\n".join(text)


def _weights_read(row: dict[str, Any]) -> str:
    """The weights that a step or a prompt must read, by format."""
    sizes = (f"{name} {count / 1e9:.2f}" for name, count in row["weight_bytes_read"].items())
    experts = row.get("experts_read", row["expected_experts"])
    by_law = f" by {row['routing']} routing" if "routing" in row else ""
    return (
        f"weights of {', '.join(sizes)} GB, {experts:.1f} experts of each layer among them{by_law}"
    )


def profile_table(row: dict[str, Any], most: int = 30) -> str:
    """The longest launches of a step or call, and of a step's cache part; "" without a profile."""
    text, whole = [], "call" if "chunk_tokens" in row else "step"
    for name, key in ((whole, "profile"), ("cache part", "cache_part_profile")):
        if launches := row.get(key):
            total = sum(each["us"] for each in launches)
            count = sum(each["launches"] for each in launches)
            text.append(f"{name}: {count:,.0f} launches, {total:,.0f} us one after the other")
            text += [
                f"{each['us']:9.1f} us {each['launches']:7.1f} x {each['least_us']:7.1f} or more  "
                f"{each['what']}"
                for each in launches[:most]
            ]
    return "\n".join(text)


def kernel_line(row: dict[str, Any]) -> str:
    """One op of `bench kernels` as a line of text."""
    where = f"{row['op']}, batch {row['batch']}, context {row['context']:,}:"
    if "failed" in row:
        return f"{where} failed, {row['failed']}"
    roofline = f", roofline {row['roofline_us']:.2f}" if "roofline_us" in row else ""
    return f"{where} {row['us']:.2f} us{roofline}, {row['launches']:.1f} launches"


def kernel_table(rows: Sequence[dict[str, Any]]) -> str:
    """A table of `bench kernels`, one line per op."""
    columns = {
        "op": lambda r: r["op"],
        "batch": lambda r: f"{r['batch']}",
        "context": lambda r: f"{r['context']:,}",
        "us": lambda r: f"{r['us']:.2f}",
        "spread": lambda r: f"{(r['us_most'] - r['us_least']) / r['us']:.1%}",
        "roofline us": lambda r: f"{r['roofline_us']:.2f}",
        "of roofline": lambda r: f"{r['roofline_share']:.0%}",
        "launches": lambda r: f"{r['launches']:.1f}",
        "ours": lambda r: f"{r['ours']:.1f}",
    }
    return "\n".join(table_lines(columns, rows))


def prefill_line(row: dict[str, Any]) -> str:
    """One prompt of `bench prefill` as a line of text."""
    where = f"{row['tokens']:,} tokens in calls of {row['chunk_tokens']:,}:"
    if "failed" in row:
        return f"{where} failed, {row['failed']}"
    ended = compiled(row)
    if row.get("resting_calls"):
        share = row["layer_rows"] / row["all_layer_rows"]
        ended += (
            f" and {compiled(row, 'rest_').removeprefix('compiled in ')}; {row['layer_rows']:,} of "
            f"{row['all_layer_rows']:,} layer-rows ({share:.0%}), upper layers rest in "
            f"{row['resting_calls']} calls but for {row['upper_tokens']} rows each"
        )
    if "prefill_s" not in row:
        return f"{where} {ended}"
    rates = (
        f"{_law(each)}{each['prefill_s']:.3f} s, {each['tokens_per_s']:,.0f} tokens/s, "
        f"{each['matrix_share']:.0%} of the bf16 matrix rate ({each['fp8_share']:.0%} of that of "
        f"FP8), reads {_weights_read(each)}"
        for each in _by_routing(row)
    )
    temp = max(row["temp_bytes"], row.get("rest_temp_bytes", 0)) / 2**30
    return f"{where} {'; '.join(rates)}; {temp:.2f} GiB beside weights and cache, {ended}"


def table_lines(
    columns: dict[str, Callable[[dict[str, Any]], str]], rows: Sequence[dict[str, Any]]
) -> list[str]:
    """A heading and a line per row, with a dash where a row lacks the value of a column."""
    lines = [list(columns)]
    for row in rows:
        line = []
        for cell in columns.values():
            try:
                line.append(cell(row))
            except KeyError:
                line.append("-")
        lines.append(line)
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines]


def find_matplotlib() -> type:
    """The class of figures of `matplotlib`, which is an optional extra.

    Raises:
      ValueError: it is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("a plot needs matplotlib: pip install 'dsv4-jax[bench]'") from error
    return Figure


def plot_decode(rows: Sequence[dict[str, Any]], path: pathlib.Path, *, title: str) -> None:
    """Plots ms per step against context, one colour per batch, with the spread of measurements.

    Raises:
      ValueError: matplotlib is not installed.
    """
    figure = find_matplotlib()(figsize=(8.0, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, batch in enumerate(dict.fromkeys(row["batch"] for row in rows)):
        timed = [row for row in rows if row["batch"] == batch]
        for key, style, label in (
            ("step_ms", "o-", "step"),
            ("cache_part_ms", "s--", "cache part"),
            ("cache_part_roofline_ms", "_:", "its roofline"),
        ):
            points = sorted(
                (row["context"], row[key], row.get(f"{key}_least"), row.get(f"{key}_most"))
                for row in timed
                if key in row
            )
            if not points:
                continue
            contexts, values, least, most = zip(*points, strict=True)
            bars = None
            if None not in least + most:
                bars = [[v - low for v, low in zip(values, least, strict=True)],
                        [high - v for v, high in zip(values, most, strict=True)]]  # fmt: skip
            axes.errorbar(
                contexts, values, bars, fmt=style, color=f"C{number}", capsize=2,
                label=f"{label}, batch {batch}",
            )  # fmt: skip
    _label_contexts(axes, sorted({row["context"] for row in rows}))
    axes.set(yscale="log", xlabel="context, tokens", ylabel="ms a step", title=title)
    axes.set_yticks(_round_numbers(*axes.get_ylim()))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    if axes.get_legend_handles_labels()[0]:
        figure.legend(fontsize="small", loc="outside right upper")
    figure.savefig(path)


def _round_numbers(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, 20 and so on in that range, or more between them where it is small."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for factors in ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        numbers = [factor * 10.0**power for power in powers for factor in factors]
        ticks = [number for number in numbers if low <= number <= high]
        if len(ticks) > 2:
            break
    return ticks


def _label_contexts(axes: Any, contexts: list[int]) -> None:
    """A logarithmic axis of the contexts that were measured: 256, 4K, 1M."""
    axes.set_xscale("log", base=2)

    def spell(count: int) -> str:
        for unit, size in (("M", 2**20), ("K", 2**10)):
            if count >= size:
                return f"{count / size:.4g}{unit}"
        return str(count)

    axes.set_xticks(contexts, [spell(context) for context in contexts])
    axes.minorticks_off()
    axes.margins(x=0.08)
