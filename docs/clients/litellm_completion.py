"""LiteLLM: the same question over OpenAI's and Anthropic's API."""

import litellm

question = {"role": "user", "content": "What is the capital of France?"}
for model, url in (
    ("openai/tiny", "http://127.0.0.1:8000/v1"),
    ("anthropic/tiny", "http://127.0.0.1:8000"),
):
    answer = litellm.completion(model, messages=[question], api_base=url, api_key="none")
    print(answer.choices[0].message.content, answer.usage.total_tokens)
