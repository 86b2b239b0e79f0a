// The Vercel AI SDK over all of its providers that speak a protocol of the server: node's own test runner.
// MUSER_URL, MUSER_KEY and MUSER_MODEL say what is tested; scripts/check-clients.sh sets this up.
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateObject, generateText, isStepCount, Output, streamObject, streamText, tool } from 'ai';
import assert from 'node:assert/strict';
import { describe, test } from 'node:test';
import { z } from 'zod';

const { MUSER_URL: url, MUSER_KEY: apiKey, MUSER_MODEL: model } = process.env;
assert(url && apiKey && model, 'MUSER_URL, MUSER_KEY and MUSER_MODEL must be set');
globalThis.AI_SDK_LOG_WARNINGS = false;

const compatible = createOpenAICompatible({
  name: 'muser', baseURL: `${url}/v1`, apiKey, includeUsage: true, supportsStructuredOutputs: true,
});
// It sends no temperature to models that reason; answers are to be the same each time.
const greedy = (url, init) => fetch(url, { ...init, body: JSON.stringify({ temperature: 0, ...JSON.parse(init.body) }) });
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey, fetch: greedy });
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey });
const models = {
  'openai-compatible': compatible(model),
  'openai chat': openai.chat(model),
  'openai responses': openai.responses(model),
  anthropic: anthropic(model),
};
// The Responses API would keep items and take references to them; this server keeps none. Of reasoning its provider reads
// summaries, if it knows that the model reasons.
const providerOptions = { openai: { store: false, forceReasoning: true, reasoningSummary: 'auto' } };
// OpenAI's own chat API has no reasoning in it.
const reasons = name => name !== 'openai chat';

const sum = { prompt: 'What is 12 + 30?', temperature: 0, maxOutputTokens: 400, maxRetries: 0, providerOptions };
const person = z.object({ hair: z.enum(['black', 'red']), tall: z.boolean(), hats: z.array(z.literal('top')).length(2) });
const weather = calls => tool({
  description: 'The weather of a city',
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => { calls.push(city); return { city, sky: 'sunny', degrees: 21 }; },
});

for (const [name, model] of Object.entries(models)) {
  describe(name, () => {
    test('generateText answers, with reasoning and usage', async () => {
      const answer = await generateText({ model, ...sum });
      assert.match(answer.text, /42/);
      assert.equal(answer.finishReason, 'stop');
      assert(answer.usage.inputTokens > 0 && answer.usage.outputTokens > 0);
      if (reasons(name)) assert(answer.reasoningText.length > 0);
      const silent = await generateText({ model, ...sum, reasoning: 'none' });
      assert(silent.text && !silent.reasoningText);
      const cut = await generateText({ model, ...sum, maxOutputTokens: 16 });
      assert.equal(cut.finishReason, 'length');
    });

    test('streamText streams the same message', async () => {
      const whole = await generateText({ model, ...sum });
      const streamed = streamText({ model, ...sum });
      let text = '', reasoning = '', pieces = 0;
      for await (const part of streamed.fullStream) {
        assert.notEqual(part.type, 'error', String(part.error));
        if (part.type === 'text-delta') { text += part.text; pieces += 1; }
        if (part.type === 'reasoning-delta') reasoning += part.text;
      }
      assert.equal(text, whole.text);
      assert.equal(reasoning, whole.reasoningText ?? '');
      assert(pieces > 1);
      assert.equal(await streamed.finishReason, 'stop');
      assert.equal((await streamed.usage).outputTokens, whole.usage.outputTokens);
    });

    test('tools are called, and their results answered, over several steps', async () => {
      for (const run of [generateText, streamText]) {
        const calls = [];
        const result = await run({
          model, prompt: 'What is the weather in Paris?', tools: { get_weather: weather(calls) },
          temperature: 0, maxOutputTokens: 400, maxRetries: 0, providerOptions, stopWhen: isStepCount(3),
          prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? 'required' : 'none' }),
        });
        const steps = await result.steps;
        assert.equal(steps.length, 2);
        assert.equal(steps[0].finishReason, 'tool-calls');
        assert.deepEqual(calls, steps[0].toolCalls.map(call => call.input.city));
        assert.match(calls[0], /Paris/);
        assert.equal(steps[1].finishReason, 'stop');
        assert((await result.text).length > 0);
      }
    });

    test('a named tool is the one that is called', async () => {
      const tools = { get_weather: weather([]), get_time: tool({ inputSchema: z.object({ zone: z.string() }) }) };
      const { toolCalls } = await generateText({
        model, prompt: 'What is the weather in Paris?', tools, toolChoice: { type: 'tool', toolName: 'get_time' },
        temperature: 0, maxOutputTokens: 400, maxRetries: 0, providerOptions,
      });
      assert.deepEqual([...new Set(toolCalls.map(call => call.toolName))], ['get_time']);
      assert.equal(typeof toolCalls[0].input.zone, 'string');
    });

    test('objects have the form of their schema', async () => {
      // Without reasoning, in which the small model may lose itself before an object that it was not made for.
      const ask = { model, ...sum, reasoning: 'none' };
      const { object } = await generateObject({ ...ask, schema: person });
      assert.deepEqual(person.parse(object), object);
      const { output } = await generateText({ ...ask, output: Output.object({ schema: person }) });
      assert.deepEqual(person.parse(output), output);
      const streamed = streamObject({ ...ask, schema: person });
      let parts = 0;
      for await (const _ of streamed.partialObjectStream) parts += 1;
      const last = await streamed.object;
      assert.deepEqual(person.parse(last), last);
      assert(parts > 1);
    });

    test('a conversation goes on, reasoning and all', async () => {
      const first = await generateText({ model, ...sum });
      const { prompt, ...options } = sum;
      const messages = [{ role: 'user', content: prompt }, ...first.response.messages,
        { role: 'user', content: 'And 1 + 1?' }];
      const second = await generateText({ model, messages, ...options });
      assert(second.text.length > 0);
      assert(second.usage.inputTokens > first.usage.inputTokens);
    });

    test('an abort ends the stream and frees the slot', async () => {
      const leave = new AbortController();
      const { prompt, maxOutputTokens, ...options } = sum;
      const streamed = streamText({ model, prompt: 'Tell a long story.', ...options, abortSignal: leave.signal });
      let aborted = false;
      for await (const part of streamed.fullStream) {
        if (part.type.endsWith('-delta')) leave.abort();
        aborted ||= part.type === 'abort';
      }
      assert(aborted);
      for (;;) {
        const slots = await (await fetch(`${url}/slots`, { headers: { 'x-api-key': apiKey } })).json();
        if (slots.every(slot => !slot.is_processing)) break;
      }
    });

    test('errors are the server\'s own words', async () => {
      const wrong = generateText({ model, ...sum, temperature: undefined, topP: 2, providerOptions: undefined });
      await assert.rejects(wrong, error => error.statusCode === 400 && /top_p/.test(error.message));
    });
  });
}
