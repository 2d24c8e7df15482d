"""An OpenAI- and Anthropic-compatible HTTP server around engines. Needs the extra `serve`.

Read it in the order a request goes: `app` (routes), `protocol` (what was asked), `prompt` (its
ids), `worker` (the thread that owns an engine), `reply` (text, thoughts, calls), and back out
through `chat`, `responses` or `anthropic`.
"""
