// The page: reads the prompt and the parameters, sends the request, shows the tokens as they arrive.

import { Answer } from "./answer.js";
import { ApiError, apiKey, events, request } from "./api.js";
import { curl, python } from "./code.js";
import { Controls } from "./controls.js";
import { element, explainTokens } from "./tokens.js";

const COMPLETIONS = "v1/completions", CHAT = "v1/chat/completions";
const byId = (id) => document.getElementById(id);
const input = byId("input"), transcript = byId("transcript");

let info = null; // of /info
let controls = null;
let messages = []; // of the chat
let running = null; // the AbortController of the request that runs
let needsKey = Boolean(apiKey.get());
let atEnd = true; // whether the end of the transcript is visible
let drawing = false; // whether the next frame shows what is new

const chatMode = () => document.querySelector("input[name=mode]:checked").value === "chat";

// Loading -----------------------------------------------------------------------------------------------------

async function load() {
  try {
    const [about, openapi] = await Promise.all(["info", "openapi.json"].map(async (p) => (await request(p)).json()));
    info = about;
    showInfo();
    controls = new Controls(byId("controls"), byId("help"), { ...bodySchema(openapi), defaults: defaults() });
    showMode();
  } catch (error) {
    showError(error);
  }
}

/** Return the properties of a completion's body, and a function that follows $ref. */
function bodySchema(openapi) {
  const follow = (ref) => ref.slice(2).split("/").reduce((part, key) => part[key], openapi);
  const resolve = (schema) => (schema.$ref ? follow(schema.$ref) : schema);
  const body = resolve(openapi.paths[`/${COMPLETIONS}`].post.requestBody);
  return { properties: resolve(body.content["application/json"].schema).properties, resolve };
}

/** Return the default sampling parameters of the mode. */
const defaults = () => info.sampling_params[chatMode() ? "chat" : "completions"];

function showInfo() {
  document.title = `${info.model} · nanoinfer`;
  const { model, engine, quantization, block_size: context, speculation } = info;
  const facts = [model, engine, quantization, `context ${context}`, speculation && "speculation"].filter(Boolean);
  byId("facts").replaceChildren(...facts.map((fact) => element("li", { textContent: fact })));
  const [chat, completion] = document.getElementsByName("mode");
  chat.disabled = !info.has_chat_template;
  (chat.disabled ? completion : chat).checked = true;
  byId("mode-note").textContent = chat.disabled ? "No chat: this model has no chat template." : "";
  showSpeed(null);
}

function showMode() {
  const chat = chatMode();
  byId("chat").hidden = !chat;
  byId("completion").hidden = chat;
  byId("system-box").hidden = !chat;
  byId("input-label").textContent = chat ? "Message" : "Prompt";
  controls.setDefaults(defaults());
  showCode();
}

// The request -------------------------------------------------------------------------------------------------

/** Return the body of the request, without what only the page needs. Raises ApiError. */
function requestBody(chat) {
  const { logprobs: _, ...parameters } = controls.values();
  if (!chat) return { model: info.model, prompt: input.value, ...parameters, stream: true };
  const system = byId("system").value;
  const first = system ? [{ role: "system", content: system }] : [];
  const conversation = [...first, ...messages, { role: "user", content: input.value }];
  return { model: info.model, messages: conversation, ...parameters, stream: true };
}

/** Add what the page needs: token ids, log-probabilities, counts. */
function forDisplay(body, chat) {
  const { logprobs } = controls;
  const top = logprobs === null ? {} : chat ? { logprobs: true, top_logprobs: logprobs } : { logprobs };
  return { ...body, ...top, return_token_ids: true, stream_options: { include_usage: true } };
}

function showCode() {
  if (!controls) return;
  const chat = chatMode();
  const absolute = (path) => new URL(path, location.href).href;
  try {
    const body = requestBody(chat);
    byId("curl").textContent = curl(absolute(chat ? CHAT : COMPLETIONS), body, needsKey);
    byId("python").textContent = python(absolute("v1"), chat, body, needsKey);
  } catch (error) {
    byId("curl").textContent = byId("python").textContent = error.message;
  }
}

async function send() {
  if (running || !controls) return;
  clearErrors();
  const chat = chatMode(), prompt = input.value;
  let answer = null;
  running = new AbortController();
  showRunning(true);
  try {
    const body = requestBody(chat);
    answer = new Answer(byId(chat ? "chat" : "completion"), { chat, prompt, model: info.model });
    atEnd = true;
    draw(answer);
    const start = performance.now();
    const response = await request(chat ? CHAT : COMPLETIONS, forDisplay(body, chat), running.signal);
    for await (const chunk of events(response)) {
      answer.add(chunk, performance.now() - start);
      draw(answer);
    }
    say(`Finished: ${answer.count} tokens.`);
  } catch (error) {
    if (error.name === "AbortError") {
      answer.note("stopped");
      say(`Stopped after ${answer.count} tokens.`);
    } else {
      showError(error);
      answer?.note("incomplete");
    }
  }
  running = null;
  showRunning(false);
  if (!answer?.count) answer?.remove(); // the prompt is still in its field
  if (chat && answer?.count) {
    messages.push({ role: "user", content: prompt }, { role: "assistant", content: answer.text });
    if (input.value === prompt) input.value = "";
  }
  showCode();
  if (answer?.count) showSpeed(answer);
}

function showRunning(on) {
  const [from, to] = on ? [byId("send"), byId("stop")] : [byId("stop"), byId("send")];
  to.disabled = false;
  if (document.activeElement === from) to.focus(); // a disabled button would lose it
  from.disabled = true;
  byId("clear").disabled = on;
  transcript.setAttribute("aria-busy", String(on));
  if (on) say("Generating.");
}

/** Tell a screen reader; it does not read the tokens as they arrive. */
function say(text) {
  byId("status").textContent = text;
}

// What is shown of it -------------------------------------------------------------------------------------------

/** Before the next frame, show the speed, and scroll to the end of the transcript if it was visible. */
function draw(answer) {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    if (answer.count) showSpeed(answer);
    if (atEnd) transcript.scrollTop = transcript.scrollHeight;
  });
}

/** Show the speed of an answer, and the roofline's limit. */
function showSpeed(answer) {
  const limit = info.roofline_tokens_per_sec, speed = answer?.speed;
  const stats = byId("stats");
  const add = (name, value, className = "") => stats.append(element(
    "div", {}, element("dt", { className, textContent: name }), element("dd", { textContent: value }),
  ));
  stats.replaceChildren();
  if (answer) add("time to first token", `${answer.ttft.toFixed(0)} ms`);
  if (answer) add("tokens", answer.count);
  if (answer?.accepted !== undefined) add("accepted from the draft", answer.accepted, "accepted"); // with their colour
  if (speed) add("tokens per second", speed.toFixed(speed < 10 ? 1 : 0));
  const share = speed && limit ? `${((100 * speed) / limit).toFixed(0)}% of the` : "The";
  const how = "is not measured: nanoinfer serve --measure-roofline";
  const value = limit ? `for one sequence: ${limit.toFixed(0)} tokens per second` : how;
  byId("limit").textContent = `${share} roofline's limit ${value}`;
  byId("meter").hidden = !limit;
  byId("meter").value = limit ? Math.min(1, (speed ?? 0) / limit) : 0;
}

// Errors ------------------------------------------------------------------------------------------------------

function showError(error) {
  const message = error instanceof ApiError ? error.message : `The page has failed: ${error}`;
  say("");
  controls?.showError(error.param, message);
  byId("alert").textContent = message;
  byId("alert").hidden = false;
  if (["prompt", "messages"].includes(error.param)) {
    input.setAttribute("aria-invalid", "true");
    input.focus();
  } else if (error.status === 401) {
    needsKey = true;
    byId("key-form").hidden = false;
    byId("key").focus();
  }
}

function clearErrors() {
  byId("alert").hidden = true;
  input.removeAttribute("aria-invalid");
  controls?.clearErrors();
}

// Events ------------------------------------------------------------------------------------------------------

const tip = explainTokens(transcript, byId("tip"));

byId("prompt-form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("controls").addEventListener("submit", (event) => event.preventDefault());
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", () => {
  if (chatMode()) messages = [];
  byId(chatMode() ? "chat" : "completion").replaceChildren();
  clearErrors();
  showCode();
  input.focus();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  apiKey.set(byId("key").value);
  byId("key").value = "";
  byId("key-form").hidden = true;
  clearErrors();
  if (info) send();
  else load();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
  if (event.key !== "Escape") return;
  tip.hide();
  running?.abort();
});
transcript.addEventListener("scroll", () => {
  atEnd = transcript.scrollHeight - transcript.scrollTop - transcript.clientHeight < 40;
});
document.addEventListener("input", (event) => {
  if (event.target.name === "mode") showMode();
  else showCode();
});
for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", async () => {
    const code = byId(button.dataset.copy);
    try {
      await navigator.clipboard.writeText(code.textContent);
      say("Copied.");
    } catch { // not permitted, or not a secure context (http, and not localhost)
      getSelection().selectAllChildren(code);
      say("Selected: press Ctrl+C to copy.");
    }
  });
}

const THEME = "nanoinfer.theme";
const theme = byId("theme");
theme.value = document.documentElement.dataset.theme = localStorage.getItem(THEME) ?? "";
theme.addEventListener("change", () => {
  document.documentElement.dataset.theme = theme.value;
  localStorage.setItem(THEME, theme.value);
});
if (!window.matchMedia("(min-width: 56rem)").matches) byId("parameters").open = false;
input.focus({ preventScroll: true });
load();
