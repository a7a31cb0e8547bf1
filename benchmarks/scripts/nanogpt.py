"""After karpathy/nanoGPT's train.py: warm-up by hand, accumulation, clipping, groups, evaluations."""

import math

import torch
from common import SIZE, iterations, tell, tell_bits
from torch import nn
from torch.nn import functional

WIDTH, HEADS, DEPTH, CONTEXT, TOKENS, BATCH, PARTS = 128 * SIZE, 4, 3, 64, 512, 4, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x):
        q, k, v = (
            own.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for own in self.attn(self.ln_1(x)).split(WIDTH, dim=2)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).contiguous().view(x.shape))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(TOKENS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.h, self.ln_f = nn.ModuleList([Block() for _ in range(DEPTH)]), nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return functional.cross_entropy(self.lm_head(self.ln_f(x)).view(-1, TOKENS), targets.view(-1))


def get_batch():
    starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,)).tolist()
    return tuple(torch.stack([data[i + more : i + more + CONTEXT] for i in starts]) for more in (0, 1))


torch.manual_seed(1337)
data = torch.randint(TOKENS, (10_000,))
model = GPT()
own = list(model.parameters())
groups = [
    {"params": [p for p in own if p.dim() >= 2], "weight_decay": 0.1},
    {"params": [p for p in own if p.dim() < 2], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95))
batch = get_batch()
for index in iterations(20):
    rate = 6e-4 * min((index + 1) / 5, 0.5 * (1 + math.cos(math.pi * index / 20)))
    for group in optimizer.param_groups:
        group["lr"] = rate
    if index % 5 == 0:
        model.eval()
        with torch.no_grad():
            tell(index, torch.stack([model(*get_batch()) for _ in range(2)]).mean())
        model.train()
    for _ in range(PARTS):
        loss = model(*batch) / PARTS
        batch = get_batch()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    tell(index, loss)
tell_bits(model)
