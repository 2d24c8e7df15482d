"""Haystack: an agent with a tool."""

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"21 degrees and sunny in {city}"


generator = OpenAIChatGenerator(
    model="tiny", api_base_url="http://127.0.0.1:8000/v1", api_key=Secret.from_token("none")
)
agent = Agent(chat_generator=generator, tools=[get_weather])
talk = agent.run([ChatMessage.from_user("Check the weather in Paris.")])
print(talk["messages"][-1].text)
