"""How models are asked and scored: prompts, scoring, generation, metrics."""
