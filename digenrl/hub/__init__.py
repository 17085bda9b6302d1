"""Downloads from the Hugging Face hub, and uploads to it."""
