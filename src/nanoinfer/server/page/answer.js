// What one request has produced: its elements, its text, its times.

import { TokenText, element, tokensOfChoice } from "./tokens.js";

export class Answer {
  count = 0; // tokens of all outputs
  accepted; // those of them that were accepted from the draft; undefined without one
  text = ""; // of the first output
  #articles;
  #outputs = []; // {element, tokens: TokenText} of each of the n outputs
  #first = null; // milliseconds until the first tokens, and their number
  #last = 0; // milliseconds until the last tokens

  constructor(parent, { chat, prompt, model }) {
    this.chat = chat;
    this.prompt = prompt;
    const article = element("article", { className: "answer", ariaLabel: `Answer of ${model}` });
    const question = element("article", { className: "question", ariaLabel: "You", textContent: prompt });
    this.#articles = chat ? [question, article] : [article];
    parent.append(...this.#articles);
    this.#output(0);
  }

  #output(index) {
    while (this.#outputs.length <= index) {
      const tokens = element("span");
      const prompt = this.chat ? "" : element("span", { className: "prompt", textContent: this.prompt });
      const output = element("p", { className: "output" }, prompt, tokens);
      this.#articles.at(-1).append(output);
      this.#outputs.push({ element: output, tokens: new TokenText(tokens) });
    }
    return this.#outputs[index];
  }

  /** Add a chunk that arrived `elapsed` milliseconds after the request. */
  add(chunk, elapsed) {
    let added = 0;
    for (const choice of chunk.choices) {
      const text = (this.chat ? choice.delta?.content : choice.text) ?? "";
      const tokens = tokensOfChoice(choice);
      this.#output(choice.index).tokens.add(text, tokens);
      if (choice.index === 0) this.text += text;
      added += tokens.length;
      if (choice.draft_accepted) this.accepted = (this.accepted ?? 0) + tokens.filter((t) => t.accepted).length;
      if (choice.finish_reason) this.note(`finish_reason ${choice.finish_reason}`, choice.index);
    }
    if (!added) return;
    this.count += added;
    this.#first ??= { elapsed, count: added };
    this.#last = elapsed;
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
    this.#outputs[index].element.append(element("small", { textContent: text }));
  }

  remove() {
    for (const article of this.#articles) article.remove();
  }
}
