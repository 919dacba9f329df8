"""pytorch/examples gat: attention over a whole graph, NLL on its training nodes. Each rank computes
the graph, and the loss of its share of the nodes."""

import torch
import torch.nn.functional as F
from torch import nn, optim

from multi_gpu_training import MultiGPUTrainingManager

NODES, EPOCHS = 23, 8


class Layer(nn.Module):
    def __init__(self, into, out):
        super().__init__()
        self.W = nn.Parameter(torch.empty(into, out))
        self.a = nn.Parameter(torch.empty(2 * out, 1))
        nn.init.xavier_normal_(self.W)
        nn.init.xavier_normal_(self.a)

    def forward(self, h, adj):
        h = h @ self.W
        n = h.shape[1]
        e = F.leaky_relu(h @ self.a[:n] + (h @ self.a[n:]).T)
        return torch.where(adj > 0, e, -9e15).softmax(1) @ h


class GAT(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = Layer(5, 6), Layer(6, 3)

    def forward(self, h, adj):
        return F.log_softmax(self.two(F.elu(self.one(h, adj)), adj), 1)


def build():
    torch.manual_seed(1)
    return GAT()


def graph():
    g = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (NODES,), generator=g)
    x = torch.randn(NODES, 5, generator=g) + labels[:, None]
    adj = ((torch.rand(NODES, NODES, generator=g) < 0.2) | torch.eye(NODES).bool()).double()
    return x, adj, labels, torch.arange(11), torch.arange(17, 23)


def original(model, device="cpu"):
    x, adj, labels, train, test = graph()
    optimizer = optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
    for _ in range(EPOCHS):
        model.train()
        optimizer.zero_grad()
        loss = F.nll_loss(model(x, adj)[train], labels[train])
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        out = model(x, adj)
        return {"test": F.nll_loss(out[test], labels[test]).item(), "train": loss.item()}


def ported(model, config):
    manager = MultiGPUTrainingManager(config)
    x, adj, labels, train, test = graph()
    optimizer = optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
    trainer = manager.prepare(model, optimizer)
    for _ in range(manager.step, EPOCHS):
        with trainer.step(manager.shard(train)) as nodes:
            loss = trainer.backward(F.nll_loss(model(x, adj)[nodes], labels[nodes]))
    manager.finish()
    model.eval()
    with torch.no_grad():
        out = model(x, adj)
        return {"test": F.nll_loss(out[test], labels[test]).item(), "train": loss.item()}
