"use strict";
// The page polls /status and draws it; the playground streams from /v1/chat/completions. All addresses are relative, so
// that it works below a proxy's prefix. Text only ever goes through textContent.
const $ = id => document.getElementById(id);
const EVERY_MS = 1000, KEPT = 60;
let key = null, model = null, asked = false, history = { rate: [], itl: [] };

function make(tag, text, className) {
  const node = document.createElement(tag);
  if (text !== undefined && text !== null) node.textContent = text;
  if (className) node.className = className;
  return node;
}
function number(value, digits = 0) { return value === null || value === undefined ? "–" : value.toFixed(digits); }
function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 10) return value.toFixed(1) + " s";
  if (value < 120) return value.toFixed(0) + " s";
  return value < 7200 ? (value / 60).toFixed(0) + " min" : (value / 3600).toFixed(0) + " h";
}
function milliseconds(value) { return value === null || value === undefined ? "–" : value < 1000 ? value.toFixed(0) + " ms" : (value / 1000).toFixed(1) + " s"; }
function bytes(value) { return value ? (value / 1048576).toFixed(0) + " MiB" : "–"; }
function percent(share) { return (100 * share).toFixed(0) + " %"; }
function headers() { return key ? { Authorization: "Bearer " + key } : {}; }

// Lists are only replaced when they differ, so that a screen reader or a selection is not disturbed every second.
function fill(parent, nodes) {
  const fresh = document.createElement(parent.tagName);
  fresh.append(...nodes);
  if (fresh.innerHTML !== parent.innerHTML) parent.replaceChildren(...fresh.childNodes);
}

// --- the live picture

async function poll() {
  try {
    const answer = await fetch("status", { headers: headers(), cache: "no-store", signal: AbortSignal.timeout(5000) });
    if (answer.status === 401) { askKey(); }
    else if (!answer.ok) { away("answered " + answer.status); }
    else { $("key-form").hidden = true; asked = false; show(await answer.json()); }
  } catch (error) {
    away("does not answer");
  }
  setTimeout(poll, document.hidden ? 5 * EVERY_MS : EVERY_MS);
}
function setState(name, text) {
  if ($("state").textContent !== text) $("state").textContent = text;
  $("state").className = "state " + name;
}
function away(how) { setState("away", "the server " + how); }
function askKey() {
  setState("locked", "waiting for a key");
  document.body.classList.add("locked");
  $("key-problem").textContent = key ? "That key is not known here." : "";
  key = null;
  if (!asked) { $("key-form").hidden = false; $("key").focus(); asked = true; }
}
$("key-form").addEventListener("submit", event => {
  event.preventDefault();
  key = $("key").value.trim();
  $("key").value = "";
  asked = false;
  $("key-form").hidden = true;
});

function show(status) {
  document.body.classList.remove("locked");
  const now = status.now, title = status.name + " · llamaops";
  if (document.title !== title) document.title = title;
  model = status.name;
  $("name").textContent = status.name;
  if (status.state) setState(status.state, status.state + (status.state === "ready" ? "" : ": " + (status.reason || "")));
  if (!status.model) return;
  $("facts").textContent = [status.model.quant, "llama.cpp " + (status.engine.version || "?"), "up " + seconds(status.uptime_s),
    status.restarts ? status.restarts + " restarts" : null].filter(Boolean).join(" · ");
  showFigures(status, now);
  showWhy(now);
  showCpus(now);
  showStreams(status);
  fill($("notes"), status.notes.length ? status.notes.map(note => {
    const item = make("li", null, "why");
    item.append(make("span", note.level, "level " + note.level), " " + note.text + " ", make("span", note.code, "small"));
    return item;
  }) : [make("li", "none")]);
  $("age").textContent = now ? " · seen " + seconds(now.age_s) + " ago, over " + seconds(now.seconds) : "";
}
function remember(list, value) { list.push(value); if (list.length > KEPT) list.shift(); }
function spark(values) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const most = Math.max(1e-9, ...values.filter(v => v !== null));
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  svg.setAttribute("viewBox", "0 0 " + (KEPT - 1) + " 20");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  line.setAttribute("points", values.map((v, i) => (i + KEPT - values.length) + "," + (19 - 18 * (v || 0) / most).toFixed(1)).join(" "));
  svg.append(line);
  return svg;
}
function tile(name, value, detail, values) {
  const box = make("div", null, "tile");
  box.append(make("span", name, "small"), make("b", value), make("span", detail || "\u00a0", "small"));
  if (values) box.append(spark(values));
  return box;
}
function showFigures(status, now) {
  const requests = status.requests, engine = now ? now.engine : {};
  remember(history.rate, now ? now.events_per_s : 0);
  remember(history.itl, now ? now.itl_ms.p99 : null);
  const ttfts = status.streams.map(s => s.ttft_ms).filter(v => v !== null);
  $("figures").replaceChildren(
    tile("tokens a second", now ? number(now.events_per_s, 1) : "–", "all streams", history.rate),
    tile("between tokens, p50", now ? milliseconds(now.itl_ms.p50) : "–", now ? "p95 " + milliseconds(now.itl_ms.p95) + " · p99 " + milliseconds(now.itl_ms.p99) : "", history.itl),
    tile("to first token", ttfts.length ? milliseconds(Math.max(...ttfts)) : "–", "slowest under way"),
    tile("in the engine", requests.in_flight + " of " + (requests.slots ?? "?"), (requests.waiting || 0) + " waiting"),
    tile("engine", engine.cpus === undefined ? "–" : number(engine.cpus, 2) + " CPUs", engine.delay ? percent(engine.delay) + " of its time waiting" : bytes(engine.rss_bytes) + " resident"));
}
function showWhy(now) {
  fill($("why"), (now ? now.explain : [{ text: "nothing seen yet" }]).map(finding => {
    const item = make("li", null, "why");
    item.append(make("b", finding.text));
    if (finding.fix) item.append(make("span", " → " + finding.fix, "small"));
    return item;
  }));
}
function showCpus(now) {
  if (!now) return;
  const list = now.cpus.filter(c => c.role.length || now.cpus.length <= 16);
  $("cpus").replaceChildren(...list.map(cpu => {
    const item = make("li", null, "cpu"), bar = make("span", null, "bar");
    const parts = [["engine", cpu.engine], ["relay", cpu.relay], ["foreign", cpu.foreign], ["steal", cpu.steal]];
    for (const [name, share] of parts) {
      const part = make("span", null, name);
      part.style.width = 100 * share + "%";
      bar.append(part);
    }
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", "CPU " + cpu.id + ": " + parts.map(([name, share]) => (name === "foreign" ? "others" : name) + " " + percent(share)).join(", "));
    const clock = cpu.hertz ? " · " + (cpu.hertz / 1e9).toFixed(1) + " GHz" : "";
    item.append(make("span", "CPU " + cpu.id), bar, make("span", percent(cpu.busy) + " " + cpu.role.map(r => r === "housekeeping" ? "relay" : r).join(" ") + clock, "small"));
    return item;
  }));
  const pressure = Object.entries(now.pressure).map(([name, share]) => name + " " + percent(share)).join(", ");
  $("machine").textContent = [pressure && "pressure: " + pressure, now.throttled ? "stopped by quota " + percent(now.throttled) : "",
    now.thermal_throttles ? "slowed for heat " + now.thermal_throttles + " times" : "",
    now.temperature_celsius ? now.temperature_celsius.toFixed(0) + " °C" : "",
    number(now.engine.switches_per_s) + " switches/s, " + number(now.engine.migrations_per_s) + " migrations/s"].filter(Boolean).join(" · ");
}
function showStreams(status) {
  fill($("streams"), status.streams.length ? status.streams.slice(0, 40).map(stream => {
    const row = make("tr");
    row.append(make("td", stream.id), make("td", stream.key || "–"), make("td", stream.blocked_s >= 1 ? "client slow" : stream.turn ? "queued, turn " + stream.turn : stream.phase),
      make("td", number(stream.events_per_s, 1), "n"), make("td", milliseconds(stream.ttft_ms), "n"),
      make("td", seconds(stream.silent_s), stream.phase === "decode" && stream.silent_s > 0.5 ? "n late" : "n"), make("td", seconds(stream.age_s), "n"));
    return row;
  }) : [noRow()]);
  const waiting = Object.entries(status.requests.waiting_by_key || {}).map(([name, count]) => count + " of " + (name || "anybody")).join(", ");
  $("queue").textContent = waiting ? "waiting: " + waiting : "";
}
function noRow() {
  const row = make("tr"), cell = make("td", "none");
  cell.colSpan = 7;
  row.append(cell);
  return row;
}

// --- the playground

let running = null;
$("play").addEventListener("submit", event => { event.preventDefault(); send(); });
$("prompt").addEventListener("keydown", event => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); send(); }
});
$("halt").addEventListener("click", () => running && running.abort());

async function send() {
  if (running) return;
  running = new AbortController();
  const times = [], started = performance.now();
  $("answer").textContent = $("play-problem").textContent = "";
  $("answer").setAttribute("aria-busy", "true");
  $("send").disabled = true;
  $("halt").disabled = false;
  $("figure").hidden = false;
  const ticking = setInterval(() => draw(times, performance.now() - started), 200);
  try {
    await stream(started, times);
  } catch (error) {
    if (error.name !== "AbortError") $("play-problem").textContent = error.message;
  } finally {
    clearInterval(ticking);
    running = null;
    $("answer").setAttribute("aria-busy", "false");
    $("send").disabled = false;
    $("halt").disabled = true;
    draw(times, times.length ? times[times.length - 1] : performance.now() - started, true);
  }
}
async function stream(started, times) {
  const body = { model: model, stream: true, max_tokens: Number($("max").value), temperature: Number($("temperature").value),
    messages: [{ role: "user", content: $("prompt").value }] };
  const answer = await fetch("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal: running.signal,
    headers: { "Content-Type": "application/json", ...headers() } });
  if (answer.status === 401) { askKey(); throw new Error("This server wants an API key."); }
  if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error?.message || "The server answered " + answer.status);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) take(event, started, times);
  }
}
function take(event, started, times) {
  const data = event.split("\n").filter(line => line.startsWith("data:")).map(line => line.slice(5).trim()).join("\n");
  if (!data || data === "[DONE]") return;
  const document = JSON.parse(data);
  if (document.error) throw new Error(document.error.message);
  const delta = document.choices?.[0]?.delta;
  const text = delta?.content || delta?.reasoning_content;
  if (!text) return;
  times.push(performance.now() - started);
  const box = $("answer"), atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 30;
  box.append(text);
  if (atEnd) box.scrollTop = box.scrollHeight;
}
// A browser that is busy itself reads several tokens at once, which makes the median small: a stall must be felt, too.
function isStall(gap, median) { return gap > Math.max(3 * median, 100); }
function gapsOf(times) { return times.slice(1).map((time, i) => time - times[i]); }
function quantile(values, q) {
  const ordered = [...values].sort((a, b) => a - b);
  return ordered.length ? ordered[Math.min(ordered.length - 1, Math.floor(q * ordered.length))] : null;
}
// Time runs to the right. The shaded part is the wait for the first token; each bar is a token, as high as the gap before it.
function draw(times, until, over) {
  const canvas = $("timeline"), style = getComputedStyle(document.documentElement), ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight, pen = canvas.getContext("2d");
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  pen.scale(ratio, ratio);
  const colour = name => style.getPropertyValue(name).trim();
  const span = Math.max(until, 1), x = time => time / span * (width - 2), gaps = gapsOf(times);
  const median = quantile(gaps, 0.5) || 0, most = Math.max(1, ...gaps), floor = height - 18;
  const first = times.length ? times[0] : until;
  pen.fillStyle = colour("--line");
  pen.fillRect(0, 4, x(first), floor - 4);
  pen.fillStyle = colour("--engine");
  if (times.length) pen.fillRect(x(first), 4, 2, floor - 4);
  gaps.forEach((gap, i) => {
    const late = isStall(gap, median), size = Math.max(3, gap / most * (floor - 8));
    pen.fillStyle = colour(late ? "--foreign" : "--engine");
    pen.fillRect(x(times[i + 1]), floor - size, late ? 3 : Math.min(2, Math.max(0.75, width / (2 * gaps.length))), size);
  });
  pen.fillStyle = colour("--soft");
  pen.font = "12px system-ui, sans-serif";
  pen.fillText("TTFT " + milliseconds(first), 4, height - 4);
  const end = milliseconds(until);
  pen.fillText(end, width - pen.measureText(end).width - 2, height - 4);
  const late = gaps.filter(gap => isStall(gap, median)).length;
  const seconds = times.length > 1 ? (times[times.length - 1] - first) / 1000 : 0;
  const text = times.length ? times.length + " tokens, first after " + milliseconds(first) + (seconds ? ", " + ((times.length - 1) / seconds).toFixed(1) + " a second" : "")
    + "; between two: median " + milliseconds(median) + ", longest " + milliseconds(gaps.length ? most : null) + "; " + late + " stalls (over 100 ms and three medians)" : "waiting for the first token";
  if (over) canvas.setAttribute("aria-label", "Token timeline: " + text);
  $("caption").textContent = text;
}

poll();
