"""LangChain: an agent of LangGraph over OpenAI's or Anthropic's API, and a streamed answer."""

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

URL = "http://127.0.0.1:8000"


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"21 degrees and sunny in {city}"


chat = ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model="tiny", stream_usage=True)
claude = ChatAnthropic(base_url=URL, api_key="none", model="tiny", max_tokens=200)
for model in (chat, claude):
    agent = create_agent(model, tools=[get_weather])
    talk = agent.invoke({"messages": [("user", "Check the weather in Paris.")]})
    print(talk["messages"][-1].content)
for chunk in chat.stream("What is the capital of France?"):
    print(chunk.content, chunk.usage_metadata or "")
