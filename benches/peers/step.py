"""PyTorch's training step on the CPU, for benches/step.rs: forward, backward, SGD with Nesterov momentum.

usage: step.py MODEL BATCH ROUNDS THREADS      MODEL: lenet | resnet18
Prints one line of JSON: the median images/s in PyTorch's default layout and in channels_last.
"""

import json
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F


class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class Block(nn.Module):
    def __init__(self, i, o, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o)
        self.conv2, self.bn2 = nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o)
        project = stride != 1 or i != o
        self.shortcut = (
            nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o)) if project else nn.Identity()
        )

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


def resnet18():
    layers, i = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()], 64
    for o, stride in [(64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)]:
        layers.append(Block(i, o, stride))
        i = o
    return nn.Sequential(*layers, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(512, 10))


def main():
    name, batch, rounds, threads = sys.argv[1], *map(int, sys.argv[2:5])
    torch.set_num_threads(threads)
    result = {}
    for layout in ["nchw", "channels_last"]:
        torch.manual_seed(0)
        model = LeNet() if name == "lenet" else resnet18()
        x, y = torch.randn(batch, 3, 32, 32), torch.arange(batch) % 10
        if layout == "channels_last":
            model, x = (t.to(memory_format=torch.channels_last) for t in (model, x))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4)
        times = []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            times.append(time.perf_counter() - start)
        result[layout] = batch / statistics.median(times[1:])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
