// The conversation of the npm package openai: see common.py.
import OpenAI from "openai";

const { CLIENT_BASE_URL: baseURL, CLIENT_KEY: apiKey } = process.env;
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const chats = client.chat.completions;
const number = { type: "integer", minimum: 0, maximum: 99 };
const object = (properties) => ({
  type: "object", properties, required: Object.keys(properties), additionalProperties: false,
});
const tools = [
  { type: "function", function: { name: "add", parameters: object({ a: { enum: [2, 3, 5] }, b: { enum: ["x", "yy"] } }) } },
];
const schema = object({ size: { enum: ["small", "large"] }, number });
const options = { model: "tiny", max_tokens: 120, seed: 3 };
const messages = [{ role: "user", content: "What is 2 + 3?" }];

let refused = 0;
try {
  await new OpenAI({ baseURL, apiKey: "wrong", maxRetries: 0 }).chat.completions.create({ ...options, messages });
} catch (error) {
  refused = error.status;
}

// A call, whole and streamed; its result, and the answer.
const asked = { ...options, messages, tools, tool_choice: "required", parallel_tool_calls: false };
const whole = (await chats.create(asked)).choices[0];
const streamed = (await chats.stream(asked).finalChatCompletion()).choices[0];
const calls = [whole, streamed].flatMap(({ message }) => message.tool_calls).map(
  ({ function: { name, arguments: text } }) => [name, JSON.parse(text)],
);
messages.push(whole.message, { role: "tool", tool_call_id: whole.message.tool_calls[0].id, content: "5" });
const answers = { ...options, messages, tools, tool_choice: "none" };
const answer = (await chats.create(answers)).choices[0].message.content;
const stream = [];
let text = "";
for await (const chunk of await chats.create({ ...answers, stream: true })) {
  if (chunk.choices[0].delta.content) stream.push(text += chunk.choices[0].delta.content);
}

// The client runs the call and continues.
const ran = [];
const run = (args) => (ran.push(["add", args]), "5");
const runner = chats.runTools({
  ...asked, tool_choice: { type: "function", function: { name: "add" } },
  tools: [{ type: "function", function: { ...tools[0].function, function: run, parse: JSON.parse } }],
});
await runner.done();
calls.push(...ran);

const format = { type: "json_schema", json_schema: { name: "order", strict: true, schema } };
const parsed = await chats.parse({ ...options, messages: messages.slice(0, 1), response_format: format });
console.log(JSON.stringify({
  refused, calls, answer, stream, structured: [parsed.choices[0].message.parsed],
}));
