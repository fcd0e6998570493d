"""Completes prompts: answers on stdout, all else on stderr."""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import shlex
import sys
import time
from collections.abc import Iterator, Sequence

from jax.sharding import Mesh
from tokenizers import Tokenizer

from dsv4_jax.checkpoint.find import ON_THE_HUB, SHIPPED, may_be_checkpoint, near_checkpoint
from dsv4_jax.cli.arguments import (
    add_checkpoint,
    add_fields,
    add_hosts,
    add_loading,
    chosen_fields,
    join_mesh,
)
from dsv4_jax.cli.engine_options import add_engine_options, build_engine, find_model
from dsv4_jax.cli.old_names import is_first_word
from dsv4_jax.cli.presets import PRESETS
from dsv4_jax.cli.quick_start import one_shape
from dsv4_jax.cli.values import utf8_text, whole
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.kinds import show
from dsv4_jax.lines import split_lines, without_line_end, without_mark
from dsv4_jax.progress import Progress
from dsv4_jax.regular_files import read_given, read_stream
from dsv4_jax.rules import rules_of
from dsv4_jax.serving.engine import Engine
from dsv4_jax.serving.options import NO_STEP_BOUND_MS
from dsv4_jax.serving.requests.request import Completion
from dsv4_jax.serving.requests.text import encode_text, load_tokenizer
from dsv4_jax.standard_streams import say
from dsv4_jax.step.sampling import SamplingParams

_MAX_REQUESTS = 32
"""Requests that run at once where no number is given and there are more prompts."""

_MAX_BYTES = 2**28
"""Of a file of prompts, or of standard input."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    add_checkpoint(parser, words_after="prompt")
    parser.add_argument(
        "prompt",
        nargs="*",
        metavar="PROMPT",
        type=utf8_text,
        help="text to complete; several run in one batch; none at all reads standard input",
    )
    parser.add_argument(
        "--file",
        action="append",
        default=[],
        help="file whose text is a prompt, repeatable; - is standard input, and a shell's "
        "<(command) is read too; if not given, none",
    )
    parser.add_argument(
        "--lines", action="store_true", help="take every line of the files for a prompt of its own"
    )
    names = [name for name, ruled in rules_of(SamplingParams).items() if ruled.help]
    add_fields(parser, SamplingParams, names, max_new_tokens=256, temperature=0.6)
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        type=utf8_text,
        help="text that ends an answer and is not shown, repeatable; if not given, none",
    )
    parser.add_argument(
        "--max-requests",
        type=whole(1, 2**16),
        help=f"prompts that run at once; if not given, all, and {_MAX_REQUESTS} at most",
    )
    parser.add_argument(
        "--json", action="store_true", help="print an object for each answer, one a line"
    )
    add_engine_options(parser)
    add_hosts(parser)
    add_loading(parser)


def run(args: argparse.Namespace) -> int:
    """Streams one prompt's answer; those of several are printed in order, as they are done."""
    started = time.perf_counter()
    _settle_prompts(args)
    prompts = _read_prompts(args)
    sampling = SamplingParams(**chosen_fields(args, SamplingParams), stop_texts=args.stop)
    mesh, follows = join_mesh(args)
    engine = _build(args, prompts, mesh)
    if follows:
        engine.follow()
        return 0
    _note(f"loaded in {time.perf_counter() - started:.1f} s; compiling for the first tokens")
    ids = [engine.submit(prompt, sampling=sampling) for prompt in prompts]
    streams = len(prompts) == 1 and not args.json
    times: list[float] = []
    failed = 0
    for number, completion in _serve(engine, ids, streams=streams, times=times):
        if completion.error is not None:
            _note(f"prompt {number + 1} failed: {completion.error}")
            failed = 1
        if args.json:
            print(json.dumps(_describe(prompts[number], completion)), flush=True)
        else:
            print("" if streams else completion.text, flush=True)
    _tell_times([moment - started for moment in times], warm=2 * len(ids))
    if drafted := engine.metrics.drafted_at.get("1"):
        kept = engine.metrics.accepted_tokens / drafted
        _note(f"{1 + kept:.1f} tokens a round: of each round's drafts {kept:.1f} were kept")
    engine.close()
    return failed


def _tell_times(times: Sequence[float], *, warm: int) -> None:
    """Says how fast tokens came.

    Args:
      times: seconds to each.
      warm: tokens after which all programs are compiled.
    """
    if not times:
        return
    text = f"{len(times)} tokens, the first after {times[0]:.1f} s"
    if len(times) > warm:
        rate = (len(times) - warm) / (times[-1] - times[warm - 1])
        text += f"; {rate:.0f} tokens/s once compiled"
    _note(text)


def _settle_prompts(args: argparse.Namespace) -> None:
    """Takes a first argument that can be no checkpoint for a prompt, as it was without `--`.

    Raises:
      ValueError: an argument is no UTF-8, or a checkpoint is meant that is not there, or not first.
    """
    if is_first_word(args) and not may_be_checkpoint(args.checkpoint):
        _refuse_meant(args.checkpoint, args.prompt)
        _note(
            f"{args.checkpoint!r} is no checkpoint that is here, so {SHIPPED} completes it. A "
            "checkpoint is the first argument, and from the next release on it has to be there: "
            f"dsv4-jax generate {SHIPPED} PROMPT"
        )
        try:
            first = utf8_text(args.checkpoint)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"argument PROMPT: {error}") from None
        args.prompt, args.checkpoint = [first, *args.prompt], None


def _refuse_meant(first: str, others: Sequence[str]) -> None:
    """Refuses arguments of which the first is no checkpoint, but one of them is meant for it.

    Raises:
      ValueError: the first is near a checkpoint's name or names a preset, or another argument is a
        checkpoint.
    """
    rule = (
        f"argument CHECKPOINT: must be a directory that is there, a name on the hub (owner/model) "
        f"or {SHIPPED}, got {show(first)}"
    )
    as_text = shlex.join(["dsv4-jax", "generate", SHIPPED, first, *others])
    if first in PRESETS:
        released = [name for name, preset in ON_THE_HUB.items() if preset == first]
        meant = f"; its checkpoint is {released[0]}" if released else ""
        raise ValueError(
            f"{rule}, which is a name for `plan` and `bench` alone{meant}; as a text: {as_text}"
        )
    if near := near_checkpoint(first, (SHIPPED, *ON_THE_HUB)):
        raise ValueError(f"{rule}; did you mean {near}? As a text: {as_text}")
    for other in others:
        if other == SHIPPED or other in ON_THE_HUB or _is_checkpoint(other):
            texts = [first, *(text for text in others if text != other)]
            raise ValueError(
                f"{rule}; the checkpoint comes before the texts: "
                f"{shlex.join(['dsv4-jax', 'generate', other, *texts])}. As texts: {as_text}"
            )


def _is_checkpoint(text: str) -> bool:
    """Whether a directory with a config has that name."""
    try:
        return (pathlib.Path(text) / "config.json").is_file()
    except (OSError, ValueError):  # too long for a path, or none
        return False


def _read_prompts(args: argparse.Namespace) -> list[str]:
    """Those of the command line, then those of files or, without any, of standard input.

    Raises:
      ValueError: there is none, or a file is no UTF-8, too large or none that is read.
      OSError: a file cannot be read.
    """
    prompts: list[str] = list(args.prompt)
    files: list[str] = args.file
    if not prompts and not files:
        if sys.stdin is None or sys.stdin.isatty():
            raise ValueError("there must be a prompt: give a text, --file FILE, or standard input")
        files = ["-"]
    for file in files:
        name = "standard input" if file == "-" else file
        if file == "-" and sys.stdin is None:
            raise ValueError(
                "--file - reads standard input, which is closed; open it or name a file"
            )
        try:
            if file == "-":
                raw = read_stream(sys.stdin.buffer, _MAX_BYTES, name)
            else:
                raw = read_given(file, _MAX_BYTES)
            text = without_line_end(without_mark(raw).decode())
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} must be UTF-8 ({error})") from None
        texts = [line for line in split_lines(text) if line] if args.lines else [text]
        if not any(texts):
            raise ValueError(f"{name} must hold a prompt, and is empty")
        prompts += texts
    return prompts


def _serve(
    engine: Engine, ids: list[int], *, streams: bool, times: list[float]
) -> Iterator[tuple[int, Completion]]:
    """(number, completion) of every prompt in order; `times` gets the time of every token."""
    ended: set[int] = set()
    given = 0
    bar: Progress | None = None
    with contextlib.ExitStack() as shown:
        for token in engine.stream(*ids):
            if bar is None:  # by now it is compiled
                several = Progress(len(ids), unit="prompt", doing="serving", shown=len(ids) > 1)
                bar = shown.enter_context(several)
            times.append(time.perf_counter())
            if streams and token.text:
                print(token.text, end="", flush=True)
            if token.finish_reason is not None:
                ended.add(token.request_id)
                bar.add()
            while given < len(ids) and ids[given] in ended:
                yield given, engine.completion(ids[given])
                given += 1
        for number in range(given, len(ids)):  # what failed may end without a token
            yield number, engine.completion(ids[number])


def _describe(prompt: str, completion: Completion) -> dict[str, object]:
    """An answer as `--json` prints it."""
    return {
        "prompt": prompt,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "error": completion.error,
        "token_ids": completion.token_ids,
        "prompt_tokens": completion.prompt_tokens,
        "hit_tokens": completion.hit_tokens,
    }


def _build(args: argparse.Namespace, prompts: list[str], mesh: Mesh | None) -> Engine:
    """An engine with a context for the longest prompt and its answer, in powers of two."""
    data = args.data or 1
    folder, config = find_model(args, needs_tokenizer=True)
    tokenizer = load_tokenizer(folder, follow_links=args.follow_links)
    if tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer.json, so text cannot be encoded")
    max_requests = args.max_requests or -(-min(len(prompts), _MAX_REQUESTS) // data) * data
    rows = -(-max_requests // data)
    return build_engine(
        args,
        folder,
        config,
        # Steps for fewer requests would take longer to compile than they save.
        **(one_shape(args, rows) or {"decode_batch_sizes": (rows,)}),
        mesh=mesh,
        grammars=False,
        max_step_ms=NO_STEP_BOUND_MS,  # nobody reads along
        max_requests=max_requests,
        max_context_tokens=_find_context(args, config, tokenizer, prompts),
        tokenizer=tokenizer,
    )


def _find_context(
    args: argparse.Namespace, config: DSV4Config, tokenizer: Tokenizer, prompts: list[str]
) -> int:
    """The context that is needed, by config and tokenizer alone, which are read at once."""
    limit, longest = config.max_position_embeddings, 0
    for number, prompt in enumerate(prompts, 1):
        try:
            token_ids = encode_text(tokenizer, prompt).ids
        except ValueError as error:
            raise ValueError(f"prompt {number} must be another text: {error}") from error
        if not token_ids:
            raise ValueError(f"prompt {number} must have at least one token, got {prompt!r}")
        if max(token_ids) >= config.vocab_size:
            name = args.checkpoint or SHIPPED
            raise ValueError(
                f"the tokenizer.json of {name} gives prompt {number} the token {max(token_ids)}, "
                f"and config.json has vocab_size={config.vocab_size}"
            )
        length = len(token_ids) + args.max_new_tokens
        if length > limit:
            raise ValueError(
                f"prompt {number} of {len(token_ids)} tokens and --max-new-tokens "
                f"{args.max_new_tokens} must be at most max_position_embeddings={limit} together, "
                f"got {length}"
            )
        longest = max(longest, length)
    return min(1 << (longest - 1).bit_length(), limit)


def _note(text: str) -> None:
    say(f"[{text}]")
