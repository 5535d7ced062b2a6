// The conversation of a chat: its messages with their elements, and the fields for results of tools.

import { Answer } from "./answer.js";
import { element } from "./tokens.js";

export class Conversation {
  turns = []; // {message, article}, in the order of their elements
  #parent;
  #on;

  /** on: {edit(at), retry(at), results(messages)}, called when the user asks for it. */
  constructor(parent, on) {
    this.#parent = parent;
    this.#on = on;
  }

  get messages() {
    return this.turns.map(({ message }) => message);
  }

  /** Add a message, and for an assistant's one the answer that shows it. */
  add(message, answer) {
    const turn = { message, article: answer?.article ?? this.#article(message) };
    const at = () => this.turns.indexOf(turn);
    if (message.tool_calls?.length) turn.article.append(this.#results(message.tool_calls));
    if (answer) turn.article.append(action("Retry", () => this.#on.retry(at())));
    if (message.role === "user") turn.article.append(action("Edit", () => this.#on.edit(at())));
    this.turns.push(turn);
  }

  /** Remove the turns from a place on; return them. */
  cut(at) {
    const turns = this.turns.splice(at);
    for (const { article } of turns) article.remove();
    return turns;
  }

  /** Put back what `cut` has removed from the end. */
  restore(turns) {
    this.turns.push(...turns);
    this.#parent.append(...turns.map(({ article }) => article));
  }

  /** Show messages of a file in place of these. */
  load(messages, model) {
    this.cut(0);
    for (const message of messages) {
      const answer = message.role === "assistant" ? new Answer(this.#parent, { model }) : undefined;
      const calls = message.tool_calls?.map((call, index) => ({ ...call, index }));
      answer?.add({ choices: [{ index: 0, delta: { ...message, tool_calls: calls }, token_ids: [] }] });
      answer?.format();
      this.add(message, answer);
    }
  }

  #article({ role, content, tool_call_id: id }) {
    const text = element("div", { className: "text", textContent: content });
    const title = { user: "You", tool: `Result of ${this.#nameOf(id)}` }[role] ?? role;
    const folded = () => element("details", {}, element("summary", { textContent: title }), text);
    const body = role === "user" ? text : folded();
    const article = element("article", { className: "question", ariaLabel: title }, body);
    this.#parent.append(article);
    return article;
  }

  #nameOf(id) {
    const calls = this.messages.flatMap((message) => message.tool_calls ?? []);
    return calls.findLast((call) => call.id === id)?.function.name ?? id;
  }

  /** Return a form with a field for the result of each call. */
  #results(calls) {
    const fields = calls.map(() => element("textarea", { rows: 2, spellcheck: false }));
    const labels = calls.map(({ function: { name } }, i) => element(
      "label", {}, element("span", { textContent: `Result of ${name}` }), fields[i],
    ));
    const button = element("button", { textContent: "Send results" });
    const form = element("form", { className: "results" }, ...labels, button);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#on.results(calls.map(({ id }, i) => ({ role: "tool", tool_call_id: id, content: fields[i].value })));
    });
    return form;
  }
}

function action(textContent, click) {
  const button = element("button", { type: "button", className: "turn-action", textContent });
  button.addEventListener("click", click);
  return button;
}
