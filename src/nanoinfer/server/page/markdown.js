// Markdown of an answer. The server parses it (/page/markdown); the elements are made here, and only these. No HTML is
// parsed, and no attribute comes from the text but the address of a link and the first number of a list.

import { request } from "./api.js";
import { element } from "./tokens.js";

const NAMES = new Set((
  "a blockquote br code em h3 h4 h5 h6 hr li ol p pre s strong table tbody td th thead tr ul"
).split(" "));
const UNAVAILABLE = 501; // the server has no package for Markdown
let available = true;

/** Return the elements of a text, or null if it has no markup. Raises ApiError. */
export async function markdownOf(text) {
  if (!available || !text) return null;
  try {
    const { nodes } = await (await request("page/markdown", { text })).json();
    return nodes.some(isMarkup) ? nodes.map(made) : null;
  } catch (error) {
    if (error.status === UNAVAILABLE) available = false; // the error is shown this once
    throw error;
  }
}

const isMarkup = (node) => Array.isArray(node) && (!["p", "br"].includes(node[0]) || node[1].some(isMarkup));

/** ["a", ["b"], "mailto:c"] -> an element; "text" -> "text" */
function made(node) {
  if (typeof node === "string") return node;
  const [name, nodes, value] = node;
  const properties = {};
  if (name === "a" && /^(https?:\/\/|mailto:)/i.test(value)) {
    Object.assign(properties, { href: value, rel: "noopener noreferrer", target: "_blank" });
  } else if (name === "ol") properties.start = value;
  return element(NAMES.has(name) ? name : "span", properties, ...nodes.map(made));
}
