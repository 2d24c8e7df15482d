"""Instructor: an object from a text."""

import instructor
from pydantic import BaseModel, Field


class User(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


client = instructor.from_provider(
    "openai/tiny", base_url="http://127.0.0.1:8000/v1", api_key="none"
)
question = {"role": "user", "content": "Jason is 25 years old."}
print(client.chat.completions.create(messages=[question], response_model=User))
