"""Structured output: grammars are measured and compiled in bounded processes before an engine sees them."""
