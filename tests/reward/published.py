"""The networks of HPSv2 and ImageReward as their authors name and compute them, in few lines.

They are what a converted folder is held against: written from the papers, not with transformers.
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.reward.tiny_scorers import BLIP_WIDTH, PATCH, SIDE, WIDTH

HIDDEN, HEADS, LAYERS, INNER = 32, 2, 2, 64
POSITIONS = (SIDE // PATCH) ** 2 + 1


class ClipBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attn = nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)
        self.mlp = nn.Sequential(
            OrderedDict(
                c_fc=nn.Linear(HIDDEN, INNER), gelu=nn.GELU(), c_proj=nn.Linear(INNER, HIDDEN)
            )
        )

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        normed = self.ln_1(x)
        x = x + self.attn(normed, normed, normed, need_weights=False, attn_mask=mask)[0]
        seen: Tensor = x + self.mlp(self.ln_2(x))
        return seen


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(ClipBlock() for _ in range(LAYERS))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.resblocks:
            x = block(x, mask)
        return x


class ClipVision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.class_embedding = nn.Parameter(torch.empty(HIDDEN))
        self.positional_embedding = nn.Parameter(torch.empty(POSITIONS, HIDDEN))
        self.proj = nn.Parameter(torch.empty(HIDDEN, WIDTH))
        self.conv1 = nn.Conv2d(3, HIDDEN, PATCH, PATCH, bias=False)
        self.ln_pre, self.ln_post = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.transformer = Blocks()

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.conv1(pixels).flatten(2).transpose(1, 2)
        first = self.class_embedding.expand(len(pixels), 1, HIDDEN)
        x = self.ln_pre(torch.cat([first, patches], 1) + self.positional_embedding)
        seen: Tensor = self.ln_post(self.transformer(x)[:, 0]) @ self.proj
        return seen


class OpenClip(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.visual = ClipVision()
        self.transformer = Blocks()
        self.token_embedding = nn.Embedding(vocabulary, HIDDEN)
        self.positional_embedding = nn.Parameter(torch.empty(77, HIDDEN))
        self.ln_final = nn.LayerNorm(HIDDEN)
        self.text_projection = nn.Parameter(torch.empty(HIDDEN, WIDTH))
        self.logit_scale = nn.Parameter(torch.tensor(4.6))

    def of_text(self, tokens: Tensor) -> Tensor:
        """Tokens (1, n), of which the last marks the end."""
        n = tokens.shape[1]
        mask = torch.full((n, n), float("-inf")).triu(1)
        x = self.token_embedding(tokens) + self.positional_embedding[:n]
        read: Tensor = self.ln_final(self.transformer(x, mask))[:, -1] @ self.text_projection
        return read

    def cosine(self, pixels: Tensor, tokens: Tensor) -> float:
        return float(functional.cosine_similarity(self.visual(pixels), self.of_text(tokens)))


class BlipAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(BLIP_WIDTH, 3 * BLIP_WIDTH)
        self.proj = nn.Linear(BLIP_WIDTH, BLIP_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, dim=-1)
        heads = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(*heads)
        seen: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return seen


class BlipBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(BLIP_WIDTH, eps=1e-6)
        self.norm2 = nn.LayerNorm(BLIP_WIDTH, eps=1e-6)
        self.attn = BlipAttention()
        self.mlp = nn.Sequential(
            OrderedDict(
                fc1=nn.Linear(BLIP_WIDTH, INNER), act=nn.GELU(), fc2=nn.Linear(INNER, BLIP_WIDTH)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        seen: Tensor = x + self.mlp(self.norm2(x))
        return seen


class BlipVision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.empty(1, 1, BLIP_WIDTH))
        self.pos_embed = nn.Parameter(torch.empty(1, POSITIONS, BLIP_WIDTH))
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, BLIP_WIDTH, PATCH, PATCH)})
        self.blocks = nn.ModuleList(BlipBlock() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(BLIP_WIDTH, eps=1e-6)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.patch_embed["proj"](pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(pixels), -1, -1), patches], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        seen: Tensor = self.norm(x)
        return seen
