// The files of a conversation: JSON that can be loaded again, and Markdown for people.

import { ApiError } from "./api.js";
import { element } from "./tokens.js";

const MAX_BYTES = 1 << 20; // that a request may have by default
const ROLES = ["system", "user", "assistant", "tool"];

/** Return {messages, tools} of a file: an object with these fields, or a list of messages. Raises ApiError. */
export async function readConversation(file) {
  const check = (ok, what) => {
    if (!ok) throw new ApiError(`${file.name}: ${what}`);
  };
  check(file.size <= MAX_BYTES, `the file has ${file.size} bytes; the limit is ${MAX_BYTES}`);
  let found;
  try {
    found = JSON.parse(await file.text());
  } catch (error) {
    check(false, `not JSON: ${error.message}`);
  }
  const { messages, tools } = Array.isArray(found) ? { messages: found } : found ?? {};
  check(Array.isArray(messages), "no list of messages, and no object with the field messages");
  const isText = (value) => typeof value === "string";
  const isCall = (call) => [call?.id, call?.function?.name, call?.function?.arguments].every(isText);
  messages.forEach((message, i) => {
    const { role, content, reasoning_content: reasoning, tool_calls: calls } = message ?? {};
    const where = `message ${i + 1} of ${messages.length}`;
    check(ROLES.includes(role), `${where}: the role is none of ${ROLES.join(", ")}`);
    check(isText(content ?? (role === "assistant" ? "" : content)), `${where}: content is not a text`);
    check(isText(reasoning ?? ""), `${where}: reasoning_content is not a text`);
    check(!calls || (Array.isArray(calls) && calls.every(isCall)), `${where}: tool_calls is not a list of calls`);
  });
  return { messages, tools };
}

/** Return a conversation as Markdown, for people. */
export function asMarkdown(messages) {
  return messages.flatMap(({ role, content, reasoning_content: reasoning, tool_calls: calls, tool_call_id: id }) => [
    `## ${role}${id ? ` (${id})` : ""}`,
    ...(reasoning ? [reasoning.replace(/^/gm, "> ")] : []),
    ...(content ? [content] : []),
    ...(calls ?? []).map(({ id, function: { name, arguments: text } }) => (
      `Call of ${name} (${id}):\n\n${text.replace(/^/gm, "    ")}`
    )),
  ]).join("\n\n") + "\n";
}

/** Save a text as a file, in the browser's way. */
export function save(name, type, text) {
  const href = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10_000); // when the browser has read it
}
