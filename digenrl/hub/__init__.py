"""What is fetched from the Hugging Face hub, and pushed to it."""
