"""The model families, a file each: what `shared.diffusion.models.ModelAdapter` asks of them."""
