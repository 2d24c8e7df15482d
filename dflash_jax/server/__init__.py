"""HTTP server with the OpenAI and Anthropic APIs. Needs the extra `serve`.

`configuration` opens models, `listening` sockets, `run` starts the server, `served_models` has the
loaded models. A request passes the modules in this order:

1. `http_connection`: HTTP, timeouts, disconnections, bounds on connections and on the log lines
   that clients cause. `access_log`: ids, and a line in the log for each. `middleware`: API keys
   (`keys`, `key_ring`), limits (`body_budget`), and hosts and origins (`access`).
2. `app`: the routes that generate. `information` has the others, among them the page for
   browsers, whose files are in the folder `page`; `metrics` has the Prometheus page. `background`
   runs slow work in threads.
3. `chat`, `completions`, `responses` or `anthropic` decode the body into a `GenerationRequest`
   (`protocol`), using `fields`, `tools` and `conversation`; `message_formats` converts the messages
   of Responses and Anthropic, and calls in them. `response_store` keeps past responses and
   conversations, of each key.
4. `prompt`: chat template and token ids, also those of a prompt with a suffix.
5. `generation`: submits one job per output to the thread that owns the engine (`engine_thread`);
   the grammar of an answer gets reasoning and calls around it, and `errors` has the responses of
   requests that fail.
6. `reply`: parses output into reasoning, content and tool calls, and filters repeated calls.
7. The module of step 3 writes the response, with `writer`.

What steps 3 to 5 refuse, they raise as `protocol.Problem`.
"""
