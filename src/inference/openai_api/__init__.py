"""OpenAI's routes for outside clients: models, completions, chat completions."""
