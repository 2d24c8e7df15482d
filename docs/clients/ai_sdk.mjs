// Vercel's AI SDK: npm install ai @ai-sdk/openai-compatible zod
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateObject, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const provider = createOpenAICompatible({
  name: 'tiny', baseURL: 'http://127.0.0.1:8000/v1', apiKey: 'none',
  includeUsage: true, supportsStructuredOutputs: true,
});
const model = provider('tiny');
const prompt = 'Check the weather in Paris.';
const get_weather = tool({
  description: 'Get the weather in a city.',
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => ({ city, degrees: 21, sky: 'sunny' }),
});
const result = streamText({ model, prompt, tools: { get_weather }, stopWhen: stepCountIs(3) });
for await (const text of result.textStream) process.stdout.write(text);
console.log(await result.usage);
const schema = z.object({ city: z.string().max(20), degrees: z.number().int().min(-50).max(50) });
console.log((await generateObject({ model, prompt, schema, maxOutputTokens: 200 })).object);
