"""After pytorch/examples vae: two losses in one, an evaluation and samples after each epoch."""

import torch
from common import SIZE, iterations, tell, tell_bits
from torch import nn
from torch.nn import functional

WIDTH = 400 * SIZE


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(784, WIDTH), nn.Linear(WIDTH, 20), nn.Linear(WIDTH, 20)
        self.fc3, self.fc4 = nn.Linear(20, WIDTH), nn.Linear(WIDTH, 784)

    def decode(self, z):
        return torch.sigmoid(self.fc4(functional.relu(self.fc3(z))))

    def forward(self, x):
        h = functional.relu(self.fc1(x.view(-1, 784)))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = mu + torch.randn_like(logvar) * torch.exp(0.5 * logvar)
        return self.decode(z), mu, logvar


def loss_of(x):
    recon, mu, logvar = model(x)
    bce = functional.binary_cross_entropy(recon, x.view(-1, 784), reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


torch.manual_seed(1)
model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for index in iterations(24):
    model.train()
    optimizer.zero_grad()
    loss = loss_of(torch.rand(128, 1, 28, 28))
    loss.backward()
    tell(index, loss.item() / 128)
    optimizer.step()
    if index % 6 == 5:
        model.eval()
        with torch.no_grad():
            tell(index, loss_of(torch.rand(128, 1, 28, 28)))
            tell(index, model.decode(torch.randn(64, 20)).sum())
tell_bits(model)
