"""Policy gradients over episodes of 5 to 20 turns, with a network large enough that computing counts."""

import random

import torch
from common import iterations, tell, tell_bits
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(1)
choose = random.Random(2)
policy = nn.Sequential(
    nn.Linear(512, 768), nn.Dropout(0.3), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 4)
)
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
for index in iterations(24):
    log_probs, rewards = [], []
    state = torch.randn(16, 512)
    for _ in range(choose.randint(5, 20)):
        chances = Categorical(logits=policy(state))
        action = chances.sample()
        log_probs.append(chances.log_prob(action))
        rewards.append(choose.random())
        state = torch.roll(state, 1, 1) + torch.randn(16, 512) * 0.1
    returns = torch.tensor([sum(rewards[i:]) for i in range(len(rewards))])
    returns = (returns - returns.mean()) / (returns.std() + 1e-8)
    loss = torch.stack([-(log_prob * own).mean() for log_prob, own in zip(log_probs, returns, strict=True)]).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    tell(index, loss)
tell_bits(policy)
