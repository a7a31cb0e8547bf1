"""Proximal policy optimization: minibatches of what was collected, which stays for some steps and then is replaced."""

import torch
from common import SIZE, iterations, tell, tell_bits
from torch import Tensor, nn
from torch.distributions import Categorical

torch.manual_seed(7)
NUM_ENVIRONMENTS, HORIZON, NUM_EPOCHS, MINIBATCH = 8, 32, 3, 64
CLIP, DISCOUNT, DECAY = 0.2, 0.99, 0.95
WIDTH = 256 * SIZE


class ActorCritic(nn.Module):
    """A policy and a value on the same convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, 16, 4, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(1152, WIDTH)
        )
        self.policy, self.value = nn.Linear(WIDTH, 6), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Categorical, Tensor]:
        hidden = torch.relu(self.body(x))
        return Categorical(logits=self.policy(hidden)), self.value(hidden).squeeze(-1)


agent = ActorCritic()
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
state = torch.rand(NUM_ENVIRONMENTS, 4, 28, 28)
for index in iterations(6):
    states = torch.zeros(HORIZON, *state.shape)
    actions = torch.zeros(HORIZON, NUM_ENVIRONMENTS, dtype=torch.long)
    log_probs, rewards, values = (torch.zeros(HORIZON, NUM_ENVIRONMENTS) for _ in range(3))
    for step in range(HORIZON):
        with torch.no_grad():
            chances, value = agent(state)
            action = chances.sample()
        states[step], actions[step], values[step] = state, action, value
        log_probs[step] = chances.log_prob(action)
        rewards[step] = (action == state.mean((1, 2, 3)).mul(12).long()).float()
        state = torch.roll(state, 1, 1)
        state[:, 0] = torch.rand(NUM_ENVIRONMENTS, 28, 28)
    advantages, following, latest = torch.zeros_like(rewards), values[-1], torch.zeros(NUM_ENVIRONMENTS)
    for step in reversed(range(HORIZON)):
        latest = rewards[step] + DISCOUNT * following - values[step] + DISCOUNT * DECAY * latest
        advantages[step], following = latest, values[step]
    returns, advantages = (advantages + values).flatten(), advantages.flatten()
    states, actions, log_probs = states.flatten(0, 1), actions.flatten(), log_probs.flatten()
    for _ in range(NUM_EPOCHS):
        for chosen in torch.randperm(HORIZON * NUM_ENVIRONMENTS).split(MINIBATCH):
            chances, value = agent(states[chosen])
            ratio = (chances.log_prob(actions[chosen]) - log_probs[chosen]).exp()
            own = advantages[chosen]
            own = (own - own.mean()) / (own.std() + 1e-8)
            loss = -torch.min(own * ratio, own * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
            loss = loss + 0.5 * (value - returns[chosen]).square().mean() - 0.01 * chances.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    tell(index, loss.item())
tell_bits(agent)
