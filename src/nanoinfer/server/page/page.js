// The page: reads the prompt and the parameters, sends the request, shows the tokens as they arrive.

import { Answer } from "./answer.js";
import { ApiError, apiKey, events, request } from "./api.js";
import { curl, python } from "./code.js";
import { Controls } from "./controls.js";
import { Conversation } from "./conversation.js";
import { asMarkdown, readConversation, save } from "./files.js";
import { element, explainTokens } from "./tokens.js";

const COMPLETIONS = "v1/completions", CHAT = "v1/chat/completions";
const byId = (id) => document.getElementById(id);
const input = byId("input"), transcript = byId("transcript");

let info = null; // of /info
let controls = null; // of the sampling parameters
let chatControls = null; // of the other fields of a chat
let editing = null; // the place in the conversation of the message that is edited
let last = null; // the last request: its body, and later the promise of its recording
let tried; // what the last request should change in the conversation; undefined: to add the prompt
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
    const make = (id, path, options) => (
      new Controls(byId(id), byId("help"), { ...bodySchema(openapi, path), ...options })
    );
    controls = make("controls", COMPLETIONS, { defaults: defaults(), starts: starts() });
    const names = ["tools", "tool_choice", "parallel_tool_calls", ...info.reasoning_options];
    const none = Object.fromEntries(names.map((name) => [name, null]));
    chatControls = make("chat-controls", CHAT, { defaults: none, first: names });
    showMode();
  } catch (error) {
    showError(error);
  }
}

/** Return the properties of a request's body, and a function that follows $ref. */
function bodySchema(openapi, path) {
  const follow = (ref) => ref.slice(2).split("/").reduce((part, key) => part[key], openapi);
  const resolve = (schema) => (schema.$ref ? follow(schema.$ref) : schema);
  const body = resolve(openapi.paths[`/${path}`].post.requestBody);
  return { properties: resolve(body.content["application/json"].schema).properties, resolve };
}

/** Return the server's default sampling parameters of the mode. */
const defaults = () => info.sampling_params[chatMode() ? "chat" : "completions"];
/** Return those that the page begins with: the defaults of the command line. */
const starts = () => info.page_sampling_params[chatMode() ? "chat" : "completions"];

function showInfo() {
  document.title = `${info.model} · nanoinfer`;
  const { model, engine, quantization, block_size: context, speculation } = info;
  const facts = [model, engine, quantization, `context ${context}`, speculation && "speculation"].filter(Boolean);
  byId("facts").replaceChildren(...facts.map((fact) => element("li", { textContent: fact })));
  const [chat, completion] = document.getElementsByName("mode");
  chat.disabled = !info.has_chat_template;
  (chat.disabled ? completion : chat).checked = true;
  byId("mode-note").textContent = chat.disabled ? "No chat: this model has no chat template." : "";
  byId("tools-note").hidden = info.shows_tools;
  showSpeed(null);
}

function showMode() {
  const chat = chatMode();
  byId("chat").hidden = !chat;
  byId("completion").hidden = chat;
  for (const id of ["system-box", "file-box", "chat-options"]) byId(id).hidden = !chat;
  byId("input-label").textContent = chat ? "Message" : "Prompt";
  controls.setDefaults(defaults(), starts());
  cancelEdit();
}

// The request -------------------------------------------------------------------------------------------------

/** The messages before the conversation. */
const systemMessages = () => (byId("system").value ? [{ role: "system", content: byId("system").value }] : []);

/** Return what the prompt's field adds to which part of the conversation. */
const asked = () => ({ at: editing ?? conversation.turns.length, added: [{ role: "user", content: input.value }] });

/** Return the body of the request, without what only the page needs. Raises ApiError. */
function requestBody(chat, { at, added } = asked()) {
  const { logprobs: _, ...parameters } = controls.values();
  if (!chat) return { model: info.model, prompt: input.value, ...parameters, stream: true };
  const messages = [...systemMessages(), ...conversation.messages.slice(0, at), ...added];
  return { model: info.model, messages, ...chatControls.values(), ...parameters, stream: true };
}

/** Add what the page needs: token ids, log-probabilities, counts, and a seed to generate the same again. */
function forDisplay(body, chat) {
  const { logprobs } = controls;
  const top = logprobs === null ? {} : chat ? { logprobs: true, top_logprobs: logprobs } : { logprobs };
  const seed = Math.floor(Math.random() * 2 ** 32); // as the server chooses one
  return { seed, ...body, ...top, return_token_ids: true, stream_options: { include_usage: true } };
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

/** Generate. change: {at, added}: in a chat, `added` and the answer replace the messages from a place on. */
async function send(change) {
  if (running || !controls) return;
  tried = change;
  clearErrors();
  const turns = change ?? asked();
  const chat = chatMode(), prompt = input.value;
  let answer = null, dropped = [];
  running = new AbortController();
  showRunning(true);
  try {
    const body = requestBody(chat, turns);
    if (chat) {
      dropped = conversation.cut(turns.at);
      for (const message of turns.added) conversation.add(message);
    }
    answer = new Answer(byId(chat ? "chat" : "completion"), { model: info.model, prompt: chat ? undefined : prompt });
    atEnd = true;
    draw(answer);
    const start = performance.now();
    const sent = forDisplay(body, chat);
    const response = await request(chat ? CHAT : COMPLETIONS, sent, running.signal);
    last = { body: sent };
    byId("explain").hidden = false;
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
  if (chat && answer) keep(turns, answer, dropped, prompt);
  else if (!answer?.count) answer?.article.remove(); // the prompt is still in its field
  showCode();
  if (answer?.count) showSpeed(answer);
}

/** Keep an answer in the conversation. Without any token of it, the conversation is again as it was. */
function keep({ at }, answer, dropped, prompt) {
  if (!answer.count) {
    answer.article.remove();
    conversation.cut(at);
    conversation.restore(dropped);
    return;
  }
  conversation.add(answer.message(), answer);
  answer.format().then(() => draw());
  if (tried) return;
  if (input.value === prompt) input.value = "";
  edit(null);
}

/** Edit the user's message at a place of the conversation; null: the prompt's field is for a new message. */
function edit(at, text = input.value) {
  input.value = text;
  editing = at;
  byId("edit-note").hidden = byId("cancel").hidden = at === null;
  showCode();
}

const cancelEdit = () => edit(null, editing === null ? input.value : "");

/** Generate an answer again, with the next seed if there is one. */
function retry(at) {
  const { seed } = controls.values();
  if (seed !== undefined) controls.set("seed", (seed + 1) % Number.MAX_SAFE_INTEGER);
  send({ at, added: [] });
}

const conversation = new Conversation(byId("chat"), {
  edit: (at) => { edit(at, conversation.messages[at].content); input.focus(); },
  retry: (at) => { retry(at); byId("stop").focus(); },
  results: (added) => { send({ at: conversation.turns.length, added }); byId("stop").focus(); },
});

function showRunning(on) {
  const [from, to] = on ? [byId("send"), byId("stop")] : [byId("stop"), byId("send")];
  to.disabled = false;
  if (document.activeElement === from) to.focus(); // a disabled button would lose it
  from.disabled = true;
  byId("clear").disabled = byId("load").disabled = on;
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
    if (answer?.count) showSpeed(answer);
    if (atEnd) transcript.scrollTop = transcript.scrollHeight;
  });
}

/** Show the speed of an answer. */
function showSpeed(answer) {
  const speed = answer?.speed, stats = byId("stats");
  const add = (name, value, className = "") => stats.append(element(
    "div", {}, element("dt", { className, textContent: name }), element("dd", { textContent: value }),
  ));
  stats.replaceChildren();
  if (answer) add("time to first token", `${answer.ttft.toFixed(0)} ms`);
  if (answer) add("tokens", answer.count);
  if (answer?.accepted !== undefined) add("accepted from the draft", answer.accepted, "accepted"); // with their colour
  if (speed) add("tokens per second", speed.toFixed(speed < 10 ? 1 : 0));
}

/** Send the recording of the last request to the page that the link has opened, which requests it. */
async function explain({ origin, source, data }) {
  if (origin !== location.origin || data !== "recording" || !last) return;
  const asked = last;
  try {
    asked.recording ??= request("page/explain", asked.body).then((response) => response.json());
    source.postMessage({ recording: await asked.recording }, origin);
  } catch (error) {
    asked.recording = undefined;
    source.postMessage({ error: error.message }, origin);
  }
}

// Errors ------------------------------------------------------------------------------------------------------

function showError(error) {
  const message = error instanceof ApiError ? error.message : `The page has failed: ${error}`;
  say("");
  controls?.showError(error.param, message);
  chatControls?.showError(error.param, message);
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
  chatControls?.clearErrors();
}

// Events ------------------------------------------------------------------------------------------------------

const tip = explainTokens(transcript, byId("tip"));

byId("prompt-form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
for (const id of ["controls", "chat-controls"]) byId(id).addEventListener("submit", (event) => event.preventDefault());
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", () => {
  if (chatMode()) conversation.cut(0);
  else byId("completion").replaceChildren();
  clearErrors();
  cancelEdit();
  input.focus();
});
byId("cancel").addEventListener("click", () => {
  cancelEdit();
  input.focus();
});
byId("save-json").addEventListener("click", () => {
  const messages = [...systemMessages(), ...conversation.messages], { tools } = chatControls?.values() ?? {};
  save("conversation.json", "application/json", JSON.stringify({ messages, tools }, null, 2));
});
byId("save-markdown").addEventListener("click", () => {
  save("conversation.md", "text/markdown", asMarkdown([...systemMessages(), ...conversation.messages]));
});
byId("load").addEventListener("change", async ({ target }) => {
  clearErrors();
  try {
    const { messages, tools } = await readConversation(target.files[0]);
    const system = messages[0]?.role === "system" ? messages.shift().content : "";
    byId("system").value = system;
    if (tools) chatControls.set("tools", tools);
    conversation.load(messages, info.model);
    cancelEdit();
  } catch (error) {
    showError(error);
  }
  target.value = ""; // the same file can be loaded again
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  apiKey.set(byId("key").value);
  byId("key").value = "";
  byId("key-form").hidden = true;
  clearErrors();
  if (info) send(tried);
  else load();
});
document.addEventListener("keydown", (event) => {
  const results = event.target.closest?.(".results");
  const breaksLine = event.shiftKey || event.isComposing; // Enter also ends the input of a composed character
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) results ? results.requestSubmit() : send();
  else if (event.key === "Enter" && event.target === input && !breaksLine) {
    event.preventDefault();
    send();
  }
  if (event.key !== "Escape") return;
  tip.hide();
  if (running) running.abort();
  else cancelEdit();
});
transcript.addEventListener("scroll", () => {
  atEnd = transcript.scrollHeight - transcript.scrollTop - transcript.clientHeight < 40;
});
window.addEventListener("message", explain);
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
