"""An OpenAI- and Anthropic-compatible HTTP server around engines. Needs the extra `serve`.

`run` starts it over `models`. Modules, in the order in which a request passes them: `connection`,
`gate` (keys and limits; `access` checks hosts and origins), `app` (routes), `background` (threads
that keep the event loop free), `protocol`, `fields` (`unsupported_fields` are refused),
`thinking`, `conversation` (the messages of a request; `items` and `anthropic_content` convert those
of Responses and of Anthropic, `response_store` keeps past responses), `prompt` (token ids),
`generation` and `worker` (the thread that owns an engine; `jobs` are its queue entries,
`structures` the threads that compile grammars), `reply` (text, thoughts, calls; `held_calls` drops
repeated ones), then `streaming` and `chat`, `completions`, `responses` or `anthropic`, which share
`writer`, `logprobs` and `figures`. `information` has the routes that generate nothing, `metrics`
the Prometheus page.
"""
