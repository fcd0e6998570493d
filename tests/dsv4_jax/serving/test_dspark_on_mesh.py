"""DSpark drafts on meshes of CPU devices; `tools.meshes.drafts` compares them."""

import pytest

from tools.meshes import on_cpus

pytestmark = pytest.mark.unoptimised


def check(found):
    """Answers are those without drafts and those of one device; hits brought rings."""
    for name, of_mesh in found.items():
        assert all(of_mesh["same"]), name
        assert of_mesh["plain"] == found["one device"]["plain"], name
        assert of_mesh["kept"] > 10, name
        assert of_mesh["hits"] == 256, name


@pytest.mark.slow
def test_answers_on_two_data_shards_and_over_model():
    check(on_cpus.run("drafts", "2x1", "1x2"))


@pytest.mark.slow
def test_answers_of_a_split_cache_with_a_cut():
    """Blocks are dealt over model; drafts are checked as far as they are likely."""
    check(on_cpus.run("drafts", "2x2", "--split", "--cut"))


@pytest.mark.slow
@pytest.mark.parametrize("requests", ["2", "1"])
def test_answers_where_rows_are_dealt_over_model(requests):
    """As many rows are. Of one request the trunk's are, and five rows of a block do not divide."""
    check(on_cpus.run("drafts", "1x2", "--dealt", "--requests", requests))
