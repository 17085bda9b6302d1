"""Sampling: conditions, denoising steps, latents and media."""
