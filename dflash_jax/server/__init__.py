"""HTTP server with the OpenAI and Anthropic APIs. Needs the extra `serve`.

`configuration` opens models, `listening` sockets, `run` starts the server, `served_models` has the
loaded models. A request passes the modules in this order:

1. `http_connection`: HTTP and timeouts; `open_connections`: a bound on their number;
   `http_responses`: disconnections.
   `access_log`: ids, and a line in the log for each; `log_rate` bounds the lines that clients
   cause. `middleware`: API keys (`keys`, `key_ring`), limits (`body_budget`), and hosts and origins
   (`access`).
2. `app`: the routes that generate. `token_routes` count and encode, `information` tells about the
   server, `stored_routes` return what is kept of earlier requests; `web_page` has the page for
   browsers, whose files are in the folder `page`, `metrics` the Prometheus page. `background` runs
   slow work in threads.
3. `completions`, `responses` or `anthropic` decode the body into a `GenerationRequest`
   (`protocol`). `fields` reads what their bodies share, `reasoning` options of reasoning;
   `unsupported` refuses fields of other servers. `tools` reads declared tools, those that take
   text (`freeform`) among them, `conversation` messages, and `contents` the texts in these.
   `message_formats` converts messages of Responses and Anthropic, `past_calls` the calls in them.
   `response_store` and `conversation_store` keep past responses and conversations, of each key.
4. `prompt`: token ids, also those of a prompt with a suffix. `rendering` applies the chat template;
   `tool_turns` remembers the ids of turns that the model wrote.
5. `engine_options`: the options of the engine. `output_structure` puts reasoning and calls around
   the grammar of an answer.
6. `generation`: submits one job per output to the thread that owns the engine (`engine_thread`);
   `errors` has the responses of requests that fail. With several hosts, the others follow this
   one (`serving_hosts`).
7. `reply`: parses output into reasoning, content and tool calls; `repeated_calls` filters these.
8. The module of step 3 writes the response, with `writer`, `logprobs` and `response_items`.

What steps 3 to 6 refuse, they raise as `protocol.Problem`.
"""
