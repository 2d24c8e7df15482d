"""Inspect: a task of two samples, `python inspect_task.py`."""

import os

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

os.environ |= {"TINY_BASE_URL": "http://127.0.0.1:8000/v1", "TINY_API_KEY": "none"}
samples = [
    Sample(input="What is the capital of France?", target="Paris"),
    Sample(input="Hello", target="help"),
]
task = Task(dataset=samples, solver=generate(), scorer=includes())
[log] = eval(task, model="openai-api/tiny/tiny", display="none")
print(log.status, log.results.scores[0].metrics["accuracy"].value)
