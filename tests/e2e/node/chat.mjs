// Asks a relay through the official client: `node chat.mjs BASE_URL`. Prints one JSON document.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const ask = { model: "quickstart", messages: [{ role: "user", content: "Say hello é漢😀." }], max_tokens: 16, temperature: 0,
              cache_prompt: false };

const models = [];
for await (const model of client.models.list()) models.push(model.id);

let streamed = "";
let finish = null;
let usage = null;
let chunks = 0;
const stream = await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) {
  chunks += 1;
  streamed += chunk.choices[0]?.delta.content ?? "";
  finish = chunk.choices[0]?.finish_reason ?? finish;
  usage = chunk.usage ?? usage;
}

const whole = (await client.chat.completions.create(ask)).choices[0].message.content;

// A loop that is left early must not leave the engine at work.
const endless = await client.chat.completions.create({ ...ask, max_tokens: 3000, ignore_eos: true, stream: true });
for await (const _ of endless) break;

let refused = null;
try {
  await client.chat.completions.create({ ...ask, model: "no-such-model" });
} catch (error) {
  refused = { status: error.status, code: error.code, request_id: error.requestID };
}

console.log(JSON.stringify({ models, streamed, whole, finish, usage, chunks, refused }));
