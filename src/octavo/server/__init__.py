"""The OpenAI-compatible server: what an API process runs. Nothing in here loads torch."""
