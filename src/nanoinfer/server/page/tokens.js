// The tokens of an answer: one element each, with probability and alternatives on hover, tap and keyboard focus.
// All text of the model is set by textContent: it is never parsed as HTML.

const tokensOf = new WeakMap(); // element -> the tokens whose text it has

export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

/** Return the tokens of one choice of a chunk: [{text, id, logprob, top: [[text, logprob], ...], accepted}]. */
export function tokensOfChoice(choice) {
  const { logprobs, token_ids: ids, draft_accepted: accepted } = choice;
  const tokens = (ids ?? []).map((id, i) => ({ id, text: null, accepted: accepted?.[i] ?? false }));
  if (logprobs?.content) { // chat
    logprobs.content.forEach((item, i) => {
      const top = item.top_logprobs.map((t) => [t.token, t.logprob]);
      tokens[i] = { ...tokens[i], text: item.token, logprob: item.logprob, top };
    });
  } else if (logprobs?.tokens) {
    logprobs.tokens.forEach((text, i) => {
      const top = Object.entries(logprobs.top_logprobs?.[i] ?? {});
      tokens[i] = { ...tokens[i], text, logprob: logprobs.token_logprobs[i], top };
    });
  }
  return tokens;
}

/** Appends the text of a stream to an element, split at the tokens. */
export class TokenText {
  #waiting; // tokens whose text is not there yet: incomplete characters, markers, or the beginning of a stop string

  /** waiting: the tokens of an output, of which this may be a part. Those whose text is added are taken from it. */
  constructor(parent, waiting) {
    this.#waiting = waiting;
    this.parent = Object.assign(parent, { className: "tokens" });
  }

  add(text) {
    while (text && this.#waiting[0]?.text && text.startsWith(this.#waiting[0].text)) {
      const token = this.#waiting.shift();
      this.#append(token.text, [token]);
      text = text.slice(token.text.length);
    }
    if (text) this.#append(text, this.#waiting.splice(0)); // a character of several tokens
  }

  #append(text, tokens) {
    const tabIndex = this.parent.hasChildNodes() ? -1 : 0; // one stop of the Tab key for each answer
    const made = element("span", { className: "token", textContent: text, tabIndex });
    made.classList.toggle("accepted", tokens.some((t) => t.accepted));
    tokensOf.set(made, tokens);
    this.parent.append(made);
  }
}

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(logprob > Math.log(0.1) ? 1 : 2)}%`;

function details(token) {
  const rows = [element("p", {}, element("code", { textContent: JSON.stringify(token.text ?? "") }))];
  if (token.id !== undefined) rows[0].append(` token ${token.id}`);
  if (token.accepted) rows[0].append(", accepted from the draft");
  if (token.logprob !== undefined) rows.push(element("p", { textContent: `probability ${percent(token.logprob)}` }));
  if (token.top?.length) rows.push(alternatives(token));
  return rows;
}

function alternatives(token) {
  const sorted = [...token.top].sort((a, b) => b[1] - a[1]);
  return element("table", {}, element("tbody", {}, ...sorted.map(([text, logprob]) => element(
    "tr", { className: text === token.text ? "chosen" : "" },
    element("th", { scope: "row" }, element("code", { textContent: JSON.stringify(text) })),
    element("td", {}, element("meter", { max: 1, value: Math.exp(logprob), ariaHidden: "true" })),
    element("td", { textContent: percent(logprob) }),
  ))));
}

/** Show the tokens under the pointer, or with the focus, in a tip. Arrow keys, Home and End move between tokens. */
export function explainTokens(root, tip) {
  let shown = null;
  const show = (token) => {
    if (token === shown) return;
    shown?.removeAttribute("aria-describedby");
    shown = token;
    const tokens = tokensOf.get(token) ?? [];
    tip.hidden = !tokens.length;
    if (tip.hidden) return;
    tip.replaceChildren(...tokens.flatMap(details));
    token.setAttribute("aria-describedby", tip.id);
    place(tip, token.getBoundingClientRect());
  };
  document.addEventListener("pointermove", ({ target }) => { // not pointerover: the text also moves under the pointer
    if (!tip.contains(target)) show(target.closest(".token") ?? document.activeElement.closest(".token"));
  });
  root.addEventListener("focusin", ({ target }) => show(target.closest(".token")));
  root.addEventListener("focusout", () => show(null));
  for (const type of ["scroll", "resize"]) { // the focused token has another place
    window.addEventListener(type, () => {
      show(null);
      show(document.activeElement.closest(".token"));
    }, true); // of the transcript, too
  }
  root.addEventListener("keydown", (event) => {
    const token = event.target.closest(".token");
    const next = token && {
      ArrowLeft: token.previousElementSibling, ArrowRight: token.nextElementSibling,
      Home: token.parentElement.firstElementChild, End: token.parentElement.lastElementChild,
    }[event.key];
    if (!next) return;
    event.preventDefault();
    token.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
  return { hide: () => show(null) };
}

/** Put the tip under a rectangle of the window, or above it, where there is room. */
function place(tip, { left, top, bottom }) {
  const { width, height } = tip.getBoundingClientRect();
  const below = bottom + height + 4 < window.innerHeight;
  tip.style.left = `${Math.max(8, Math.min(left, window.innerWidth - width - 8))}px`;
  tip.style.top = `${Math.max(4, below ? bottom + 4 : top - height - 4)}px`;
}
