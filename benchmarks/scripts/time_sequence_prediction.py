"""After pytorch/examples time_sequence_prediction: two LSTM cells in float64, and LBFGS with a closure."""

import torch
from common import SIZE, iterations, tell, tell_bits
from torch import nn

torch.manual_seed(0)
WIDTH = 51 * SIZE
cells = nn.ModuleList([nn.LSTMCell(1, WIDTH), nn.LSTMCell(WIDTH, WIDTH), nn.Linear(WIDTH, 1)]).double()
wave = torch.sin((torch.arange(60) + torch.randint(-80, 80, (97, 1))).double() / 20)


def loss_of(sequence, targets):
    first, second = (tuple(torch.zeros(len(sequence), WIDTH, dtype=torch.double) for _ in range(2)) for _ in range(2))
    outputs = []
    for x in sequence.split(1, dim=1):
        first = cells[0](x, first)
        second = cells[1](first[0], second)
        outputs.append(cells[2](second[0]))
    return nn.functional.mse_loss(torch.cat(outputs, dim=1), targets)


optimizer = torch.optim.LBFGS(cells.parameters(), lr=0.8, max_iter=4)
for index in iterations(4):

    def closure(index=index):
        optimizer.zero_grad()
        loss = loss_of(wave[3:, :-1], wave[3:, 1:])
        tell(index, loss)
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        tell(index, loss_of(wave[:3, :-1], wave[:3, 1:]))
tell_bits(cells)
