// A request as a curl command and as Python for the client of OpenAI.

// The parameters of `completions.create` and `chat.completions.create`; other fields go into extra_body.
const OPENAI = new Set((
  "model prompt messages best_of echo frequency_penalty logit_bias logprobs max_tokens max_completion_tokens n"
  + " parallel_tool_calls presence_penalty reasoning_effort response_format seed stop stream stream_options suffix"
  + " temperature tool_choice tools top_logprobs top_p user"
).split(" "));

/** 'it' -> 'it', it's -> 'it'\''s' */
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

export function curl(url, body, needsKey) {
  const key = needsKey ? ['-H "Authorization: Bearer $NANOINFER_API_KEY"'] : [];
  const type = quoted("Content-Type: application/json");
  const data = quoted(JSON.stringify(body, null, 2));
  return [`curl -N ${quoted(url)}`, `-H ${type}`, ...key, `-d ${data}`].join(" \\\n  ");
}

export function python(baseUrl, chat, body, needsKey) {
  const fields = Object.entries(body);
  const own = fields.filter(([name]) => !OPENAI.has(name));
  const args = fields.filter(([name]) => OPENAI.has(name)).map(([name, value]) => `${name}=${literal(value)}`);
  if (own.length) args.push(`extra_body=${literal(Object.fromEntries(own))}`);
  return [
    ...(needsKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${literal(baseUrl)}, api_key=${needsKey ? 'os.environ["NANOINFER_API_KEY"]' : '"none"'})`,
    `stream = client.${chat ? "chat.completions" : "completions"}.create(`,
    ...args.map((arg) => `    ${arg},`),
    ")",
    "for chunk in stream:",
    "    for choice in chunk.choices:",
    `        print(choice.${chat ? 'delta.content or ""' : "text"}, end="", flush=True)`,
  ].join("\n");
}

/** A JSON value as Python: {"a": true} -> {"a": True}. JSON's strings and numbers are Python's as well. */
function literal(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${literal(item)}`).join(", ")}}`;
  }
  return JSON.stringify(value);
}
