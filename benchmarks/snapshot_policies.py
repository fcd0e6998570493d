"""Which snapshots long prompts need: `python -m benchmarks.snapshot_policies`.

Agents take turns, as in `bench_agents`, with prompts of thousands of tokens; some turns go on from
a place in the middle of what was said. The prefix tree, the host's tier and the plan of snapshots
are those of an engine. There are no devices, so that what is brought back comes at once. Each row
has the share of prompt tokens that had to be computed, how many snapshots were written, and GB
that were moved, by how many evenly spaced snapshots a prompt keeps at most.
"""

import argparse
import json
import types

import numpy as np

import dsv4_jax as ds
from dsv4_jax.allocator.block_contents import HashedTokens
from dsv4_jax.allocator.data_shards import DataShards
from dsv4_jax.allocator.host_tier import HostTier
from dsv4_jax.allocator.manager import KVCacheManager
from dsv4_jax.serving.device.far_fetch import FarSearch
from dsv4_jax.serving.device.far_places import FarPlaces
from dsv4_jax.serving.schedule import snapshot_policy

BLOCK, CALL = 128, 8192
BYTES = {"blocks": 450 * 1024, "snapshots": 1_820_000}
"""Of V4-Flash."""

PLANS = {
    "half of all places": (10**6, 1), "16": (16, 10**6), "8": (8, 10**6), "4": (4, 10**6),
    "8, or one in 16 blocks": (8, 16), "8, or one in 32 blocks": (8, 32), "one": (1, 10**6),
}  # fmt: skip
"""`SPACED_SNAPSHOTS` and `SPACED_BLOCKS`."""


class Engine:
    """An engine without devices, which serves one request after the other."""

    def __init__(self, *, num_blocks, num_snapshots, host_bytes, context):
        self.manager = KVCacheManager(
            ds.DSV4Config.tiny(), max_requests=1, max_context_tokens=context,
            num_blocks=num_blocks, num_snapshots=num_snapshots, cache_format="fp8_ue8m0",
        )  # fmt: skip
        self.shards, self.tier = DataShards([self.manager]), HostTier(host_bytes)
        self.manager.prefixes.tree.leaving = []
        self.places = FarPlaces(self.tier, None, BYTES.__getitem__)
        self.asked = self.computed = self.written = self.moved = 0

    def keep(self):
        """What has left the tree is on the host."""
        tree = self.manager.prefixes.tree
        leaving, tree.leaving = tree.leaving, []
        for of, sizes in (("snapshots", (16, 4, 1)), ("blocks", (64, 16, 4, 1))):
            found = {one.content.key: one for one in leaving if one.of == of}
            rows = self.tier.lacking(of, list(found.values())[::-1])
            while rows:
                size = next(size for size in sizes if size <= len(rows))
                if slab := self.tier.add(of, rows[:size], BYTES[of]):
                    self.tier.let_go([slab])
                    self.moved += slab.num_bytes
                rows = rows[size:]
        self.tier.use([(one.of, one.content.key) for one in leaving])

    def bring(self, tokens, total):
        """The longest prefix that lies on the host is in the tree."""
        prefixes = self.manager.prefixes
        most, tree = (len(tokens) - 1) // BLOCK, prefixes.tree
        resumable = len(prefixes.find_resumable(tokens, b"", total))
        chain = tree.match(tokens, most)
        search = FarSearch(tokens, most, len(chain), resumable)
        while not search.go_on(self.places, 64):
            pass
        if search.snapshot is None:
            return
        del chain[search.length :]
        tree.use(*chain)
        slabs = list({page.slab: None for page in (*search.pages, search.snapshot)})
        self.tier.hold(slabs)
        rows = prefixes.bring_back(chain, [page.content for page in search.pages])
        if len(rows) == len(search.pages):
            if chain[-1].snapshot < 0 and (place := prefixes.begin_snapshot()) >= 0:
                tree.put_snapshot(chain[-1], place)
            self.moved += len(rows) * BYTES["blocks"] + BYTES["snapshots"]
        self.keep()
        self.tier.let_go(slabs)
        tree.leave(*chain)

    def serve(self, prompt, answer):
        """A request from its first token to its last."""
        tokens, every = HashedTokens(prompt, b"", BLOCK), np.concatenate([prompt, answer])
        self.bring(tokens, len(every))
        slot = self.manager.admit(len(every), tokens)
        self.manager.take_changes()
        request = types.SimpleNamespace(
            slot=slot, known=prompt, num_known=len(prompt), prompt_tokens=len(prompt),
            reading=None, upper_from=-1, next_boundary=0, snapshot_spacing=1,
        )  # fmt: skip
        snapshot_policy.plan_request(
            request, self.shards, self.manager.prefixes.known_tokens(tokens)
        )
        at = int(self.manager.length_tokens[slot])
        self.asked += len(prompt)
        self.computed += len(prompt) - at
        while at < len(every):
            end = min(at + CALL, len(prompt)) if at < len(prompt) else at // BLOCK * BLOCK + BLOCK
            end = min(end, len(every))
            request.known = every[:end]
            boundaries = snapshot_policy.take_boundaries(request, self.shards, at, end)
            self.manager.advance(slot, end - at)
            self.manager.share(slot, request.known)
            for boundary in boundaries:
                self.written += self.manager.prefixes.keep_snapshot(*boundary)
            self.keep()
            at = end
        self.manager.release(slot)
        self.manager.take_changes()
        self.keep()


def make_trace(args, seed):
    """Prompts with their answers, in order, and blocks of all conversations at their ends."""
    rng = np.random.default_rng(seed)

    def tokens(low, high):
        return rng.integers(0, 10**6, int(rng.integers(low, high))).astype(np.int32)

    heads = [tokens(2000, 4000) for _ in range(4)]
    said = [
        np.concatenate([heads[number % 4], tokens(*args.own_tokens)])
        for number in range(args.agents)
    ]
    trace = []
    for turn in range(args.turns):
        for number, known in enumerate(said):
            if turn and rng.random() < args.edits:
                known = known[: int(rng.integers(len(heads[number % 4]), len(known)))]
            prompt = np.concatenate([known, tokens(100, 3000)])
            answers = [tokens(50, 800) for _ in range(1 + int(rng.random() < 0.2))]
            trace += [(prompt, answer) for answer in answers]
            said[number] = np.concatenate([prompt, answers[0]])
    return trace, sum(len(one) // BLOCK for one in said)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, default=24)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--own-tokens", type=int, nargs=2, default=[2000, 8000], help="from, to")
    parser.add_argument("--edits", type=float, default=0.15, help="share of turns")
    parser.add_argument("--snapshots", type=int, default=128, help="places on the device")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 1, 2],
                        help="of the host's memory, in units of all blocks")  # fmt: skip
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    for share in args.shares:
        for name, plan in PLANS.items():
            snapshot_policy.SPACED_SNAPSHOTS, snapshot_policy.SPACED_BLOCKS = plan
            asked = computed = written = moved = 0
            for seed in range(args.seeds):
                trace, blocks = make_trace(args, seed)
                engine = Engine(
                    num_blocks=blocks // 4, num_snapshots=args.snapshots,
                    host_bytes=int(share * blocks * BYTES["blocks"]),
                    context=max(len(prompt) + len(answer) for prompt, answer in trace) + 2 * BLOCK,
                )  # fmt: skip
                for request in trace:
                    engine.serve(*request)
                asked, computed = asked + engine.asked, computed + engine.computed
                written, moved = written + engine.written, moved + engine.moved
            row = {"share": share, "spaced": name, "computed_%": round(100 * computed / asked, 1)}
            print(json.dumps(row | {"written": written, "gb": round(moved / 1e9, 1)}), flush=True)


if __name__ == "__main__":
    main()
