"""Configs that several tests take."""

import dataclasses

import dsv4_jax as ds


def scanned(**changes):
    """A window layer, routed by hash, then one of each compressed type twice, which is scanned."""
    swa, csa, hca = ds.AttentionType.SWA, ds.AttentionType.CSA, ds.AttentionType.HCA
    fields = {
        "layer_types": (swa, hca, csa, hca, csa),
        "router_types": (ds.RouterType.HASH, *(ds.RouterType.LEARNED,) * 4),
    }
    return dataclasses.replace(ds.DSV4Config.tiny(), **fields | changes)
