"""HTTP server with the OpenAI and Anthropic APIs. Needs the extra `serve`.

`run` starts the server, `models` holds the loaded models. A request passes the modules in this
order:

1. `http_connection` and `middleware`: HTTP, API keys, limits; `connection_limit` bounds open
   connections, `log_limit` log lines, `access` checks hosts and origins.
2. `app`: the routes that generate. `information` has the other routes, `metrics` the Prometheus
   page, `web_page` the page for browsers, whose files are in the folder `page`. `background` runs
   slow work in threads.
3. `chat`, `completions`, `responses` or `anthropic` decode the body into a `GenerationRequest`
   (`protocol`), using `fields`, `unsupported_fields`, `thinking` and `conversation`;
   `message_formats` converts the messages of Responses and Anthropic, `response_store` keeps past
   responses and `conversation_store` conversations, for each key; `stored_routes` has their routes.
4. `prompt`: chat template and token ids; `infill` those of a prompt with a suffix.
5. `sampling_options`: the engine's options. `generation`: submits one job per output (`jobs`) to
   the thread that owns the engine (`worker`); `lifecycle` starts engines again, `output_grammar`
   adds reasoning and calls to the grammar of an answer, `errors` has the responses of requests that
   fail.
6. `reply`: parses output into reasoning, content and tool calls; `held_calls` filters repeated
   calls.
7. The module of step 3 writes the response, with `writer`, `response_items`, `logprobs` and
   `statistics`; `connection` sends it.
"""
