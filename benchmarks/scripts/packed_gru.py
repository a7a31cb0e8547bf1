"""A bidirectional GRU over packed sequences of random lengths: another number of ops in each step."""

import random

import torch
from common import SIZE, iterations, tell, tell_bits
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

torch.manual_seed(1)
choose = random.Random(2)
embed, gru, last = (
    nn.Embedding(3000, 128 * SIZE),
    nn.GRU(128 * SIZE, 256 * SIZE, 2, batch_first=True, bidirectional=True),
    nn.Linear(512 * SIZE, 20),
)
parameters = [*embed.parameters(), *gru.parameters(), *last.parameters()]
optimizer = torch.optim.Adam(parameters, lr=1e-3)
for index in iterations(12):
    lengths = sorted([choose.randint(5, 40) for _ in range(16)], reverse=True)
    words = torch.randint(0, 3000, (16, lengths[0]))
    outputs, _ = pad_packed_sequence(gru(pack_padded_sequence(embed(words), lengths, batch_first=True))[0], True)
    loss = nn.functional.cross_entropy(last(outputs.mean(1)), torch.randint(0, 20, (16,)))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    tell(index, loss)
tell_bits(embed, gru, last)
