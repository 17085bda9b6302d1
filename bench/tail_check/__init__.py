"""Whether a coarse tail (`sampling.tail`) ranks samples as all steps do."""
