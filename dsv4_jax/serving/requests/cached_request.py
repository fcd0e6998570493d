"""CachedRequest: a request with all that an engine keeps of it, as a value that can be sent."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from flax import serialization

from dsv4_jax import checks
from dsv4_jax.rules import By, Flag, Instance, ListOf, Ruled, Whole, check_fields
from dsv4_jax.serving.requests.cached_rows import CachedRows
from dsv4_jax.serving.requests.prompts import MAX_SALT_CHARS
from dsv4_jax.serving.requests.request import TokenLogprobs
from dsv4_jax.step.grammar import Grammar
from dsv4_jax.step.sampling import MAX_TOKENS, SamplingParams

_MAGIC = b"DSV4JAXR"
"""How the bytes of a cached request begin; the digest of what follows it comes next."""

_DIGEST_BYTES = 32
_MAX_DRAFTS = 64


def _check_shape(value: Any) -> Mapping[str, str]:
    if not isinstance(value, Mapping) or not all(
        isinstance(one, str) for pair in value.items() for one in pair
    ):
        checks.refuse("shape", "a mapping of texts to texts", value)
    return dict(value)


def _check_tokens(value: Any) -> np.ndarray:
    checks.array("token_ids", value, (None,))
    return _frozen(np.array(value, np.int32))


def _check_bytes(name: str, rank: int) -> By:
    def check(value: Any) -> np.ndarray:
        checks.array(name, value, (None,) * rank, "u")
        array = np.asarray(value)
        if array.dtype != np.uint8:
            checks.refuse(name, "of u8", array.dtype)
        return _frozen(array)

    return By(check)


def _check_logprobs(value: Any) -> tuple[TokenLogprobs, ...]:
    rows = checks.sequence("logprobs", value, of="TokenLogprobs", limit=MAX_TOKENS)
    return tuple(checks.instance("logprobs", row, TokenLogprobs) for row in rows)


def _check_salt(value: Any) -> str:
    return checks.text("salt", value, max_chars=MAX_SALT_CHARS)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CachedRequest:
    """A request that has left an engine, or a copy of one, with its cache.

    `Engine.snapshot` makes it and `Engine.restore` takes it, of the same engine or of another one
    of the same shape, in any process. It holds the prompt, the answer so far and the salt in
    clear. Arrays cannot be written to.

    Attributes:
      shape: by name, what an engine must agree in that goes on with it: each field of the config,
        the cache format, the mesh and what multiplies quantised weights.
      token_ids: i32[n], the prompt and what was drawn.
      prompt_tokens: how many of them are the prompt.
      length_tokens: how many of them the cache holds; the next one has to be run. 0 of a request
        that waited, or whose answer has ended.
      sampling: how it draws and what ends it.
      salt: prefixes are shared among requests of one salt only.
      speculate: drafts are checked.
      num_given: drawn tokens that its caller has got.
      drafts: guesses at what follows.
      logprobs: of each drawn token, if the request asked for them.
      slot: u8[m], rings and compressor states; none without tokens in the cache.
      blocks: u8[b, k], the blocks of those tokens.

    Raises:
      ValueError: a field is of another type or out of range, or two contradict each other.
    """

    shape: Annotated[Mapping[str, str], Ruled(By(_check_shape))]
    token_ids: Annotated[np.ndarray, Ruled(By(_check_tokens))]
    prompt_tokens: Annotated[int, Ruled(Whole(1, MAX_TOKENS))]
    length_tokens: Annotated[int, Ruled(Whole(0, MAX_TOKENS))]
    sampling: Annotated[SamplingParams, Ruled(Instance(SamplingParams))]
    salt: Annotated[str, Ruled(By(_check_salt))] = ""
    speculate: Annotated[bool, Ruled(Flag())] = True
    num_given: Annotated[int, Ruled(Whole(0, MAX_TOKENS))] = 0
    drafts: Annotated[Sequence[int], Ruled(ListOf(Whole(0), _MAX_DRAFTS, "token ids"))] = ()
    logprobs: Annotated[Sequence[TokenLogprobs], Ruled(By(_check_logprobs))] = ()
    slot: Annotated[np.ndarray, Ruled(_check_bytes("slot", 1))]
    blocks: Annotated[np.ndarray, Ruled(_check_bytes("blocks", 2))]

    def __post_init__(self) -> None:
        """Every field becomes a checked, plain, immutable value."""
        for name in ("shape", "token_ids", "sampling", "slot", "blocks"):
            if getattr(self, name) is None:
                checks.refuse(name, "given", None)
        check_fields(self)
        num_tokens, drawn = len(self.token_ids), len(self.token_ids) - self.prompt_tokens
        for name, most, of in (
            ("prompt_tokens", num_tokens, "the tokens"),
            (
                "length_tokens",
                num_tokens - 1,
                "the tokens but for the last one, which has to be run",
            ),
            ("num_given", drawn, "the drawn tokens"),
        ):
            if getattr(self, name) > most:
                checks.refuse(name, f"at most {most}, {of}", getattr(self, name))
        if len(self.logprobs) != (0 if self.sampling.logprobs is None else drawn):
            rule = f"one for each of {drawn} drawn tokens where sampling asks for them, else none"
            checks.refuse("logprobs", rule, len(self.logprobs))

    @property
    def prompt(self) -> np.ndarray:
        """i32[n], the tokens of the prompt."""
        return self.token_ids[: self.prompt_tokens]

    @property
    def drawn(self) -> np.ndarray:
        """i32[n], the tokens of the answer."""
        return self.token_ids[self.prompt_tokens :]

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays."""
        return self.token_ids.nbytes + self.slot.nbytes + self.blocks.nbytes

    @property
    def rows(self) -> CachedRows | None:
        """What goes to the devices; None if it has no tokens in the cache."""
        if not self.length_tokens:
            return None
        return CachedRows(self.length_tokens, self.slot, self.blocks)

    def to_bytes(self) -> bytes:
        """It as bytes, with a digest; nothing in them can run."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["sampling"] = dataclasses.asdict(self.sampling)
        fields["drafts"] = list(self.drafts)
        fields["logprobs"] = [
            [row.logprob, [[token, logprob] for token, logprob in row.top]] for row in self.logprobs
        ]
        for name in ("logit_bias", "stop_token_ids", "stop_texts"):
            value = fields["sampling"][name]
            plain = value if value is None else [_listed(one) for one in value]
            fields["sampling"][name] = plain
        body = serialization.msgpack_serialize(fields)
        return _MAGIC + _digest(body) + body

    @classmethod
    def from_bytes(cls, data: bytes) -> CachedRequest:
        """What `to_bytes` gave.

        Raises:
          ValueError: it is something else, or damaged, or a field is out of range.
        """
        if not isinstance(data, bytes | bytearray | memoryview):
            checks.refuse("data", "bytes that CachedRequest.to_bytes gave", data)
        data, start = bytes(data), len(_MAGIC) + _DIGEST_BYTES
        if data[: len(_MAGIC)] != _MAGIC:
            rule = f"bytes that CachedRequest.to_bytes gave, which begin with {_MAGIC!r}"
            checks.refuse("data", rule, data[: len(_MAGIC)])
        body = data[start:]
        if data[len(_MAGIC) : start] != _digest(body):
            raise ValueError(
                f"data must be all that CachedRequest.to_bytes gave, and its {len(data)} bytes "
                "are others: their digest is wrong; send them again"
            )
        try:
            fields: Any = serialization.msgpack_restore(body)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                "data must be bytes that CachedRequest.to_bytes gave, and what follows their "
                f"digest is something else: {error}"
            ) from error
        try:
            settings = fields["sampling"]
            if settings["grammar"] is not None:
                settings["grammar"] = Grammar(**settings["grammar"])
            settings["logit_bias"] = [tuple(pair) for pair in settings["logit_bias"]]
            fields["logprobs"] = [
                TokenLogprobs(logprob, tuple((token, one) for token, one in top))
                for logprob, top in fields["logprobs"]
            ]
            return cls(**fields | {"sampling": SamplingParams(**settings)})
        except (KeyError, TypeError) as error:
            raise ValueError(
                "data must have the fields of a CachedRequest of this version of dsv4-jax, got "
                f"others: {error}"
            ) from error

    def check_engine(self, shape: Mapping[str, str]) -> None:
        """Refuses an engine that could not go on with it as the one that it left would.

        Args:
          shape: that engine's.

        Raises:
          ValueError: they differ; the first name in which they do is in the message.
        """
        for name in {**shape, **self.shape}:
            own, other = shape.get(name), self.shape.get(name)
            if own != other:
                raise ValueError(
                    f"cached must be of an engine with {name}={own}, as this one, got one with "
                    f"{name}={other}; build both alike, or submit its tokens anew"
                )


def _frozen(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
