"""Pydantic AI: an agent with a tool, and one with an output type."""

from pydantic import BaseModel, Field
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Weather(BaseModel):
    city: str = Field(max_length=20)
    degrees: int = Field(ge=-50, le=50)


provider = OpenAIProvider(base_url="http://127.0.0.1:8000/v1", api_key="none")
model = OpenAIChatModel("tiny", provider=provider)
agent = Agent(model)


@agent.tool_plain
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"21 degrees and sunny in {city}"


print(agent.run_sync("Check the weather in Paris.").output)
print(Agent(model, output_type=Weather).run_sync("Check the weather in Paris.").output)
