"""An OpenAI- and Anthropic-compatible HTTP server around engines. Needs the extra `serve`.

`run` starts it over `models`. Read it in the order a request goes: `connection`, `gate` (keys,
limits; `access` knows hosts and origins), `app` (routes), `background` (threads, so that the
event loop goes on), `protocol`, `fields` (`unserved` ones are refused), `thinking`,
`conversation` (what was asked; `items` and `blocks` make Responses' and Anthropic's one, `kept`
knows past responses), `prompt` (its ids), `generation` and `worker` (the thread that owns an
engine; `jobs` are what it is given, `structures` the threads that make their grammars), `reply`
(text, thoughts, calls; `held_calls` keeps repeated ones back), and back out through `streaming`
and `chat`, `completions`, `responses` or `anthropic`, of which `writer`, `logprobs` and `figures`
hold what several need. `information` holds the routes that generate nothing, `metrics` what one of
them says.
"""
