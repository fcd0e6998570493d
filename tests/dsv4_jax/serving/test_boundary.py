"""What comes from outside is refused before anything changes, or done as it says."""

import dataclasses
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.cache.new_tokens import empty_staged
from dsv4_jax.serving.device import engine_arrays
from helpers import bad_search, targets
from helpers.arrays import on_device
from helpers.serving import run_to_end, same_tokens

pytestmark = pytest.mark.unoptimised

CONFIG = targets.CONFIG
NAN = float("nan")
WANTED = {"max_new_tokens": 4, "stop_token_ids": ()}


@pytest.fixture(scope="module")
def engine():
    return targets.make_engine()


@pytest.fixture(scope="module")
def manager():
    return ds.KVCacheManager(CONFIG, **targets.SIZES)


@pytest.fixture(scope="module")
def model():
    return {"params": targets.params(), "config": CONFIG}


def i32(*values):
    return on_device(values, jnp.int32)


def idle(engine):
    metrics = engine.metrics
    assert (engine.num_unfinished, metrics.running, metrics.used_blocks) == (0, 0, 0)
    return True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 2**31}, "top_k must be at most 2147483647, got 2147483648"),
        ({"top_k": NAN}, "top_k must be an integer, got nan"),
        ({"temperature": 10**39}, r"temperature must be at most 3\.4028\d*e\+38 \(float32\)"),
        ({"temperature": 1e-42}, "temperature must be 0 .greedy. or at least 1.175e-38"),
        ({"temperature": np.zeros(2)}, r"temperature must be a number, got an array float64\[2\]"),
        ({"top_p": on_device(0.5, jnp.float32)}, "top_p must be a number, got Array"),
        ({"max_new_tokens": True}, "max_new_tokens must be an integer, got True"),
        ({"max_new_tokens": 2**31}, "max_new_tokens must be at most 2147483647"),
        ({"stop_texts": (7,)}, r"stop_texts must be a list of texts, none empty, got \(7,\)"),
        ({"stop_texts": ["x" * 1025]}, "stop_texts must have at most 1024 characters, got 1025"),
        ({"stop_texts": ["x"] * 65}, "stop_texts must hold at most 64 texts"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids must be an integer, got 1.5"),
        ({"stop_token_ids": itertools.count()}, "stop_token_ids must hold at most 1024"),
        ({"seed": NAN}, "seed must be an integer, got nan"),
        ({"salt": b"a"}, "salt must be a text, got b'a'; decode it"),
        ({"salt": "\ud800"}, "salt must be a text that UTF-8 can encode"),
        ({"speculate": "no"}, "speculate must be True or False, got 'no'"),
        ({"sampling": {"seed": 1}}, "sampling must be a SamplingParams, got {'seed': 1}"),
    ],
)
def test_no_option_can_stop_the_engine(engine, options, message):
    """Each of these made every later step raise, or came back from the device as another value."""
    with pytest.raises(ValueError, match=message):
        engine.submit([1, 2], **options)
    assert idle(engine)


def test_a_seed_that_is_no_number_forks_nothing(engine):
    parent = engine.submit([1, 2], **WANTED)
    for seed in (NAN, 1.5, "1", None, True, np.array([1])):
        with pytest.raises(ValueError, match="seed must be an integer"):
            engine.fork(parent, seed=seed)
    assert engine.num_unfinished == 1
    engine.cancel(parent)
    assert idle(engine)


def test_numbers_for_the_device_do_not_wrap():
    for top_k in (2**32 + 1, 2**31, np.uint32(2**31)):
        with pytest.raises(ValueError, match="top_k must be at most 2147483647"):
            ds.make_sampling(2, top_k=top_k)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": [1, NAN]}, "seed must be an integer, got nan"),
        ({"seed": [1, [2]]}, r"seed must be an integer, got \[2\]"),
        ({"seed": iter([1])}, "seed must be one, or one per prompt"),
        ({"top_k": NAN}, "top_k must be an integer"),
        ({"sampling": [ds.SamplingParams(), None]}, "sampling must be a SamplingParams, got None"),
        ({"prompts": "abc"}, r"prompts must be a list of prompts, got 'abc'; pass \[prompt\]"),
        ({"prompts": b"ab"}, "prompts must be a list of prompts, got b'ab'"),
        ({"prompts": [[1], [True]]}, r"prompts\[1\] must be text or a list of token ids"),
        ({"prompts": [[1], {2: 3}]}, r"prompts\[1\] must be text or a list of token ids"),
        ({"prompts": [[1], [2**70]]}, r"prompts\[1\] holds token id .* no vocabulary"),
    ],
)
def test_a_list_with_one_bad_prompt_or_option_leaves_nothing_behind(engine, options, message):
    submitted = engine.metrics.submitted
    with pytest.raises(ValueError, match=message):
        engine.generate(**{"prompts": [[1], [2]], "max_new_tokens": 2} | options)
    assert engine.metrics.submitted == submitted
    assert idle(engine)


def test_closing_a_stream_before_its_first_token_cancels(engine):
    request_id = engine.submit([1, 2], **WANTED)
    engine.stream(request_id).close()
    assert engine.completion(request_id).finish_reason == "cancelled"
    assert idle(engine)


def test_iterators_serve_every_prompt(engine):
    """Stop tokens, seeds, prompts and token ids of iterators are as good as those of lists."""
    prompts, seeds = [[1, 2], [1, 2], [3]], [5, 6, 7]
    options = {"max_new_tokens": 3, "temperature": 1.0}
    stops = list(range(0, 96, 2))
    lists = engine.generate(prompts, seed=seeds, stop_token_ids=stops, **options)
    taken = engine.generate(
        (iter(one) for one in prompts), seed=iter(seeds), stop_token_ids=iter(stops), **options
    )
    assert taken == lists
    assert {done.finish_reason for done in lists} >= {"stop"}
    rows = ds.make_sampling(3, stop_token_ids=iter([1, 2]))
    np.testing.assert_array_equal(rows.stop_token_ids, [[1, 2]] * 3)


def test_numpy_scalars_are_what_they_are_worth(engine):
    plain = ds.SamplingParams(max_new_tokens=3, temperature=0.5, top_k=200, top_p=0.5, seed=3)
    same = ds.SamplingParams(
        max_new_tokens=np.uint8(3), temperature=np.float16(0.5), top_k=np.uint8(200),
        top_p=np.float32(0.5), seed=np.int32(3), stop_texts=(),
    )  # fmt: skip
    assert same == plain
    assert {type(value) for value in vars(same).values()} == {int, float, tuple, type(None)}
    text = np.arange(90, dtype=np.uint8)
    one = engine.submit(text, max_new_tokens=np.uint8(200 - 90), speculate=np.True_)
    two = engine.submit(text.tolist(), max_new_tokens=110)
    forks = [engine.fork(np.int16(one), seed=np.int32(3)), engine.fork(two, seed=3)]
    seeds = [engine.requests[fork].sampling.seed for fork in forks]
    assert seeds == [3, 3]
    for request_id in (one, two, *forks):
        assert engine.cancel(np.uint8(request_id))
    assert idle(engine)
    (done,) = engine.generate([[1, 2]], sampling=same)
    same_tokens(done, engine.generate([[1, 2]], sampling=plain)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode_tokens": 1.5}, "decode_tokens must be an integer, got 1.5"),
        ({"decode_tokens": True}, "decode_tokens must be an integer, got True"),
        ({"prefill_tokens": 24}, "prefill_tokens must be a list of sizes, got 24"),
        ({"prefill_tokens": (24, NAN)}, "prefill_tokens must be an integer, got nan"),
        ({"tokenizer": "x"}, "tokenizer must be a Tokenizer, got 'x'"),
        ({"params": None}, "params must be a DSV4Params, got None"),
        ({"config": None}, "config must be a DSV4Config, got None"),
        ({"max_requests": 2.0}, "max_requests must be an integer, got 2.0"),
        ({"max_requests": 2**31 - 1}, "max_requests must be at most"),
        ({"cache_format": ["f32"]}, r"cache_format must be one of .* got \['f32'\]"),
        ({"activations": 8}, "activations must be one of .* got 8"),
        ({"debug": "no"}, "debug must be True or False, got 'no'"),
        ({"unroll": 1}, "unroll must be True or False, got 1"),
        ({"memory_bytes": 1e9}, "memory_bytes must be an integer, got 1000000000.0"),
        ({"gpu_memory_fraction": NAN}, "gpu_memory_fraction must be above 0 and at most 1"),
    ],
)
def test_engines_are_refused_when_they_are_built(model, options, message):
    with pytest.raises(ValueError, match=message):
        ds.Engine(**model | options)


def test_parameters_of_another_model_are_refused(model):
    other = ds.DSV4Config.tiny()
    with pytest.raises(ValueError, match=r"params must be those of config, got others:\n.*absent"):
        ds.Engine(other, model["params"])
    with pytest.raises(ValueError, match="params must be those of config"):
        ds.Engine(other, ds.unstack_layers(model["params"]))


def test_a_checkpoint_is_not_loaded_for_options_that_are_none():
    with pytest.raises(TypeError, match="max_request"):
        ds.Engine.from_checkpoint("nowhere", max_request=3)


def test_warmup_compiles_the_verification_too(engine, monkeypatch):
    """So that the first `verify` compiles nothing; `test_programs` counts it."""
    scanned = []
    monkeypatch.setattr(engine_arrays, "scan_cache", lambda *pools: scanned.extend(pools))
    monkeypatch.setattr(engine.loop.runner, "run", lambda *_: lambda: None)
    monkeypatch.setattr(engine.loop.runner, "save", lambda _: None)
    assert "verification" in dict(engine.warmup())
    assert scanned == [engine.cache, engine.loop.runner.devices.store]


def test_a_request_that_makes_steps_fail_ends_alone(engine):
    """Found by serving the requests one by one; the first error is the caller's to see."""
    options = WANTED | {"temperature": 1.0, "seed": 4}
    expected = engine.generate([[1, 2, 3], [4]], **options)
    good = [engine.submit([1, 2, 3], **options), engine.submit([4], **options)]
    bad = engine.submit([5], **WANTED)
    late = engine.submit([4], **options)  # waits for a slot
    object.__setattr__(engine.requests[bad].sampling, "top_k", NAN)
    with pytest.raises(ValueError, match="cannot convert float NaN to integer"):
        engine.step()
    *done, last = run_to_end(engine, *good, late)
    assert done == expected
    assert last == expected[1]
    failed = engine.completion(bad)
    assert failed.finish_reason == "error"
    assert failed.error == "ValueError: cannot convert float NaN to integer"
    assert engine.metrics.finished["error"] == 1
    assert idle(engine)
    assert engine.generate([[1, 2, 3], [4]], **options) == expected


def test_an_error_that_concerns_all_ends_them_and_comes_back_no_more(engine, monkeypatch):
    def fail(*_, **__):
        raise OSError("no device")

    ids = [engine.submit([1], **WANTED) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(engine.loop.runner.devices, "launch", fail)
        with pytest.raises(OSError, match="no device"):
            engine.step()
        assert [engine.step() for _ in range(3)] == [[]] * 3
    assert [engine.completion(i).error for i in ids] == ["OSError: no device"] * 2
    assert idle(engine)
    assert len(engine.generate([[1]], **WANTED)[0].token_ids) == 4


def test_two_streams_of_which_one_fails(engine, monkeypatch):
    """A stop text that raises ends its own request; the stream beside it has its tokens."""
    good = engine.submit([1, 2], **WANTED)
    bad = engine.submit([3], stop_texts=("never",), **WANTED)

    def fail(*_):
        raise ValueError("broken")

    monkeypatch.setattr(engine.requests[bad], "add", fail)
    tokens = [token.token_id for token in engine.stream(good)]
    assert tokens == engine.completion(good).token_ids
    assert len(tokens) == 4
    assert list(engine.stream(bad)) == []
    assert engine.completion(bad).error == "ValueError: broken"


def test_forward_refuses_ids_out_of_range(model):
    for wrong in (96, -1):
        with pytest.raises(ValueError, match=rf"token_ids must be in 0\.\.95, got {wrong}"):
            ds.forward(token_ids=i32(1, wrong)[None], **model)
    with pytest.raises(
        ValueError, match=r"token_ids must be i32\[B, T\], got .*; add a batch axis"
    ):
        ds.forward(token_ids=i32(1), **model)


def step_of(count, slot=0):
    ids = np.zeros(count, np.int32)
    return ds.StepInput(token_ids=ids, request_ids=ids, request_slots=np.int32([slot]))  # type: ignore


@pytest.fixture(scope="module")
def cache():
    """Slot 1 is full, slot 2 has no blocks."""
    cache = ds.init_cache(CONFIG, cache_format="f32", **targets.SIZES)
    table = cache.block_table.at[2].set(-1)
    return ds.update_slots(cache, i32(0, 1, 2), i32(0, 256, 0), table)


@pytest.mark.parametrize(
    ("count", "slot", "message"),
    [
        (257, 0, "got 257 tokens for slot 0, which holds 0 of 256; give it blocks"),
        (1, 1, "got 1 tokens for slot 1, which holds 256 of 256"),
        (1, 2, "got 1 tokens for slot 2, which holds 0 of 0"),
    ],
)
def test_tokens_without_room_are_refused_outside_jit(cache, model, count, slot, message):
    step = step_of(count, slot)
    for function in (ds.prefill, ds.stage_step, *([ds.decode_step] if count == 1 else [])):
        with pytest.raises(ValueError, match=f"token_ids must fit .*{message}"):
            function(cache=cache, step_input=step, **model)


def test_a_loop_that_would_outgrow_its_slot_is_refused(cache, model):
    sampling = ds.make_sampling(1)
    with pytest.raises(ValueError, match="got 257 tokens for slot 0, which holds 0 of 256"):
        ds.decode_loop(
            cache=cache, step_input=step_of(1), sampling=sampling, num_steps=257, **model
        )


def test_inside_jit_values_are_masked_and_not_checked(cache):
    """Traced arrays have no values to check; the indices of a call mask what has no room."""
    step = step_of(8, 2)
    check = lambda cache, step: cache.check_input(step, vocab_size=96)  # noqa: E731
    with pytest.raises(ValueError, match="got 8 tokens for slot 2, which holds 0 of 0"):
        check(cache, step)
    assert jax.eval_shape(check, cache, step) is None
    reset = jax.jit(ds.reset_slots)(cache, i32(7))
    np.testing.assert_array_equal(reset.length_tokens, cache.length_tokens)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": i32(0, 3)}, r"slots must be in -1\.\.2, got 3"),
        ({"slots": i32(0, -2)}, r"slots must be in -1\.\.2, got -2"),
        ({"slots": i32(1, 1)}, r"slots must hold no slot twice, got \[1 1\]"),
        ({"length_tokens": i32(0, -1)}, r"length_tokens must be in 0\.\.256, got -1"),
        ({"length_tokens": i32(257, 0)}, r"length_tokens must be in 0\.\.256, got 257"),
        ({"block_table": i32([0, 6], [0, 0])}, r"block_table must be in -1\.\.5, got 6"),
        ({"block_table": i32([0, -2], [0, 0])}, r"block_table must be in -1\.\.5, got -2"),
        ({"slots": np.float32([0, 1])}, r"slots must be an array \[n\] of integers, got float32"),
    ],
)
def test_slots_and_blocks_that_are_not_there_are_refused(cache, changes, message):
    rows = {"slots": i32(0, 1), "length_tokens": i32(0, 0), "block_table": i32([0, 1], [2, 3])}
    with pytest.raises(ValueError, match=message):
        ds.update_slots(cache, **rows | changes)
    ds.update_slots(cache, i32(0, -1), i32(0, -7), i32([0, 1], [99, 99]))  # -1 changes nothing
    for slots in (i32(3), i32(-2)):
        with pytest.raises(ValueError, match=r"slots must be in -1\.\.2"):
            ds.reset_slots(cache, slots)


def test_a_commit_keeps_no_more_than_a_row_had(cache):
    staged = ds.cache.Staged(new_tokens=empty_staged(cache.state, 3), call=cache.index(step_of(3)))
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match=rf"num_tokens must be 0 .* \[3\], got \[{wrong}\]"):
            ds.commit(cache, staged, i32(wrong))
    assert ds.commit(cache, staged, i32(2)).length_tokens[0] == 2


def test_every_bad_argument_is_refused_and_changes_nothing(engine, manager):
    wrong = bad_search.search(1200, 0, engine, manager, every=400)
    assert not wrong, f"{len(wrong)} of 1200:\n" + "\n".join(wrong[:40])


@pytest.mark.slow
def test_thirty_thousand_bad_arguments_are_refused(engine, manager):
    wrong = []
    for seed in range(1, 7):
        wrong += bad_search.search(5000, seed, engine, manager, every=500)
    assert not wrong, f"{len(wrong)} of 30000:\n" + "\n".join(wrong[:40])


def test_every_public_function_and_argument_is_among_them(engine, manager):
    """What is public and takes arguments is tried, or says why not."""
    manager_slot = manager.admit(1)
    tried = [
        *targets.of_functions(),
        *targets.of_engine(engine, 0),
        *targets.of_manager(manager, manager_slot),
    ]
    manager.release(manager_slot)
    names = {target.name.split()[0] for target in tried}
    public = set()
    for package in (ds, ds.cache, ds.allocator, ds.serving):
        public |= {name for name in package.__all__ if callable(getattr(package, name))}
    for owner in (ds.Engine, ds.KVCacheManager):
        public |= {
            f"{owner.__name__}.{name}"
            for name, method in inspect.getmembers(owner, callable)
            if not name.startswith("_") and len(inspect.signature(method).parameters) > 1
        }
    assert public - names - set(bad_search.LEFT_OUT) == set()
    assert not set(bad_search.LEFT_OUT) & names
    for target in tried:
        if " " in target.name:
            continue
        given = set(target.kinds) | set(target.free)
        parameters = inspect.signature(target.function).parameters
        if "fields" in parameters:
            for owner in (ds.SamplingParams, ds.serving.EngineOptions):
                given -= {field.name for field in dataclasses.fields(owner)} - set(parameters)
            parameters = {name: one for name, one in parameters.items() if name != "fields"}
        assert given == set(parameters), target.name
