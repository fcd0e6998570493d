"""Arguments that several commands take."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.sharding import Mesh

from dsv4_jax.checkpoint.find import SHIPPED
from dsv4_jax.cli.old_names import add_old_first, add_old_name
from dsv4_jax.cli.values import num_bytes, num_bytes_or_auto, real, utf8_text, whole, wholes
from dsv4_jax.hosts import DEFAULT_TIMEOUT_S, join_hosts
from dsv4_jax.mesh import make_mesh
from dsv4_jax.rules import UNITS, Bytes, Flag, Folder, ListOf, Real, Rule, Whole, Word, rules_of
from dsv4_jax.serving.options import EngineOptions

MAX_DEVICES = 1024
_OPTIONS = {
    "host_cache_bytes": "--host-cache",
    "disk_cache_dir": "--disk-cache",
    "disk_cache_bytes": "--disk-cache-size",
}
"""Options that are not called as their fields: the value has the unit."""


def option_of(field: str) -> str:
    """The name of a field's option."""
    return _OPTIONS.get(field) or f"--{field.replace('_', '-')}"


def add_fields(
    parser: argparse.ArgumentParser, kind: type, names: Iterable[str], **defaults: Any
) -> None:
    """Adds an option for each of those fields of a dataclass, as its rule says.

    Args:
      parser: what is added to.
      kind: the dataclass.
      names: fields that have a rule.
      **defaults: of fields that do not have the dataclass's here.
    """
    rules = rules_of(kind)
    for name in names:
        rule, default = rules[name].flag or rules[name].rule, getattr(kind, name)
        parser.add_argument(
            option_of(name),
            **_reading(rule, default, is_bytes=name.endswith("_bytes")),
            dest=name,
            default=defaults.get(name, default),
            help=rules[name].help,
        )


def _reading(rule: Rule, default: Any, *, is_bytes: bool = False) -> dict[str, Any]:
    """How `argparse` reads what a rule says; `is_bytes` of a whole number takes 64MiB too."""
    match rule:
        case Flag():
            return {"action": argparse.BooleanOptionalAction if default else "store_true"}
        case Word():
            return {"choices": rule.known} | ({"type": rule.named} if rule.also else {})
        case Bytes():
            read = num_bytes_or_auto if rule.has_auto else num_bytes
            return {"type": read, "metavar": "BYTES"}
        case Folder():
            return {"type": utf8_text, "metavar": "DIR"}
        case Whole() if is_bytes:
            return {"type": whole(*_bounds(rule), units=UNITS), "metavar": "BYTES"}
        case Whole():
            return {"type": whole(*_bounds(rule))}
        case ListOf(item=Whole() as item):
            return {"type": wholes(*_bounds(item))}
        case Real(most=float() | int() as most):
            return {"type": real(rule.least, most)}
    raise TypeError(f"the command line reads nothing by {rule}")


def _bounds(rule: Whole) -> tuple[int, int]:
    assert rule.least is not None
    assert rule.most is not None
    return rule.least, rule.most


def chosen_fields(args: argparse.Namespace, kind: type) -> dict[str, Any]:
    """What was chosen for the fields of a dataclass that have an option in a command."""
    return {name: getattr(args, name) for name in rules_of(kind) if hasattr(args, name)}


def add_weights(
    parser: argparse.ArgumentParser, forms: Word, default: str | None, help: str
) -> None:
    """Adds the form of weights, one of those; it must be given if there is no default."""
    others = "".join(f"; {text} means {form}" for text, form in forms.also)
    parser.add_argument(
        "--weights",
        **_reading(forms, default),
        required=default is None,
        default=default,
        help=help + others,
    )


def add_activations(parser: argparse.ArgumentParser, *, prefill: bool = True) -> None:
    """Adds what multiplies quantised weights, with `prefill` for decode and prefill apart."""
    add_fields(parser, EngineOptions, ("activations", "prefill_activations")[: 1 + prefill])


def add_cache_format(parser: argparse.ArgumentParser) -> None:
    """Adds the storage format of a cache, by name; None if not given, which is the model's own."""
    add_fields(parser, EngineOptions, ["cache_format"])


def add_seconds(
    parser: argparse.ArgumentParser, name: str, default: float, rest: str, *, least: float = 0.0
) -> None:
    """Adds a number of seconds; `rest` is what the help says of them."""
    parser.add_argument(name, type=real(least, 1e6), default=default, help=f"seconds {rest}")


def add_mesh(
    parser: argparse.ArgumentParser, *, split_cache: bool = False, if_not_given: str = "1"
) -> None:
    """Adds a mesh's sizes, and with `split_cache` whether blocks are dealt over its axis "model".

    Both sizes are None if neither is given; help says what holds then.
    """
    sizes = {
        "data": f"groups of GPUs, each with a part of the requests; if not given, {if_not_given}",
        "model": "GPUs of a group, each with a part of heads and experts; if not given, "
        f"{if_not_given}",
    }
    for axis, text in sizes.items():
        name = f"--{axis}-shards"
        parser.add_argument(name, type=whole(1, MAX_DEVICES), dest=axis, help=text)
        add_old_name(parser, f"--{axis}", name, type=_old_size(name), dest=axis)
    if split_cache:
        add_fields(parser, EngineOptions, ["split_cache"])


def _old_size(name: str) -> Callable[[str], int]:
    """Reads a size under its old name, which may be taken for a checkpoint's."""
    read = whole(1, MAX_DEVICES)

    def read_size(text: str) -> int:
        try:
            return read(text)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(
                f"{error}; it is the old name of {name}, and a checkpoint is the first argument, "
                "without an option"
            ) from None

    return read_size


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """Adds the sizes of a mesh, and what makes a process one of several on it."""
    add_mesh(parser, split_cache=True)
    group = parser.add_argument_group("several processes, each with the same arguments otherwise")
    group.add_argument(
        "--hosts", action="store_true", help="as SLURM, MPI or Kubernetes started them"
    )
    group.add_argument(
        "--coordinator",
        help="ADDRESS:PORT of process 0; whoever reaches that port is trusted; if not given, "
        "this process is alone, or --hosts finds it",
    )
    group.add_argument(
        "--num-processes",
        type=whole(1, MAX_DEVICES),
        help="how many there are; if not given, as --coordinator",
    )
    group.add_argument(
        "--process-id",
        type=whole(0, MAX_DEVICES),
        help="which one this is; 0 prints the results; if not given, as --coordinator",
    )
    group.add_argument(
        "--host-timeout-s",
        type=real(1, 1e6),
        default=DEFAULT_TIMEOUT_S,
        help="how long a process may be silent before the others end",
    )


def mesh_options(data: int, model: int) -> str:
    """The options that ask for such a mesh, for messages."""
    return f"--data-shards {data} --model-shards {model}"


def join_mesh(args: argparse.Namespace) -> tuple[Mesh | None, bool]:
    """Joins the processes of `add_hosts`, if any.

    Returns:
      The mesh, None being one device, and whether this process does what process 0 tells it.

    Raises:
      ValueError: the options do not say which processes, or there is no mesh for them.
    """
    given = (args.coordinator, args.num_processes, args.process_id)
    if not args.hosts and all(one is None for one in given):
        return chosen_mesh(args), False
    if args.data is None and args.model is None:
        raise ValueError("several processes share a mesh; add --data-shards and --model-shards")
    hosts = join_hosts(*given, timeout_s=args.host_timeout_s)
    return chosen_mesh(args), hosts.number > 0


def chosen_mesh(args: argparse.Namespace) -> Mesh | None:
    """The mesh of `add_mesh`; None is one device.

    Raises:
      ValueError: JAX has too few devices.
    """
    data, model = args.data or 1, args.model or 1
    if data * model == 1:
        return None
    if len(jax.devices()) < data * model:
        raise ValueError(
            f"{mesh_options(data, model)} is a mesh of {data * model} devices, and JAX has "
            f"{len(jax.devices())}; on CPUs, XLA_FLAGS=--xla_force_host_platform_device_count="
            f"{data * model} makes as many"
        )
    return make_mesh(data, model)


def add_corpus(parser: argparse.ArgumentParser) -> None:
    """Adds `--corpus`, which texts losses and routers are looked at with."""
    parser.add_argument(
        "--corpus",
        type=pathlib.Path,
        help="a file of dsv4_jax.training.corpus; if not given, this Python's own documentation",
    )


def add_checkpoint(parser: argparse.ArgumentParser, *, words_after: str | None = None) -> None:
    """Adds the checkpoint, the first argument, to be found by `find_checkpoint`.

    Args:
      parser: what is added to, before any other argument without a dash.
      words_after: the field of a list of arguments that comes next, of which the first may be taken
        for the checkpoint where this was left out.
    """
    parser.add_argument(
        "checkpoint",
        nargs="?",
        metavar="CHECKPOINT",
        help=f"a directory, a model on the Hugging Face hub (owner/model), or {SHIPPED}, the small "
        "model that comes with the package; if not given, that one",
    )
    add_old_first(parser, "checkpoint")
    if words_after is not None:
        parser.set_defaults(words_after=words_after)
    parser.add_argument(
        "--revision",
        help="branch, tag or commit of a model on the hub; if not given, its main branch",
    )


def add_loading(parser: argparse.ArgumentParser, *, check_weights: bool | None = None) -> None:
    """Adds what `load_checkpoint` trusts; `check_weights` is the default of that option."""
    parser.add_argument(
        "--check-weights",
        action=argparse.BooleanOptionalAction,
        default=check_weights,
        help="name every tensor that holds NaN or infinity"
        + ("" if check_weights else "; if not given, where the tensors take 64 MiB at most"),
    )
    add_follow_links(parser)


def find_named[T](argument: str, find: Callable[[str], T], name: str) -> T:
    """What an argument names, such as an idea.

    Raises:
      ValueError: `find` does; the error names the argument.
    """
    try:
        return find(name)
    except ValueError as error:
        raise ValueError(f"argument {argument}: {error}") from error


def add_follow_links(parser: argparse.ArgumentParser) -> None:
    """Adds what `find_file` trusts."""
    parser.add_argument(
        "--follow-links",
        action="store_true",
        help="read files that are links out of the checkpoint directory; those of a Hugging Face "
        "cache are read anyway",
    )


def add_drafts(parser: argparse.ArgumentParser, what: str = "the draft of the model") -> None:
    """Adds whether a model has its draft; `what` says which one, or when."""
    parser.add_argument(
        "--drafts",
        choices=("auto", "off"),
        default="auto",
        help=f"auto: {what}, an MTP block or DSpark stages; off: none, whatever there is",
    )
