"""A recurrent encoder, and a decoder that looks at all of its states: padded sentences, of any length in each batch."""

import random

import torch
from common import SIZE, iterations, tell, tell_bits
from torch import nn

torch.manual_seed(1)
choose = random.Random(1)
BATCH, WIDTH, NUM_WORDS = 128, 160 * SIZE, 500
embed, attend, last = nn.Embedding(NUM_WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, NUM_WORDS)
encode, decode = nn.GRUCell(WIDTH, WIDTH), nn.GRUCell(2 * WIDTH, WIDTH)
model = nn.ModuleList([embed, attend, last, encode, decode])
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for index in iterations(16):
    source = torch.randint(NUM_WORDS, (choose.randint(6, 16), BATCH))
    target = torch.randint(NUM_WORDS, (choose.randint(6, 16), BATCH))
    optimizer.zero_grad()
    hidden, states, logits = torch.zeros(BATCH, WIDTH), [], []
    for words in embed(source):
        hidden = encode(words, hidden)
        states.append(hidden)
    memory = torch.stack(states, 1)
    keys = attend(memory)
    for words in embed(target[:-1]):
        weights = torch.softmax(torch.bmm(keys, hidden.unsqueeze(2)), 1)
        hidden = decode(torch.cat([words, (weights * memory).sum(1)], 1), hidden)
        logits.append(last(hidden))
    loss = nn.functional.cross_entropy(torch.cat(logits), target[1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    tell(index, loss.detach())
tell_bits(model)
