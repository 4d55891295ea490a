"""What a model writes besides its answer, thoughts and calls of tools, told apart as the text comes."""
