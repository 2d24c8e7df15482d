"""The Anthropic SDK: its tool runner calls a function until the model answers."""

from anthropic import Anthropic, beta_tool


@beta_tool
def get_weather(city: str) -> str:
    """Get the weather in a city.

    Args:
        city: The city.
    """
    return f"21 degrees and sunny in {city}"


client = Anthropic(base_url="http://127.0.0.1:8000", api_key="none")
question = {"role": "user", "content": "Check the weather in Paris."}
print(client.messages.count_tokens(model="tiny", messages=[question]).input_tokens)
runner = client.beta.messages.tool_runner(
    model="tiny", max_tokens=200, tools=[get_weather], messages=[question]
)
for message in runner:
    print(message.stop_reason, message.content)
