"""pytorch/examples time_sequence_prediction: two LSTM cells learn sine waves with LBFGS, all of the
data in each closure, and predict on from there after every step.

Few evaluations, because LBFGS multiplies rounding: a plain loop that adds up two halves of the
batch drifts by 1e-10 in 80 of them."""

import torch
from torch import nn, optim

from multi_gpu_training import MultiGPUTrainingManager

STEPS, WIDTH, FUTURE = 2, 7, 5


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1, self.lstm2 = nn.LSTMCell(1, WIDTH), nn.LSTMCell(WIDTH, WIDTH)
        self.linear = nn.Linear(WIDTH, 1)

    def forward(self, waves, future=0):
        first = second = None
        outputs, parts = [], list(waves.split(1, dim=1))
        for place in range(len(parts) + future):
            first = self.lstm1(parts[place] if place < len(parts) else outputs[-1], first)
            second = self.lstm2(first[0], second)
            outputs.append(self.linear(second[0]))
        return torch.cat(outputs, 1)


def build():
    torch.manual_seed(0)
    return Sequence()


def waves():
    shift = torch.randint(-12, 12, (10, 1), generator=torch.Generator().manual_seed(2))
    return torch.sin((torch.arange(16) + shift) / 4.0)


def original(model, device="cpu"):
    data = waves().to(device)
    inputs, targets = data[3:, :-1], data[3:, 1:]
    test_inputs, test_targets = data[:3, :-1], data[:3, 1:]
    model = model.to(device)
    criterion = nn.MSELoss()
    optimizer = optim.LBFGS(model.parameters(), lr=0.8, max_iter=10)
    for _ in range(STEPS):

        def closure():
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            print(f"loss {loss.item()}")
            loss.backward()
            return loss

        optimizer.step(closure)
        with torch.no_grad():
            predicted = model(test_inputs, future=FUTURE)
            loss = criterion(predicted[:, :-FUTURE], test_targets).item()
            print(f"test loss {loss}")
    return {"loss": loss}


def ported(model, config):
    manager = MultiGPUTrainingManager(config)
    data = waves().to(manager.placement.device)
    test_inputs, test_targets = data[:3, :-1], data[:3, 1:]
    criterion = nn.MSELoss()
    optimizer = optim.LBFGS(model.parameters(), lr=0.8, max_iter=10)
    trainer = manager.prepare(model, optimizer)
    for _ in range(manager.step, STEPS):
        with trainer.step(manager.shard((data[3:, :-1], data[3:, 1:]))) as (inputs, targets):

            def closure():
                optimizer.zero_grad()
                return trainer.backward(criterion(model(inputs), targets))

            optimizer.step(closure)
        with torch.no_grad():
            predicted = model(test_inputs, future=FUTURE)
            loss = criterion(predicted[:, :-FUTURE], test_targets).item()
            manager.log(test_loss=loss)
    manager.finish()
    return {"loss": loss}
