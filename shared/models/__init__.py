"""Properties of each model family without torch: components, sizes, noise, memory."""
