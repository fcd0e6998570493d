"""While an answer follows a grammar, a step's trunk runs before it is known what it may draw.

Most tests have a device that only draws what masks allow, and compiles nothing. Tokens are those of
an engine whose steps wait for each other.
"""

import collections
import contextlib
import functools
import random

import jax
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.serving import Grammar
from dsv4_jax.serving.device import engine_arrays
from dsv4_jax.step.serve_values import ServeOutput
from helpers import failing_grammars, slow
from helpers.interrupts import Interrupt, Lines
from helpers.serving import BUCKET, SIZES, byte_tokenizer, one_layer, run_to_end

pytestmark = pytest.mark.unoptimised

END, VOCAB = 257, 260
OBJECT = Grammar.json_schema(
    {
        "type": "object",
        "properties": {
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
            "kind": {"enum": ["cat", "dog"]},
        },
        "required": ["age", "kind"],
        "additionalProperties": False,
    }
)
LETTERS = Grammar("regex", "[a-z]{30}")
ASKED = [
    {"grammar": OBJECT, "temperature": 1.3, "seed": 5, "logprobs": 2},
    {"max_new_tokens": 40, "stop_token_ids": ()},
    {"grammar": Grammar("regex", "(ab|cd){6,9}"), "temperature": 1.0, "seed": 3},
    {"max_new_tokens": 25, "temperature": 1.0, "seed": 9, "frequency_penalty": 1.0},
    {"grammar": Grammar("lark", 'start: "x" <[65]> /[0-9]{2}/'), "presence_penalty": 1.0},
    {"grammar": LETTERS, "stop_texts": ["e", "st"], "temperature": 1.0},
    {"grammar": LETTERS, "max_new_tokens": 7, "top_p": 0.5, "temperature": 1.0},
]
FILES_OF_A_STEP = (
    "loop.py", "runner.py", "grammar_masks.py", "flight.py", "hand_out.py", "known_tokens.py",
    "appended.py",
)  # fmt: skip
LENGTHS = (9, 5, 50, 3, 17, 30, 12)


@functools.cache
def model():
    return one_layer(vocab_size=VOCAB, eos_token_ids=(END,))


def make_engine(**changes):
    """Four slots, and the program that only decodes."""
    sizes = SIZES | {"tokenizer": byte_tokenizer(), "draft_tokens": 0, "decode_tokens": None}
    return ds.Engine(*model(), **(sizes | changes))


@functools.cache
def texts():
    rng = np.random.default_rng(3)
    return [rng.integers(0, 256, length).tolist() for length in LENGTHS]


def submit(engine, number, **changes):
    return engine.submit(texts()[number], **({"max_new_tokens": 200} | ASKED[number] | changes))


class Obedient:
    """In the place of `EngineArrays`: draws one of the tokens that a mask allows, by position.

    Attributes:
      happened: what the host asked for, in order.
    """

    def __init__(self, engine):
        devices = engine.loop.runner.devices
        self.params, self.cache, self.store = devices.params, devices.cache, devices.store
        self.happened = []
        self._lengths = np.zeros(len(devices.cache.length_tokens), np.int64)
        self._outputs = collections.deque(maxlen=2)
        self._most_steps = engine.plan.steps_per_call
        self._masks = self._counts = None

    def is_ready(self, back):
        return True

    def launch(self, step_input, snapshots, checked, nexts, num_steps=None, *_, is_plain, **__):
        assert self._counts is None
        is_trunk = is_plain and num_steps is None
        self.happened.append("trunk" if is_trunk else "step" if num_steps is None else "steps")
        rows = step_input.request_ids
        self._counts = np.bincount(rows[rows >= 0], minlength=len(self._lengths))
        if not is_trunk:
            self._draw(np.minimum(self._counts, 1) if num_steps is None else num_steps)

    def launch_draw(self, *, is_simple, wants_logprobs):
        self.happened.append("simple draws" if is_simple else "draws")
        self._draw(np.minimum(self._counts, 1))

    def _draw(self, num_steps):
        kept = self._counts + num_steps - (num_steps > 0)
        drawn = np.full((len(kept), self._most_steps), -1)
        for slot in np.flatnonzero(self._counts):
            allowed = np.arange(32, 127)
            if self._masks.is_masked[slot]:
                bits = self._masks.bits[slot, 0].view(np.uint8)
                allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            first = self._lengths[slot] + self._counts[slot]
            positions = first + np.arange(num_steps[slot])
            drawn[slot, : num_steps[slot]] = allowed[5 * positions % len(allowed)]
        self._lengths += kept
        self._counts = None
        columns = np.concatenate([drawn, kept[:, None], np.zeros_like(drawn)], axis=1)
        output = ServeOutput(columns=columns.astype(np.int32), logprobs=None, draft_tokens=0)
        self._outputs.append(output)

    def read(self, back):
        self.happened.append("read")
        return self._outputs[-1 - back]

    def set_masks(self, masks):
        self._masks = masks

    def change(self, changes, moves):
        for slot, length in zip(changes.slots, changes.length_tokens, strict=True):
            if slot >= 0 and length >= 0:
                self._lengths[slot] = length

    def rebuild(self):
        self._counts = None

    def set_sampling(self, *_):
        pass

    set_counts = save = set_sampling


def obedient_engine(**changes):
    """An engine on that device, which notes when masks are asked for too."""
    engine = make_engine(num_snapshots=0, **changes)
    device = engine.loop.runner.devices = Obedient(engine)
    keeper = engine.loop.runner.grammar_keeper
    masks_of = keeper.masks_of

    def note(*arguments):
        device.happened.append("masks")
        return masks_of(*arguments)

    keeper.masks_of = note
    return engine, device


@functools.cache
def wanted():
    """What requests get alone where each step is read before the next is launched."""
    engine, device = obedient_engine(overlap=False)
    done = [run_to_end(engine, submit(engine, number, logprobs=None))[0] for number in range(7)]
    assert set(device.happened) == {"masks", "step", "trunk", "draws", "read"}
    return done


def check_nothing_is_held(engine):
    metrics = engine.metrics
    assert (metrics.running, metrics.waiting, metrics.used_blocks) == (0, 0, 0)


ROUND = ["trunk", "read", "masks", "draws"]


def test_a_trunk_is_launched_before_its_mask_is_asked_for():
    """And before the tokens are read that the mask follows from; but for the last one."""
    engine, device = obedient_engine()
    engine.submit([7] * 9, grammar=LETTERS, max_new_tokens=12)
    while engine.num_unfinished:
        engine.step()
    assert device.happened == ["masks", "step", *ROUND * 11, "read"]


def test_neighbours_wait_for_nobody_either():
    """Nor do those with penalties; without a grammar nothing comes between trunk and draws."""
    engine, device = obedient_engine()
    free = [submit(engine, number) for number in (1, 3)]
    bound = engine.submit([7] * 9, grammar=LETTERS, max_new_tokens=12)
    run_to_end(engine, bound)
    assert device.happened[: 2 + 11 * len(ROUND)] == ["masks", "step", *ROUND * 11]
    device.happened.clear()
    assert run_to_end(engine, *free) == [wanted()[number] for number in (1, 3)]
    trunks = [n for n, name in enumerate(device.happened) if name == "trunk"]
    assert trunks
    assert {device.happened[n + 1] for n in trunks} == {"draws"}
    assert "masks" not in device.happened


@pytest.mark.parametrize("number", [2, 3])
def test_simple_draws_are_taken_where_nobody_asks_for_more_than_a_grammar(number):
    """As on a GPU; one with penalties asks for more."""
    engine, device = obedient_engine()
    engine.loop.runner.simplifies = True
    ids = [submit(engine, each) for each in (2, number)]
    assert run_to_end(engine, *ids) == [wanted()[2], wanted()[number]]
    asked = {name for name in device.happened if "draws" in name}
    assert asked == ({"simple draws"} if number == 2 else {"draws"})


def test_a_prompt_makes_nobody_wait_whose_first_mask_is_known():
    engine, device = obedient_engine()
    run_to_end(engine, engine.submit([5] * (4 * BUCKET), grammar=LETTERS, max_new_tokens=2))
    prompt = ["step", "masks", "step", "read", "masks", "step", "read", "masks", "step", "read"]
    assert device.happened == ["masks", *prompt, "trunk", "read", "masks", "draws", "read"]


def test_a_step_that_holds_a_prompt_waits_for_what_an_answer_draws():
    engine, device = obedient_engine()
    first = engine.submit([7] * 9, grammar=LETTERS, max_new_tokens=20)
    for _ in range(3):
        engine.step()
    device.happened.clear()
    second = engine.submit([8] * (2 * BUCKET), max_new_tokens=3, stop_token_ids=())
    run_to_end(engine, first, second)
    waits = ["read", "masks", "step"]
    assert device.happened[:9] == waits * 3
    assert device.happened[9:13] == ROUND


def test_answers_are_those_of_steps_that_wait():
    """Four at a time; ends at stop tokens and texts, at lengths and where grammars end."""
    engine, device = obedient_engine()
    ids = [submit(engine, number, logprobs=None) for number in range(7)]
    assert run_to_end(engine, *ids) == wanted()
    assert [one.finish_reason for one in wanted()] == [
        "stop", "length", "stop", "length", "stop", "stop", "length",
    ]  # fmt: skip
    assert device.happened.count("draws") == device.happened.count("trunk") > 20
    check_nothing_is_held(engine)


def test_who_leaves_with_a_step_in_flight_changes_nothing():
    """Cancelled, pushed out, and taken for another request."""
    engine, _ = obedient_engine()
    ids = [submit(engine, number, logprobs=None) for number in range(4)]
    while min(engine.requests[one].num_drawn for one in ids) < 3:
        engine.step()
    assert engine.loop.flight is not None
    engine.cancel(ids[2])
    fork = engine.fork(ids[0], seed=5)
    assert engine.preempt(ids[0])
    ids += [submit(engine, number, logprobs=None) for number in (4, 5)]
    done = run_to_end(engine, *ids, fork)
    cut = done.pop(2)
    assert done == [wanted()[number] for number in (0, 1, 3, 4, 5, 0)]
    assert cut.finish_reason == "cancelled"
    assert cut.token_ids == wanted()[2].token_ids[: len(cut.token_ids)]
    check_nothing_is_held(engine)


@pytest.mark.parametrize(
    ("how", "at"), [("raises", 0), ("raises", 4), ("allows nothing", 4), ("takes nothing", 3)]
)
@pytest.mark.parametrize("length", [5, 3 * BUCKET])
def test_a_grammar_that_fails_while_the_trunk_runs_ends_its_request_alone(
    length, how, at, monkeypatch
):
    """Also where it is the only one, and nobody waits for the trunk any more."""
    engine, _ = obedient_engine()
    failing_grammars.fail(monkeypatch, engine, how, at)
    for neighbours in ([1, 3], []):
        ids = [submit(engine, number) for number in neighbours]
        bad = engine.submit([7] * length, grammar=LETTERS, max_new_tokens=12)
        *done, failed = run_to_end(engine, *ids, bad)
        assert done == [wanted()[number] for number in neighbours]
        assert (failed.finish_reason, len(failed.token_ids)) == ("error", at)
        check_nothing_is_held(engine)


@pytest.mark.parametrize("name", ["launch_draw", "set_masks"])
def test_what_raises_between_trunk_and_draws_is_computed_again(name, monkeypatch):
    engine, device = obedient_engine()
    request_id = submit(engine, 0, logprobs=None)
    for _ in range(5):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(device, name, lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert run_to_end(engine, request_id) == [wanted()[0]]
    check_nothing_is_held(engine)


def interrupted(lines):
    """Answers of requests whose steps are interrupted at these lines."""
    engine, device = obedient_engine()
    ids = [submit(engine, number, logprobs=None) for number in (0, 1, 2, 4, 6)]
    while engine.num_unfinished:
        with contextlib.suppress(Interrupt), lines.tracing("step"):
            engine.step()
    assert "draws" in device.happened
    check_nothing_is_held(engine)
    return [engine.completion(one) for one in ids]


@pytest.mark.parametrize("every", slow.all_but([24], [24, 1]))
def test_an_interrupt_anywhere_in_a_step_changes_no_token(every):
    """Lines of what launches, reads and hands out a step."""
    lines = Lines()
    answers = interrupted(lines)
    assert answers == [wanted()[number] for number in (0, 1, 2, 4, 6)]
    chosen = [line for line in sorted(lines.counts) if line.file in FILES_OF_A_STEP]
    chosen, raised = random.Random(0).sample(chosen, len(chosen))[::every], 0
    for start in range(0, len(chosen), 20):
        middle = {line: 1 + lines.counts[line] // 2 for line in chosen[start : start + 20]}
        again = Lines(middle)
        assert interrupted(again) == answers
        raised += len(again.raised)
    assert raised > 0.7 * len(chosen)


def test_calls_of_several_steps_come_back_when_the_grammar_has_ended():
    engine, device = obedient_engine(steps_per_call=4)
    ids = [submit(engine, number) for number in (1, 2)]
    assert run_to_end(engine, *ids) == [wanted()[number] for number in (1, 2)]
    last = len(device.happened) - device.happened[::-1].index("masks")
    assert device.happened[:last].count("trunk") > 9
    assert "steps" not in device.happened[:last]
    assert device.happened[last:].count("steps") > 1


def count_draws(engine, monkeypatch):
    """A list that grows with each launch of draws."""
    devices, launched = engine.loop.runner.devices, []
    launch = devices.launch_draw

    def note(**options):
        launched.append(options)
        launch(**options)

    monkeypatch.setattr(devices, "launch_draw", note)
    return launched


def submit_short(engine):
    """Prompts of one token, for which nothing but steps that only decode is compiled."""
    asked = [
        {"max_new_tokens": 12, "stop_token_ids": ()},
        {"max_new_tokens": 9, "stop_token_ids": (), "temperature": 1.0, "frequency_penalty": 1.0},
        ASKED[0] | {"max_new_tokens": 200},
    ]
    return [engine.submit([60 + number], **each) for number, each in enumerate(asked)]


@pytest.mark.slow
def test_a_real_step_draws_the_same_whenever_its_draws_are_launched(monkeypatch):
    """With its trunk, or when the step before was read; to the bit, log-probabilities too."""
    done = []
    for overlap in (True, False):
        engine, later = make_engine(overlap=overlap), []
        run_draws = engine.loop.runner.run_draws
        note = functools.partial(note_call, run_draws, later)
        monkeypatch.setattr(engine.loop.runner, "run_draws", note)
        done.append(run_to_end(engine, *submit_short(engine)))
        assert (len(later) > 20) == overlap
        assert not engine.verify().problems
    assert done[0] == done[1]


def note_call(function, noted, *arguments):
    """Calls the function, and notes its first argument."""
    noted.append(arguments[0])
    return function(*arguments)


@pytest.mark.slow
def test_nothing_that_the_two_programs_are_given_moves(monkeypatch):
    """XLA rewrites a CUDA graph where an array of it has moved. Logits are let go of in time."""
    engine, places = make_engine(), collections.defaultdict(set)
    arrays = engine.loop.runner.devices
    launcher, draw = arrays.launcher, engine_arrays.jit_plain_draw

    def note(program, leaves):
        places[program].add(tuple(leaf.unsafe_buffer_pointer() for leaf in leaves))
        assert arrays.undrawn is None

    def launch(program, *arguments, **static):
        note(program, jax.tree.leaves(arguments))
        return launcher(program, *arguments, **static)

    def draw_them(rows, *arguments, **static):
        note(draw, jax.tree.leaves(arguments))  # not the logits
        return draw(rows, *arguments, **static)

    monkeypatch.setattr(arrays, "launcher", launch)
    monkeypatch.setattr(engine_arrays, "jit_plain_draw", draw_them)
    ids = submit_short(engine)
    for _ in range(3):  # the first are given tokens, and then settings of who has come
        engine.step()
    places.clear()
    run_to_end(engine, *ids)
    assert [len(places[one]) for one in (engine_arrays.jit_plain_trunk, draw)] == [1, 1]


@pytest.fixture(scope="module")
def engines():
    """Two that run the same programs, of which one reads each step before the next."""
    return make_engine(), make_engine(overlap=False)


@pytest.mark.slow
def test_answers_and_log_probabilities_are_those_of_steps_that_wait(engines, monkeypatch):
    """To the bit: alone, and four at a time, so that each token comes in the same program."""
    launched = count_draws(engines[0], monkeypatch)
    for numbers in (*((number,) for number in range(7)), (0, 1, 2, 3), (0, 4, 5, 6)):
        done = [
            run_to_end(one, *(submit(one, number, salt=str(numbers)) for number in numbers))
            for one in engines
        ]
        assert done[0] == done[1]
    assert len(launched) > 50
    assert not engines[0].verify().problems


@pytest.mark.slow
def test_tokens_are_those_of_the_program_of_prompts(engines):
    """Which has its own way to them."""
    general = make_engine(decode_tokens=BUCKET, overlap=False)
    for number in range(7):
        one, other = (
            run_to_end(each, submit(each, number, salt="general")) for each in (engines[0], general)
        )
        assert one[0].token_ids == other[0].token_ids


@pytest.mark.slow
def test_nothing_compiles_when_the_first_answer_follows_a_grammar(engines):
    engine, _ = engines
    assert "decode step of 4 tokens" in dict(engine.warmup())
    compiled = engine.metrics.compiles
    run_to_end(engine, *(submit(engine, number, salt="warm") for number in range(7)))
    assert engine.metrics.compiles == compiled
    assert engine.loop.runner.devices.undrawn is None
