"""Configs that several tests take."""

import dataclasses

import jax

import dsv4_jax as ds


def scanned(**changes):
    """A window layer, routed by hash, then one of each compressed type twice, which is scanned."""
    swa, csa, hca = ds.AttentionType.SWA, ds.AttentionType.CSA, ds.AttentionType.HCA
    fields = {
        "layer_types": (swa, hca, csa, hca, csa),
        "router_types": (ds.RouterType.HASH, *(ds.RouterType.LEARNED,) * 4),
    }
    return dataclasses.replace(ds.DSV4Config.tiny(), **fields | changes)


def two_layers(attn):
    """A model of two equal layers, which a scan repeats: config and parameters."""
    config = scanned(
        layer_types=(attn,) * 2, router_types=(ds.RouterType.LEARNED,) * 2, num_mtp_layers=0
    )
    return config, ds.init_params(config, jax.random.key(0))


def first_layers(config, layers, **changes):
    """A config of the first so many layers, without a draft block."""
    return dataclasses.replace(
        config,
        layer_types=config.layer_types[:layers],
        router_types=config.router_types[:layers],
        num_mtp_layers=0,
        **changes,
    )
