"""The picture of the page in the documents: `python -m tools.page_picture docs/page.png`.

Serves the shipped checkpoint to requests that share parts of a document, and photographs the page
in Chromium. `--dark` and `--width` show it otherwise.
"""

import argparse
import asyncio
import contextlib
import json

import httpx

import dsv4_jax as ds
from dsv4_jax.serve import Server, ServeSettings
from dsv4_jax.serving import AsyncEngine
from helpers.browser import chromium

DOCUMENT = (json.__doc__ or "") * 2
PROMPTS = [DOCUMENT[:900], DOCUMENT[:600] + "Also, ", DOCUMENT[:400] + "def dump(", "A for loop"]


async def read(client, prompt):
    """Reads an answer as fast as it comes."""
    body = {"model": "shipped", "prompt": prompt, "max_tokens": 1500, "ignore_eos": True}
    with contextlib.suppress(httpx.HTTPError):
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            async for _ in stream.aiter_raw():
                pass


async def ask_all(url, browser, args):
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        first = asyncio.create_task(read(client, PROMPTS[0]))
        while not (await client.get("/v1/engine/state")).json()["counters"]["generated_tokens"]:
            await asyncio.sleep(0.1)
        others = [asyncio.create_task(read(client, prompt)) for prompt in PROMPTS[1:]]
        await asyncio.to_thread(photograph, url, browser, args)
        for task in (first, *others):
            task.cancel()


def photograph(url, browser, args):
    browser.emulate(args.width, args.height, scheme="dark" if args.dark else "light")
    browser.open(url)
    browser.until(lambda: browser.text("#status") == "live")
    browser.type("#prompt", " has\ue009\ue007")
    browser.until(lambda: len(browser.text("#answer")) > 50, 200)
    browser.screenshot(args.picture)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("picture")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=1060)
    args = parser.parse_args()
    ds.use_compilation_cache()
    engine = ds.Engine.from_checkpoint(
        ds.SHIPPED_CHECKPOINT,
        max_requests=6,
        max_context_tokens=4096,
        num_blocks=96,
        draft_tokens=5,
    )
    engine.warmup()
    settings = ServeSettings(model_name="shipped", drain_timeout_s=0)
    with Server(AsyncEngine(engine), settings) as server, chromium() as browser:
        asyncio.run(ask_all(server.url, browser, args))


if __name__ == "__main__":
    main()
