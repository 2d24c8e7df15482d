"""The model card of the shipped pair, written from the preset and the measured results."""

import platform
from typing import Any

from recipes.tiny.corpus.world import HELD_OUT_SHARE
from recipes.tiny.presets import Preset


def text(
    preset: Preset, measured: dict[str, Any], seconds: dict[str, float], sizes: dict[str, int]
) -> str:
    """Return the card as Markdown.

    Args:
      measured: results.json.
      seconds: of every stage.
      sizes: bytes by file.
    """
    return "\n\n".join(
        (head(preset), data(preset), recipe(preset, seconds), results(measured), files(sizes), END)
    )


def head(preset: Preset) -> str:
    """Return the description of the pair."""
    t, d = preset.target, preset.drafter
    return f"""# tiny: a target and its DFlash drafter

A small language model and the drafter that speeds it up, trained from nothing by this
repository, so that every command, test and notebook works without a download.

* Target: Qwen3 architecture, width {t.width}, {t.layers} layers, {t.heads} query and \
{t.kv_heads} key/value heads of {t.head_dim}, MLP {t.inner}, vocabulary {preset.vocabulary}, \
tied head, bfloat16.
* Drafter: DFlash, {d.layers} layers, blocks of {d.block}, reads target layers \
{", ".join(map(str, d.taps))}, bfloat16; embedding and head are the target's.
* Both folders are laid out as Hugging Face expects them. Licence: Apache-2.0, as the repository."""


def data(preset: Preset) -> str:
    """Return the section about the text and its split."""
    count = sum(phase.conversations for phase in preset.phases)
    characters = max(phase.code_characters for phase in preset.phases)
    return f"""## Data

* {count} synthetic conversations from the seeded generator in \
`recipes/tiny/corpus` (ours): small talk, facts, sums, lists, JSON, short Python functions, and
  agent transcripts with tool calls. About 4 % of the agent's preambles ("Let me check the file:")
  are left without their tool call: the stall that recovery rules have to notice. It happens after
  a tool response that ends with `[output truncated]`.
* {characters} characters of the Python {platform.python_version()} standard library \
(PSF licence).

Held out: a conversation whose opening question has a SHA-256 that starts with a multiple of
{HELD_OUT_SHARE} (1 in {HELD_OUT_SHARE}) is never trained on, nor is any question of such a hash;
nor is one library file in 12, chosen by the hash of its path. `heldout.jsonl` holds \
{preset.held_out_chat} chat and tool
prompts and {preset.held_out_code} openings of source files; the command refuses to go on if one of
them occurs in training text. Held-out prompts come from the same generator: they are new
combinations, not new kinds of questions."""


def recipe(preset: Preset, seconds: dict[str, float]) -> str:
    """Return the section that reproduces the pair."""
    table = "\n".join(f"| {stage} | {value:.0f} |" for stage, value in seconds.items())
    made, second = preset.drafter, preset.drafter.schedule
    steps = ", ".join(
        f"{phase.schedule.steps} with {phase.layers or preset.target.layers} layers"
        for phase in preset.phases
    )
    return f"""## Recipe

    python -m recipes.tiny --out build/tiny --preset {preset.name}

Seed {preset.seed}. The command can be stopped and started again at any time.

1. Byte-level BPE, ChatML markers, chat template.
2. Target: steps {steps}; Muon (matrices) and AdamW (the rest), each phase with a cosine. Layers \
that a phase adds begin as copies that change nothing. The first phase mixes chats, agents and \
code, the second is mostly chats, later ones have more new names.
3. The target answers {made.prompts} training conversations and continues \
{made.text_prompts} pieces of training source, greedily; {preset.transcripts} longer \
transcripts are used as they are.
4. Drafter: {second.steps} steps, peak rate \
{second.rate:g}, about {made.anchors} random anchors a row, cross entropy to the target's own best
   token, slot k weighted exp(-(k-1)/{made.decay:g}), context strictly before the anchor. A slot \
counts as long as the row so far is what the target itself would have written.

| stage | seconds |
| --- | --- |
{table}

Seconds on two CPU cores shared with other work, float32."""


def results(measured: dict[str, Any]) -> str:
    """Return the section with acceptance lengths on held-out prompts."""
    lines = []
    for kind in ("chat", "code"):
        row = measured[kind]
        places = " ".join(f"{share:.2f}" for share in row["accepted_per_position"])
        lines.append(
            f"| {kind} | {row['prompts']} | {row['tokens']} | {row['acceptance_length']:.2f} |"
            f" {places} | {row['full_blocks']:.0%} |"
        )
    table = "\n".join(lines)
    return f"""## Measured

Real speculative decoding with the engine on `heldout.jsonl`, greedy, {measured["dtype"]}, at most \
{measured["max_tokens"]} tokens an answer. Acceptance length is tokens per round, bonus included,
over all rounds; an answer's last round counts what it yielded before the end token cut it.

| prompts | number | tokens | acceptance length | accepted at place 1, 2, ... | full blocks |
| --- | --- | --- | --- | --- | --- |
{table}

`results.json` holds the same figures."""


def files(sizes: dict[str, int]) -> str:
    """Return the table of files."""
    table = "\n".join(f"| `{name}` | {size / 1e6:.2f} MB |" for name, size in sizes.items())
    return f"""## Files

| file | size |
| --- | --- |
{table}

{sum(sizes.values()) / 1e6:.1f} MB in all."""


END = """## Limits

* A demonstration. It knows a few dozen facts and forms of answer and makes mistakes in all of them;
  anything outside its small world gives nonsense. English only.
* Acceptance lengths on template-like text say nothing about large models. Greedy code of so weak a
  model tends to repeat itself, which flatters its figure.
* Trained on sequences up to 1,280 tokens; positions beyond that are untested.
"""
