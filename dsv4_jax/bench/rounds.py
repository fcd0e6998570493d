"""Times rounds of drafts beside plain steps: whole, in parts, and with a taught acceptance."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.bench import round_parts
from dsv4_jax.bench.loops import Loops
from dsv4_jax.bench.memory import peak_bytes
from dsv4_jax.bench.noise import uniform
from dsv4_jax.bench.profile import profile_launches
from dsv4_jax.bench.program import Program
from dsv4_jax.bench.report import first_line
from dsv4_jax.bench.round_case import (
    RoundCase,
    copied,
    mean_kept,
)
from dsv4_jax.bench.round_floor import RoundBytes, round_bytes
from dsv4_jax.bench.round_programs import BLOCK_PICKS, PICKS, Model, context_arguments
from dsv4_jax.bench.routing import mean_distinct
from dsv4_jax.bench.routing_laws import LAWS
from dsv4_jax.bench.taught_rounds import Reader, taught_rounds, tokens_per_s
from dsv4_jax.bench.timing import Calls, Timing, dispatch, settled, time_calls, time_ratio
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.config import DSV4Config
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.step.sampling import make_sampling
from dsv4_jax.step.serve_values import ServeInput, ServeOutput

_BYTES_OF = {
    "plain": "plain",
    "undrafted": "plain",
    "overlapped": "round",
    "free": "round",
    "pass": "block_pass",
}
_COUNTED = ("plain", "verify", "context", "block_pass", "chain", "proposal", "round")
_IN_TURNS = ("undrafted", "round", "overlapped")
_PROFILED = 4


def bench_rounds(
    model: Model, case: RoundCase, programs: dict[str, Any], *, profile: bool = False
) -> Iterator[dict[str, Any]]:
    """Runs one case and yields its row again after each part, so that a crash loses little.

    Each part fills its own cache, so that no part can break the next.

    Args:
      model: with its parameters.
      case: the point.
      programs: of `RoundPrograms`.
      profile: whether launches of plain steps, rounds and proposals are listed.

    Yields:
      The row so far: `parts`, of each times in ms, bytes, launches, memory; `kept`, of each number
      of drafts that rounds were taught to keep their time and what they kept; `tokens_per_s`; and
      `beside_plain`, of some parts how many times as long as a plain step they take, measured in
      turns with it. `failed` has the error of each part that failed.
    """
    data, devices = case.mesh_sizes
    floors = round_bytes(
        model.config, case.device_params(model.params), batch=case.batch,
        draft_tokens=case.draft_tokens, context=case.context, cache_format=case.cache_format,
        exponent=LAWS[case.routing], data=data, model=devices, activations=case.activations,
    )  # fmt: skip
    row: dict[str, Any] = case.sizes() | {
        "rounds": case.rounds,
        "bytes": {name: getattr(floors, name) for name in _COUNTED},
        "expected_experts": floors.experts,
        "parts": {},
    }
    reads = _reader(model, case, programs, row)
    some = case.random_input(model.config, case.row_tokens)
    timers: dict[str, Callable[[Any], Iterator[dict[str, Any]]]] = {
        "plain": lambda p: _plain(case, model.trunk_config, model.trunk_params, p, profile),
        "round": lambda p: _rounds(model, case, p, some, reads, profile),
        "proposal": lambda p: _proposal(model, case, p, programs, profile, is_whole=True),
        "pass": lambda p: _proposal(model, case, p, programs, False, is_whole=False),
        "context": lambda p: _context(model, case, p),
        "undrafted": lambda p: _plain(case, model.config, model.params, p, False),
        "free": lambda p: _rounds(model, case, p, case.round_input(), reads, False),
        "overlapped": lambda p: _rounds(
            model, case, p, some, reads, profile and "round" not in programs
        ),
    }
    for part, program in programs.items():
        if part not in timers:
            continue
        found: dict[str, Any] = row["parts"].setdefault(part, {})
        try:
            if isinstance(program, Exception):
                raise program
            if isinstance(program, Program):
                found |= program.row() | {"alias_bytes": program.alias_bytes}
            for more in timers[part](program):
                found |= more
                _add_floor(found, floors, _BYTES_OF.get(part, part), case)
                yield row
        except Exception as error:
            found["failed"] = first_line(error)
            row.setdefault("failed", {})[part] = found["failed"]
            yield row
    for part in _IN_TURNS:
        if {part, "plain"} <= programs.keys() - row.get("failed", {}).keys():
            try:
                found = _beside_plain(model, case, part, programs, some)
                row.setdefault("beside_plain", {})[part] = found
            except Exception as error:
                row.setdefault("failed", {})[f"{part} in turns"] = first_line(error)
            yield row
    if (part := _taught_part(programs, row)) is not None:
        row["taught"] = part
        try:
            for kept in taught_rounds(model, case, programs[part], row, reads):
                _add_floor(row["kept"][kept], floors, "round", case)
                yield row
            row["tokens_per_s"] = tokens_per_s(row)
            yield row
        except Exception as error:
            row.setdefault("failed", {})["taught rounds"] = first_line(error)
            yield row


def _taught_part(programs: dict[str, Any], row: dict[str, Any]) -> str | None:
    """The rounds that are taught: those that an engine runs, where they were compiled."""
    sound = programs.keys() - row.get("failed", {}).keys()
    return next((part for part in ("overlapped", "round") if part in sound), None)


def _plain_calls(
    case: RoundCase, config: DSV4Config, params: DSV4Params, program: Program
) -> Calls:
    """Steps of one random token of each request."""
    given = case.random_input(config, 1)

    def call(state: Any) -> Any:
        return program.run(params, state[0], given, state[1])

    def rewind(state: Any) -> Any:
        return case.rewind(state[0]), state[1]

    state = case.fill(config), case.output(config, 0)
    return Calls(call, state, rewind, case.rounds * case.row_tokens)


def _plain(
    case: RoundCase, config: DSV4Config, params: DSV4Params, program: Program, profile: bool
) -> Iterator[dict[str, Any]]:
    calls = _plain_calls(case, config, params, program)
    timing, state = _time(case, calls.call, calls.state, calls.rewind, calls.count)
    yield timing.fields() | {"tokens_per_s": case.batch / timing.median_s}
    if profile:
        yield {"profile": _profiled(case, program, calls.call, calls.rewind(state))}


def _round_calls(model: Model, case: RoundCase, program: Program, given: ServeInput) -> Calls:
    """Rounds of the same input, which may name what the round before drew and guessed."""
    config = model.config

    def call(state: Any) -> Any:
        return program.run(model.params, *state[:2], given, state[2])

    def rewind(state: Any) -> Any:
        return case.rewind(state[0]), *state[1:]

    cache = case.fill(config)
    state = cache, case.store(cache), case.output(config, case.draft_tokens)
    return Calls(call, state, rewind, case.rounds)


def _beside_plain(
    model: Model, case: RoundCase, part: str, programs: dict[str, Any], given: ServeInput
) -> dict[str, float]:
    """How many times as long as a plain step of the model without stages a part takes, in turns."""
    if part == "undrafted":
        ours = _plain_calls(case, model.config, model.params, programs[part])
    else:
        ours = _round_calls(model, case, programs[part], given)
    plain = _plain_calls(case, model.trunk_config, model.trunk_params, programs["plain"])
    return dataclasses.asdict(time_ratio(ours, plain, limit_s=case.limit_s))


def _rounds(
    model: Model, case: RoundCase, program: Program, given: ServeInput, reads: Reader, profile: bool
) -> Iterator[dict[str, Any]]:
    calls = _round_calls(model, case, program, given)
    call, rewind = calls.call, calls.rewind
    timing, state = _time(case, call, calls.state, rewind, case.rounds)
    kept, state = [], rewind(state)
    for _ in range(case.rounds):
        state = settled(call(state))
        kept.append(np.asarray(state[2].num_kept))
    found = {"peak_bytes": peak_bytes(), "tokens_a_round": mean_kept(kept)}
    yield timing.fields() | found | reads(rewind(state)[0], given, state[2])
    if profile:
        yield {"profile": _profiled(case, program, call, rewind(state))}


def _proposal(
    model: Model,
    case: RoundCase,
    program: Program,
    programs: dict[str, Any],
    profile: bool,
    *,
    is_whole: bool,
) -> Iterator[dict[str, Any]]:
    """Proposals, or passes alone, on the same rings."""
    cache = round_parts.window_cache(case.fill(model.config))
    params = round_parts.proposal_params(model.params)
    given = (make_sampling(case.batch, temperature=0.0),) if is_whole else ()
    anchors = jnp.asarray(case.first_tokens(model.config))

    def call(_: Any) -> Any:
        return program.run(params, cache, anchors, *given)

    timing, _ = _time(case, call, None, lambda state: state, 2 * case.rounds)
    found, picks = timing.fields(), programs.get(BLOCK_PICKS)
    if isinstance(picks, Program):
        found["experts_read"] = mean_distinct(picks.run(params, cache, anchors))
    yield found
    if profile:
        yield {"profile": _profiled(case, program, call, None)}


def _context(model: Model, case: RoundCase, loops: Loops) -> Iterator[dict[str, Any]]:
    """Context rows of a round's tokens, with weights that are not in L2."""
    cache = case.fill(model.config)
    params, own, staged, _, means = context_arguments(model, case, cache)
    staged = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), staged)
    noise = uniform(means.shape, jnp.uint32(0)).astype(means.dtype)
    rest = own, staged, case.round_input().step_input, noise
    microseconds = loops.median_us([(params, *rest), (copied(params), *rest)])
    yield {"ms": microseconds / 1e3}


def _reader(model: Model, case: RoundCase, programs: dict[str, Any], row: dict[str, Any]) -> Reader:
    """Runs `PICKS`, if it is among the programs."""
    program, tokens = programs.get(PICKS), case.batch * case.row_tokens
    for name in (PICKS, BLOCK_PICKS):
        if isinstance(error := programs.get(name), Exception):
            row.setdefault("failed", {})[name] = first_line(error)

    def reads(cache: ModelCache, given: ServeInput, last: ServeOutput) -> dict[str, float]:
        if not isinstance(program, Program):
            return {}
        layers = program.run(model.params, cache, given, last)
        return {"experts_read": mean_distinct([picked[:tokens] for picked in layers])}

    return reads


def _time(
    case: RoundCase,
    call: Callable[[Any], Any],
    state: Any,
    rewind: Callable[[Any], Any],
    max_calls: int,
    *,
    repeats: int = 7,
) -> tuple[Timing, Any]:
    return time_calls(
        call, state, rewind=rewind, max_calls=max_calls, repeats=repeats, limit_s=case.limit_s
    )


def _profiled(
    case: RoundCase, program: Program, call: Callable[[Any], Any], state: Any
) -> list[dict[str, Any]]:
    """Launches of a call; `state` must have room for some."""
    return profile_launches(
        program.run,
        lambda: dispatch(call, state, _PROFILED),
        calls=_PROFILED,
        devices=case.local_devices,
    )


def _add_floor(found: dict[str, Any], floors: RoundBytes, name: str, case: RoundCase) -> None:
    """Adds the least time of independent picks, and of the experts that were read if known."""
    if "ms" not in found:
        return
    floor_ms = floors.floor_ms(name)
    found |= {"floor_ms": floor_ms, "floor_share": floor_ms / found["ms"]}
    if count := floors.num_collectives(name):
        found |= {"collectives": count, "floor_collectives_ms": floors.collectives_ms(name)}
    if "experts_read" in found:
        rows, each = case.batch * case.row_tokens, floors.expert
        if name != "round":
            rows, each = floors.block_rows, floors.stage_expert
        more = found["experts_read"] - floors.experts[rows]
        found["read_floor_ms"] = floors.floor_ms(name, more * each)
        found["read_floor_share"] = found["read_floor_ms"] / found["ms"]
