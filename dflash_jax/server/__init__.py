"""An OpenAI- and Anthropic-compatible HTTP server around engines. Needs the extra `serve`.

Read it in the order a request goes: `connection`, `gate` (keys, limits), `app` (routes),
`protocol`, `fields`, `thinking`, `conversation` (what was asked; `items` and `blocks` make
Responses' and Anthropic's one, `kept` knows past responses), `prompt` (its ids), `generation` and
`worker` (the thread that owns an engine), `reply` (text, thoughts, calls), and back out through
`chat`, `completions`, `responses` or `anthropic`. `information` holds the routes that generate
nothing.
"""
