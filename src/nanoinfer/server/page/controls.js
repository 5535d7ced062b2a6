// A control for each sampling parameter. Names and defaults are those of /info; types, ranges and help texts those of
// /openapi.json. A parameter is sent if it is not the default.

import { ApiError } from "./api.js";
import { element } from "./tokens.js";

// The rest is folded.
const FIRST = ["max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "logprobs"];
// Without effect on what the page shows, or made by programs.
const OMITTED = ["prompt_logprobs", "detokenize", "spaces_between_special_tokens"];
const ALTERNATIVES = 5; // logprobs, if the server has no default

/** How to make, fill and read the control of a type. `read` returns null for what is empty. */
const KINDS = {
  number: {
    make: ({ type, minimum, maximum }) => element("input", {
      type: "number", step: type === "integer" ? 1 : 0.05, min: minimum ?? "", max: maximum ?? "",
    }),
    read(input, name) {
      const value = input.valueAsNumber; // NaN if empty, or not a number
      if (Number.isNaN(value) && !input.validity.badInput) return null;
      if (Number.isSafeInteger(value) || (Number.isFinite(value) && !Number.isInteger(value))) return value;
      throw new ApiError(`${name} is not a number, or one of more digits than this page can send`, { param: name });
    },
  },
  boolean: {
    make: () => element("input", { type: "checkbox" }),
    fill: (input, value) => { input.checked = Boolean(value); },
    read: (input) => input.checked,
  },
  choice: {
    make: (schema) => element("select", {}, ...schema.enum.map((value) => (
      element("option", { value, textContent: value === "" ? "default" : value })
    ))),
    read: ({ value }) => ({ true: true, false: false })[value] ?? (value || null),
  },
  text: {
    make: () => element("input", { type: "text", spellcheck: false }),
    read: ({ value }) => value || null,
  },
  lines: {
    hint: "One on each line; \\n is a newline.",
    make: () => element("textarea", { rows: 1, spellcheck: false }),
    fill: (input, value) => { input.value = (value ?? []).map((s) => JSON.stringify(s).slice(1, -1)).join("\n"); },
    read(input, name) {
      const lines = input.value.split("\n").filter(Boolean);
      return lines.length ? lines.map((line) => parse(`"${line.replace(/\\?"/g, '\\"')}"`, name)) : null;
    },
  },
  json: {
    hint: "As JSON.",
    make: () => element("textarea", { className: "json", rows: 2, spellcheck: false }),
    fill: (input, value) => { input.value = value === null ? "" : JSON.stringify(value); },
    read: (input, name) => (input.value.trim() ? parse(input.value, name) : null),
  },
};

function parse(text, name) {
  try {
    return JSON.parse(text);
  } catch (error) {
    const what = text.length > 80 ? error.message : text;
    throw new ApiError(`${name} is not valid: ${what}`, { param: name });
  }
}

function kindOf({ type, items, enum: choices }) {
  if (choices) return KINDS.choice;
  if (type === "integer" || type === "number") return KINDS.number;
  if (type === "boolean") return KINDS.boolean;
  if (type === "string") return KINDS.text;
  return type === "array" && items?.type === "string" ? KINDS.lines : KINDS.json;
}

/** {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]} -> {"type": "integer", "minimum": 1} */
function withoutNull(schema, resolve) {
  const whole = resolve(schema);
  const options = (whole.anyOf ?? whole.oneOf ?? [whole]).map(resolve).filter(({ type }) => type !== "null");
  const main = options.find(({ type }) => type === "array") ?? options[0] ?? {};
  return { ...whole, ...main, type: [main.type].flat().find((type) => type !== "null") };
}

function helpText({ description, minimum, maximum }, hint) {
  const low = minimum === undefined ? "" : `At least ${minimum}.`;
  const high = maximum === undefined || maximum > Number.MAX_SAFE_INTEGER ? "" : `At most ${maximum}.`;
  return [description, low, high, hint].filter(Boolean).join(" ");
}

/** Return a parameter's default as its control reads it: an empty list is null. */
function initialValue(name, defaults) {
  const value = defaults[name] ?? (name === "logprobs" ? ALTERNATIVES : null);
  return value?.length === 0 ? null : value;
}

function fill({ input, kind, start }) {
  if (kind.fill) kind.fill(input, start);
  else input.value = start ?? "";
}

export class Controls {
  #controls = new Map(); // name -> {input, kind, initial, start, row, error}

  /**
   * form: the element for the controls. help: the element for the help text of the control under the pointer.
   * properties: name -> JSON schema, of a request. defaults: name -> the server's value. starts: name -> the value
   * that the page begins with, where it is another. resolve: returns what a $ref refers to. first: names of the
   * controls that are not folded.
   */
  constructor(form, help, { properties, defaults, starts = {}, resolve, first = FIRST }) {
    const names = Object.keys(defaults).filter((name) => properties[name] && !OMITTED.includes(name));
    const rows = (some) => some.map((name) => this.#row(name, withoutNull(properties[name], resolve), defaults));
    const reset = element("button", { type: "button", textContent: "Reset parameters" });
    const folded = rows(names.filter((name) => !first.includes(name)));
    form.replaceChildren(...rows(first.filter((name) => names.includes(name))));
    if (folded.length) {
      form.append(element("details", {}, element("summary", { textContent: "More parameters" }), ...folded));
    }
    form.append(reset);
    this.setDefaults(defaults, starts);
    reset.addEventListener("click", () => {
      this.#controls.forEach(fill);
      this.clearErrors();
      form.dispatchEvent(new Event("input", { bubbles: true }));
    });
    form.addEventListener("input", () => this.#showChanged());
    for (const type of ["focusin", "pointerover"]) {
      form.addEventListener(type, (event) => {
        const text = event.target.closest(".control")?.querySelector(".help").textContent;
        if (text) help.textContent = text;
      });
    }
  }

  #row(name, schema, defaults) {
    const initial = initialValue(name, defaults);
    if (initial === null && (schema.enum || schema.type === "boolean")) { // neither of its values is the default
      schema = { ...schema, enum: ["", ...(schema.enum ?? [true, false]).filter((value) => value !== null)] };
    }
    const kind = kindOf(schema);
    const input = Object.assign(kind.make(schema), { id: `c-${name}`, autocomplete: "off" });
    input.setAttribute("aria-describedby", `help-${name} error-${name}`);
    const error = element("p", { id: `error-${name}`, className: "error" });
    const help = element("p", { id: `help-${name}`, className: "help", textContent: helpText(schema, kind.hint) });
    const words = name.split("_").flatMap((word, i) => (i ? ["_", element("wbr"), word] : [word]));
    const label = element("label", { htmlFor: input.id }, ...words); // a long name breaks between its words
    const row = element("div", { className: "control" }, label, input, help, error);
    const control = { input, kind, initial, start: initial, row, error };
    fill(control);
    this.#controls.set(name, control);
    return row;
  }

  /** Take other defaults and starts, which also replace the values that are the old ones. */
  setDefaults(defaults, starts = {}) {
    for (const [name, control] of this.#controls) {
      const keep = this.#isChanged(name, { ...control, initial: control.start });
      control.initial = initialValue(name, defaults);
      control.start = initialValue(name, { ...defaults, ...starts });
      if (!keep) fill(control);
    }
    this.#showChanged();
  }

  /** Fill in a value, if there is a control for it. */
  set(name, value) {
    const control = this.#controls.get(name);
    if (control) fill({ ...control, start: value });
    this.#showChanged();
  }

  /** Return the value if it is not the default, else null. Raises ApiError. */
  #changed(name, { input, kind, initial }) {
    const value = kind.read(input, name);
    return JSON.stringify(value) === JSON.stringify(initial) ? null : value;
  }

  #isChanged(name, control) {
    try {
      return this.#changed(name, control) !== null;
    } catch { // not valid
      return true;
    }
  }

  #showChanged() {
    for (const [name, control] of this.#controls) {
      control.row.classList.toggle("changed", this.#isChanged(name, control));
    }
  }

  /** Return name -> value of the parameters that are not the default. Raises ApiError. */
  values() {
    const values = [...this.#controls].map(([name, control]) => [name, this.#changed(name, control)]);
    return Object.fromEntries(values.filter(([, value]) => value !== null));
  }

  /** Number of alternatives to show; null: no probabilities. */
  get logprobs() {
    const control = this.#controls.get("logprobs");
    return control ? control.kind.read(control.input, "logprobs") : null;
  }

  /** Show an error at the control of a parameter, if there is one, and focus it. */
  showError(name, message) {
    const control = this.#controls.get(name === "top_logprobs" ? "logprobs" : name);
    if (!control) return;
    control.error.textContent = message;
    control.input.setAttribute("aria-invalid", "true");
    for (let box = control.row.closest("details"); box; box = box.parentElement.closest("details")) box.open = true;
    control.input.focus();
  }

  clearErrors() {
    for (const { input, error } of this.#controls.values()) {
      error.textContent = "";
      input.removeAttribute("aria-invalid");
    }
  }
}
