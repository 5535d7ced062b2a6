// What one request has produced: its elements, its text, its reasoning and calls, its times.

import { markdownOf } from "./markdown.js";
import { TokenText, element, tokensOfChoice } from "./tokens.js";

const BEGIN = 200; // characters of a call's arguments that are shown while it is folded

export class Answer {
  count = 0; // tokens of all outputs
  accepted; // those of them that were accepted from the draft; undefined without one
  article;
  #prompt;
  #outputs = []; // one for each of the n outputs: see #output
  #first = null; // milliseconds until the first tokens, and their number
  #last = 0; // milliseconds until the last tokens

  /** prompt: of a completion, which its text continues. */
  constructor(parent, { prompt = "", model }) {
    this.#prompt = prompt;
    this.article = element("article", { className: "answer", ariaLabel: `Answer of ${model}` });
    parent.append(this.article);
    this.#output(0);
  }

  #output(index) {
    while (this.#outputs.length <= index) {
      const span = element("span"), waiting = [];
      const prompt = element("span", { className: "prompt", textContent: this.#prompt });
      const box = element("div", { className: "output" }, prompt, span);
      this.article.append(box);
      const tokens = new TokenText(span, waiting);
      const parts = { text: "", thoughts: null, reasoning: "", calls: [] };
      this.#outputs.push({ box, span, waiting, tokens, ...parts, chunks: [] });
    }
    return this.#outputs[index];
  }

  /** Add a chunk that arrived `elapsed` milliseconds after the request. */
  add(chunk, elapsed) {
    let added = 0;
    for (const choice of chunk.choices) {
      const output = this.#output(choice.index);
      output.chunks.push(choice);
      if (!choice.token_ids) continue; // of the deltas that tokens have released, the last one has their ids
      const logprobs = output.chunks.find((c) => c.logprobs)?.logprobs;
      const tokens = tokensOfChoice({ ...choice, logprobs });
      output.waiting.push(...tokens);
      for (const { delta, text } of output.chunks.splice(0)) this.#addTo(output, delta ?? { content: text });
      added += tokens.length;
      if (choice.draft_accepted) this.accepted = (this.accepted ?? 0) + tokens.filter((t) => t.accepted).length;
      if (choice.finish_reason) this.note(`finish_reason ${choice.finish_reason}`, choice.index);
    }
    if (!added) return;
    this.count += added;
    this.#first ??= { elapsed, count: added };
    this.#last = elapsed;
  }

  #addTo(output, { content, reasoning_content: reasoning, tool_calls: parts }) {
    const { box, span, waiting, calls } = output;
    if (reasoning) {
      output.thoughts ??= new TokenText(fold("Reasoning", element("span"), box, span), waiting);
      output.thoughts.add(reasoning);
      output.reasoning += reasoning;
    }
    output.tokens.add(content ?? "");
    output.text += content ?? "";
    for (const { index, id, function: part } of parts ?? []) {
      waiting.length = 0; // the tokens of a call are not those of its arguments
      calls[index] ??= { id, name: part.name, text: "", begin: element("code"), body: element("pre") };
      const call = calls[index];
      if (!call.body.parentElement) fold(`Call of ${call.name} `, call.body, box).previousSibling.append(call.begin);
      call.text += part.arguments ?? "";
      call.body.textContent = call.text;
      call.begin.textContent = call.text.slice(0, BEGIN);
    }
  }

  /** Return the first output as a message. Calls that were cut off are left out. */
  message() {
    const { text, reasoning, calls } = this.#outputs[0];
    const cut = calls.find((call) => !isJson(call.text));
    if (cut) this.note(`cut off: ${cut.name} is not part of the conversation`);
    const complete = calls.filter((call) => isJson(call.text)).map((call) => (
      { id: call.id, type: "function", function: { name: call.name, arguments: call.text } }
    ));
    const message = { role: "assistant", content: text || complete.length === 0 ? text : null };
    if (reasoning) message.reasoning_content = reasoning;
    if (complete.length) message.tool_calls = complete;
    return message;
  }

  /** Show Markdown in place of the tokens where an output has some, with a button to change between them. */
  async format() {
    for (const output of this.#outputs) {
      try {
        const nodes = await markdownOf(output.text);
        if (nodes) addMarkdown(output, nodes);
      } catch (error) {
        this.note(`Markdown is not shown: ${error.message}`, this.#outputs.indexOf(output));
      }
    }
  }

  /** Milliseconds to the first token; undefined before it. */
  get ttft() {
    return this.#first?.elapsed;
  }

  /** Tokens per second after the first chunk; undefined until there are some. */
  get speed() {
    const time = this.#last - (this.#first?.elapsed ?? 0);
    return this.count > this.#first?.count ? (1000 * (this.count - this.#first.count)) / time : undefined;
  }

  /** Write how an output ended under it. */
  note(text, index = 0) {
    this.#outputs[index].box.append(element("small", { textContent: text }));
  }
}

/** Put a folded part into a box, before a child or at its end. Return the body of the part. */
function fold(title, body, box, child = null) {
  box.insertBefore(element("details", {}, element("summary", { textContent: title }), body), child);
  return body;
}

function isJson(text) {
  try {
    return Boolean(JSON.parse(text));
  } catch {
    return false;
  }
}

function addMarkdown({ span }, nodes) {
  const shown = element("div", { className: "markdown" }, ...nodes);
  const button = element("button", { type: "button", className: "view", textContent: "Tokens" });
  button.addEventListener("click", () => {
    span.hidden = !span.hidden;
    shown.hidden = !shown.hidden;
    button.textContent = span.hidden ? "Tokens" : "Markdown";
  });
  span.hidden = true;
  span.after(shown, button);
}
