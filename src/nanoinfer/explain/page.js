"use strict";
// Shows one step of a recording at a time. What a step shows is computed from the recording alone, so any step can be
// shown after any other. The recording is in the page, or comes as a message from the page that has opened this one.

let recording, steps, sequences, prompts;
const byId = (id) => document.getElementById(id);
let step = 0; // steps that have been done
let chosen = null; // {sequence, index}: the output token whose candidates are shown; null: the newest
let timer = null;

function element(name, text, ...classes) {
  const e = document.createElement(name);
  e.textContent = text;
  e.classList.add(...classes.filter(Boolean));
  return e;
}

function tokenText(id) {
  return recording.texts[id] ?? `#${id}`;
}

function visible(text) { // a token alone: its spaces are part of it
  return text.replace(/ /g, "␣").replace(/\n/g, "⏎") || "∅";
}

function label(i) {
  const [request, sample] = sequences[i];
  const several = sequences.some(([r, s]) => r === request && s > 0);
  return `${request + 1}${several ? String.fromCharCode(97 + (sample % 26)) : ""}`;
}

function size(bytes) {
  const unit = bytes >= 1e9 ? [1e9, "GB"] : bytes >= 1e6 ? [1e6, "MB"] : [1e3, "kB"];
  return `${(bytes / unit[0]).toPrecision(3)} ${unit[1]}`;
}

const rowOf = (i, sequence) => steps[i].rows.find((row) => row.sequence === sequence);

// The output tokens of a sequence after the first `count` steps.
function output(sequence, count) {
  const tokens = [];
  for (let i = 0; i < count; i++) {
    const row = rowOf(i, sequence);
    row?.tokens.forEach((id, j) => tokens.push({
      id, candidates: row.candidates[j], isNew: i === count - 1,
      accepted: j < row.proposed.length && row.proposed[j] === id,
    }));
  }
  return tokens;
}

function kind(row) {
  if (row.tokens.length === 0 || row.num_new > 1 + row.proposed.length) return "prompt";
  return row.proposed.length ? "several" : "one";
}

function showSummary() {
  const box = byId("limit");
  box.replaceChildren();
  if (step === 0) {
    byId("summary").textContent = `${prompts.length} request${prompts.length > 1 ? "s" : ""} wait. Nothing has been computed.`;
    return;
  }
  const now = steps[step - 1];
  const parts = now.rows.map((row) => {
    const what = { prompt: `${row.num_new || "no"} tokens of its prompt`, one: "one token",
      several: `${row.num_new} tokens, of which ${row.proposed.length} proposed: ${row.tokens.length - 1} accepted` }[kind(row)];
    return `${label(row.sequence)}: ${what}`;
  });
  if (now.preempted.length) parts.push(`preempted: ${now.preempted.map(label).join(", ")}`);
  if (now.waiting.length) parts.push(`waiting: ${now.waiting.map(label).join(", ")}`);
  byId("summary").textContent = parts.join(" · ");
  const tokens = now.rows.reduce((sum, row) => sum + row.num_new, 0);
  box.append(element("p", `${tokens} token${tokens === 1 ? "" : "s"} through the model. Read: ${size(now.num_bytes)}, ` +
    `${size(recording.weight_bytes)} of them weights. Computed: ${(now.flops / 1e6).toPrecision(3)} million operations.`));
  if (now.limit_sec) {
    const longest = Math.max(now.seconds, now.limit_sec);
    for (const [name, seconds] of [["the step took", now.seconds], ["the device's limit", now.limit_sec]]) {
      const bar = element("div", "", "bar");
      bar.style.width = `${Math.max(0.5, (100 * seconds) / longest)}%`;
      box.append(element("div", `${name} ${(seconds * 1e3).toPrecision(3)} ms`), bar);
    }
  } else box.append(element("p", `The step took ${(now.seconds * 1e3).toPrecision(3)} ms.`));
}

function showTexts() {
  byId("texts").replaceChildren(...sequences.map(([request], sequence) => {
    const text = element("div", "", "text");
    text.append(element("b", label(sequence)));
    text.append(element("span", prompts[request].map(tokenText).join(""), "given"));
    output(sequence, step).forEach((token, index) => {
      const e = element("span", tokenText(token.id), "token", token.isNew && (token.accepted ? "accepted" : "new"));
      if (chosen?.sequence === sequence && chosen.index === index) e.classList.add("chosen");
      e.tabIndex = 0; // not a button: lines break within it
      e.role = "button";
      const choose = () => { chosen = { sequence, index }; show(); };
      e.addEventListener("click", choose);
      e.addEventListener("keydown", (event) => event.key === "Enter" && choose());
      text.append(e);
    });
    const row = step > 0 ? rowOf(step - 1, sequence) : undefined;
    row?.proposed.slice(Math.max(0, row.tokens.length - 1)).forEach((id, j) => {
      if (row.tokens[row.tokens.length - 1 + j] !== id) text.append(element("span", tokenText(id), "rejected"));
    });
    return text;
  }));
}

function showCandidates() {
  let at = chosen;
  if (!at) {
    const rows = step > 0 ? steps[step - 1].rows.filter((row) => row.tokens.length) : [];
    if (rows.length) at = { sequence: rows[0].sequence, index: output(rows[0].sequence, step).length - 1 };
  }
  const token = at && output(at.sequence, step)[at.index];
  const box = byId("candidates");
  box.replaceChildren();
  if (!token) {
    box.append(element("p", "None yet."));
    return;
  }
  box.append(element("p", `Sequence ${label(at.sequence)}, token ${at.index + 1}. Probabilities before any filter.`));
  for (const [id, probability] of token.candidates) {
    const row = element("div", "", "candidate", id === token.id && "sampled");
    const bar = element("div", "", "bar");
    bar.style.width = `${Math.max(0.5, 100 * probability)}%`;
    const track = element("div", "");
    track.append(bar);
    row.append(element("code", visible(tokenText(id))), track, element("span", `${(100 * probability).toFixed(1)}%`));
    box.append(row);
  }
}

function showBlocks() {
  const all = steps.flatMap((s) => Object.values(s.tables).flat());
  const numShown = all.reduce((most, block) => Math.max(most, block), 0) + 1;
  const owners = Array.from({ length: numShown }, () => []);
  const tables = step > 0 ? steps[step - 1].tables : {};
  for (const [owner, table] of Object.entries(tables)) for (const block of table) owners[block].push(owner);
  const copied = new Set(step > 0 ? steps[step - 1].copied.map(([, own]) => own) : []);
  byId("blocks-about").textContent = `${owners.filter((o) => o.length).length} of ${recording.num_blocks} blocks of ` +
    `${recording.block_size} tokens are used; of a block, its sequences are named.`;
  byId("blocks").replaceChildren(...owners.map((names, block) => {
    const running = names.filter((name) => !name.startsWith("kept"));
    const look = copied.has(block) ? "copied" : names.length === 0 ? "free" : running.length > 1 ? "shared" : running.length ? "own" : "kept";
    const e = element("span", running.map((i) => label(Number(i))).join(" "), look);
    e.title = `block ${block}: ${names.map((n) => (n.startsWith("kept") ? "a kept sequence" : `sequence ${label(Number(n))}`)).join(", ") || "free"}`;
    return e;
  }));
}

const SVG = "http://www.w3.org/2000/svg";
const [HEIGHT, LEFT] = [16, 30];
let cell; // width of a step

function svg(name, attributes, text) {
  const e = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) e.setAttribute(key, value);
  if (text !== undefined) e.textContent = text;
  return e;
}

function drawTimeline() {
  cell = Math.max(5, Math.min(18, Math.floor(900 / Math.max(1, steps.length))));
  const picture = svg("svg", { width: LEFT + cell * steps.length + 4, height: HEIGHT * sequences.length + 6, role: "img",
    "aria-label": "Which sequence ran in which step" });
  sequences.forEach((_, i) => {
    picture.append(svg("text", { x: 0, y: i * HEIGHT + 14 }, label(i)));
    steps.forEach((s, at) => {
      const row = rowOf(at, i);
      const look = s.preempted.includes(i) ? "preempted" : row ? kind(row) : s.waiting.includes(i) ? "waits" : null;
      if (look) picture.append(svg("rect", { x: LEFT + at * cell, y: i * HEIGHT + 3, width: cell - 1, height: HEIGHT - 3, class: look }));
    });
  });
  picture.append(svg("rect", { class: "mark", y: 1, width: cell + 1, height: HEIGHT * sequences.length + 3, rx: 2 }));
  picture.addEventListener("click", (event) => {
    go(1 + Math.floor((event.clientX - picture.getBoundingClientRect().left - LEFT) / cell));
  });
  byId("timeline").append(picture);
}

function show() {
  byId("number").textContent = `${step} / ${steps.length}`;
  byId("slider").value = step;
  showSummary();
  showTexts();
  showCandidates();
  showBlocks();
  const mark = document.querySelector("#timeline .mark");
  mark.setAttribute("x", LEFT - 1 + (step - 1) * cell);
  mark.setAttribute("visibility", step > 0 ? "visible" : "hidden");
}

function go(to) {
  step = Math.max(0, Math.min(steps.length, to));
  chosen = null;
  history.replaceState(null, "", `#${step}`); // the address of a step
  show();
}

function play(on) {
  clearInterval(timer);
  timer = on ? setInterval(() => (step < steps.length ? go(step + 1) : play(false)), 400) : null;
  byId("play").textContent = on ? "❚❚" : "▶▶";
}

function addControls() {
  const actions = { first: () => go(0), back: () => go(step - 1), next: () => go(step + 1), last: () => go(steps.length) };
  const keys = { Home: "first", ArrowLeft: "back", ArrowRight: "next", End: "last" };
  for (const [id, action] of Object.entries(actions)) byId(id).addEventListener("click", () => { play(false); action(); });
  byId("play").addEventListener("click", () => play(timer === null));
  byId("slider").addEventListener("input", (event) => { play(false); go(Number(event.target.value)); });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (keys[event.key]) {
      event.preventDefault();
      play(false);
      actions[keys[event.key]]();
    } else if (event.key === " " && event.target.tagName !== "BUTTON") {
      event.preventDefault();
      play(timer === null);
    }
  });
}

function start(data) {
  recording = data;
  ({ steps, sequences, prompts } = recording);
  for (const e of document.querySelectorAll("nav, main")) e.hidden = false;
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) byId("play").hidden = true; // nothing moves by itself
  byId("about").textContent = `${recording.model}, engine ${recording.engine} on ${recording.device}, weights in ${recording.weights}` +
    `${recording.draft ? `, draft ${recording.draft}` : ""}. Arrow keys, Home, End and space move.`;
  byId("slider").max = steps.length;
  addControls();
  drawTimeline();
  go(location.hash ? Number(location.hash.slice(1)) || 0 : 1);
}

const data = byId("recording").textContent;
if (data) start(JSON.parse(data));
else if (window.opener) {
  byId("about").textContent = "The server generates the request again and records the steps.";
  addEventListener("message", ({ origin, source, data: { recording: received, error } }) => {
    if (origin !== location.origin || source !== window.opener || recording) return;
    if (received) start(received);
    else byId("about").textContent = error;
  });
  window.opener.postMessage("recording", location.origin);
} else byId("about").textContent = "Open this page by the link of the server's page.";
