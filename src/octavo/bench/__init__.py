"""Benchmarks: what a model or a server delivers, by the definitions that users of vLLM know."""
