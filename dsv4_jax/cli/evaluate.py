"""Measures the loss of a checkpoint on text that it never saw, with intervals over rows.

The text is the documentation topics of this Python that training left out. Without an idea it
prints four tables: what each cache format costs, what the formats of the release cost for weights
and for activations, what the indexer's choice is worth against others, on the tokens that see more
entries than it selects, and what it costs to reuse a choice in later layers. With ideas it prints
the loss of each, and the difference over the same rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from dsv4_jax.bench.results import write_json
from dsv4_jax.cache.schema import DEFAULT_CACHE_FORMAT
from dsv4_jax.checkpoint.find import find_checkpoint, may_be_checkpoint
from dsv4_jax.checkpoint.load import load_checkpoint
from dsv4_jax.cli.arguments import add_checkpoint, add_corpus, add_follow_links, find_named
from dsv4_jax.cli.memory import check_weights_memory
from dsv4_jax.cli.output_files import output_file
from dsv4_jax.cli.values import whole, wholes
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.idea import NO_IDEA, Idea
from dsv4_jax.config.layer_types import AttentionType
from dsv4_jax.model.params import DSV4Params, quantize_params
from dsv4_jax.regular_files import read_regular
from dsv4_jax.research.intervals import Interval, mean_interval, paired_difference
from dsv4_jax.research.losses import losses_by_row, trace_loss
from dsv4_jax.research.named import find_idea, find_object
from dsv4_jax.research.users_code import telling_users_frames
from dsv4_jax.standard_streams import say
from dsv4_jax.training.corpus import held_out_rows, read_held_out
from dsv4_jax.training.losses import select_all, select_at_random
from pallas_kernels.common.formats import CACHE_FORMATS
from pallas_kernels.common.weights import ACTIVATIONS

_CHOSEN = ("compare", "selector", "max_selected", "pooling", "format", "index_reuse", "corpus")
"""Arguments that say what is measured, beside the checkpoint, the rows and their length."""
_MAX_KEPT_BYTES = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    add_checkpoint(parser)
    add_corpus(parser)
    parser.add_argument("--length", type=whole(2), default=1024, help="tokens of a row")
    parser.add_argument(
        "--rows", type=whole(2, 2**20), help="rows to measure; if not given, all there are"
    )
    parser.add_argument(
        "--compare",
        nargs="+",
        metavar="IDEA",
        help="two ideas or more: none, a cache format, or module:name of an Idea or a selector; "
        "differences are from the first; if not given, no ideas, but formats, weights, selections "
        "and layers that reuse one",
    )
    one = parser.add_argument_group("one idea, compared with none")
    one.add_argument(
        "--selector",
        metavar="MODULE:NAME",
        help="picks the entries of CSA layers; if not given, the model does",
    )
    one.add_argument(
        "--max-selected",
        type=whole(),
        help="the most entries that the selector selects; if not given, all",
    )
    one.add_argument(
        "--pooling",
        metavar="MODULE:NAME",
        help="what tokens bring into windows; if not given, as the model has it",
    )
    one.add_argument(
        "--format",
        choices=CACHE_FORMATS,
        help="the cache's storage format; if not given, the default",
    )
    one.add_argument(
        "--index-reuse",
        type=wholes(0),
        help="CSA layers that take an earlier one's choice; if not given, the config's",
    )
    parser.add_argument(
        "--json",
        type=output_file(".json"),
        help="write every row's and position's loss, as soon as it is measured; of a file that has "
        "some from a command that was stopped the others are measured; if not given, nothing",
    )
    add_follow_links(parser)


def run(args: argparse.Namespace) -> int:
    """Prints tables, or a comparison."""
    _settle_compared(args)
    ideas = _find_ideas(args)
    checkpoint = find_checkpoint(args.checkpoint, revision=args.revision, drafts=False)
    config = DSV4Config.from_hf(
        checkpoint, follow_links=args.follow_links, text_only=True, drafts=False
    )
    configs = {name: idea.applied_to(config) for name, idea in ideas.items()}
    covered = config.indexer_top_k * config.compression_ratio(AttentionType.CSA)
    if not covered < args.length <= config.max_position_embeddings:
        raise ValueError(
            f"--length must be in {covered + 1}..{config.max_position_embeddings}, since choices "
            f"are compared on tokens beyond what is always selected, got {args.length}"
        )
    all_rows = held_out_rows(read_held_out(args.corpus), args.length)
    rows = all_rows[: args.rows]
    with telling_users_frames():
        for carried in configs.values():
            trace_loss(carried, args.length)
    check_weights_memory(checkpoint, jnp.float32, follow_links=args.follow_links)
    _, params = load_checkpoint(
        checkpoint, dtype=jnp.float32, follow_links=args.follow_links, drafts=False
    )
    of_them = "all" if len(rows) == len(all_rows) else f"the first {len(rows)} of"
    print(
        f"{of_them} {len(all_rows)} rows of {args.length} tokens, f32 activations; nats per token,"
    )
    print("95 % intervals by bootstrap over rows", flush=True)
    if len(rows) < len(all_rows):
        print(
            "other rows have other losses: compare what was measured on the same ones", flush=True
        )
    chosen = {name: getattr(args, name) for name in _CHOSEN}
    about = {"checkpoint": str(checkpoint), "length": args.length, "rows": len(rows)}
    about |= {"chosen": json.loads(json.dumps(chosen, default=str))}
    total = len(ideas) or _count_tables(config)
    report = _Report(config, params, rows, covered, args.json, about, total)
    report.read_kept()
    if ideas:
        with telling_users_frames():
            _compare(report, configs)
    else:
        _print_tables(report)
    return 0


def _settle_compared(args: argparse.Namespace) -> None:
    """Takes a checkpoint that stands behind the names of `--compare` for what it is.

    Raises:
      ValueError: there is one idea alone.
    """
    names: list[str] | None = args.compare
    if names is None:
        return
    is_idea = names[-1] in ("none", *CACHE_FORMATS) or ":" in names[-1]
    if args.checkpoint is None and not is_idea and may_be_checkpoint(names[-1]):
        args.checkpoint = names.pop()
    if len(names) < 2:
        raise ValueError(
            f"--compare must have two ideas or more, got {' '.join(names) or 'none'}; what others "
            "are compared with comes first, such as --compare none bf16"
        )


def _find_ideas(args: argparse.Namespace) -> dict[str, Idea]:
    """The ideas of the command line by name; {} asks for the tables.

    Raises:
      ValueError: an idea cannot be found, or `--compare` is given beside one.
    """
    fields: dict[str, Any] = {
        "selector": args.selector and find_named("--selector", find_object, args.selector),
        "max_selected": args.max_selected,
        "pooling": args.pooling and find_named("--pooling", find_object, args.pooling),
        "cache_format": args.format,
        "index_reuse": args.index_reuse and tuple(args.index_reuse),
    }
    given = {name: value for name, value in fields.items() if value is not None}
    if args.compare and given:
        raise ValueError("give --compare or options of one idea, not both")
    if args.compare:
        return {name: find_named("--compare", find_idea, name) for name in args.compare}
    return {"none": NO_IDEA, "the idea": Idea(**given)} if given else {}


@dataclasses.dataclass
class _Report:
    """Measures losses, and keeps what it measured.

    Attributes:
      config: the model, without an idea.
      params: model parameters, as stored.
      rows: i32[n, T + 1].
      covered: position from which a token sees more entries than are selected.
      path: where measurements are kept, if anywhere.
      about: what the measurements of a file have in common.
      total: how many measurements there will be.
      measured: what each measurement gave.
    """

    config: DSV4Config
    params: DSV4Params
    rows: np.ndarray
    covered: int
    path: pathlib.Path | None
    about: dict[str, Any]
    total: int
    measured: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def measure(self, name: str, config: DSV4Config, **options: Any) -> np.ndarray:
        """f32[n, T], the losses under a config; `params` and `activations` as options."""
        for earlier in self.measured:
            if earlier["name"] == name:
                return np.asarray(earlier["losses"], np.float32)
        params = options.pop("params", self.params)
        doing = f"{name} ({len(self.measured) + 1} of {self.total})"
        losses = losses_by_row(params, self.rows, config=config, doing=doing, **options)
        self.measured.append(
            {
                "name": name,
                "loss": mean_interval(losses.mean(axis=1, dtype=np.float64))._asdict(),
                "by_row": np.round(losses.mean(axis=1), 5).tolist(),
                "by_position": np.round(losses.mean(axis=0), 5).tolist(),
                "losses": np.round(losses, 4).tolist(),
            }
        )
        if self.path is not None:
            write_json(self.path, self.about | {"measured": self.measured})
        return losses

    def read_kept(self) -> None:
        """Takes what a command that was stopped has measured of the same."""
        if self.path is None or not self.path.is_file():
            return
        try:
            kept = json.loads(read_regular(self.path, _MAX_KEPT_BYTES))
            is_same = {name: kept.get(name) for name in self.about} == self.about
        except (ValueError, AttributeError):
            return  # something else, which is replaced
        if is_same:
            self.measured = kept["measured"]
            say(f"[{len(self.measured)} measurements are in {self.path} already]")


def _compare(report: _Report, configs: dict[str, DSV4Config]) -> None:
    losses = {name: report.measure(name, config) for name, config in configs.items()}
    for first, text in ((0, "all tokens"), (report.covered, f"beyond position {report.covered}")):
        by_row = {
            name: found[:, first:].mean(axis=1, dtype=np.float64) for name, found in losses.items()
        }
        print(f"\n{text}")
        for name, values in by_row.items():
            print(f"  {name:<40}{_shown(mean_interval(values))}")
        first_name, *others = by_row  # none other where an idea is compared with itself
        for name in others:
            difference = paired_difference(by_row[first_name], by_row[name])
            told = "they may be equal"
            if difference.leaves_out_zero:
                told = f"{name} is {'worse' if difference.mean > 0 else 'better'}"
            label = "difference, row by row" if len(others) == 1 else f"{name} from {first_name}"
            print(f"  {label:<40}{_shown(difference, sign='+')}; {told}", flush=True)


def _count_tables(config: DSV4Config) -> int:
    """How many measurements `_print_tables` makes."""
    released, choices = 2 * len(ACTIVATIONS), 2
    return len(CACHE_FORMATS) + released + choices + len(_reused(config))


def _reused(config: DSV4Config) -> list[tuple[int, ...]]:
    """CSA layers that reuse an earlier choice, in each measurement of that table."""
    csa = [i for i, attn in enumerate(config.layer_types) if attn == AttentionType.CSA]
    return [*((layer,) for layer in csa[1:]), *([tuple(csa[1:])] if csa[2:] else [])]


def _print_tables(report: _Report) -> None:
    config, covered = report.config, report.covered
    beyond = f"of tokens beyond position {covered}"
    by_format = {
        name: report.measure(name, Idea(cache_format=name).applied_to(config))
        for name in CACHE_FORMATS
    }
    _print_table("cache format", "", by_format)
    released = quantize_params(config, report.params)
    by_weights = {"as stored, f32": by_format["f32"]}
    for activations in ACTIVATIONS:
        for name in ("f32", DEFAULT_CACHE_FORMAT):
            label = f"released, rows in {activations}, {name}"
            carried = Idea(cache_format=name).applied_to(config)
            by_weights[label] = report.measure(
                label, carried, params=released, activations=activations
            )
    _print_table("weights, activations, cache", "", by_weights)
    chosen = {"by the indexer": by_format["f32"]}
    for name, selector in (("every entry", select_all), ("at random", select_at_random)):
        chosen[name] = report.measure(name, Idea(selector=selector).applied_to(config))
    _print_table("entries selected", beyond, chosen, first=covered)
    reusing = {"none": by_format["f32"]}
    for layers in _reused(config):
        name = ", ".join(map(str, layers))
        reusing[name] = report.measure(
            f"reuse in {name}", Idea(index_reuse=layers).applied_to(config)
        )
    _print_table("layers that reuse", beyond, reusing, first=covered)


def _print_table(title: str, text: str, losses: dict[str, np.ndarray], *, first: int = 0) -> None:
    """Each loss, and its difference from that of the first line, over positions from `first` on."""
    print(f"\n{title:<40}{'loss':>26}{'difference from the first':>34}   {text}")
    by_row = [found[:, first:].mean(axis=1, dtype=np.float64) for found in losses.values()]
    for name, values in zip(losses, by_row, strict=True):
        shown = _shown(mean_interval(values))
        if values is not by_row[0]:
            shown += f"{_shown(paired_difference(by_row[0], values), sign='+'):>34}"
        print(f"{name:<40}{shown}", flush=True)


def _shown(interval: Interval, sign: str = "") -> str:
    mean, low, high = (format(number, f"{sign}.4f") for number in interval)
    return f"{mean} ({low} to {high})"
