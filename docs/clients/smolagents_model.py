"""smolagents: one call of a model, and an agent. Its prompts take 3,000 tokens and more."""

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city.

    Args:
        city: The city.
    """
    return f"21 degrees and sunny in {city}"


model = OpenAIServerModel("tiny", api_base="http://127.0.0.1:8000/v1", api_key="none")
question = {"role": "user", "content": [{"type": "text", "text": "Check the weather in Paris."}]}
print(model([question], tools_to_call_from=[get_weather]).tool_calls)
ToolCallingAgent([get_weather], model, max_steps=2).run("Check the weather in Paris.")
