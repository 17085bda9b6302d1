# How near a sample is to the edit that was asked for, from 0 to 1 (docs/editing.md).
import numpy as np


def thicken(ink):
    around = np.pad(ink, 1)
    sides = [around[1:-1, :-2], around[1:-1, 2:], around[:-2, 1:-1], around[2:, 1:-1]]
    return np.maximum(ink, 0.8 * np.maximum.reduce(sides))


def slant(ink):
    return np.concatenate([np.roll(ink[:3], 1, 1), ink[3:5], np.roll(ink[5:], -1, 1)])


def invert(ink):
    return 255 - ink


def score(image, source_images, edit):
    wanted = {"thicken": thicken, "slant": slant, "invert": invert}[edit]
    apart = np.abs(image[..., 0] - wanted(source_images[0][..., 0].astype(float))).mean()
    return np.exp(-apart / 40)
