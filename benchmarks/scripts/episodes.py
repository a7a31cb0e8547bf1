"""Policy gradients over episodes of 5 to 20 turns, with a network large enough that computing counts."""

import random

import torch
from common import SIZE, iterations, tell, tell_bits
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(1)
choose = random.Random(2)
IN, WIDTH = 512 * SIZE, 768 * SIZE
policy = nn.Sequential(
    nn.Linear(IN, WIDTH), nn.Dropout(0.3), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4)
)
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
for index in iterations(24):
    log_probs, rewards = [], []
    state = torch.randn(16, IN)
    for _ in range(choose.randint(5, 20)):
        chances = Categorical(logits=policy(state))
        action = chances.sample()
        log_probs.append(chances.log_prob(action))
        rewards.append(choose.random())
        state = torch.roll(state, 1, 1) + torch.randn(16, IN) * 0.1
    returns = torch.tensor([sum(rewards[i:]) for i in range(len(rewards))])
    returns = (returns - returns.mean()) / (returns.std() + 1e-8)
    loss = torch.stack([-(log_prob * own).mean() for log_prob, own in zip(log_probs, returns, strict=True)]).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    tell(index, loss)
tell_bits(policy)
