"""What the places of `on_gpus` found, beside each other."""

import numpy as np


def against(names, folder):
    """{against, ...} of each place whose logits lie in the folder, beside those of one device."""
    expected = _read(folder / "one.npz")
    for name in names[1:]:
        found = _read(folder / f"{name}.npz")
        if expected is None or found is None:
            yield {"against": name, "failed": "there are no logits of it, or of one device"}
            continue
        yield {"against": name} | compare(found, expected)


def compare(found, expected):
    """Differences of logits in units of their spread, equal best tokens, and equal selections.

    `near` is the share of tokens whose best is among the two best of the other, which a tie is.
    """
    names = [name for name in expected if name != "selected"]
    one = np.concatenate([expected[name] for name in names])
    other = np.concatenate([found[name] for name in names])
    off, spread = np.abs(one - other), float(np.std(one))
    best, two = np.argmax(other, axis=-1), np.argsort(one, axis=-1)[:, -2:]
    kinds = sorted({name.split()[0] for name in names})
    by_kind = {
        kind: max(
            float(np.abs(expected[name] - found[name]).max())
            for name in names
            if name.split()[0] == kind
        )
        / spread
        for kind in kinds
    }
    rows = zip(expected["selected"], found["selected"], strict=True)
    shared = sum(len(set(a[a >= 0]) & set(b[b >= 0])) for a, b in rows)
    return {
        "rows": len(one),
        "off": float(off.max()),
        "off_of_spread": float(off.max()) / spread,
        "rms_of_spread": float(np.sqrt(np.mean(off**2))) / spread,
        "off_of_spread_by_kind": by_kind,
        "best_equal": float(np.mean(best == np.argmax(one, axis=-1))),
        "near": float(np.mean(np.any(two == best[:, None], axis=-1))),
        "selected_equal": shared / max(int(np.sum(expected["selected"] >= 0)), 1),
    }


def differing_rows(found, expected):
    """Rows of logits, and how many of them differ in some bit."""
    rows = differ = 0
    for name, value in found.items():
        bits, wanted = (np.asarray(x, np.float32).view(np.uint32) for x in (value, expected[name]))
        unequal = np.any(bits != wanted, axis=-1)
        rows, differ = rows + unequal.size, differ + int(np.sum(unequal))
    return {"rows": rows, "differ": differ}


def complaints(lines, names, parts):
    """What is not as promised, in words; rounding is not judged here."""
    wrong, seen = [], set()
    for line in lines:
        name, part = line.get("place") or line.get("against"), line.get("part", "logits")
        seen.add((name, part))
        said = [line["failed"]] if "failed" in line else _faults(part, line)
        wrong += [f"{name} {part}: {text}" for text in said]
    missing = [(n, part) for n in names for part in (*parts, "fallbacks") if (n, part) not in seen]
    return wrong + [f"{name} {part}: nothing was printed" for name, part in missing]


def _faults(part, line):
    """What a part promises and its line does not say."""
    if line.get("differ"):
        yield f"{line['differ']} differ"
    if not line.get("finite", True):
        yield "logits are not finite"
    if part == "fallbacks":
        yield from line["fallbacks"]
    if part == "engine":
        yield from line["problems"]
    if part == "launches" and not line.get("steps_without_a_call"):
        yield "no launch made several steps"
    if part == "rest" and "left_out" not in line:
        if not line["rested_tokens"]:
            yield "upper layers rested for no token"
        if line["rested_where_none_may"]:
            yield f"they rested for {line['rested_where_none_may']} tokens where none may"
    if part == "damage" and "left_out" not in line:
        yield from line["before"]
        for name, problems in line.items():
            wanted = name in ("one_shard", "one_replica", "on_its_own")
            if wanted and not problems:
                yield f"nothing was found of {name}"
            if name == "on_others" and problems:
                yield f"found {problems} where no step looks"


def _read(path):
    """{name: array}, or None."""
    try:
        with np.load(path) as arrays:
            return dict(arrays)
    except (OSError, ValueError):
        return None
