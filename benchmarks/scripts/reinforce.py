"""After pytorch/examples reinforcement_learning: episodes of any length, a loss over all of their actions."""

import random

import torch
from common import SIZE, iterations, tell, tell_bits
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(543)
choose = random.Random(543)
WIDTH = 256 * SIZE
policy = nn.Sequential(
    nn.Linear(WIDTH, WIDTH), nn.Dropout(0.6), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2)
)
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
for index in iterations(16):
    log_probs, rewards = [], []
    state = torch.randn(1, WIDTH)
    for _ in range(choose.randint(4, 12)):
        chances = Categorical(logits=policy(state))
        action = chances.sample()
        log_probs.append(chances.log_prob(action))
        rewards.append(choose.random())
        state = torch.roll(state, int(action) + 1)
    returns = torch.tensor([sum(rewards[i:]) for i in range(len(rewards))])
    returns = (returns - returns.mean()) / (returns.std() + 1e-8)
    optimizer.zero_grad()
    loss = torch.cat([-log_prob * own for log_prob, own in zip(log_probs, returns, strict=True)]).sum()
    loss.backward()
    optimizer.step()
    tell(index, loss)
tell_bits(policy)
