"""The OpenAI SDK: a response that follows a schema, then one that refers to it."""

from openai import OpenAI
from pydantic import BaseModel, Field


class Weather(BaseModel):
    city: str = Field(max_length=20)
    degrees: int = Field(ge=-50, le=50)


client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
first = client.responses.parse(model="tiny", input="Weather in Paris?", text_format=Weather)
print(first.output_parsed)
with client.responses.stream(
    model="tiny", input="What is an API?", previous_response_id=first.id
) as stream:
    for event in stream:
        if event.type == "response.output_text.delta":
            print(event.delta, end="", flush=True)
    print(stream.get_final_response().usage)
