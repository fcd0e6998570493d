"""`dsv4-jax verify`: well on a checkpoint, the shipped one among them; status 1 on damage."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import dsv4_jax as ds
from dsv4_jax.allocator.pending_changes import PendingChanges
from dsv4_jax.checkpoint.finite import list_not_finite
from dsv4_jax.cli import main, verify
from helpers import serving
from pallas_kernels import CACHE_FORMATS
from pallas_kernels.common.weights import quantize_block_fp8, quantize_mxfp4

pytestmark = pytest.mark.unoptimised


@pytest.fixture(scope="module")
def model():
    """A layer and the draft block, whose window is longer than a step of `verify`."""
    return serving.one_layer(sliding_window=64)


def arguments_for(tmp_path, config, params):
    ds.save_checkpoint(config, params, tmp_path)
    small = [str(tmp_path), "--cache-format", "fp8_ue8m0", "--requests", "5"]
    return ["verify", *small]


@pytest.mark.slow
def test_a_checkpoint_is_well(model, capsys, tmp_path):
    assert main(arguments_for(tmp_path, *model)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["parameters", "finite"]
    assert lines[1].startswith("fp8_ue8m0               well, ")
    assert int(lines[1].split()[-3]) >= 128  # tokens shared


@pytest.mark.slow
def test_damage_is_found_and_status_1(model, capsys, monkeypatch, tmp_path):
    """A parameter that is NaN; and, in the same run, snapshots that are never loaded."""
    config, params = model
    head = params.mtp.norm.at[3].set(jnp.nan)
    broken = dataclasses.replace(params, mtp=dataclasses.replace(params.mtp, norm=head))
    take = PendingChanges.take
    monkeypatch.setattr(
        PendingChanges, "take", lambda self, *args: (self.loads.clear(), take(self, *args))[1]
    )
    assert main(arguments_for(tmp_path, config, broken)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "NOT FINITE: .mtp.norm" in lines[0]
    assert any("unwritten: " in line for line in lines[1:])


def test_nan_in_codes_and_scales_is_found():
    values = jnp.ones((128, 128))
    well = {
        "fp8": jax.jit(lambda x: quantize_block_fp8(x, dtype="float32"))(values),
        "fp4": jax.jit(lambda x: quantize_mxfp4(x, dtype="float32"))(values),
    }
    well["f32 scales"] = dataclasses.replace(well["fp8"], scale=jnp.ones((1, 1)))
    assert list_not_finite(well) == []
    codes = well["fp8"].codes.at[3, 5].set(jnp.nan)
    broken = {
        "codes": dataclasses.replace(well["fp8"], codes=codes),
        "scale": dataclasses.replace(well["fp8"], scale=jnp.full((1, 1), 255, jnp.uint8)),
        "f32": dataclasses.replace(well["fp8"], scale=jnp.full((1, 1), jnp.inf)),
        "fp4": dataclasses.replace(
            well["fp4"], scale=well["fp4"].scale.at[0, 0, 3].set(0x7FFF7F7F)
        ),
    }
    assert list_not_finite(broken) == [f"['{name}']" for name in sorted(broken)]


@pytest.mark.slow
def test_the_shipped_checkpoint_is_well_in_every_format(capsys):
    assert main(["verify", "--cache-format", "all"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.split() == ["parameters", "finite"]
    assert [line.split()[:2] for line in lines] == [[name, "well,"] for name in CACHE_FORMATS]


@pytest.mark.parametrize(
    ("asked", "config", "formats"),
    [
        (None, ds.DSV4Config.flash(), ["fp8_ue8m0"]),
        (None, ds.DSV4Config.v41_flash(), ["fp4_e4m3"]),
        (["bf16", "f32"], ds.DSV4Config.flash(), ["bf16", "f32"]),
        (["all"], ds.DSV4Config.flash(), list(CACHE_FORMATS)),
        (["all"], ds.DSV4Config.v41_flash(), ["f32", "bf16", "fp4_e4m3"]),
    ],
    ids=["V4", "V4.1", "two", "all of V4", "all of V4.1"],
)
def test_formats_are_the_model_s_own_unless_others_are_asked_for(asked, config, formats):
    assert verify._formats(asked, config) == formats


def test_bad_input_is_one_line_and_status_2(capsys):
    assert main(["verify", "--requests", "0"]) == 2
    assert capsys.readouterr().err == (
        "dsv4-jax verify: argument --requests: must be a whole number from 1 to 10000, got '0'\n"
    )
