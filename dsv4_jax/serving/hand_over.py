"""A request with its cache leaves an engine as a value, and comes to one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dsv4_jax.serving.device.hand_out import logprobs_of
from dsv4_jax.serving.device.request_rows import take_request
from dsv4_jax.serving.loop import ServingLoop
from dsv4_jax.serving.requests.cached_request import CachedRequest
from dsv4_jax.serving.requests.cached_rows import CachedRows
from dsv4_jax.serving.requests.prompts import CheckedRequest
from dsv4_jax.serving.requests.request import Request, TokenLogprobs
from dsv4_jax.serving.requests.token_texts import TokenTexts

_NO_ROWS = CachedRows(0, np.zeros(0, np.uint8), np.zeros((0, 0), np.uint8))


def take_cached(loop: ServingLoop, request: Request, shape: Mapping[str, str]) -> CachedRequest:
    """An unfinished request as it is when the step in flight has ended, which this waits for.

    Args:
      loop: what serves it.
      request: it runs or waits, and stays as it is.
      shape: what an engine must agree in that takes it.
    """
    # A branch begins where the caller stands, and is not told what it may not see yet.
    copy = request.branch(request.request_id, request.sampling.seed, request.submitted_s)
    rows, drafts = request.cached or _NO_ROWS, request.drafts
    if request.slot >= 0:
        loop.drain()
        loop.tell(None)
        drafts = _add_drawn(loop, request, copy)
        if copy.finish_reason is None:
            rows = take_request(loop.runner.devices, loop.shards, request.slot)
    return CachedRequest(
        shape=shape,
        token_ids=copy.known,
        prompt_tokens=copy.prompt_tokens,
        length_tokens=rows.length_tokens,
        sampling=copy.sampling,
        salt=copy.salt.decode(),
        speculate=copy.speculate,
        num_given=copy.num_given,
        drafts=drafts,
        logprobs=copy.completion(None).logprobs or (),
        slot=rows.slot,
        blocks=rows.blocks,
    )


def _add_drawn(loop: ServingLoop, request: Request, copy: Request) -> list[int]:
    """Adds to a copy what a step that was read drew for a request; the drafts that follow."""
    flight, slot = loop.flight, request.slot
    if flight is None or flight.result is None:
        return request.drafts
    drawing = flight.rows.slots[flight.alive & flight.rows.draws]
    if slot not in drawing:
        return request.drafts
    drawn = flight.result.token_ids[slot]
    token_ids = drawn[drawn >= 0].tolist()
    logprobs = logprobs_of(request, slot, flight.result, len(token_ids))
    _add(copy, token_ids, logprobs, loop.texts)
    return flight.result.draft_token_ids[slot].tolist()


def bring_back(
    cached: CachedRequest,
    asked: CheckedRequest,
    request_id: int,
    now_s: float,
    texts: TokenTexts | None,
) -> Request:
    """A request that has not been queued yet, and knows what `cached` says.

    Args:
      cached: the request as it came.
      asked: what it asks for, checked by the engine that takes it.
      request_id: its id there.
      now_s: time in seconds.
      texts: of tokens, if the engine has a tokenizer.

    Raises:
      ValueError: tokens come after the end of the answer.
    """
    request = Request(
        request_id,
        asked.token_ids,
        asked.sampling,
        now_s,
        salt=asked.salt,
        speculate=asked.speculate,
        texts=texts,
    )
    token_ids = cached.drawn.tolist()
    _add(request, token_ids, cached.logprobs or [None] * len(token_ids), texts)
    if request.num_drawn < len(token_ids):
        raise ValueError(
            f"token_ids must end where the answer does, after {request.num_drawn} drawn tokens, "
            f"got {len(token_ids)} of them; the settings are others than those it was drawn with"
        )
    request.num_given = cached.num_given
    if request.num_given < request.num_drawn:
        request.num_returned = request.num_given
    request.drafts, request.cached = list(cached.drafts), cached.rows
    return request


def _add(
    request: Request,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    texts: TokenTexts | None,
) -> None:
    """Adds drawn tokens, with their texts, up to the one that ends the answer."""
    tokenizer = None if texts is None else texts.tokenizer
    for token_id, its_logprobs in zip(token_ids, logprobs, strict=True):
        if request.finish_reason is not None:
            return
        request.add(token_id, tokenizer, its_logprobs)
