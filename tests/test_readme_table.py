"""The README's table is what the last GPU run measured."""

import json

import pytest

from benchmarks import readme_table

ROW = {"op": "gather", "shape": "64 x 512", "ours_us": 18.04, "limit_share": 0.71}
RIVAL = {"rival": "FlashMLA", "rival_us": 45.5, "ratio": 0.4}
RUN = {"device": "NVIDIA H200", "jax": "0.11.2", "date": "2026-11-21"}
COUNTS = {"passed": 12, "failed": 0, "skipped": 3}


def test_the_readme_has_the_table_of_the_last_run():
    if not readme_table.RESULTS.exists():
        pytest.skip("no GPU run is committed yet")
    readme = readme_table.README.read_text()
    made = readme_table.table(json.loads(readme_table.RESULTS.read_text()))
    assert readme == readme_table.splice(readme, made), "run `python -m benchmarks.readme_table`"


def test_a_row_with_a_rival_and_one_without():
    alone = ROW | dict.fromkeys(RIVAL)
    made = readme_table.table(RUN | {"tests": COUNTS, "rows": [alone, ROW | RIVAL]}).splitlines()
    assert made[0] == "NVIDIA H200, jax 0.11.2, 2026-11-21; 12 GPU tests passed."
    assert made[-2] == "| `gather` | 64 x 512 | 18.0 |  |  |  | 71% |"
    assert made[-1] == "| `gather` | 64 x 512 | 18.0 | FlashMLA | 45.5 | 0.40 | 71% |"


def test_a_row_that_failed_is_left_out_and_a_rival_that_did_is_not_named():
    failed = ROW | dict.fromkeys([*RIVAL, "ours_us", "limit_share"]) | {"failed": "ValueError"}
    alone = ROW | RIVAL | {"rival_us": None, "ratio": None, "rival_failed": "ValueError"}
    made = readme_table.table(RUN | {"tests": COUNTS, "rows": [failed, alone]}).splitlines()
    assert len(made) == 5
    assert made[-1] == "| `gather` | 64 x 512 | 18.0 |  |  |  | 71% |"


def test_failed_tests_are_not_hidden():
    made = readme_table.table(RUN | {"tests": COUNTS | {"failed": 2}, "rows": []})
    assert "12 GPU tests passed, 2 failed." in made


def test_only_the_text_between_the_markers_is_replaced():
    readme = f"# a\n{readme_table.BEGIN}old\n{readme_table.END}\n## b\n"
    spliced = readme_table.splice(readme, "new\n")
    assert spliced == readme.replace("old", "new")
    assert readme_table.splice(spliced, "new\n") == spliced
