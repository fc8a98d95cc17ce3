"""The networks of the accuracy table in PyTorch, written for this repository: the same architectures, parameter names and
order of registration as the public pytorch-cifar definitions. `make_reference.py` computes golden values with them and
`benches/peers/step.py` measures them. NETWORKS maps our registry's names to constructors.
"""

import torch
from torch import nn
from torch.nn import functional as F


def conv(i, o, kernel=1, stride=1, groups=1, bias=False):
    return nn.Conv2d(i, o, kernel, stride, kernel // 2, groups=groups, bias=bias)


def chain(blocks):
    return nn.Sequential(*blocks)


def strides(first, count):
    return [first] + [1] * (count - 1)


def swish(x):
    return x * torch.sigmoid(x)


def pooled(x):
    return x.mean((2, 3))


class Shortcut(nn.Sequential):
    def __init__(self, i, o, stride, needed):
        super().__init__(*([conv(i, o, 1, stride), nn.BatchNorm2d(o)] if needed else []))


class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class MnistNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 10, 5), nn.Conv2d(10, 20, 5)
        self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, 10)

    dropout = 0.5

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = self.conv2(x)
        if self.training and self.dropout > 0:
            x = F.dropout2d(x, self.dropout)
        x = F.relu(F.max_pool2d(x, 2)).flatten(1)
        x = F.relu(self.fc1(x))
        if self.training and self.dropout > 0:
            x = F.dropout(x, self.dropout)
        return self.fc2(x)


class Vgg(nn.Module):
    def __init__(self, stages):
        super().__init__()
        layers, i = [], 3
        for count, o in zip(stages, [64, 128, 256, 512, 512]):
            for _ in range(count):
                layers += [conv(i, o, 3, bias=True), nn.BatchNorm2d(o), nn.ReLU()]
                i = o
            layers.append(nn.MaxPool2d(2))
        self.features, self.classifier = chain(layers), nn.Linear(512, 10)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


class Basic(nn.Module):
    def __init__(self, i, o, stride):
        super().__init__()
        self.conv1, self.bn1 = conv(i, o, 3, stride), nn.BatchNorm2d(o)
        self.conv2, self.bn2 = conv(o, o, 3), nn.BatchNorm2d(o)
        self.shortcut = Shortcut(i, o, stride, stride != 1 or i != o)

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class SqueezeExcite(nn.Module):
    def __init__(self, wide, narrow, activation):
        super().__init__()
        self.se1, self.se2 = nn.Conv2d(wide, narrow, 1), nn.Conv2d(narrow, wide, 1)
        self.activation = activation

    def forward(self, x):
        y = self.activation(self.se1(x.mean((2, 3), keepdim=True)))
        return x * torch.sigmoid(self.se2(y))


class Bottleneck(nn.Module):
    def __init__(self, i, width, o, stride, groups=1, squeeze=0):
        super().__init__()
        self.conv1, self.bn1 = conv(i, width), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3, stride, groups), nn.BatchNorm2d(width)
        if squeeze:
            self.se = SqueezeExcite(width, squeeze, F.relu)
        self.conv3, self.bn3 = conv(width, o), nn.BatchNorm2d(o)
        self.shortcut = Shortcut(i, o, stride, stride != 1 or i != o)

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        if hasattr(self, "se"):
            y = self.se(y)
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class Staged(nn.Module):
    """A stem, `layer1`, `layer2`, …, the mean over the pixels and a linear layer."""

    def __init__(self, stages, features, stem=3, norm=True):
        super().__init__()
        self.conv1 = conv(3, 64, stem)
        if norm:
            self.bn1 = nn.BatchNorm2d(64)
        self.stages = len(stages)
        for index, blocks in enumerate(stages):
            setattr(self, f"layer{index + 1}", chain(blocks))
        self.linear = nn.Linear(features, 10)

    def forward(self, x):
        x = self.conv1(x)
        if hasattr(self, "bn1"):
            x = F.relu(self.bn1(x))
        for index in range(self.stages):
            x = getattr(self, f"layer{index + 1}")(x)
        return self.linear(pooled(x))


def resnet(blocks, bottleneck):
    stages, i = [], 64
    for count, width, first in zip(blocks, [64, 128, 256, 512], [1, 2, 2, 2]):
        stage = []
        for stride in strides(first, count):
            o = 4 * width if bottleneck else width
            stage.append(Bottleneck(i, width, o, stride) if bottleneck else Basic(i, o, stride))
            i = o
        stages.append(stage)
    return Staged(stages, i)


def regnet(blocks, widths, group_width, squeeze):
    stages, i = [], 64
    for count, o, first in zip(blocks, widths, [1, 1, 2, 2]):
        stage = []
        for stride in strides(first, count):
            stage.append(Bottleneck(i, o, o, stride, o // group_width, i // 4 if squeeze else 0))
            i = o
        stages.append(stage)
    return Staged(stages, i)


def resnext(groups, group_width):
    stages, i = [], 64
    for index, first in enumerate([1, 2, 2]):
        width, stage = groups * group_width * 2**index, []
        for stride in strides(first, 3):
            stage.append(Bottleneck(i, width, 2 * width, stride, groups))
            i = 2 * width
        stages.append(stage)
    return Staged(stages, i, stem=1)


class PreAct(nn.Module):
    def __init__(self, i, o, stride, squeeze):
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(i), conv(i, o, 3, stride)
        self.bn2, self.conv2 = nn.BatchNorm2d(o), conv(o, o, 3)
        if stride != 1 or i != o:
            self.shortcut = nn.Sequential(conv(i, o, 1, stride))
        if squeeze:
            self.fc1, self.fc2 = nn.Conv2d(o, o // 16, 1), nn.Conv2d(o // 16, o, 1)

    def forward(self, x):
        y = F.relu(self.bn1(x))
        around = self.shortcut(y) if hasattr(self, "shortcut") else x
        y = self.conv2(F.relu(self.bn2(self.conv1(y))))
        if hasattr(self, "fc1"):
            y = y * torch.sigmoid(self.fc2(F.relu(self.fc1(y.mean((2, 3), keepdim=True)))))
        return y + around


def preact(squeeze):
    stages, i = [], 64
    for o, first in zip([64, 128, 256, 512], [1, 2, 2, 2]):
        stage = []
        for stride in strides(first, 2):
            stage.append(PreAct(i, o, stride, squeeze))
            i = o
        stages.append(stage)
    return Staged(stages, i, norm=squeeze)


class Dual(nn.Module):
    def __init__(self, i, width, o, dense, stride, first):
        super().__init__()
        self.o = o
        self.conv1, self.bn1 = conv(i, width), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3, stride, 32), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = conv(width, o + dense), nn.BatchNorm2d(o + dense)
        self.shortcut = Shortcut(i, o + dense, stride, first)

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y, x, o = self.bn3(self.conv3(y)), self.shortcut(x), self.o
        return F.relu(torch.cat([x[:, :o] + y[:, :o], x[:, o:], y[:, o:]], 1))


def dpn(blocks):
    stages, i = [], 64
    shapes = zip(blocks, [96, 192, 384, 768], [256, 512, 1024, 2048], [16, 32, 24, 128], [1, 2, 2, 2])
    for count, width, o, dense, first in shapes:
        stage = []
        for index, stride in enumerate(strides(first, count)):
            stage.append(Dual(i, width, o, dense, stride, index == 0))
            i = o + (index + 2) * dense
        stages.append(stage)
    return Staged(stages, i)


class Root(nn.Module):
    def __init__(self, parts, width):
        super().__init__()
        self.conv, self.bn = conv(parts * width, width), nn.BatchNorm2d(width)

    def forward(self, *parts):
        return F.relu(self.bn(self.conv(torch.cat(parts, 1))))


class Tree(nn.Module):
    def __init__(self, level, i, o, stride):
        super().__init__()
        self.root = Root(2 if level == 1 else 4, o)
        if level == 2:
            self.level_1, self.prev_root = Tree(1, i, o, stride), Basic(i, o, stride)
        self.left_node = Basic(i if level == 1 else o, o, stride if level == 1 else 1)
        self.right_node = Basic(o, o, 1)

    def forward(self, x):
        before = []
        if hasattr(self, "level_1"):
            before = [self.prev_root(x)]
            x = self.level_1(x)
            before.append(x)
        left = self.left_node(x)
        return self.root(*before, left, self.right_node(left))


class SimpleTree(nn.Module):
    def __init__(self, level, i, o, stride):
        super().__init__()
        self.root = Root(2, o)
        sub = Basic if level == 1 else (lambda *shape: SimpleTree(1, *shape))
        self.left_tree, self.right_tree = sub(i, o, stride), sub(o, o, 1)

    def forward(self, x):
        left = self.left_tree(x)
        return self.root(left, self.right_tree(left))


class Dla(nn.Module):
    def __init__(self, tree):
        super().__init__()
        step = lambda i, o: nn.Sequential(conv(i, o, 3), nn.BatchNorm2d(o), nn.ReLU())
        self.base, self.layer1, self.layer2 = step(3, 16), step(16, 16), step(16, 32)
        self.layer3, self.layer4 = tree(1, 32, 64, 1), tree(2, 64, 128, 2)
        self.layer5, self.layer6 = tree(2, 128, 256, 2), tree(1, 256, 512, 2)
        self.linear = nn.Linear(512, 10)

    def forward(self, x):
        x = self.layer2(self.layer1(self.base(x)))
        return self.linear(pooled(self.layer6(self.layer5(self.layer4(self.layer3(x))))))


class DenseLayer(nn.Module):
    def __init__(self, i):
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(i), conv(i, 128)
        self.bn2, self.conv2 = nn.BatchNorm2d(128), conv(128, 32, 3)

    def forward(self, x):
        y = self.conv1(F.relu(self.bn1(x)))
        return torch.cat([self.conv2(F.relu(self.bn2(y))), x], 1)


class Transition(nn.Module):
    def __init__(self, i):
        super().__init__()
        self.bn, self.conv = nn.BatchNorm2d(i), conv(i, i // 2)

    def forward(self, x):
        return F.avg_pool2d(self.conv(F.relu(self.bn(x))), 2)


class DenseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, i = conv(3, 64, 3), 64
        for index, count in enumerate([6, 12, 24, 16], 1):
            setattr(self, f"dense{index}", chain(DenseLayer(i + 32 * layer) for layer in range(count)))
            i += 32 * count
            if index < 4:
                setattr(self, f"trans{index}", Transition(i))
                i //= 2
        self.bn, self.linear = nn.BatchNorm2d(i), nn.Linear(i, 10)

    def forward(self, x):
        x = self.conv1(x)
        for index in range(1, 5):
            x = getattr(self, f"dense{index}")(x)
            x = getattr(self, f"trans{index}")(x) if index < 4 else F.relu(self.bn(x))
        return self.linear(pooled(x))


class Separable(nn.Module):
    def __init__(self, i, o, stride):
        super().__init__()
        self.conv1, self.bn1 = conv(i, i, 3, stride, i), nn.BatchNorm2d(i)
        self.conv2, self.bn2 = conv(i, o), nn.BatchNorm2d(o)

    def forward(self, x):
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class MobileNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = conv(3, 32, 3), nn.BatchNorm2d(32)
        widths = [32, 64, 128, 128, 256, 256, 512, 512, 512, 512, 512, 512, 1024, 1024]
        halves = [2, 4, 6, 12]
        self.layers = chain(
            Separable(i, o, 2 if index in halves else 1) for index, (i, o) in enumerate(zip(widths, widths[1:]), 1)
        )
        self.linear = nn.Linear(1024, 10)

    def forward(self, x):
        return self.linear(pooled(self.layers(F.relu(self.bn1(self.conv1(x))))))


class Inverted(nn.Module):
    def __init__(self, i, o, expansion, stride):
        super().__init__()
        width, self.stride = expansion * i, stride
        self.conv1, self.bn1 = conv(i, width), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3, stride, width), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = conv(width, o), nn.BatchNorm2d(o)
        self.shortcut = Shortcut(i, o, 1, stride == 1 and i != o)

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return y + self.shortcut(x) if self.stride == 1 else y


class MobileNetV2(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = conv(3, 32, 3), nn.BatchNorm2d(32)
        layers, i = [], 32
        shapes = [(1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]
        for expansion, o, count, first in shapes:
            for stride in strides(first, count):
                layers.append(Inverted(i, o, expansion, stride))
                i = o
        self.layers = chain(layers)
        self.conv2, self.bn2, self.linear = conv(320, 1280), nn.BatchNorm2d(1280), nn.Linear(1280, 10)

    def forward(self, x):
        x = self.layers(F.relu(self.bn1(self.conv1(x))))
        return self.linear(pooled(F.relu(self.bn2(self.conv2(x)))))


class MbConv(nn.Module):
    def __init__(self, i, o, expansion, kernel, stride):
        super().__init__()
        width = expansion * i
        self.expands, self.around = expansion > 1, stride == 1 and i == o
        self.conv1, self.bn1 = conv(i, width), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, kernel, stride, width), nn.BatchNorm2d(width)
        self.se = SqueezeExcite(width, i // 4, swish)
        self.conv3, self.bn3 = conv(width, o), nn.BatchNorm2d(o)

    def forward(self, x):
        y = swish(self.bn1(self.conv1(x))) if self.expands else x
        y = self.se(swish(self.bn2(self.conv2(y))))
        y = self.bn3(self.conv3(y))
        return y + x if self.around else y


class EfficientNet(nn.Module):
    dropout = 0.2

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = conv(3, 32, 3), nn.BatchNorm2d(32)
        layers, i = [], 32
        shapes = [(1, 16, 1, 3, 1), (6, 24, 2, 3, 2), (6, 40, 2, 5, 2), (6, 80, 3, 3, 2), (6, 112, 3, 5, 1)]
        for expansion, o, count, kernel, first in shapes + [(6, 192, 4, 5, 2), (6, 320, 1, 3, 1)]:
            for stride in strides(first, count):
                layers.append(MbConv(i, o, expansion, kernel, stride))
                i = o
        self.layers, self.linear = chain(layers), nn.Linear(320, 10)

    def forward(self, x):
        x = pooled(self.layers(swish(self.bn1(self.conv1(x)))))
        if self.training and self.dropout > 0:
            x = F.dropout(x, self.dropout)
        return self.linear(x)


def branch(*convolutions, pool=False):
    layers = [nn.MaxPool2d(3, 1, 1)] if pool else []
    for i, o, kernel in convolutions:
        layers += [conv(i, o, kernel, bias=True), nn.BatchNorm2d(o), nn.ReLU()]
    return chain(layers)


class Inception(nn.Module):
    def __init__(self, i, one, reduce3, three, reduce5, five, pool):
        super().__init__()
        self.b1 = branch((i, one, 1))
        self.b2 = branch((i, reduce3, 1), (reduce3, three, 3))
        self.b3 = branch((i, reduce5, 1), (reduce5, five, 3), (five, five, 3))
        self.b4 = branch((i, pool, 1), pool=True)

    def forward(self, x):
        return torch.cat([self.b1(x), self.b2(x), self.b3(x), self.b4(x)], 1)


class GoogLeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.pre_layers = branch((3, 192, 3))
        for name, shape in {
            "a3": (192, 64, 96, 128, 16, 32, 32),
            "b3": (256, 128, 128, 192, 32, 96, 64),
            "a4": (480, 192, 96, 208, 16, 48, 64),
            "b4": (512, 160, 112, 224, 24, 64, 64),
            "c4": (512, 128, 128, 256, 24, 64, 64),
            "d4": (512, 112, 144, 288, 32, 64, 64),
            "e4": (528, 256, 160, 320, 32, 128, 128),
            "a5": (832, 256, 160, 320, 32, 128, 128),
            "b5": (832, 384, 192, 384, 48, 128, 128),
        }.items():
            setattr(self, name, Inception(*shape))
        self.linear = nn.Linear(1024, 10)

    def forward(self, x):
        x = F.max_pool2d(self.b3(self.a3(self.pre_layers(x))), 3, 2, 1)
        x = self.e4(self.d4(self.c4(self.b4(self.a4(x)))))
        return self.linear(pooled(self.b5(self.a5(F.max_pool2d(x, 3, 2, 1)))))


def shuffle(x):
    b, c, h, w = x.shape
    return x.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)


class ShuffleBasic(nn.Module):
    def __init__(self, width):
        super().__init__()
        half = width // 2
        self.conv1, self.bn1 = conv(half, half), nn.BatchNorm2d(half)
        self.conv2, self.bn2 = conv(half, half, 3, 1, half), nn.BatchNorm2d(half)
        self.conv3, self.bn3 = conv(half, half), nn.BatchNorm2d(half)

    def forward(self, x):
        around, x = x.chunk(2, 1)
        x = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return shuffle(torch.cat([around, F.relu(self.bn3(self.conv3(x)))], 1))


class ShuffleDown(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        half = o // 2
        self.conv1, self.bn1 = conv(i, i, 3, 2, i), nn.BatchNorm2d(i)
        self.conv2, self.bn2 = conv(i, half), nn.BatchNorm2d(half)
        self.conv3, self.bn3 = conv(i, half), nn.BatchNorm2d(half)
        self.conv4, self.bn4 = conv(half, half, 3, 2, half), nn.BatchNorm2d(half)
        self.conv5, self.bn5 = conv(half, half), nn.BatchNorm2d(half)

    def forward(self, x):
        left = F.relu(self.bn2(self.conv2(self.bn1(self.conv1(x)))))
        right = self.bn4(self.conv4(F.relu(self.bn3(self.conv3(x)))))
        return shuffle(torch.cat([left, F.relu(self.bn5(self.conv5(right)))], 1))


class ShuffleNetV2(nn.Module):
    def __init__(self, *widths):
        super().__init__()
        self.conv1, self.bn1, i = conv(3, 24, 3), nn.BatchNorm2d(24), 24
        for index, (o, count) in enumerate(zip(widths, [3, 7, 3]), 1):
            setattr(self, f"layer{index}", chain([ShuffleDown(i, o)] + [ShuffleBasic(o) for _ in range(count)]))
            i = o
        self.conv2, self.bn2, self.linear = conv(i, widths[3]), nn.BatchNorm2d(widths[3]), nn.Linear(widths[3], 10)

    def forward(self, x):
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.linear(pooled(F.relu(self.bn2(self.conv2(x)))))


class FixedScaleNorm(nn.BatchNorm2d):
    def __init__(self, width):
        super().__init__(width, eps=1e-12, momentum=0.4)
        self.weight.requires_grad = False


class AirbenchGroup(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.conv1, self.norm1 = conv(i, o, 3), FixedScaleNorm(o)
        self.conv2, self.norm2 = conv(o, o, 3), FixedScaleNorm(o)
        for layer in [self.conv1, self.conv2]:
            nn.init.dirac_(layer.weight.data[: layer.weight.shape[1]])

    def forward(self, x):
        x = F.gelu(self.norm1(F.max_pool2d(self.conv1(x), 2)))
        return F.gelu(self.norm2(self.conv2(x)))


class Airbench(nn.Module):
    def __init__(self):
        super().__init__()
        self.whiten = nn.Conv2d(3, 24, 2)
        self.whiten.weight.requires_grad = False
        nn.init.zeros_(self.whiten.bias)
        self.layer1, self.layer2, self.layer3 = AirbenchGroup(24, 64), AirbenchGroup(64, 256), AirbenchGroup(256, 256)
        self.linear = nn.Linear(256, 10, bias=False)

    def forward(self, x):
        x = self.layer3(self.layer2(self.layer1(F.gelu(self.whiten(x)))))
        return self.linear(F.max_pool2d(x, 3).flatten(1)) / 9


NETWORKS = {
    "lenet": LeNet,
    "mnist_net": MnistNet,
    "vgg11": lambda: Vgg([1, 1, 2, 2, 2]),
    "vgg13": lambda: Vgg([2, 2, 2, 2, 2]),
    "vgg16": lambda: Vgg([2, 2, 3, 3, 3]),
    "vgg19": lambda: Vgg([2, 2, 4, 4, 4]),
    "resnet18": lambda: resnet([2, 2, 2, 2], False),
    "resnet34": lambda: resnet([3, 4, 6, 3], False),
    "resnet50": lambda: resnet([3, 4, 6, 3], True),
    "resnet101": lambda: resnet([3, 4, 23, 3], True),
    "resnet152": lambda: resnet([3, 8, 36, 3], True),
    "regnetx_200mf": lambda: regnet([1, 1, 4, 7], [24, 56, 152, 368], 8, False),
    "regnety_400mf": lambda: regnet([1, 2, 7, 12], [32, 64, 160, 384], 16, True),
    "mobilenetv2": MobileNetV2,
    "resnext29_32x4d": lambda: resnext(32, 4),
    "resnext29_2x64d": lambda: resnext(2, 64),
    "simple_dla": lambda: Dla(SimpleTree),
    "densenet121": DenseNet,
    "preact_resnet18": lambda: preact(False),
    "dpn26": lambda: dpn([2, 2, 2, 2]),
    "dpn92": lambda: dpn([3, 4, 20, 3]),
    "dla": lambda: Dla(Tree),
    "mobilenet": MobileNet,
    "senet18": lambda: preact(True),
    "shufflenetv2_x0_5": lambda: ShuffleNetV2(48, 96, 192, 1024),
    "shufflenetv2_x1": lambda: ShuffleNetV2(116, 232, 464, 1024),
    "shufflenetv2_x1_5": lambda: ShuffleNetV2(176, 352, 704, 1024),
    "shufflenetv2_x2": lambda: ShuffleNetV2(224, 488, 976, 2048),
    "efficientnet_b0": EfficientNet,
    "googlenet": GoogLeNet,
    "airbench94": Airbench,
}


def image_shape(name):
    """Of one image that the network is made for."""
    return (1, 28, 28) if name == "mnist_net" else (3, 32, 32)
