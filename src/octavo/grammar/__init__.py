"""Structured output: what a request asks for becomes a grammar, and a grammar the tokens that may come next."""
