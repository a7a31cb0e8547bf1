"""After pytorch/examples dcgan: two networks, two optimizers, three backward passes an iteration."""

import torch
from common import SIZE, iterations, tell, tell_bits
from torch import nn

NOISE, WIDTH, BATCH = 32, 32 * SIZE, 16


def layer(kind, into, out, *rest):
    return [kind(into, out, 4, *rest, bias=False), nn.BatchNorm2d(out)]


torch.manual_seed(1)
generator = nn.Sequential(
    *layer(nn.ConvTranspose2d, NOISE, WIDTH * 4, 1, 0), nn.ReLU(True),
    *layer(nn.ConvTranspose2d, WIDTH * 4, WIDTH * 2, 2, 1), nn.ReLU(True),
    *layer(nn.ConvTranspose2d, WIDTH * 2, WIDTH, 2, 1), nn.ReLU(True),
    nn.ConvTranspose2d(WIDTH, 3, 4, 2, 1, bias=False), nn.Tanh(),
)  # fmt: skip
discriminator = nn.Sequential(
    nn.Conv2d(3, WIDTH, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
    *layer(nn.Conv2d, WIDTH, WIDTH * 2, 2, 1), nn.LeakyReLU(0.2, inplace=True),
    *layer(nn.Conv2d, WIDTH * 2, WIDTH * 4, 2, 1), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(WIDTH * 4, 1, 4, 1, 0, bias=False), nn.Sigmoid(),
)  # fmt: skip
criterion = nn.BCELoss()
for_discriminator = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
for_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
for index in iterations(14):
    discriminator.zero_grad()
    real = torch.randn(BATCH, 3, 32, 32)
    of_real = criterion(discriminator(real).view(-1), torch.ones(BATCH))
    of_real.backward()
    fake = generator(torch.randn(BATCH, NOISE, 1, 1))
    of_fake = criterion(discriminator(fake.detach()).view(-1), torch.zeros(BATCH))
    of_fake.backward()
    for_discriminator.step()
    generator.zero_grad()
    loss = criterion(discriminator(fake).view(-1), torch.ones(BATCH))
    loss.backward()
    for_generator.step()
    tell(index, of_real.item() + of_fake.item())
    tell(index, loss)
tell_bits(generator, discriminator)
