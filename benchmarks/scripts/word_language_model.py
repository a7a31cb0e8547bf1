"""After pytorch/examples word_language_model: a stacked LSTM, states carried along, clipping, SGD by hand."""

import torch
from common import SIZE, iterations, tell, tell_bits
from torch import nn

TOKENS, WIDTH, SPAN, PARTS, BATCH = 2000, 256 * SIZE, 35, 24, 20

torch.manual_seed(1)
encoder, rnn = nn.Embedding(TOKENS, WIDTH), nn.LSTM(WIDTH, WIDTH, 2, dropout=0.2)
decoder, drop = nn.Linear(WIDTH, TOKENS), nn.Dropout(0.2)
model = nn.ModuleList([encoder, rnn, decoder, drop])
corpus = torch.randint(TOKENS, (SPAN * PARTS + 1, BATCH))
hidden = tuple(torch.zeros(2, BATCH, WIDTH) for _ in range(2))
for index in iterations(20):
    start = index % PARTS * SPAN
    data = corpus[start : start + SPAN]
    targets = corpus[start + 1 : start + SPAN + 1].reshape(-1)
    model.zero_grad()
    hidden = tuple(h.detach() for h in hidden)
    output, hidden = rnn(drop(encoder(data)), hidden)
    loss = nn.functional.cross_entropy(decoder(drop(output)).view(-1, TOKENS), targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-20.0)
    tell(index, loss)
tell_bits(model)
