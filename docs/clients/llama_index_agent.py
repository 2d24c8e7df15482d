"""LlamaIndex: an agent with a function."""

import asyncio

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike


def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"21 degrees and sunny in {city}"


async def main() -> None:
    """Run the agent."""
    llm = OpenAILike(
        model="tiny", api_base="http://127.0.0.1:8000/v1", api_key="none",
        is_chat_model=True, is_function_calling_model=True, context_window=2048,
    )  # fmt: skip
    agent = FunctionAgent(tools=[get_weather], llm=llm, system_prompt="Use tools.")
    print(await agent.run("Check the weather in Paris."))


asyncio.run(main())
