"""The model families, one file each, as `shared.diffusion.loading.models.ModelAdapter` requires."""
