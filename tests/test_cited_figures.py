"""A figure that a page takes from a benchmark is that of the benchmark's table."""

import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).parents[1] / "docs"
PREFILL, STEPS = "benchmarks/prefill", "benchmarks/decode_steps"
SERVING, MESHES, NCCL = "benchmarks/serving", "benchmarks/several_gpus", "kernels/nccl"
BESIDE = "benchmarks/side_by_side"
FIGURE = re.compile(r"\d (?:ms|us|s|%|times|[tT]okens/s|[TG]B/s|GiB)(?!\w)")
CITES = re.compile(r"\]\((?:\.\./)?benchmarks/(?:decode_steps|prefill|serving|several_gpus)\.md")

NUMBER = r"(\d[\d,]*(?:\.\d+)?)"
"""What `#` stands for in the patterns of this file."""


def numbers(text):
    return [float(n.replace(",", "")) for n in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def at(page, start, cell, number=0):
    """A number of a cell, counted from 0, of the one line of a page that begins with `start`."""
    lines = (DOCS / f"{page}.md").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"| {start}")]
    return numbers(line.split("|")[cell + 1])[number]


def in_words(page, pattern):
    (found,) = re.findall(
        pattern.replace("#", NUMBER), " ".join((DOCS / f"{page}.md").read_text().split())
    )
    return float(found)


def fp8(tokens):
    return at(PREFILL, f"{tokens} | {tokens} | uniform", 6)


def one_request():
    """The least and the most ms of three cards, and how many floors the first one took."""
    first = at(STEPS, "1, 4,096 |", 1)
    least = in_words(STEPS, r"two others one request of 4,096 tokens took # ms")
    return min(least, first), max(least, first), first / at(STEPS, "1, 4,096 |", 2)


def compiled(start):
    return at(STEPS, start, 2) + at(STEPS, start, 2, 1)


def peers_to_nccl():
    """The least and the most share of NCCL's ms a step at the points that both tables have."""
    points = [
        ("1x2 | 1, 4,096 |", 2),
        ("1x2 | 64, 16,384 |", 2),
        ("1x2 | 256, 16,384 |", 2),
        ("1x4 | 1, 4,096 |", 2),
        *((f"1x4 | {n} |", 3) for n in ("1, 1,048,576", "64, 16,384", "256, 16,384")),
        *((f"4x1 | {n} |", 3) for n in ("64, 16,384", "256, 16,384")),
        *((f"2x2 | {n} |", 3) for n in ("8, 16,384", "64, 16,384", "256, 16,384")),
    ]
    shares = [at(MESHES, point, 2) / at(NCCL, point, cell) for point, cell in points]
    return min(shares), max(shares)


def share_of_floor(start, law=2):
    return at(MESHES, start, law) / at(MESHES, start, law + 1)


FLASH, WITH_DRAFT = "Flash, 1 request | 4,096", "Flash, 1 request and 1 draft"
CITED = {
    "limits": {
        r"\*\*Prefill\*\* reaches # %": lambda: [fp8("32,768")],
        r"reaches # % of the FP8 rate in a call of 32,768 tokens and # % in one of 8,192": (
            lambda: [fp8("32,768"), fp8("8,192")]
        ),
        r"takes # to # ms a token on one H200, # times": one_request,
        r"release takes # to # ms, # times its floor": one_request,
        r"has # launches of at least 2 us each. # of them are XLA's": lambda: [
            at(STEPS, "1, 4,096 |", 5),
            at(STEPS, "1, 4,096 |", 5) - at(STEPS, "1, 4,096 |", 5, 1),
        ],
        r"one H200, at # to # times the floor": lambda: [
            at(STEPS, "64 | 31.31", 3),
            at(STEPS, "1 | 5.40", 3),
        ],
        r"compiles in # to # s on two": lambda: [compiled(FLASH), compiled(WITH_DRAFT)],
        r"takes # s to trace and compile on two cores, and # s with a draft": lambda: [
            compiled(FLASH),
            compiled(WITH_DRAFT),
        ],
        r"takes # ms for one request, where a loop without the engine takes #\. With": lambda: [
            at(SERVING, "shipped checkpoint | A, 2026-11-26 | 1 |", 5),
            at(SERVING, "shipped checkpoint | A, 2026-11-26 | 1 |", 4),
        ],
        r"`steps_per_call=16` the engine takes # ms": lambda: [
            at(SERVING, "shipped checkpoint | A, 2026-11-26 | 16 | 1 |", 5)
        ],
        r"a step takes # to # of a plain one": lambda: [
            at(SERVING, "1 | 6.06", 2, 1),
            at(SERVING, "64 | 29.95", 2, 1),
        ],
        r"takes # times a plain one, and of 8 and 64 requests # times": lambda: [
            at(SERVING, "1 | 6.06", 3, 1),
            at(SERVING, "8 | 11.17", 3, 1),
        ],
        r"waited # s or more for a first token": lambda: [
            at(SERVING, "first token, ms", 1, 2) / 1000
        ],
        r"came more than # s after": lambda: [
            at(SERVING, "between two tokens of one request, ms", 1, 1) / 1000
        ],
        r"costs # % of the throughput": lambda: [
            100 - 100 * at(SERVING, "default, which", 1) / at(SERVING, "none | 6,764", 1)
        ],
        r"from the host in # ms more than from the device, one of 1,048,576 in # s": (
            lambda: [
                at(SERVING, "102,400 |", 3) - at(SERVING, "102,400 |", 2),
                (at(SERVING, "1,048,576 | 150", 3) - at(SERVING, "1,048,576 | 150", 2)) / 1000,
            ]
        ),
        r"back at # GB/s, 8 requests that decode had # of their tokens, and 64 had # while they "
        r"came at # GB/s": lambda: [
            at(SERVING, "8 | prefixes come back |", 2),
            at(SERVING, "8 | prefixes come back |", 3, 1),
            at(SERVING, "64 | prefixes come back |", 3, 1),
            at(SERVING, "64 | prefixes come back |", 2),
        ],
        r"One request takes # to # ms there, # to # times": lambda: [
            at(MESHES, "1x4 | 1, 4,096", 5),
            at(MESHES, "1x4 | 1, 1,048,576", 5),
            share_of_floor("1x4 | 1, 4,096", 5),
            share_of_floor("1x4 | 1, 1,048,576", 5),
        ],
        r"64 and 256 requests take # times": lambda: [share_of_floor("1x4 | 64, 16,384")],
        r"NCCL on two, # ms against #": lambda: [
            at(NCCL, "1x2 | 1, 1,048,576, split", 2),
            at(NCCL, "1x2 | 1, 1,048,576 |", 2),
        ],
        r"take # ms with that flag and # without, and 256 take # and #": (
            lambda: [at(NCCL, f"1x2 | {n}, 16,384", cell) for n in (64, 256) for cell in (3, 2)]
        ),
        r"on 1x4 takes # us by a gather and # by NCCL": lambda: [
            at(NCCL, "256 rows, 2 MiB", 2),
            at(NCCL, "256 rows, 2 MiB", 1),
        ],
        r"# times DeepGEMM's time with rounded rows": lambda: [
            at(
                "benchmarks/slower_kernels",
                "`block_linear Flash wo_a` | 256 x 8 x 1024 x 4096 | 43.5 | DeepGEMM",
                5,
            )
        ],
    },
    "benchmarks/README": {
        r"tokens vLLM draws # tokens/s for one, # for 8 and # for 32 at a time": (
            lambda: [at(BESIDE, f"{n}, 8,192", 1) for n in (1, 8, 32)]
        ),
        r"and dsv4-jax draws #, # and #\.": (
            lambda: [at(BESIDE, f"{n}, 8,192", 1, 1) for n in (1, 8, 32)]
        ),
        r"512 tokens vLLM draws # for 64 at a time, and dsv4-jax #\.": (
            lambda: [at(BESIDE, "64, 512", 1, n) for n in (0, 1)]
        ),
        r"a time \| one, 192 experts \| # and # drawn tokens/s, vLLM # and some #": lambda: [
            *(at(BESIDE, f"{n}, 8,192", 1, 1) for n in (1, 32)),
            at(BESIDE, "1, 8,192", 1),
            in_words(BESIDE, r"it would have drawn some # tokens/s"),
        ],
        r"of 8,192 tokens \| one, 192 experts \| #, #, # and # ms a step": (
            lambda: [at(STEPS, f"{n}, 8,192 |", 1) for n in (1, 8, 32, 64)]
        ),
    },
    "benchmarks/side_by_side": {
        r"# ms with 8,192 tokens of context": lambda: [at(STEPS, "32, 8,192 |", 2)],
        r"vLLM takes # ms and dsv4-jax #, which are # and # floors": lambda: [
            *(at(BESIDE, "32, 8,192", 3, n) for n in (0, 1)),
            *(at(BESIDE, "32, 8,192", 3, n) / at(STEPS, "32, 8,192 |", 2) for n in (0, 1)),
        ],
        r"in # ms where vLLM has it in #": lambda: [at(BESIDE, "1, 8,192", 3, n) for n in (1, 0)],
        r"reads # of the 192 experts": lambda: [at(STEPS, "32, 8,192 |", 7)],
    },
    "serving": {
        r"reads \[# tokens/s\]\(\S*\) in calls of 8,192 and # in calls of 32,768": (
            lambda: [at(PREFILL, f"32,768 | {n} | uniform", 4) for n in ("8,192", "32,768")]
        ),
        r"draws a token in \[# ms\]\(\S*\) where a step for all takes #\.": (
            lambda: [at(SERVING, "1 | 9.66", cell) for cell in (2, 1)]
        ),
        r"Calls of these sizes take # and # GiB": lambda: [
            at(PREFILL, f"32,768 | {n} | uniform", 7) for n in ("8,192", "32,768")
        ],
    },
    "kernels/expert_mlp": {
        r"take # and # us, 3.4 and 2.8 TB/s": lambda: [
            at(STEPS, "experts, with the shared one", 1, n) / 43 for n in (0, 1)
        ],
        r"unpacking takes # ms, which": lambda: [at(PREFILL, "experts unpacked to FP8", 1)],
        r"experts takes # ms there, and the down projection #": lambda: [
            at(PREFILL, "sum of a token's experts", 1),
            at(PREFILL, "experts: gate and up, down", 1, 1),
        ],
        r"rounding rows takes # ms and the sums #": lambda: [
            at(MESHES, "rows rounded to E4M3 | 25", 1),
            at(MESHES, "sum of a token's experts", 1),
        ],
    },
    "kernels/hyper_connections": {
        r"of one request of V4-Flash \| # \|": lambda: [
            at(STEPS, "hyper-connections, writing to the streams", 1) / 86
        ],
        r"32,768 tokens in a prefill call, \D*\| # \|": lambda: [
            1000 * at(PREFILL, "hyper-connections: the streams", 1, 2) / 86
        ],
    },
    "kernels/index_scores": {
        r"the scores take # ms a layer": lambda: [at(PREFILL, "index scores", 1) / 21],
    },
    "kernels/joined_linears": {
        r"a layer on average: # us for one request": lambda: [
            at(STEPS, "projections of the hidden state | 368", 1) / 43
        ],
    },
    "kernels/round_index_queries": {
        r"# ms in 21 launches": lambda: [at(PREFILL, "index scores, index queries", 1, 1)],
    },
    "kernels/sparse_attention": {
        r"combining its splits take # us a layer": lambda: [at(STEPS, "attention | 373", 2) / 40],
        r"attention takes # us and the launch that adds up its splits #": lambda: [
            at(STEPS, "attention, and the sum of its splits", 1, n) for n in (0, 1)
        ],
    },
    "kernels/nccl": {
        r"take \[# to # times as long\]": lambda: peers_to_nccl(),
    },
    "kernels/whole_steps": {
        r"takes # us a layer, the head aside": lambda: [
            (1000 * at(STEPS, "1, 4,096 |", 6) - at(STEPS, "head, router", 1)) / 43
        ],
        r"copy bandwidth: # ms for one request": lambda: [at(STEPS, "1, 4,096 |", 2)],
    },
}


def words(page):
    return " ".join((DOCS / f"{page}.md").read_text().split())


@pytest.mark.parametrize(
    ("page", "pattern"), [(page, pattern) for page in CITED for pattern in CITED[page]]
)
def test_a_cited_figure_is_that_of_the_table(page, pattern):
    (said,) = [found.groups() for found in re.finditer(pattern.replace("#", NUMBER), words(page))]
    expected = list(CITED[page][pattern]())
    assert [len(said)] == [len(expected)]
    for figure, value in zip(said, expected, strict=True):
        decimals = len(figure.partition(".")[2])
        rounding = 0.5001 * 10**-decimals
        assert float(figure.replace(",", "")) == pytest.approx(value, abs=rounding), (
            said,
            expected,
        )


def uncovered(page, text):
    """Sentences of a page with a link to a benchmark and a figure that nothing above is held to."""
    patterns = [re.compile(pattern.replace("#", NUMBER)) for pattern in CITED.get(page, {})]
    blocks = re.split(r"\n\n|\n(?=[-|] )", text)
    sentences = [
        s for block in blocks for s in re.split(r"(?<=[.:]) (?=[A-Z])", " ".join(block.split()))
    ]
    return [
        s
        for s in sentences
        if CITES.search(s) and FIGURE.search(s) and not any(p.search(s) for p in patterns)
    ]


def unfound(line):
    """Numbers of a line's result that the page that it names does not have, nor follow from it."""
    what, _, result, _, link = (cell.strip() for cell in line.strip("| ").split(" | "))
    page = numbers(words("benchmarks/" + re.search(r"\((\w+)\.md", link)[1]))
    said = re.findall(r"\d[\d,]*(?:\.\d+)?", result)
    requests, ms = re.search(r"(\d+) requests?", what), re.search(r"([\d.]+) ms a step", result)
    known = [*page, *(n / 1000 for n in page)]
    if requests and ms:
        known.append(1000 * int(requests[1]) / float(ms[1]))
    return [
        n
        for n in said
        if not any(
            abs(value - float(n.replace(",", ""))) <= 0.5001 * 10 ** -len(n.partition(".")[2])
            for value in known
        )
    ]


def test_results_of_the_first_table_of_the_benchmarks_are_on_the_pages_that_it_names():
    text = (DOCS / "benchmarks" / "README.md").read_text()
    lines = text.split("| what | GPUs | result |")[1].split("\n\n")[0].splitlines()[2:]
    assert len(lines) > 10
    assert {line: unfound(line) for line in lines if unfound(line)} == {}
    said = "| serving | one | 7,057 prompt tokens/s and 883 drawn | - | [serving](serving.md) |"
    assert unfound(said) == ["883"]


PAGES = sorted(
    str(page.relative_to(DOCS).with_suffix(""))
    for folder in (DOCS, DOCS / "kernels")
    for page in folder.glob("*.md")
)


@pytest.mark.parametrize("page", PAGES)
def test_every_cited_figure_is_among_these(page):
    assert uncovered(page, (DOCS / f"{page}.md").read_text()) == []


def test_a_figure_without_a_table_is_seen():
    figures, rest = "([figures](benchmarks/serving.md))", "[rest](benchmarks/prefill.md)"
    said = f"It takes 3.1 ms {figures}. It takes 3 ms. The\n{rest}."
    assert uncovered("limits", said) == [f"It takes 3.1 ms {figures}."]
