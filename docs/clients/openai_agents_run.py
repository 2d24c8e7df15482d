"""OpenAI Agents SDK: an agent with a tool over the Responses API."""

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)  # traces go to OpenAI


@function_tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"21 degrees and sunny in {city}"


client = AsyncOpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
model = OpenAIResponsesModel(model="tiny", openai_client=client)
agent = Agent(name="Assistant", instructions="Use tools.", model=model, tools=[get_weather])
print(Runner.run_sync(agent, "Check the weather in Paris.").final_output)
