// The page of an engine: it asks for the state a few times a second and draws it, and streams answers.

const INTERVAL_MS = 250;
const HISTORY_S = 60;
const RATE_S = 2;
const MAX_ROWS = 120;
const SVG = "http://www.w3.org/2000/svg";

const find = (id) => document.getElementById(id);
const seen = new Map(); // cards by request
let history = []; // [seconds, tokens drawn]
let state = null;
let treeShown = "";
let asking = null;

// Small things.

function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function draw(name, attributes, text = "") {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
}

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const count = (number, one) => `${number.toLocaleString("en")} ${one}${number === 1 ? "" : "s"}`;

function short(number) {
  if (number < 10_000) return `${number}`;
  return number < 1e6 ? `${(number / 1e3).toFixed(0)}k` : `${(number / 1e6).toFixed(1)}M`;
}

function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (number >= 1024 && unit < units.length - 1) [number, unit] = [number / 1024, unit + 1];
  return `${number >= 100 || unit === 0 ? number.toFixed(0) : number.toFixed(1)}\u00a0${units[unit]}`;
}

function seconds(value) {
  return value < 1 ? `${(value * 1e3).toFixed(0)} ms` : `${value.toFixed(1)} s`;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function headers() {
  const key = sessionStorage.getItem("key");
  return key ? { authorization: `Bearer ${key}` } : {};
}

// The state.

async function poll() {
  if (!document.hidden) {
    try {
      const answer = await fetch("v1/engine/state", { headers: headers(), cache: "no-store" });
      if (answer.status === 401) {
        await askForKey();
      } else if (!answer.ok) {
        throw new Error(`status ${answer.status}`);
      } else {
        show(await answer.json());
        setStatus("live", "live");
      }
    } catch (error) {
      console.debug(error);
      setStatus("lost", "no answer from the server");
    }
  }
  setTimeout(poll, INTERVAL_MS);
}

function setStatus(name, text) {
  const status = find("status");
  if (status.dataset.state === name) return;
  status.dataset.state = name;
  status.textContent = text;
}

function askForKey() {
  setStatus("lost", "a key is needed");
  const dialog = find("key-dialog");
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener(
      "close",
      () => {
        sessionStorage.setItem("key", find("key").value);
        resolve();
      },
      { once: true },
    );
  });
}

function show(now) {
  if (state === null) {
    find("model").textContent = now.model;
    find("kind").options[1].disabled = !now.takes_conversations;
    showLegend(now.sizes);
    setAsking(false);
  }
  state = now;
  showFigures(now);
  showDrafts(now);
  showRequests(now);
  showTree(now);
  showMemory(now);
}

function showFigures({ seconds: at, counters, first_token_s: first }) {
  if (history.length && history.at(-1)[1] > counters.generated_tokens) history = [];
  history.push([at, counters.generated_tokens]);
  while (history[0][0] < at - HISTORY_S) history.shift();
  const rates = history.map((_, place) => rateAt(place));
  find("rate").textContent = history.length > 1 ? Math.round(rates.at(-1)).toLocaleString("en") : "–";
  find("first").textContent = first ? seconds(first.p50) : "–";
  const share = counters.prompt_tokens ? counters.hit_tokens / counters.prompt_tokens : 0;
  find("hits").textContent = counters.prompt_tokens ? `${Math.round(share * 100)} %` : "–";
  find("running").textContent = counters.running;
  find("waiting").textContent = counters.waiting ? `${counters.waiting} waiting` : "";
  const most = Math.max(...rates, 1);
  const points = rates.map((rate, place) => {
    const x = 120 - ((at - history[place][0]) / HISTORY_S) * 120;
    return `${x.toFixed(1)} ${(31 - (rate / most) * 29).toFixed(1)}`;
  });
  const [area, line] = find("spark").children;
  line.setAttribute("d", `M${points.join("L")}`);
  area.setAttribute("d", `M${points[0].split(" ")[0]} 32L${points.join("L")}L120 32Z`);
}

// Of requests with drafts, since the start; counts are by the place of a draft in its block.

function showDrafts({ sizes, drafted_at: checked, accepted_at: kept }) {
  find("drafts").hidden = !sizes.draft_tokens;
  const [rounds] = Object.values(checked);
  if (!rounds) return;
  find("round").textContent = (1 + sum(Object.values(kept)) / rounds).toFixed(2);
  const shares = Object.entries(checked).map(([place, all]) => Math.round(((kept[place] ?? 0) / all) * 100));
  find("kept").textContent = `kept ${shares.join(" ")} %`;
}

function rateAt(place) {
  let before = place;
  while (before > 0 && history[place][0] - history[before][0] < RATE_S) before -= 1;
  const past = history[place][0] - history[before][0];
  return past > 0 ? (history[place][1] - history[before][1]) / past : 0;
}

// What blocks hold: [class, family] from top to bottom.

function bands({ families, unit_bytes: unit }) {
  const found = [];
  for (const name of ["csa", "hca"]) {
    if (!families[name]) continue;
    found.push([name, families[name]]);
    if (`${name} index keys` in unit) found.push(["index", families[name]]);
  }
  return found;
}

const TITLES = {
  ring: () => "last tokens as they are (ring)",
  csa: (size) => `one entry per ${size} tokens (CSA)`,
  index: () => "keys that find them (index keys)",
  hca: (size) => `one entry per ${size} tokens (HCA)`,
};

function showLegend(sizes) {
  const names = ["ring", ...bands(sizes).map(([name]) => name)];
  find("legend").replaceChildren(
    ...names.map((name) =>
      make("li", {}, make("i", { class: name }), TITLES[name](sizes.families[name]?.tokens_of_an_entry)),
    ),
    make("li", { class: "shared" }, "underlined: shared with another request"),
  );
  for (const name of ["csa", "hca"]) {
    if (sizes.families[name]) find(`${name}-size`).textContent = sizes.families[name].tokens_of_an_entry;
  }
  find("block-size").textContent = sizes.block_tokens;
}

// Requests.

function showRequests(now) {
  const ids = new Set(now.requests.map((one) => one.id));
  for (const [id, card] of seen) {
    if (!ids.has(id)) {
      card.remove();
      seen.delete(id);
    }
  }
  const list = find("list");
  now.requests.forEach((one, place) => {
    let card = seen.get(one.id);
    if (!card || card.dataset.running !== `${one.is_running}`) {
      card?.remove();
      card = one.is_running ? makeCard(now.sizes) : make("article", { class: "card waiting" }, make("h3"));
      card.dataset.id = one.id;
      card.dataset.running = one.is_running;
      seen.set(one.id, card);
    }
    if (list.children[place] !== card) list.insertBefore(card, list.children[place] ?? null);
    fillTitle(card.querySelector("h3"), one);
    if (one.is_running) fillCard(card, one, now.sizes);
  });
  find("nobody").hidden = now.requests.length > 0;
  find("more").textContent = now.requests_left_out ? `and ${count(now.requests_left_out, "other")}` : "";
}

function fillTitle(title, one) {
  const parts = [`${short(one.prompt_tokens)} prompt tokens`];
  if (one.hit_tokens) parts.push(`${short(one.hit_tokens)} of them from the cache`);
  parts.push(one.is_running ? `${short(one.drawn_tokens)} drawn` : `waits for ${seconds(one.seconds)}`);
  const name = `Request ${one.id} `;
  const said = parts.join(", ");
  if (title.dataset.said === said) return;
  title.dataset.said = said;
  title.replaceChildren(name, make("span", {}, said));
}

function makeCard({ families }) {
  const ring = draw("svg", { viewBox: "0 0 72 72", role: "img" });
  ring.append(
    draw("circle", { cx: 36, cy: 36, r: 30 }),
    draw("circle", { cx: 36, cy: 36, r: 30, class: "held", pathLength: 100, transform: "rotate(-90 36 36)" }),
    draw("line", { x1: 36, y1: 1, x2: 36, y2: 11 }),
    draw("text", { x: 36, y: 39 }),
    draw("text", { x: 36, y: 50, class: "unit" }, "tokens"),
  );
  const tails = make("div", { class: "tails" });
  for (const name of ["csa", "hca"]) {
    if (!families[name]) continue;
    const size = families[name].tokens_of_an_entry;
    const tail = make("span", { "data-family": name, role: "img" }, make("b", {}, `next ${name.toUpperCase()} entry`));
    if (name === "csa") tail.append(...Array.from({ length: 2 * size }, () => make("i")));
    else tail.append(make("span", { class: "bar" }, make("em", { class: name })));
    tails.append(tail);
  }
  return make("article", { class: "card" }, ring, make("h3"), tails, make("canvas", { role: "img" }));
}

function fillCard(card, one, sizes) {
  const window_ = Object.values(sizes.families)[0].ring_tokens;
  const [ring] = card.children;
  const [, held, cursor, number] = ring.children;
  const inRing = Math.min(one.held_tokens, window_);
  held.setAttribute("stroke-dasharray", `${(inRing / window_) * 100} 200`);
  const turn = ((one.held_tokens % window_) / window_) * 360;
  cursor.setAttribute("transform", `rotate(${turn} 36 36)`);
  number.textContent = short(one.held_tokens);
  ring.setAttribute("aria-label", `ring: ${inRing} of ${window_} tokens, ${one.held_tokens} in all`);
  for (const tail of card.querySelectorAll("[data-family]")) {
    const size = sizes.families[tail.dataset.family].tokens_of_an_entry;
    const open = one.held_tokens % size;
    tail.setAttribute("aria-label", `next ${tail.dataset.family.toUpperCase()} entry: ${open} of ${size} tokens`);
    if (tail.dataset.family === "csa") {
      const before = one.held_tokens >= size ? size : 0;
      tail.querySelectorAll("i").forEach((cell, place) => {
        if (place < size) cell.className = place < before ? "before" : "";
        else cell.className = place - size < open ? "open" : "";
      });
    } else {
      tail.querySelector("em").style.width = `${(open / size) * 100}%`;
    }
  }
  drawBlocks(card.querySelector("canvas"), one, sizes);
}

const TILE = 14;
const GAP = 3;

function drawBlocks(canvas, one, sizes) {
  const layers = bands(sizes);
  const tall = layers.length * 6 + 3;
  const width = canvas.clientWidth || 300;
  const columns = Math.max(Math.floor((width + GAP) / (TILE + GAP)), 1);
  const rows = Math.ceil(one.blocks.length / columns);
  const height = Math.max(rows * (tall + GAP), 1);
  const scale = window.devicePixelRatio || 1;
  const shared = one.block_users.filter((users) => users > 1).length;
  const said = `${count(one.blocks.length + one.blocks_left_out, "block")}, ${shared} shared`;
  const look = [width, scale, one.held_tokens, one.block_users, colour("csa")].join();
  if (canvas.dataset.look === look) return;
  Object.assign(canvas.dataset, { look, blocks: one.blocks.length, shared });
  canvas.setAttribute("aria-label", said);
  canvas.title = said;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const brush = canvas.getContext("2d");
  brush.scale(scale, scale);
  const paints = Object.fromEntries(["empty", "ink", ...layers.map(([name]) => name)].map((n) => [n, colour(n)]));
  one.blocks.forEach((_, place) => {
    const x = (place % columns) * (TILE + GAP);
    const y = Math.floor(place / columns) * (tall + GAP);
    const tokens = clamp(one.held_tokens - place * sizes.block_tokens, 0, sizes.block_tokens);
    layers.forEach(([name, family], layer) => {
      const entries = Math.floor(tokens / family.tokens_of_an_entry);
      brush.fillStyle = paints.empty;
      brush.fillRect(x, y + layer * 6, TILE, 5);
      brush.fillStyle = paints[name];
      brush.fillRect(x, y + layer * 6, (TILE * entries) / family.entries_of_a_block, 5);
    });
    if (one.block_users[place] > 1) {
      brush.fillStyle = paints.ink;
      brush.fillRect(x, y + layers.length * 6 + 0.5, TILE, 1.5);
    }
  });
}

// Prefixes: blocks in a row that the same requests use are one row of the tree.

function showTree({ prefixes, prefixes_left_out: left, tiers }) {
  find("far-legend").hidden = !Object.keys(tiers).length;
  const signature = JSON.stringify(prefixes);
  if (signature === treeShown) return;
  treeShown = signature;
  const children = new Map();
  prefixes.forEach((node, place) => {
    if (!children.has(node.parent)) children.set(node.parent, []);
    children.get(node.parent).push(place);
  });
  const list = make("ul");
  const todo = (children.get(-1) || []).map((place) => [place, list]).reverse();
  let rows = 0;
  while (todo.length && rows < MAX_ROWS) {
    let [place, parent] = todo.pop();
    const run = [prefixes[place]];
    let next = children.get(place) || [];
    while (next.length === 1 && isAlike(prefixes[next[0]], run[0])) {
      [place] = next;
      run.push(prefixes[place]);
      next = children.get(place) || [];
    }
    const item = make("li", {}, showRun(run));
    parent.append(item);
    rows += 1;
    if (next.length) {
      const inner = make("ul");
      item.append(inner);
      todo.push(...next.map((one) => [one, inner]).reverse());
    }
  }
  const hidden = left + (todo.length ? todo.length : 0);
  const note = prefixes.length
    ? hidden
      ? "and others"
      : ""
    : "No block is known to be shared yet: a prefix is, when it fills a block.";
  find("tree").replaceChildren(list, make("p", { class: "quiet" }, note));
  find("tree").dataset.rows = rows;
}

function isAlike(one, other) {
  return one.users === other.users && `${one.where}` === `${other.where}`;
}

function showRun(run) {
  const row = make("div");
  for (const node of run.slice(0, 48)) {
    const kinds = ["sq", node.users ? "used" : "", node.resumes ? "resumes" : ""];
    if (node.where[0] !== "device") kinds.push("far");
    row.append(make("i", { class: kinds.join(" ").trim() }));
  }
  if (run.length > 48) row.append(` +${run.length - 48}`);
  const users = run[0].users;
  const used = users ? `, ${count(users, "request")}` : "";
  const [where, ...copies] = run[0].where;
  const places = where === "device" ? copies : [where, ...copies];
  const also = where === "device" ? "also " : "";
  const far = places.length ? `, ${also}on the ${places.join(" and the ")}` : "";
  row.append(make("small", {}, `to token ${run.at(-1).tokens.toLocaleString("en")}${used}${far}`));
  return row;
}

// Memory.

function showMemory({ counters, sizes, used_bytes: used, held_snapshots: held, tiers }) {
  const parts = [
    ["csa", counters.used_blocks],
    ["cached", counters.cached_blocks],
  ];
  const stack = find("blocks");
  if (!stack.children.length) stack.append(...parts.map(([name]) => make("div", { class: name })));
  parts.forEach(([, number], place) => {
    stack.children[place].style.width = `${(number / sizes.blocks) * 100}%`;
  });
  const said =
    `${count(sizes.blocks, "block")} of ${sizes.block_tokens} tokens: ${counters.used_blocks} in use by requests, ` +
    `${counters.cached_blocks} kept for later prompts, ${counters.free_blocks} free`;
  find("blocks-text").textContent = said;
  stack.setAttribute("aria-label", said);
  find("tiers").textContent = Object.entries(tiers)
    .map(([name, one]) => `Kept on the ${name}: ${bytes(one.num_bytes)} of ${bytes(one.max_bytes)}.`)
    .join(" ");
  const groups = {
    rings: ["ring", (name) => name.endsWith("window")],
    "open groups": ["hca", (name) => name.endsWith("state")],
    "CSA entries": ["csa", (name) => name === "csa entries"],
    "index keys": ["index", (name) => name.endsWith("index keys")],
    "HCA entries": ["hca", (name) => name === "hca entries"],
  };
  const rows = Object.entries(groups).flatMap(([title, [name, belongs]]) => {
    const families = Object.keys(sizes.unit_bytes).filter(belongs);
    if (!families.length) return [];
    const paged = title.endsWith("entries") || title.endsWith("keys");
    const whole = sum(families.map((one) => sizes.unit_bytes[one])) * (paged ? sizes.blocks : sizes.slots);
    const kept = paged ? (whole / sizes.blocks) * counters.cached_blocks : 0;
    return [[title, name, sum(families.map((one) => used[one] || 0)), kept, whole]];
  });
  rows.push(["snapshots", "ring", 0, held * sizes.snapshot_bytes, sizes.snapshots * sizes.snapshot_bytes]);
  const body = find("bytes");
  if (body.children.length !== rows.length) {
    body.replaceChildren(
      ...rows.map(([title, name]) =>
        make(
          "tr",
          {},
          make("th", { scope: "row" }, title),
          make(
            "td",
            { "aria-hidden": "true" },
            make("span", { class: "bar two" }, make("em", { class: name }), make("em", { class: `${name} kept` })),
          ),
          make("td"),
        ),
      ),
    );
  }
  rows.forEach(([, , some, kept, whole], place) => {
    const row = body.children[place];
    const shares = [some, kept].map((part) => `${whole ? (part / whole) * 100 : 0}%`);
    row.querySelectorAll("em").forEach((part, which) => {
      part.style.width = shares[which];
    });
    const parts = [some ? `${bytes(some)} in use` : "", kept ? `${bytes(kept)} kept` : ""].filter(Boolean);
    row.lastElementChild.textContent = `${parts.join(", ") || "none"} of ${bytes(whole)}`;
  });
}

const sum = (values) => values.reduce((total, value) => total + value, 0);

// Asking.

async function ask() {
  if (asking || !find("form").reportValidity() || state === null) return;
  const text = find("prompt").value;
  const isChat = find("kind").value === "chat";
  const body = {
    model: state.model,
    max_tokens: Number(find("tokens").value),
    temperature: Number(find("temperature").value),
    stream: true,
    stream_options: { include_usage: true },
    ...(isChat ? { messages: [{ role: "user", content: text }] } : { prompt: text }),
  };
  const answer = find("answer");
  answer.replaceChildren(make("span", { class: "asked" }, isChat ? `${text}\n\n` : text));
  find("timing").textContent = "";
  asking = new AbortController();
  setAsking(true);
  const watch = { began: performance.now(), first: null, tokens: 0 };
  try {
    const path = isChat ? "v1/chat/completions" : "v1/completions";
    const reply = await fetch(path, {
      method: "POST",
      headers: { "content-type": "application/json", ...headers() },
      body: JSON.stringify(body),
      signal: asking.signal,
    });
    if (!reply.ok) throw new Error((await reply.json()).error.message);
    await readEvents(reply.body, (event) => showEvent(event, answer, watch));
    showTiming(watch, "");
  } catch (error) {
    if (error.name === "AbortError") showTiming(watch, "stopped; ");
    else answer.append(make("span", { class: "wrong" }, `\n${error.message}`));
  } finally {
    asking = null;
    setAsking(false);
  }
}

async function readEvents(stream, handle) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      // Between events the server may say by a comment that it is still there.
      const data = event.split("\n").find((line) => line.startsWith("data:"))?.slice(5).trim();
      if (data && data !== "[DONE]") handle(JSON.parse(data));
    }
  }
}

function showEvent(event, answer, watch) {
  if (event.error) throw new Error(event.error.message);
  watch.tokens = event.usage?.completion_tokens ?? watch.tokens;
  const choice = event.choices?.[0];
  const thought = choice?.delta?.reasoning_content;
  const text = choice?.text ?? choice?.delta?.content;
  if (!thought && !text) return;
  watch.first ??= performance.now();
  const stays = answer.scrollHeight - answer.scrollTop - answer.clientHeight < 40;
  answer.append(thought ? make("span", { class: "thought" }, thought) : text);
  if (stays) answer.scrollTop = answer.scrollHeight;
}

function showTiming({ began, first, tokens }, before) {
  const parts = [];
  if (first) parts.push(`first token after ${seconds((first - began) / 1e3)}`);
  const past = (performance.now() - first) / 1e3;
  if (first && tokens > 1) parts.push(`${count(tokens, "token")}, ${Math.round((tokens - 1) / past)} per second`);
  find("timing").textContent = before + parts.join("; ");
}

function setAsking(on) {
  find("send").disabled = on;
  find("stop").disabled = !on;
}

find("form").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
find("stop").addEventListener("click", () => asking?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    ask();
  } else if (event.key === "Escape") {
    asking?.abort();
  }
});

poll();
