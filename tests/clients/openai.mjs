// OpenAI's client for Node against a live server: `node openai.mjs URL/v1`. What does not hold throws.

import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const asked = { model: "octavo-tiny", messages: [{ role: "user", content: "Hi" }], script: ["Hello", ", ", "world"] };

async function whole() {
  const answer = await client.chat.completions.create(asked);
  assert.equal(answer.choices[0].message.content, "Hello, world");
  assert.equal(answer.choices[0].finish_reason, "stop");
}

async function streamed() {
  const stream = await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
  let text = "", usage = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, "Hello, world");
  assert.equal(usage.completion_tokens, 4);
}

async function completion() {
  const answer = await client.completions.create({ model: "octavo-tiny", prompt: "x", max_tokens: 3, script: ["a", "b", "c"] });
  assert.equal(answer.choices[0].text, "abc");
  assert.equal(answer.choices[0].finish_reason, "length");
}

async function tools() {
  const parameters = { type: "object", properties: { city: { type: "string", maxLength: 8 } }, required: ["city"], additionalProperties: false };
  const answer = await client.chat.completions.create({
    model: "octavo-tiny",
    messages: asked.messages,
    tools: [{ type: "function", function: { name: "weather", parameters } }],
    tool_choice: "required",
    max_tokens: 400,
    logit_bias: { 9: -100, 10: -100, 13: -100, 32: -100 }, // blanks, which JSON allows without end
  });
  const call = answer.choices[0].message.tool_calls[0].function;
  assert.equal(call.name, "weather");
  assert.equal(typeof JSON.parse(call.arguments).city, "string");
}

async function models() {
  assert.equal((await client.models.retrieve("octavo-tiny")).id, "octavo-tiny");
  assert.ok((await client.models.list()).data.some((model) => model.id === "octavo-tiny"));
}

async function failures() {
  const isRefusal = (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature";
  await assert.rejects(client.chat.completions.create({ ...asked, temperature: 3 }), isRefusal);
  await assert.rejects(client.chat.completions.create({ ...asked, model: "nope" }), OpenAI.NotFoundError);
  const fault = { type: "error", after_events: 2 };
  const stream = await client.chat.completions.create({ ...asked, stream: true, fault });
  const read = async () => { for await (const _ of stream); };
  await assert.rejects(read, (error) => error instanceof OpenAI.APIError && error.code === "injected_fault");
}

for (const check of [whole, streamed, completion, tools, models, failures]) {
  await check();
  console.log(`ok ${check.name}`);
}
