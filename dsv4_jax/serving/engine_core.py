"""EngineCore: requests are queued, served by steps, forked, cancelled and taken."""

from __future__ import annotations

import atexit
import collections
import weakref
from collections.abc import Sequence
from typing import Unpack

from tokenizers import Tokenizer

from dsv4_jax import checks
from dsv4_jax.allocator.verify import Report
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.config import DSV4Config
from dsv4_jax.hosts import hosts_of
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.serving.device.hosted_arrays import HostedArrays
from dsv4_jax.serving.device.runner import StepRunner
from dsv4_jax.serving.loop import ServingLoop
from dsv4_jax.serving.metrics.metrics import Gauges, Metrics, count_compiles
from dsv4_jax.serving.requests import calls
from dsv4_jax.serving.requests.grammars import Grammars
from dsv4_jax.serving.requests.prompts import CheckedRequest, Limits
from dsv4_jax.serving.requests.request import Completion, Request, Token
from dsv4_jax.serving.requests.token_texts import TokenTexts
from dsv4_jax.serving.schedule.suspects import Suspects
from dsv4_jax.serving.sizing import EnginePlan
from dsv4_jax.step.sampling import SamplingFields, SamplingParams


class EngineCore:
    """Serves requests on a cache of planned sizes.

    One call at a time: a second one, from another thread, a signal handler or a tokenizer, raises
    `RuntimeError` and has touched nothing, and so does every call beside the `AsyncEngine` that
    holds the engine. Each call does all or nothing: where one raises, be it `KeyboardInterrupt` at
    any place, requests and counters are as they were. The next call then empties the cache, and
    what ran is computed again to the same tokens. Where a stream or `generate` does several steps,
    each is a call in this sense. Only an interrupt between the end of a call and its caller finds
    the call done and its result lost.

    A request is admitted when a slot and blocks for its prompt are free, oldest first; it gets
    further blocks before the steps that need them, and the youngest gives its own back if there
    are none. What it had drawn is computed again later, from the longest prefix still cached.

    With overlap the next step is in flight between two calls (`docs/design/architecture.md`).
    What was submitted meanwhile joins the one after it. Attributes are those that `Engine` lists,
    and these, which the rooms beside it read: `plan`, its sizes; `limits`, what requests may ask
    for; `requests` by id, until `completion` takes them; `next_id`, of the next request; `loop`,
    which serves them; `undo`, what a call has changed so far; `suspects`, who may have made steps
    raise; and `call_lock`, which says who may call.
    """

    def __init__(
        self, config: DSV4Config, params: DSV4Params, plan: EnginePlan, tokenizer: Tokenizer | None
    ) -> None:
        """Allocates the cache.

        Args:
          config: the model.
          params: model parameters.
          plan: sizes of the engine.
          tokenizer: for prompts that are text, and for the text of completions.
        """
        self.config, self.params, self.tokenizer = config, params, tokenizer
        self.metrics = Metrics()
        self.plan = plan
        self._hosts = hosts_of(plan.mesh)
        self._compiles_before = count_compiles()
        grammars = Grammars(config, tokenizer, is_allowed=plan.grammars)
        self.limits = Limits(config, plan.pools, tokenizer, grammars)
        runner = StepRunner(params, plan, grammars, self._hosts, self.metrics)
        self.undo = calls.UndoLog(self.metrics, *self.metrics.histograms)
        self._texts = None if tokenizer is None else TokenTexts(tokenizer, config.vocab_size)
        shared = {"metrics": self.metrics, "undo": self.undo}
        self.loop = ServingLoop(runner, plan, texts=self._texts, **shared)
        self.requests: dict[int, Request] = {}
        self.suspects = Suspects(2 * plan.call_tokens)
        self.next_id = 0
        self.call_lock = calls.CallLock()
        self._dropped: collections.deque[int] = collections.deque()
        self._is_closed = False
        self.metrics.watch(self._gauges)
        if self._hosts is not None:
            itself = weakref.ref(self)  # else the others would wait for ever
            atexit.register(lambda: (engine := itself()) and engine.close())

    @property
    def cache(self) -> ModelCache:
        """The cache as it is now, after the step in flight, to look into until the next call.

        Raises:
          RuntimeError: an `AsyncEngine` holds the engine, whose next step would take it.
        """
        self.call_lock.refuse_if_held("cache was read")
        return self.loop.runner.cache

    @property
    def num_unfinished(self) -> int:
        """Requests that run or wait; while a call is in progress, those there were before it."""
        metrics = self.undo.before(self.metrics)
        return metrics["submitted"] - sum(metrics["finished"].values())

    @calls.exclusive
    def warmup(self) -> list[tuple[str, float]]:
        """Compiles every program that serving can need.

        Returns:
          What was compiled, and seconds for each; 0.0 or so for one that was there already. Steps
          are compiled side by side, and their seconds overlap.

        Raises:
          RuntimeError: requests are running.
        """
        if self.loop.queue.running:
            raise RuntimeError(f"warmup before requests run; {len(self.loop.queue.running)} do")
        with self.undo:
            compiled, pace = self.loop.runner.warmup(), self.loop.pace
            pace.sizes = pace.sizes.warmed_up()
            return compiled

    @calls.exclusive
    def submit(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        salt: str = "",
        speculate: bool = True,
        **fields: Unpack[SamplingFields],
    ) -> int:
        """Queues a request; `step`, or a `stream` of any request, serves it.

        Args:
          prompt: token ids, or text if the engine has a tokenizer.
          sampling: how it draws and what ends it; None is the defaults.
          salt: prefixes are shared among requests of one salt only; at most 1,024 characters.
          speculate: checks drafts, if the engine makes any; it changes speed, never tokens.
          **fields: fields of `SamplingParams`, such as `max_new_tokens=64` or `temperature=0.7`,
            that replace those of `sampling`.

        Returns:
          The request's id. The engine keeps what the request got until `completion` takes it.

        Raises:
          ValueError: the prompt is empty, holds an unknown token or can never fit, or a setting is
            out of range; nothing was queued.
        """
        asked = self.limits.check_request(prompt, sampling, salt, speculate, fields)
        with self.undo:
            return self._add(asked).request_id

    @calls.exclusive
    def fork(self, request_id: int, *, seed: int) -> int:
        """A second request that goes on from what the first has drawn so far.

        It shares the full blocks of a running one. If there is no room, or the first one's next
        step is in flight, the new one waits its turn, and what no snapshot holds is computed again.

        What `step` has returned of the first, or its stream has given, and what the fork's own
        stream gives make up its completion: no token is missing, and none is there twice. What a
        step in flight draws is the first one's alone, also where `verify` has waited for it.

        Args:
          request_id: an unfinished request.
          seed: seed of what the new one draws from here on.

        Returns:
          Id of the new request; what was drawn before is part of its completion.

        Raises:
          ValueError: there is no such unfinished request, or the seed is no integer.
        """
        seed = checks.integer("seed", seed, high=None)
        request = self._find(request_id)
        if request is None or request.finish_reason is not None:
            raise ValueError(f"request_id must be of an unfinished request, got {request_id}")
        with self.undo:
            new = request.branch(self.next_id, seed, self.loop.clock())
            self._register(new)
            self.loop.fork(request, new)
            return new.request_id

    @calls.exclusive
    def cancel(self, request_id: int) -> bool:
        """Ends a request early; its stream ends, and its completion has what was drawn so far.

        Returns:
          Whether it was unfinished.

        Raises:
          ValueError: no request ever had that id.
        """
        request = self._find(request_id)
        if request is None or request.finish_reason is not None:
            return False
        return self._end(request, "cancelled")

    @calls.exclusive
    def preempt(self, request_id: int) -> bool:
        """Makes a running request give its slot and blocks back and wait; whether it was running.

        Raises:
          ValueError: no request ever had that id.
        """
        request = self._find(request_id)
        if request is None or request.slot < 0:
            return False
        with self.undo:
            self.loop.preempt(request)
            return True

    @calls.exclusive
    def step(self) -> Sequence[Token]:
        """Serves every running request once, or `steps_per_call` times, and admits waiting ones.

        Returns:
          The tokens of one call; none if there is nothing to do. The next one may run by then.

        Raises:
          CacheError: in debug mode, the cache is not what it should be.
          Exception: what the device raised; nothing was drawn, and all requests go on with the next
            call. If that or one soon after it fails too, the next steps serve the requests one by
            one, and who fails alone ends with "error". What a grammar, a tokenizer or a stop text
            raises ends its request at once; `Completion.error` has it.
        """
        return self._serve()

    @calls.exclusive_as("the next token of a stream was asked for")
    def _next_token(self, requests: Sequence[Request]) -> Token:
        """The next token that no stream has given, of the first request that has one.

        It steps until there is one.

        Raises:
          StopIteration: all have ended.
        """
        while True:
            for request in requests:
                if request.num_given < request.num_drawn:
                    with self.undo:
                        self.undo.save(request)
                        return request.give()
            if all(request.finish_reason is not None for request in requests):
                raise StopIteration
            self._serve(returns=False)

    def _drop(self, request_id: int) -> None:
        """Cancels a request when the engine is called next; from any thread, at any time."""
        self._dropped.append(request_id)

    @calls.exclusive
    def completion(self, request_id: int) -> Completion:
        """What a finished request got; it is forgotten.

        Raises:
          ValueError: there is no such request, or it has not finished.
        """
        request = self._find(request_id)
        if request is None or request.finish_reason is None:
            raise ValueError(
                f"request_id must be of a request that can be taken, and {request_id} has not "
                "finished, or has been taken already"
            )
        completion = request.completion(self.tokenizer)
        with self.undo:
            self.undo.save_item(self.requests, request.request_id)
            del self.requests[request.request_id]
            return completion

    @calls.exclusive
    def verify(self) -> Report:
        """Checks the whole cache now; see `verify_cache`.

        It waits for the step in flight, whose tokens come with the next `step` all the same.
        """
        with self.undo:
            return self.loop.verify()

    def follow(self) -> None:
        """Makes the calls that the engine of process 0 makes, until that is closed.

        It is what every other process of a mesh does once its engine is built.

        Raises:
          RuntimeError: the mesh lies in this process alone, or this is process 0.
        """
        devices = self.loop.runner.devices
        if not isinstance(devices, HostedArrays) or not devices.hosts.number:
            raise RuntimeError("follow is for processes other than 0 of a mesh of several")
        devices.follow()

    def close(self) -> None:
        """Lets the other processes of a mesh go; the engine takes no further call in any of them.

        It waits until known prefixes lie in `disk_cache_dir`, and writes there no more.

        Raises:
          RuntimeError: another call is in progress, or an `AsyncEngine` holds the engine.
        """
        self.call_lock.refuse_if_busy("close was called")
        devices = self.loop.runner.devices
        if isinstance(devices, HostedArrays) and not self._is_closed:
            self._is_closed = True
            devices.stop()
        if self.loop.host is not None:
            self.loop.host.settle(None)

    def _settle(self) -> None:
        """What is left of calls that raised, and of streams that were dropped.

        Raises:
          RuntimeError: the engine is closed, or process 0 is another one.
        """
        if self._hosts is not None and (self._hosts.number or self._is_closed):
            raise RuntimeError(
                "the engine is closed"
                if self._is_closed
                else f"process 0 takes requests, and this is process {self._hosts.number}; "
                "call follow here"
            )
        if self.undo.stands:
            self.undo.roll_back()
            unfinished = [one for one in self.requests.values() if one.finish_reason is None]
            self.loop.restart(unfinished)
            self.undo.forget()
        while self._dropped:
            request = self.requests.get(self._dropped[0])
            if request is not None and request.finish_reason is None:
                self._end(request, "cancelled")
            self._dropped.popleft()

    def _serve(self, *, returns: bool = True) -> Sequence[Token]:
        suspect = self.suspects.next()
        try:
            with self.undo:
                tokens = self.loop.serve(suspect, returns=returns)
                self.suspects.clear(self.loop.alone)
                return tokens
        except Exception as error:
            suspect = self.loop.alone
            if suspect is not None and suspect.finish_reason is None:
                self._settle()
                self._end(suspect, "error", error)
            elif not self.suspects.fail(self.requests.values()):
                raise
            return []

    def _end(self, request: Request, reason: str, error: Exception | None = None) -> bool:
        with self.undo:
            self.undo.save(request)
            request.finish_reason, request.error = reason, error
            self.loop.end(request)
            return True

    def _gauges(self) -> Gauges:
        """What holds now; after a call that raised, what the next one begins with."""
        is_lost = self.undo.stands and not self.call_lock.lock.locked()
        return self.loop.gauges(count_compiles() - self._compiles_before, is_lost=is_lost)

    @calls.exclusive_as("submit_many or generate was called")
    def _submit_all(
        self, asked: Sequence[CheckedRequest], *, are_samples: bool = False
    ) -> list[Request]:
        """Queues all of them, or none; samples have one prompt, which is read once."""
        with self.undo:
            requests = [self._add(one) for one in asked]
            for request in requests if are_samples and len(requests) > 1 else ():
                request.siblings = tuple(requests)
            return requests

    def _add(self, asked: CheckedRequest) -> Request:
        request = Request(
            self.next_id,
            asked.token_ids,
            asked.sampling,
            self.loop.clock(),
            salt=asked.salt,
            speculate=asked.speculate,
            texts=self._texts,
        )
        self._register(request)
        self.metrics.prompt_tokens += request.prompt_tokens
        self.loop.enqueue(request)
        return request

    def _register(self, request: Request) -> None:
        self.undo.save_item(vars(self), "next_id")
        self.undo.save_item(self.requests, request.request_id)
        self.requests[request.request_id] = request
        self.next_id = request.request_id + 1
        self.metrics.submitted += 1

    def _find(self, request_id: int) -> Request | None:
        """The request, or None if it was taken already."""
        rule = "one that submit gave"
        request_id = checks.integer("request_id", request_id, 0, self.next_id - 1, rule=rule)
        return self.requests.get(request_id)
